package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/PuerkitoBio/rehttp"
	"github.com/cristalhq/hedgedhttp"
	"github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/hashicorp/go-retryablehttp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/sony/gobreaker/v2"
	"github.com/stinthttp/stint"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
)

// A library is one RoundTripper around a base.
type library struct {
	name string
	wrap func(base http.RoundTripper) http.RoundTripper
}

// Names of rows that others are compared with, or that are not in every table.
const (
	nameStint     = "stint"
	nameMetrics   = "stint, metrics"
	nameBudget    = "failsafe-go, retry and budget"
	nameRetry     = "failsafe-go, retry"
	nameRetryable = "go-retryablehttp"
	nameRehttp    = "rehttp"
)

// libraries are set up as their documentation has it, to retry twice without
// waiting where they retry at all.
var libraries = []library{
	{nameStint, func(base http.RoundTripper) http.RoundTripper { return newStint(stint.Config{Base: base}) }},
	{nameMetrics, everything},
	{nameRetryable, newRetryable},
	{nameRetry, func(base http.RoundTripper) http.RoundTripper {
		return failsafehttp.NewRoundTripper(base, failsafehttp.NewRetryPolicyBuilder().WithMaxRetries(2).Build())
	}},
	{nameBudget, func(base http.RoundTripper) http.RoundTripper { return newBudgeted(base, budget.New()) }},
	{"hedgedhttp", func(base http.RoundTripper) http.RoundTripper {
		return must(hedgedhttp.NewRoundTripper(time.Hour, 2, base))
	}},
	{nameRehttp, func(base http.RoundTripper) http.RoundTripper {
		return rehttp.NewTransport(base, rehttp.RetryAll(rehttp.RetryMaxRetries(2), rehttp.RetryStatusInterval(502, 505)), rehttp.ConstDelay(0))
	}},
	{"gobreaker", newBreaker},
	{"promhttp, three collectors", newProm},
	{"otelhttp, no-op provider", func(base http.RoundTripper) http.RoundTripper { return otelhttp.NewTransport(base) }},
}

func newStint(c stint.Config) *stint.Transport { return must(stint.NewTransport(c)) }

func newMetrics() *stint.Metrics { return must(stint.NewMetrics(stint.MetricsConfig{})) }

// everything is a Transport with all that the targets ask for: deadline,
// companion, key, budget, admission, histogram, metrics.
func everything(base http.RoundTripper) http.RoundTripper {
	return newStint(stint.Config{Base: base, Metrics: newMetrics()})
}

// generous is a Transport whose budget lets every request be retried, at once.
func generous(base http.RoundTripper, m *stint.Metrics) http.RoundTripper {
	return newStint(stint.Config{
		Base: base, Metrics: m,
		Backoff: stint.Backoff{Base: time.Nanosecond, Max: time.Nanosecond},
		Budget:  stint.BudgetConfig{Ratio: 1, MinPerSecond: 1e6},
	})
}

func newRetryable(base http.RoundTripper) http.RoundTripper {
	c := retryablehttp.NewClient()
	c.HTTPClient.Transport = base
	c.Logger = nil
	c.RetryMax = 2
	c.RetryWaitMin, c.RetryWaitMax = 0, 0
	return &retryablehttp.RoundTripper{Client: c}
}

func newBudgeted(base http.RoundTripper, b budget.Budget) http.RoundTripper {
	return failsafehttp.NewRoundTripper(base, failsafehttp.NewRetryPolicyBuilder().WithMaxRetries(2).WithBudget(b).Build())
}

// newSpent returns a failsafe-go client whose budget is used up: it is one of
// concurrency, so a retry that never ends uses it.
func newSpent(base http.RoundTripper) http.RoundTripper {
	b := budget.NewBuilder().WithMaxRate(0).WithMinConcurrency(0).Build()
	held, attempts := make(chan struct{}), 0
	holder := newBudgeted(roundTripper(func(r *http.Request) (*http.Response, error) {
		if attempts++; attempts == 2 {
			close(held)
			select {} // as long as the process
		}
		return answer(r, http.StatusServiceUnavailable), nil
	}), b)
	go holder.RoundTrip(inProcess(http.MethodGet, edgeContext, 1).request())
	<-held
	return newBudgeted(base, b)
}

func newBreaker(base http.RoundTripper) http.RoundTripper {
	breaker := gobreaker.NewCircuitBreaker[*http.Response](gobreaker.Settings{})
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		return breaker.Execute(func() (*http.Response, error) { return base.RoundTrip(r) })
	})
}

func newProm(base http.RoundTripper) http.RoundTripper {
	inFlight := prometheus.NewGauge(prometheus.GaugeOpts{Name: "client_in_flight"})
	count := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "client_requests_total"}, []string{"code", "method"})
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "client_duration_seconds"}, []string{"code", "method"})
	prometheus.NewRegistry().MustRegister(inFlight, count, took)
	return promhttp.InstrumentRoundTripperInFlight(inFlight,
		promhttp.InstrumentRoundTripperCounter(count, promhttp.InstrumentRoundTripperDuration(took, base)))
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// noop answers from memory.
func noop() http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) { return answer(r, http.StatusOK), nil })
}

// down answers 503 for ever.
func down() http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		return answer(r, http.StatusServiceUnavailable), nil
	})
}

// failingOnce answers 503 to the first attempt of each request and 200 to the
// second. For one goroutine.
func failingOnce() http.RoundTripper {
	failed := false
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if failed = !failed; failed {
			return answer(r, http.StatusServiceUnavailable), nil
		}
		return answer(r, http.StatusOK), nil
	})
}

func answer(r *http.Request, status int) *http.Response {
	if r.Body != nil {
		var buf [256]byte
		for {
			if _, err := r.Body.Read(buf[:]); err != nil {
				break
			}
		}
		r.Body.Close()
	}
	return &http.Response{StatusCode: status, ProtoMajor: 1, ProtoMinor: 1, Header: noHeader, Body: http.NoBody, Request: r}
}

var noHeader = http.Header{}

// A load is the requests that are sent, and by how many goroutines at once.
type load struct {
	method     string
	ctx        context.Context
	goroutines int
	body       []byte
	target     *url.URL
}

func inProcess(method string, ctx context.Context, goroutines int) load {
	l := load{method: method, ctx: ctx, goroutines: goroutines, target: must(url.Parse("http://ledger.internal:8080/accounts/17"))}
	if method == http.MethodPost {
		l.body = []byte(`{"amount": 4200, "currency": "EUR"}`)
	}
	return l
}

// request returns a request as http.NewRequest would make it.
func (l load) request() *http.Request {
	req := (&http.Request{
		Method: l.method, URL: l.target, Host: l.target.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Accept": {"application/json"}, "User-Agent": {"bench"}},
	}).WithContext(l.ctx)
	if l.body != nil {
		req.Body = io.NopCloser(bytes.NewReader(l.body))
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(l.body)), nil }
		req.ContentLength = int64(len(l.body))
	}
	return req
}

// through returns the subject that sends the load through rt.
func (l load) through(name string, rt http.RoundTripper) subject {
	return subject{name, func(n int) {
		if l.goroutines <= 1 {
			l.send(rt, n)
			return
		}
		var wg sync.WaitGroup
		for i := range l.goroutines {
			share := n / l.goroutines
			if i < n%l.goroutines {
				share++
			}
			wg.Go(func() { l.send(rt, share) })
		}
		wg.Wait()
	}}
}

func (l load) send(rt http.RoundTripper, n int) {
	req := l.request()
	for i := range n {
		if l.body != nil && i > 0 {
			req = l.request() // one with a body is good for one RoundTrip
		}
		exchange(rt, req)
	}
}

func exchange(rt http.RoundTripper, req *http.Request) {
	if resp, err := rt.RoundTrip(req); err == nil {
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

// around sends GETs to peers in turn.
func (l load) around(name string, rt http.RoundTripper, peers int) subject {
	requests := make([]*http.Request, peers)
	for i := range requests {
		requests[i] = l.to(i)
	}
	next := 0
	return subject{name, func(n int) {
		for range n {
			exchange(rt, requests[next])
			if next++; next == peers {
				next = 0
			}
		}
	}}
}

// to returns a request to the host of that number.
func (l load) to(host int) *http.Request {
	target := *l.target
	target.Host = "host-" + strconv.Itoa(host) + ".internal:8080"
	req := l.request()
	req.URL, req.Host = &target, target.Host
	return req
}

// newcomers sends each request to a peer never seen before: after 100 of them,
// less than there are metric labels, it starts again with a new RoundTripper.
func (l load) newcomers(name string, wrap func() http.RoundTripper) subject {
	const peers = 100
	requests := make([]*http.Request, peers)
	for i := range requests {
		requests[i] = l.to(i)
	}
	rt, next := wrap(), 0
	return subject{name, func(n int) {
		for range n {
			if next == peers {
				rt, next = wrap(), 0
			}
			exchange(rt, requests[next])
			next++
		}
	}}
}

// Contexts that are there as long as the process: of a first tier, with a
// deadline of its own, and of a server's request, which can be cancelled.
var (
	edgeContext, endEdge       = context.WithTimeout(context.Background(), time.Hour)
	inboundContext, endInbound = context.WithCancel(context.Background())
)

// middleTier is the context of a handler whose request came with a deadline.
func middleTier() context.Context {
	in := inProcess(http.MethodGet, context.Background(), 1).request()
	in.Header[stint.HeaderDeadline] = []string{strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10)}
	mw := must(stint.NewMiddleware(stint.MiddlewareConfig{}))
	req, _, err := mw.Adopt(in) // as long as the process
	if err != nil {
		panic(err)
	}
	return req.Context()
}

// late is a context that always has too little time left for an attempt.
type late struct{ context.Context }

func (late) Deadline() (time.Time, bool) { return time.Now().Add(time.Millisecond), true }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// wrapOf returns how the library of that name is put around a base.
func wrapOf(name string) func(http.RoundTripper) http.RoundTripper {
	for _, l := range libraries {
		if l.name == name {
			return l.wrap
		}
	}
	panic("no library " + name)
}
