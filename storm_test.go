package stint

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The ceiling of P1 for 100 requests a second.
const ceiling = 110

func flapping(half time.Duration) []phase {
	phases := []phase{{lasts: 20 * time.Second}}
	for range int(60 * time.Second / (2 * half)) {
		phases = append(phases, phase{lasts: half, fault: failing}, phase{lasts: half})
	}
	return phases
}

// namedFaults are the faults that P1 lists, and some that have a way of their
// own to break a budget.
var namedFaults = []*timeline{
	{name: "healthy", phases: []phase{{lasts: 90 * time.Second}}},
	{name: "outage", phases: []phase{{lasts: 30 * time.Second}, {lasts: 60 * time.Second, fault: failing}}},
	{name: "cold start in an outage", phases: []phase{{lasts: 60 * time.Second, fault: failing}}},
	{name: "flapping 0.3 s", phases: flapping(300 * time.Millisecond)},
	{name: "flapping 1 s", phases: flapping(time.Second)},
	{name: "flapping 5 s", phases: flapping(5 * time.Second)},
	{name: "half failing", phases: []phase{{lasts: 20 * time.Second}, {lasts: 60 * time.Second, fault: partly, share: 0.5}}},
	{name: "5 % failing", phases: []phase{{lasts: 80 * time.Second, fault: partly, share: 0.05}}},
	{name: "resets", phases: []phase{{lasts: 20 * time.Second}, {lasts: 30 * time.Second, fault: resetting, takes: time.Millisecond}, {lasts: 10 * time.Second}, {lasts: time.Second, fault: resetting}}},
	{name: "timeouts", timeout: time.Second, phases: []phase{{lasts: 30 * time.Second}, {lasts: 40 * time.Second, fault: silent}}},
	{name: "stalls that end in failure", timeout: 5 * time.Second, phases: []phase{
		{lasts: 20 * time.Second},
		{lasts: 900 * time.Millisecond, fault: stallFails}, {lasts: 15 * time.Second},
		{lasts: 4 * time.Second, fault: stallFails}, {lasts: 15 * time.Second},
		{lasts: 7 * time.Second, fault: stallFails}, {lasts: 5 * time.Second, fault: failing},
	}},
	{name: "stalls that flush", timeout: 5 * time.Second, phases: []phase{
		{lasts: 20 * time.Second},
		{lasts: 900 * time.Millisecond, fault: stallFlushes}, {lasts: 2 * time.Second, fault: failing}, {lasts: 15 * time.Second},
		{lasts: 4900 * time.Millisecond, fault: stallFlushes}, {lasts: 10 * time.Second},
		{lasts: 4900 * time.Millisecond, fault: stallFlushes}, {lasts: 5 * time.Second}, {lasts: 15 * time.Second, fault: failing},
	}},
	// The answers of the slow minute and those of the fast seconds arrive
	// together: who counts successes alone has half as much again to spend.
	{name: "slow, then fast, then dead", timeout: 10 * time.Second, phases: []phase{
		{lasts: 40 * time.Second, takes: 4900 * time.Millisecond}, {lasts: 5 * time.Second}, {lasts: 30 * time.Second, fault: failing},
	}},
	// Every retry is told to come at the same distance from its failure.
	{name: "busy with Retry-After", phases: []phase{
		{lasts: 20 * time.Second}, {lasts: 3 * time.Second, fault: failing, hint: 2 * time.Second},
		{lasts: 20 * time.Second}, {lasts: 20 * time.Second, fault: partly, share: 0.3, hint: 3 * time.Second},
	}},
}

func wantUnderCeiling(t *testing.T, peer fmt.Stringer, log *stormLog, most int) {
	t.Helper()
	if n, at := peak(log.sent); n > most {
		t.Errorf("%v\n%d attempts in the second up to %v, want at most %d", peer, n, at, most)
	}
}

// TestP1_BudgetAlone (S4) holds the budget to the ceiling in named faults, without
// anything else that might hold retries back: no deadline, no admission.
func TestP1_BudgetAlone(t *testing.T) {
	for _, tl := range namedFaults {
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			worst, retries := 0, 0
			for seed := range uint64(5) {
				log := budgetStorm{peer: tl, lasts: tl.length() + 10*time.Second, seed: seed}.run()
				wantUnderCeiling(t, tl, log, ceiling)
				n, _ := peak(log.sent)
				worst, retries = max(worst, n), len(log.retries)
			}
			t.Logf("peak %d, %d retries", worst, retries)
			if (retries > 0) != (tl.name != "healthy") {
				t.Errorf("%d retries: the peer is not what its name says", retries)
			}
		})
	}
}

// TestP1_BudgetAloneRandom does so for 200 random timelines.
func TestP1_BudgetAloneRandom(t *testing.T) {
	n := uint64(200)
	if raceEnabled || testing.Short() {
		n = 40
	}
	var mu sync.Mutex
	worst, retried := 0, 0
	t.Run("all", func(t *testing.T) {
		for first := range uint64(2) {
			t.Run(strconv.Itoa(int(first)), func(t *testing.T) {
				t.Parallel()
				for seed := first; seed < n; seed += 2 {
					tl := randomTimeline(seed, 90*time.Second)
					log := budgetStorm{peer: tl, lasts: 90 * time.Second, seed: seed}.run()
					wantUnderCeiling(t, tl, log, ceiling)
					p, _ := peak(log.sent)
					mu.Lock()
					worst = max(worst, p)
					if len(log.retries) > 100 {
						retried++
					}
					mu.Unlock()
				}
			})
		}
	})
	t.Logf("%d timelines: peak %d, more than 100 retries in %d", n, worst, retried)
	if retried < int(n)/2 {
		t.Errorf("only %d of %d timelines had a hundred retries: they are too kind to show anything", retried, n)
	}
}

// TestP1_AnyRate states the promise for other rates: at most a tenth more, or
// one retry, in any second.
func TestP1_AnyRate(t *testing.T) {
	for _, rate := range []float64{0.5, 1, 5, 10, 15, 33, 250, 1000} {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			t.Parallel()
			most := max(1, int(math.Ceil(rate/10)))
			for i, tl := range namedFaults {
				if rate > 100 && i%3 > 0 {
					continue // they cost ten times as much and show the same
				}
				log := budgetStorm{peer: tl, lasts: tl.length(), rate: rate, seed: uint64(i)}.run()
				if n, at := peak(log.retries); n > most {
					t.Errorf("%v\n%d retries in the second up to %v, want at most %d", tl, n, at, most)
				}
			}
		})
	}
}

// TestP1_AnyWindow: how far back the budget looks changes nothing in a second.
func TestP1_AnyWindow(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 1050 * time.Millisecond, 3333 * time.Millisecond, time.Minute} {
		t.Run(window.String(), func(t *testing.T) {
			t.Parallel()
			for i, tl := range namedFaults {
				log := budgetStorm{peer: tl, lasts: tl.length(), seed: uint64(i), config: BudgetConfig{Window: window}}.run()
				wantUnderCeiling(t, tl, log, ceiling)
			}
		})
	}
}

// TestP1_LongBackoffs has waits of many seconds between the decision to retry
// and the retry: who charges at the decision pays for one second and spends in
// another.
func TestP1_LongBackoffs(t *testing.T) {
	t.Parallel()
	worst := 0
	for seed := range uint64(20) {
		tl := randomTimeline(1000+seed, 90*time.Second)
		if seed < 10 {
			tl = &timeline{name: "flapping", phases: flapping(time.Duration(seed+1) * 300 * time.Millisecond)}
		}
		log := budgetStorm{
			peer: tl, lasts: 90 * time.Second, seed: seed, retries: 4,
			backoff: Backoff{Base: time.Second, Max: 20 * time.Second},
		}.run()
		wantUnderCeiling(t, tl, log, ceiling)
		n, _ := peak(log.sent)
		worst = max(worst, n)
	}
	t.Logf("peak %d", worst)
}

// TestP1_LateTimers has timers fire up to 40 ms late, each by another amount:
// what turnSlack is for. Turns at exactly the rate's distance would come to lie
// closer together.
func TestP1_LateTimers(t *testing.T) {
	t.Parallel()
	worst := 0
	for seed := range uint64(20) {
		for _, tl := range []*timeline{namedFaults[1], namedFaults[6], namedFaults[8]} {
			log := budgetStorm{peer: tl, lasts: 60 * time.Second, seed: seed, late: 40 * time.Millisecond}.run()
			wantUnderCeiling(t, tl, log, ceiling)
			n, _ := peak(log.sent)
			worst = max(worst, n)
		}
	}
	t.Logf("peak %d", worst)
}

// TestP1_PeakFactor is the price list of the comment at BudgetConfig.PeakFactor:
// the strict ceiling does not rescue all of a blip, 3 does and costs 130.
func TestP1_PeakFactor(t *testing.T) {
	t.Parallel()
	blip := &timeline{name: "blip", phases: []phase{{lasts: 60 * time.Second}, {lasts: 300 * time.Millisecond, fault: failing}}}
	for _, test := range []struct {
		factor        float64
		most          int
		least, utmost float64 // share of the blip's requests that succeed
	}{{1, ceiling, 0.2, 0.8}, {3, 130, 1, 1}} {
		for seed := range uint64(10) {
			// Long enough backoffs to outlast the blip.
			log := budgetStorm{
				peer: blip, lasts: 80 * time.Second, seed: seed, config: BudgetConfig{PeakFactor: test.factor},
				retries: 3, backoff: Backoff{Base: 100 * time.Millisecond, Max: time.Second},
			}.run()
			wantUnderCeiling(t, blip, log, test.most)
			share, n := log.succeeded(60*time.Second, 60*time.Second+300*time.Millisecond)
			if seed == 0 {
				p, _ := peak(log.sent)
				t.Logf("PeakFactor %v: peak %d, %.2f of the blip rescued", test.factor, p, share)
			}
			if n != 30 || share < test.least || share > test.utmost {
				t.Errorf("PeakFactor %v, seed %d: %.2f of %d requests of the blip succeeded, want from %v to %v", test.factor, seed, share, n, test.least, test.utmost)
			}
		}
	}
}

// TestP1_OutageEarnsNothing: what is retried late in an outage is the floor and
// no more. A budget that is a share of all requests goes on paying.
func TestP1_OutageEarnsNothing(t *testing.T) {
	for _, tl := range namedFaults[:3] {
		if tl.name == "healthy" {
			continue
		}
		log := budgetStorm{peer: tl, lasts: tl.length()}.run()
		from := tl.length() - 40*time.Second
		for ; from <= tl.length()-10*time.Second; from += 100 * time.Millisecond {
			if n := between(log.retries, from, from+10*time.Second); n > 3 {
				t.Errorf("%s: %d retries in the 10 s from %v on, want at most 3", tl.name, n, from)
			}
		}
		if n := between(log.retries, tl.length()-40*time.Second, tl.length()); n < 8 {
			t.Errorf("%s: %d retries in the last 40 s, want the floor, at least 8", tl.name, n)
		}
	}
}

// TestP1_Transport holds the whole of Transport to the ceiling, over the named
// faults.
func TestP1_Transport(t *testing.T) {
	for i, tl := range namedFaults {
		t.Run(tl.name, func(t *testing.T) {
			if raceEnabled && i%2 == 0 || testing.Short() && i%3 > 0 {
				t.Skip("one in two under race, one in three with -short")
			}
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				log := storm(t, tl, Config{}, 100, tl.length()+5*time.Second, 0, 1)
				wantUnderCeiling(t, tl, log, ceiling)
				n, _ := peak(log.sent)
				t.Logf("peak %d, %d retries", n, len(log.retries))
				if (len(log.retries) > 0) != (tl.name != "healthy") {
					t.Errorf("%d retries: the peer is not what its name says", len(log.retries))
				}
			})
		})
	}
}

// TestP1_TransportRandom does so for random timelines, half of them with an
// AttemptTimeout, so that the transport itself ends what hangs, or with
// deadlines.
func TestP1_TransportRandom(t *testing.T) {
	n := uint64(20)
	if raceEnabled || testing.Short() {
		n = 5
	}
	for seed := range n {
		t.Run(strconv.Itoa(int(seed)), func(t *testing.T) {
			t.Parallel()
			tl := randomTimeline(2000+seed, 90*time.Second)
			var c Config
			var limit time.Duration
			switch seed % 4 {
			case 1:
				c.AttemptTimeout, tl.timeout = tl.timeout, 0
			case 3:
				limit, tl.timeout = tl.timeout, 0
			}
			synctest.Test(t, func(t *testing.T) {
				log := storm(t, tl, c, 100, 90*time.Second, limit, seed)
				wantUnderCeiling(t, tl, log, ceiling)
				n, _ := peak(log.sent)
				t.Logf("peak %d, %d retries", n, len(log.retries))
			})
		})
	}
}

// TestP1_FivePercentFailing is the other half of the promise: what a budget is
// there to rescue is rescued.
func TestP1_FivePercentFailing(t *testing.T) {
	t.Parallel()
	tl := &timeline{name: "5 % failing", phases: []phase{{lasts: 80 * time.Second, fault: partly, share: 0.05}}}
	warm := 20 * time.Second
	check := func(t *testing.T, log *stormLog) {
		wantUnderCeiling(t, tl, log, ceiling)
		share, n := log.succeeded(warm, warm+time.Minute)
		peak, _ := peak(log.sent)
		t.Logf("%.4f of %d succeeded, peak %d", share, n, peak)
		if n != 6000 || share < 0.99 {
			t.Errorf("%.4f of %d requests succeeded, want 0.99 of 6000", share, n)
		}
	}
	for seed := range uint64(5) {
		check(t, budgetStorm{peer: tl, lasts: 80 * time.Second, seed: seed}.run())
	}
	synctest.Test(t, func(t *testing.T) {
		check(t, storm(t, tl, Config{}, 100, 80*time.Second, 3*time.Second, 1))
	})
}

// An inProcessHop is a base that runs a handler on the calling goroutine, as a
// server on the other side of a connection would: nothing but the request, the
// answer and the end of the client's context crosses over.
type inProcessHop struct {
	handler http.Handler
	strip   string // a header of answers that gets lost on the way
}

func (p *inProcessHop) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := context.AfterFunc(req.Context(), cancel)
	defer stop()
	in := (&http.Request{
		Method: req.Method, URL: req.URL, Host: req.URL.Host, RequestURI: req.URL.RequestURI(),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: req.Header.Clone(), Body: http.NoBody,
	}).WithContext(ctx)
	w := &stormWriter{header: make(http.Header)}
	p.handler.ServeHTTP(w, in)
	if err := req.Context().Err(); err != nil {
		return nil, err // too late for this client
	}
	w.WriteHeader(http.StatusOK)
	resp := stormAnswer(req, w.status)
	resp.Header = w.sent
	if p.strip != "" {
		resp.Header.Del(p.strip)
	}
	return resp, nil
}

// A stormWriter keeps status and header of an answer, as they were when they
// would have been sent.
type stormWriter struct {
	header, sent http.Header
	status       int
}

func (w *stormWriter) Header() http.Header { return w.header }

func (w *stormWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status, w.sent = status, w.header.Clone()
	}
}

func (w *stormWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return len(b), nil
}

// plainAttempts is what many have written by hand: attempts, a backoff with
// jitter, and nobody to ask.
type plainAttempts struct {
	base   http.RoundTripper
	n      int
	jitter func() float64
}

func (p *plainAttempts) RoundTrip(req *http.Request) (*http.Response, error) {
	for n := 1; ; n++ {
		resp, err := p.base.RoundTrip(req)
		if n == p.n || err == nil && resp.StatusCode < 500 || req.Context().Err() != nil {
			return resp, err
		}
		if err := stormSleep(req.Context(), Backoff{}.withDefaults().delay(n, p.jitter())); err != nil {
			return nil, err
		}
	}
}

// callNext is the handler of one hop: it asks the next one and passes on what
// that answers.
func callNext(t *testing.T, client http.RoundTripper, url string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out, err := http.NewRequestWithContext(r.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Error(err)
			return
		}
		resp, err := client.RoundTrip(out)
		if err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				return // the middleware answers 504
			}
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
	})
}

// A chain is edge → middle → bottom → store, the last of which is faulty. Each
// of the first three has a handler and a client of its own.
type chain struct {
	attempts [3]int           // of edge, middle and bottom; 0: the default, 3
	plain    bool             // plain attempts at each hop, no library
	strip    string           // see inProcessHop
	timeout  time.Duration    // set by the edge; 0: 10 s
	server   MiddlewareConfig // Limit and RetryBudget of all
	config   Config           // of each client
}

// run sends rate requests a second to the edge. The log is that of the store;
// its retries are those of the bottom alone.
func (c chain) run(t *testing.T, store faulty, rate float64, lasts time.Duration) *stormLog {
	t.Helper()
	p := newStormPeer(store, 7)
	var base http.RoundTripper = p
	for i, hop := range []struct{ name, next string }{2: {"edge", "middle"}, 1: {"middle", "bottom"}, 0: {"bottom", "store"}} {
		attempts := c.attempts[2-i]
		if c.plain {
			client := &plainAttempts{base, DefaultMaxAttempts, seededJitter(uint64(i))}
			base = &inProcessHop{handler: callNext(t, client, "http://"+hop.next+".test/")}
			continue
		}
		mc := MiddlewareConfig{Service: hop.name, Limit: c.server.Limit, RetryBudget: c.server.RetryBudget}
		if hop.name == "edge" {
			mc.Timeout = c.timeout
			if mc.Timeout == 0 {
				mc.Timeout = 10 * time.Second
			}
		}
		m, err := NewMiddleware(mc)
		if err != nil {
			t.Fatal(err)
		}
		config := c.config
		config.MaxAttempts = attempts
		client := stormTransport(t, config, base, uint64(i))
		base = &inProcessHop{handler: m.Handler(callNext(t, client, "http://"+hop.next+".test/")), strip: c.strip}
	}
	requests := make([]stormRequest, int(lasts.Seconds()*rate))
	evenly(rate, lasts, func(n int) {
		req, err := http.NewRequest(http.MethodGet, "http://edge.test/", nil)
		if err != nil {
			t.Error(err)
			return
		}
		r := stormRequest{start: time.Since(p.start)}
		resp, err := base.RoundTrip(req)
		r.end = time.Since(p.start)
		r.ok = err == nil && resp.StatusCode == http.StatusOK
		requests[n] = r
	})
	p.log.requests = requests
	return &p.log
}

// TestP2_ThreeHops: the picture of the README. One request becomes 27 at the
// bottom where each of three hops makes three attempts, and 1.05 here.
func TestP2_ThreeHops(t *testing.T) {
	const from, to = 30 * time.Second, 90 * time.Second
	outage := &timeline{name: "bottom down", phases: []phase{{lasts: from}, {lasts: to - from, fault: failing}}}

	t.Run("stint", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			log := chain{}.run(t, outage, 100, to+20*time.Second)
			each := float64(between(log.sent, from, to)) / 6000
			n, _ := peak(log.sent)
			t.Logf("%.3f attempts at the bottom per user request, peak %d", each, n)
			wantUnderCeiling(t, outage, log, ceiling)
			if each > 1.05 || each <= 1 {
				t.Errorf("%.3f attempts at the bottom per user request, want more than 1 and at most 1.05", each)
			}
			if share, _ := log.succeeded(to+time.Second, to+20*time.Second); share != 1 {
				t.Errorf("after the outage %.3f of the requests succeed, want all", share)
			}
		})
	})
	// The marker keeps the layers above from retrying what a layer below has
	// given up on. This is what it is worth.
	t.Run("without the marker", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			log := chain{strip: HeaderShouldRetry}.run(t, outage, 100, to+5*time.Second)
			n, _ := peak(log.sent)
			t.Logf("%.3f attempts at the bottom per user request, peak %d", float64(between(log.sent, from, to))/6000, n)
			if n <= ceiling+10 || n > 150 {
				t.Errorf("a peak of %d, want about 130: either the marker does nothing or something else is gone too", n)
			}
		})
	})
	t.Run("plain attempts", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			// Down until the last attempt has been made, so that each request
			// of the outage is there whole.
			dead := &timeline{name: "down", phases: []phase{{lasts: 5 * time.Second}, {lasts: time.Hour, fault: failing}}}
			lasts := 20 * time.Second
			if raceEnabled {
				lasts = 10 * time.Second
			}
			log := chain{plain: true}.run(t, dead, 100, lasts)
			down := (lasts - 5*time.Second).Seconds() * 100
			each := float64(between(log.sent, 5*time.Second, time.Hour)) / down
			n, _ := peak(log.sent)
			t.Logf("%.3f attempts at the bottom per user request, peak %d", each, n)
			if each != 27 {
				t.Errorf("%.3f attempts at the bottom per user request, want 27", each)
			}
			if n < 2500 || n > 2950 {
				t.Errorf("a peak of %d, want about 2700", n)
			}
		})
	})
}

// TestP2_ThreeHopsOthers: the rest of what can happen at the end of a chain.
func TestP2_ThreeHopsOthers(t *testing.T) {
	for _, tl := range []*timeline{
		{name: "half failing", phases: []phase{{lasts: 20 * time.Second}, {lasts: 20 * time.Second, fault: partly, share: 0.5}}},
		{name: "flapping 1 s", phases: flapping(time.Second)[:41]},
		{name: "resets", phases: []phase{{lasts: 20 * time.Second}, {lasts: 20 * time.Second, fault: resetting}}},
		{name: "stall that fails", timeout: 5 * time.Second, phases: []phase{{lasts: 20 * time.Second}, {lasts: 4 * time.Second, fault: stallFails}, {lasts: 10 * time.Second, fault: failing}}},
	} {
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				log := chain{}.run(t, tl, 100, tl.length())
				wantUnderCeiling(t, tl, log, ceiling)
				n, _ := peak(log.sent)
				t.Logf("peak %d", n)
			})
		})
	}
}

// TestP2_EdgeAloneRetries: hops that are not allowed to retry must not keep the
// one above from it. The marker says "my retries are used up", not "I failed".
func TestP2_EdgeAloneRetries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tl := &timeline{name: "5 % failing, then down", phases: []phase{
			{lasts: 40 * time.Second, fault: partly, share: 0.05}, {lasts: 20 * time.Second, fault: failing},
		}}
		log := chain{attempts: [3]int{3, 1, 1}}.run(t, tl, 100, tl.length())
		wantUnderCeiling(t, tl, log, ceiling)
		share, _ := log.succeeded(15*time.Second, 40*time.Second)
		extra := len(log.sent) - len(log.requests)
		n, _ := peak(log.sent)
		t.Logf("%.4f succeeded, %d attempts more than requests, peak %d", share, extra, n)
		if share < 0.99 {
			t.Errorf("%.4f of the requests succeeded, want 0.99: the edge did not retry", share)
		}
		if len(log.retries) != 0 {
			t.Errorf("%d retries by the bottom, which has one attempt", len(log.retries))
		}
		if outage := between(log.sent, 40*time.Second, 60*time.Second); outage <= 2000 {
			t.Errorf("%d attempts for the 2000 requests of the outage: the edge did not retry", outage)
		}
	})
}

// TestS30_LatencyAtTheBottom: the bottom of a chain becomes ten times slower
// than its callers have time. Its load stays flat.
func TestS30_LatencyAtTheBottom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const from, to = 30 * time.Second, 70 * time.Second
		tl := &timeline{name: "slow", phases: []phase{{lasts: from}, {lasts: to - from, takes: 10 * time.Second}}}
		log := chain{timeout: time.Second}.run(t, tl, 100, to+20*time.Second)
		wantUnderCeiling(t, tl, log, ceiling)
		each := float64(between(log.sent, from, to)) / (100 * (to - from).Seconds())
		t.Logf("%.3f attempts at the bottom per user request", each)
		if each > 1.05 {
			t.Errorf("%.3f attempts at the bottom per user request, want 1.05 at most", each)
		}
		if share, _ := log.succeeded(to+time.Second, to+20*time.Second); share != 1 {
			t.Errorf("afterwards %.3f of the requests succeed, want all", share)
		}
	})
}

// TestP3_QueueRecovers (S31): a server that does 110 a second stands still for
// 5 s under 100 requests a second, and works on in order, also for those who
// have given up. Whoever goes on adding to that queue never sees its end.
func TestP3_QueueRecovers(t *testing.T) {
	const from, to = 30 * time.Second, 35 * time.Second
	queue := func(timeout time.Duration) *fifo {
		return &fifo{perSecond: 110, stallFrom: from, stallTo: to, timeout: timeout}
	}
	check := func(t *testing.T, log *stormLog) {
		t.Helper()
		took := log.recovered(to) - to
		p, _ := peak(log.sent)
		t.Logf("recovered %v after the stall, peak %d, %d retries", took, p, len(log.retries))
		if took > 60*time.Second {
			t.Errorf("recovered %v after the stall, want within a minute", took)
		}
		if took < 20*time.Second {
			t.Errorf("recovered %v after the stall: no queue is empty so soon", took)
		}
		if p > ceiling {
			t.Errorf("a peak of %d attempts in a second, want at most %d", p, ceiling)
		}
	}
	t.Run("attempt timeout", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			check(t, storm(t, queue(0), Config{AttemptTimeout: time.Second}, 100, to+75*time.Second, 0, 1))
		})
	})
	t.Run("deadline", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			check(t, storm(t, queue(0), Config{}, 100, to+75*time.Second, time.Second, 1))
		})
	})
	// The base's own timeout: nothing knows that it is one, only the budget is
	// left to hold the retries.
	t.Run("timeout of the base", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			check(t, storm(t, queue(time.Second), Config{}, 100, to+75*time.Second, 0, 1))
		})
	})
	t.Run("no retries", func(t *testing.T) {
		t.Parallel()
		check(t, budgetStorm{peer: queue(time.Second), lasts: to + 75*time.Second, config: BudgetConfig{Ratio: -1, MinPerSecond: -1}}.run())
	})
	t.Run("unguarded", func(t *testing.T) {
		t.Parallel()
		log := budgetStorm{peer: queue(time.Second), lasts: to + 10*time.Minute, nobody: true}.run()
		if at := log.recovered(to); at != neverEnds {
			t.Errorf("recovered %v after the stall; then this test shows nothing", at-to)
		}
	})
}

// TestP3_TimeoutsEarnNoCredit: when all that comes back is timeouts, no more
// than the floor is retried once the credit of better times has aged.
func TestP3_TimeoutsEarnNoCredit(t *testing.T) {
	const from, to = 30 * time.Second, 90 * time.Second
	tl := func(timeout time.Duration) *timeline {
		return &timeline{name: "timeouts", timeout: timeout, phases: []phase{{lasts: from}, {lasts: to - from, fault: silent}}}
	}
	// 10 s of credit, the second of the slot that was open, and the last answers.
	const aged = from + 12*time.Second
	check := func(t *testing.T, log *stormLog, least int) {
		t.Helper()
		for at := aged; at <= to-10*time.Second; at += 100 * time.Millisecond {
			if n := between(log.retries, at, at+10*time.Second); n > 3 {
				t.Fatalf("%d retries in the 10 s from %v on, want at most 3", n, at)
			}
		}
		n := between(log.retries, aged, to)
		t.Logf("%d retries in the %v of the outage without credit", n, to-aged)
		if n < least {
			t.Errorf("%d retries in the outage, want at least %d: the floor", n, least)
		}
	}
	t.Run("timeout of the base", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			check(t, storm(t, tl(time.Second), Config{}, 100, to, 0, 1), 10)
		})
	})
	t.Run("attempt timeout", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			check(t, storm(t, tl(0), Config{AttemptTimeout: time.Second}, 100, to, 0, 1), 0)
		})
	})
	t.Run("deadline", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			check(t, storm(t, tl(0), Config{}, 100, to, time.Second, 1), 0)
		})
	})
	t.Run("budget alone", func(t *testing.T) {
		t.Parallel()
		check(t, budgetStorm{peer: tl(time.Second), lasts: to}.run(), 10)
	})
}

// TestP4_SlowPeerIsNotRetried (S10, S11): requests have 3 s, and some answers
// are 503, at all times. When the peer slows down a retry could not end in time,
// so none is made, until the peer is fast again. Nothing is configured.
func TestP4_SlowPeerIsNotRetried(t *testing.T) {
	const slow, fast, end = 60 * time.Second, 120 * time.Second, 220 * time.Second
	for _, test := range []struct {
		name string
		rate float64
		slow phase
	}{
		// The retry of a failure that took 2 s would need another 2 s.
		{"2 s, 20 a second", 20, phase{share: 0.1, takes: 2 * time.Second}},
		{"2 s, 100 a second", 100, phase{share: 0.1, takes: 2 * time.Second}},
		// Failures come at once, but good answers not at all in time: all that
		// is known of them is that they take at least as long as there is.
		{"4 s", 20, phase{share: 0.1, takes: 4 * time.Second, fails: 5 * time.Millisecond}},
		{"2 s, half failing", 20, phase{share: 0.5, takes: 2 * time.Second}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				usual := phase{lasts: slow, fault: partly, share: 0.1, takes: 200 * time.Millisecond}
				test.slow.lasts, test.slow.fault = fast-slow, partly
				tl := &timeline{name: "slow", phases: []phase{usual, test.slow, usual, usual}}
				start := time.Now()
				var mu sync.Mutex
				refused := map[Reason][]time.Duration{}
				c := Config{Hook: func(_ context.Context, e Event) {
					if e.Kind == EventRefused {
						mu.Lock()
						defer mu.Unlock()
						refused[e.Reason] = append(refused[e.Reason], time.Since(start))
					}
				}}
				log := storm(t, tl, c, test.rate, end, 3*time.Second, 1)
				wantUnderCeiling(t, tl, log, ceiling)

				if n := between(log.retries, 10*time.Second, slow); n < int(test.rate) {
					t.Errorf("%d retries before, want at least %v", n, test.rate)
				}
				n := between(log.retries, slow, fast)
				if n > 0 {
					i, _ := slices.BinarySearch(log.retries, fast)
					t.Logf("%d retries of the slow peer, the last one %v after it became so", n, log.retries[i-1]-slow)
				}
				if n := between(log.retries, slow+30*time.Second, fast); n > 0 {
					t.Errorf("%d retries after 30 s of slowness, want none", n)
				}
				for reason, times := range refused {
					n := between(times, slow+30*time.Second, fast)
					if reason == ReasonDeadline && n < int(test.rate) {
						t.Errorf("%d refusals for the deadline while the peer is slow, want at least %v", n, test.rate)
					} else if reason != ReasonDeadline && n > 0 {
						t.Errorf("%d refusals for %s while the peer is slow, want none", n, reason)
					}
				}
				if n := between(log.retries, fast+50*time.Second, end); n < int(test.rate) {
					t.Errorf("%d retries long after the recovery, want at least %v", n, test.rate)
				}
			})
		})
	}
}

// TestP4_NoRetryThatCannotEnd: a peer that hangs on some requests and fails
// others at once. Attempts are cut off after 2 s of 3, which is all that is known
// of how long it takes; no retry starts with less.
func TestP4_NoRetryThatCannotEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const broken, learnt, end = 30 * time.Second, 40 * time.Second, 90 * time.Second
		tl := &timeline{name: "hanging", phases: []phase{
			{lasts: broken, takes: 200 * time.Millisecond},
			{lasts: end - broken, fault: partly, share: 0.6, takes: time.Minute, fails: 5 * time.Millisecond},
		}}
		start := time.Now()
		var mu sync.Mutex
		retries, least := 0, time.Hour
		c := Config{
			AttemptTimeout: 2 * time.Second,
			// Enough budget, so that it is not what holds them back.
			Budget: BudgetConfig{MinPerSecond: 50},
			Hook: func(_ context.Context, e Event) {
				if e.Kind == EventAttemptSent && e.Attempt > 1 && time.Since(start) > learnt {
					mu.Lock()
					defer mu.Unlock()
					retries++
					least = min(least, e.Remaining)
				}
			},
		}
		storm(t, tl, c, 20, end, 3*time.Second, 1)
		t.Logf("%d retries, with %v left at least", retries, least)
		if retries < 100 {
			t.Errorf("%d retries, want those of quick failures, 100 or more", retries)
		}
		if least < 2*time.Second {
			t.Errorf("a retry was sent with %v left to a peer that takes 2 s", least)
		}
	})
}

// TestP4_SlowWhileWaiting: the peer turns out to be slow while a retry waits for
// its turn. Then there is none, and the turn is lost.
func TestP4_SlowWhileWaiting(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newStormPeer(replyFunc(func(sent time.Duration) reply {
			if sent < time.Second {
				return reply{at: sent + 2500*time.Millisecond}
			}
			return reply{at: sent + time.Millisecond, kind: replyFailure}
		}), 1)
		tr := stormTransport(t, Config{}, p, 1)
		send := func() (o Outcome) {
			ctx, cancel := context.WithTimeout(WithOverride(context.Background(), Override{Outcome: &o}), 3*time.Second)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://peer.test/", nil)
			if err != nil {
				t.Error(err)
				return o
			}
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Error(err)
				return o
			}
			resp.Body.Close()
			return o
		}
		var wg sync.WaitGroup
		for range 30 { // answered 2.5 s from now, and not known to be slow until then
			wg.Go(func() { send() })
		}
		time.Sleep(2300 * time.Millisecond)
		wg.Go(func() { send() }) // takes the turn
		time.Sleep(100 * time.Millisecond)
		start := time.Now()
		o := send()
		if took := time.Since(start); o.Attempts != 1 || o.Reason != ReasonDeadline || took < 800*time.Millisecond {
			t.Errorf("%d attempts in %v, reason %q, want one, the wait for a turn, and %q", o.Attempts, took, o.Reason, ReasonDeadline)
		}
		wg.Wait()
	})
}

// TestP4_CutOffPeerFailsFast (S26): a peer on which most attempts are cut off is not retried,
// whatever budget and time there are.
func TestP4_CutOffPeerFailsFast(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const from, to = 30 * time.Second, 80 * time.Second
		tl := &timeline{name: "silent", phases: []phase{{lasts: from}, {lasts: to - from, fault: silent}}}
		c := Config{AttemptTimeout: time.Second, Budget: BudgetConfig{MinPerSecond: 50}}
		log := storm(t, tl, c, 20, to+60*time.Second, 0, 1)
		// The histogram's window has to fill with cut attempts for more than
		// half first.
		if n := between(log.retries, from, from+20*time.Second); n == 0 {
			t.Error("no retries at the beginning: it is not what the test is about that holds them back")
		}
		if n := between(log.retries, from+30*time.Second, to); n != 0 {
			t.Errorf("%d retries of a peer that is clearly down, want none", n)
		}
		slow := 0
		for _, r := range log.requests {
			if r.reason == ReasonSlow {
				slow++
			}
		}
		if slow < 200 {
			t.Errorf("%d refusals for %q, want 200 or more", slow, ReasonSlow)
		}
		if share, _ := log.succeeded(to, to+60*time.Second); share != 1 {
			t.Errorf("afterwards %.3f of the requests succeed, want all", share)
		}
	})
}

// TestS3_HundredSuccesses: 100 successes and then 200 requests that fail cost
// fewer than 240 attempts, however the requests are spread.
func TestS3_HundredSuccesses(t *testing.T) {
	for _, gap := range []time.Duration{0, time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, 400 * time.Millisecond} {
		t.Run(gap.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var down bool
				p := newStormPeer(replyFunc(func(sent time.Duration) reply {
					if down {
						return reply{at: sent + time.Millisecond, kind: replyFailure}
					}
					return reply{at: sent + time.Millisecond}
				}), 1)
				tr := stormTransport(t, Config{}, p, 1)
				send := func(n, status int) {
					var wg sync.WaitGroup
					for range n {
						wg.Go(func() {
							req, _ := http.NewRequest(http.MethodGet, "http://peer.test/", nil)
							resp, err := tr.RoundTrip(req)
							if err != nil || resp.StatusCode != status {
								t.Errorf("got %v, %v, want %d", resp, err, status)
							}
						})
						time.Sleep(gap)
					}
					wg.Wait()
				}
				send(100, http.StatusOK)
				down = true
				before := len(p.log.sent)
				send(200, http.StatusServiceUnavailable)
				attempts := len(p.log.sent) - before
				t.Logf("%d attempts", attempts)
				if attempts >= 240 || attempts <= 200 {
					t.Errorf("%d attempts for the 200 failing requests, want more than 200 and fewer than 240", attempts)
				}
			})
		})
	}
}

type replyFunc func(sent time.Duration) reply

func (f replyFunc) reply(sent time.Duration, _ float64) reply { return f(sent) }

// TestS15_LowTraffic: two requests a minute can still retry, and the gauge of
// the budget is not pinned at 1.
func TestS15_LowTraffic(t *testing.T) {
	for _, test := range []struct {
		name  string
		share float64 // of attempts that fail
		least float64 // share of requests that succeed
		most  float64 // utilisation
	}{
		{"a fifth failing", 0.2, 0.97, 0.7},
		{"healthy", 0, 1, 0},
		{"down", 1, 0, 0.7},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m, err := NewMetrics(MetricsConfig{})
				if err != nil {
					t.Fatal(err)
				}
				const lasts = 4 * time.Hour
				tl := &timeline{name: test.name, phases: []phase{{lasts: lasts + time.Hour, fault: partly, share: test.share}}}
				stop, highest, zeros, looks := make(chan bool), 0.0, 0, 0
				var wg sync.WaitGroup
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						case <-time.After(15 * time.Second):
						}
						v := stormGauge(t, m, "retry_budget_utilisation", "peer.test:80")
						highest = max(highest, v)
						looks++
						if v == 0 {
							zeros++
						}
					}
				})
				log := storm(t, tl, Config{Metrics: m}, 2.0/60, lasts, 10*time.Second, 3)
				close(stop)
				wg.Wait()
				share, n := log.succeeded(0, lasts)
				t.Logf("%.4f of %d succeeded, utilisation up to %.2f, 0 at %d of %d looks", share, n, highest, zeros, looks)
				if n != 480 || share < test.least {
					t.Errorf("%.4f of %d requests succeeded, want at least %v of 480", share, n, test.least)
				}
				if highest > test.most {
					t.Errorf("a utilisation of %.2f, want at most %v", highest, test.most)
				}
				if test.share > 0 && highest == 0 {
					t.Error("the gauge has not moved")
				}
				if test.share == 1 && len(log.retries) < n {
					t.Errorf("%d retries for %d requests that failed, want at least one each", len(log.retries), n)
				}
			})
		})
	}
}

// stormGauge returns the value of one series as a scrape shows it.
func stormGauge(t *testing.T, m *Metrics, name, peer string) float64 {
	t.Helper()
	v, found := 0.0, false
	for _, s := range stormScrape(t, m) {
		if s.name == name && s.labels["peer"] == peer {
			v, found = s.value, true
		}
	}
	if !found {
		return 0 // before the first request
	}
	return v
}

// TestS16_CapPerRequest: a budget without end does not make more attempts of
// one request than MaxAttempts.
func TestS16_CapPerRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tl := &timeline{name: "down", phases: []phase{{lasts: time.Hour, fault: failing}}}
		c := Config{MaxAttempts: 5, Budget: BudgetConfig{Ratio: 1, MinPerSecond: 1e6, PeakFactor: 1e6}}
		log := storm(t, tl, c, 10, 10*time.Second, 0, 1)
		if len(log.sent) != 500 {
			t.Errorf("%d attempts for 100 requests, want 5 each", len(log.sent))
		}
		for _, r := range log.requests {
			if r.attempts != 5 || r.reason != ReasonAttempts {
				t.Fatalf("%d attempts, reason %q, want 5 and %q", r.attempts, r.reason, ReasonAttempts)
			}
		}
	})
}

// TestO16_NoRetryOutlivesTheDeadline: attempts and budget without end, and a
// caller with 300 ms.
func TestO16_NoRetryOutlivesTheDeadline(t *testing.T) {
	unlimited := Config{
		MaxAttempts: 1000, Backoff: Backoff{Base: time.Millisecond, Max: time.Millisecond},
		Budget: BudgetConfig{Ratio: 1, MinPerSecond: 1e6, PeakFactor: 1e6},
	}
	const limit = 300 * time.Millisecond
	t.Run("failures in 40 ms", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			tl := &timeline{name: "down", phases: []phase{{lasts: time.Hour, fault: failing, takes: 40 * time.Millisecond}}}
			log := storm(t, tl, unlimited, 20, 10*time.Second, limit, 1)
			for _, r := range log.requests {
				if took := r.end - r.start; took > limit || r.reason != ReasonDeadline || r.attempts < 7 {
					t.Fatalf("took %v and %d attempts, reason %q, want at most %v, 7 or more, and %q", took, r.attempts, r.reason, limit, ReasonDeadline)
				}
			}
		})
	})
	t.Run("attempts longer than what is left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			// Good answers first: the transport learns what an attempt takes.
			tl := &timeline{name: "slow, then down", phases: []phase{
				{lasts: 5 * time.Second, takes: 200 * time.Millisecond}, {lasts: time.Hour, fault: failing, takes: 200 * time.Millisecond},
			}}
			log := storm(t, tl, unlimited, 20, 10*time.Second, limit, 1)
			for _, r := range log.requests {
				if r.start < 5*time.Second {
					continue
				}
				if took := r.end - r.start; r.attempts != 1 || took != 200*time.Millisecond || r.reason != ReasonDeadline {
					t.Fatalf("%d attempts in %v, reason %q, want one, 200ms and %q", r.attempts, took, r.reason, ReasonDeadline)
				}
			}
		})
	})
}

// TestO37_FastFailuresDoNotLookFast: good answers take 100 ms. A thousand
// failures that take none say nothing about that.
func TestO37_FastFailuresDoNotLookFast(t *testing.T) {
	for _, f := range []fault{failing, resetting} {
		t.Run(f.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tl := &timeline{name: "broken", phases: []phase{
					{lasts: 5 * time.Second, takes: 100 * time.Millisecond}, {lasts: time.Hour, fault: f, takes: time.Microsecond},
				}}
				p := newStormPeer(tl, 1)
				tr := stormTransport(t, Config{}, p, 1)
				var o Outcome
				send := func(limit time.Duration) {
					ctx, cancel := context.WithTimeout(WithOverride(context.Background(), Override{Outcome: &o}), limit)
					defer cancel()
					req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://peer.test/", nil)
					if resp, err := tr.RoundTrip(req); err == nil {
						resp.Body.Close()
					}
				}
				for range 50 {
					send(time.Minute)
				}
				synctest.Wait()
				for range 1000 {
					send(time.Minute)
				}
				h := tr.peers.enter("peer.test:80", time.Now()).latency.get("")
				latency, samples := h.quantile(time.Now(), DefaultQuantile)
				if latency < 100*time.Millisecond || latency > 110*time.Millisecond || samples != 50 {
					t.Errorf("p99 is %v of %d samples, want 100 ms and a bucket's width at most, of 50", latency, samples)
				}
				// A failure that took longer than good answers do is news.
				before := tl.phases[1].takes
				tl.phases[1].takes = time.Second
				send(time.Minute)
				tl.phases[1].takes = before
				time.Sleep(time.Second)
				if latency, _ := h.quantile(time.Now(), DefaultQuantile); latency < time.Second {
					t.Errorf("p99 is %v after failures that took 1 s, want at least that", latency)
				}
				// Within the budget again, so that only the deadline can say no.
				time.Sleep(15 * time.Second)
				if send(30 * time.Millisecond); o.Attempts != 1 || o.Reason != ReasonDeadline {
					t.Errorf("with 30 ms left: %d attempts, reason %q, want one and %q", o.Attempts, o.Reason, ReasonDeadline)
				}
				if send(time.Minute); o.Attempts < 2 {
					t.Errorf("with a minute left: %d attempts, reason %q, want a retry", o.Attempts, o.Reason)
				}
			})
		})
	}
}

// TestStorm_Helpers checks the measuring instruments.
func TestStorm_Helpers(t *testing.T) {
	var times []time.Duration
	for i := range 300 {
		times = append(times, time.Duration(i)*10*time.Millisecond)
	}
	if n, _ := peak(times); n != 100 {
		t.Errorf("peak of 100 a second is %d, want 100: the second is half-open", n)
	}
	times = append(times, 1995*time.Millisecond, 1996*time.Millisecond)
	slices.Sort(times)
	if n, at := peak(times); n != 102 || at < 1996*time.Millisecond {
		t.Errorf("peak is %d in the second up to %v, want 102", n, at)
	}
	q := &fifo{perSecond: 10, stallFrom: time.Second, stallTo: 3 * time.Second}
	for i, want := range []reply{{at: 1050 * time.Millisecond}, {at: 3100 * time.Millisecond}, {at: 3200 * time.Millisecond}} {
		if got := q.reply(time.Duration(950+i*100)*time.Millisecond, 0); got != want {
			t.Errorf("attempt %d in the queue: %v, want %v", i, got, want)
		}
	}
	tl := &timeline{timeout: 2 * time.Second, phases: []phase{{lasts: time.Second}, {lasts: 3 * time.Second, fault: stallFlushes}, {lasts: time.Second, fault: partly, share: 0.5}}}
	for _, test := range []struct {
		sent time.Duration
		draw float64
		want reply
	}{
		{0, 0, reply{at: 20 * time.Millisecond}},
		{1500 * time.Millisecond, 0, reply{at: 3500 * time.Millisecond, kind: replyTimeout}},
		{3 * time.Second, 0, reply{at: 4005 * time.Millisecond}},
		{4 * time.Second, 0.4, reply{at: 4005 * time.Millisecond, kind: replyFailure}},
		{4 * time.Second, 0.5, reply{at: 4020 * time.Millisecond}},
		{9 * time.Second, 0, reply{at: 9020 * time.Millisecond}},
	} {
		if got := tl.reply(test.sent, test.draw); got != test.want {
			t.Errorf("at %v: %v, want %v", test.sent, got, test.want)
		}
	}
}
