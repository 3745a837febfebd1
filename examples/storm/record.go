package main

import (
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/stinthttp/stint"
)

// cohortHeader marks the user requests that spend their whole life inside the
// fault, and every attempt made for them at any tier. Counting by the clock
// instead would mix in requests that saw only part of it.
const cohortHeader = "X-Storm-Cohort"

// retriesMax bounds the memory that retries can take; far more are a failure
// that needs no further counting.
const retriesMax = 100_000

// A record is what one run was seen to do. Safe for concurrent use; a nil
// record counts nothing.
type record struct {
	start time.Time

	mu      sync.Mutex
	arrived [len(tiers)][]int // per second; guarded by mu
	cohort  [len(tiers)]int   // for the requests of the cohort; guarded by mu
	good    []int             // users answered 200, per second of the answer; guarded by mu
	bad     []int             // and otherwise; guarded by mu
	retries []time.Duration   // at the bottom, marked as retries; guarded by mu
	users   []user            // guarded by mu
	door    int               // arrivals at the bottom, where those that are refused are not in arrived; guarded by mu
	late    time.Duration     // how far the generator fell behind its own plan; guarded by mu
}

// A user is one request as its sender saw it. Times count from the start.
type user struct {
	sent   time.Duration
	took   time.Duration
	ok     bool
	cohort bool
}

func newRecord() *record { return &record{start: time.Now()} }

// count wraps a tier so that every request that reaches it is counted, also
// one that its middleware then refuses.
func (r *record) count(tier int, next http.Handler) http.Handler {
	if r == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.arrive(tier, req.Header)
		next.ServeHTTP(w, req)
	})
}

// countDoor wraps the bottom where count is inside its middleware.
func (r *record) countDoor(next http.Handler) http.Handler {
	if r == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		r.door++
		r.mu.Unlock()
		next.ServeHTTP(w, req)
	})
}

func (r *record) arrive(tier int, h http.Header) {
	at := time.Since(r.start)
	r.mu.Lock()
	defer r.mu.Unlock()
	bump(&r.arrived[tier], at)
	if h.Get(cohortHeader) != "" {
		r.cohort[tier]++
	}
	if tier == bottom && h.Get(stint.HeaderRetryCount) != "" && len(r.retries) < retriesMax {
		r.retries = append(r.retries, at)
	}
}

func (r *record) answered(u user) {
	if r == nil {
		return
	}
	at := time.Since(r.start)
	r.mu.Lock()
	defer r.mu.Unlock()
	if u.ok {
		bump(&r.good, at)
	} else {
		bump(&r.bad, at)
	}
	r.users = append(r.users, u)
}

func (r *record) fellBehind(by time.Duration) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.late = max(r.late, by)
}

// bump counts one in the second of at.
func bump(seconds *[]int, at time.Duration) {
	i := int(at / time.Second)
	for len(*seconds) <= i {
		*seconds = append(*seconds, 0)
	}
	(*seconds)[i]++
}

// second returns what happened in second i of the run.
func (r *record) second(i int) (edge, bottomSaw, bad int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return at(r.arrived[0], i), at(r.arrived[bottom], i), at(r.bad, i)
}

func at(seconds []int, i int) int {
	if i < 0 || i >= len(seconds) {
		return 0
	}
	return seconds[i]
}

// A summary is what the report says of one run.
type summary struct {
	name          string
	requests      int                 // by users, over the whole run
	failed        int                 // of these
	amplification [len(tiers)]float64 // attempts per user request of the cohort
	peak          int                 // requests at the bottom in one second of the run
	retries       int                 // at the bottom, marked as such
	retryPeak     int                 // the most of them in any one second, however it is placed
	recovery      time.Duration       // from the end of the fault; negative: not seen
	late          time.Duration
	refused       int           // at the bottom, before its handler; only where that is asked for
	attempts      []int         // at the bottom, per second
	successes     []int         // of users, per second
	waits         []int         // in which 99 % of the users of each second were answered, in milliseconds
	p95, p99      time.Duration // the same, of the cohort
}

// summarise is for a run that has ended: mended is when its fault was taken
// away, and only whole seconds of its length are kept for the curves.
func (r *record) summarise(name string, mended, length time.Duration) summary {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := summary{
		name:      name,
		requests:  len(r.users),
		retries:   len(r.retries),
		retryPeak: mostWithin(r.retries, time.Second),
		recovery:  recovery(r.users, mended),
		late:      r.late,
	}
	cohort := 0
	var tooks []time.Duration
	bySecond := make([][]time.Duration, length/time.Second)
	for _, u := range r.users {
		if i := int(u.sent / time.Second); i < len(bySecond) {
			bySecond[i] = append(bySecond[i], u.took)
		}
		if u.cohort {
			tooks = append(tooks, u.took)
		}
		if !u.ok {
			s.failed++
		}
		if u.cohort {
			cohort++
		}
	}
	for tier := range tiers {
		if cohort > 0 {
			s.amplification[tier] = float64(r.cohort[tier]) / float64(cohort)
		}
	}
	s.peak = slices.Max(append([]int{0}, r.arrived[bottom]...))
	s.refused = r.door
	for _, n := range r.arrived[bottom] {
		s.refused -= n
	}
	s.p95, s.p99 = quantile(tooks, 0.95), quantile(tooks, 0.99)
	for i := range int(length / time.Second) {
		s.waits = append(s.waits, int(quantile(bySecond[i], 0.99).Milliseconds()))
		s.attempts = append(s.attempts, at(r.arrived[bottom], i))
		s.successes = append(s.successes, at(r.good, i))
	}
	return s
}

// quantile returns the shortest time in which a share q of them was over.
func quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// mostWithin returns the largest number of instants in any half-open window.
func mostWithin(instants []time.Duration, window time.Duration) int {
	sorted := slices.Sorted(slices.Values(instants))
	most, first := 0, 0
	for i, t := range sorted {
		for t-sorted[first] >= window {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

// recovery returns how long after mended users are served again: the first
// request sent since then from which on, for a second, at least 95 % succeed.
func recovery(users []user, mended time.Duration) time.Duration {
	after := slices.Clone(users)
	slices.SortFunc(after, func(a, b user) int { return int(a.sent - b.sent) })
	i, _ := slices.BinarySearchFunc(after, mended, func(u user, t time.Duration) int { return int(u.sent - t) })
	after = after[i:]
	ok, end := 0, 0
	for i, u := range after {
		for end < len(after) && after[end].sent-u.sent < time.Second {
			if after[end].ok {
				ok++
			}
			end++
		}
		if end == len(after) {
			break // less than a second is left to look at
		}
		if u.ok && ok*20 >= (end-i)*19 {
			return u.sent - mended
		}
		if u.ok {
			ok--
		}
	}
	return -1
}
