package stinttest

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stinthttp/stint"
)

// A loop is the retry loop that everybody writes once: every failure, so often,
// with a pause or without, and with no thought of the others.
type loop struct {
	base     http.RoundTripper
	attempts int
	pause    time.Duration
	rewind   bool // gives each attempt the body again
}

func (l loop) Do(req *http.Request) (*http.Response, error) {
	for i := 1; ; i++ {
		if i > 1 && l.rewind && req.GetBody != nil {
			req.Body, _ = req.GetBody()
		}
		resp, err := l.base.RoundTrip(req)
		if i == l.attempts || req.Context().Err() != nil || err == nil && resp.StatusCode < 500 {
			return resp, err
		}
		if err == nil {
			resp.Body.Close()
		}
		if err := wait(req.Context(), l.pause); err != nil {
			return nil, err
		}
	}
}

// inBubble runs a check against a peer in memory and in virtual time.
func inBubble(t *testing.T, client func(t *testing.T, p *Peer) Client, b Budget) (got []string) {
	synctest.Test(t, func(t *testing.T) {
		b.Peer = NewPeer()
		c := client(t, b.Peer)
		got = reports(func(tb TB) { RetriesWithinBudget(tb, c, b) })
		time.Sleep(2 * time.Minute) // for clients that hang
	})
	return got
}

func looping(attempts int, pause time.Duration) func(*testing.T, *Peer) Client {
	return func(_ *testing.T, p *Peer) Client { return loop{base: p, attempts: attempts, pause: pause} }
}

func withStint(c stint.Config) func(*testing.T, *Peer) Client {
	return func(t *testing.T, p *Peer) Client {
		c.Base = p
		return &http.Client{Transport: newTransport(t, c)}
	}
}

func TestRetriesWithinBudget(t *testing.T) {
	const long = 15 * time.Second // longer than a window of stint's budget
	for _, tt := range []struct {
		name   string
		client func(*testing.T, *Peer) Client
		budget Budget
		want   []string
	}{
		{"no retries", looping(1, 0), Budget{}, nil},
		{"no retries, none allowed", looping(1, 0), Budget{Ratio: -1, Floor: -1}, nil},
		{"three attempts", looping(3, 0), Budget{}, []string{"200 retries within one second, 10 allowed (100 requests a second, ratio 0.1, floor 1; 600 retries of 500 requests in all)"}},
		{"three attempts, half broken", looping(3, 0), Budget{Fault: Partial(0.5, 1, Fail(500))}, []string{"10 allowed"}},
		{"three attempts, flapping", looping(3, 100*time.Millisecond), Budget{Outage: 10 * time.Second, Fault: Flap(time.Second, Fail(503))}, []string{"10 allowed"}},
		{"two attempts of few requests", looping(2, time.Millisecond), Budget{Rate: 5}, []string{"5 retries within one second, 1 allowed"}},
		{"two attempts, as allowed", looping(2, time.Millisecond), Budget{Rate: 5, Ratio: 1}, nil},
		{"two attempts, one less than allowed", looping(2, time.Millisecond), Budget{Rate: 5, Floor: 4}, []string{"5 retries within one second, 4 allowed"}},
		{"backoff that only delays", looping(3, 400*time.Millisecond), Budget{Outage: long}, []string{"10 allowed"}},

		{"stint", withStint(stint.Config{}), Budget{}, nil},
		{"stint, full credit", withStint(stint.Config{}), Budget{Healthy: long, Outage: 2 * long}, nil},
		{"stint, resets", withStint(stint.Config{}), Budget{Healthy: long, Outage: long, Fault: Reset()}, nil},
		{"stint, stalls", withStint(stint.Config{AttemptTimeout: 100 * time.Millisecond}), Budget{Healthy: long, Outage: long, Fault: Stall()}, nil},
		{"stint, slow failures", withStint(stint.Config{}), Budget{Healthy: long, Outage: long, Fault: Fail(502).After(150 * time.Millisecond)}, nil},
		{"stint, half broken", withStint(stint.Config{}), Budget{Healthy: long, Outage: long, Fault: Partial(0.5, 1, Fail(503))}, nil},
		{"stint, flapping", withStint(stint.Config{}), Budget{Healthy: long, Outage: long, Fault: Flap(2*time.Second, Fail(503))}, nil},
		{"stint, few requests", withStint(stint.Config{}), Budget{Rate: 1, Healthy: long, Outage: long}, nil},
		{"stint, a larger share than is allowed here", withStint(stint.Config{Budget: stint.BudgetConfig{Ratio: 0.3}}), Budget{Healthy: long, Outage: long}, []string{"10 allowed"}},
		{"stint, with the peak let go", withStint(stint.Config{Budget: stint.BudgetConfig{PeakFactor: 3}}), Budget{Healthy: long, Outage: long}, []string{"10 allowed"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantReports(t, inBubble(t, tt.client, tt.budget), tt.want...)
		})
	}
}

// In real time and over sockets, with a peer of the check's own.
func TestRetriesWithinBudget_RealTime(t *testing.T) {
	t.Parallel()
	b := Budget{Rate: 50, Healthy: 500 * time.Millisecond, Outage: 1500 * time.Millisecond}
	t.Run("stint", func(t *testing.T) {
		t.Parallel()
		client := &http.Client{Transport: newTransport(t, stint.Config{})}
		wantReports(t, reports(func(tb TB) { RetriesWithinBudget(tb, client, b) }))
	})
	t.Run("three attempts", func(t *testing.T) {
		t.Parallel()
		client := loop{base: newClient(t, &http.Transport{}).Transport, attempts: 3}
		wantReports(t, reports(func(tb TB) { RetriesWithinBudget(tb, client, b) }), "5 allowed")
	})
}

type clientFunc func(*http.Request) (*http.Response, error)

func (f clientFunc) Do(r *http.Request) (*http.Response, error) { return f(r) }

func TestRetriesWithinBudget_NothingToSee(t *testing.T) {
	elsewhere := func(*testing.T, *Peer) Client {
		return clientFunc(func(*http.Request) (*http.Response, error) { return nil, errors.New("gone elsewhere") })
	}
	wantReports(t, inBubble(t, elsewhere, Budget{}), "not one of 500 requests arrived at the peer (last error: gone elsewhere)")
	wantReports(t, reports(func(tb TB) { RetriesWithinBudget(tb, http.DefaultClient, Budget{Peer: &Peer{URL: ":"}}) }), "Peer.URL")

	// A client that heeds no context. It does return in the end, or the bubble
	// could not.
	hanging := func(_ *testing.T, p *Peer) Client {
		return clientFunc(func(r *http.Request) (*http.Response, error) {
			time.Sleep(time.Minute)
			return p.RoundTrip(r.WithContext(context.Background()))
		})
	}
	wantReports(t, inBubble(t, hanging, Budget{}), "has not returned 10s after")
}

// What takes the number off, or makes requests of its own, is not let off.
func TestRetriesWithinBudget_UnknownArrivalsAreRetries(t *testing.T) {
	shadowing := func(_ *testing.T, p *Peer) Client {
		return clientFunc(func(r *http.Request) (*http.Response, error) {
			resp, err := p.RoundTrip(r)
			shadow, _ := http.NewRequestWithContext(r.Context(), "GET", p.url(), nil)
			do(&http.Client{Transport: p}, shadow)
			return resp, err
		})
	}
	wantReports(t, inBubble(t, shadowing, Budget{}), "100 retries within one second")
}

// A peer of the user's is left healthy, with what arrived before still there.
func TestRetriesWithinBudget_LeavesThePeerHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPeer(Fail(500))
		client := &http.Client{Transport: p}
		do(client, newRequest(t, t.Context(), "GET", p.url(), ""))
		wantReports(t, reports(func(tb TB) {
			RetriesWithinBudget(tb, client, Budget{Peer: p, Rate: 1, Healthy: time.Second, Outage: time.Second})
		}))
		if status, _ := do(client, newRequest(t, t.Context(), "GET", p.url(), "")); status != 200 || p.Count() != 4 {
			t.Errorf("%d, %d arrivals", status, p.Count())
		}
	})
}

func TestBusiest(t *testing.T) {
	start := time.Now()
	for _, tt := range []struct {
		ms   string
		want int
	}{
		{"", 0}, {"0", 1}, {"0 999", 2}, {"0 1000", 1}, {"0 1000 1999", 2}, {"1999 1000 0 1500 1400", 4},
	} {
		var at []time.Time
		for f := range strings.FieldsSeq(tt.ms) {
			d, _ := time.ParseDuration(f + "ms")
			at = append(at, start.Add(d))
		}
		if got := busiest(slices.Clone(at), time.Second); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.ms, got, tt.want)
		}
	}
}
