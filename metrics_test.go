package stint

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func mustMetrics(t testing.TB, c MetricsConfig) *Metrics {
	t.Helper()
	m, err := NewMetrics(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// samples is what a scrape shows: name{label="value",…} → value, empty labels
// left out, histograms as _count and _sum.
type samples map[string]float64

// scrape collects c as a registry would. series counts every line of the text
// format, buckets included.
func scrape(t testing.TB, c prometheus.Collector) (s samples, series int) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	return gather(t, reg)
}

func gather(t testing.TB, g prometheus.Gatherer) (s samples, series int) {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	s = samples{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				if l.GetValue() != "" {
					labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
				}
			}
			suffix := ""
			if labels != nil {
				suffix = "{" + strings.Join(labels, ",") + "}"
			}
			switch h := m.GetHistogram(); {
			case h != nil:
				s[f.GetName()+"_count"+suffix] = float64(h.GetSampleCount())
				s[f.GetName()+"_sum"+suffix] = h.GetSampleSum()
				series += len(h.GetBucket()) + 3 // +Inf, sum, count
			case m.GetCounter() != nil:
				s[f.GetName()+suffix] = m.GetCounter().GetValue()
				series++
			default:
				s[f.GetName()+suffix] = m.GetGauge().GetValue()
				series++
			}
		}
	}
	return s, series
}

func (s samples) check(t testing.TB, name string, want float64) {
	t.Helper()
	if got, ok := s[name]; !ok {
		t.Errorf("%s is absent, want %v", name, want)
	} else if got != want {
		t.Errorf("%s = %v, want %v", name, got, want)
	}
}

// with returns the names of the series that carry a label, sorted.
func (s samples) with(label string) (names []string) {
	for name := range s {
		if strings.Contains(name, label) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (s samples) sum(prefix string) (n float64) {
	for name, v := range s {
		if strings.HasPrefix(name, prefix) {
			n += v
		}
	}
	return n
}

// clientScript is the life of seven requests: 2 successes, 1 retried success, 1
// whose attempts are used up, 1 stopped by the budget, 1 by admission, 1
// cancelled. Ten attempts.
func clientScript(p *peerMetrics, now time.Time) {
	ctx := context.Background()
	for range 2 {
		p.sent(now, 1)
		p.done(ctx, outcomeOK, 1)
	}

	p.sent(now, 1)
	p.budgetUsed(now, 0.25)
	p.sent(now, 2)
	p.done(ctx, outcomeOK, 2)

	p.sent(now, 1)
	p.budgetUsed(now, 0.5)
	p.sent(now, 2)
	p.budgetUsed(now, 0.75)
	p.sent(now, 3)
	p.refused(ReasonAttempts)
	p.done(ctx, outcomeError, 3)

	p.sent(now, 1)
	p.budgetUsed(now, 0.7)
	p.refused(ReasonBudget)
	p.done(ctx, outcomeRefused, 1)

	p.sent(now, 1)
	p.refused(ReasonDeadline)
	p.done(ctx, outcomeDeadline, 1)

	p.sent(now, 1)
	p.refused(ReasonCanceled)
	p.done(ctx, outcomeCanceled, 1)

	p.resent(2)
	p.skewed()
	p.badHeader(stateSyntax)
}

// serverScript is the life of five requests: two in time (one of them a retry),
// one without a header, one that had expired on arrival, one with a broken
// header.
func serverScript(s *serviceMetrics, now time.Time) {
	ctx := context.Background()
	s.arrived(ctx, now, statePresent, 200*time.Millisecond, false)
	s.answered(200)

	s.arrived(ctx, now, stateMultiple, 2*time.Second, true)
	s.answered(404)

	s.arrived(ctx, now, stateAbsent, 30*time.Second, false)
	s.answered(-1)

	s.arrived(ctx, now, statePresent, -20*time.Millisecond, false)
	s.late(20 * time.Millisecond)
	s.refused(ReasonExpired)
	s.exceeded()
	s.answered(504)

	s.arrived(ctx, now, stateSign, 0, false)
	s.skewed()
	s.refused(ReasonInvalid)
	s.answered(400)
}

// Every value of every metric after a fixed script, so that an increment that a
// refactoring doubles or drops shows (prometheus/client_golang#1117).
func TestO35MetricsGolden(t *testing.T) {
	sampled := func(context.Context) prometheus.Labels { return prometheus.Labels{"trace_id": "4bf92f3577b34da6"} }
	for name, c := range map[string]MetricsConfig{
		"plain":             {},
		"exemplars":         {Exemplar: sampled},
		"native":            {NativeHistograms: true},
		"native, exemplars": {NativeHistograms: true, Exemplar: sampled},
	} {
		t.Run(name, func(t *testing.T) {
			m := mustMetrics(t, c)
			now := time.Now()
			clientScript(m.acquirePeer("ledger:8080"), now)
			serverScript(m.service("orders"), now)

			golden, err := os.Open("testdata/metrics.golden")
			if err != nil {
				t.Fatal(err)
			}
			defer golden.Close()
			if err := testutil.CollectAndCompare(m, golden); err != nil {
				t.Error(err)
			}

			s, _ := scrape(t, m)
			const peer = `{peer="ledger:8080"`
			requests, attempts, retries := 7.0, 10.0, 3.0
			s.check(t, "http_client_requests_total"+peer+"}", attempts)
			s.check(t, "stint_client_retries_total"+peer+"}", retries)
			if got := s.sum("stint_client_outcomes_total" + `{outcome=`); got != requests {
				t.Errorf("outcomes add up to %v, want %v: one per request", got, requests)
			}
			if ok, count := s[`stint_client_outcomes_total{outcome="ok",peer="ledger:8080"}`], s["stint_attempts_per_success_count"+peer+"}"]; ok != count {
				t.Errorf("%v samples of attempts per success, want one per success: %v", count, ok)
			}
			if got, want := s.sum(`stint_deadline_headers_total{service="orders"`), s.sum(`http_server_requests_total{`); got != want {
				t.Errorf("header states add up to %v, want one per answer: %v", got, want)
			}
		})
	}
}

func TestS12MetricNames(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	m.acquirePeer("p")
	m.service("s")
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(m)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		labels := map[string]bool{}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = true
			}
		}
		var names []string
		for l := range labels {
			names = append(names, l)
		}
		slices.Sort(names)
		got = append(got, fmt.Sprintf("%s{%s}", f.GetName(), strings.Join(names, ",")))
	}
	want := []string{
		"deadline_exceeded_total{peer,service,side}",
		"deadline_header_present_ratio{service}",
		"http_client_requests_total{peer}",
		"http_server_requests_total{code,service}",
		"retry_amplification_factor{peer}",
		"retry_budget_exhausted_total{peer}",
		"retry_budget_utilisation{peer}",
		"stint_attempts_per_success{peer}",
		"stint_client_outcomes_total{outcome,peer}",
		"stint_client_retries_total{peer}",
		"stint_client_retry_successes_total{peer}",
		"stint_clock_skew_total{peer,service,side}",
		"stint_deadline_headers_total{service,state}",
		"stint_deadline_late_seconds{service}",
		"stint_deadline_remaining_seconds{service}",
		"stint_hedge_wins_total{peer}",
		"stint_hedges_total{peer}",
		"stint_refused_total{peer,reason,service}",
		"stint_server_retries_total{service}",
		"stint_transparent_resends_total{peer}",
	}
	if !slices.Equal(got, want) {
		t.Errorf("names and labels:\n got %q\nwant %q", got, want)
	}
	problems, err := testutil.CollectAndLint(m)
	if err != nil || len(problems) > 0 {
		t.Errorf("CollectAndLint: %v %v", problems, err)
	}
}

// Each descriptor is announced, and each series belongs to one that is. The
// pedantic registry checks the second.
func TestMetricsDescribe(t *testing.T) {
	describe := func(c MetricsConfig) (descs []string) {
		m := mustMetrics(t, c)
		ch := make(chan *prometheus.Desc, 100)
		m.Describe(ch)
		close(ch)
		for d := range ch {
			descs = append(descs, d.String())
		}
		return descs
	}
	plain := describe(MetricsConfig{})
	if len(plain) != 20 {
		t.Errorf("%d descriptors, want 20", len(plain))
	}
	other := describe(MetricsConfig{NativeHistograms: true, Exemplar: func(context.Context) prometheus.Labels { return nil }})
	if !slices.Equal(plain, other) {
		t.Error("descriptors depend on more than the namespace")
	}
	for _, d := range describe(MetricsConfig{Namespace: "shop"}) {
		if !strings.Contains(d, `fqName: "shop_`) {
			t.Errorf("no namespace: %s", d)
		}
	}
}

func TestMetricsNamespace(t *testing.T) {
	for ns, ok := range map[string]bool{
		"": true, "a": true, "_": true, "Shop_2": true,
		"2shop": false, "my-shop": false, "my.shop": false, "my:shop": false, "shöp": false, "a b": false, "\xff": false, "a\n": false,
	} {
		m, err := NewMetrics(MetricsConfig{Namespace: ns})
		if ok {
			if err != nil {
				t.Errorf("Namespace %q: %v", ns, err)
			}
			continue
		}
		var bad *ConfigError
		if !errors.As(err, &bad) || bad.Field != "MetricsConfig.Namespace" || bad.Value != ns || m != nil {
			t.Errorf("Namespace %q: got %v, %v, want a *ConfigError for MetricsConfig.Namespace", ns, m, err)
		}
	}
}

// constants returns the values of all constants of a type in a file of this
// package, from its source: a new constant that is not in the sets of label
// values is one that is never counted.
func constants(t *testing.T, file, typ string) (values []string) {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			if id, ok := v.Type.(*ast.Ident); !ok || id.Name != typ {
				continue
			}
			for _, e := range v.Values {
				s, err := strconv.Unquote(e.(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				values = append(values, s)
			}
		}
	}
	if len(values) == 0 {
		t.Fatalf("no constants of type %s in %s", typ, file)
	}
	return values
}

// No refusal is silent: each reason there is has a series, at 0 before the first
// of them and at 1 after it.
func TestS29EveryReasonIsCounted(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	p, sv := m.acquirePeer("p"), m.service("s")
	reasons := constants(t, "hook.go", "Reason")
	if got, want := len(clientReasons)+len(serverReasons), len(reasons); got != want {
		t.Errorf("%d reasons are counted, want all %d", got, want)
	}
	series := func(r string) string {
		if slices.Contains(serverReasons[:], Reason(r)) {
			return fmt.Sprintf("stint_refused_total{reason=%q,service=%q}", r, "s")
		}
		return fmt.Sprintf("stint_refused_total{peer=%q,reason=%q}", "p", r)
	}
	before, n := scrape(t, m)
	for _, r := range reasons {
		before.check(t, series(r), 0)
		p.refused(Reason(r))
		sv.refused(Reason(r))
	}
	p.refused("because")
	p.refused("")
	sv.refused("because")
	p.done(context.Background(), "so so", 1)
	p.badHeader("odd")
	p.badHeader(statePresent)
	p.badHeader(stateUntrusted)
	sv.arrived(context.Background(), time.Now(), "odd", 0, false)
	after, n2 := scrape(t, m)
	if n != n2 {
		t.Errorf("unknown values made series: %d, then %d", n, n2)
	}
	for _, r := range reasons {
		after.check(t, series(r), 1)
	}
	after.check(t, `retry_budget_exhausted_total{peer="p"}`, 2) // budget, turn
	after.check(t, `deadline_exceeded_total{peer="p",side="client"}`, 1)
	after.check(t, `deadline_exceeded_total{service="s",side="server"}`, 0) // by exceeded alone
	if got := after.sum("stint_deadline_headers_total"); got != 0 {
		t.Errorf("unknown states were counted: %v", got)
	}
	if got := after.sum("stint_client_outcomes_total"); got != 0 {
		t.Errorf("an unknown outcome was counted: %v", got)
	}
}

func TestMetricsZeroChildren(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	m.acquirePeer("p")
	m.service("s")
	s, _ := scrape(t, m)
	for _, o := range constants(t, "metrics.go", "outcome") {
		s.check(t, fmt.Sprintf("stint_client_outcomes_total{outcome=%q,peer=%q}", o, "p"), 0)
	}
	for _, state := range constants(t, "deadline_header.go", "headerState") {
		s.check(t, fmt.Sprintf("stint_deadline_headers_total{service=%q,state=%q}", "s", state), 0)
	}
	for _, name := range []string{
		`http_client_requests_total{peer="p"}`,
		`stint_client_retries_total{peer="p"}`,
		`stint_client_retry_successes_total{peer="p"}`,
		`stint_transparent_resends_total{peer="p"}`,
		`stint_attempts_per_success_count{peer="p"}`,
		`retry_budget_exhausted_total{peer="p"}`,
		`deadline_exceeded_total{peer="p",side="client"}`,
		`stint_clock_skew_total{peer="p",side="client"}`,
		`http_server_requests_total{code="200",service="s"}`,
		`stint_deadline_remaining_seconds_count{service="s"}`,
		`stint_deadline_late_seconds_count{service="s"}`,
		`stint_server_retries_total{service="s"}`,
		`deadline_exceeded_total{service="s",side="server"}`,
		`stint_clock_skew_total{service="s",side="server"}`,
		`stint_deadline_headers_total{state="syntax"}`, // of proxies
	} {
		s.check(t, name, 0)
	}
	// Idle gauges are neutral.
	s.check(t, `retry_budget_utilisation{peer="p"}`, 0)
	s.check(t, `retry_amplification_factor{peer="p"}`, 1)
	s.check(t, `deadline_header_present_ratio{service="s"}`, 1)
}

func TestO34EqualSetsShare(t *testing.T) {
	for name, wrap := range map[string]func(prometheus.Registerer) prometheus.Registerer{
		"plain": func(r prometheus.Registerer) prometheus.Registerer { return r },
		"wrapped": func(r prometheus.Registerer) prometheus.Registerer {
			return prometheus.WrapRegistererWithPrefix("x_", r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			reg := prometheus.NewRegistry()
			first := mustMetrics(t, MetricsConfig{})
			if err := wrap(reg).Register(first); err != nil {
				t.Fatal(err)
			}
			// Series of its own do not make a set a different one.
			second := mustMetrics(t, MetricsConfig{NativeHistograms: true})
			second.acquirePeer("p")
			err := wrap(reg).Register(second)
			var already prometheus.AlreadyRegisteredError
			if !errors.As(err, &already) {
				t.Fatalf("second Register: %v, want AlreadyRegisteredError", err)
			}
			shared, ok := already.ExistingCollector.(*Metrics)
			if !ok || shared != first {
				t.Fatalf("ExistingCollector is %T, want the first *Metrics", already.ExistingCollector)
			}
			now := time.Now()
			first.acquirePeer("p").sent(now, 1)
			shared.acquirePeer("p").sent(now, 1)
			s, _ := gather(t, reg)
			prefix := ""
			if name == "wrapped" {
				prefix = "x_"
			}
			s.check(t, prefix+`http_client_requests_total{peer="p"}`, 2)
		})
	}
}

func TestO34DifferentSets(t *testing.T) {
	reg := prometheus.NewRegistry()
	a, b, c := mustMetrics(t, MetricsConfig{}), mustMetrics(t, MetricsConfig{Namespace: "b"}), mustMetrics(t, MetricsConfig{})
	for _, err := range []error{
		reg.Register(a),
		reg.Register(b),
		// An equal set beside the first, told apart by a label of the caller's.
		prometheus.WrapRegistererWithPrefix("c_", reg).Register(c),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	a.acquirePeer("p").sent(now, 1)
	b.acquirePeer("p").sent(now, 2)
	c.acquirePeer("p").sent(now, 2)
	s, _ := gather(t, reg)
	s.check(t, `http_client_requests_total{peer="p"}`, 1)
	s.check(t, `stint_client_retries_total{peer="p"}`, 0)
	s.check(t, `b_http_client_requests_total{peer="p"}`, 1)
	s.check(t, `b_stint_client_retries_total{peer="p"}`, 1)
	s.check(t, `c_stint_client_retries_total{peer="p"}`, 1)
}

// A clash is an error at registration, whoever comes second, and never a broken
// scrape later.
func TestO34ForeignCollector(t *testing.T) {
	const help = "HTTP attempts sent to the peer, retries included."
	for name, foreign := range map[string]prometheus.Collector{
		"other labels": prometheus.NewCounterVec(prometheus.CounterOpts{Name: "http_client_requests_total", Help: help}, []string{"client", "method"}),
		"other help":   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "http_client_requests_total", Help: "Calls."}, []string{"peer"}),
		"other type":   prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "http_client_requests_total", Help: help}, []string{"peer"}),
		"same":         prometheus.NewCounterVec(prometheus.CounterOpts{Name: "http_client_requests_total", Help: help}, []string{"peer"}),
		"a gauge's name": prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "retry_amplification_factor", Help: "x",
		}, []string{"peer"}),
	} {
		for _, oursFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, ours first %v", name, oursFirst), func(t *testing.T) {
				reg := prometheus.NewRegistry()
				m := mustMetrics(t, MetricsConfig{})
				first, second := foreign, prometheus.Collector(m)
				if oursFirst {
					first, second = second, first
				}
				if err := reg.Register(first); err != nil {
					t.Fatal(err)
				}
				err := reg.Register(second)
				if err == nil {
					t.Fatal("no error")
				}
				var already prometheus.AlreadyRegisteredError
				if errors.As(err, &already) {
					t.Fatalf("got %v: a foreign collector must not pass for an equal set", err)
				}
				clientScript(m.acquirePeer("p"), time.Now())
				gather(t, reg)
			})
		}
	}
}

func TestO34Concurrent(t *testing.T) {
	const workers, rounds = 8, 200
	reg := prometheus.NewRegistry()
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			m, err := NewMetrics(MetricsConfig{})
			if err != nil {
				t.Error(err)
				return
			}
			var already prometheus.AlreadyRegisteredError
			if err := reg.Register(m); errors.As(err, &already) {
				m = already.ExistingCollector.(*Metrics)
			} else if err != nil {
				t.Error(err)
				return
			}
			held := m.acquirePeer("shared")
			sv := m.service("orders")
			for i := range rounds {
				now := time.Now()
				clientScript(held, now)
				serverScript(sv, now)
				sv.answered(300 + i)
				passing := m.acquirePeer("host-" + strconv.Itoa((w+i)%3))
				clientScript(passing, now)
				m.releasePeer(passing)
				if i%50 == 0 {
					if _, err := reg.Gather(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	s, _ := gather(t, reg)
	const n = workers * rounds
	s.check(t, `http_client_requests_total{peer="shared"}`, 10*n)
	s.check(t, `stint_client_outcomes_total{outcome="ok",peer="shared"}`, 3*n)
	s.check(t, `stint_deadline_headers_total{service="orders",state="present"}`, 2*n)
	s.check(t, `http_server_requests_total{code="400",service="orders"}`, n+workers) // 300+100 once each
	s.check(t, `http_server_requests_total{code="499",service="orders"}`, workers)
	if got := s.with(`peer="host-`); got != nil {
		t.Errorf("released, and still there: %q", got)
	}
}

func TestO34NilAndZero(t *testing.T) {
	for name, m := range map[string]*Metrics{"nil": nil, "zero": {}} {
		t.Run(name, func(t *testing.T) {
			reg := prometheus.NewRegistry()
			if err := reg.Register(m); err != nil {
				t.Fatal(err)
			}
			p, s := m.acquirePeer("p"), m.service("s")
			if p != nil || s != nil {
				t.Fatalf("got %v, %v, want nil", p, s)
			}
			now := time.Now()
			clientScript(p, now)
			serverScript(s, now)
			m.releasePeer(p)
			m.releasePeer(&peerMetrics{})
			if m.labelsFull() {
				t.Error("labelsFull")
			}
			if _, series := gather(t, reg); series != 0 {
				t.Errorf("%d series, want none", series)
			}
		})
	}
}

// The number of series does not depend on what outsiders choose. A peer has 34
// (counters and gauges 25, the histogram 9), a service 48 (20 and 28) and one per
// status code that its handlers answer, at most 502; proxies add 5. That is 4,391
// for 129 peers, and for 65 services with the usual 16 codes each 4,160.
const (
	seriesPerPeer    = 37
	seriesPerService = 48
	seriesOfProxies  = 5
)

func TestO36SeriesAreBounded(t *testing.T) {
	n := 50_000
	if testing.Short() {
		n = 5_000
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	host := func() string {
		b := make([]byte, 1+rnd.IntN(20))
		for i := range b {
			b[i] = byte(rnd.Uint32()) // mostly invalid UTF-8
		}
		return string(b) + ":" + strconv.Itoa(rnd.IntN(65536))
	}
	maxSeries := (maxPeerLabels+1)*seriesPerPeer + seriesOfProxies

	t.Run("held", func(t *testing.T) {
		m := mustMetrics(t, MetricsConfig{})
		now := time.Now()
		for range n {
			m.acquirePeer(host()).sent(now, 1)
		}
		s, series := scrape(t, m)
		if series != maxSeries {
			t.Errorf("%d series, want %d", series, maxSeries)
		}
		s.check(t, `http_client_requests_total{peer="_other"}`, float64(n-maxPeerLabels))
		if got := s.sum("http_client_requests_total"); got != float64(n) {
			t.Errorf("%v attempts counted, want %v", got, n)
		}
	})

	t.Run("released", func(t *testing.T) {
		m := mustMetrics(t, MetricsConfig{})
		now := time.Now()
		for range n {
			p := m.acquirePeer(host())
			p.sent(now, 1)
			m.releasePeer(p)
		}
		if m.labelsFull() {
			t.Error("labels are used up by peers that have gone")
		}
		if _, series := scrape(t, m); series != seriesOfProxies {
			t.Errorf("%d series, want %d", series, seriesOfProxies)
		}
	})

	t.Run("comes and goes", func(t *testing.T) {
		m := mustMetrics(t, MetricsConfig{})
		var held []*peerMetrics
		for range n / 10 {
			if len(held) > 0 && rnd.IntN(200) < len(held) {
				i := rnd.IntN(len(held))
				m.releasePeer(held[i])
				held = slices.Delete(held, i, i+1)
			}
			held = append(held, m.acquirePeer(host()))
		}
		if _, series := scrape(t, m); series > maxSeries {
			t.Errorf("%d series, want at most %d", series, maxSeries)
		}
		for _, p := range held {
			m.releasePeer(p)
		}
		s, _ := scrape(t, m)
		for _, name := range s.with(`peer="`) {
			if !strings.Contains(name, `peer="_other"`) {
				t.Errorf("released, and still there: %s", name)
			}
		}
	})

	t.Run("services", func(t *testing.T) {
		m := mustMetrics(t, MetricsConfig{})
		now := time.Now()
		for range n {
			s := m.service(host())
			s.arrived(context.Background(), now, headerStates[rnd.IntN(len(headerStates))], time.Duration(rnd.Uint64()), true)
			s.answered(rnd.IntN(2000) - 700)
		}
		s, series := scrape(t, m)
		if want := (maxServiceLabels + 1) * (seriesPerService + codeCount); series > want {
			t.Errorf("%d series, want at most %d", series, want)
		}
		if got := s.sum("http_server_requests_total"); got != float64(n) {
			t.Errorf("%v answers counted, want %v", got, n)
		}
		codes := 0
		for _, name := range s.with(`service="_other"`) {
			if strings.HasPrefix(name, "http_server_requests_total") {
				codes++
			}
		}
		if codes < codeCount-1 && !testing.Short() { // -1 alone leads to hijacked, and may not have come up
			t.Errorf("%d codes of _other, want %d", codes, codeCount)
		}
	})
}

func TestMetricsSeriesPerPeerAndService(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	_, empty := scrape(t, m)
	m.acquirePeer("a")
	_, one := scrape(t, m)
	m.acquirePeer("b")
	_, two := scrape(t, m)
	m.service("s")
	_, three := scrape(t, m)
	got := []int{empty, one, two - one, three - two}
	want := []int{0, seriesPerPeer + seriesOfProxies, seriesPerPeer, seriesPerService + 1}
	if !slices.Equal(got, want) {
		t.Errorf("series %v, want %v", got, want)
	}
}

func TestMetricsLabelValue(t *testing.T) {
	long := strings.Repeat("a", 254)
	for in, want := range map[string]string{
		"":                          "",
		"ledger:8080":               "ledger:8080",
		"\xff\xfe":                  "\uFFFD",
		"a\xffb":                    "a\uFFFDb",
		long + "b":                  long + "b",
		long + "bc":                 long + "b",
		long + "é":                  long, // two bytes, of which one would fit
		long[:252] + "\xff" + "b":   long[:252] + "\uFFFD",
		long[:253] + "\xff" + "xyz": long[:253],
	} {
		got := labelValue(in)
		if got != want {
			t.Errorf("labelValue(%q) = %q, want %q", in, got, want)
		}
		if !utf8.ValidString(got) || len(got) > maxLabelBytes {
			t.Errorf("labelValue(%q) = %q: invalid or too long", in, got)
		}
	}
	// Names that become the same label share its series and its slot.
	m := mustMetrics(t, MetricsConfig{})
	a, b := m.acquirePeer("x\xff"), m.acquirePeer("x\xfe\xff")
	if a != b {
		t.Error("two entries with one label")
	}
	m.releasePeer(a)
	if m.acquirePeer("x\xff") != b {
		t.Error("released while another transport held it")
	}
}

func TestMetricsReleaseDeletesSeries(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	now := time.Now()
	kept, served := m.acquirePeer("kept"), m.service("")
	clientScript(kept, now)
	serverScript(served, now)
	before, n := scrape(t, m)

	for _, name := range []string{"gone", ""} {
		a, b := m.acquirePeer(name), m.acquirePeer(name)
		if a != b {
			t.Fatalf("%q: two transports, two entries", name)
		}
		clientScript(a, now)
		m.releasePeer(a)
		s, _ := scrape(t, m)
		if s[`stint_client_retries_total{peer="gone"}`]+s["stint_client_retries_total"] != 3 {
			t.Errorf("%q: gone while the second transport holds it", name)
		}
		m.releasePeer(b)
		after, n2 := scrape(t, m)
		if n != n2 {
			t.Errorf("%q: %d series before, %d after", name, n, n2)
		}
		for series, v := range before {
			if series == `stint_deadline_headers_total{state="syntax"}` {
				continue // badHeader's, which is no peer's
			}
			after.check(t, series, v)
		}

		// Neither a late writer nor one release too many does harm.
		clientScript(a, now)
		m.releasePeer(a)
		again := m.acquirePeer(name)
		m.releasePeer(a)
		s, _ = scrape(t, m)
		if name != "" {
			s.check(t, `http_client_requests_total{peer="gone"}`, 0)
			s.check(t, `stint_client_outcomes_total{outcome="ok",peer="gone"}`, 0)
			s.check(t, `stint_attempts_per_success_count{peer="gone"}`, 0)
			s.check(t, `retry_amplification_factor{peer="gone"}`, 1)
			s.check(t, `retry_budget_utilisation{peer="gone"}`, 0)
		} else {
			s.check(t, `http_client_requests_total`, 0)
		}
		m.releasePeer(again)
	}
}

func TestMetricsLabelSlots(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	literal := m.acquirePeer("_other")
	var held []*peerMetrics
	for i := range maxPeerLabels {
		if m.labelsFull() {
			t.Fatalf("full after %d", i)
		}
		held = append(held, m.acquirePeer("host-"+strconv.Itoa(i)))
	}
	if !m.labelsFull() {
		t.Fatal("not full")
	}
	over := m.acquirePeer("one more")
	if over != literal || over.name != "_other" {
		t.Fatalf("peer %d is counted under %q", maxPeerLabels+1, over.name)
	}
	if m.acquirePeer("host-3") != held[3] {
		t.Error("a known peer lost its label")
	}
	m.releasePeer(held[3])
	if !m.labelsFull() {
		t.Error("a slot is free that is held twice")
	}
	m.releasePeer(over)
	m.releasePeer(literal)
	m.releasePeer(held[5])
	if m.labelsFull() {
		t.Error("full after a release")
	}
	if p := m.acquirePeer("one more"); p == over || p.name != "one more" {
		t.Errorf("counted under %q with a slot free", p.name)
	}
	s, _ := scrape(t, m)
	s.check(t, `http_client_requests_total{peer="_other"}`, 0)
	if got := s.with(`peer="host-5"`); got != nil {
		t.Errorf("still there: %q", got)
	}

	first, again, other := m.service("s"), m.service("s"), m.service("t")
	if first != again || first == other {
		t.Error("services are not told apart by name")
	}
}

func TestMetricsExemplar(t *testing.T) {
	type key struct{}
	var asked []any
	labels := map[string]prometheus.Labels{
		"ok":        {"trace_id": "4bf92f35"},
		"dotted":    {"trace.id": "4bf92f35"},
		"nil":       nil,
		"empty":     {},
		"long":      {"t": strings.Repeat("é", 128)},
		"just":      {"t": strings.Repeat("é", 127)},
		"bad value": {"t": "\xff"},
		"bad name":  {"\xff": "1"},
		"no name":   {"": "1"},
		"reserved":  {"__t": "1"},
	}
	for name, l := range labels {
		t.Run(name, func(t *testing.T) {
			for _, native := range []bool{false, true} {
				m := mustMetrics(t, MetricsConfig{NativeHistograms: native, Exemplar: func(ctx context.Context) prometheus.Labels {
					asked = append(asked, ctx.Value(key{}))
					return l
				}})
				ctx := context.WithValue(context.Background(), key{}, name)
				asked = nil
				m.acquirePeer("p").done(ctx, outcomeOK, 1)
				m.acquirePeer("p").done(ctx, outcomeError, 1)
				m.service("s").arrived(ctx, time.Now(), statePresent, time.Second, false)
				m.service("s").arrived(ctx, time.Now(), stateAbsent, 0, false)
				m.service("s").late(time.Second)
				if len(asked) != 2 || asked[0] != name || asked[1] != name {
					t.Errorf("asked %v, want twice with the request's context", asked)
				}
				reg := prometheus.NewPedanticRegistry()
				reg.MustRegister(m)
				families, err := reg.Gather()
				if err != nil {
					t.Fatal(err)
				}
				exemplars, counts := 0, uint64(0)
				for _, f := range families {
					for _, m := range f.GetMetric() {
						counts += m.GetHistogram().GetSampleCount()
						for _, b := range m.GetHistogram().GetBucket() {
							if e := b.GetExemplar(); e != nil {
								exemplars++
								if l := e.GetLabel(); len(l) != 1 {
									t.Errorf("labels %v", l)
								}
							}
						}
					}
				}
				want := 0
				if name == "ok" || name == "just" || name == "dotted" {
					want = 2
				}
				if exemplars != want || counts != 3 {
					t.Errorf("native %v: %d exemplars on %d observations, want %d on 3", native, exemplars, counts, want)
				}
			}
		})
	}
}

func TestMetricsNativeHistograms(t *testing.T) {
	for _, native := range []bool{false, true} {
		m := mustMetrics(t, MetricsConfig{NativeHistograms: native})
		serverScript(m.service("s"), time.Now())
		clientScript(m.acquirePeer("p"), time.Now())
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(m)
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			h := f.GetMetric()[0].GetHistogram()
			if h == nil {
				continue
			}
			if got := len(h.GetPositiveSpan()) > 0; got != native {
				t.Errorf("%s: native buckets %v, want %v", f.GetName(), got, native)
			}
			if len(h.GetBucket()) == 0 {
				t.Errorf("%s: no classic buckets", f.GetName())
			}
		}
	}
}

func TestMetricsRemaining(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	s := m.service("s")
	now := time.Now()
	for _, state := range headerStates {
		s.arrived(context.Background(), now, state, time.Second, false)
	}
	s.arrived(context.Background(), now, statePresent, math.MinInt64, false)
	s.late(-time.Hour)
	got, _ := scrape(t, m)
	got.check(t, `stint_deadline_remaining_seconds_count{service="s"}`, 5) // four usable states and the late one
	got.check(t, `stint_deadline_remaining_seconds_sum{service="s"}`, 4)
	got.check(t, `stint_deadline_late_seconds_sum{service="s"}`, 0)
	got.check(t, `deadline_header_present_ratio{service="s"}`, 5.0/12)
}

func TestMetricsCodes(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	s := m.service("s")
	for _, code := range []int{100, 200, 200, 299, 599, 99, 600, 0, -2, math.MaxInt, math.MinInt, -1, -1} {
		s.answered(code)
	}
	got, _ := scrape(t, m)
	for code, want := range map[string]float64{"100": 1, "200": 2, "299": 1, "599": 1, "other": 6, "hijacked": 2} {
		got.check(t, fmt.Sprintf("http_server_requests_total{code=%q,service=%q}", code, "s"), want)
	}
	if names := got.with("code="); len(names) != 6 {
		t.Errorf("codes: %q", names)
	}
}

// The gauges on the fake clock, through a scrape: full while the events are less
// than a minute old, neutral after 65 s, however often anybody looks.
func TestMetricsGaugesForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := mustMetrics(t, MetricsConfig{})
		p, s := m.acquirePeer("p"), m.service("s")
		for i := range 4 {
			now := time.Now()
			p.sent(now, 1)
			if i == 0 {
				p.sent(now, 2)
			}
			s.arrived(context.Background(), now, []headerState{statePresent, stateUntrusted, stateAbsent, stateSyntax}[i], 0, false)
		}
		p.budgetUsed(time.Now(), 0.9)
		p.budgetUsed(time.Now(), 0.1)
		look := func(utilisation, amplification, ratio float64) {
			t.Helper()
			got, _ := scrape(t, m)
			got.check(t, `retry_budget_utilisation{peer="p"}`, utilisation)
			got.check(t, `retry_amplification_factor{peer="p"}`, amplification)
			got.check(t, `deadline_header_present_ratio{service="s"}`, ratio)
		}
		for range 60 {
			look(0.9, 1.25, 0.25)
			time.Sleep(time.Second)
		}
		look(0.9, 1.25, 0.25)
		time.Sleep(5 * time.Second)
		look(0, 1, 1)
		time.Sleep(30 * 24 * time.Hour)
		look(0, 1, 1)
		p.sent(time.Now(), 1)
		p.sent(time.Now(), 2)
		p.budgetUsed(time.Now(), 0.2)
		look(0.2, 2, 1)
		// Counters do not forget.
		got, _ := scrape(t, m)
		got.check(t, `http_client_requests_total{peer="p"}`, 7)
	})
}

func TestMetricsBudgetUsed(t *testing.T) {
	for _, c := range []struct {
		shares []float64
		want   float64
	}{
		{nil, 0},
		{[]float64{0}, 0},
		{[]float64{0.1}, 0.1},
		{[]float64{0.3, 0.8, 0.5}, 0.8},
		{[]float64{1}, 1},
		{[]float64{1.0 / 3}, 0.333333333},
		{[]float64{2, 0.5}, 1},
		{[]float64{math.Inf(1)}, 1},
		{[]float64{-1, math.Inf(-1), math.NaN()}, 0},
		{[]float64{math.NaN(), 0.4, math.NaN()}, 0.4},
		{[]float64{math.SmallestNonzeroFloat64}, 0},
		{[]float64{math.Nextafter(1, 0)}, 1},
	} {
		m := mustMetrics(t, MetricsConfig{})
		p := m.acquirePeer("p")
		for _, share := range c.shares {
			p.budgetUsed(time.Now(), share)
		}
		got, _ := scrape(t, m)
		got.check(t, `retry_budget_utilisation{peer="p"}`, c.want)
	}
}

// Nothing on the path of a request allocates, with or without native
// histograms. Exemplars do.
func TestMetricsAllocations(t *testing.T) {
	for _, native := range []bool{false, true} {
		m := mustMetrics(t, MetricsConfig{NativeHistograms: native})
		p, s := m.acquirePeer("p"), m.service("s")
		ctx, now := context.Background(), time.Now()
		for _, code := range []int{503, 700} {
			s.answered(code)
		}
		for name, f := range map[string]func(){
			"sent":       func() { p.sent(now, 1); p.sent(now, 2) },
			"refused":    func() { p.refused(ReasonCanceled); p.refused("because") },
			"done":       func() { p.done(ctx, outcomeOK, 2); p.done(ctx, outcomeCanceled, 1) },
			"budgetUsed": func() { p.budgetUsed(now, 0.5); now = now.Add(time.Second) },
			"resent":     func() { p.resent(1); p.skewed(); p.badHeader(stateTooMany) },
			"arrived":    func() { s.arrived(ctx, now, statePresent, time.Second, true) },
			"server":     func() { s.refused(ReasonInvalid); s.exceeded(); s.late(time.Second); s.skewed() },
			"answered":   func() { s.answered(200); s.answered(503); s.answered(700) },
		} {
			if n := testing.AllocsPerRun(200, f); n != 0 {
				t.Errorf("native %v, %s: %v allocations, want none", native, name, n)
			}
		}
	}
}

// BenchmarkMetrics is what one request without a retry costs.
// Collect sends all that the vectors hold, each once, and in the order in which a
// registry wants it: of the families that have hundreds of series at any rate.
func TestMetricsCollectInOrder(t *testing.T) {
	m := mustMetrics(t, MetricsConfig{})
	now := time.Now()
	for _, name := range rand.Perm(maxPeerLabels + 3) { // and _other
		clientScript(m.acquirePeer("host-"+strconv.Itoa(name)), now)
	}
	m.releasePeer(m.acquirePeer("host-5"))
	for _, name := range []string{"b", "", "a"} {
		s := m.service(name)
		for _, code := range []int{200, 404, 599, 999, -1} {
			s.answered(code)
		}
		s.refused(ReasonExpired)
	}
	for _, services := range []bool{true, false} {
		if !services { // headers that a transport removed, and no service
			m = mustMetrics(t, MetricsConfig{})
			m.acquirePeer("p").badHeader(stateSyntax)
		}
		ours, theirs := make(chan prometheus.Metric, 1<<14), make(chan prometheus.Metric, 1<<14)
		m.Collect(ours)
		for _, c := range m.collectors {
			c.Collect(theirs)
		}
		close(ours)
		close(theirs)
		missing := make(map[prometheus.Metric]bool)
		for c := range theirs {
			missing[c] = true
		}
		last := make(map[string]string) // by family, the labels of the latest
		for c := range ours {
			d, err := written(c.Write)
			if err != nil {
				t.Fatal(err)
			}
			if d.Gauge != nil {
				continue // no vector's
			}
			if !missing[c] {
				t.Errorf("%v: sent twice, or of no vector", d)
			}
			delete(missing, c)
			var labels string
			for _, l := range d.Label {
				labels += l.GetValue() + "\x00"
			}
			family := c.Desc().String()
			if labels < last[family] && !strings.Contains(family, "stint_deadline_headers_total") {
				t.Errorf("%q comes after %q in %s", labels, last[family], family)
			}
			last[family] = labels
		}
		for c := range missing {
			t.Errorf("%v is not sent", c.Desc())
		}
	}
}

// written returns what a metric writes, whose type is in a module that is not a
// direct dependency.
func written[T any](write func(*T) error) (*T, error) {
	v := new(T)
	return v, write(v)
}

func BenchmarkMetrics(b *testing.B) {
	client := func(ctx context.Context, p *peerMetrics, now time.Time) {
		p.sent(now, 1)
		p.done(ctx, outcomeOK, 1)
		p.budgetUsed(now, 0)
	}
	server := func(ctx context.Context, s *serviceMetrics, now time.Time) {
		s.arrived(ctx, now, statePresent, time.Second, false)
		s.answered(200)
	}
	m := mustMetrics(b, MetricsConfig{})
	p, s := m.acquirePeer("p"), m.service("s")
	ctx, now := context.Background(), time.Now()
	b.Run("client", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			client(ctx, p, now)
		}
	})
	b.Run("client nil", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			client(ctx, nil, now)
		}
	})
	b.Run("server", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			server(ctx, s, now)
		}
	})
	b.Run("client parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				client(ctx, p, now)
			}
		})
	})
	b.Run("server parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				server(ctx, s, now)
			}
		})
	})
	b.Run("refused", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p.refused(ReasonCanceled)
		}
	})
}

func BenchmarkMetricsAcquireRelease(b *testing.B) {
	m := mustMetrics(b, MetricsConfig{})
	for i := range maxPeerLabels - 1 {
		m.acquirePeer(strconv.Itoa(i))
	}
	b.ReportAllocs()
	for b.Loop() {
		m.releasePeer(m.acquirePeer("p"))
	}
}

// BenchmarkMetricsCollect is a scrape of 128 peers without the encoding: Collect
// alone, and as a registry does it.
func BenchmarkMetricsCollect(b *testing.B) {
	m := mustMetrics(b, MetricsConfig{})
	for i := range maxPeerLabels {
		clientScript(m.acquirePeer("host-"+strconv.Itoa(i)), time.Now())
	}
	b.Run("Collect", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			ch := make(chan prometheus.Metric, 8192)
			m.Collect(ch)
		}
	})
	b.Run("Gather", func(b *testing.B) {
		reg := prometheus.NewRegistry()
		reg.MustRegister(m)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := reg.Gather(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
