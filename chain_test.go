package stint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// skewed is a wall clock that is off by d.
func skewed(d time.Duration) func(time.Time) time.Time {
	return func(now time.Time) time.Time { return now.Add(d) }
}

// A tier is one real HTTP server of a chain, and what it saw.
type tier struct {
	url       string
	skew      time.Duration
	transport *Transport

	mu        sync.Mutex
	deadlines []int64         // headers as they arrived; 0: none
	left      []time.Duration // until the adopted deadline
}

// startChain starts one server for each skew, each calling the next through its
// own transport, the last answering 200. call may be nil, or changes the context
// of the call that tier i makes.
func startChain(t *testing.T, skews []time.Duration, cfg MiddlewareConfig, call func(i int, ctx context.Context) (context.Context, context.CancelFunc)) []*tier {
	t.Helper()
	tiers := make([]*tier, len(skews))
	for i := len(skews) - 1; i >= 0; i-- {
		x := &tier{skew: skews[i], transport: newTestTransport(t, Config{})}
		x.transport.wall = skewed(x.skew)
		mw, err := NewMiddleware(cfg)
		if err != nil {
			t.Fatal(err)
		}
		mw.wall = skewed(x.skew)
		s := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ms, _ := strconv.ParseInt(r.Header.Get(HeaderDeadline), 10, 64)
			var left time.Duration
			if d, ok := r.Context().Deadline(); ok {
				left = time.Until(d)
			}
			x.mu.Lock()
			x.deadlines = append(x.deadlines, ms)
			x.left = append(x.left, left)
			x.mu.Unlock()
			if i+1 == len(tiers) {
				return
			}
			ctx, cancel := r.Context(), context.CancelFunc(func() {})
			if call != nil {
				ctx, cancel = call(i, ctx)
			}
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, "GET", tiers[i+1].url, nil)
			resp, err := (&http.Client{Transport: x.transport}).Do(req)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadGateway)
				return
			}
			defer resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
		})))
		x.url = s.URL
		tiers[i] = x
		t.Cleanup(func() {
			x.transport.CloseIdleConnections()
			s.Close()
		})
	}
	return tiers
}

// P5 and S9: over five real hops, one of which makes a fresh, longer timeout of
// its own, the header never rises, and a 3 s deadline loses at most 5 ms a hop.
func TestP5_DeadlineNeverRisesAlongTheChain(t *testing.T) {
	fresh := func(i int, ctx context.Context) (context.Context, context.CancelFunc) {
		if i == 2 {
			return context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		}
		return ctx, func() {}
	}
	tiers := startChain(t, make([]time.Duration, 5), MiddlewareConfig{}, fresh)
	for range 10 {
		sent := time.Now().Add(3 * time.Second).UnixMilli()
		req := newRequest(t, t.Context(), "GET", tiers[0].url, nil)
		req.Header.Set(HeaderDeadline, strconv.FormatInt(sent, 10))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
		previous := sent
		for i, x := range tiers {
			got := x.deadlines[len(x.deadlines)-1]
			switch {
			case i == 0 && got != sent, i > 0 && got >= previous, got < previous-5:
				t.Errorf("tier %d got %d, the one before it %d", i, got, previous)
			}
			previous = got
		}
	}
}

// S6: with a deadline at the edge alone, every hop adopts it, and a handler's
// shorter limit goes on.
func TestS6_EdgeSetsTheDeadlineOnce(t *testing.T) {
	shorter := func(i int, ctx context.Context) (context.Context, context.CancelFunc) {
		if i == 1 {
			return context.WithTimeout(ctx, time.Second)
		}
		return ctx, func() {}
	}
	tiers := startChain(t, make([]time.Duration, 4), MiddlewareConfig{Timeout: 5 * time.Second}, shorter)
	now := time.Now().UnixMilli()
	resp, err := http.Get(tiers[0].url)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if got := tiers[0].deadlines[0]; got != 0 {
		t.Errorf("the edge got %d", got)
	}
	for i, want := range []int64{0, 5000, 1000, 1000} {
		if got := tiers[i].deadlines[0] - now; i > 0 && (got > want+200 || got < want-50) {
			t.Errorf("tier %d got a deadline %d ms after the start, want about %d", i, got, want)
		}
	}
}

// After Detach the chain ends: no deadline goes on.
func TestDetachLeavesTheChain(t *testing.T) {
	detach := func(_ int, ctx context.Context) (context.Context, context.CancelFunc) {
		return Detach(ctx), func() {}
	}
	tiers := startChain(t, make([]time.Duration, 2), MiddlewareConfig{}, detach)
	req := newRequest(t, t.Context(), "GET", tiers[0].url, nil)
	req.Header.Set(HeaderDeadline, strconv.FormatInt(time.Now().Add(time.Minute).UnixMilli(), 10))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if got := tiers[1].deadlines; !slices.Equal(got, []int64{0}) {
		t.Errorf("the second tier got %v", got)
	}
}

// O-32: hosts whose clocks are off, with and without the companion, over four
// hops.
func TestO32_SkewedClocksAlongAChain(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		name      string
		skews     []time.Duration
		companion bool // the client sends it
		tolerance time.Duration
		ok        bool
	}{
		{"clocks agree", []time.Duration{0, 0, 0, 0}, false, 0, true},
		{"50 ms apart", []time.Duration{0, 50 * time.Millisecond, -50 * time.Millisecond, 0}, true, 0, true},
		{"200 ms apart", []time.Duration{0, 200 * time.Millisecond, -200 * time.Millisecond, 0}, true, 0, true},
		{"one behind by 2 s", []time.Duration{0, -2 * s, 0, 0}, true, 0, true},
		{"one behind by an hour", []time.Duration{0, -3600 * s, 0, 0}, true, 0, true},
		{"one ahead by an hour", []time.Duration{0, 3600 * s, 0, 0}, true, 0, true},
		{"the edge behind by two hours", []time.Duration{-7200 * s, 0, 0, 0}, true, 0, true},
		{"all different", []time.Duration{-3600 * s, 3600 * s, -90 * s, 90 * s}, true, 0, true},
		// Strict: what the absolute value charges is charged.
		{"one ahead by 6 s", []time.Duration{0, 6 * s, 0, 0}, true, 0, false},
		{"one ahead by 6 s, tolerated", []time.Duration{0, 6 * s, 0, 0}, true, 10 * s, true},
		{"the edge ahead by an hour, plain client", []time.Duration{3600 * s, 0, 0, 0}, false, 0, false},
		{"the edge behind by an hour, plain client", []time.Duration{-3600 * s, 0, 0, 0}, false, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			metrics := newTestMetrics(t)
			tiers := startChain(t, tt.skews, MiddlewareConfig{SkewTolerance: tt.tolerance, Metrics: metrics}, nil)
			req := newRequest(t, t.Context(), "GET", tiers[0].url, nil)
			const given = 5 * s
			req.Header.Set(HeaderDeadline, strconv.FormatInt(time.Now().Add(given).UnixMilli(), 10))
			if tt.companion {
				req.Header.Set(HeaderTimeout, strconv.FormatInt(given.Milliseconds(), 10))
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			if (resp.StatusCode == 200) != tt.ok || !tt.ok && resp.StatusCode != 504 {
				t.Errorf("answer %d", resp.StatusCode)
			}
			gross := 0.0
			previous := int64(0)
			for i, x := range tiers {
				if len(x.left) == 0 {
					continue
				}
				if tt.companion && x.left[0] > given {
					t.Errorf("tier %d gave its handler %v of %v", i, x.left[0], given)
				}
				if i > 0 && x.deadlines[0] >= previous {
					t.Errorf("tier %d got %d, the one before it %d", i, x.deadlines[0], previous)
				}
				previous = x.deadlines[0]
				if tt.companion && max(x.skew, -x.skew) > grossSkew {
					gross++
				}
			}
			if got := counter(t, metrics, "stint_clock_skew_total", "side", "server"); tt.companion && got != gross {
				t.Errorf("%v broken clocks counted, want %v", got, gross)
			}
		})
	}
}

// P6: two hosts behind one name, one with its clock 2 s ahead, which is longer
// than the deadline. It refuses everything, and says not to retry; its word is
// void, and retries find the other host.
func TestP6_OneHostWithAWrongClock(t *testing.T) {
	host := func(skew time.Duration) string {
		mw, err := NewMiddleware(MiddlewareConfig{})
		if err != nil {
			t.Fatal(err)
		}
		mw.wall = skewed(skew)
		s := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })))
		t.Cleanup(s.Close)
		return s.Listener.Addr().String()
	}
	good, bad := host(0), host(2*time.Second)
	var dials atomic.Int32
	metrics := newTestMetrics(t)
	tr := newTestTransport(t, Config{
		Metrics: metrics, Budget: BudgetConfig{Ratio: 1, MinPerSecond: 1000}, Backoff: Backoff{Base: 1, Max: 1}, Timeout: time.Second,
		Base: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			switch addr {
			case "fleet.test:80":
				addr = good
				if dials.Add(1)%2 == 0 {
					addr = bad
				}
			case "bad.test:80":
				addr = bad
			default:
				addr = good
			}
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}},
	})
	a := &arrival{}
	ctx := context.WithValue(t.Context(), arrivalKey{}, a)
	get := func(name string) (*http.Response, Outcome) {
		t.Helper()
		var o Outcome
		resp, err := tr.RoundTrip(newRequest(t, WithOverride(ctx, Override{Outcome: &o}), "GET", "http://"+name+"/", nil))
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
		return resp, o
	}
	skews := 0.0
	for range 4 { // the first, third … of these meets the good host, the others both
		resp, o := get("fleet.test")
		if resp.StatusCode != 200 {
			t.Errorf("answer %d, %+v", resp.StatusCode, o)
		}
		skews += float64(o.Attempts - 1)
	}
	if skews == 0 {
		t.Error("no request met the host with the wrong clock")
	}
	resp, o := get("bad.test")
	if resp.StatusCode != 504 || resp.Header.Get(HeaderDeadlineExpired) != "1" || o.Attempts < 2 {
		t.Errorf("the bad host alone: %d, %+v", resp.StatusCode, o)
	}
	skews += float64(o.Attempts)
	if got := counter(t, metrics, "stint_clock_skew_total", "side", "client"); got != skews {
		t.Errorf("%v answers counted as skew, want %v", got, skews)
	}
	if a.note.set() {
		t.Error("a wrong clock has marked the answer as not worth retrying")
	}
	if got := counter(t, metrics, "deadline_exceeded_total"); got != 0 {
		t.Errorf("%v deadlines counted as exceeded", got)
	}
	if resp, o := get("other.test"); resp.StatusCode != 200 || o.Attempts != 1 {
		t.Errorf("another peer: %d, %+v", resp.StatusCode, o)
	}
}

// A 504 at its time is the deadline: not retried, and marked.
func TestExpiredAtItsTimeIsTheDeadline(t *testing.T) {
	mw, err := NewMiddleware(MiddlewareConfig{})
	if err != nil {
		t.Fatal(err)
	}
	var arrivals atomic.Int32
	s := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrivals.Add(1)
		<-r.Context().Done()
	})))
	defer s.Close()
	metrics := newTestMetrics(t)
	// The reserve gives the answer time to arrive on a slow machine.
	tr := newTestTransport(t, Config{Timeout: 2 * time.Second, Reserve: 1900 * time.Millisecond, Metrics: metrics})
	defer tr.CloseIdleConnections()
	resp, err, o := roundTripTo(t, tr, s.URL)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if resp.StatusCode != 504 || resp.Header.Get(HeaderShouldRetry) != "false" || o.Attempts != 1 || o.Reason != ReasonDeadline || arrivals.Load() != 1 {
		t.Errorf("%d, %+v, %d arrivals", resp.StatusCode, o, arrivals.Load())
	}
	if got := counter(t, metrics, "stint_client_outcomes_total", "outcome", "deadline"); got != 1 {
		t.Errorf("%v requests counted as out of time", got)
	}
}

// O-14: when the server ends it at the deadline a moment before our timer, by an
// answer or by a reset, it is still the deadline.
func TestO14_DeadlineIsNeverSomethingElse(t *testing.T) {
	for _, reset := range []bool{false, true} {
		mw, err := NewMiddleware(MiddlewareConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var late atomic.Int32
		s := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get(HeaderRetryCount) != "" {
				late.Add(1)
			}
			<-r.Context().Done()
			if reset {
				panic(http.ErrAbortHandler)
			}
		})))
		metrics := newTestMetrics(t)
		tr := newTestTransport(t, Config{Metrics: metrics, Budget: BudgetConfig{Ratio: 1, PeakFactor: 1000, MinPerSecond: 1000}})
		const n = 250
		var wg sync.WaitGroup
		limit := make(chan struct{}, 20)
		for range n {
			limit <- struct{}{}
			wg.Go(func() {
				defer func() { <-limit }()
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
				defer cancel()
				resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", s.URL, nil))
				switch {
				case err != nil:
					if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
						t.Errorf("reset=%v: %v", reset, err)
					}
				case resp.StatusCode != 504:
					t.Errorf("reset=%v: answer %d", reset, resp.StatusCode)
				default:
					resp.Body.Close()
				}
			})
		}
		wg.Wait()
		if got := counter(t, metrics, "stint_client_outcomes_total", "outcome", "deadline"); got != n {
			t.Errorf("reset=%v: %v of %d requests counted as out of time", reset, got, n)
		}
		if late.Load() != 0 {
			t.Errorf("reset=%v: %d retries", reset, late.Load())
		}
		tr.CloseIdleConnections()
		s.Close()
	}
}

// httputil.ReverseProxy with our transport: it lowers the copied header, with and
// without our middleware, and a copy that somebody lowered counts.
func TestReverseProxyLowersTheDeadline(t *testing.T) {
	var got atomic.Value
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got.Store(r.Header.Clone()) }))
	defer backend.Close()
	target, _ := url.Parse(backend.URL)
	tr := newTestTransport(t, Config{})
	defer tr.CloseIdleConnections()
	for _, tt := range []struct {
		name     string
		mw       *MiddlewareConfig
		lower    time.Duration // by the proxy's director
		sent     string        // instead of a usable header
		want     time.Duration // until what the backend gets; 0: no header
		edgeTime time.Duration
	}{
		{name: "alone", want: 2997 * time.Millisecond},
		{name: "alone, lowered", lower: time.Second, want: 1997 * time.Millisecond},
		{name: "alone, unusable", sent: "soon"},
		{name: "behind the middleware", mw: &MiddlewareConfig{}, want: 2997 * time.Millisecond},
		{name: "behind the middleware, lowered", mw: &MiddlewareConfig{}, lower: time.Second, want: 1997 * time.Millisecond},
		{name: "behind the middleware, raised", mw: &MiddlewareConfig{}, lower: -time.Hour, want: 2997 * time.Millisecond},
		{name: "behind the middleware, unusable", mw: &MiddlewareConfig{}, sent: "soon"},
		{name: "behind a public edge", mw: &MiddlewareConfig{TrustHeader: func(*http.Request) bool { return false }}},
		{name: "behind one that only reports", mw: &MiddlewareConfig{ReportOnly: true}},
		{name: "behind one that only reports, expired", mw: &MiddlewareConfig{ReportOnly: true}, sent: "1"},
		{name: "behind a public edge with a timeout", mw: &MiddlewareConfig{Timeout: 2 * time.Second, TrustHeader: func(*http.Request) bool { return false }}, want: 1997 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var h http.Handler = &httputil.ReverseProxy{Transport: tr, Rewrite: func(r *httputil.ProxyRequest) {
				r.SetURL(target)
				if tt.lower != 0 {
					ms, _ := strconv.ParseInt(r.In.Header.Get(HeaderDeadline), 10, 64)
					r.Out.Header.Set(HeaderDeadline, strconv.FormatInt(ms-tt.lower.Milliseconds(), 10))
				}
			}}
			if tt.mw != nil {
				mw, err := NewMiddleware(*tt.mw)
				if err != nil {
					t.Fatal(err)
				}
				h = mw.Handler(h)
			}
			front := httptest.NewServer(h)
			defer front.Close()
			now := time.Now()
			req := newRequest(t, t.Context(), "GET", front.URL, nil)
			req.Header.Set(HeaderDeadline, strconv.FormatInt(now.Add(3*time.Second).UnixMilli(), 10))
			req.Header.Set(HeaderTimeout, "3000")
			if tt.sent != "" {
				req.Header.Set(HeaderDeadline, tt.sent)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			h2 := got.Load().(http.Header)
			if tt.want == 0 {
				if len(h2[HeaderDeadline])+len(h2[HeaderTimeout]) != 0 {
					t.Errorf("sent on: %v, %v", h2[HeaderDeadline], h2[HeaderTimeout])
				}
				return
			}
			ms, _ := strconv.ParseInt(h2.Get(HeaderDeadline), 10, 64)
			// The companion may lower the number a little further: it knows of
			// fractions. A deadline of our own begins when the request arrives.
			if d := time.UnixMilli(ms).Sub(now); d > tt.want+time.Second/2 || d > tt.want && tt.mw == nil || d < tt.want-3*time.Millisecond {
				t.Errorf("sent on: %v after the start, want %v", d, tt.want)
			}
			if len(h2[HeaderTimeout]) != 1 {
				t.Errorf("companion %v", h2[HeaderTimeout])
			}
		})
	}
}

// S28: retries in one layer. The middle's failed retries mark its answer, and
// the edge passes it through; where the middle was not allowed to retry, the edge
// does.
func TestS28_RetriesInOneLayer(t *testing.T) {
	for _, tt := range []struct {
		name   string
		middle Config
		status int // of the bottom
		marked bool
	}{
		{"the middle retries", Config{}, 503, true},
		{"the middle may not", Config{MaxAttempts: 1}, 503, false},
		{"the middle's budget is spent", Config{Budget: BudgetConfig{Ratio: -1, MinPerSecond: -1}}, 503, true},
		{"an answer that is no failure", Config{}, 500, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var bottomArrivals, middleArrivals atomic.Int32
			bottom := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				bottomArrivals.Add(1)
				w.WriteHeader(tt.status)
			}))
			defer bottom.Close()
			tt.middle.Backoff = Backoff{Base: 1, Max: 1}
			inner := newTestTransport(t, tt.middle)
			defer inner.CloseIdleConnections()
			mw, err := NewMiddleware(MiddlewareConfig{})
			if err != nil {
				t.Fatal(err)
			}
			middle := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				middleArrivals.Add(1)
				req, _ := http.NewRequestWithContext(r.Context(), "GET", bottom.URL, nil)
				resp, err := inner.RoundTrip(req)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				w.WriteHeader(503)
			})))
			defer middle.Close()
			edge := newTestTransport(t, Config{Backoff: Backoff{Base: 1, Max: 1}, MaxAttempts: 2})
			defer edge.CloseIdleConnections()
			resp, err, o := roundTripTo(t, edge, middle.URL)
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			marked := resp.Header.Get(HeaderShouldRetry) == "false"
			if marked != tt.marked || marked && (o.Reason != ReasonToldNotTo || middleArrivals.Load() != 1) || !marked && o.Attempts != 2 {
				t.Errorf("marked %v, %+v; %d arrivals at the middle, %d at the bottom", marked, o, middleArrivals.Load(), bottomArrivals.Load())
			}
		})
	}
}

// S32: the deadline is in the context, so other clients in the handler honour it
// with no help of ours.
func TestS32_OtherClientsHonourTheContext(t *testing.T) {
	stuck := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer stuck.Close()
	mw, err := NewMiddleware(MiddlewareConfig{Timeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	s := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, _ := http.NewRequestWithContext(r.Context(), "GET", stuck.URL, nil)
		_, err := http.DefaultClient.Do(req)
		failed <- err
	})))
	defer s.Close()
	resp, err := http.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, resp)
	if err := <-failed; !errors.Is(err, context.DeadlineExceeded) || resp.StatusCode != 504 {
		t.Errorf("%v, answer %d", err, resp.StatusCode)
	}
}

// S33's least: a host that is lost behind a name is met once, and the retry's
// fresh connection can reach another.
func TestRetryMayReachAnotherHost(t *testing.T) {
	good := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "ok") }))
	defer good.Close()
	var dials atomic.Int32
	base := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		if dials.Add(1) == 1 {
			return nil, &net.OpError{Op: "dial", Err: errors.New("no route to host")}
		}
		return (&net.Dialer{}).DialContext(ctx, network, good.Listener.Addr().String())
	}}
	defer base.CloseIdleConnections()
	resp, err, o := roundTripTo(t, newTestTransport(t, Config{Base: base}), "http://fleet.test/")
	if err != nil || readAll(t, resp) != "ok" || o.Attempts != 2 {
		t.Errorf("%v, %+v", err, o)
	}
}
