package stint

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// An overload is a service of a certain capacity, and more requests than that.
// Goodput is what it serves of its capacity in time, by the account of those who
// ask.
type overload struct {
	workers  int
	takes    time.Duration // the mean
	spread   float64       // standard deviation over mean, of a log-normal distribution
	deadline time.Duration // of each request
	load     float64       // over capacity
	lasts    time.Duration
	from     time.Duration // when to begin to count
	front    string        // see overloadFronts
}

// What stands in front of the handler, besides the middleware that adopts the
// deadline.
const (
	frontNone      = "nothing"
	frontSemaphore = "a plain semaphore"
	frontLimit     = "`Limit`"
	frontLong      = "`Limit` with a queue of ten times the length"
)

var overloadFronts = []string{frontNone, frontSemaphore, frontLimit}

func (o overload) capacity() float64 { return float64(o.workers) / o.takes.Seconds() }

// handler does its work on one of the workers, which it waits for like a
// connection of database/sql: in order of arrival, as long as its context lives.
// The work, once begun, is done. It sleeps, and takes nothing from the machine
// that the clients need. What waits for the semaphore is let go when it is over.
func (o overload) handler(random func() float64, over <-chan struct{}) http.Handler {
	free := make(chan struct{}, o.workers)
	sigma := math.Sqrt(math.Log(1 + o.spread*o.spread))
	h := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case free <- struct{}{}:
		case <-r.Context().Done():
			return
		}
		defer func() { <-free }()
		time.Sleep(time.Duration(float64(o.takes) * math.Exp(sigma*random()-sigma*sigma/2)))
		w.WriteHeader(http.StatusOK)
	}))
	if o.front == frontSemaphore {
		inner, slots := h, make(chan struct{}, o.workers)
		h = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			select {
			case slots <- struct{}{}:
			case <-over:
				return
			}
			defer func() { <-slots }()
			inner.ServeHTTP(w, r)
		})
	}
	return h
}

func (o overload) middleware(t testing.TB, next http.Handler) http.Handler {
	t.Helper()
	var c MiddlewareConfig
	switch o.front {
	case frontLimit:
		c.Limit = LimitConfig{MaxConcurrent: o.workers}
	case frontLong:
		c.Limit = LimitConfig{MaxConcurrent: o.workers, MaxQueue: 10 * o.workers}
	}
	m, err := NewMiddleware(c)
	if err != nil {
		t.Fatal(err)
	}
	return m.Handler(next)
}

// An overloadResult is what came of it.
type overloadResult struct {
	goodput float64
	refused time.Duration // the time until most of those that failed knew it, 90 %
	behind  time.Duration // of the generator, at most
}

func (o overload) run(t testing.TB, rng *rand.Rand, base http.RoundTripper, url string) overloadResult {
	t.Helper()
	tr := stormTransport(t, Config{}, base, 1)
	var mu sync.Mutex
	served, behind := 0, time.Duration(0)
	var failed []time.Duration
	var wg sync.WaitGroup
	start := time.Now()
	for due := time.Duration(0); due < o.lasts; {
		due += time.Duration(rng.ExpFloat64() / (o.load * o.capacity()) * float64(time.Second))
		time.Sleep(due - time.Since(start))
		behind = max(behind, time.Since(start)-due)
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), o.deadline)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				t.Error(err)
				return
			}
			sent := time.Now()
			resp, err := tr.RoundTrip(req)
			ok := false
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				ok = err == nil && resp.StatusCode == http.StatusOK
			}
			took, at := time.Since(sent), time.Since(start)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case at < o.from || at >= o.lasts:
			case ok:
				served++
			default:
				failed = append(failed, took)
			}
		})
	}
	wg.Wait()
	res := overloadResult{goodput: float64(served) / (o.lasts - o.from).Seconds() / o.capacity(), behind: behind}
	if n := len(failed); n > 0 {
		res.refused = sorted(failed)[n*9/10]
	}
	return res
}

// TestS34_GoodputInVirtualTime: at 2, 5 and 10 times its capacity a service with
// Limit serves at least nine tenths of what it can do. Without it, or behind a
// semaphore that knows no deadlines, it serves hardly anybody in time.
func TestS34_GoodputInVirtualTime(t *testing.T) {
	for _, spread := range []float64{0.5, 1} {
		t.Run(fmt.Sprint(spread), func(t *testing.T) {
			t.Parallel()
			for _, front := range append([]string{frontLong}, overloadFronts...) {
				var row []string
				best := 0.0
				for _, load := range []float64{1, 2, 5, 10} {
					if load == 5 && (raceEnabled || testing.Short()) {
						continue
					}
					o := overload{
						workers: 5, takes: 20 * time.Millisecond, spread: spread, deadline: 200 * time.Millisecond,
						load: load, lasts: 5 * time.Second, from: time.Second, front: front,
					}
					var res overloadResult
					synctest.Test(t, func(t *testing.T) {
						rng := rand.New(rand.NewPCG(uint64(10*load), 5))
						var mu sync.Mutex
						services := rand.New(rand.NewPCG(uint64(10*load), 6))
						h := o.middleware(t, o.handler(func() float64 {
							mu.Lock()
							defer mu.Unlock()
							return services.NormFloat64()
						}, nil))
						res = o.run(t, rng, &inProcessHop{handler: h}, "http://peer.test/")
					})
					best = max(best, res.goodput)
					row = append(row, fmt.Sprintf("%.2f at %v (%v)", res.goodput, load, res.refused.Round(time.Millisecond)))
					switch {
					case load == 1:
					case front == frontLimit:
						if res.goodput < 0.9*best {
							t.Errorf("%s at %v times the capacity: a goodput of %.3f, want 0.9 of %.3f", front, load, res.goodput, best)
						}
						if res.refused > 50*time.Millisecond {
							t.Errorf("%s at %v times the capacity: it takes %v to be refused", front, load, res.refused)
						}
					case front == frontLong:
						// It is why the queue is short by default.
						if res.goodput < 0.65 || res.goodput > 0.95 {
							t.Errorf("%s at %v times the capacity: a goodput of %.3f, want about 0.8", front, load, res.goodput)
						}
					case res.goodput > 0.7:
						t.Errorf("%s at %v times the capacity: a goodput of %.3f: then this test shows nothing", front, load, res.goodput)
					}
				}
				t.Logf("spread %v, %s: %s", spread, front, strings.Join(row, ", "))
			}
		})
	}
}

// TestS34_Goodput measures the README's table: the same over the loopback
// interface, with a handler that sleeps for 50 ms on one of four workers.
func TestS34_Goodput(t *testing.T) {
	loads := []float64{1, 2, 5, 10}
	fronts := overloadFronts
	if raceEnabled || testing.Short() {
		loads, fronts = []float64{1, 10}, overloadFronts[2:]
	}
	table := "| in front of the handler | " + strings.Trim(strings.ReplaceAll(fmt.Sprint(loads), " ", " × | "), "[]") + " × |\n"
	for _, front := range fronts {
		row, best := "| "+front+" |", 0.0
		for _, load := range loads {
			o := overload{
				workers: 4, takes: 50 * time.Millisecond, deadline: 250 * time.Millisecond,
				load: load, lasts: 1500 * time.Millisecond, from: 500 * time.Millisecond, front: front,
			}
			over := make(chan struct{})
			srv := httptest.NewServer(o.middleware(t, o.handler(func() float64 { return 0 }, over)))
			base := &http.Transport{MaxIdleConnsPerHost: 1000}
			res := o.run(t, rand.New(rand.NewPCG(1, 7)), base, srv.URL)
			close(over)
			base.CloseIdleConnections()
			srv.Close()
			row += fmt.Sprintf(" %.0f %% |", 100*res.goodput)
			best = max(best, res.goodput)
			switch {
			case res.behind > 50*time.Millisecond:
				t.Logf("%s at %v: the machine is busy, requests came up to %v late", front, load, res.behind)
			case load == 1:
			case front == frontLimit && res.goodput < 0.8*best:
				t.Errorf("%s at %v times the capacity: a goodput of %.2f, want 0.9 of %.2f", front, load, res.goodput, best)
			case front != frontLimit && res.goodput > 0.7:
				t.Errorf("%s at %v times the capacity: a goodput of %.2f: then this test shows nothing", front, load, res.goodput)
			}
		}
		table += row + "\n"
	}
	t.Logf("goodput at a multiple of the capacity:\n%s", table)
}

func sorted(d []time.Duration) []time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d
}
