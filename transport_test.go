package stint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A baseFunc is a base transport for tests.
type baseFunc func(*http.Request) (*http.Response, error)

func (f baseFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// answer returns a response of known length; header is names and values in turn.
func answer(status int, body string, header ...string) *http.Response {
	h := make(http.Header)
	for i := 0; i < len(header); i += 2 {
		h.Add(header[i], header[i+1])
	}
	return &http.Response{
		StatusCode: status, Status: fmt.Sprint(status), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body)),
	}
}

// answers is a base that gives these answers in turn, the last one for ever.
func answers(list ...func() (*http.Response, error)) baseFunc {
	var n atomic.Int32
	return func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			io.Copy(io.Discard, r.Body)
			r.Body.Close()
		}
		return list[min(int(n.Add(1)), len(list))-1]()
	}
}

func status(code int, header ...string) func() (*http.Response, error) {
	return func() (*http.Response, error) { return answer(code, fmt.Sprint("answer ", code), header...), nil }
}

func failure(err error) func() (*http.Response, error) {
	return func() (*http.Response, error) { return nil, err }
}

func newTestTransport(t testing.TB, c Config) *Transport {
	t.Helper()
	tr, err := NewTransport(c)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func newRequest(t testing.TB, ctx context.Context, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// roundTrip sends a GET to a made-up peer and says what became of it.
func roundTrip(t testing.TB, tr *Transport, ctx context.Context) (*http.Response, error, Outcome) {
	t.Helper()
	var o Outcome
	resp, err := tr.RoundTrip(newRequest(t, WithOverride(ctx, Override{Outcome: &o}), "GET", "http://peer.test/", nil))
	if (resp == nil) == (err == nil) {
		t.Fatalf("response %v and error %v: want exactly one", resp, err)
	}
	return resp, err, o
}

func readAll(t testing.TB, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("reading the answer: %v", err)
	}
	if err := resp.Body.Close(); err != nil {
		t.Errorf("closing the answer: %v", err)
	}
	return string(b)
}

// counter sums up the counters of a metric whose labels include these, given as
// names and values in turn.
func counter(t testing.TB, m *Metrics, name string, labels ...string) float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	metrics:
		for _, metric := range f.GetMetric() {
			have := make(map[string]string)
			for _, l := range metric.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			for i := 0; i < len(labels); i += 2 {
				if have[labels[i]] != labels[i+1] {
					continue metrics
				}
			}
			sum += metric.GetCounter().GetValue()
		}
	}
	return sum
}

func newTestMetrics(t testing.TB) *Metrics {
	t.Helper()
	m, err := NewMetrics(MetricsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestZeroConfigWorks(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, h := range []string{HeaderDeadline, HeaderTimeout, HeaderRetryCount, HeaderIdempotencyKey} {
			if r.Header.Get(h) != "" {
				t.Errorf("a GET without a deadline was sent with %s", h)
			}
		}
		io.WriteString(w, "hello")
	}))
	defer s.Close()
	tr := newTestTransport(t, Config{})
	client := &http.Client{Transport: tr}
	defer client.CloseIdleConnections()
	resp, err := client.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, resp); got != "hello" {
		t.Errorf("got %q", got)
	}
}

func TestInvalidConfigNamesEveryField(t *testing.T) {
	_, err := NewTransport(Config{
		Timeout: -1, AttemptTimeout: -1, MaxAttempts: -1, Reserve: -1, MaxPeers: -1, Keys: 9,
		Budget:    BudgetConfig{Ratio: 1.5, Window: 1, MinPerSecond: 1e9, PeakFactor: .5, MaxWait: 24 * time.Hour},
		Backoff:   Backoff{Base: -1, Max: -1, MaxRetryAfter: -1},
		Admission: AdmissionConfig{Quantile: 2, MinSamples: -1, Window: 1},
	})
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("got %v, want joined errors", err)
	}
	var got []string
	for _, e := range joined.Unwrap() {
		var c *ConfigError
		if !errors.As(e, &c) {
			t.Fatalf("%T is no *ConfigError", e)
		}
		if !strings.HasPrefix(e.Error(), "stint: "+c.Field+" = ") {
			t.Errorf("text %q", e)
		}
		got = append(got, c.Field)
	}
	want := []string{
		"Config.Timeout", "Config.AttemptTimeout", "Config.MaxAttempts", "Config.Reserve", "Config.MaxPeers", "Config.Keys",
		"Config.Budget.Ratio", "Config.Budget.Window", "Config.Budget.MinPerSecond", "Config.Budget.PeakFactor", "Config.Budget.MaxWait",
		"Config.Backoff.Base", "Config.Backoff.Max", "Config.Backoff.MaxRetryAfter",
		"Config.Admission.Quantile", "Config.Admission.MinSamples", "Config.Admission.Window",
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestZeroTransportNamesTheConstructor(t *testing.T) {
	for _, tr := range []*Transport{nil, {}} {
		body := &trackedBody{Reader: strings.NewReader("x")}
		req := newRequest(t, t.Context(), "POST", "http://peer.test/", body)
		resp, err := tr.RoundTrip(req)
		if resp != nil || err == nil || !strings.Contains(err.Error(), "stint.NewTransport") {
			t.Errorf("got %v, %v", resp, err)
		}
		if got := body.closes.Load(); got != 1 {
			t.Errorf("body closed %d times", got)
		}
	}
}

// A trackedBody counts how often it is closed and fails a Read after that.
type trackedBody struct {
	io.Reader
	closes atomic.Int32
	reads  atomic.Int32
}

func (b *trackedBody) Read(p []byte) (int, error) {
	if b.closes.Load() > 0 {
		return 0, errors.New("read after close")
	}
	b.reads.Add(1)
	return b.Reader.Read(p)
}

func (b *trackedBody) Close() error {
	b.closes.Add(1)
	return nil
}

// S17: what is retried, by method, status and header.
func TestS17_WhatIsRetried(t *testing.T) {
	unknown := errors.New("connection lost")
	tests := []struct {
		name   string
		method string
		first  func() (*http.Response, error)
		config Config
		header http.Header
		want   Reason // "" where a retry is made
		done   bool   // no retry is wanted
	}{
		{name: "GET 503", method: "GET", first: status(503)},
		{name: "GET 408", method: "GET", first: status(408)},
		{name: "GET 421", method: "GET", first: status(421)},
		{name: "GET 425", method: "GET", first: status(425)},
		{name: "GET 429", method: "GET", first: status(429)},
		{name: "GET 502", method: "GET", first: status(502)},
		{name: "GET 504", method: "GET", first: status(504)},
		{name: "GET error", method: "GET", first: failure(unknown)},
		{name: "PUT 503", method: "PUT", first: status(503)},
		{name: "DELETE 503", method: "DELETE", first: status(503)},
		{name: "empty method", method: "", first: status(503)},
		{name: "GET 500", method: "GET", first: status(500), done: true},
		{name: "GET 500 as configured", method: "GET", first: status(500), config: Config{RetryStatus: func(s int) bool { return s == 500 }}},
		{name: "GET 503 as configured", method: "GET", first: status(503), config: Config{RetryStatus: func(s int) bool { return s == 500 }}, done: true},
		{name: "GET 200 with Retry-After", method: "GET", first: status(200, "Retry-After", "1"), done: true},
		{name: "GET 202 with Retry-After", method: "GET", first: status(202, "Retry-After", "1"), done: true},
		{name: "GET 304 with Retry-After", method: "GET", first: status(304, "Retry-After", "1"), done: true},
		{name: "GET 404 with Retry-After", method: "GET", first: status(404, "Retry-After", "1"), done: true},
		{name: "POST 503", method: "POST", first: status(503), want: ReasonNotIdempotent},
		{name: "POST 503 with Retry-After", method: "POST", first: status(503, "Retry-After", "1"), want: ReasonNotIdempotent},
		{name: "POST 429", method: "POST", first: status(429), want: ReasonNotIdempotent},
		{name: "POST 502", method: "POST", first: status(502), want: ReasonNotIdempotent},
		{name: "POST 504", method: "POST", first: status(504), want: ReasonNotIdempotent},
		{name: "POST error", method: "POST", first: failure(unknown), want: ReasonNotIdempotent},
		{name: "POST 421", method: "POST", first: status(421)},
		{name: "POST 425", method: "POST", first: status(425)},
		{name: "PATCH 503", method: "PATCH", first: status(503), want: ReasonNotIdempotent},
		{name: "POST 503 said to be unbegun", method: "POST", first: status(503, "X-Should-Retry", "TRUE")},
		{name: "POST 409 said to be unbegun", method: "POST", first: status(409, "X-Should-Retry", "true")},
		{name: "POST 409", method: "POST", first: status(409), done: true},
		{name: "true on 200", method: "GET", first: status(200, "X-Should-Retry", "true"), done: true},
		{name: "POST, foreign, true", method: "POST", first: status(503, "X-Should-Retry", "true"), config: foreign, want: ReasonNotIdempotent},
		{name: "GET, foreign, true on 500", method: "GET", first: status(500, "X-Should-Retry", "true"), config: foreign},
		{name: "POST, peers honour keys", method: "POST", first: status(503), config: Config{Keys: KeysHonoured}},
		{name: "POST error, peers honour keys", method: "POST", first: failure(unknown), config: Config{Keys: KeysHonoured}},
		{name: "POST, no keys", method: "POST", first: status(503), config: Config{Keys: KeysOff}, want: ReasonNotIdempotent},
		{name: "POST, caller's key", method: "POST", first: status(503), header: http.Header{"Idempotency-Key": {"k"}}},
		{name: "POST, caller's key by another name", method: "POST", first: status(503), header: http.Header{"x-idempotency-key": {"k"}}},
		{name: "POST, caller's promise without a key", method: "POST", first: status(503), header: http.Header{"Idempotency-Key": {}}},
		{name: "POST, caller's key, no keys of ours", method: "POST", first: status(503), config: Config{Keys: KeysOff}, header: http.Header{"Idempotency-Key": {"k"}}},
		{name: "told not to", method: "GET", first: status(503, "X-Should-Retry", "False"), want: ReasonToldNotTo},
		{name: "told both", method: "GET", first: status(503, "X-Should-Retry", "true", "X-Should-Retry", "false"), want: ReasonToldNotTo},
		{name: "told by Stripe's name", method: "GET", first: status(503, "Stripe-Should-Retry", "false"), want: ReasonToldNotTo},
		{name: "Stripe's true is not ours", method: "GET", first: status(409, "Stripe-Should-Retry", "true"), done: true},
		{name: "told by Envoy", method: "GET", first: status(503, "X-Envoy-Overloaded", "true"), want: ReasonToldNotTo},
		{name: "told by Envoy's limit", method: "GET", first: status(429, "X-Envoy-Ratelimited", ""), want: ReasonToldNotTo},
		{name: "told by Finagle", method: "GET", first: status(503, "Finagle-Http-Nonretryable-Nack", "true"), want: ReasonToldNotTo},
		{name: "upgrade", method: "GET", first: status(503), header: http.Header{"Upgrade": {"websocket"}}, want: ReasonNotIdempotent},
		{name: "unknown method", method: "PURGE", first: status(503), want: ReasonNotIdempotent},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var o Outcome
				tt.config.Base = answers(tt.first, status(200))
				req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), tt.method, "http://peer.test/", strings.NewReader("body"))
				req.Method = tt.method
				maps.Copy(req.Header, tt.header)
				resp, err := newTestTransport(t, tt.config).RoundTrip(req)
				if resp != nil {
					readAll(t, resp)
				}
				switch {
				case tt.want != "" || tt.done:
					if o.Attempts != 1 || o.Reason != tt.want {
						t.Errorf("%d attempts, reason %q; want 1, %q", o.Attempts, o.Reason, tt.want)
					}
				case o.Attempts != 2 || err != nil || resp.StatusCode != 200:
					t.Errorf("%d attempts, reason %q, %v; want a retry", o.Attempts, o.Reason, err)
				}
			})
		})
	}
}

var foreign = Config{Foreign: func(*http.Request) bool { return true }}

// P8 and S29: every refusal counts under exactly one reason, and in nothing else
// but the two that stand beside it; it reaches the hook and the caller's Outcome.
func TestP8_EveryRefusalHasOneReason(t *testing.T) {
	get := func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
		return tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
	}
	unavailable := answers(status(503))
	tests := []struct {
		reason Reason
		config Config
		send   func(*testing.T, context.Context, *Transport) (*http.Response, error)
	}{
		{ReasonAttempts, Config{Base: unavailable, MaxAttempts: 1}, get},
		{ReasonNotReplayable, Config{Base: unavailable}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			return tr.RoundTrip(newRequest(t, ctx, "PUT", "http://peer.test/", io.MultiReader(strings.NewReader("stream"))))
		}},
		{ReasonNotIdempotent, Config{Base: unavailable}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			return tr.RoundTrip(newRequest(t, ctx, "POST", "http://peer.test/", nil))
		}},
		{ReasonToldNotTo, Config{Base: answers(status(503, HeaderShouldRetry, "false"))}, get},
		{ReasonRetryAfter, Config{Base: answers(status(429, "Retry-After", "3600"))}, get},
		{ReasonDeadline, Config{Base: answers(status(503, "Retry-After", "2")), Timeout: time.Second}, get},
		{ReasonSlow, Config{Base: hang, AttemptTimeout: time.Second, MaxAttempts: 2}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			for range DefaultMinSamples {
				get(t, WithOverride(t.Context(), Override{MaxAttempts: 1}), tr)
			}
			return get(t, ctx, tr)
		}},
		{ReasonBudget, Config{Base: unavailable, MaxAttempts: 100}, get},
		{ReasonTurn, Config{Base: unavailable, Budget: BudgetConfig{MaxWait: -1}}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			return get(t, ctx, tr)
		}},
		{ReasonHeld, Config{Base: answers(func() (*http.Response, error) {
			resp := answer(503, "of unknown length")
			resp.ContentLength = -1
			return resp, nil
		})}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			p := tr.peers.enter("peer.test:80", time.Now())
			defer tr.peers.leave(p, time.Now())
			p.held.Store(maxHeld)
			return get(t, ctx, tr)
		}},
		{ReasonThrottle, Config{Base: unavailable, Throttle: true}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			now := time.Now()
			p := tr.peers.enter("peer.test:80", now)
			defer tr.peers.leave(p, now)
			for range minThrottled {
				p.throttle.failures.add(p.budget.epoch(now))
			}
			tr.jitter = func() float64 { return 0 }
			return get(t, ctx, tr)
		}},
		{ReasonCanceled, Config{Base: answers(status(503, "Retry-After", "5"))}, func(t *testing.T, ctx context.Context, tr *Transport) (*http.Response, error) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return get(t, ctx, tr)
		}},
	}
	for _, tt := range tests {
		t.Run(string(tt.reason), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				metrics := newTestMetrics(t)
				var o Outcome
				var refused []Event
				tt.config.Metrics = metrics
				tt.config.Hook = func(_ context.Context, e Event) {
					if e.Kind == EventRefused && e.Reason != ReasonAttempts || e.Kind == EventRefused && tt.reason == ReasonAttempts {
						refused = append(refused, e)
					}
				}
				tr := newTestTransport(t, tt.config)
				if tt.reason == ReasonTurn {
					tr.jitter = func() float64 { return 0 } // three quick attempts: the third has no turn yet
				}
				before := counter(t, metrics, "stint_refused_total")
				resp, err := tt.send(t, WithOverride(t.Context(), Override{Outcome: &o}), tr)
				if resp != nil {
					readAll(t, resp)
				}
				if o.Reason != tt.reason {
					t.Fatalf("outcome %+v (%v), want reason %q", o, err, tt.reason)
				}
				if len(refused) != 1 || refused[0].Reason != tt.reason {
					t.Errorf("events %+v, want one refusal", refused)
				}
				want := before + 1
				if tt.reason == ReasonSlow {
					want += DefaultMinSamples // those that made it slow ended with "attempts"
				}
				if got := counter(t, metrics, "stint_refused_total"); got != want {
					t.Errorf("stint_refused_total went from %v to %v", before, got)
				}
				if got := counter(t, metrics, "stint_refused_total", "peer", "peer.test:80", "reason", string(tt.reason)); got != 1 {
					t.Errorf("stint_refused_total{reason=%q} = %v", tt.reason, got)
				}
				exhausted, exceeded := 0.0, 0.0
				switch tt.reason {
				case ReasonBudget, ReasonTurn:
					exhausted = 1
				case ReasonDeadline:
					exceeded = 1
				}
				if got := counter(t, metrics, "retry_budget_exhausted_total"); got != exhausted {
					t.Errorf("retry_budget_exhausted_total = %v, want %v", got, exhausted)
				}
				if got := counter(t, metrics, "deadline_exceeded_total"); got != exceeded {
					t.Errorf("deadline_exceeded_total = %v, want %v", got, exceeded)
				}
			})
		})
	}
	for _, tt := range []struct {
		reason Reason
		header string
		config MiddlewareConfig
	}{
		{ReasonExpired, "1", MiddlewareConfig{Service: "s"}},
		{ReasonInvalid, "soon", MiddlewareConfig{Service: "s", RejectInvalid: true}},
	} {
		t.Run(string(tt.reason), func(t *testing.T) {
			metrics := newTestMetrics(t)
			tt.config.Metrics = metrics
			mw, err := NewMiddleware(tt.config)
			if err != nil {
				t.Fatal(err)
			}
			r := httptest.NewRequest("GET", "/", nil)
			r.Header.Set(HeaderDeadline, tt.header)
			mw.Handler(http.NotFoundHandler()).ServeHTTP(httptest.NewRecorder(), r)
			if got := counter(t, metrics, "stint_refused_total"); got != 1 {
				t.Errorf("stint_refused_total = %v", got)
			}
			if got := counter(t, metrics, "stint_refused_total", "service", "s", "reason", string(tt.reason)); got != 1 {
				t.Errorf("stint_refused_total{reason=%q} = %v", tt.reason, got)
			}
		})
	}
}

// hang is a base that does not answer before its context ends.
var hang = baseFunc(func(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, context.Cause(r.Context())
})

// P7, O-03 and O-24: one request used by many goroutines at once stays as it was,
// whatever the base does to the copy it gets.
func TestP7_CallersRequestIsNotTouched(t *testing.T) {
	header := http.Header{
		"X-Request-Deadline": {"99999999999999"}, "x-request-deadline": {"99999999999998", "soon"},
		"X-Retry-Count": {"7"}, "X-Mine": {"a", "b"},
	}
	shared := newRequest(t, t.Context(), "PATCH", "http://peer.test/path?q", bytes.NewReader([]byte("body")))
	maps.Copy(shared.Header, header)
	shared.Trailer = http.Header{"X-T": nil}
	body, getBody := shared.Body, shared.GetBody
	before := shared.Clone(t.Context())

	var keys sync.Map
	tr := newTestTransport(t, Config{Timeout: time.Minute, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		keys.Store(r.Header["idempotency-key"][0], true)
		for _, v := range r.Header { // a base may not, but some do
			for i := range v {
				v[i] = "spoilt"
			}
		}
		r.Header.Set("X-Mine", "spoilt")
		r.Body.Close()
		return answer(503, "", HeaderShouldRetry, "true"), nil
	})})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			own := shared.WithContext(shared.Context()) // shares all but the body, which has one reader
			own.Body, _ = getBody()
			resp, err := tr.RoundTrip(own)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		})
	}
	wg.Wait()
	if !reflect.DeepEqual(shared.Header, before.Header) || !reflect.DeepEqual(shared.Trailer, before.Trailer) {
		t.Errorf("header is now %v, was %v", shared.Header, before.Header)
	}
	if shared.Body != body || reflect.ValueOf(shared.GetBody).Pointer() != reflect.ValueOf(getBody).Pointer() || shared.ContentLength != before.ContentLength {
		t.Error("Body, GetBody or ContentLength changed")
	}
	if !reflect.DeepEqual(shared.URL, before.URL) || shared.Method != before.Method || shared.Host != before.Host {
		t.Error("URL, Method or Host changed")
	}
	n := 0
	keys.Range(func(any, any) bool { n++; return true })
	if n != 50 {
		t.Errorf("50 requests had %d keys", n)
	}
}

// S21 and section "on the wire": what is sent, attempt by attempt (O-31).
func TestO31_HeadersOfEachAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var got []http.Header
		tr := newTestTransport(t, Config{
			AttemptTimeout: 200 * time.Millisecond,
			Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				got = append(got, r.Header.Clone())
				time.Sleep(150 * time.Millisecond)
				if len(got) < 3 {
					return answer(503, ""), nil
				}
				return answer(200, ""), nil
			}),
			Budget: BudgetConfig{MinPerSecond: 100}, // turns are not what this is about
		})
		tr.jitter = func() float64 { return 0 }
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		req := newRequest(t, ctx, "GET", "http://peer.test/", nil)
		req.Header["x-retry-count"] = []string{"5"}
		resp, err := tr.RoundTrip(req)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(resp, err)
		}
		deadline := fmt.Sprint(start.Add(497 * time.Millisecond).UnixMilli())
		for i, want := range []struct{ left, count string }{{"497", ""}, {"347", "1"}, {"197", "2"}} {
			h := got[i]
			if d := h[HeaderDeadline]; len(d) != 1 || d[0] != deadline {
				t.Errorf("attempt %d: deadline %v, want %v", i+1, d, deadline)
			}
			if l := h.Get(HeaderTimeout); l > want.left || len(l) != 3 {
				t.Errorf("attempt %d: %v ms left, want at most %v", i+1, l, want.left)
			}
			if c := h.Get(HeaderRetryCount); c != want.count || len(h["x-retry-count"]) > 0 {
				t.Errorf("attempt %d: retry count %q, want %q (%v)", i+1, c, want.count, h)
			}
		}
	})
}

// S21: of all bounds the tightest wins, and of two spellings of our header only
// ours is sent.
func TestS21_TightestBoundWins(t *testing.T) {
	const usable, far = "a second from now", "a minute from now"
	for _, tt := range []struct {
		name            string
		context, config time.Duration
		header          string
		want            time.Duration // 0: none
	}{
		{"nothing", 0, 0, "", 0},
		{"context", 2 * time.Second, 0, "", 1997 * time.Millisecond},
		{"config", 0, time.Second, "", 997 * time.Millisecond},
		{"context before config", time.Second, 2 * time.Second, "", 997 * time.Millisecond},
		{"config before context", 2 * time.Second, time.Second, "", 997 * time.Millisecond},
		{"a proxy's copy", 0, 0, usable, 997 * time.Millisecond},
		{"a copy later than the context", time.Second, 0, far, 997 * time.Millisecond},
		{"an unusable copy", 0, 0, "soon", 0},
		{"a copy beyond all bounds", 0, 0, "9223372036854775807", time.Hour - 3*time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				now := time.Now()
				metrics := newTestMetrics(t)
				tr := newTestTransport(t, Config{Timeout: tt.config, Metrics: metrics, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
					var want []string
					if tt.want != 0 {
						want = []string{fmt.Sprint(now.Add(tt.want).UnixMilli())}
					}
					if got := r.Header[HeaderDeadline]; !slices.Equal(got, want) {
						t.Errorf("sent %v, want %v", got, want)
					}
					if (len(r.Header[HeaderTimeout]) == 1) != (tt.want != 0) {
						t.Errorf("companion %v", r.Header[HeaderTimeout])
					}
					return answer(200, ""), nil
				})})
				ctx := t.Context()
				if tt.context != 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.context)
					defer cancel()
				}
				req := newRequest(t, ctx, "GET", "http://peer.test/", nil)
				switch tt.header {
				case "":
				case usable:
					req.Header.Set(HeaderDeadline, fmt.Sprint(now.Add(time.Second).UnixMilli()))
				case far:
					req.Header.Set(HeaderDeadline, fmt.Sprint(now.Add(time.Minute).UnixMilli()))
				default:
					req.Header.Set(HeaderDeadline, tt.header)
				}
				resp, err := tr.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				want := 0.0
				if tt.header == "soon" {
					want = 1
				}
				if got := counter(t, metrics, "stint_deadline_headers_total"); got != want {
					t.Errorf("%v unusable headers counted, want %v", got, want)
				}
			})
		})
	}
}

// Less than 1 ms left for the peer: nothing is sent, and never without the header.
func TestTooLateFailsLocally(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, left := range []time.Duration{-time.Hour, 0, time.Millisecond, 3*time.Millisecond + 999*time.Microsecond} {
			ctx, cancel := context.WithTimeout(t.Context(), left)
			body := &trackedBody{Reader: strings.NewReader("x")}
			tr := newTestTransport(t, Config{Base: baseFunc(func(*http.Request) (*http.Response, error) {
				t.Errorf("%v left: sent", left)
				return answer(200, ""), nil
			})})
			_, err := (&http.Client{Transport: tr}).Do(newRequest(t, ctx, "POST", "http://peer.test/", body))
			cancel()
			var e *Error
			if !errors.As(err, &e) || e.Reason != ReasonDeadline || e.Attempts != 0 || !errors.Is(err, context.DeadlineExceeded) || !isTimeout(err) {
				t.Errorf("%v left: %v", left, err)
			}
			if got := body.closes.Load(); got != 1 {
				t.Errorf("%v left: body closed %d times", left, got)
			}
		}
	})
}

func isTimeout(err error) bool {
	var u *url.Error
	return errors.As(err, &u) && u.Timeout()
}

// A sentinel is a base's error.
type sentinel struct{ text string }

func (s *sentinel) Error() string { return s.text }

// O-11: why it stopped, and what went wrong, are both in the error, through
// *url.Error too.
func TestO11_ErrorsKeepTheirIdentity(t *testing.T) {
	base := &sentinel{"connection lost"}
	var tests = []struct {
		name    string
		config  Config
		cancel  time.Duration // 0: never
		timeout time.Duration // of the context; 0: none
		check   func(error) bool
		same    bool // the base's own value, untouched
	}{
		{name: "attempts used up", same: true},
		{name: "budget empty", config: Config{MaxAttempts: 100}, same: true},
		{name: "no time for a retry", config: Config{Backoff: Backoff{Base: time.Hour, Max: time.Hour}}, timeout: time.Minute, same: true},
		{name: "deadline in backoff", config: Config{Backoff: Backoff{Base: 2 * time.Second}, Base: answers(failure(base))}, timeout: time.Second, same: true},
		{name: "cancel in backoff", config: Config{Backoff: Backoff{Base: 2 * time.Second}}, cancel: time.Second, check: func(err error) bool {
			return errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err)
		}},
		{name: "cancel during an attempt", config: Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, base
		})}, cancel: time.Second, check: func(err error) bool { return errors.Is(err, context.Canceled) && !isTimeout(err) }},
		{name: "deadline during an attempt", config: Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, base
		})}, timeout: time.Second, check: func(err error) bool {
			return errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) && isTimeout(err)
		}},
		{name: "our own deadline during an attempt", config: Config{Timeout: time.Second, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, base
		})}, check: func(err error) bool {
			return errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) && isTimeout(err)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if tt.config.Base == nil {
					tt.config.Base = answers(failure(base))
				}
				tr := newTestTransport(t, tt.config)
				tr.jitter = func() float64 { return .999 }
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.cancel != 0 {
					time.AfterFunc(tt.cancel, cancel)
				}
				if tt.timeout != 0 {
					var stop context.CancelFunc
					ctx, stop = context.WithTimeout(ctx, tt.timeout)
					defer stop()
				}
				_, err := (&http.Client{Transport: tr}).Do(newRequest(t, ctx, "GET", "http://peer.test/", nil))
				var s *sentinel
				if !errors.As(err, &s) {
					t.Fatalf("%v: the base's error is lost", err)
				}
				var own *Error
				if errors.As(err, &own) == tt.same {
					t.Errorf("%v: wrapped by us: %v, want %v", err, !tt.same, tt.same)
				}
				if tt.check != nil && !tt.check(err) {
					t.Errorf("%v (%#v)", err, errors.Unwrap(err))
				}
			})
		})
	}
}

// The deadline that passes while a retry waits is a deadline; an answer in hand
// is closed.
func TestDeadlineWhileWaitingForATurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed atomic.Int32
		tr := newTestTransport(t, Config{Base: baseFunc(func(*http.Request) (*http.Response, error) {
			resp := answer(503, "")
			resp.ContentLength = -1
			resp.Body = closeFunc{strings.NewReader("long"), func() { closed.Add(1) }}
			return resp, nil
		}), Backoff: Backoff{Base: 1, Max: 1}})
		// Take the present turn, so that the retry waits about a second for its
		// own; and let the context end before, which its deadline does not say.
		p := tr.peers.enter("peer.test:80", time.Now())
		p.budget.take(time.Now(), time.Time{})
		tr.peers.leave(p, time.Now())
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("went away")
		time.AfterFunc(time.Second/2, func() { cancel(why) })
		_, err, o := roundTrip(t, tr, ctx)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, why) || o.Reason != ReasonCanceled || o.Attempts != 1 {
			t.Errorf("%v, %+v", err, o)
		}
		if got := closed.Load(); got != 1 {
			t.Errorf("closed %d times", got)
		}
		if held := p.held.Load(); held != 0 {
			t.Errorf("%d answers count as held", held)
		}
	})
}

type closeFunc struct {
	io.Reader
	close func()
}

func (c closeFunc) Close() error { c.close(); return nil }

// O-12: cancellation is no failure to retry; the attempt's own timeout is.
func TestO12_WhoseTimeoutItIs(t *testing.T) {
	t.Run("caller cancels", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			twice := fmt.Errorf("a: %w", fmt.Errorf("b: %w", context.Canceled))
			tr := newTestTransport(t, Config{Base: baseFunc(func(*http.Request) (*http.Response, error) {
				cancel()
				return nil, twice
			})})
			_, err, o := roundTrip(t, tr, ctx)
			if err != twice || o.Attempts != 1 {
				t.Errorf("%v, %+v", err, o)
			}
		})
	})
	t.Run("caller's deadline", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err, o := roundTrip(t, newTestTransport(t, Config{Base: hang}), ctx)
			if !errors.Is(err, context.DeadlineExceeded) || o.Attempts != 1 || o.Reason != ReasonDeadline {
				t.Errorf("%v, %+v", err, o)
			}
		})
	})
	t.Run("attempt timeout", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			tr := newTestTransport(t, Config{AttemptTimeout: time.Second, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				if n++; n == 1 {
					return hang(r)
				}
				return answer(200, ""), nil
			})})
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if resp, err, o := roundTrip(t, tr, ctx); err != nil || resp.StatusCode != 200 || o.Attempts != 2 {
				t.Errorf("%v, %+v", err, o)
			}
		})
	})
	t.Run("the base's own timeout", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			// It satisfies errors.Is(err, context.DeadlineExceeded), and is none
			// of the caller's.
			tr := newTestTransport(t, Config{Base: answers(failure(&net.OpError{Op: "dial", Err: context.DeadlineExceeded}), status(200))})
			if resp, err, o := roundTrip(t, tr, t.Context()); err != nil || resp.StatusCode != 200 || o.Attempts != 2 {
				t.Errorf("%v, %+v", err, o)
			}
		})
	})
}

// An attempt that AttemptTimeout ended is a timeout to its caller, on both
// protocols, and not a cancellation.
func TestAttemptTimeoutIsATimeout(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2=", h2), func(t *testing.T) {
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
			client := startServer(t, s, h2)
			tr := newTestTransport(t, Config{Base: client.Transport, AttemptTimeout: 20 * time.Millisecond, MaxAttempts: 1})
			_, err := (&http.Client{Transport: tr}).Get(s.URL)
			var e *Error
			if !errors.As(err, &e) || e.Reason != ReasonAttempts || !e.Timeout() || !isTimeout(err) ||
				!errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
				t.Errorf("%v", err)
			}
		})
	}
}

// startServer starts s, over TLS and with HTTP/2 if asked for, and returns a
// client that trusts it.
func startServer(t testing.TB, s *httptest.Server, h2 bool) *http.Client {
	t.Helper()
	if h2 {
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	client := s.Client()
	t.Cleanup(client.CloseIdleConnections)
	return client
}

// O-05: the attempt's context lives until the body has been read; AttemptTimeout
// ends with the headers; a deadline of ours cuts the body as a deadline does.
func TestO05_BodyOutlivesRoundTrip(t *testing.T) {
	const size = 5 << 20
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2=", h2), func(t *testing.T) {
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(200)
				w.(http.Flusher).Flush()
				for range 5 {
					time.Sleep(20 * time.Millisecond)
					w.Write(make([]byte, size/5))
				}
			}))
			client := startServer(t, s, h2)
			var attempt context.Context
			tr := newTestTransport(t, Config{Timeout: time.Minute, AttemptTimeout: 50 * time.Millisecond, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				attempt = r.Context()
				return client.Transport.RoundTrip(r)
			})})
			req := newRequest(t, t.Context(), "GET", s.URL, nil)
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond) // longer than AttemptTimeout
			if err := attempt.Err(); err != nil {
				t.Errorf("the attempt's context ended before its body: %v", context.Cause(attempt))
			}
			n, err := io.Copy(io.Discard, resp.Body)
			if n != size || err != nil {
				t.Errorf("read %d bytes, %v", n, err)
			}
			if attempt.Err() == nil {
				t.Error("the attempt's context is alive after the end of its body")
			}
			if err := resp.Request.Context().Err(); err != nil {
				t.Errorf("the context of Response.Request: %v", err)
			}
			resp.Body.Close()
		})
	}
	t.Run("closed early", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var attempt context.Context
			tr := newTestTransport(t, Config{Timeout: time.Minute, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				attempt = r.Context()
				return answer(200, "unread"), nil
			})})
			resp, _, _ := roundTrip(t, tr, t.Context())
			if attempt.Err() != nil {
				t.Error("ended before Close")
			}
			resp.Body.Close()
			if attempt.Err() == nil {
				t.Error("alive after Close")
			}
		})
	})
	t.Run("deadline in the body", func(t *testing.T) {
		for _, h2 := range []bool{false, true} {
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			}))
			client := startServer(t, s, h2)
			tr := newTestTransport(t, Config{Timeout: 50 * time.Millisecond, Base: client.Transport})
			resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", s.URL, nil))
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.ReadAll(resp.Body)
			var timeout interface{ Timeout() bool }
			if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
				t.Errorf("h2=%v: %v (%T)", h2, err, err)
			}
			resp.Body.Close()
		}
	})
}

// O-06: every answer but the one handed out is closed exactly once, before the
// next attempt starts.
func TestO06_AnswersOfFailedAttemptsAreClosed(t *testing.T) {
	for _, length := range []int64{9, -1} { // kept in memory, and held open
		for _, tt := range []struct {
			name   string
			list   []func() (*http.Response, error)
			cancel bool
		}{
			{"then success", []func() (*http.Response, error){status(503), status(503), status(200)}, false},
			{"all fail", []func() (*http.Response, error){status(503), status(503), status(503)}, false},
			{"then an error", []func() (*http.Response, error){status(503), failure(io.ErrUnexpectedEOF), failure(io.ErrUnexpectedEOF)}, false},
			{"then a cancel", []func() (*http.Response, error){status(503)}, true},
		} {
			t.Run(fmt.Sprint(tt.name, " ", length), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					var closes []*atomic.Int32
					n := 0
					tr := newTestTransport(t, Config{Base: baseFunc(func(*http.Request) (*http.Response, error) {
						for i, c := range closes {
							if c.Load() != 1 {
								t.Errorf("attempt %d starts, answer %d was closed %d times", n+1, i+1, c.Load())
							}
						}
						resp, err := tt.list[n]()
						n++
						if resp != nil {
							c := new(atomic.Int32)
							closes = append(closes, c)
							resp.ContentLength = length
							resp.Body = closeFunc{strings.NewReader("an answer"), func() { c.Add(1) }}
						}
						return resp, err
					})})
					if tt.cancel {
						tr.jitter = func() float64 { return .999 }
						time.AfterFunc(time.Millisecond, cancel)
					}
					resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
					if err == nil {
						if got := readAll(t, resp); got != "an answer" {
							t.Errorf("read %q", got)
						}
					}
					for i, c := range closes {
						if c.Load() != 1 {
							t.Errorf("answer %d was closed %d times", i+1, c.Load())
						}
					}
				})
			})
		}
	}
}

// O-07: answers that are thrown away leave their connection usable.
func TestO07_ConnectionsAreReused(t *testing.T) {
	for _, long := range []bool{false, true} {
		var n, conns atomic.Int32
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1)%3 != 0 {
				w.WriteHeader(503)
				if long {
					w.(http.Flusher).Flush() // of unknown length: held open and drained
				}
			}
			w.Write(make([]byte, 1000))
		}))
		s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				conns.Add(1)
			}
		}
		client := startServer(t, s, false)
		tr := newTestTransport(t, Config{Base: client.Transport, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1e4}})
		for range 50 {
			resp, err, o := roundTripTo(t, tr, s.URL)
			if err != nil || resp.StatusCode != 200 || o.Attempts != 3 {
				t.Fatalf("%v, %+v", err, o)
			}
			readAll(t, resp)
		}
		if got := conns.Load(); got != 1 {
			t.Errorf("long=%v: %d connections", long, got)
		}
	}
}

func roundTripTo(t testing.TB, tr *Transport, url string) (*http.Response, error, Outcome) {
	t.Helper()
	var o Outcome
	resp, err := tr.RoundTrip(newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "GET", url, nil))
	return resp, err, o
}

// O-08: the last answer reaches the caller whole, whatever ended the retrying.
func TestO08_LastAnswerIsReturned(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int
		config Config
		want   Reason
		hint   string
	}{
		{"attempts", 503, Config{}, ReasonAttempts, ""},
		{"429", 429, Config{}, ReasonAttempts, ""},
		{"500 if retryable", 500, Config{RetryStatus: func(s int) bool { return s == 500 }}, ReasonAttempts, ""},
		{"budget", 503, Config{MaxAttempts: 100}, ReasonBudget, ""},
		{"turn", 503, Config{Budget: BudgetConfig{MaxWait: -1}, Backoff: Backoff{Base: 1, Max: 1}}, ReasonTurn, ""},
		{"deadline", 503, Config{Timeout: 2 * time.Second}, ReasonDeadline, "3"},
		{"hint", 503, Config{}, ReasonRetryAfter, "11"},
	} {
		for _, length := range []int{20, maxKept + 1} {
			t.Run(fmt.Sprint(tt.name, " ", length), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := 0
					tt.config.Base = baseFunc(func(*http.Request) (*http.Response, error) {
						n++
						resp := answer(tt.status, strings.Repeat(fmt.Sprint(n%10), length), "X-Request-Id", fmt.Sprint(n))
						if tt.hint != "" {
							resp.Header.Set("Retry-After", tt.hint)
						}
						return resp, nil
					})
					resp, err, o := roundTrip(t, newTestTransport(t, tt.config), t.Context())
					if err != nil || o.Reason != tt.want || o.Attempts != n {
						t.Fatalf("%v, %+v", err, o)
					}
					if resp.StatusCode != tt.status || resp.Header.Get("X-Request-Id") != fmt.Sprint(n) {
						t.Errorf("got %v", resp)
					}
					if got, want := readAll(t, resp), strings.Repeat(fmt.Sprint(n%10), length); got != want {
						t.Errorf("read %d bytes, not the body of attempt %d", len(got), n)
					}
				})
			})
		}
	}
}

// S22, O-17 and O-19: a hint longer than allowed returns the answer at once.
func TestO17_LongHintsReturnAtOnce(t *testing.T) {
	for _, hint := range []string{"3600", "11", "9223372037", "18446744074", "99999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			tr := newTestTransport(t, Config{Base: answers(status(429, "Retry-After", hint)), Timeout: 2 * time.Second})
			resp, err, o := roundTrip(t, tr, t.Context())
			if err != nil || resp.StatusCode != 429 || resp.Header.Get("Retry-After") != hint || o.Attempts != 1 || o.Reason != ReasonRetryAfter {
				t.Errorf("%q: %v, %+v", hint, err, o)
			}
			if waited := time.Since(start); waited != 0 {
				t.Errorf("%q: waited %v", hint, waited)
			}
		})
	}
}

// S22: a hint that fits is waited for, and backoff comes on top.
func TestS22_RetryAfterIsObeyed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		tr := newTestTransport(t, Config{Base: answers(status(503, "Retry-After", "2"), status(200))})
		tr.jitter = func() float64 { return .5 }
		if resp, err, _ := roundTrip(t, tr, t.Context()); err != nil || resp.StatusCode != 200 {
			t.Fatal(err)
		}
		if waited, want := time.Since(start), 2*time.Second+DefaultBackoffBase/2; waited < want || waited > want+time.Millisecond {
			t.Errorf("waited %v, want %v", waited, want)
		}
	})
}

// O-16 and S10: no retry starts that cannot end in time, however much budget and
// however many attempts there are.
func TestO16_NothingStartsTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		deadline := start.Add(300 * time.Millisecond)
		ctx, cancel := context.WithDeadline(t.Context(), deadline)
		defer cancel()
		n := 0
		tr := newTestTransport(t, Config{MaxAttempts: 1000, Budget: BudgetConfig{MinPerSecond: 1e5}, Backoff: Backoff{Base: time.Millisecond, Max: time.Millisecond},
			Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				n++
				if left := time.Until(deadline); left < DefaultReserve+time.Millisecond {
					t.Errorf("an attempt starts %v before the deadline", left)
				}
				select {
				case <-time.After(40 * time.Millisecond):
					return answer(503, ""), nil
				case <-r.Context().Done():
					return nil, r.Context().Err()
				}
			})})
		resp, err, o := roundTrip(t, tr, ctx)
		if (err == nil) == (resp == nil) || o.Reason != ReasonDeadline || n < 7 {
			t.Errorf("%v, %+v", err, o)
		}
		if time.Now().After(deadline) {
			t.Errorf("returned %v after the deadline", time.Since(deadline))
		}
	})
}

// O-15: waits can be interrupted, and nothing stays behind. The bubble fails the
// test if a goroutine does.
func TestO15_BackoffCanBeInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{Base: answers(status(503, "Retry-After", "9"))})
		for range 10_000 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(50*time.Millisecond, cancel)
			start := time.Now()
			_, err, _ := roundTrip(t, tr, ctx)
			if !errors.Is(err, context.Canceled) || time.Since(start) != 50*time.Millisecond {
				t.Fatalf("%v after %v", err, time.Since(start))
			}
		}
		// Early exits before the turn is taken cost nothing (O-30).
		p := tr.peers.enter("peer.test:80", time.Now())
		if taken := p.budget.utilisation(time.Now()); taken != 0 {
			t.Errorf("budget in use: %v", taken)
		}
		tr.peers.leave(p, time.Now())
		if p.inflight.Load() != 0 {
			t.Errorf("%d requests count as in flight", p.inflight.Load())
		}
	})
}

// Request.Cancel, which http.Client closes for its Timeout, ends a wait.
func TestLegacyCancelEndsAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{Base: answers(status(503, "Retry-After", "9"))})
		req := newRequest(t, t.Context(), "GET", "http://peer.test/", nil)
		cancel := make(chan struct{})
		//lint:ignore SA1019 http.Client sets it
		req.Cancel = cancel
		time.AfterFunc(time.Second, func() { close(cancel) })
		start := time.Now()
		_, err := tr.RoundTrip(req)
		if !errors.Is(err, context.Canceled) || time.Since(start) != time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

// Client.Timeout is a deadline like any other: it is sent, and ends the request
// as one.
func TestClientTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := ""
		tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			sent = r.Header.Get(HeaderTimeout)
			return hang(r)
		})})
		start := time.Now()
		_, err := (&http.Client{Transport: tr, Timeout: time.Second}).Get("http://peer.test/")
		if !isTimeout(err) || !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Second || sent != "997" {
			t.Errorf("%v after %v, %q ms were announced", err, time.Since(start), sent)
		}
	})
}

// O-09: an answer that arrives as the caller leaves is returned or closed.
func TestO09_AnswerAsTheContextEnds(t *testing.T) {
	for _, code := range []int{200, 503} {
		for range 500 {
			ctx, cancel := context.WithCancel(t.Context())
			var closed atomic.Int32
			tr := newTestTransport(t, Config{Timeout: time.Minute, AttemptTimeout: time.Minute, Base: baseFunc(func(*http.Request) (*http.Response, error) {
				go cancel()
				resp := answer(code, "")
				resp.Body = closeFunc{strings.NewReader(""), func() { closed.Add(1) }}
				return resp, nil
			})})
			resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
			if err == nil {
				resp.Body.Close()
			}
			if closed.Load() == 0 {
				t.Fatalf("%d: %v, and the answer was not closed", code, err)
			}
			cancel()
		}
	}
}

// A base that panics: the value passes through and nothing is held.
func TestPanicPassesThrough(t *testing.T) {
	var attempt context.Context
	tr := newTestTransport(t, Config{Timeout: time.Minute, AttemptTimeout: time.Minute, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		attempt = r.Context()
		panic(http.ErrAbortHandler)
	})})
	func() {
		defer func() {
			if v := recover(); v != http.ErrAbortHandler {
				t.Errorf("recovered %v", v)
			}
		}()
		tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
	}()
	p := tr.peers.enter("peer.test:80", time.Now())
	if got := p.inflight.Load(); got != 1 {
		t.Errorf("%d requests in flight besides this one", got-1)
	}
	if attempt.Err() == nil {
		t.Error("the attempt's context is alive")
	}
}

// A base that breaks its contract is mended.
func TestBaseThatBreaksItsContract(t *testing.T) {
	for _, tt := range []struct {
		name string
		base baseFunc
		ok   bool
	}{
		{"neither", func(*http.Request) (*http.Response, error) { return nil, nil }, false},
		{"both", func(*http.Request) (*http.Response, error) { return answer(200, "x"), errors.New("also") }, false},
		{"nil body", func(*http.Request) (*http.Response, error) { return &http.Response{StatusCode: 200}, nil }, true},
		{"nil body to be retried", func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 503, ContentLength: 5}, nil
		}, true},
		{"longer than it says", func(*http.Request) (*http.Response, error) {
			resp := answer(503, "longer than five")
			resp.ContentLength = 5
			return resp, nil
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				resp, err := (&http.Client{Transport: newTestTransport(t, Config{Base: tt.base})}).Get("http://peer.test/")
				if (err == nil) != tt.ok {
					t.Fatalf("%v", err)
				}
				if err == nil {
					body := readAll(t, resp)
					if tt.name == "longer than it says" && body != "longer than five" {
						t.Errorf("read %q", body)
					}
				}
			})
		})
	}
}

// A trickling answer costs a moment and no more. If the retry is then refused,
// its caller reads what came, and that it was cut.
func TestTricklingAnswerInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		go pw.Write([]byte("half")) // and never the rest
		tr := newTestTransport(t, Config{Budget: BudgetConfig{MaxWait: -1}, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(*http.Request) (*http.Response, error) {
			resp := answer(503, "")
			resp.ContentLength = 8
			resp.Body = pr
			return resp, nil
		})})
		p := tr.peers.enter("peer.test:80", time.Now())
		// While the answer is being read, another request takes the turn.
		time.AfterFunc(bodyPatience/2, func() { p.budget.take(time.Now(), time.Time{}) })
		start := time.Now()
		resp, err, o := roundTrip(t, tr, t.Context())
		if err != nil || o.Reason != ReasonTurn {
			t.Fatalf("%v, %+v", err, o)
		}
		if waited := time.Since(start); waited < bodyPatience || waited > bodyPatience+time.Millisecond {
			t.Errorf("waited %v for the body", waited)
		}
		b, err := io.ReadAll(resp.Body)
		if string(b) != "half" || err != io.ErrUnexpectedEOF {
			t.Errorf("read %q, %v", b, err)
		}
		resp.Body.Close()
		if _, err := resp.Body.Read(make([]byte, 1)); err != http.ErrBodyReadAfterClose {
			t.Errorf("read after close: %v", err)
		}
	})
}

// P7: CloseIdleConnections passes through.
func TestP7_CloseIdleConnectionsPassesThrough(t *testing.T) {
	var n atomic.Int32
	tr := newTestTransport(t, Config{Base: closer{&n}})
	(&http.Client{Transport: tr}).CloseIdleConnections()
	if n.Load() != 1 {
		t.Errorf("called %d times", n.Load())
	}
	newTestTransport(t, Config{Base: baseFunc(nil)}).CloseIdleConnections() // has none: no panic
}

type closer struct{ n *atomic.Int32 }

func (closer) RoundTrip(*http.Request) (*http.Response, error) { return nil, errors.New("unused") }
func (c closer) CloseIdleConnections()                         { c.n.Add(1) }

// P7: the body of a 101 is writable, and lives on past deadline and timeouts.
func TestP7_UpgradesWork(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n")
		rw.Flush()
		line, _ := rw.ReadString('\n')
		io.WriteString(conn, "echo "+line)
	}))
	client := startServer(t, s, false)
	tr := newTestTransport(t, Config{Base: client.Transport, Timeout: 100 * time.Millisecond, AttemptTimeout: 90 * time.Millisecond})
	req := newRequest(t, t.Context(), "GET", s.URL, nil)
	req.Header.Set("Connection", "upgrade")
	req.Header.Set("Upgrade", "echo")
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	rw, ok := resp.Body.(io.ReadWriteCloser)
	if !ok {
		t.Fatalf("%T is not writable", resp.Body)
	}
	time.Sleep(150 * time.Millisecond) // past the deadline
	if _, err := io.WriteString(rw, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(rw); string(b) != "echo hello\n" {
		t.Errorf("read %q, %v", b, err)
	}
	rw.Close()
}

// P7, O-04: a streamed upload is not buffered and not retried.
func TestO04_StreamsAreSentOnce(t *testing.T) {
	base := &sentinel{"lost"}
	for _, tt := range []struct {
		name string
		base baseFunc
		prep func(*http.Request)
		want Reason
	}{
		{"answer", answers(status(503, "Content-Type", "application/json")), nil, ReasonNotReplayable},
		{"error", answers(failure(base)), nil, ReasonNotReplayable},
		{"GetBody fails", answers(status(503)), func(r *http.Request) {
			r.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("gone") }
		}, ReasonNotReplayable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pr, pw := io.Pipe()
				go func() {
					io.WriteString(pw, "streamed")
					pw.Close()
				}()
				var o Outcome
				req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "PUT", "http://peer.test/", pr)
				if tt.prep != nil {
					tt.prep(req)
				}
				tr := newTestTransport(t, Config{Base: tt.base})
				resp, err := tr.RoundTrip(req)
				if o.Attempts != 1 || o.Reason != tt.want {
					t.Errorf("%+v", o)
				}
				if err == nil && readAll(t, resp) != "answer 503" || err != nil && err != error(base) {
					t.Errorf("%v, %v", resp, err)
				}
				p := tr.peers.enter("peer.test:80", time.Now())
				if used := p.budget.utilisation(time.Now()); used != 0 {
					t.Errorf("budget spent: %v", used)
				}
			})
		})
	}
	t.Run("not buffered", func(t *testing.T) {
		// The server has the beginning before there is an end.
		arrived := make(chan string, 1)
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b := make([]byte, 5)
			io.ReadFull(r.Body, b)
			arrived <- string(b)
			io.Copy(io.Discard, r.Body)
		}))
		client := startServer(t, s, false)
		pr, pw := io.Pipe()
		go func() {
			io.WriteString(pw, "first")
			if got := <-arrived; got != "first" {
				t.Errorf("got %q", got)
			}
			pw.Close()
		}()
		resp, err := newTestTransport(t, Config{Base: client.Transport}).RoundTrip(newRequest(t, t.Context(), "PUT", s.URL, pr))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	})
}

// Overrides compose, inner wins; an invalid one is an error and nothing is sent.
func TestOverrides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			n++
			if k := r.Header["idempotency-key"]; r.Method == "POST" && !slices.Equal(k, []string{"outer"}) {
				t.Errorf("key %v", k)
			}
			if r.Body != nil {
				r.Body.Close()
			}
			return answer(503, ""), nil
		})})
		var o Outcome
		ctx := WithOverride(t.Context(), Override{MaxAttempts: 1, IdempotencyKey: "outer", Keys: KeysOff})
		ctx = WithOverride(ctx, Override{MaxAttempts: 2, Outcome: &o})
		if _, err := tr.RoundTrip(newRequest(t, ctx, "POST", "http://peer.test/", strings.NewReader("x"))); err != nil || n != 2 {
			t.Errorf("%d attempts, %v", n, err)
		}
		if want := (Outcome{Attempts: 2, Reason: ReasonAttempts, Key: "outer"}); o != want {
			t.Errorf("got %+v, want %+v", o, want)
		}
		for _, bad := range []Override{
			{MaxAttempts: -1}, {Reserve: -1}, {Reserve: time.Hour}, {IdempotencyKey: "with space"},
			{IdempotencyKey: "line\nbreak"}, {IdempotencyKey: strings.Repeat("x", 256)}, {Keys: -1}, {Keys: 9},
		} {
			n = 0
			body := &trackedBody{Reader: strings.NewReader("x")}
			_, err := tr.RoundTrip(newRequest(t, WithOverride(t.Context(), bad), "POST", "http://peer.test/", body))
			var c *ConfigError
			if !errors.As(err, &c) || n != 0 || body.closes.Load() != 1 {
				t.Errorf("%+v: %v, sent %d times, body closed %d times", bad, err, n, body.closes.Load())
			}
			if bad.IdempotencyKey != "" && strings.Contains(err.Error(), bad.IdempotencyKey) {
				t.Errorf("the error shows the key: %v", err)
			}
		}
	})
}

// O-36: a nil URL is an error and no panic.
func TestO36_NilURL(t *testing.T) {
	req := newRequest(t, t.Context(), "GET", "http://peer.test/", nil)
	req.URL = nil
	if _, err := newTestTransport(t, Config{}).RoundTrip(req); err == nil {
		t.Error("no error")
	}
}

// A nil header map, which net/http's own transport refuses, is no reason to panic.
func TestNilHeader(t *testing.T) {
	req := newRequest(t, t.Context(), "GET", "http://peer.test/", nil)
	req.Header = nil
	tr := newTestTransport(t, Config{Timeout: time.Second, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		if r.Header.Get(HeaderDeadline) == "" {
			t.Error("no deadline")
		}
		return answer(200, ""), nil
	})})
	if _, err := tr.RoundTrip(req); err != nil {
		t.Error(err)
	}
	if req.Header != nil {
		t.Error("the caller's request has a header now")
	}
}

// P7: whichever of the configured functions panics, the panic passes, the request's
// body is closed once, and so is an answer; no peer stays in use.
func TestP7_PanicsInCallbacks(t *testing.T) {
	type panics struct{ what string }
	for name, set := range map[string]func(c *Config, panics func()){
		"Peer":       func(c *Config, f func()) { c.Peer = func(*http.Request) string { f(); return "" } },
		"Foreign":    func(c *Config, f func()) { c.Foreign = func(*http.Request) bool { f(); return false } },
		"Class":      func(c *Config, f func()) { c.Admission.Class = func(*http.Request) string { f(); return "" } },
		"RetryError": func(c *Config, f func()) { c.RetryError = func(error) bool { f(); return false } },
		"Elsewhere": func(c *Config, f func()) {
			c.Elsewhere = func(*http.Request, string) func(bool) { f(); return nil }
		},
		"Elsewhere's done": func(c *Config, f func()) {
			c.Elsewhere = func(*http.Request, string) func(bool) { return func(bool) { f() } }
		},
		"RetryStatus": func(c *Config, f func()) { c.RetryStatus = func(int) bool { f(); return false } },
		"Hook, attempt sent": func(c *Config, f func()) {
			c.Hook = func(_ context.Context, e Event) {
				if e.Kind == EventAttemptSent {
					f()
				}
			}
		},
		"Hook, attempt done": func(c *Config, f func()) {
			c.Hook = func(_ context.Context, e Event) {
				if e.Kind == EventAttemptDone {
					f()
				}
			}
		},
		"Hook, done": func(c *Config, f func()) {
			c.Hook = func(_ context.Context, e Event) {
				if e.Kind == EventDone {
					f()
				}
			}
		},
	} {
		for _, answered := range []bool{true, false} {
			if answered == (name == "RetryError") {
				continue
			}
			request, response := new(closeCounter), new(closeCounter)
			taken := false
			c := Config{MaxAttempts: 1, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				taken = true
				r.Body.Close()
				if !answered {
					return nil, io.ErrUnexpectedEOF
				}
				return &http.Response{StatusCode: 500, Header: http.Header{}, Body: response, ContentLength: -1}, nil
			})}
			if name == "RetryStatus" && !answered {
				continue // is not asked
			}
			set(&c, func() { panic(panics{name}) })
			tr := newTestTransport(t, c)
			req := newRequest(t, t.Context(), "PUT", "http://peer.test/", io.MultiReader(strings.NewReader("body")))
			req.Body = request
			func() {
				defer func() {
					if p := recover(); p != (panics{name}) {
						t.Errorf("%s: recovered %v", name, p)
					}
				}()
				tr.RoundTrip(req)
			}()
			if request.closed != 1 {
				t.Errorf("%s, answered %v: the request's body was closed %d times", name, answered, request.closed)
			}
			if taken && answered && response.closed != 1 {
				t.Errorf("%s: the answer was closed %d times", name, response.closed)
			}
			tr.peers.byName.Range(func(_, p any) bool {
				if n := p.(*peer).inflight.Load(); n != 0 {
					t.Errorf("%s: %d requests are still in flight", name, n)
				}
				return true
			})
		}
	}
}
