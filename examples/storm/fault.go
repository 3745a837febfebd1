package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A faultKind is one way for the bottom of the chain to break.
type faultKind string

const (
	faultNone    faultKind = "none"
	faultOutage  faultKind = "outage"
	faultSlow    faultKind = "slow"
	faultFlap    faultKind = "flap"
	faultStall   faultKind = "stall"
	faultPartial faultKind = "partial"
	faultTail    faultKind = "tail"
)

var faultKinds = []faultKind{faultNone, faultOutage, faultSlow, faultFlap, faultStall, faultPartial, faultTail}

// faultTexts says what each does, as the end of a sentence.
var faultTexts = map[faultKind]string{
	faultNone:    "all is well",
	faultOutage:  "every answer is a 503, at once",
	faultSlow:    "every answer comes two seconds late, too late for everybody",
	faultFlap:    "a second of outage, a second of health, in turn",
	faultStall:   "nothing is answered, and the work piles up",
	faultPartial: "every other answer is a 503",
	faultTail:    "one answer in 33 comes 400 ms late",
}

func parseFault(s string) (faultKind, error) {
	for _, k := range faultKinds {
		if s == string(k) {
			return k, nil
		}
	}
	return "", fmt.Errorf("no fault is named %q: there are %s", s, strings.Trim(fmt.Sprint(faultKinds), "[]"))
}

const (
	slowness   = 2 * time.Second
	tailEvery  = 33
	tailDelay  = 400 * time.Millisecond
	flapPeriod = time.Second
	queueMax   = 5000 // work waiting at the database; what comes on top is a 503
)

// A database is the bottom of the chain: a queue with one worker that can take
// so much a second and no more.
//
// Like most real ones it does not notice that a caller has given up: what is in
// the queue gets done. That is what makes a stall outlive its cause where the
// callers keep sending.
type database struct {
	every time.Duration // one piece of work
	queue chan chan struct{}
	calls atomic.Uint64

	mu      sync.Mutex
	kind    faultKind     // guarded by mu
	since   time.Time     // guarded by mu
	changed chan struct{} // guarded by mu; closed by the next break
}

// newDatabase returns a healthy database for perSecond requests. It works
// until ctx ends.
func newDatabase(ctx context.Context, perSecond float64) *database {
	d := &database{
		every:   time.Duration(float64(time.Second) / perSecond),
		queue:   make(chan chan struct{}, queueMax),
		kind:    faultNone,
		changed: make(chan struct{}),
	}
	go d.work(ctx)
	return d
}

// breakDown makes the database ill in the way of k; faultNone mends it.
func (d *database) breakDown(k faultKind) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kind, d.since = k, time.Now()
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *database) state() (k faultKind, since time.Time, changed <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.kind, d.since, d.changed
}

func (d *database) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kind, since, _ := d.state()
	down := false
	switch kind {
	case faultOutage:
		down = true
	case faultFlap:
		down = time.Since(since)/flapPeriod%2 == 0
	case faultPartial:
		down = d.calls.Add(1)%2 == 0
	}
	if down {
		http.Error(w, "the database is down", http.StatusServiceUnavailable)
		return
	}

	done := make(chan struct{})
	select {
	case d.queue <- done:
	default:
		http.Error(w, "the database's queue is full", http.StatusServiceUnavailable)
		return
	}
	select {
	case <-done:
	case <-r.Context().Done():
		return // nobody waits any more, but the work stays in the queue
	}
	if kind == faultSlow && !pause(r.Context(), slowness) {
		return
	}
	if kind == faultTail && d.calls.Add(1)%tailEvery == 0 && !pause(r.Context(), tailDelay) {
		return
	}
	fmt.Fprintln(w, "a row of the database")
}

// work takes the queue's work one by one, each not before its turn.
func (d *database) work(ctx context.Context) {
	next := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case done := <-d.queue:
			for kind, _, changed := d.state(); kind == faultStall; kind, _, changed = d.state() {
				select {
				case <-changed:
				case <-ctx.Done():
					return
				}
			}
			// Sleeping takes longer than asked, so turns are counted from the
			// last turn, not from when it was noticed. An idle time is lost.
			if now := time.Now(); next.Before(now.Add(-50 * time.Millisecond)) {
				next = now
			}
			next = next.Add(d.every)
			if !pause(ctx, time.Until(next)) {
				return
			}
			close(done)
		}
	}
}

// pause waits for d and reports whether ctx lasted as long.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
