package interop

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sony/gobreaker/v2"
	"github.com/stinthttp/stint"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// A breaker is a circuit breaker in front of a base, as most are written.
type breaker struct {
	*gobreaker.CircuitBreaker[*http.Response]
	base http.RoundTripper
}

func newBreaker(base http.RoundTripper) *breaker {
	return &breaker{gobreaker.NewCircuitBreaker[*http.Response](gobreaker.Settings{
		Timeout:     time.Minute,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= 3 },
	}), base}
}

func (b *breaker) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.Execute(func() (*http.Response, error) {
		resp, err := b.base.RoundTrip(r)
		if err == nil && resp.StatusCode >= 500 {
			// Against the contract of RoundTripper, and common: an answer and an
			// error.
			return resp, fmt.Errorf("status %d", resp.StatusCode)
		}
		return resp, err
	})
	if err != nil && r.Body != nil && resp == nil {
		r.Body.Close() // an open breaker has not
	}
	return resp, err
}

// S27: a circuit breaker around the base. It sees every attempt, and opens after
// as many. Its error arrives as it is. Without RetryError it is an error of a kind
// that stint does not know, hence like a lost connection: what is idempotent, or
// has the caller's key, is tried again within the budget, which costs the peer
// nothing and the caller time.
func TestS27_BreakerAroundTheBase(t *testing.T) {
	var arrivals atomic.Int32
	a := startBackend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrivals.Add(1)
		http.Error(w, "broken", http.StatusInternalServerError)
	}))
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	b := newBreaker(base)
	tr := newTransport(t, eager(stint.Config{Base: b, Timeout: patience}))
	// Three attempts, each an answer and an error: the answers are closed.
	_, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", a.url(), nil), stint.Override{})
	if err == nil || err.Error() != "status 500" || o.Attempts != 3 || arrivals.Load() != 3 {
		t.Errorf("%v, %+v, %d arrivals", err, o, arrivals.Load())
	}
	if b.State() != gobreaker.StateOpen {
		t.Fatalf("the breaker is %v", b.State())
	}
	for _, tt := range []struct {
		method, key string
		attempts    int
		reason      stint.Reason
	}{
		{"GET", "", 3, stint.ReasonAttempts},
		{"PUT", "", 3, stint.ReasonAttempts},
		{"POST", "", 1, stint.ReasonNotIdempotent},
		{"POST", "order-1", 3, stint.ReasonAttempts},
	} {
		_, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), tt.method, a.url(), strings.NewReader("x")), stint.Override{IdempotencyKey: tt.key})
		if err != gobreaker.ErrOpenState || o.Attempts != tt.attempts || o.Reason != tt.reason || arrivals.Load() != 3 {
			t.Errorf("%s key %q: %v, %+v, %d arrivals", tt.method, tt.key, err, o, arrivals.Load())
		}
	}
	// Through http.Client the error keeps its identity.
	if _, err := (&http.Client{Transport: tr}).Get(a.url()); !errors.Is(err, gobreaker.ErrOpenState) {
		t.Errorf("through http.Client: %v", err)
	}

	// With the default budget: at most one retry a second for all callers
	// together, however many they are.
	metrics := newMetrics(t)
	tr = newTransport(t, stint.Config{Base: b, Timeout: patience, Budget: stint.BudgetConfig{MaxWait: -1}, Metrics: metrics})
	start := time.Now()
	for range 100 {
		if _, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", a.url(), nil)); err != gobreaker.ErrOpenState {
			t.Fatal(err)
		}
	}
	if got, most := counter(t, metrics, "http_client_requests_total"), 101+int(time.Since(start)/time.Second); got > most {
		t.Errorf("%d attempts for 100 requests, want at most %d", got, most)
	}

	// RetryError knows the breaker's errors: they end the request, cost no budget
	// and the latencies do not see them.
	metrics = newMetrics(t)
	open := func(err error) bool {
		return errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests)
	}
	tr = newTransport(t, stint.Config{Base: b, Timeout: patience, Metrics: metrics, RetryError: func(err error) bool { return !open(err) }})
	for range 100 {
		_, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", a.url(), nil), stint.Override{})
		if err != gobreaker.ErrOpenState || o.Attempts != 1 || o.Reason != "" {
			t.Fatalf("with RetryError: %v, %+v, want the breaker's error after one attempt", err, o)
		}
	}
	for _, name := range []string{"stint_client_retries_total", "stint_refused_total", "retry_budget_exhausted_total"} {
		if got := counter(t, metrics, name); got != 0 {
			t.Errorf("with RetryError: %s = %d, want 0", name, got)
		}
	}
	w := httptest.NewRecorder()
	stint.DebugHandler(tr, nil).ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	if text := w.Body.String(); !strings.Contains(text, `"taken": 0`) || !strings.Contains(text, `"samples": 0`) {
		t.Errorf("with RetryError the budget or the latencies have noticed: %s", text)
	}
}

// A breaker around the transport sees one result for each request.
func TestS27_BreakerAroundTheTransport(t *testing.T) {
	var arrivals atomic.Int32
	a := startBackend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrivals.Add(1)
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	b := newBreaker(newTransport(t, eager(stint.Config{})))
	for i := range 5 {
		resp, err := b.RoundTrip(newRequest(t, t.Context(), "GET", a.url(), nil))
		if resp != nil {
			resp.Body.Close()
		}
		if (i >= 3) != (err == gobreaker.ErrOpenState) {
			t.Errorf("request %d: %v", i+1, err)
		}
	}
	if arrivals.Load() != 9 {
		t.Errorf("%d arrivals, want 9", arrivals.Load())
	}
}

// tracing returns what otelhttp records its spans with, and the record.
func tracing(t *testing.T) ([]otelhttp.Option, *tracetest.SpanRecorder) {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	t.Cleanup(func() { provider.Shutdown(t.Context()) })
	return []otelhttp.Option{otelhttp.WithTracerProvider(provider), otelhttp.WithPropagators(propagation.TraceContext{})}, spans
}

func otelTransport(base http.RoundTripper, options []otelhttp.Option) http.RoundTripper {
	return otelhttp.NewTransport(base, options...)
}

// otelhttp as the base has a span for each attempt, around the transport one for
// the request. Bodies are whole on every attempt either way.
func TestOtelHTTPInsideAndAround(t *testing.T) {
	var at recorder
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := at.record(r)
		if r.Header.Get(stint.HeaderRetryCount) != "2" {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		io.WriteString(w, got.body)
	})))
	body := strings.Repeat("0123456789abcdef", 8192)
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	for _, inside := range []bool{true, false} {
		options, spans := tracing(t)
		var rt http.RoundTripper
		want := 1
		if inside {
			want = 3
			rt = newTransport(t, eager(stint.Config{Base: otelhttp.NewTransport(base, options...), Timeout: patience}))
		} else {
			rt = otelhttp.NewTransport(newTransport(t, eager(stint.Config{Base: base, Timeout: patience})), options...)
		}
		resp, text, o, err := roundTrip(t, rt, newRequest(t, t.Context(), "PUT", a.url(), strings.NewReader(body)), stint.Override{})
		if err != nil || resp.StatusCode != 200 || text != body || o.Attempts != 3 {
			t.Fatalf("inside %v: %v, %v, %d bytes, %+v", inside, err, resp, len(text), o)
		}
		traces := make(map[string]bool)
		for _, x := range at.take() {
			traces[x.header.Get("Traceparent")] = true
			if x.body != body || millis(x.header, stint.HeaderDeadline) <= 0 {
				t.Errorf("inside %v: %d bytes, %v", inside, len(x.body), x.header)
			}
		}
		if got := len(spans.Ended()); got != want || len(traces) != want || traces[""] {
			t.Errorf("inside %v: %d spans ended, trace headers %v, want %d", inside, got, traces, want)
		}
	}
}

// An upgrade with otelhttp on all sides, beyond the deadline.
func TestOtelHTTPUpgrade(t *testing.T) {
	t.Parallel() // it waits
	options, _ := tracing(t)
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	h := otelhttp.NewHandler(mw.Handler(otelhttp.NewHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		io.Copy(conn, rw)
	}), "inside", options...)), "around", options...)
	a := startBackend(t, h)
	const timeout = time.Second
	inner := newTransport(t, stint.Config{Base: otelhttp.NewTransport(&http.Transport{}, options...), Timeout: timeout})
	for _, rt := range []http.RoundTripper{inner, otelhttp.NewTransport(inner, options...)} {
		start := time.Now()
		req := newRequest(t, t.Context(), "GET", a.url(), nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := rt.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		conn, ok := resp.Body.(io.ReadWriteCloser)
		if resp.StatusCode != 101 || !ok {
			t.Fatalf("%s, writable %v", resp.Status, ok)
		}
		time.Sleep(time.Until(start.Add(timeout + 50*time.Millisecond)))
		io.WriteString(conn, "hello")
		got := make([]byte, 5)
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
			t.Errorf("%q, %v", got, err)
		}
		conn.Close()
	}
}

// otelhttp around the middleware wraps request body and writer: the 504 for an
// expired request is as quick as without it, whatever became of the body.
func TestOtelHTTPAroundTheMiddleware(t *testing.T) {
	options, _ := tracing(t)
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	a := startBackend(t, otelhttp.NewHandler(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Error("the handler ran")
	})), "around", options...))
	for _, sent := range []int{0, 500, 1000} {
		conn, err := net.Dial("tcp", a.addr)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(patience))
		start := time.Now()
		io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\nX-Request-Deadline: 1000\r\n\r\n"+strings.Repeat("x", sent))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" || took > time.Second || resp.Close != (sent < 1000) {
			t.Errorf("%d bytes sent: %s after %v, close %v", sent, resp.Status, took, resp.Close)
		}
		conn.Close()
	}
}

// With otelhttp as base, over kept-alive connections that die: what stint made a
// key for arrives once, what is a GET is rescued by net/http, and what has the
// caller's key arrives at most MaxAttempts times, what net/http sends again by
// itself included. That it does where the base is not net/http's own and the key
// stands in the header as Idempotency-Key, because the layers in between may look it
// up: once for every idle connection that turns out to be dead, if it is let. A key
// given by Override, or under the name idempotency-key, is not sent again by
// net/http.
func TestOtelHTTPOverDyingConnections(t *testing.T) {
	options, _ := tracing(t)
	const idle = 3
	for _, tt := range []struct {
		name             string
		method           string
		header           http.Header
		override         string
		lose             int
		attempts, resent int
		ok               bool
	}{
		{"POST, our key", "POST", nil, "", 100, 1, 0, false},
		{"PATCH, our key", "PATCH", nil, "", 100, 1, 0, false},
		{"caller's key by Override", "POST", nil, "order-1", 100, 3, 0, false},
		{"caller's key in lower case", "POST", http.Header{"idempotency-key": {"order-1"}}, "", 100, 3, 0, false},
		// What net/http has sent again counts against MaxAttempts.
		{"caller's key", "POST", http.Header{"Idempotency-Key": {"order-1"}}, "", 100, 1, stint.DefaultMaxAttempts - 1, false},
		{"caller's key, lost once", "POST", http.Header{"Idempotency-Key": {"order-1"}}, "", 1, 1, 1, true},
		{"GET, lost once", "GET", nil, "", 1, 1, 1, true},
		{"GET", "GET", nil, "", 100, 3, idle, false},
	} {
		for _, variant := range []struct {
			traced bool
			body   string
		}{{false, "charge"}, {true, "charge"}, {false, ""}, {true, ""}} {
			traced := variant.traced
			s := startLosingServer(t)
			base := &http.Transport{MaxIdleConnsPerHost: idle}
			metrics := newMetrics(t)
			c := eager(stint.Config{Base: base, Timeout: patience, Metrics: metrics, CountResends: true})
			if traced {
				c.Base = otelhttp.NewTransport(base, options...)
			}
			tr := newTransport(t, c)
			warm(t, tr, s, idle)
			s.lose(tt.lose)
			req := newRequest(t, t.Context(), tt.method, s.url(), strings.NewReader(variant.body))
			for k, v := range tt.header {
				req.Header[k] = v
			}
			_, _, o, err := roundTrip(t, tr, req, stint.Override{IdempotencyKey: tt.override})
			resent, attempts, ok := tt.resent, tt.attempts, tt.ok
			if !traced && tt.method == "POST" {
				// Over net/http's own transport it does not, and stint tries again.
				switch resent = 0; {
				case ok:
					attempts = 2
				case tt.resent > 0:
					attempts = stint.DefaultMaxAttempts
				}
			}
			arrivals := len(s.take())
			if o.Attempts != attempts || (err == nil) != ok || arrivals != attempts+resent {
				t.Errorf("%s, otelhttp and body %v: %d arrivals in %d attempts, want %d in %d (%v)", tt.name, variant, arrivals, o.Attempts, attempts+resent, attempts, err)
			}
			if got := counter(t, metrics, "stint_transparent_resends_total"); got != resent {
				t.Errorf("%s, otelhttp and body %v: %d resends counted, want %d", tt.name, variant, got, resent)
			}
			base.CloseIdleConnections()
		}
	}
}

// warm leaves n idle connections to the server.
func warm(t *testing.T, rt http.RoundTripper, s *losingServer, n int) {
	t.Helper()
	var answers []*http.Response
	for range n {
		resp, err := rt.RoundTrip(newRequest(t, t.Context(), "GET", s.url()+"/warm", nil))
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, resp)
	}
	for _, resp := range answers {
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

// httputil.ReverseProxy between two hops, with the transport and behind the
// middleware: the deadline is lowered, the key is passed on, a body that streams
// through is not sent twice, and retries stay in one layer.
func TestReverseProxyBetweenHops(t *testing.T) {
	var at recorder
	backend := startBackend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at.record(r)
		if r.URL.Path == "/lost" {
			panic(http.ErrAbortHandler)
		}
		if r.URL.Path == "/503" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	target, _ := url.Parse(backend.url())
	inner := newTransport(t, eager(stint.Config{}))
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	front := startBackend(t, mw.Handler(&httputil.ReverseProxy{
		Transport: inner, ErrorLog: quiet,
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
	}))
	outer := newTransport(t, eager(stint.Config{Timeout: patience}))
	for _, tt := range []struct {
		path, method, body, key string
		arrivals, attempts      int // attempts of the outer transport
	}{
		{"/ok", "GET", "", "", 1, 1},
		{"/ok", "POST", "charge", "", 1, 1},
		// The proxy's transport retries what has no body; then its answer says
		// that this was all.
		{"/503", "GET", "", "", 3, 1},
		{"/lost", "GET", "", "", 3, 1},
		// A body that streams through it cannot send twice; so the outer does.
		{"/503", "PUT", "set", "", 3, 3},
		{"/lost", "PUT", "set", "", 3, 3},
		{"/503", "POST", "charge", "order-1", 3, 3},
		// The key that the outer made is, to the proxy, its caller's; without a
		// body it may and does retry.
		{"/503", "POST", "charge", "", 1, 1},
		{"/lost", "POST", "charge", "", 1, 1},
	} {
		inner.CloseIdleConnections() // each on a fresh connection: no rescues
		_, _, o, err := roundTrip(t, outer, newRequest(t, t.Context(), tt.method, front.url()+tt.path, strings.NewReader(tt.body)), stint.Override{IdempotencyKey: tt.key})
		if err != nil {
			t.Errorf("%s %s: %v", tt.method, tt.path, err)
			continue
		}
		got := at.take()
		if len(got) != tt.arrivals || o.Attempts != tt.attempts {
			t.Errorf("%s %s %q: %d arrivals, want %d; %+v", tt.method, tt.path, tt.key, len(got), tt.arrivals, o)
		}
		for _, x := range got {
			left := time.Until(time.UnixMilli(millis(x.header, stint.HeaderDeadline)))
			if left > patience-6*time.Millisecond || left < patience-5*time.Second || x.body != tt.body || x.header.Get(stint.HeaderIdempotencyKey) != o.Key {
				t.Errorf("%s %s: %v left, %d bytes, key %q", tt.method, tt.path, left, len(x.body), x.header.Get(stint.HeaderIdempotencyKey))
			}
		}
	}
}
