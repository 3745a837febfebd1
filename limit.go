package stint

import (
	"container/list"
	"errors"
	"net/http"
	"sync"
	"time"
)

// DefaultLimitMaxWait is what LimitConfig.MaxWait is when it is zero.
const DefaultLimitMaxWait = time.Second

const (
	maxLimit = 1_000_000
	// limitWindow is how far back the handler's own latency is looked at: what is
	// to be known is how fast it is now.
	limitWindow = 10 * time.Second
	// limitProbes is the part of MaxConcurrent that serves requests without asking
	// how long the handler takes: once everything was refused because it had been
	// slow, nothing would tell that it is no longer.
	limitProbes = 10
	// limitSamples is how many latencies must be known. More could keep a handler
	// that is merely tried now and then from ever being known to be slow.
	limitSamples = 5
)

// LimitConfig bounds how many requests a handler serves at once and how many
// wait for that, and has the middleware refuse those that would wait or run in
// vain. The zero value is no limit.
//
// A refused request gets a 503 with Retry-After and X-Should-Retry: true, as
// nothing was done for it, before the handler is called. It is refused
//
//   - at once, where MaxConcurrent are served and MaxQueue wait ("limit");
//   - at once, where its deadline is too near for those who wait in front of it,
//     and for what the handler took at its median in the last 10 s ("queue");
//   - from the queue, when so little time is left to it, or after MaxWait
//     ("queue").
//
// Nothing that cannot end in time is begun, so an overload costs those who are
// refused, and not everybody. It takes deadlines for that: without them a request
// is served even when its caller has long given up, as far as that is not seen.
//
// A handler that is not heard of for so long that everything is refused is tried
// with a tenth of MaxConcurrent, at least one request at a time.
type LimitConfig struct {
	// MaxConcurrent is how many requests the handler serves at once, at most a
	// million. 0: no limit, and the other fields have to be zero too.
	//
	// A request counts until its handler has ended, also one that HardStop has cut
	// off; until it hijacks the connection; or, for CONNECT, until it is answered.
	// It counts while its client takes its time to read the answer.
	MaxConcurrent int
	// MaxQueue is how many requests wait, at most a million, in the order in which
	// they came. 0: as many as MaxConcurrent. Negative: none. Longer ones are for
	// bursts: in an overload all who are served have then waited until nearly their
	// deadline, and many of them miss it.
	MaxQueue int
	// MaxWait is the longest that a request waits, at most an hour: for those
	// without a deadline. 0: DefaultLimitMaxWait, a second.
	MaxWait time.Duration
	// RetriesLast has requests with X-Retry-Count wait behind all others, and give
	// way to them when the queue is full.
	RetriesLast bool
	// Exempt, if not nil, tells which requests do not count and are not refused:
	// event streams and long polls, which are there to wait. They are in all else
	// as the others; for health checks there is MiddlewareConfig.Exempt. It is
	// called on the request's goroutine and must not change the request.
	Exempt func(*http.Request) bool
}

func (c LimitConfig) withDefaults() LimitConfig {
	if c.MaxConcurrent == 0 {
		return c
	}
	switch {
	case c.MaxQueue == 0:
		c.MaxQueue = c.MaxConcurrent
	case c.MaxQueue < 0:
		c.MaxQueue = 0
	}
	if c.MaxWait == 0 {
		c.MaxWait = DefaultLimitMaxWait
	}
	return c
}

// check is for c as it was configured.
func (c LimitConfig) check(errs *configErrors) {
	errs.check(c.MaxConcurrent >= 0 && c.MaxConcurrent <= maxLimit, "MiddlewareConfig.Limit.MaxConcurrent", c.MaxConcurrent, "must be from 1 to 1,000,000, or 0 for no limit")
	errs.check(c.MaxQueue <= maxLimit, "MiddlewareConfig.Limit.MaxQueue", c.MaxQueue, "must be at most 1,000,000, 0 for MaxConcurrent, or negative for none")
	errs.check(c.MaxWait >= 0 && c.MaxWait <= time.Hour, "MiddlewareConfig.Limit.MaxWait", c.MaxWait, "must be at most 1h, or 0 for the default")
	idle := c.MaxConcurrent == 0 && (c.MaxQueue != 0 || c.MaxWait != 0 || c.RetriesLast || c.Exempt != nil)
	errs.check(!idle, "MiddlewareConfig.Limit.MaxConcurrent", c.MaxConcurrent, "must be set where another field of Limit is")
}

// A limiter hands out slots. Time is a parameter. Safe for concurrent use. While a
// slot is free nobody waits.
//
// Those who wait are served in the order in which they came. Serving the latest
// first has the same goodput, and half the waiting for those who are served; but
// who is refused then learns that when the deadline is near, and not at once,
// and how long a request will wait cannot be told in advance. What is bad about
// the order is a long queue, in which everybody gets old and up to a quarter of
// the work ends too late. So the queue is short by default.
type limiter struct {
	cfg  LimitConfig
	look bool       // ReportOnly: everybody gets a slot
	took *histogram // by those that had a slot

	mu     sync.Mutex
	inside int // guarded by mu: slots that are taken
	// Guarded by mu. The first are served first. The second has the retries where
	// RetriesLast is set.
	queues [2]list.List
}

// A waiter is a request in the queue.
type waiter struct {
	end     time.Time // its deadline; zero: none
	place   *list.Element
	queue   *list.List  // nil once it is in none; guarded by limiter.mu
	verdict chan Reason // what became of it: a slot, where it is empty. Never blocks
}

// newLimiter returns nil where there is no limit.
func newLimiter(c LimitConfig, look bool, origin time.Time) *limiter {
	if c.MaxConcurrent == 0 {
		return nil
	}
	return &limiter{cfg: c.withDefaults(), look: look, took: newHistogram(limitWindow, origin)}
}

// usual returns what the handler takes at its median, 0 where too little is known.
func (l *limiter) usual(now time.Time) time.Duration {
	p50, samples := l.took.quantile(now, 0.5)
	if samples < limitSamples {
		return 0
	}
	return p50
}

// tooLate reports whether a request with this deadline would end too late if it began
// after wait.
func tooLate(now, end time.Time, wait, usual time.Duration) bool {
	return !end.IsZero() && !now.Add(wait+usual).Before(end)
}

// ask returns what a request is refused for; "" where it has taken a slot, or has
// a place in the queue, which w then is. wait is what the queue and the handler
// are expected to take.
func (l *limiter) ask(now, end time.Time, retry bool) (w *waiter, refused Reason, wait time.Duration) {
	usual := l.usual(now)
	l.mu.Lock()
	defer l.mu.Unlock()
	free := l.inside < l.cfg.MaxConcurrent
	q, ahead, waiting := &l.queues[0], l.queues[0].Len(), l.queues[0].Len()+l.queues[1].Len()
	if retry && l.cfg.RetriesLast {
		q, ahead = &l.queues[1], waiting
	}
	if l.look {
		defer func() { l.inside++ }()
		ahead = l.inside - l.cfg.MaxConcurrent // those who would wait are inside
		waiting = ahead
	}
	if free {
		if tooLate(now, end, 0, usual) && l.inside >= max(1, l.cfg.MaxConcurrent/limitProbes) {
			return nil, ReasonQueue, usual
		}
		if !l.look {
			l.inside++
		}
		return nil, "", 0
	}
	queueing := time.Duration(ahead+1) * usual / time.Duration(l.cfg.MaxConcurrent)
	wait = queueing + usual
	if queueing > l.cfg.MaxWait || tooLate(now, end, queueing, usual) {
		return nil, ReasonQueue, wait
	}
	if waiting >= l.cfg.MaxQueue {
		last := l.queues[1].Back()
		if last == nil || q == &l.queues[1] {
			return nil, ReasonLimit, wait
		}
		l.dismissLocked(last, ReasonLimit)
	}
	if l.look {
		return nil, "", wait
	}
	w = &waiter{end: end, queue: q, verdict: make(chan Reason, 1)}
	w.place = q.PushBack(w)
	return w, "", wait
}

// dismissLocked takes a waiter out of the queue and tells it why.
func (l *limiter) dismissLocked(place *list.Element, why Reason) {
	w := place.Value.(*waiter)
	w.queue.Remove(place)
	w.queue = nil
	w.verdict <- why
}

// giveUp takes w out of the queue, and reports whether it was still there: if
// not, there is a verdict.
func (l *limiter) giveUp(w *waiter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.queue == nil {
		return false
	}
	w.queue.Remove(w.place)
	w.queue = nil
	return true
}

// leave gives a slot back. took is what is to be learnt of the handler's latency;
// less than 0: nothing.
func (l *limiter) leave(now time.Time, took time.Duration) {
	if took >= 0 {
		l.took.record(now, took)
	}
	usual := l.usual(now)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inside--
	for i := range l.queues {
		for l.inside < l.cfg.MaxConcurrent && l.queues[i].Len() > 0 {
			next := l.queues[i].Front()
			if tooLate(now, next.Value.(*waiter).end, 0, usual) {
				l.dismissLocked(next, ReasonQueue)
				continue
			}
			l.inside++
			l.dismissLocked(next, "")
		}
	}
}

var (
	errLimit = errors.New("overloaded: as many requests are served, and wait, as MiddlewareConfig.Limit allows")
	errQueue = errors.New("overloaded: by what it takes at present, the request could not have been served in time")
)

// takeSlot holds the request to Limit, and waits in the queue where it has to.
func (x *exchange) takeSlot(r *http.Request) {
	l := x.m.limit
	if l == nil || l.cfg.Exempt != nil && l.cfg.Exempt(r) {
		return
	}
	now := time.Now()
	w, refused, wait := l.ask(now, x.end, x.retries > 0)
	if w != nil {
		refused, now = x.queue(l, w, now)
	}
	if refused == "" || l.look {
		x.slotSince = now
		x.slot.Store(true)
	}
	kept := false
	defer func() {
		if !kept {
			x.leaveSlot(false) // a hook that panics, as well
		}
	}()
	if w != nil {
		// Also after a verdict: it may have come too late.
		if x.stillWanted(now); x.refusal != nil {
			return
		}
	}
	switch {
	case refused == "" || l.look && x.expired(now): // which has been counted
	case refused == ReasonLimit:
		x.shed(now, ReasonLimit, errLimit, wait)
	default:
		x.shed(now, ReasonQueue, errQueue, wait)
	}
	kept = true
}

// queue waits for the verdict on w, and returns it and the time.
func (x *exchange) queue(l *limiter, w *waiter, now time.Time) (Reason, time.Time) {
	longest := l.cfg.MaxWait
	if !x.end.IsZero() {
		// From then on there is too little time for the handler.
		longest = min(longest, x.end.Sub(now)-l.usual(now))
	}
	t := time.NewTimer(longest)
	defer t.Stop()
	verdict := ReasonQueue
	select {
	case verdict = <-w.verdict:
	case <-t.C:
		if !l.giveUp(w) {
			verdict = <-w.verdict
		}
	case <-x.Context.Done():
		if !l.giveUp(w) {
			verdict = <-w.verdict
		}
	}
	return verdict, time.Now()
}

// leaveSlot gives the request's slot back, if it has one. The handler's own
// latency is learnt from it, unless it has not run.
func (x *exchange) leaveSlot(ran bool) {
	if x.m.limit == nil || !x.slot.CompareAndSwap(true, false) {
		return
	}
	now := time.Now()
	took := now.Sub(x.slotSince)
	switch {
	case !ran || x.over.Load():
		took = -1 // how long a handshake takes says nothing of requests
	case x.expired(now) || x.Context.Err() != nil:
		// It was cut off, and would have taken longer. Were it taken for what it
		// took, those that begin late and are cut off early would make a handler
		// that serves nobody in time look as if it did.
		took *= 2
	}
	x.m.limit.leave(now, took)
}
