package stinttest

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

// headerRequest numbers the requests of a check, so that attempts can be told
// from requests whatever client makes them.
const headerRequest = "X-Stinttest-Request"

// A Budget says what [RetriesWithinBudget] does and allows. Every field's zero
// value is the default that its comment names.
type Budget struct {
	// Peer is what the client talks to: by its URL, or in memory, as the base of
	// the client. Its script is replaced. nil: one of the check's own, on a
	// loopback address.
	Peer *Peer

	// Rate is how many requests a second are sent, evenly. 0: 100.
	Rate float64
	// Ratio is how many retries a second are allowed, as a share of Rate. 0:
	// 0.1. Negative: none but the floor.
	Ratio float64
	// Floor is how many retries a second are allowed however few requests there
	// are; of the two the larger counts. 0: 1. Negative: none.
	Floor int

	// Healthy is for how long the peer answers at first, during which a budget
	// can gather credit. 0: 2 s.
	Healthy time.Duration
	// Outage is for how long it then does not. 0: 3 s.
	Outage time.Duration
	// Fault is what the peer does in the outage. OK, which is no fault:
	// Fail(503). Flap and Partial are ways to be half broken.
	Fault Step

	// Timeout is the deadline of each request. 0: 1 s.
	Timeout time.Duration
}

func (b Budget) withDefaults() Budget {
	def := func(d *time.Duration, value time.Duration) {
		if *d <= 0 {
			*d = value
		}
	}
	def(&b.Healthy, 2*time.Second)
	def(&b.Outage, 3*time.Second)
	def(&b.Timeout, time.Second)
	if !(b.Rate > 0) {
		b.Rate = 100
	}
	if b.Ratio == 0 {
		b.Ratio = 0.1
	}
	if b.Floor == 0 {
		b.Floor = 1
	}
	if b.Fault.harmless() {
		b.Fault = Fail(http.StatusServiceUnavailable)
	}
	return b
}

// allowed returns how many retries a second may have. It forgives the last bit
// of products such as 0.1 × 30.
func (b Budget) allowed() int {
	return max(0, b.Floor, int(math.Ceil(b.Ratio*b.Rate-1e-9)))
}

// RetriesWithinBudget sends GET requests through a client at an even rate, to a
// peer that is healthy for a while and then is not, and fails if in any second,
// wherever it begins, there were more retries than the larger of ratio × rate
// (rounded up) and the floor. A retry is every arrival of a request but its
// first, whoever sent it: a hedge, or a proxy in between, counts too.
//
// It takes Healthy + Outage + Timeout at most. In a bubble of testing/synctest,
// with a Peer in memory that was made there, that is virtual time, and long
// outages cost nothing. In real time a second is taken as shorter by as much as
// the machine itself was seen to be late, up to a quarter: a client that is good
// must not fail where its timers are not.
//
// Over sockets and with a Fault that drops connections, what net/http itself
// sends again when a kept-alive connection dies is counted as well. The client
// has to be new: what it has learned of the peer before is not known here.
func RetriesWithinBudget(t TB, client Client, b Budget) {
	t.Helper()
	b = b.withDefaults()
	peer := b.Peer
	if peer == nil {
		if peer = StartPeer(t); peer.URL == "" {
			return
		}
	}
	before := peer.Count()
	peer.Use(OK())
	template, err := http.NewRequest(http.MethodGet, peer.url(), nil)
	if err != nil {
		t.Fatalf("stinttest: Peer.URL: %v", err)
		return
	}
	run := &load{client: client, template: template, timeout: b.Timeout}
	run.begin(b.Rate, b.Healthy)
	peer.Use(b.Fault)
	run.begin(b.Rate, b.Outage)
	ended := run.wait()
	peer.Use(OK())
	if !ended {
		t.Fatalf("stinttest: the client has not returned %v after a request's deadline", patience)
		return
	}

	first, retries := run.sort(peer.Arrivals()[before:])
	if first == 0 {
		t.Fatalf("stinttest: not one of %d requests arrived at the peer (last error: %v)", len(run.due), run.last)
		return
	}
	if most := busiest(retries, time.Second-min(run.late, time.Second/4)); most > b.allowed() {
		t.Errorf("stinttest: %d retries within one second, %d allowed (%v requests a second, ratio %v, floor %d; %d retries of %d requests in all)",
			most, b.allowed(), b.Rate, max(0, b.Ratio), max(0, b.Floor), len(retries), len(run.due))
	}
}

// patience is how long a client may take to return when a request's deadline has
// passed.
const patience = 10 * time.Second

// A load is a stream of requests, each on a goroutine of its own: a peer that
// stalls must not slow it down.
type load struct {
	client   Client
	template *http.Request
	timeout  time.Duration

	due  []time.Time   // when each request was to be sent
	late time.Duration // the most that one was later than that at the peer
	wg   sync.WaitGroup

	mu   sync.Mutex
	last error // guarded by mu
}

// begin sends requests for so long. It does not wait for the answers.
func (l *load) begin(rate float64, d time.Duration) {
	start := time.Now()
	// Rounded up: one nanosecond less, and there is one request more in a second.
	every := time.Duration(math.Ceil(float64(time.Second) / rate))
	for passed := time.Duration(0); passed < d; passed += every {
		due := start.Add(passed)
		time.Sleep(time.Until(due))
		number := len(l.due)
		l.due = append(l.due, due)
		ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
		req := l.template.WithContext(ctx)
		req.Header = http.Header{headerRequest: {strconv.Itoa(number)}}
		l.wg.Go(func() {
			defer cancel()
			if _, err := do(l.client, req); err != nil {
				l.mu.Lock()
				l.last = err
				l.mu.Unlock()
			}
		})
	}
	time.Sleep(time.Until(start.Add(d)))
}

// wait waits for the answers. It reports whether all have come.
func (l *load) wait() bool {
	done := make(chan struct{})
	go func() {
		l.wg.Wait()
		close(done)
	}()
	timer := time.NewTimer(l.timeout + patience)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// sort tells first attempts, which it counts, from retries, and measures by how
// much the first ones were late.
func (l *load) sort(arrivals []Arrival) (first int, retries []time.Time) {
	seen := make([]bool, len(l.due))
	for _, a := range arrivals {
		i, err := strconv.Atoi(a.Header.Get(headerRequest))
		if err == nil && i >= 0 && i < len(seen) && !seen[i] {
			seen[i] = true
			first++
			l.late = max(l.late, a.At.Sub(l.due[i]))
		} else {
			retries = append(retries, a.At)
		}
	}
	return first, retries
}

// busiest returns the most events that lie within any half-open span of time of
// that length.
func busiest(at []time.Time, span time.Duration) (most int) {
	slices.SortFunc(at, time.Time.Compare)
	from := 0
	for i, t := range at {
		for t.Sub(at[from]) >= span {
			from++
		}
		most = max(most, i-from+1)
	}
	return most
}
