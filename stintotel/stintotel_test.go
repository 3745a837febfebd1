package stintotel_test

import (
	"cmp"
	"context"
	"fmt"
	"go/build"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/stintotel"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

// A backend is where the spans of all services end up.
type backend struct {
	t        *testing.T
	exporter *tracetest.InMemoryExporter
}

func newBackend(t *testing.T) *backend { return &backend{t, tracetest.NewInMemoryExporter()} }

// provider is what a service of its own would have.
func (b *backend) provider(service string) *sdktrace.TracerProvider {
	p := sdktrace.NewTracerProvider(sdktrace.WithSyncer(b.exporter),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", service))))
	b.t.Cleanup(func() { p.Shutdown(context.Background()) })
	return p
}

func (b *backend) options(service string) []otelhttp.Option {
	return []otelhttp.Option{
		otelhttp.WithTracerProvider(b.provider(service)), otelhttp.WithPropagators(propagation.TraceContext{}),
	}
}

// client returns a client of the service, in the order that the package
// recommends.
func (b *backend) client(service string, c stint.Config) *http.Client {
	b.t.Helper()
	pool := &http.Transport{}
	b.t.Cleanup(pool.CloseIdleConnections)
	c.Base = otelhttp.NewTransport(stintotel.Transport(pool), b.options(service)...)
	c.Hook = stintotel.Hook
	transport, err := stint.NewTransport(c)
	if err != nil {
		b.t.Fatal(err)
	}
	return &http.Client{Transport: transport}
}

// serve runs a service and returns its URL.
func (b *backend) serve(service string, timeout time.Duration, h http.HandlerFunc) string {
	b.t.Helper()
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: service, Timeout: timeout, Hook: stintotel.Hook})
	if err != nil {
		b.t.Fatal(err)
	}
	server := httptest.NewServer(otelhttp.NewHandler(middleware.Handler(h), service, b.options(service)...))
	b.t.Cleanup(server.Close)
	return server.URL
}

// call answers with what url says.
func call(client *http.Client, url string, w http.ResponseWriter, r *http.Request) {
	req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, url, nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	resp, err := client.Do(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	w.WriteHeader(resp.StatusCode)
	io.Copy(w, resp.Body)
}

// A node is a span with those that it caused, in their order.
type node struct {
	tracetest.SpanStub
	children []*node
}

// traces waits for n spans and returns the roots.
func (b *backend) traces(n int) (roots []*node) {
	b.t.Helper()
	// A server's span ends a moment after its client has the answer.
	var spans tracetest.SpanStubs
	for range 200 {
		if spans = b.exporter.GetSpans(); len(spans) >= n {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if len(spans) != n {
		b.t.Fatalf("%d spans, want %d: %v", len(spans), n, spans)
	}
	nodes := map[trace.SpanID]*node{}
	for _, s := range spans {
		nodes[s.SpanContext.SpanID()] = &node{SpanStub: s}
	}
	for _, s := range nodes {
		if parent := nodes[s.Parent.SpanID()]; parent != nil {
			parent.children = append(parent.children, s)
		} else {
			roots = append(roots, s)
		}
	}
	for _, s := range nodes {
		slices.SortFunc(s.children, func(a, b *node) int { return a.StartTime.Compare(b.StartTime) })
	}
	return roots
}

// number returns an attribute, and whether there is one.
func number(as []attribute.KeyValue, key attribute.Key) (int64, bool) {
	for _, a := range as {
		if a.Key == key {
			return a.Value.AsInt64(), true
		}
	}
	return 0, false
}

func text(as []attribute.KeyValue, key attribute.Key) string {
	for _, a := range as {
		if a.Key == key {
			return a.Value.AsString()
		}
	}
	return ""
}

func (n *node) service() string { return text(n.Resource.Attributes(), "service.name") }

// events returns the attributes of the span's events of that name.
func (n *node) events(name string) (found [][]attribute.KeyValue) {
	for _, e := range n.Events {
		if e.Name == name {
			found = append(found, e.Attributes)
		}
	}
	return found
}

func (n *node) has(t *testing.T, key attribute.Key) int64 {
	t.Helper()
	v, ok := number(n.Attributes, key)
	if !ok {
		t.Errorf("%s: the %s span has no %s: %v", n.service(), n.SpanKind, key, n.Attributes)
	}
	return v
}

func (n *node) took() time.Duration { return n.EndTime.Sub(n.StartTime) }

// own is the time that a service itself took: without its calls.
func (n *node) own() time.Duration {
	d := n.took()
	for _, c := range n.children {
		d -= c.took()
	}
	return d
}

// TestThreeHops reads the trace of one slow request as an operator would, and
// finds which hop used the time: orders, which is neither where it was noticed
// nor where it ended.
func TestThreeHops(t *testing.T) {
	b := newBackend(t)
	var asked atomic.Int32
	ledger := b.serve("ledger", 0, func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 1 {
			http.Error(w, "not yet", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "a row")
	})
	const work = 500 * time.Millisecond
	ordersClient := b.client("orders", stint.Config{})
	orders := b.serve("orders", 0, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(work)
		call(ordersClient, ledger, w, r)
	})
	edgeClient := b.client("edge", stint.Config{})
	edge := b.serve("edge", 5*time.Second, func(w http.ResponseWriter, r *http.Request) {
		call(edgeClient, orders, w, r)
	})
	resp, err := http.Get(edge)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}

	// edge → attempt → orders → attempt, attempt → ledger, ledger.
	roots := b.traces(7)
	if len(roots) != 1 || len(roots[0].children) != 1 || len(roots[0].children[0].children) != 1 {
		t.Fatalf("the trace is not one chain: %+v", roots)
	}
	atEdge := roots[0]
	toOrders := atEdge.children[0]
	atOrders := toOrders.children[0]
	toLedger := atOrders.children
	if len(toLedger) != 2 || len(toLedger[0].children) != 1 || len(toLedger[1].children) != 1 {
		t.Fatalf("orders made %d calls, want two attempts side by side, each with its server span", len(toLedger))
	}
	atLedger := toLedger[1].children[0]

	// One span per attempt, and the second says that it is one.
	for i, want := range []int64{0, 1} {
		if toLedger[i].SpanKind != trace.SpanKindClient {
			t.Errorf("attempt %d is a %s span", i+1, toLedger[i].SpanKind)
		}
		if got, ok := number(toLedger[i].Attributes, stintotel.ResendCountKey); got != want || ok != (want > 0) {
			t.Errorf("attempt %d: http.request.resend_count %d (%v), want %d", i+1, got, ok, want)
		}
		if got, ok := number(toLedger[i].children[0].Attributes, stintotel.RetryCountKey); got != want || ok != (want > 0) {
			t.Errorf("attempt %d, on arrival: stint.retry_count %d (%v), want %d", i+1, got, ok, want)
		}
	}
	for i, want := range []int64{503, 200} {
		if got := toLedger[i].has(t, "http.response.status_code"); got != want {
			t.Errorf("attempt %d: status %d, want %d", i+1, got, want)
		}
	}
	if retries := atOrders.events(stintotel.EventRetry); len(retries) != 1 {
		t.Errorf("orders: %d events %s, want 1", len(retries), stintotel.EventRetry)
	} else if n, _ := number(retries[0], stintotel.AttemptKey); n != 1 || text(retries[0], stintotel.PeerKey) == "" {
		t.Errorf("the event of the retry: %v", retries[0])
	} else if status, _ := number(retries[0], stintotel.StatusKey); status != http.StatusServiceUnavailable {
		t.Errorf("the event of the retry has status %d, want that of the attempt that failed", status)
	}

	// The deadline is on every span of both sides, the same at both ends of an
	// attempt, and never rises.
	chain := []*node{atEdge, toOrders, atOrders, toLedger[0], toLedger[0].children[0], toLedger[1], atLedger}
	for i, n := range chain {
		d := n.has(t, stintotel.DeadlineKey)
		if i == 0 {
			continue
		}
		if above := chain[i-1].has(t, stintotel.DeadlineKey); d > above {
			t.Errorf("%s %s: deadline %d, %d above it", n.service(), n.SpanKind, d, above)
		} else if n.SpanKind == trace.SpanKindServer && d != above {
			t.Errorf("%s: deadline %d on arrival, %d when sent", n.service(), d, above)
		}
	}

	// Where the time went, by the spans …
	hops := []*node{atEdge, atOrders, atLedger}
	slowest := slices.MaxFunc(hops, func(a, b *node) int { return cmp.Compare(a.own(), b.own()) })
	if slowest.service() != "orders" || slowest.own() < work {
		t.Errorf("%s took most of the time itself, %v; want orders with %v", slowest.service(), slowest.own(), work)
	}
	// … and by what was left on arrival, where a span is missing.
	var left []int64
	for _, n := range hops {
		left = append(left, n.has(t, stintotel.RemainingKey))
	}
	if inEdge, inOrders := left[0]-left[1], left[1]-left[2]; inOrders < work.Milliseconds() || inOrders < inEdge {
		t.Errorf("left on arrival: %d ms; want it to fall by %v in orders", left, work)
	}
	if sent := toLedger[0].has(t, stintotel.RemainingKey); sent > left[1]-work.Milliseconds() {
		t.Errorf("the ledger was given %d ms, orders had %d on arrival", sent, left[1])
	}
}

// TestRefused has the two ends of a call that is given up, and the reasons.
func TestRefused(t *testing.T) {
	b := newBackend(t)
	ledger := b.serve("ledger", 0, func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "down", http.StatusServiceUnavailable)
	})
	client := b.client("orders", stint.Config{MaxAttempts: 2})
	orders := b.serve("orders", time.Second, func(w http.ResponseWriter, r *http.Request) {
		call(client, ledger, w, r)
	})
	resp, err := http.Get(orders)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	atOrders := b.traces(5)[0]
	refused := atOrders.events(stintotel.EventRefused)
	if len(refused) != 1 || text(refused[0], stintotel.ReasonKey) != string(stint.ReasonAttempts) {
		t.Fatalf("events %v, want one with the reason attempts", refused)
	}
	if n, _ := number(refused[0], stintotel.AttemptKey); n != 2 {
		t.Errorf("%d attempts, want 2", n)
	}

	// Too late on arrival: the 504 is on the server's span, with the reason, and
	// nothing is below it.
	b.exporter.Reset()
	req, err := http.NewRequest(http.MethodGet, orders, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(stint.HeaderDeadline, "1")
	if resp, err = http.DefaultClient.Do(req); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	late := b.traces(1)[0]
	if got := late.has(t, "http.response.status_code"); got != http.StatusGatewayTimeout {
		t.Errorf("status %d", got)
	}
	if got := late.has(t, stintotel.RemainingKey); got >= 0 {
		t.Errorf("%d ms were left", got)
	}
	if expired := late.events(stintotel.EventExpired); len(expired) != 1 || text(expired[0], stintotel.ReasonKey) != string(stint.ReasonExpired) {
		t.Errorf("events %v", late.Events)
	}

	// Nothing was sent, so there is no client span: the caller's says why.
	b.exporter.Reset()
	ctx, span := b.provider("job").Tracer("test").Start(t.Context(), "job")
	ctx, cancel := context.WithTimeout(ctx, 2*time.Millisecond) // less than the reserve
	defer cancel()
	if req, err = http.NewRequestWithContext(ctx, http.MethodGet, ledger, nil); err != nil {
		t.Fatal(err)
	}
	if resp, err = client.Do(req); err == nil {
		resp.Body.Close()
		t.Error("it was sent")
	}
	span.End()
	job := b.traces(1)[0]
	if refused := job.events(stintotel.EventRefused); len(refused) != 1 || text(refused[0], stintotel.ReasonKey) != string(stint.ReasonDeadline) {
		t.Errorf("events %v", job.Events)
	}
}

// TestInvalid is a header that is refused.
func TestInvalid(t *testing.T) {
	b := newBackend(t)
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{RejectInvalid: true, Hook: stintotel.Hook})
	if err != nil {
		t.Fatal(err)
	}
	h := otelhttp.NewHandler(middleware.Handler(http.NotFoundHandler()), "orders", b.options("client")...)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set(stint.HeaderDeadline, "soon")
	h.ServeHTTP(httptest.NewRecorder(), r)
	if refused := b.traces(1)[0].events(stintotel.EventRefused); len(refused) != 1 || text(refused[0], stintotel.ReasonKey) != string(stint.ReasonInvalid) {
		t.Errorf("events %v", refused)
	}
}

// TestShed is a retry that is refused.
func TestShed(t *testing.T) {
	b := newBackend(t)
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{RetryBudget: &stint.BudgetConfig{MinPerSecond: -1}, Hook: stintotel.Hook})
	if err != nil {
		t.Fatal(err)
	}
	h := otelhttp.NewHandler(middleware.Handler(http.NotFoundHandler()), "orders", b.options("client")...)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set(stint.HeaderRetryCount, "1")
	h.ServeHTTP(httptest.NewRecorder(), r)
	if refused := b.traces(1)[0].events(stintotel.EventRefused); len(refused) != 1 || text(refused[0], stintotel.ReasonKey) != string(stint.ReasonRetries) {
		t.Errorf("events %v", refused)
	}
}

// TestOneSpan is the other order: otelhttp outside. The one span tells of the
// attempts below it.
func TestOneSpan(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()
	b := newBackend(t)
	transport, err := stint.NewTransport(stint.Config{
		Timeout: time.Minute, Base: stintotel.Transport(nil), Hook: stintotel.Hook,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: otelhttp.NewTransport(transport, b.options("client")...)}
	const key = "order-77-of-somebody"
	req, err := http.NewRequest(http.MethodPut, server.URL+"/secret-path", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Idempotency-Key", key)
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	span := b.traces(1)[0]
	if got := span.has(t, stintotel.ResendCountKey); got != 1 {
		t.Errorf("http.request.resend_count %d, want 1", got)
	}
	if got, want := span.has(t, stintotel.DeadlineKey), time.Now().Add(time.Minute).UnixMilli(); got > want || got < want-30_000 {
		t.Errorf("deadline %d, want about %d", got, want)
	}
	if n := len(span.events(stintotel.EventRetry)); n != 1 {
		t.Errorf("%d events for the retry", n)
	}
	// Ours hold neither keys nor URLs.
	for _, e := range span.Events {
		if s := fmt.Sprint(e.Attributes); strings.Contains(s, key) || strings.Contains(s, "secret") {
			t.Errorf("an event says %s", s)
		}
	}
}

type fake struct {
	got    *http.Request
	closed bool
}

func (f *fake) RoundTrip(r *http.Request) (*http.Response, error) {
	f.got = r
	return &http.Response{StatusCode: 200, Body: http.NoBody, Request: r}, nil
}

func (f *fake) CloseIdleConnections() { f.closed = true }

// TestTransparent: the annotator changes nothing on the way down.
func TestTransparent(t *testing.T) {
	b := newBackend(t)
	ctx, span := b.provider("job").Tracer("test").Start(t.Context(), "job")
	base := new(fake)
	rt := stintotel.Transport(base)
	req := httptest.NewRequest(http.MethodGet, "/", nil).WithContext(ctx)
	req.Header.Set(stint.HeaderDeadline, "soon") // whoever set it
	if _, err := rt.RoundTrip(req); err != nil || base.got != req || len(req.Header) != 1 {
		t.Errorf("error %v, request %v", err, base.got)
	}
	rt.(interface{ CloseIdleConnections() }).CloseIdleConnections()
	if !base.closed {
		t.Error("CloseIdleConnections does not reach the base")
	}
	span.End()
	if as := b.traces(1)[0].Attributes; len(as) != 0 {
		t.Errorf("attributes %v", as)
	}
}

// TestNoSpan: where nothing is recorded it costs nothing.
func TestNoSpan(t *testing.T) {
	event := stint.Event{Kind: stint.EventRefused, Reason: stint.ReasonBudget, Peer: "ledger", Attempt: 1}
	if n := testing.AllocsPerRun(100, func() { stintotel.Hook(context.Background(), event) }); n != 0 {
		t.Errorf("%v allocations without a span", n)
	}
	rt := stintotel.Transport(new(fake))
	req := httptest.NewRequest(http.MethodGet, "/", nil)
	if _, err := rt.RoundTrip(req); err != nil {
		t.Error(err)
	}
}

// TestImports: who uses the hook does not get the SDK with it.
func TestImports(t *testing.T) {
	p, err := build.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range p.Imports {
		if !strings.Contains(path, ".") {
			continue
		}
		switch path {
		case "github.com/stinthttp/stint", "go.opentelemetry.io/otel/attribute", "go.opentelemetry.io/otel/trace":
		default:
			t.Errorf("it imports %s", path)
		}
	}
}

func BenchmarkHook(b *testing.B) {
	provider := sdktrace.NewTracerProvider()
	defer provider.Shutdown(context.Background())
	event := stint.Event{Kind: stint.EventArrived, Service: "orders", DeadlineMS: 1, Remaining: time.Second, Attempt: 1}
	for name, ctx := range map[string]context.Context{
		"none": context.Background(),
		"span": func() context.Context { c, _ := provider.Tracer("b").Start(context.Background(), "s"); return c }(),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				stintotel.Hook(ctx, event)
			}
		})
	}
}
