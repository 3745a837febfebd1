package interop

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// What the proxies add with retries of their own, counted at a backend that is
// never well. nginx asks each of the two servers once, haproxy its one server
// four times (retries 3), for each attempt of the transport, of which there are
// at most three: the numbers multiply. A proxy that repeats what is unsafe does
// so whatever stint decides, which adds nothing to it.
//
// Each attempt has a connection of its own; for those that are kept see
// TestHAProxyHandsLostConnectionsOn.
func TestProxyRetriesInArrivals(t *testing.T) {
	const lost, unavailable = "lost", "503"
	type count struct{ attempts, nginx, haproxy int }
	tests := []struct {
		path, fault string
		get         count // and PUT
		post        count // with a key that stint made
		keyed       count // POST with the caller's key
	}{
		{"retry-off", lost, count{3, 3, 3}, count{1, 1, 1}, count{3, 3, 3}},
		{"retry-off", unavailable, count{3, 3, 3}, count{1, 1, 1}, count{3, 3, 3}},
		{"retry-default", lost, count{3, 6, 3}, count{1, 1, 1}, count{3, 3, 3}},
		{"retry-default", unavailable, count{3, 3, 3}, count{1, 1, 1}, count{3, 3, 3}},
		{"retry-503", lost, count{3, 6, 12}, count{1, 1, 1}, count{3, 3, 3}},
		{"retry-503", unavailable, count{3, 6, 12}, count{1, 1, 1}, count{3, 3, 3}},
		{"retry-unsafe", lost, count{3, 6, 12}, count{1, 2, 4}, count{3, 6, 12}},
		{"retry-unsafe", unavailable, count{3, 6, 12}, count{1, 2, 4}, count{3, 6, 12}},
	}
	eachProxy(t, func(t *testing.T, name string) {
		var at recorder
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		h := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			at.record(r)
			if r.Header.Get("Fault") == lost {
				panic(http.ErrAbortHandler)
			}
			http.Error(w, "not now", http.StatusServiceUnavailable)
		}))
		a, b := startBackend(t, h), startBackend(t, h)
		p := startProxy(t, name, a.addr, b.addr)
		tr := newTransport(t, eager(stint.Config{Base: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}))
		for _, tt := range tests {
			for _, of := range []struct {
				method, key string
				want        count
			}{{"GET", "", tt.get}, {"PUT", "", tt.get}, {"POST", "", tt.post}, {"POST", "order-1", tt.keyed}} {
				req := newRequest(t, t.Context(), of.method, p.url+"/"+tt.path+"/", strings.NewReader("charge"))
				req.Header.Set("Fault", tt.fault)
				resp, _, o, err := roundTrip(t, tr, req, stint.Override{IdempotencyKey: of.key})
				if err != nil {
					t.Fatal(err)
				}
				what := fmt.Sprintf("%s %s %s key %q", tt.path, tt.fault, of.method, of.key)
				got := at.take()
				want := of.want.nginx
				if name == "haproxy" {
					want = of.want.haproxy
				}
				if len(got) != want || o.Attempts != of.want.attempts {
					t.Errorf("%s: %d arrivals in %d attempts, want %d in %d", what, len(got), o.Attempts, want, of.want.attempts)
				}
				if status := map[string]int{lost: 502, unavailable: 503}[tt.fault]; resp.StatusCode != status {
					t.Errorf("%s: %s, want %d", what, resp.Status, status)
				}
				// The proxy's copies are the attempt's, byte for byte: one
				// X-Retry-Count for each attempt, and one key for all.
				perAttempt := len(got) / max(1, o.Attempts)
				for i, x := range got {
					retry := ""
					if n := i / max(1, perAttempt); n > 0 {
						retry = strconv.Itoa(n)
					}
					if r := x.header.Get(stint.HeaderRetryCount); r != retry || x.header.Get(stint.HeaderIdempotencyKey) != o.Key || x.body != "charge" {
						t.Errorf("%s: arrival %d: retry %q, key %q, body %q", what, i+1, r, x.header.Get(stint.HeaderIdempotencyKey), x.body)
					}
				}
			}
		}
	})
}

// The budget holds in front of the proxy, so that the product stays small: 40
// requests at once to a dead backend are 41 attempts, and the proxy's factor on
// top. Three plain attempts each would be 120, times the same factor.
func TestProxyRetriesWithinTheBudget(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		var at recorder
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			at.record(r)
			panic(http.ErrAbortHandler)
		})
		a, b := startBackend(t, h), startBackend(t, h)
		p := startProxy(t, name, a.addr, b.addr)
		factor := 2
		if name == "haproxy" {
			factor = 4
		}
		metrics := newMetrics(t)
		tr := newTransport(t, stint.Config{
			Timeout: 30 * time.Second, Budget: stint.BudgetConfig{MaxWait: -1},
			Metrics: metrics, CountResends: true,
		})
		const n = 40
		var attempts atomic.Int32
		var wg sync.WaitGroup
		start := time.Now()
		for range n {
			wg.Go(func() {
				resp, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", p.url+"/retry-503/", nil), stint.Override{})
				if err != nil || resp.StatusCode != 502 {
					t.Errorf("%v, %v", err, resp)
				}
				attempts.Add(int32(o.Attempts))
			})
		}
		wg.Wait()
		// The floor: one retry a second.
		allowed := n + 1 + int(time.Since(start)/time.Second)
		if got := int(attempts.Load()); got > allowed || got <= n {
			t.Errorf("%d attempts, want %d to %d", got, n+1, allowed)
		}
		// What net/http adds: nothing behind nginx, which answers 502; behind
		// haproxy at most one more for each attempt.
		resends := counter(t, metrics, "stint_transparent_resends_total")
		if name == "nginx" && resends != 0 || resends > int(attempts.Load()) {
			t.Errorf("%d resends by net/http for %d attempts", resends, attempts.Load())
		}
		if got, want := len(at.take()), factor*(int(attempts.Load())+resends); got != want {
			t.Errorf("%d arrivals for %d attempts and %d resends, want %d", got, attempts.Load(), resends, want)
		}
		t.Logf("%d attempts, %d resends", attempts.Load(), resends)
	})
}

// haproxy hands a lost backend connection on: where the client's connection was
// not new, it closes that too, without an answer, for the client to find out. To
// net/http that is a kept-alive connection that was dead, and a GET is sent
// again, by net/http, uncounted by any budget: in an outage behind haproxy each
// attempt of a GET arrives twice. What is unsafe, or has a key, is not sent again
// by net/http, and arrives at most once for each attempt; its error is EOF where
// nginx answers 502.
func TestHAProxyHandsLostConnectionsOn(t *testing.T) {
	var at recorder
	a := startBackend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/warm") {
			return
		}
		at.record(r)
		panic(http.ErrAbortHandler)
	}))
	p := startProxy(t, "haproxy", a.addr, a.addr)
	metrics := newMetrics(t)
	tr := newTransport(t, eager(stint.Config{Timeout: 30 * time.Second, Metrics: metrics, CountResends: true}))
	for _, tt := range []struct {
		method, key        string
		attempts, arrivals int
	}{
		{"GET", "", 3, 6},
		{"PUT", "", 3, 3},
		{"POST", "", 1, 1},
		{"POST", "order-1", 3, 3},
	} {
		if _, _, _, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", p.url+"/a/warm", nil), stint.Override{}); err != nil {
			t.Fatal(err)
		}
		before := counter(t, metrics, "stint_transparent_resends_total")
		_, _, o, _ := roundTrip(t, tr, newRequest(t, t.Context(), tt.method, p.url+"/a/", strings.NewReader("x")), stint.Override{IdempotencyKey: tt.key})
		resends := counter(t, metrics, "stint_transparent_resends_total") - before
		arrivals := len(at.take())
		if o.Attempts != tt.attempts || arrivals != tt.arrivals || arrivals != o.Attempts+resends {
			t.Errorf("%s key %q: %d arrivals in %d attempts with %d resends, want %d in %d", tt.method, tt.key, arrivals, o.Attempts, resends, tt.arrivals, tt.attempts)
		}
	}
}

// X-Should-Retry: false passes through the proxies and stops the transport. The
// proxies do not know it.
func TestProxyPassesShouldRetry(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		var at recorder
		var say atomic.Value
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			at.record(r)
			w.Header().Set(stint.HeaderShouldRetry, say.Load().(string))
			w.WriteHeader(http.StatusServiceUnavailable)
		})
		a, b := startBackend(t, h), startBackend(t, h)
		p := startProxy(t, name, a.addr, b.addr)
		tr := newTransport(t, eager(stint.Config{Timeout: 30 * time.Second}))
		factor := map[string]int{"nginx": 2, "haproxy": 4}[name]
		for _, tt := range []struct {
			say, path string
			attempts  int
			arrivals  int
			reason    stint.Reason
		}{
			{"false", "/retry-off/", 1, 1, stint.ReasonToldNotTo},
			{"false", "/retry-503/", 1, factor, stint.ReasonToldNotTo},
			{"true", "/retry-off/", 3, 3, stint.ReasonAttempts},
		} {
			for _, method := range []string{"GET", "POST"} {
				say.Store(tt.say)
				want := tt.arrivals
				if method == "POST" && tt.path == "/retry-503/" {
					want = 1 // the proxies leave it alone
				}
				resp, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), method, p.url+tt.path, strings.NewReader("x")), stint.Override{})
				reason := tt.reason
				if method == "POST" && tt.say == "false" {
					reason = stint.ReasonNotIdempotent // asked first
				}
				if err != nil || resp.StatusCode != 503 || resp.Header.Get(stint.HeaderShouldRetry) != tt.say {
					t.Fatalf("%s %s %s: %v, %v", method, tt.path, tt.say, err, resp)
				}
				if got := len(at.take()); got != want || o.Attempts != tt.attempts || o.Reason != reason {
					t.Errorf("%s %s %s: %d arrivals, want %d; %+v", method, tt.path, tt.say, got, want, o)
				}
			}
		}
	})
}

// S28 with a proxy before each hop: the middle service has used its attempts up
// and says so, and the edge passes that through. The bottom sees 3, not 9.
func TestProxyRetriesInOneLayer(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		var atA, atB recorder
		var p *proxy
		inner := newTransport(t, eager(stint.Config{}))
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			atA.record(r)
			req, _ := http.NewRequestWithContext(r.Context(), "GET", p.url+"/b/", nil)
			resp, err := inner.RoundTrip(req)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadGateway)
				return
			}
			resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
		})))
		b := startBackend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			atB.record(r)
			w.WriteHeader(http.StatusServiceUnavailable)
		}))
		p = startProxy(t, name, a.addr, b.addr)
		edge := newTransport(t, eager(stint.Config{Timeout: 30 * time.Second}))
		resp, _, o, err := roundTrip(t, edge, newRequest(t, t.Context(), "GET", p.url+"/a/", nil), stint.Override{})
		if err != nil || resp.StatusCode != 503 || o.Reason != stint.ReasonToldNotTo {
			t.Fatalf("%v, %v, %+v", err, resp, o)
		}
		if a, b := len(atA.take()), len(atB.take()); a != 1 || b != 3 {
			t.Errorf("%d arrivals in the middle, %d at the bottom, want 1 and 3", a, b)
		}
	})
}

// Kept-alive connections between proxy and backend that die when they are used
// again. nginx sends a GET again by itself, as net/http does; haproxy leaves that
// to net/http. Either way a GET is rescued, an unsafe POST arrives once, and the
// caller's key lets the transport try again.
func TestProxyWithDyingBackendConnections(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		s := startLosingServer(t)
		p := startProxy(t, name, s.addr, s.addr)
		tr := newTransport(t, eager(stint.Config{Timeout: 30 * time.Second}))
		unsafe := 502
		if name == "haproxy" {
			unsafe = 0 // EOF
		}
		for _, tt := range []struct {
			method, key        string
			arrivals, attempts int
			status             int
		}{
			{"GET", "", 2, 1, 200},
			{"POST", "", 1, 1, unsafe},
			{"POST", "order-1", 2, 2, 200},
		} {
			// nginx would not send again what it passes on unbuffered.
			warm, _, _, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", p.url+"/buffered/warm", nil), stint.Override{})
			if err != nil || warm.StatusCode != 200 {
				t.Fatalf("%v, %v", err, warm)
			}
			s.lose(1)
			resp, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), tt.method, p.url+"/buffered/", strings.NewReader("charge")), stint.Override{IdempotencyKey: tt.key})
			status := 0
			if err == nil {
				status = resp.StatusCode
			}
			if got := s.take(); len(got) != tt.arrivals || o.Attempts != tt.attempts || status != tt.status {
				t.Errorf("%s key %q: %d arrivals in %d attempts, answer %d, %v; want %d in %d, %d", tt.method, tt.key, len(got), o.Attempts, status, err, tt.arrivals, tt.attempts, tt.status)
			}
		}
	})
}

// O-10 with nginx, which ends an HTTP/2 connection with GOAWAY after a number of
// requests, and all of them when its configuration is read anew: 200 POSTs in
// parallel, with the caller's key, all succeed, whole.
func TestProxyWindsHTTP2ConnectionsDown(t *testing.T) {
	program(t, "nginx")
	var at recorder
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, at.record(r).body)
	})))
	p := startProxy(t, "nginx", a.addr, a.addr, func(c *proxyConfig) { c.KeepaliveRequests = 10 })
	base, dialer := p.h2Base(t)
	tr := newTransport(t, eager(stint.Config{Base: base, Timeout: 30 * time.Second}))
	body := strings.Repeat("0123456789abcdef", 1024)
	const n = 200
	var wg sync.WaitGroup
	limit := make(chan struct{}, 20)
	for i := range n {
		limit <- struct{}{}
		if i%50 == 25 {
			p.cmd.Process.Signal(syscall.SIGHUP)
		}
		wg.Go(func() {
			defer func() { <-limit }()
			req := newRequest(t, t.Context(), "POST", p.tlsURL+"/a/", strings.NewReader(body))
			resp, text, o, err := roundTrip(t, tr, req, stint.Override{IdempotencyKey: fmt.Sprint("order-", i)})
			if err != nil || resp.StatusCode != 200 || text != body {
				t.Errorf("request %d: %v, %v, %d bytes, %+v", i, err, resp, len(text), o)
			}
		})
	}
	wg.Wait()
	checkKeyed(t, at.take(), n, stint.DefaultMaxAttempts, body)
	if got := dialer.count(); got < n/20 {
		t.Errorf("%d connections for %d requests: nothing was wound down", got, n)
	}
	t.Logf("%d connections", dialer.count())
}

// checkKeyed checks that each of n keys arrived, at most limit times, and always
// with the whole body.
func checkKeyed(t *testing.T, got []arrival, n, limit int, body string) {
	t.Helper()
	keys := make(map[string]int)
	for _, a := range got {
		keys[a.header.Get(stint.HeaderIdempotencyKey)]++
		if a.body != body {
			t.Errorf("a body of %d bytes, want %d: %.40q", len(a.body), len(body), a.body)
		}
	}
	if len(keys) != n {
		t.Errorf("%d keys arrived, want %d", len(keys), n)
	}
	for key, times := range keys {
		if times > limit {
			t.Errorf("%s arrived %d times, want at most %d", key, times, limit)
		}
	}
	t.Logf("%d arrivals for %d requests", len(got), n)
}
