package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/felixge/httpsnoop"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stinthttp/stint"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
)

const (
	nameTimeoutHandler = "http.TimeoutHandler"
	nameParts          = "the necessary parts"
)

// A wrapper is one middleware around a handler.
type wrapper struct {
	name string
	wrap func(next http.Handler) http.Handler
}

var wrappers = []wrapper{
	{nameStint, func(next http.Handler) http.Handler { return middleware(stint.MiddlewareConfig{}).Handler(next) }},
	{nameMetrics, func(next http.Handler) http.Handler {
		return middleware(stint.MiddlewareConfig{Metrics: newMetrics()}).Handler(next)
	}},
	{"httpsnoop.CaptureMetrics", func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { httpsnoop.CaptureMetrics(next, w, r) })
	}},
	{nameTimeoutHandler, func(next http.Handler) http.Handler { return http.TimeoutHandler(next, time.Hour, "") }},
	{"promhttp, three collectors", serverProm},
	{"otelhttp, no-op provider", func(next http.Handler) http.Handler { return otelhttp.NewHandler(next, "bench") }},
	{nameParts, necessary},
}

func middleware(c stint.MiddlewareConfig) *stint.Middleware { return must(stint.NewMiddleware(c)) }

func serverProm(next http.Handler) http.Handler {
	inFlight := prometheus.NewGauge(prometheus.GaugeOpts{Name: "server_in_flight"})
	count := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "server_requests_total"}, []string{"code", "method"})
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "server_duration_seconds"}, []string{"code", "method"})
	prometheus.NewRegistry().MustRegister(inFlight, count, took)
	return promhttp.InstrumentHandlerInFlight(inFlight,
		promhttp.InstrumentHandlerCounter(count, promhttp.InstrumentHandlerDuration(took, next)))
}

// necessary is what no middleware can do without that adopts a deadline, sees
// every way in which an answer begins, and counts: a writer wrapped with a hook
// for each way, a context with the deadline and a request with the context, two
// counters and a histogram. There is no decision in it. The functions that make
// the hooks are made once, as the middleware has them.
func necessary(next http.Handler) http.Handler {
	requests := prometheus.NewCounter(prometheus.CounterOpts{Name: "parts_requests_total"})
	answers := prometheus.NewCounter(prometheus.CounterOpts{Name: "parts_answers_total"})
	left := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "parts_remaining_seconds"})
	pool := sync.Pool{New: func() any { return newParts() }}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Inc()
		ms, err := strconv.ParseInt(r.Header.Get(stint.HeaderDeadline), 10, 64)
		if err != nil {
			panic(err)
		}
		deadline := time.UnixMilli(ms)
		left.Observe(time.Until(deadline).Seconds())
		ctx, cancel := context.WithDeadline(r.Context(), deadline)
		defer cancel()
		p := pool.Get().(*parts)
		p.began = new(bool)
		wrapped := httpsnoop.Wrap(w, p.hooks)
		p.began = nil
		pool.Put(p)
		next.ServeHTTP(wrapped, r.WithContext(ctx))
		answers.Inc()
	})
}

type parts struct {
	began *bool // by the exchange that is being wrapped
	hooks httpsnoop.Hooks
}

func newParts() *parts {
	p := new(parts)
	p.hooks = httpsnoop.Hooks{
		WriteHeader: func(next httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc {
			began := p.began
			return func(code int) { *began = true; next(code) }
		},
		Write: func(next httpsnoop.WriteFunc) httpsnoop.WriteFunc {
			began := p.began
			return func(b []byte) (int, error) { *began = true; return next(b) }
		},
		WriteString: func(next httpsnoop.WriteStringFunc) httpsnoop.WriteStringFunc {
			began := p.began
			return func(s string) (int, error) { *began = true; return next(s) }
		},
		ReadFrom: func(next httpsnoop.ReadFromFunc) httpsnoop.ReadFromFunc {
			began := p.began
			return func(src io.Reader) (int64, error) { *began = true; return next(src) }
		},
		Flush: func(next httpsnoop.FlushFunc) httpsnoop.FlushFunc {
			began := p.began
			return func() { *began = true; next() }
		},
		FlushError: func(next httpsnoop.FlushErrorFunc) httpsnoop.FlushErrorFunc {
			began := p.began
			return func() error { *began = true; return next() }
		},
		Hijack: func(next httpsnoop.HijackFunc) httpsnoop.HijackFunc {
			began := p.began
			return func() (net.Conn, *bufio.ReadWriter, error) { *began = true; return next() }
		},
	}
	return p
}

// inbound is a request as net/http hands it to a handler: with a context that
// can be cancelled, and with the headers of ours where there is a deadline.
func inbound(deadline time.Time) *http.Request {
	l := inProcess(http.MethodGet, inboundContext, 1)
	r := l.request()
	r.RemoteAddr, r.RequestURI, r.Body = "127.0.0.1:40000", l.target.Path, http.NoBody
	if !deadline.IsZero() {
		left := max(1, time.Until(deadline).Milliseconds())
		r.Header[stint.HeaderDeadline] = []string{strconv.FormatInt(deadline.UnixMilli(), 10)}
		r.Header[stint.HeaderTimeout] = []string{strconv.FormatInt(left, 10)}
	}
	return r
}

// serving returns the subject that has h serve the request.
func serving(name string, h http.Handler, r *http.Request) subject {
	w := &writer{header: http.Header{}}
	return subject{name, func(n int) {
		for range n {
			clear(w.header)
			h.ServeHTTP(w, r)
		}
	}}
}

// hello is the handler under all of them: a short answer, as of a health check.
var hello = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write(helloText) })

var helloText = []byte("hello\n")

// empty answers without a body.
var empty = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) })

// A writer has the methods of net/http's own, and throws everything away: what a
// middleware wraps depends on them.
type writer struct{ header http.Header }

func (w *writer) Header() http.Header                 { return w.header }
func (w *writer) WriteHeader(int)                     {}
func (w *writer) Write(b []byte) (int, error)         { return len(b), nil }
func (w *writer) WriteString(s string) (int, error)   { return len(s), nil }
func (w *writer) ReadFrom(r io.Reader) (int64, error) { return io.Copy(io.Discard, r) }
func (w *writer) Flush()                              {}
func (w *writer) FlushError() error                   { return nil }
func (w *writer) CloseNotify() <-chan bool            { return nil }
func (w *writer) SetReadDeadline(time.Time) error     { return nil }
func (w *writer) SetWriteDeadline(time.Time) error    { return nil }
func (w *writer) EnableFullDuplex() error             { return nil }
func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return nil, nil, http.ErrNotSupported
}
