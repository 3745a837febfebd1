package stinttest_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/stinttest"
)

// A printer is a stinttest.TB that prints. In a test, pass the *testing.T.
type printer struct{ cleanups []func() }

func (p *printer) Helper()                        {}
func (p *printer) Errorf(format string, a ...any) { fmt.Printf(format+"\n", a...) }
func (p *printer) Fatalf(format string, a ...any) { fmt.Printf(format+"\n", a...) }
func (p *printer) Cleanup(f func())               { p.cleanups = append(p.cleanups, f) }

func (p *printer) end() {
	for _, f := range p.cleanups {
		f()
	}
}

// In a chain edge → orders → ledger, orders calls the ledger with a timeout that
// it makes from context.Background. Whatever its caller has left, the ledger gets
// thirty seconds: long after the user has gone, it is still at work. Made from
// the request's context, the same timeout can only shorten.
func ExampleDeadlineNeverRises() {
	transport, err := stint.NewTransport(stint.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer transport.CloseIdleConnections()
	mw, err := stint.NewMiddleware(stint.MiddlewareConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	call := func(ctx context.Context, url string) {
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if resp, err := (&http.Client{Transport: transport}).Do(req); err == nil {
			resp.Body.Close()
		}
	}

	check := func(parent func(*http.Request) context.Context) {
		rec := new(stinttest.Recorder)
		serve := func(name string, h http.HandlerFunc) *httptest.Server {
			return httptest.NewServer(mw.Handler(rec.Handler(name, h)))
		}
		ledger := serve("ledger", func(w http.ResponseWriter, r *http.Request) {})
		defer ledger.Close()
		orders := serve("orders", func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(parent(r), 30*time.Second)
			defer cancel()
			call(ctx, ledger.URL)
		})
		defer orders.Close()
		edge := serve("edge", func(w http.ResponseWriter, r *http.Request) { call(r.Context(), orders.URL) })
		defer edge.Close()

		stinttest.DeadlineNeverRisesAt(new(printer), rec, edge.URL)
	}

	fmt.Println("With context.Background:")
	check(func(*http.Request) context.Context { return context.Background() })
	fmt.Println("With the request's context:")
	check((*http.Request).Context)
	fmt.Println("done")
	// Output:
	// With context.Background:
	// stinttest: ledger received a later deadline than orders, which calls it (30s later)
	// With the request's context:
	// done
}

// Three attempts for every request, by a loop and by stint, against a peer that
// goes down after half a second.
func ExampleRetriesWithinBudget() {
	check := func(transport func(peer *stinttest.Peer) http.RoundTripper) {
		t := new(verdict)
		peer := stinttest.NewPeer()
		stinttest.RetriesWithinBudget(t, &http.Client{Transport: transport(peer)}, stinttest.Budget{
			Peer: peer, Rate: 50, Healthy: 500 * time.Millisecond, Outage: time.Second,
		})
		fmt.Println("within budget:", !t.failed)
	}

	check(func(peer *stinttest.Peer) http.RoundTripper { return loop{peer} })
	check(func(peer *stinttest.Peer) http.RoundTripper {
		transport, err := stint.NewTransport(stint.Config{Base: peer})
		if err != nil {
			panic(err)
		}
		return transport
	})
	// Output:
	// within budget: false
	// within budget: true
}

// A loop makes three attempts, whatever the others do.
type loop struct{ base http.RoundTripper }

func (l loop) RoundTrip(req *http.Request) (*http.Response, error) {
	for attempt := 1; ; attempt++ {
		resp, err := l.base.RoundTrip(req)
		if attempt == 3 || err == nil && resp.StatusCode < 500 {
			return resp, err
		}
		if err == nil {
			resp.Body.Close()
		}
	}
}

// A verdict is a stinttest.TB that only notes whether the check failed.
type verdict struct {
	printer
	failed bool
}

func (v *verdict) Errorf(string, ...any) { v.failed = true }
func (v *verdict) Fatalf(string, ...any) { v.failed = true }

func ExampleExpiredIsRefused() {
	mw, err := stint.NewMiddleware(stint.MiddlewareConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	t := new(printer)
	defer t.end()
	rec := new(stinttest.Recorder)
	orders := rec.Handler("orders", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "17") }))
	stinttest.ExpiredIsRefused(t, mw.Handler(orders), stinttest.Expired{Work: rec})
	// Output:
}

func ExampleNewPeer() {
	peer := stinttest.NewPeer(
		stinttest.Fail(503, "Retry-After", "0"),
		stinttest.OK().Body("second time lucky"),
	)
	transport, err := stint.NewTransport(stint.Config{Base: peer}) // or httptest.NewServer(peer), and no Base
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := (&http.Client{Transport: transport}).Get("http://orders.test/17")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status)
	for _, a := range peer.Arrivals() {
		fmt.Printf("%s %s, retry %q\n", a.Method, a.URI, a.Header.Get(stint.HeaderRetryCount))
	}
	// Output:
	// 200 OK
	// GET /17, retry ""
	// GET /17, retry "1"
}
