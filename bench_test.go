package stint

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// What a Transport adds to the base, which answers from memory: compare each row
// with "base". At RoundTrip and not at Client.Do: for transports it does not
// know, http.Client adds a goroutine when it has a Timeout.
func BenchmarkRoundTrip(b *testing.B) {
	response := &http.Response{StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: http.NoBody}
	base := baseFunc(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			r.Body.Close()
		}
		response := *response
		return &response, nil
	})
	metrics := newTestMetrics(b)
	deadline, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	mw, err := NewMiddleware(MiddlewareConfig{})
	if err != nil {
		b.Fatal(err)
	}
	inbound := httptest.NewRequest("GET", "/", nil).WithContext(deadline)
	inbound.Header.Set(HeaderDeadline, "99999999999999")
	adopted, stop, err := mw.Adopt(inbound)
	if err != nil {
		b.Fatal(err)
	}
	defer stop()

	for _, bb := range []struct {
		name string
		ctx  context.Context
		rt   http.RoundTripper
		post bool
	}{
		{"GET/base", deadline, base, false},
		{"GET/stint", deadline, newTestTransport(b, Config{Base: base}), false},
		{"GET/stint+metrics", deadline, newTestTransport(b, Config{Base: base, Metrics: metrics}), false},
		{"GET/middle tier", adopted.Context(), newTestTransport(b, Config{Base: base, Metrics: metrics}), false},
		{"GET/no deadline", context.Background(), newTestTransport(b, Config{Base: base, Metrics: metrics}), false},
		{"GET/Timeout", context.Background(), newTestTransport(b, Config{Base: base, Metrics: metrics, Timeout: time.Hour}), false},
		{"GET/AttemptTimeout", deadline, newTestTransport(b, Config{Base: base, Metrics: metrics, AttemptTimeout: time.Hour}), false},
		{"POST/base", deadline, base, true},
		{"POST/stint+metrics", deadline, newTestTransport(b, Config{Base: base, Metrics: metrics}), true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			send := func() {
				var req *http.Request
				if bb.post {
					req, _ = http.NewRequestWithContext(bb.ctx, "POST", "http://peer.test:8080/path", strings.NewReader("body"))
				} else {
					req, _ = http.NewRequestWithContext(bb.ctx, "GET", "http://peer.test:8080/path", nil)
				}
				req.Header["Accept"] = []string{"application/json"}
				req.Header["User-Agent"] = []string{"bench"}
				resp, err := bb.rt.RoundTrip(req)
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			b.ReportAllocs()
			for b.Loop() {
				send()
			}
		})
	}
}

// P9: what a request costs that succeeds, in allocations, which do not depend on
// how busy the machine is: the base's are in the count.
func TestP9_AllocationsOfARequest(t *testing.T) {
	base := baseFunc(func(r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			r.Body.Close()
		}
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: http.NoBody}, nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	tr := newTestTransport(t, Config{Base: base, Metrics: newTestMetrics(t)})
	for _, tt := range []struct {
		method  string
		body    io.Reader
		allowed float64
	}{{"GET", nil, 4}, {"POST", strings.NewReader("body"), 12}} {
		req := newRequest(t, ctx, tt.method, "http://peer.test:8080/", tt.body)
		send := func(rt http.RoundTripper) float64 {
			return testing.AllocsPerRun(100, func() {
				if resp, err := rt.RoundTrip(req); err != nil || resp.StatusCode != 200 {
					t.Fatal(err)
				}
			})
		}
		added := send(tr) - send(base)
		if raceEnabled {
			continue // the detector allocates too
		}
		if added > tt.allowed {
			t.Errorf("%s: %v allocations are added, want at most %v", tt.method, added, tt.allowed)
		}
	}
}

// Refusing must be cheaper than sending: an outage is when it counts.
func BenchmarkRefuse(b *testing.B) {
	unavailable := baseFunc(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 503, Header: http.Header{}, Body: http.NoBody}, nil
	})
	for _, bb := range []struct {
		name   string
		config Config
		left   time.Duration
	}{
		{"budget spent", Config{Budget: BudgetConfig{MinPerSecond: -1}}, time.Hour},
		{"too late", Config{}, -time.Hour},
	} {
		b.Run(bb.name, func(b *testing.B) {
			bb.config.Base, bb.config.Metrics = unavailable, newTestMetrics(b)
			tr := newTestTransport(b, bb.config)
			ctx, cancel := context.WithDeadline(context.Background(), time.Now().Add(bb.left))
			defer cancel()
			req := newRequest(b, ctx, "GET", "http://peer.test:8080/", nil)
			b.ReportAllocs()
			for b.Loop() {
				if resp, err := tr.RoundTrip(req); err == nil {
					resp.Body.Close()
				}
			}
		})
	}
}

// The decisions alone, which must not allocate.
func BenchmarkBudget(b *testing.B) {
	c := BudgetConfig{}.withDefaults()
	now := time.Now()
	budget := newBudget(c, now)
	b.Run("request", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			budget.request(now)
		}
	})
	b.Run("ask", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			budget.ask(now, time.Millisecond, time.Time{})
		}
	})
	b.Run("ask/parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				budget.ask(now, time.Millisecond, time.Time{})
			}
		})
	})
}

func BenchmarkPeerLookup(b *testing.B) {
	for _, n := range []int{1, 1000} {
		cfg := Config{}.withDefaults()
		table := newPeers(&cfg, time.Now())
		now := time.Now()
		names := make([]string, n)
		for i := range names {
			names[i] = "peer-" + strings.Repeat("x", i%20) + string(rune('a'+i%26)) + ".test:8080"
			table.leave(table.enter(names[i], now), now)
		}
		b.Run(map[int]string{1: "1", 1000: "1000"}[n], func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				table.leave(table.enter(names[i%n], now), now)
				i++
			}
		})
	}
}

// All of them at one peer, as the callers of one service are: with -cpu 8, eight
// goroutines.
func BenchmarkPeerLookupParallel(b *testing.B) {
	cfg := Config{}.withDefaults()
	now := time.Now()
	table := newPeers(&cfg, now)
	const name = "peer.test:8080"
	table.leave(table.enter(name, now), now)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			table.leave(table.enter(name, now), now)
		}
	})
}

// What a retry that is made asks of the budget: once before it waits, and for
// its turn after it.
func BenchmarkBudgetRetry(b *testing.B) {
	c := BudgetConfig{Ratio: 1, MinPerSecond: 1e6, MaxWait: time.Hour}.withDefaults()
	now := time.Now()
	decide := func(budget *budget, at time.Time) bool {
		if budget.ask(at, time.Millisecond, time.Time{}) != "" {
			return false
		}
		_, refused := budget.take(at, time.Time{})
		return refused == ""
	}
	// Time moves on, so that turns and slots come free.
	b.Run("serial", func(b *testing.B) {
		budget, at := newBudget(c, now), now
		b.ReportAllocs()
		for b.Loop() {
			at = at.Add(2 * time.Microsecond)
			if !decide(budget, at) {
				b.Fatal("refused")
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		budget := newBudget(c, now)
		var steps atomic.Int64
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				decide(budget, now.Add(time.Duration(steps.Add(1))*2*time.Microsecond))
			}
		})
	})
}
