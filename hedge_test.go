package stint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A tailPeer answers in 10 to 30 ms, 20 in the median, and some attempts take 20
// times as long. While down it answers none.
type tailPeer struct {
	slow     float64
	from, to time.Duration // down
	start    time.Time

	mu    sync.Mutex // guards what follows
	draws *rand.Rand
	log   stormLog
}

func (p *tailPeer) RoundTrip(r *http.Request) (*http.Response, error) {
	at := time.Since(p.start)
	p.mu.Lock()
	p.log.sent = append(p.log.sent, at)
	if r.Header.Get(HeaderRetryCount) != "" {
		p.log.retries = append(p.log.retries, at)
	}
	takes := 10*time.Millisecond + time.Duration(p.draws.Int64N(int64(20*time.Millisecond)))
	if p.draws.Float64() < p.slow {
		takes = 400 * time.Millisecond
	}
	p.mu.Unlock()
	if at >= p.from && at < p.to {
		takes = neverEnds
	}
	if err := stormSleep(r.Context(), takes); err != nil {
		return nil, err
	}
	return stormAnswer(r, http.StatusOK), nil
}

// run sends 100 requests a second and returns how long those from warm on took.
func (p *tailPeer) run(t *testing.T, c Config, lasts, warm time.Duration) (took []time.Duration) {
	p.start, p.draws = time.Now(), rand.New(rand.NewPCG(1, 2))
	tr := stormTransport(t, c, p, 1)
	var mu sync.Mutex
	evenly(100, lasts, func(int) {
		start := time.Now()
		resp, err := tr.RoundTrip(newRequest(t, context.Background(), "GET", "http://peer.test/", nil))
		if err == nil {
			resp.Body.Close()
		}
		if start.Sub(p.start) >= warm {
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(start))
		}
	})
	slices.Sort(took)
	return took
}

func at(sorted []time.Duration, q float64) time.Duration {
	return sorted[int(math.Ceil(q*float64(len(sorted))))-1]
}

// TestS23_HedgeCutsTheTail: on a peer where 3 % of the answers take 20 times the
// median, the caller's p99 comes to within twice the p95, and attempts grow by a
// tenth at most.
func TestS23_HedgeCutsTheTail(t *testing.T) {
	const lasts, warm = 120 * time.Second, 20 * time.Second
	run := func(t *testing.T, c HedgeConfig) (p95, p99 time.Duration, each float64, peer *tailPeer) {
		m := newTestMetrics(t)
		peer = &tailPeer{slow: 0.03}
		took := peer.run(t, Config{Hedge: c, Metrics: m}, lasts, warm)
		p95, p99 = at(took, 0.95), at(took, 0.99)
		each = float64(len(peer.log.sent)) / (100 * lasts.Seconds())
		hedges, wins := counter(t, m, "stint_hedges_total"), counter(t, m, "stint_hedge_wins_total")
		t.Logf("p95 %v, p99 %v, %.3f attempts each, %v hedges of which %v won", p95, p99, each, hedges, wins)
		if int(hedges) != len(peer.log.sent)-int(100*lasts.Seconds()) || int(hedges) != len(peer.log.retries) || wins > hedges {
			t.Errorf("%v hedges and %v wins counted, %d attempts marked", hedges, wins, len(peer.log.retries))
		}
		if c.on() && wins < 100 {
			t.Errorf("%v hedges won, want 100 or more", wins)
		}
		return p95, p99, each, peer
	}
	synctest.Test(t, func(t *testing.T) {
		if _, p99, each, _ := run(t, HedgeConfig{}); p99 < 400*time.Millisecond || each != 1 {
			t.Errorf("without hedges p99 is %v and there are %v attempts each; then this shows nothing", p99, each)
		}
	})
	for _, c := range []HedgeConfig{{Quantile: 0.95}, {Delay: 32 * time.Millisecond}} {
		synctest.Test(t, func(t *testing.T) {
			p95, p99, each, peer := run(t, c)
			if p99 > 2*p95 {
				t.Errorf("%+v: p99 is %v, want at most twice the p95 of %v", c, p99, p95)
			}
			if each > 1.1 {
				t.Errorf("%+v: %.3f attempts each, want 1.1 at most", c, each)
			}
			wantUnderCeiling(t, &timeline{name: "tail"}, &peer.log, ceiling)
		})
	}
}

// TestS23_NoHedgesInAnOutage: where everything is slow it is not the tail.
func TestS23_NoHedgesInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const from, to, lasts = 30 * time.Second, 60 * time.Second, 120 * time.Second
		peer := &tailPeer{slow: 0.03, from: from, to: to}
		c := Config{Hedge: HedgeConfig{Quantile: 0.95}, MaxAttempts: 2, Timeout: time.Second}
		peer.run(t, c, lasts, 0)
		// The first few that hang cannot be told from the tail.
		n := between(peer.log.retries, from+time.Second, to)
		first := between(peer.log.retries, from, from+time.Second)
		t.Logf("%d hedges in the first second of the outage, %d in the rest", first, n)
		if first > 3 || n != 0 {
			t.Errorf("%d hedges in the first second of an outage and %d in the rest, want a few and none", first, n)
		}
		if n := between(peer.log.retries, to+42*time.Second, lasts); n == 0 {
			t.Error("no hedges after the outage")
		}
		wantUnderCeiling(t, &timeline{name: "outage"}, &peer.log, ceiling)
	})
}

// TestP1_Hedges: hedges and retries together stay within the ceiling, whatever the
// peer does.
func TestP1_Hedges(t *testing.T) {
	for i, tl := range namedFaults {
		if raceEnabled && i%3 > 0 {
			continue
		}
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				log := storm(t, tl, Config{Hedge: HedgeConfig{Delay: time.Millisecond}}, 100, tl.length()+5*time.Second, 0, 1)
				wantUnderCeiling(t, tl, log, ceiling)
				n, _ := peak(log.sent)
				t.Logf("peak %d, %d retries and hedges", n, len(log.retries))
			})
		})
	}
}

// TestBudgetHedgeTurns: a burst of hedges, and of retries behind it, has no more in
// any second than the rate allows.
func TestBudgetHedgeTurns(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		origin := time.Now()
		b := newBudget(BudgetConfig{}.withDefaults(), origin)
		b.turns = new(turnLog)
		var turns []time.Duration
		hedges, late := 0, 0
		for ms := range 60_000 {
			now := origin.Add(time.Duration(ms) * time.Millisecond)
			if ms%10 == 0 {
				b.request(now)
				b.success(now)
			}
			switch busy := ms/3000%2 == 0; {
			case busy && rng.Float64() < 0.05:
				if b.hedge(now) {
					hedges++
					turns = append(turns, now.Sub(origin))
				}
			case !busy && rng.Float64() < 0.004:
				if wait, refused := b.take(now, time.Time{}); refused == "" {
					turns = append(turns, now.Add(wait).Sub(origin))
					if wait > 0 {
						late++
					}
				}
			}
		}
		if !slices.IsSorted(turns) {
			t.Fatal("a hedge has overtaken a retry that has its turn")
		}
		if n, at := peak(turns); n > 10 {
			t.Errorf("seed %d: %d turns in the second up to %v, want 10", seed, n, at)
		}
		if hedges < 50 || late < 5 {
			t.Errorf("seed %d: %d hedges and %d retries that waited: too few to show anything", seed, hedges, late)
		}
	}
}

// TestS23_WhichRequestsAreHedged: the ones that may be repeated, with bodies that
// can be, and nobody else.
func TestS23_WhichRequestsAreHedged(t *testing.T) {
	stream := func() io.Reader { return io.MultiReader(strings.NewReader("stream")) }
	for _, test := range []struct {
		name   string
		method string
		body   func() io.Reader
		header http.Header
		opts   Override
		config Config
		limit  time.Duration
		unread bool // the base does not read the body
		want   bool
	}{
		{name: "GET", method: "GET", want: true},
		{name: "PUT", method: "PUT", body: func() io.Reader { return strings.NewReader("x") }, want: true},
		{name: "PUT that is still being sent", method: "PUT", body: func() io.Reader { return strings.NewReader("x") }, unread: true},
		{name: "PUT of a stream", method: "PUT", body: stream},
		{name: "POST", method: "POST"},
		{name: "POST with a promise", method: "POST", opts: Override{IdempotencyKey: "k"}, want: true},
		{name: "POST, keys honoured", method: "POST", config: Config{Keys: KeysHonoured}, body: func() io.Reader { return strings.NewReader("x") }, want: true},
		{name: "upgrade", method: "GET", header: http.Header{"Upgrade": {"websocket"}, "Idempotency-Key": {"k"}}},
		{name: "one attempt", method: "GET", opts: Override{MaxAttempts: 1}},
		{name: "NoHedge", method: "GET", opts: Override{NoHedge: true}},
		{name: "deadline before the hedge", method: "GET", limit: 90 * time.Millisecond},
		{name: "no time for two", method: "GET", limit: 102 * time.Millisecond},
		{name: "time for two", method: "GET", limit: 10 * time.Second, want: true},
		{name: "no budget", method: "GET", config: Config{Budget: BudgetConfig{Ratio: -1, MinPerSecond: -1}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var sent atomic.Int32
				var keys sync.Map
				c := test.config
				c.Hedge.Delay = 100 * time.Millisecond
				tr := stormTransport(t, c, baseFunc(func(r *http.Request) (*http.Response, error) {
					n := sent.Add(1)
					keys.Store(r.Header.Get(unreplayed(HeaderIdempotencyKey)), true)
					if !test.unread && r.Body != nil {
						io.Copy(io.Discard, r.Body)
						r.Body.Close()
					}
					if test.unread {
						defer r.Body.Close()
					}
					if n == 1 {
						if err := stormSleep(r.Context(), time.Second); err != nil {
							return nil, err
						}
					}
					return stormAnswer(r, http.StatusOK), nil
				}), 1)
				ctx := WithOverride(t.Context(), test.opts)
				if test.limit > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.limit)
					defer cancel()
				}
				var body io.Reader
				if test.body != nil {
					body = test.body()
				}
				req := newRequest(t, ctx, test.method, "http://peer.test/", body)
				for k, v := range test.header {
					req.Header[k] = v
				}
				start := time.Now()
				resp, err := tr.RoundTrip(req)
				if resp != nil {
					resp.Body.Close()
				}
				if got := sent.Load() == 2; got != test.want {
					t.Errorf("%d attempts (%v), hedged %v, want %v", sent.Load(), err, got, test.want)
				}
				if test.want && (err != nil || time.Since(start) != 100*time.Millisecond) {
					t.Errorf("%v after %v, want the hedge's answer after 100 ms", err, time.Since(start))
				}
			})
		})
	}
}

// TestS23_Ends walks the ways in which two attempts at once can end: one answer,
// the other one's closed, nothing left behind.
func TestS23_Ends(t *testing.T) {
	type step struct {
		after  time.Duration // since it was sent
		status int           // 0: an error
		header string        // told not to retry
		deaf   bool          // it does not heed its context
	}
	ms := time.Millisecond
	lost := errors.New("connection lost")
	for _, test := range []struct {
		name     string
		steps    []step
		status   int
		from     int // number of the attempt whose answer it is
		attempts int
		reason   Reason
		took     time.Duration
		won      float64
		cancel   time.Duration
	}{
		{name: "first in time", steps: []step{{after: 50 * ms, status: 200}}, status: 200, from: 1, attempts: 1, took: 50 * ms},
		{name: "first wins", steps: []step{{after: 200 * ms, status: 200}, {after: 500 * ms, status: 200}}, status: 200, from: 1, attempts: 2, took: 200 * ms},
		{name: "hedge wins", steps: []step{{after: 900 * ms, status: 200}, {after: 50 * ms, status: 200}}, status: 200, from: 2, attempts: 2, took: 150 * ms, won: 1},
		{name: "hedge wins, the first answers all the same", steps: []step{{after: 300 * ms, status: 200, deaf: true}, {after: 50 * ms, status: 200}}, status: 200, from: 2, attempts: 2, took: 300 * ms, won: 1},
		{name: "first wins, the hedge answers all the same", steps: []step{{after: 200 * ms, status: 200}, {after: 300 * ms, status: 200, deaf: true}}, status: 200, from: 1, attempts: 2, took: 400 * ms},
		{name: "both at once", steps: []step{{after: 200 * ms, status: 200}, {after: 100 * ms, status: 200}}, status: 200, from: 0, attempts: 2, took: 200 * ms, won: -1},
		{name: "first fails, hedge wins", steps: []step{{after: 200 * ms, status: 503}, {after: 500 * ms, status: 200}}, status: 200, from: 2, attempts: 2, took: 600 * ms, won: 1},
		{name: "first is lost, hedge wins", steps: []step{{after: 200 * ms}, {after: 500 * ms, status: 200}}, status: 200, from: 2, attempts: 2, took: 600 * ms, won: 1},
		{name: "hedge fails, first wins", steps: []step{{after: 500 * ms, status: 200}, {after: 50 * ms, status: 503}}, status: 200, from: 1, attempts: 2, took: 500 * ms},
		{name: "hedge is 500, first wins", steps: []step{{after: 500 * ms, status: 200}, {after: 50 * ms, status: 500}}, status: 200, from: 1, attempts: 2, took: 500 * ms},
		{name: "first fails before the hedge", steps: []step{{after: 50 * ms, status: 503}, {after: 20 * ms, status: 200}}, status: 200, from: 2, attempts: 2},
		{name: "both fail, a retry succeeds", steps: []step{{after: 200 * ms, status: 503}, {after: 200 * ms, status: 503}, {after: 20 * ms, status: 200}}, status: 200, from: 3, attempts: 3},
		{name: "both fail, and the retry", steps: []step{{after: 200 * ms, status: 503}, {after: 200 * ms}, {after: 20 * ms, status: 503}}, status: 503, from: 3, attempts: 3, reason: ReasonAttempts},
		{name: "both fail, one forbids a retry", steps: []step{{after: 200 * ms, status: 503}, {after: 50 * ms, status: 503, header: "false"}}, status: 503, from: 2, attempts: 2, reason: ReasonToldNotTo, took: 200 * ms},
		{name: "the caller leaves", steps: []step{{after: 500 * ms, status: 200}, {after: 500 * ms, status: 200}}, cancel: 300 * ms, attempts: 2, reason: ReasonCanceled, took: 300 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var sent atomic.Int32
				var mu sync.Mutex
				open, closed := make(map[int]int), make(map[int]int)
				m := newTestMetrics(t)
				var events []string
				tr := stormTransport(t, Config{
					Hedge: HedgeConfig{Delay: 100 * ms}, Metrics: m, Budget: BudgetConfig{MinPerSecond: 100},
					Hook: func(_ context.Context, e Event) {
						mu.Lock()
						defer mu.Unlock()
						events = append(events, fmt.Sprintf("%s %d", e.Kind, e.Attempt))
					},
				}, baseFunc(func(r *http.Request) (*http.Response, error) {
					n := int(sent.Add(1))
					s := test.steps[n-1]
					if s.deaf {
						time.Sleep(s.after)
					} else if err := stormSleep(r.Context(), s.after); err != nil {
						return nil, err
					}
					if s.status == 0 {
						return nil, lost
					}
					resp := stormAnswer(r, s.status)
					if s.header != "" {
						resp.Header.Set(HeaderShouldRetry, s.header)
					}
					resp.Header.Set("From", fmt.Sprint(n))
					mu.Lock()
					open[n]++
					mu.Unlock()
					resp.ContentLength = 4
					resp.Body = closeFunc{strings.NewReader("body"), func() {
						mu.Lock()
						closed[n]++
						mu.Unlock()
					}}
					return resp, nil
				}), 1)
				var o Outcome
				ctx, cancel := context.WithCancel(WithOverride(t.Context(), Override{Outcome: &o}))
				defer cancel()
				if test.cancel > 0 {
					time.AfterFunc(test.cancel, cancel)
				}
				start := time.Now()
				resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
				took := time.Since(start)
				status, from := 0, ""
				if resp != nil {
					status, from = resp.StatusCode, resp.Header.Get("From")
					if text := readAll(t, resp); text != "body" {
						t.Errorf("the body is %q", text)
					}
				}
				if status != test.status || test.from > 0 && from != fmt.Sprint(test.from) {
					t.Errorf("%d from %q (%v), want %d from %d", status, from, err, test.status, test.from)
				}
				if o.Attempts != test.attempts || o.Reason != test.reason {
					t.Errorf("%+v, want %d attempts and %q", o, test.attempts, test.reason)
				}
				if test.took > 0 && took != test.took {
					t.Errorf("took %v, want %v", took, test.took)
				}
				if got := counter(t, m, "stint_hedge_wins_total"); test.won >= 0 && got != test.won && !strings.Contains(test.name, "before the hedge") {
					t.Errorf("%v wins counted, want %v", got, test.won)
				}
				synctest.Wait()
				if fmt.Sprint(open) != fmt.Sprint(closed) {
					t.Errorf("answers %v, closed %v", open, closed)
				}
				if n := tr.peers.enter("peer.test:80", time.Now()).inflight.Load(); n != 1 {
					t.Errorf("%d requests in flight", n-1)
				}
				count := func(kind EventKind) (n int) {
					for _, e := range events {
						if strings.HasPrefix(e, string(kind)+" ") {
							n++
						}
					}
					return n
				}
				if count(EventAttemptSent) != test.attempts || count(EventAttemptDone) != test.attempts || count(EventDone) != 1 {
					t.Errorf("events %v, want %d attempts that begin and end", events, test.attempts)
				}
			})
		})
	}
}

// TestS23_Panics: a panic of the base on the hedge's goroutine is the caller's to
// recover, and one of the first attempt leaves no hedge behind.
func TestS23_Panics(t *testing.T) {
	for _, who := range []int{1, 2} {
		synctest.Test(t, func(t *testing.T) {
			var sent atomic.Int32
			closed := 0
			tr := stormTransport(t, Config{Hedge: HedgeConfig{Delay: 100 * time.Millisecond}}, baseFunc(func(r *http.Request) (*http.Response, error) {
				n := int(sent.Add(1))
				if err := stormSleep(r.Context(), time.Second); n != who && err != nil {
					return nil, err
				}
				if n == who {
					panic("base")
				}
				resp := stormAnswer(r, http.StatusOK)
				resp.Body = closeFunc{strings.NewReader(""), func() { closed++ }}
				time.Sleep(200 * time.Millisecond)
				return resp, nil
			}), 1)
			func() {
				defer func() {
					if v := recover(); v != "base" {
						t.Errorf("attempt %d: recovered %v", who, v)
					}
				}()
				tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
			}()
			if n := tr.peers.enter("peer.test:80", time.Now()).inflight.Load(); n != 1 {
				t.Errorf("%d requests in flight", n-1)
			}
			if who == 2 && closed != 1 {
				t.Errorf("the first answer was closed %d times", closed)
			}
		})
	}
}

// TestS23_BodiesAreWhole: under load each attempt, hedge or not, sends the whole
// body, and each body is closed.
func TestS23_BodiesAreWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		payload := bytes.Repeat([]byte("0123456789"), 1000)
		var opened, closed, attempts, bad atomic.Int32
		tr := stormTransport(t, Config{Hedge: HedgeConfig{Delay: 17 * time.Millisecond}, Budget: BudgetConfig{MinPerSecond: 1000}}, baseFunc(func(r *http.Request) (*http.Response, error) {
			attempts.Add(1)
			got, err := io.ReadAll(r.Body)
			if err != nil || !bytes.Equal(got, payload) {
				bad.Add(1)
			}
			r.Body.Close()
			if err := stormSleep(r.Context(), time.Duration(rand.Int64N(int64(20*time.Millisecond)))); err != nil {
				return nil, err
			}
			return stormAnswer(r, http.StatusOK), nil
		}), 1)
		evenly(100, 20*time.Second, func(int) {
			body := func() (io.ReadCloser, error) {
				opened.Add(1)
				return closeFunc{bytes.NewReader(payload), func() { closed.Add(1) }}, nil
			}
			req := newRequest(t, t.Context(), "PUT", "http://peer.test/", nil)
			req.Body, _ = body()
			req.GetBody, req.ContentLength = body, int64(len(payload))
			if resp, err := tr.RoundTrip(req); err != nil || resp.StatusCode != 200 {
				t.Errorf("%v, %v", resp, err)
			}
		})
		if bad.Load() > 0 || opened.Load() != closed.Load() || opened.Load() != attempts.Load() || attempts.Load() < 2050 {
			t.Errorf("%d attempts, %d bodies, %d closed, %d not whole", attempts.Load(), opened.Load(), closed.Load(), bad.Load())
		}
	})
}
