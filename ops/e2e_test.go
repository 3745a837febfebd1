package ops

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The tests below run examples/storm as a process and a Prometheus that scrapes
// it every second, on the loopback interface. Bounds are wide: the machine may
// be busy, and what the budget promises is proven elsewhere.

// tool returns where a program of Prometheus is. CI has it; others may not.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("%v: install Prometheus 2.42 or later", err)
	}
	return path
}

// TestPromtool runs the unit tests of the rules, as they are and rendered for a
// namespace.
func TestPromtool(t *testing.T) {
	promtool := tool(t, "promtool")
	for _, o := range []Options{{}, {Namespace: "shop", Runbook: "https://example.com/runbook"}} {
		dir := t.TempDir()
		for _, name := range []string{"rules.yml", "rules_test.yml"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(Render(read(t, name), o)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, args := range [][]string{{"check", "rules", "rules.yml"}, {"test", "rules", "rules_test.yml"}} {
			cmd := exec.CommandContext(t.Context(), promtool, args...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%+v: promtool %s: %v\n%s", o, strings.Join(args, " "), err, out)
			}
		}
	}
}

// buildStorm builds the storm once, into a directory that TestMain removes.
var buildStorm = sync.OnceValues(func() (string, error) {
	path := filepath.Join(scratch, "storm")
	out, err := exec.Command("go", "build", "-C", "..", "-o", path, "./examples/storm").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, nil
})

var scratch string

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "stint-ops-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(scratch)
	os.Exit(code)
}

// start runs a program that listens where addr says, and waits until ready
// answers 200. The port is free when it is chosen; if somebody else is quicker,
// the next one is tried.
func start(t *testing.T, ready string, command func(addr string) *exec.Cmd) (base string) {
	t.Helper()
	for try := 1; ; try++ {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()
		var out bytes.Buffer
		cmd := command(addr)
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		exited := make(chan struct{})
		go func() { cmd.Wait(); close(exited) }()
		stop := func() {
			cmd.Process.Signal(syscall.SIGTERM)
			select {
			case <-exited:
			case <-time.After(10 * time.Second):
				cmd.Process.Kill()
				<-exited
			}
		}
		if up(t.Context(), "http://"+addr+ready, exited) {
			t.Cleanup(stop)
			return "http://" + addr
		}
		stop()
		if try == 3 {
			t.Fatalf("%s does not come up:\n%s", cmd.Path, &out)
		}
	}
}

func up(ctx context.Context, url string, exited <-chan struct{}) bool {
	for range 300 {
		if resp, err := get(ctx, url); err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return true
			}
		}
		select {
		case <-exited:
			return false
		case <-time.After(100 * time.Millisecond):
		}
	}
	return false
}

var client = &http.Client{Timeout: 10 * time.Second}

func get(ctx context.Context, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	return client.Do(req)
}

// A fleet is a storm, its users, and a Prometheus.
type fleet struct {
	t                 *testing.T
	storm, prometheus string
	began             time.Time
	firing            []string // as last logged
}

// newFleet starts both. Prometheus evaluates the rules as o renders them.
func newFleet(t *testing.T, o Options, others ...string) *fleet {
	t.Helper()
	if testing.Short() {
		t.Skip("takes minutes")
	}
	prometheus := tool(t, "prometheus")
	storm, err := buildStorm()
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t}
	f.storm = start(t, "/", func(addr string) *exec.Cmd {
		return exec.Command(storm, "-fault", "none", "-serve", "-addr", addr)
	})

	dir := t.TempDir()
	files := map[string]string{
		"rules.yml": Render(read(t, "rules.yml"), o),
		"prometheus.yml": fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [rules.yml]
scrape_configs:
  - job_name: storm
    static_configs: [{targets: [%q]}]
`, strings.TrimPrefix(f.storm, "http://")),
	}
	for _, addr := range others {
		files["prometheus.yml"] += fmt.Sprintf("  - job_name: %q\n    static_configs: [{targets: [%q]}]\n", addr, addr)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f.prometheus = start(t, "/-/ready", func(addr string) *exec.Cmd {
		return exec.Command(prometheus,
			"--config.file="+filepath.Join(dir, "prometheus.yml"),
			"--storage.tsdb.path="+filepath.Join(dir, "data"),
			"--web.listen-address="+addr,
			"--log.level=warn")
	})
	f.began = time.Now()
	return f
}

// set turns one of the storm's switches.
func (f *fleet) set(which, kind string) {
	f.t.Helper()
	resp, err := client.PostForm(f.storm+"/"+which, url.Values{"kind": {kind}})
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		f.t.Fatalf("%s: %s: %s", which, resp.Status, text)
	}
	f.logf("%s", bytes.TrimSpace(text))
}

// logf logs with the seconds since the start.
func (f *fleet) logf(format string, args ...any) {
	f.t.Helper()
	f.t.Logf("%3.0f s  "+format, append([]any{time.Since(f.began).Seconds()}, args...)...)
}

// A sample is one series' value.
type sample struct {
	labels map[string]string
	value  float64
}

func (s sample) String() string { return fmt.Sprintf("%v %.4g", s.labels, s.value) }

// has reports whether the sample has all of labels, which are name=value pairs.
func (s sample) has(labels string) bool {
	for _, pair := range strings.Fields(labels) {
		name, value, _ := strings.Cut(pair, "=")
		if s.labels[name] != value {
			return false
		}
	}
	return true
}

// query asks Prometheus, now.
func (f *fleet) query(expr string) []sample {
	f.t.Helper()
	resp, err := get(f.t.Context(), f.prometheus+"/api/v1/query?query="+url.QueryEscape(expr))
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Error string
		Data  struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		f.t.Fatal(err)
	}
	if answer.Error != "" {
		f.t.Fatalf("%s: %s", expr, answer.Error)
	}
	var samples []sample
	for _, r := range answer.Data.Result {
		v, err := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64)
		if err != nil {
			f.t.Fatal(err)
		}
		samples = append(samples, sample{r.Metric, v})
	}
	return samples
}

// wait asks until done has no complaint.
func (f *fleet) wait(limit time.Duration, done func() (complaint string)) {
	f.t.Helper()
	first, begin := "", time.Now()
	for end := begin.Add(limit); ; time.Sleep(500 * time.Millisecond) {
		complaint := done()
		if complaint == "" {
			if waited := time.Since(begin); waited > limit/2 {
				f.logf("it took %.0f s of %v; at first: %s", waited.Seconds(), limit, first)
			}
			return
		}
		first = cmp.Or(first, complaint)
		if time.Now().After(end) {
			f.t.Fatalf("after %v: %s", limit, complaint)
		}
	}
}

// alerts returns those that are firing, or pending too, as "Name peer" or "Name
// service".
func (f *fleet) alerts(pending bool) (names []string) {
	f.t.Helper()
	expr := `ALERTS{alertstate="firing"}`
	if pending {
		expr = `ALERTS`
	}
	for _, s := range f.query(expr) {
		names = append(names, s.labels["alertname"]+" "+s.labels["peer"]+s.labels["service"])
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// fire waits until all of want fire. None of never may.
func (f *fleet) fire(limit time.Duration, never string, want ...string) {
	f.t.Helper()
	seen := set{}
	f.wait(limit, func() string {
		now := f.alerts(false)
		for _, a := range now {
			if never != "" && regexp.MustCompile(never).MatchString(a) {
				f.t.Fatalf("%s fires", a)
			}
			seen[a] = true
		}
		f.changed(now)
		for _, w := range want {
			if !seen[w] {
				return fmt.Sprintf("%s does not fire; %v do", w, seen)
			}
		}
		return ""
	})
}

// changed logs which alerts have come and gone.
func (f *fleet) changed(now []string) {
	f.t.Helper()
	for _, a := range now {
		if !slices.Contains(f.firing, a) {
			f.logf("  firing   %s", a)
		}
	}
	for _, a := range f.firing {
		if !slices.Contains(now, a) {
			f.logf("  resolved %s", a)
		}
	}
	f.firing = now
}

// TestAlerts breaks the storm in all the ways that the alerts are for, and mends
// it. It logs the course of events that the runbook quotes.
func TestAlerts(t *testing.T) {
	t.Parallel()
	f := newFleet(t, Options{Window: "30s", For: "5s", Offset: "40s"})
	f.wait(20*time.Second, func() string {
		if len(f.query(`job_peer:retry_amplification:ratio_rate30s{peer="database"}`)) == 0 {
			return "nothing is recorded"
		}
		return ""
	})
	time.Sleep(10 * time.Second)
	if got := f.alerts(true); got != nil {
		t.Fatalf("all is well, and %q", got)
	}
	f.logf("all is well, no alert")

	// The budget does what it is for, and says that it is at its end.
	f.set("fault", "outage")
	f.fire(60*time.Second, "Amplification|Deadline|Absent|ledger|orders",
		"RetryBudgetUtilisationHigh database", "RetryBudgetExhausted database")

	// What the runbook says not to do.
	f.set("hop", "lavish")
	f.fire(80*time.Second, "Deadline|Absent|ledger|orders",
		"RetryAmplificationHigh database", "ChainAmplificationHigh database")
	f.set("hop", "guarded")

	// The database runs out of time, and its 504 is at the services above before
	// they do: that is what the reserve is for. It is 3 ms, so on a busy machine
	// they may fire too.
	f.set("fault", "slow")
	f.fire(60*time.Second, "Header|Absent", "DeadlineExceededHigh database")
	f.set("fault", "none")

	f.set("hop", "forgetful")
	f.fire(60*time.Second, "Absent|Missing (ledger|orders|edge)", "DeadlineHeaderMissing database")
	f.set("hop", "guarded")

	f.wait(110*time.Second, func() string {
		f.changed(f.alerts(false))
		if left := f.alerts(true); left != nil {
			return fmt.Sprintf("all is mended, and %q", left)
		}
		return ""
	})
	f.logf("all is well, no alert")
}

// TestPlainHop has a hop that retries without stint. Its metrics say nothing of
// it; those of the services around it do.
func TestPlainHop(t *testing.T) {
	t.Parallel()
	f := newFleet(t, Options{Window: "15s", For: "3s", Offset: "25s"})
	f.set("hop", "plain")
	f.fire(40*time.Second, "Amplification|Budget|Exceeded", "DeadlineHeaderMissing database")
	// What to compare with has to be the past of a plain hop that has nothing to
	// retry.
	time.Sleep(time.Until(f.began.Add(25 * time.Second)))
	f.set("fault", "outage")
	f.fire(60*time.Second, "RetryAmplification|Exceeded", "ChainAmplificationHigh database")

	// S14 in a full outage: there is nothing to divide by, and the runbook has
	// two other queries.
	f.wait(40*time.Second, func() string {
		for _, s := range f.query(s14("database", "edge", "15s")) {
			if !math.IsInf(s.value, 1) && !math.IsNaN(s.value) {
				return fmt.Sprintf("S14 in an outage: %v", s)
			}
		}
		return ""
	})
	f.wait(30*time.Second, func() string {
		got := f.query(`sum(rate(http_server_requests_total{service="database"}[15s])) / sum(rate(http_server_requests_total{service="edge"}[15s]))`)
		if len(got) != 1 || got[0].value < 2.6 || got[0].value > 3.5 {
			return fmt.Sprintf("requests at the database per request of a user: %v, want 3", got)
		}
		f.logf("requests at the database per request of a user: %.2f", got[0].value)
		return ""
	})
}

// s14 is the query of the specification.
func s14(peer, service, window string) string {
	return fmt.Sprintf(`sum(rate(http_client_requests_total{peer=%q}[%s])) / sum(rate(http_server_requests_total{service=%q,code=~"2.."}[%s]))`,
		peer, window, service, window)
}

// testS14 knows the answer: the database answers every other request with a 503,
// so that two attempts go to each success, whoever makes them.
func (f *fleet) testS14() {
	f.wait(40*time.Second, func() string {
		got := f.query(s14("database", "edge", "30s"))
		if len(got) != 1 || got[0].value < 1.8 || got[0].value > 2.2 {
			return fmt.Sprintf("attempts at the database per success of the edge: %v, want 2", got)
		}
		f.logf("attempts at the database per success of the edge: %.2f", got[0].value)
		return ""
	})
}

// A want is what the series of one query have to be: all of them within [0,
// most], and one that has the labels within [low, high].
type want struct {
	most      float64
	labels    string
	low, high float64
}

// wants knows every panel, under a fault by which every other answer of the
// database is a 503, ten users a second, and two more whose requests came 20 ms
// too late.
var wants = map[string][]want{
	"Retry budget in use":                         {{1, "peer=database", 0.5, 1}},
	"Retries refused for want of budget":          {{20, "peer=database", 1, 10}},
	"Requests that run out of time":               {{1, "service=edge", 0.02, 0.5}},
	"Requests at a service per request of a user": {{1.5, "service=database", 0.6, 1.3}},
	"Requests with a deadline":                    {{1, "service=database", 0.99, 1}},
	"Errors answered":                             {{20, "service=database code=503", 2, 8}},
	"Attempts per request":                        {{1.5, "peer=database", 1.005, 1.3}},
	"Attempts at a peer per success of the edge":  {{3, "peer=database", 1.8, 2.2}},
	"Retried requests that ended well":            {{1.5, "peer=database", 0.05, 1.5}},
	"Attempts that a success took":                {{3, "peer=database", 1, 1.5}, {3, "peer=database", 0.9, 3}},
	"Why no further attempt was made":             {{20, "peer=database", 0.01, 10}},
	"Retries among arrivals":                      {{0.5, "service=database", 0.005, 0.3}},
	"Attempts sent":                               {{20, "peer=database", 7, 15}, {5, "peer=database", 0.05, 3}, {0, "peer=database", 0, 0}, {0, "peer=database", 0, 0}}, // nobody hedges
	"How callers' requests ended":                 {{20, "peer=database outcome=ok", 3, 8}},
	"Answers":                                     {{20, "service=edge code=200", 3, 8}},
	"Time left on arrival":                        {{3000, "le=+Inf", 300, 2000}},
	"Time left on arrival, p50 and p1":            {{2, "service=database", 0.25, 1}, {2, "service=database", 0.1, 1}},
	"How late the expired came, p50 and p99":      {{60, "service=edge", 0.01, 0.2}, {60, "service=edge", 0.01, 5}},
	"Callers that run out of time":                {{5, "peer=database", 0, 5}},
	"Refused on arrival":                          {{5, "service=edge reason=expired", 0.5, 4}},
	"Deadline headers":                            {{20, "service=database state=present", 7, 15}},
	"Requests with a key":                         {{20, "service=orders outcome=replayed", 0.5, 20}},
	"Runs whose effect is not known":              {{1, "service=orders", 0.1, 0.9}},
	"Keys taken over":                             {{20, "service=orders", 0.3, 20}},
	"Requests that waited for another one":        {{20, "service=orders", 0.3, 20}},
	"Calls of the store that failed":              {{20, "service=orders op=begin", 0.3, 20}},
	"Time that the store took, p99":               {{5, "service=orders op=begin", 1e-9, 5}},
	"Clocks that are wrong":                       {{1, "side=server service=edge", 0, 1}},
	"Resends by net/http":                         {{0, "peer=database", 0, 0}},
}

// TestPanels queries every panel of the dashboard while the storm runs.
func TestPanels(t *testing.T) {
	t.Parallel()
	f := newFleet(t, Options{}, startOrders(t))
	f.set("fault", "partial")
	go func() {
		for t.Context().Err() == nil {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.storm+"/", nil)
			if err != nil {
				return
			}
			req.Header.Set("X-Request-Deadline", strconv.FormatInt(time.Now().Add(-20*time.Millisecond).UnixMilli(), 10))
			if resp, err := client.Do(req); err == nil {
				resp.Body.Close()
			}
			time.Sleep(500 * time.Millisecond)
		}
	}()
	time.Sleep(35 * time.Second) // a full window of it

	fill := strings.NewReplacer("$__rate_interval", "30s", "$job", ".*", "$peer", ".*", "$service", ".*", "$edge", "edge")
	nth := map[string]int{}
	for _, c := range charts(t) {
		i := nth[c.panel]
		nth[c.panel]++
		if i >= len(wants[c.panel]) {
			t.Errorf("%s, query %d: nobody knows what it should show", c.panel, i)
			continue
		}
		w := wants[c.panel][i]
		// Gauges lag by a minute, and a busy machine may have had a bad moment.
		f.wait(45*time.Second, func() string {
			got := f.query(fill.Replace(c.expr))
			ok := false
			for _, s := range got {
				if !(s.value >= 0 && s.value <= w.most) { // NaN is neither
					return fmt.Sprintf("%s: %v, want at most %v", c.panel, s, w.most)
				}
				ok = ok || s.has(w.labels) && s.value >= w.low && s.value <= w.high
			}
			if !ok {
				return fmt.Sprintf("%s: %v, want %s from %v to %v", c.panel, got, w.labels, w.low, w.high)
			}
			return ""
		})
	}
	for title, ws := range wants {
		if nth[title] != len(ws) {
			t.Errorf("%s: %d queries, want %d", title, nth[title], len(ws))
		}
	}
	t.Run("S14", func(t *testing.T) { f.testS14() })
}
