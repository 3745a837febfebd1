package stint

import (
	"errors"
	"net/http"
	"sync/atomic"
	"time"
)

// HedgeConfig sets when a request gets a second attempt while the first is still
// under way, which is for the tail of the latencies and not for failures. The
// first good answer wins; the other attempt is cancelled and its answer closed.
//
// There is at most one hedge for a request, and only of one that may be repeated:
// by its method, or by a key that permits it. A body has to be replayable and the
// first attempt to have sent all of it. A hedge counts as a retry, in MaxAttempts
// and in the budget, of which it leaves a fifth to others; it fits into the
// deadline or is not sent; and there is none while more than a fifth of the
// requests of the last seconds would get one: then it is not the tail that is
// slow. The zero value is off.
//
// A request that can be hedged costs a timer, and a context of its own.
type HedgeConfig struct {
	// Quantile hedges where the first attempt runs longer than this share of the
	// peer's answers does, in (0, 1): 0.95 as a rule. It needs
	// Admission.MinSamples of them. 0: Delay alone.
	Quantile float64
	// Delay is the shortest time before a hedge; with Quantile 0 it is the time.
	// 0: none.
	Delay time.Duration
}

func (c HedgeConfig) on() bool { return c.Quantile > 0 || c.Delay > 0 }

func (c HedgeConfig) check(errs *configErrors) {
	errs.check(c.Quantile >= 0 && c.Quantile < 1, "Config.Hedge.Quantile", c.Quantile, "must be in (0, 1), or 0 for Delay alone")
	errs.check(c.Delay >= 0, "Config.Hedge.Delay", c.Delay, "must not be negative")
}

const (
	// hedgeShare of a window's retries may be hedges; what is left is for those
	// who have nothing yet.
	hedgeShare = 0.8
	// maxOverdueShare of the requests may be overdue, besides one, for hedges to be
	// sent.
	maxOverdueShare = 0.2
)

// A hedgeWatch tells a slow tail from a slow peer: how many requests of the last
// second or two could be hedged, how many of them were due to be, and how many are
// so at this moment, which shows first that a peer has stopped to answer.
type hedgeWatch struct {
	armed, overdue slotCounts
	now            atomic.Int64
}

func (w *hedgeWatch) tail(second, inflight int64) bool {
	armed, overdue := w.armed.sum(second-1, second), w.overdue.sum(second-1, second)
	return float64(overdue) <= 1+maxOverdueShare*float64(armed) && float64(w.now.Load()) <= 2+maxOverdueShare*float64(inflight)
}

// A turnLog holds the latest turns of a budget. Hedges come when they come, and one
// that waits is none; so they do not keep the distance between turns, only the
// number of them in a second.
type turnLog struct {
	at [64]time.Duration
	n  int
}

func (l *turnLog) add(at time.Duration) {
	l.at[l.n%len(l.at)] = at
	l.n++
}

// free returns the time from which on another turn does not make more than rate in
// a second, for rates that the log is long enough for.
func (l *turnLog) free(rate float64) time.Duration {
	k := int(rate)
	if k > len(l.at) || k > l.n {
		return 0
	}
	return l.at[(l.n-k)%len(l.at)] + time.Duration(turnSlack*float64(time.Second))
}

// latest returns the last turn, which may lie in the future.
func (l *turnLog) latest() time.Duration {
	if l.n == 0 {
		return 0
	}
	return l.at[(l.n-1)%len(l.at)]
}

// hedge takes a turn at now, and reports false, and charges nothing, where there is
// none to be had at once or the budget is tight.
func (b *budget) hedge(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, e := now.Sub(b.origin), b.epoch(now)
	if float64(b.takenLocked(e)+1) > hedgeShare*b.limit(e)+rounding {
		return false
	}
	rate := b.rate(e)
	if b.turns.latest() > at || b.turns.free(rate) > at || int(rate) > len(b.turns.at) && b.next > at {
		return false
	}
	b.turns.add(at)
	b.next = max(b.next, at+b.spacing(e))
	b.retries.add(e)
	return true
}

// A hedge is a second attempt that may come to be while the first is under way, on
// the timer's goroutine. That has a copy of the call: the call itself stays on the
// stack of whoever waits for the first attempt.
type hedge struct {
	twin  *call
	first *attempt
	timer *time.Timer
	over  atomic.Bool  // the first attempt has returned
	won   atomic.Int32 // number of the attempt whose answer counts; 0: none yet

	overdue  bool          // it counts in hedgeWatch.now
	launched chan struct{} // closed once it is known whether there is a second
	second   *attempt      // nil: none
	ended    chan struct{} // closed once what follows is there
	resp     *http.Response
	err      error
	panicked any
}

// hedgeAfter returns when to hedge the first attempt; 0: not at all.
func (c *call) hedgeAfter() time.Duration {
	cfg := &c.t.cfg.Hedge
	if !cfg.on() || c.opts.NoHedge || c.attempts > 0 || c.opts.MaxAttempts < 2 || len(c.req.Header["Upgrade"]) > 0 ||
		!replayable(c.req) || !c.repeatable && !c.key.permits(c.opts.Keys, nil) {
		return 0
	}
	after := cfg.Delay
	if cfg.Quantile > 0 {
		usual, samples := c.latency.quantile(c.start, cfg.Quantile)
		if samples < c.t.cfg.Admission.MinSamples {
			return 0
		}
		after = max(after, usual)
	}
	if after <= 0 || c.bounded && !c.start.Add(after).Before(c.sendBy) {
		return 0
	}
	return after
}

func (c *call) armHedge(first *attempt, after time.Duration) *hedge {
	h := &hedge{twin: new(call), first: first, launched: make(chan struct{}), ended: make(chan struct{})}
	*h.twin = *c
	c.hedge = h
	c.peer.hedges.armed.add(c.second(c.start))
	h.timer = time.AfterFunc(after, h.run)
	return h
}

// second numbers the seconds since the transport was made.
func (c *call) second(now time.Time) int64 {
	return int64(now.Sub(c.t.peers.origin) / time.Second)
}

func (h *hedge) run() {
	launched := false
	defer func() {
		// A panic here would end the program; in RoundTrip the caller can see to it.
		if v := recover(); v != nil {
			h.panicked = v
			h.first.cancel(errHedged)
		}
		if !launched {
			close(h.launched)
		}
		close(h.ended)
	}()
	if !h.begin() {
		return
	}
	launched = true
	close(h.launched)
	h.resp, h.err = h.twin.pass(h.second)
	if h.twin.answered(h.resp) && h.wins(h.second) {
		h.first.cancel(errHedged)
	}
}

// begin decides whether there is a second attempt, and makes it ready to go.
func (h *hedge) begin() bool {
	c, now := h.twin, time.Now()
	c.peer.hedges.overdue.add(c.second(now))
	c.peer.hedges.now.Add(1)
	h.overdue = true
	bodies := h.first.bodies()
	switch {
	case h.over.Load(), c.bound.Err() != nil, c.legacyCanceled():
	case !c.peer.hedges.tail(c.second(now), c.peer.inflight.Load()), c.tooLate(now), !bodies.finished(false):
	case !c.peer.budget.hedge(now):
	case !bodies.finished(true):
	default:
		c.peer.metrics.budgetUsed(now, c.peer.budget.utilisation(now))
		body, err := c.rewind()
		if err != nil {
			return false
		}
		took := now.Sub(h.first.sent)
		h.second = c.prepare(body)
		c.peer.metrics.hedged()
		if c.t.cfg.Hook != nil {
			c.emit(Event{Kind: EventHedge, Took: took, Remaining: c.remaining(now)})
			c.emit(Event{Kind: EventAttemptSent, Remaining: c.remaining(now)})
		}
		return true
	}
	return false
}

// answered reports whether an answer ends a request whatever the other attempt
// brings.
func (c *call) answered(resp *http.Response) bool {
	return resp != nil && resp.StatusCode < 500 && classifyResponse(resp, c.t.transient, c.foreign) == done
}

// wins reports whether a is the attempt whose answer counts. The first to ask is.
func (h *hedge) wins(a *attempt) bool {
	return h.won.CompareAndSwap(0, int32(a.number)) || h.won.Load() == int32(a.number)
}

// settle makes one result of what the first attempt returned and of what the
// second did or will. It waits for both: no goroutine outlives the call.
func (h *hedge) settle(c *call, resp *http.Response, err error) result {
	h.over.Store(true)
	if h.timer.Stop() {
		c.hedge = nil
		return c.conclude(h.first, resp, err)
	}
	<-h.launched
	c.inHand = resp
	if h.second != nil {
		if c.answered(resp) && h.wins(h.first) {
			h.second.cancel(errHedged)
		}
		<-h.ended
	}
	if h.panicked != nil {
		panic(h.panicked) // abort sees to the second attempt
	}
	c.hedge, c.attempts = nil, h.twin.attempts
	defer h.intime()
	if h.second == nil {
		return c.conclude(h.first, resp, err)
	}
	switch h.won.Load() {
	case 1:
		c.lose(h.second, h.resp)
		return c.conclude(h.first, resp, err)
	case 2:
		c.lose(h.first, resp)
		c.latency.record(time.Now(), time.Since(h.first.sent)) // it takes at least this long
		c.peer.metrics.hedgeWon()
		return c.conclude(h.second, h.resp, h.err)
	}
	// Neither is good. What forbids a retry counts before what does not, an answer
	// before an error; and of what is alike, that of the first attempt.
	kept, keptResp, keptErr := h.first, resp, err
	other, otherResp, otherErr := h.second, h.resp, h.err
	if rank(otherResp) > rank(keptResp) {
		kept, keptResp, keptErr, other, otherResp, otherErr = other, otherResp, otherErr, kept, keptResp, keptErr
	}
	r := c.conclude(other, otherResp, otherErr)
	other.release()
	c.other = other
	if r.resp != nil {
		r.resp.Body.Close()
	}
	return c.conclude(kept, keptResp, keptErr)
}

func rank(resp *http.Response) int {
	switch {
	case resp == nil:
		return 0
	case toldNotTo(resp.Header):
		return 2
	default:
		return 1
	}
}

// lose ends an attempt whose answer nobody waits for.
func (c *call) lose(a *attempt, resp *http.Response) {
	if resp != nil && resp.Body != nil {
		resp.Body.Close()
	}
	a.cancel(errHedged)
	a.release()
	c.inHand = nil
	if c.t.cfg.Hook != nil {
		c.last = a
		now := time.Now()
		c.emit(Event{Kind: EventAttemptDone, Remaining: c.remaining(now), Took: now.Sub(a.sent), Err: errHedged})
	}
}

// intime takes the request off the count of those that are overdue.
func (h *hedge) intime() {
	if h.overdue {
		h.overdue = false
		h.twin.peer.hedges.now.Add(-1)
	}
}

// abort ends what a panic has left, of either attempt or behind them.
func (h *hedge) abort(c *call) {
	if h == nil || h.timer.Stop() {
		return
	}
	<-h.launched
	defer h.intime()
	c.attempts = h.twin.attempts
	if h.second == nil {
		return
	}
	h.second.cancel(errHedged)
	<-h.ended
	if h.resp != nil && h.resp.Body != nil {
		h.resp.Body.Close()
	}
	h.second.bodies().close()
	closeUnsent(h.second.unsent)
	h.second.release()
}

var errHedged = errors.New("stint: the other attempt was quicker")
