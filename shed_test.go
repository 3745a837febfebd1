package stint

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A fleet is many clients, each with a transport of its own, that call one
// service.
type fleet struct {
	clients int
	rate    float64 // of all of them together
	lasts   time.Duration
	server  MiddlewareConfig
	client  Config
	limit   time.Duration // the deadline of each request; 0: none
	handler faulty
}

// A fleetLog is what became of it, in virtual time.
type fleetLog struct {
	stormLog                 // what the handler saw, and what the clients got
	arrived  []time.Duration // at the service, in order
}

// run sends the requests, taken in turn by the clients. It has to be in a bubble.
func (f fleet) run(t *testing.T, seed uint64) *fleetLog {
	t.Helper()
	p := newStormPeer(f.handler, seed)
	m, err := NewMiddleware(f.server)
	if err != nil {
		t.Fatal(err)
	}
	hop := &inProcessHop{handler: m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resp, err := p.RoundTrip(r)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(resp.StatusCode)
	}))}
	var log fleetLog
	var mu sync.Mutex
	base := baseFunc(func(r *http.Request) (resp *http.Response, err error) {
		defer func() {
			if recover() != nil { // what net/http makes of it
				err = &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
			}
		}()
		mu.Lock()
		log.arrived = append(log.arrived, time.Since(p.start))
		mu.Unlock()
		return hop.RoundTrip(r)
	})
	var clients []*Transport
	for i := range f.clients {
		clients = append(clients, stormTransport(t, f.client, base, seed+uint64(i)))
	}
	requests := make([]stormRequest, int(f.lasts.Seconds()*f.rate))
	evenly(f.rate, f.lasts, func(n int) {
		var o Outcome
		ctx := WithOverride(context.Background(), Override{Outcome: &o})
		if f.limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, f.limit)
			defer cancel()
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://peer.test/", nil)
		if err != nil {
			t.Error(err)
			return
		}
		r := stormRequest{start: time.Since(p.start)}
		resp, err := clients[n%f.clients].RoundTrip(req)
		r.end = time.Since(p.start)
		if err == nil {
			r.ok = resp.StatusCode == http.StatusOK
		}
		r.attempts, r.reason = o.Attempts, o.Reason
		requests[n] = r
	})
	log.stormLog, log.requests = p.log, requests
	return &log
}

// TestS24_RetryBudgetOfAHundredClients: a hundred clients of one request a
// second, each within its floor, while the handler fails. By themselves they send
// nearly 200 a second. With RetryBudget the handler sees 110 at most.
func TestS24_RetryBudgetOfAHundredClients(t *testing.T) {
	const from, to, lasts = 20 * time.Second, 60 * time.Second, 80 * time.Second
	for _, tl := range []*timeline{
		{name: "down", phases: []phase{{lasts: from}, {lasts: to - from, fault: failing}}},
		{name: "down from the start", phases: []phase{{lasts: to, fault: failing}}},
		{name: "half failing", phases: []phase{{lasts: from}, {lasts: to - from, fault: partly, share: 0.5}}},
		{name: "flapping", phases: flapping(time.Second)[:40]},
		{name: "resetting", phases: []phase{{lasts: from}, {lasts: to - from, fault: resetting}}},
	} {
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				log := fleet{clients: 100, rate: 100, lasts: lasts, handler: tl}.run(t, 1)
				n, _ := peak(log.sent)
				t.Logf("without: the handler sees up to %d a second", n)
				if tl.name == "down" && (n < 180 || n > 200) {
					t.Errorf("without RetryBudget the handler sees up to %d a second, want nearly 200: then this test shows nothing", n)
				}
			})
			synctest.Test(t, func(t *testing.T) {
				metrics := mustMetrics(t, MetricsConfig{})
				log := fleet{
					clients: 100, rate: 100, lasts: lasts, handler: tl,
					server: MiddlewareConfig{Service: "s", RetryBudget: &BudgetConfig{}, Metrics: metrics},
				}.run(t, 1)
				wantUnderCeiling(t, tl, &log.stormLog, ceiling)
				told, late := 0, time.Duration(0)
				for _, r := range log.requests {
					if r.reason == ReasonToldNotTo {
						told++
						late = max(late, r.end-r.start)
					}
				}
				n, _ := peak(log.sent)
				all, _ := peak(log.arrived)
				t.Logf("with: the handler sees up to %d a second, of up to %d that arrive; %d requests were told to stop, after %v at most", n, all, told, late)
				s, _ := scrape(t, metrics)
				refused := len(log.arrived) - len(log.sent)
				s.check(t, `stint_refused_total{reason="retries",service="s"}`, float64(refused))
				if refused == 0 {
					t.Error("nothing was refused: it is not RetryBudget that bounds them")
				}
				// The third attempts that are refused were the last anyway.
				if told > refused || told < refused*9/10 {
					t.Errorf("%d requests were told to stop, of %d that were refused", told, refused)
				}
				if tl.name == "down" || tl.name == "resetting" {
					// Failures are no credit: what is left is the floor.
					if n := between(log.retries, from+12*time.Second, to); n > 9 {
						t.Errorf("%d retries get to the handler in the last %v of the outage, want the floor", n, to-from-12*time.Second)
					}
				}
				if share, _ := log.succeeded(to+time.Second, lasts); share != 1 {
					t.Errorf("afterwards %.3f of the requests succeed, want all", share)
				}
			})
		})
	}
}

// TestP2_ThreeHopsThatShed: the chain of P2, each hop of which also bounds what it
// takes in.
func TestP2_ThreeHopsThatShed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const from, to = 30 * time.Second, 60 * time.Second
		outage := &timeline{name: "bottom down", phases: []phase{{lasts: from}, {lasts: to - from, fault: failing}}}
		c := chain{server: MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 50, RetriesLast: true}, RetryBudget: &BudgetConfig{}}}
		log := c.run(t, outage, 100, to+20*time.Second)
		each := float64(between(log.sent, from, to)) / (100 * (to - from).Seconds())
		n, _ := peak(log.sent)
		t.Logf("%.3f attempts at the bottom per user request, peak %d", each, n)
		wantUnderCeiling(t, outage, log, ceiling)
		if each > 1.05 || each <= 1 {
			t.Errorf("%.3f attempts at the bottom per user request, want more than 1 and at most 1.05", each)
		}
		for _, window := range [][2]time.Duration{{0, from}, {to + time.Second, to + 20*time.Second}} {
			if share, _ := log.succeeded(window[0], window[1]); share != 1 {
				t.Errorf("from %v to %v %.3f of the requests succeed, want all", window[0], window[1], share)
			}
		}
	})
}

// TestS24_RetryBudgetStopsAtOnce: the answer to a retry that is beyond the share
// takes no time, and is the last that its client sends.
func TestS24_RetryBudgetStopsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ran := 0
		m, err := NewMiddleware(MiddlewareConfig{RetryBudget: &BudgetConfig{MinPerSecond: 0.1, MaxWait: -1}})
		if err != nil {
			t.Fatal(err)
		}
		hop := &inProcessHop{handler: m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			ran++
			w.WriteHeader(http.StatusServiceUnavailable)
		}))}
		for i := range 3 {
			var o Outcome
			tr := stormTransport(t, Config{Backoff: Backoff{Base: time.Nanosecond, Max: time.Nanosecond}}, hop, 1)
			req, _ := http.NewRequestWithContext(WithOverride(t.Context(), Override{Outcome: &o}), http.MethodGet, "http://peer.test/", nil)
			start := time.Now()
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			took := time.Since(start)
			if i == 0 {
				continue // its retry is the floor's
			}
			if o.Attempts != 2 || o.Reason != ReasonToldNotTo || took > 10*time.Millisecond {
				t.Errorf("%d attempts in %v, reason %q, want two at once and %q", o.Attempts, took, o.Reason, ReasonToldNotTo)
			}
			if got := resp.Header[HeaderShouldRetry]; !slices.Equal(got, []string{"false"}) {
				t.Errorf("X-Should-Retry: %q", got)
			}
		}
		if ran != 4 {
			t.Errorf("the handler ran %d times, want for three requests and one retry", ran)
		}
	})
}

// TestS24_RetryBudgetRescues: what a budget is there to rescue is, from many
// clients as from one: their retries wait for their turns.
func TestS24_RetryBudgetRescues(t *testing.T) {
	t.Parallel()
	for _, clients := range []int{1, 100} {
		synctest.Test(t, func(t *testing.T) {
			tl := &timeline{name: "5 % failing", phases: []phase{{lasts: 80 * time.Second, fault: partly, share: 0.05}}}
			log := fleet{clients: clients, rate: 100, lasts: 80 * time.Second, handler: tl, limit: 3 * time.Second,
				server: MiddlewareConfig{RetryBudget: &BudgetConfig{}}}.run(t, 1)
			wantUnderCeiling(t, tl, &log.stormLog, ceiling)
			share, n := log.succeeded(20*time.Second, 80*time.Second)
			t.Logf("%d clients: %.4f of %d succeeded", clients, share, n)
			if share < 0.99 {
				t.Errorf("%d clients: %.4f of %d requests succeeded, want 0.99", clients, share, n)
			}
		})
	}
}

// TestS24_RetryBudgetAnswer is all of the answer, and what is told of it.
func TestS24_RetryBudgetAnswer(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		events, metrics := new(mwEvents), mustMetrics(t, MetricsConfig{})
		var ran atomic.Int32
		m := mwNew(t, MiddlewareConfig{
			Service: "s", Metrics: metrics, Hook: events.hook,
			RetryBudget: &BudgetConfig{MinPerSecond: -1, MaxWait: -1}, Exempt: func(r *http.Request) bool { return r.URL.Path == "/health" },
		})
		srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran.Add(1) })))
		for _, body := range []string{"", "unread", strings.Repeat("x", 1<<20)} {
			ran.Store(0)
			resp, text := mwDo(t, client, "POST", srv.URL, strings.NewReader(body), HeaderRetryCount, "1")
			checkShed(t, resp, text, "false")
			if ran.Load() != 0 {
				t.Error("the handler has run")
			}
		}
		events.await(t, strings.TrimSuffix(strings.Repeat("arrived, shed, served 503, ", 3), ", "))
		if e := events.get(EventShed); e.Reason != ReasonRetries || e.Service != "s" || e.Attempt != 2 {
			t.Errorf("got %+v", e)
		}
		if e := events.get(EventServed); e.Reason != ReasonRetries {
			t.Errorf("got %+v", e)
		}
		s, _ := scrape(t, metrics)
		s.check(t, `stint_refused_total{reason="retries",service="s"}`, 3)
		s.check(t, `http_server_requests_total{code="503",service="s"}`, 3)
		// First attempts, and what is exempt, are let through.
		mwDo(t, client, "GET", srv.URL, nil)
		mwDo(t, client, "GET", srv.URL+"/health", nil, HeaderRetryCount, "1")
		if ran.Load() != 2 {
			t.Errorf("the handler ran %d times, want twice", ran.Load())
		}
	})
}

// checkShed checks everything that is on our 503.
func checkShed(t *testing.T, resp *http.Response, body, shouldRetry string) {
	t.Helper()
	if resp.StatusCode != http.StatusServiceUnavailable || body == "" {
		t.Fatalf("got %s, %q, want 503", resp.Status, body)
	}
	for name, want := range map[string]string{
		HeaderShouldRetry: shouldRetry, "Cache-Control": "no-store", "Retry-After": "1", "X-Content-Type-Options": "nosniff",
	} {
		if got := resp.Header.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	if got := resp.Header.Get(HeaderDeadlineExpired); got != "" {
		t.Errorf("%s: got %q, want none", HeaderDeadlineExpired, got)
	}
}

// TestS24_RetryBudgetReportOnly counts, and neither refuses nor waits.
func TestS24_RetryBudgetReportOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		events, metrics := new(mwEvents), mustMetrics(t, MetricsConfig{})
		ran := 0
		m, err := NewMiddleware(MiddlewareConfig{Service: "s", Metrics: metrics, Hook: events.hook, ReportOnly: true, RetryBudget: &BudgetConfig{}})
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran++ }))
		start := time.Now()
		for range 5 {
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, mwRequest(HeaderRetryCount, "1")); w.Code != 200 || len(w.Header()) != 0 {
				t.Errorf("got %d %v", w.Code, w.Header())
			}
		}
		// One that is too late is counted as that alone.
		h.ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderRetryCount, "1", HeaderDeadline, "1"))
		if ran != 6 || time.Since(start) != 0 {
			t.Errorf("ran %d times in %v", ran, time.Since(start))
		}
		// One has its turn, the second would wait for a second.
		s, _ := scrape(t, metrics)
		s.check(t, `stint_refused_total{reason="retries",service="s"}`, 3)
		if got := strings.Count(events.String(), "shed"); got != 3 {
			t.Errorf("%d events, want 3: %v", got, events)
		}
	})
}

// TestS24_RetryBudgetWaits: a retry waits for its turn, not beyond its deadline,
// and not for a client that has left.
func TestS24_RetryBudgetWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ran := 0
		metrics := mustMetrics(t, MetricsConfig{})
		events := new(mwEvents)
		m, err := NewMiddleware(MiddlewareConfig{Service: "s", Metrics: metrics, Hook: events.hook, RetryBudget: &BudgetConfig{MinPerSecond: 0.5, MaxWait: 10 * time.Second}})
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran++ }))
		send := func(ctx context.Context, d time.Duration) (status int, took time.Duration) {
			r := mwRequest(HeaderRetryCount, "1").WithContext(ctx)
			if d > 0 {
				r.Header.Set(HeaderDeadline, mwIn(d))
			}
			w := httptest.NewRecorder()
			start := time.Now()
			h.ServeHTTP(w, r)
			return w.Code, time.Since(start)
		}
		ctx := t.Context()
		if status, took := send(ctx, 0); status != 200 || took != 0 {
			t.Errorf("the first retry: %d after %v", status, took)
		}
		if status, took := send(ctx, 0); status != 200 || took != 1050*time.Millisecond {
			t.Errorf("the second retry: %d after %v, want 200 after its turn", status, took)
		}
		if status, took := send(ctx, 500*time.Millisecond); status != 503 || took != 0 {
			t.Errorf("with a deadline before the turn: %d after %v, want 503 at once", status, took)
		}
		gone, cancel := context.WithCancel(ctx)
		time.AfterFunc(300*time.Millisecond, cancel)
		if _, took := send(gone, 0); took != 300*time.Millisecond || ran != 2 {
			t.Errorf("a client that leaves is let go after %v, the handler ran %d times", took, ran)
		}
		s, _ := scrape(t, metrics)
		s.check(t, `http_server_requests_total{code="499",service="s"}`, 1)
		s.check(t, `stint_refused_total{reason="retries",service="s"}`, 1)
		if e := events.list[len(events.list)-1]; e.Kind != EventServed || e.Reason != ReasonCanceled || e.Status != 0 {
			t.Errorf("the last event of a client that left: %+v", e)
		}
	})
}

// TestShedProblem: clients that accept JSON get it.
func TestShedProblem(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{RetryBudget: &BudgetConfig{MinPerSecond: -1, MaxWait: -1}})
	h := m.Handler(http.NotFoundHandler())
	for _, method := range []string{"GET", "HEAD"} {
		w := httptest.NewRecorder()
		r := mwRequest(HeaderRetryCount, "1", "Accept", "application/json")
		r.Method = method
		h.ServeHTTP(w, r)
		var problem struct {
			Status        int
			Title, Detail string
		}
		if method == "HEAD" {
			if w.Body.Len() != 0 || w.Header().Get("Content-Length") == "0" {
				t.Errorf("HEAD: %d bytes, Content-Length %s", w.Body.Len(), w.Header().Get("Content-Length"))
			}
		} else if err := json.Unmarshal(w.Body.Bytes(), &problem); err != nil || problem.Status != 503 || problem.Title != "Service Unavailable" || problem.Detail == "" {
			t.Errorf("%v, %+v in %q", err, problem, w.Body)
		}
	}
}

func TestRetryBudgetConfig(t *testing.T) {
	_, err := NewMiddleware(MiddlewareConfig{RetryBudget: &BudgetConfig{Ratio: 2, Window: time.Millisecond}})
	for _, want := range []string{"MiddlewareConfig.RetryBudget.Ratio", "MiddlewareConfig.RetryBudget.Window"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s named", err, want)
		}
	}
	c := &BudgetConfig{}
	if _, err := NewMiddleware(MiddlewareConfig{RetryBudget: c}); err != nil || *c != (BudgetConfig{}) {
		t.Errorf("got %v, and the caller's struct is now %+v", err, *c)
	}
}
