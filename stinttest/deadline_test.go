package stinttest

import (
	"context"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

func newTransport(t testing.TB, c stint.Config) *stint.Transport {
	t.Helper()
	tr, err := stint.NewTransport(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

func newMiddleware(t testing.TB, c stint.MiddlewareConfig) *stint.Middleware {
	t.Helper()
	mw, err := stint.NewMiddleware(c)
	if err != nil {
		t.Fatal(err)
	}
	return mw
}

// A caller is how a service calls the next: with its own request at hand.
type caller func(r *http.Request, client *http.Client, next string) (*http.Response, error)

// properly is the call that keeps the deadline.
func properly(r *http.Request, client *http.Client, next string) (*http.Response, error) {
	return get(r.Context(), client, next)
}

func get(ctx context.Context, client *http.Client, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return nil, err
	}
	return client.Do(req)
}

// chainOf builds edge → orders → ledger → database and returns the first as a
// handler. middle is how orders calls the ledger; adopt stands in front of the
// ledger, the others have the middleware.
func chainOf(t *testing.T, rec *Recorder, edge stint.MiddlewareConfig, middle caller, adopt func(http.Handler) http.Handler) http.Handler {
	client := &http.Client{Transport: newTransport(t, stint.Config{})}
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	if adopt == nil {
		adopt = mw.Handler
	}
	service := func(name string, next http.Handler, call caller) http.Handler {
		url := ""
		if next != nil {
			url = serve(t, next)
		}
		return rec.Handler(name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if next == nil {
				return
			}
			resp, err := call(r, client, url)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadGateway)
				return
			}
			resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
		}))
	}
	database := mw.Handler(service("database", nil, nil))
	ledger := adopt(service("ledger", database, properly))
	orders := mw.Handler(service("orders", ledger, middle))
	return newMiddleware(t, edge).Handler(service("edge", orders, properly))
}

func TestDeadlineNeverRises(t *testing.T) {
	t.Parallel()
	plain := newClient(t, &http.Transport{})
	// ignoring is a server with limits of its own and no interest in headers.
	ignoring := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), 30*time.Second)
			defer cancel()
			next.ServeHTTP(w, r.WithContext(ctx))
		})
	}
	for _, tt := range []struct {
		name   string
		edge   stint.MiddlewareConfig
		middle caller
		adopt  func(http.Handler) http.Handler
		want   []string
	}{
		{name: "stint", middle: properly},
		{name: "stint, with a deadline from the edge", middle: properly, edge: stint.MiddlewareConfig{Timeout: 2 * time.Second}},
		{name: "a shorter timeout", middle: func(r *http.Request, c *http.Client, next string) (*http.Response, error) {
			ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
			defer cancel()
			return get(ctx, c, next)
		}},
		{name: "a longer timeout that inherits", middle: func(r *http.Request, c *http.Client, next string) (*http.Response, error) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 30*time.Second)
			defer cancel()
			return get(ctx, c, next)
		}},
		{name: "a fresh timeout", middle: func(_ *http.Request, c *http.Client, next string) (*http.Response, error) {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			return get(ctx, c, next)
		}, want: []string{"ledger received a later deadline than orders, which calls it (30s later)"}},
		{name: "a fresh timeout shorter than what most users give", middle: func(_ *http.Request, c *http.Client, next string) (*http.Response, error) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			return get(ctx, c, next)
		}, want: []string{"ledger received a later deadline than orders"}},
		{name: "no deadline at all", middle: func(_ *http.Request, c *http.Client, next string) (*http.Response, error) {
			return get(context.Background(), c, next)
		}, want: []string{"ledger received no deadline from orders, which has one"}},
		{name: "another client", middle: func(r *http.Request, _ *http.Client, next string) (*http.Response, error) {
			return get(r.Context(), plain, next)
		}, want: []string{"ledger received no deadline from orders, which has one"}},
		{name: "another unit", middle: func(r *http.Request, _ *http.Client, next string) (*http.Response, error) {
			req, _ := http.NewRequestWithContext(r.Context(), "GET", next, nil)
			req.Header.Set(stint.HeaderDeadline, "2.5s")
			return plain.Do(req)
		}, want: []string{"ledger received an unusable deadline from orders"}},
		{name: "passed on, not adopted", middle: properly, adopt: ignoring, want: []string{
			"the context of ledger ends later than that of orders",
			// and from there it has thirty seconds to give away
			"database received a later deadline than ledger",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			rec := new(Recorder)
			got := reports(func(tb TB) {
				DeadlineNeverRisesThrough(tb, rec, chainOf(t, rec, tt.edge, tt.middle, tt.adopt))
			})
			wantReports(t, got, tt.want...)
		})
	}
}

// A deadline that the edge itself sets is one that has to be kept: there is no
// header to compare with, only its context.
func TestDeadlineNeverRises_SetAtTheEdge(t *testing.T) {
	t.Parallel()
	plain := newClient(t, &http.Transport{})
	for _, tt := range []struct {
		name string
		call caller
		want []string
	}{
		{"kept", properly, nil},
		{"lost", func(r *http.Request, _ *http.Client, next string) (*http.Response, error) {
			return get(r.Context(), plain, next)
		}, []string{"orders received no deadline from edge"}},
		{"fresh", func(r *http.Request, client *http.Client, next string) (*http.Response, error) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
			defer cancel()
			return get(ctx, client, next)
		}, []string{"orders received a later deadline than edge"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rec := new(Recorder)
			client := &http.Client{Transport: newTransport(t, stint.Config{})}
			mw := newMiddleware(t, stint.MiddlewareConfig{Timeout: 5 * time.Second})
			orders := serve(t, mw.Handler(rec.Handler("orders", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))))
			edge := serve(t, mw.Handler(rec.Handler("edge", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				resp, err := tt.call(r, client, orders)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
			}))))
			if status, err := do(plain, newRequest(t, t.Context(), "GET", edge, "")); status != 200 {
				t.Fatal(status, err)
			}
			wantReports(t, reports(func(tb TB) { DeadlineNeverRises(tb, rec) }), tt.want...)
		})
	}
}

// The first service, set apart from the one that must pass the deadline on to it.
func TestDeadlineNeverRisesAt_ChecksWhatStandsInFront(t *testing.T) {
	for _, raise := range []time.Duration{0, time.Hour} {
		rec := new(Recorder)
		target, _ := url.Parse(serve(t, newMiddleware(t, stint.MiddlewareConfig{}).Handler(rec.Handler("edge", http.NotFoundHandler()))))
		proxy := serve(t, &httputil.ReverseProxy{Transport: newClient(t, &http.Transport{}).Transport, Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			ms, _ := strconv.ParseInt(r.In.Header.Get(stint.HeaderDeadline), 10, 64)
			r.Out.Header.Set(stint.HeaderDeadline, strconv.FormatInt(ms+raise.Milliseconds(), 10))
		}})
		got := reports(func(tb TB) { DeadlineNeverRisesAt(tb, rec, proxy) })
		if raise == 0 {
			wantReports(t, got)
		} else {
			wantReports(t, got, "edge received a later deadline than the user, which calls it (1h0m0s later)")
		}
	}
}

// What has looked at nothing has proven nothing.
func TestDeadlineNeverRises_NothingToSee(t *testing.T) {
	rec := new(Recorder)
	wantReports(t, reports(func(tb TB) { DeadlineNeverRises(tb, rec) }), "nothing is proven")
	wantReports(t, reports(func(tb TB) { DeadlineNeverRisesThrough(tb, rec, http.NotFoundHandler()) }), "nothing is proven")
	wantReports(t, reports(func(tb TB) { DeadlineNeverRisesAt(tb, rec, "http://127.0.0.1:1/") }), "refused")
	wantReports(t, reports(func(tb TB) { DeadlineNeverRisesAt(tb, rec, ":") }), "missing protocol scheme")

	rec = new(Recorder)
	s := serving{rec, t}
	s.call("edge", "", func() { s.call("orders", "", func() { s.call("edge", "", nil) }) })
	wantReports(t, reports(func(tb TB) { DeadlineNeverRises(tb, rec) }), "Recorder.ID")
}

// A service that goes on when its caller has left is waited for, so that the next
// user request is not taken for part of this one.
func TestDeadlineNeverRises_WaitsForServicesThatGoOn(t *testing.T) {
	t.Parallel()
	rec := new(Recorder)
	slow := rec.Handler("ledger", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		time.Sleep(1200 * time.Millisecond) // longer than the second of the user requests, before the third
	}))
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	client := &http.Client{Transport: newTransport(t, stint.Config{})}
	url := serve(t, mw.Handler(slow))
	edge := mw.Handler(rec.Handler("edge", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if resp, err := properly(r, client, url); err == nil {
			resp.Body.Close()
		}
	})))
	wantReports(t, reports(func(tb TB) { DeadlineNeverRisesThrough(tb, rec, edge) }))
	if got := tree(rec); strings.Count(got, "edge←the user ledger←edge") != 3 {
		t.Error(got)
	}
}

func TestRoughly(t *testing.T) {
	for d, want := range map[time.Duration]string{
		300 * time.Microsecond: "1ms", 1499 * time.Microsecond: "1ms", 12345 * time.Microsecond: "12ms",
		26994 * time.Millisecond: "27s", 2749 * time.Millisecond: "2.7s", 149 * time.Millisecond: "150ms",
		59*time.Minute + 59*time.Second: "1h0m0s",
	} {
		if got := roughly(d).String(); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}
