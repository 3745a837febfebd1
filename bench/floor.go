package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stinthttp/stint"
)

// needed is the least that a RoundTripper can do that sends headers of its own,
// keeps a histogram and counts. It decides nothing, retries nothing, knows one
// peer and no error, and takes short cuts that a library cannot.
type needed struct {
	base     http.RoundTripper
	requests prometheus.Counter
	attempts prometheus.Counter
	outcomes prometheus.Counter
	took     prometheus.Histogram
	latency  [1024]atomic.Uint32
}

func newNeeded(base http.RoundTripper) http.RoundTripper {
	counter := func() prometheus.Counter { return prometheus.NewCounter(prometheus.CounterOpts{Name: "needed_total"}) }
	return &needed{
		base: base, requests: counter(), attempts: counter(), outcomes: counter(),
		took: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "needed_seconds"}),
	}
}

func (n *needed) RoundTrip(req *http.Request) (*http.Response, error) {
	n.requests.Inc()
	begin := time.Now()
	ctx := req.Context()
	deadline, _ := ctx.Deadline()
	if req.Body != nil {
		ctx = traced(ctx)
	}
	out := req.WithContext(ctx) // one allocation, the header map another
	h := make(http.Header, len(req.Header)+3)
	maps.Copy(h, req.Header)
	lines := []string{
		strconv.FormatInt(deadline.UnixMilli(), 10),
		strconv.FormatInt(deadline.Sub(begin).Milliseconds(), 10),
		"",
	}
	h[stint.HeaderDeadline], h[stint.HeaderTimeout] = lines[0:1:1], lines[1:2:2]
	if req.Body != nil {
		lines[2] = newKey()
		h[stint.HeaderIdempotencyKey] = lines[2:3:3]
		out.Body = &watchedBody{ReadCloser: req.Body}
	}
	out.Header = h
	n.attempts.Inc()
	resp, err := n.base.RoundTrip(out)
	took := time.Since(begin)
	n.latency[min(len(n.latency)-1, int(took>>10))].Add(1)
	n.took.Observe(took.Seconds())
	n.outcomes.Inc()
	return resp, err
}

// A watchedBody knows whether its reader has left.
type watchedBody struct {
	io.ReadCloser
	closed atomic.Bool
}

func (b *watchedBody) Close() error {
	b.closed.Store(true)
	return b.ReadCloser.Close()
}

// traced returns a context that tells whether a request was written, which
// decides whether it may be repeated.
func traced(ctx context.Context) context.Context {
	wrote := new(atomic.Bool)
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		WroteHeaders: func() { wrote.Store(true) },
	})
}

func newKey() string {
	var b [16]byte
	rand.Read(b[:])
	var text [32]byte
	hex.Encode(text[:], b[:])
	return string(text[:])
}

// What the parts make goes here, or the compiler would leave it out.
var (
	sink any
	now  time.Time
)

// parts are what the floor consists of.
func floorParts() []subject {
	req := inProcess(http.MethodGet, edgeContext, 1).request()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "part_total"})
	histogram := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "part_seconds"})
	part := func(name string, f func()) subject {
		return subject{name, func(n int) {
			for range n {
				f()
			}
		}}
	}
	return []subject{
		part("a copy of the request", func() { sink = req.WithContext(edgeContext) }),
		part("a copy of its header map, with room for three", func() {
			h := make(http.Header, len(req.Header)+3)
			maps.Copy(h, req.Header)
			sink = h
		}),
		part("a number as a header value", func() { sink = []string{strconv.FormatInt(1796035151914, 10)} }),
		part("a reading of the clock", func() { now = time.Now() }),
		part("a counter", counter.Inc),
		part("a histogram of client_golang", func() { histogram.Observe(0.004) }),
		part("an idempotency key", func() { sink = newKey() }),
		part("httptrace in the context", func() { sink = traced(edgeContext) }),
		part("context.WithDeadline, and its cancel", func() {
			ctx, cancel := context.WithDeadline(inboundContext, floorDeadline)
			sink = ctx
			cancel()
		}),
	}
}

var floorDeadline = time.Now().Add(time.Hour)

// floorTable: the parts, their sum in working order, and how far above it the
// paths are.
func (r *run) floorTable() {
	t := r.table("floor", "what has to be paid", "allocations", "CPU time", "stint, metrics, ÷ that")
	nothing := subject{"nothing", func(n int) {
		for range n {
			now = floorDeadline
		}
	}}
	parts := floorParts()
	for i, c := range measure(r.effort, nothing, parts...) {
		t.add(c.name, strconv.Itoa(allocs(parts[i])), nanos(median(c.total)), "")
	}
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		l := inProcess(method, edgeContext, 1)
		bare, floor := l.through("bare", noop()), l.through("floor", newNeeded(noop()))
		costs := measure(r.effort, bare, floor, l.through("stint", everything(noop())))
		t.add(method+": all that it needs, without a decision", strconv.Itoa(addedAllocs(bare, floor)),
			nanos(median(costs[0].added())), times(ratio(costs[1].added(), costs[0].added())))
	}
	in := inbound(time.Now().Add(30 * time.Minute))
	bare, floor := serving("bare", hello, in), serving("floor", necessary(hello), in)
	ours := serving("stint", middleware(stint.MiddlewareConfig{Metrics: newMetrics()}).Handler(hello), in)
	costs := measure(r.effort, bare, floor, ours)
	t.add("server: "+nameParts, strconv.Itoa(addedAllocs(bare, floor)),
		nanos(median(costs[0].added())), times(ratio(costs[1].added(), costs[0].added())))
	runtime.KeepAlive(sink)
	runtime.KeepAlive(now)
}
