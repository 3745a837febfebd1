package stint

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"time"
)

// A call is one request inside RoundTrip. It does not outlive it, and stays on the
// stack: nothing that does may refer to it. That saves about a tenth of what a
// request costs, most of it in the garbage collector.
type call struct {
	t       *Transport
	req     *http.Request   // the caller's
	ctx     context.Context // the caller's
	opts    Override        // with the transport's own values filled in
	arrival *arrival        // of the request being served, if the caller is a handler
	peer    *peer
	latency *histogram
	foreign bool
	key     requestKey

	repeatable bool // by its method
	traced     bool
	bounded    bool // there is a deadline

	start    time.Time
	deadline time.Time // when the request has to be over
	sendBy   time.Time // what the peer is told: deadline − reserve
	wireMS   int64     // sendBy as Unix milliseconds, in the clock of whoever set the deadline first
	wire     bool      // wireMS is sent

	bound       context.Context // ctx, ended at deadline
	cancelBound context.CancelFunc
	handedOver  bool // the contexts end with the answer's body

	turn     time.Time     // when the turn taken last is due
	need     time.Duration // what the next attempt was last held to need; 0: nobody has asked
	attempts int
	resends  int            // by net/http itself, within the attempts
	repeats  int            // those of them that the peer may have executed
	inHand   *http.Response // the answer that nobody has closed or returned yet
	held     bool           // it counts in peer.held
	counted  bool           // the outcome is

	seen   time.Time     // the latest reading of the clock; zero: too long ago to be used again
	header scannedHeader // req's
	last   *attempt      // nil: none yet
	other  *attempt      // the other of two that ran at once and failed; nil: there was none
	hedge  *hedge        // while the first attempt may get one; nil: it may not
	// hedgeable: attempts need a way to be ended alone.
	hedgeable bool
}

// begin collects what is known before the first attempt. On an error, or where one
// of the configured functions panics, nothing is held and the body is closed.
func (c *call) begin(t *Transport, req *http.Request) error {
	defer func() {
		if c.peer == nil {
			closeBody(req)
		}
	}()
	if t == nil || t.base == nil {
		return errZeroTransport
	}
	c.t, c.req, c.ctx, c.start = t, req, req.Context(), time.Now()
	if o, ok := c.ctx.Value(overrideKey{}).(*Override); ok {
		if o.Outcome != nil {
			*o.Outcome = Outcome{} // whatever an earlier request left there
		}
		if err := o.validate(); err != nil {
			return err
		}
		c.opts = *o
	}
	c.opts.inherit(&t.opts)
	if req.URL == nil {
		return errors.New("stint: nil Request.URL")
	}
	c.arrival = arrivalFrom(c.ctx)
	if t.cfg.Foreign != nil {
		c.foreign = t.cfg.Foreign(req)
	} else {
		c.foreign = leftFirstHost(req)
	}
	c.header = scanHeader(req.Header)
	c.key = chooseKey(req, c.header.key, c.arrival, c.opts.IdempotencyKey, c.opts.Keys, c.foreign)
	c.repeatable = idempotent(req.Method) && len(req.Header["Upgrade"]) == 0
	c.traced = t.cfg.CountResends || !c.repeatable && replayable(req)

	name := ""
	if t.cfg.Peer != nil {
		name = t.cfg.Peer(req)
	} else {
		name = peerName(req)
	}
	class := ""
	if t.cfg.Admission.Class != nil {
		class = t.cfg.Admission.Class(req)
	}
	c.peer = t.peers.enter(name, c.start)
	c.latency = c.peer.latency.get(class)
	c.setDeadline()
	return nil
}

// setDeadline computes when the request has to be over, and what the wire says
// of it. Of all limits the tightest wins. Differences are taken from now, so that
// a context's deadline without a monotonic reading does not matter.
func (c *call) setDeadline() {
	now := c.start
	left := time.Duration(-1)
	tighten := func(d time.Duration) {
		if !c.bounded || d < left {
			c.bounded, left = true, d
		}
	}
	c.bound = c.ctx
	d, fromContext := c.ctx.Deadline()
	if fromContext {
		tighten(d.Sub(now))
	}
	if c.t.cfg.Timeout > 0 {
		tighten(c.t.cfg.Timeout)
	}
	inherited := c.inherit(tighten)
	if !c.bounded {
		return
	}
	c.deadline = now.Add(left)
	c.sendBy = c.deadline.Add(-c.opts.Reserve)
	c.wire = !c.foreign
	if inherited != nil {
		c.wireMS = inherited.onWire(c.sendBy)
	} else {
		c.wireMS = max(0, wallMillis(c.sendBy, now, c.t.wallAt(now)))
	}
	if !fromContext || left < d.Sub(now) { // else the caller's context is already right
		c.bound, c.cancelBound = context.WithDeadlineCause(c.ctx, c.deadline, causeDeadline)
	}
}

// inherit returns the deadline that the request continues, if any: the one
// adopted for the request being served, or, in a proxy without our middleware,
// the one in the header that it copied.
func (c *call) inherit(tighten func(time.Duration)) *deadline {
	now := c.start
	adopted := c.arrival.adopted()
	if adopted != nil {
		tighten(adopted.e.Sub(now))
	}
	if !c.header.fleet || c.arrival != nil && c.arrival.mute() {
		return adopted
	}
	if adopted == nil {
		own, state, _ := readDeadline(&c.header, now, c.t.wallAt(now), proxiedMax, 0)
		if own != nil {
			tighten(own.e.Sub(now))
		} else if state.invalid() && c.arrival == nil {
			c.peer.metrics.badHeader(state)
		}
		return own
	}
	// Behind the middleware a header in the request is a copy of what arrived,
	// or somebody on the way has lowered it. It can only shorten.
	if ms, _, state := parseMillis(c.header.lines(HeaderDeadline)); state.usable() {
		lowered := time.Duration(min(max(0, adopted.ms-ms), maxCompanion)) * time.Millisecond
		tighten(adopted.e0.Add(-lowered).Sub(now))
	}
	return adopted
}

// mayRetry asks in this order; the first "no" is the reason. Nothing is charged
// yet.
func (c *call) mayRetry(r *result, now time.Time) (wait time.Duration, refused Reason) {
	switch {
	case c.attempts >= c.opts.MaxAttempts, !c.repeatable && c.attempts+c.repeats >= c.opts.MaxAttempts, r.err == errResends:
		return 0, ReasonAttempts
	case !replayable(c.req):
		return 0, ReasonNotReplayable
	case r.verdict != unbegun && !c.repeatable && !c.key.permits(c.opts.Keys, r.resp):
		return 0, ReasonNotIdempotent
	}
	if r.resp != nil && !r.skewed {
		if toldNotTo(r.resp.Header) {
			return 0, ReasonToldNotTo
		}
		hint, _ := retryAfter(r.resp.Header, c.t.wallAt(now))
		if hint > c.t.cfg.Backoff.MaxRetryAfter {
			return 0, ReasonRetryAfter
		}
		wait = hint
	}
	if wait > longest {
		return 0, ReasonRetryAfter // MaxRetryAfter sets no bound, but a duration has one
	}
	wait += c.t.cfg.Backoff.delay(c.attempts, c.t.jitter())
	latest := c.latest(now)
	if !latest.IsZero() && !now.Add(wait).Before(latest) {
		c.need += wait
		return 0, ReasonDeadline
	}
	if cut, of := c.latency.cutOff(now); of >= c.t.cfg.Admission.MinSamples && 2*cut > of {
		return 0, ReasonSlow
	}
	if refused = c.peer.budget.ask(now, wait, latest); refused != "" {
		c.noteRefusal(now, refused)
		return 0, refused
	}
	return wait, ""
}

// longest is the longest wait that can be added to others without overflow.
const longest = math.MaxInt64 / 4

// latest returns the time before which an attempt has to start so that it can end
// in time; zero: there is no deadline.
func (c *call) latest(now time.Time) time.Time {
	if !c.bounded {
		return time.Time{}
	}
	need := c.opts.Reserve + time.Millisecond
	if usual, samples := c.latency.quantile(now, c.t.cfg.Admission.Quantile); samples >= c.t.cfg.Admission.MinSamples {
		need = max(need, usual)
	}
	c.need = need
	return c.deadline.Add(-need)
}

// hold frees the connection of an answer that may be given back later, or counts
// it among those that keep theirs. It reports false where there are too many.
func (c *call) hold(r *result) bool {
	if r.resp == nil || r.resp.Body == http.NoBody || keep(r.resp) {
		return true
	}
	if c.peer.held.Add(1) > maxHeld {
		c.peer.held.Add(-1)
		return false
	}
	c.held = true
	return true
}

// sleep waits, and reports false as soon as the caller has gone or the deadline
// has passed.
func (c *call) sleep(d time.Duration) bool {
	if d <= 0 {
		return c.bound.Err() == nil && !c.legacyCanceled()
	}
	c.seen = time.Time{}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return c.bound.Err() == nil
	case <-c.bound.Done():
	//lint:ignore SA1019 http.Client still sets it for Client.Timeout
	case <-c.req.Cancel:
	}
	return false
}

// legacyCanceled reports whether Request.Cancel was closed, which is how
// http.Client tells transports it does not know that its Timeout is over.
func (c *call) legacyCanceled() bool {
	select {
	//lint:ignore SA1019 as in sleep
	case <-c.req.Cancel:
		return true
	default:
		return false
	}
}

// settle waits until the base is done with the bodies of the last attempt. An
// answer that is still on its connection may need the upload to go on, so that is
// left alone; behind an answer in memory, or an error, it is ended.
func (c *call) settle() bool {
	return c.last.bodies().settled(c.bound, !c.held) && c.other.bodies().settled(c.bound, true)
}

// rewind returns the body of the next attempt.
func (c *call) rewind() (io.ReadCloser, error) {
	if !hasBody(c.req) {
		return c.req.Body, nil
	}
	return c.req.GetBody()
}

// closeUnsent closes a body that rewind returned and no attempt will take.
func closeUnsent(body io.ReadCloser) {
	if body != nil {
		body.Close()
	}
}

// takeTurn takes a turn from the budget and waits for it. ReasonCanceled: the
// wait was cut short. The turn is then spent, and no more than it.
func (c *call) takeTurn() Reason {
	for {
		now := time.Now()
		wait, refused := c.peer.budget.take(now, c.latest(now))
		if refused != "" {
			c.noteRefusal(now, refused)
			return refused
		}
		c.turn = now.Add(wait)
		c.peer.metrics.budgetUsed(now, c.peer.budget.utilisation(now))
		if wait <= 0 {
			return ""
		}
		if !c.sleep(wait) {
			return ReasonCanceled
		}
		now = time.Now()
		if c.overdue(now) {
			continue
		}
		// The peer may have slowed down meanwhile.
		if c.tooLate(now) {
			return ReasonDeadline
		}
		return ""
	}
}

// overdue reports whether the turn has come so long ago that the retry may meet
// that of the next one. After a pause of the process, or of a connection that all
// retries wait for, they would else go at once.
func (c *call) overdue(now time.Time) bool { return now.Sub(c.turn) > maxOverdue }

// maxOverdue is a little less than the slack that lies between the turns of one
// second.
const maxOverdue = 45 * time.Millisecond

// tooLate reports whether an attempt that starts now could not end in time.
func (c *call) tooLate(now time.Time) bool {
	latest := c.latest(now)
	return !latest.IsZero() && !now.Before(latest)
}

// noteRefusal moves the gauge: a budget that refuses is in full use.
func (c *call) noteRefusal(now time.Time, refused Reason) {
	switch refused {
	case ReasonBudget:
		c.peer.metrics.budgetUsed(now, 1)
	case ReasonTurn:
		c.peer.metrics.budgetUsed(now, c.peer.budget.utilisation(now))
	}
}

// noteForDebug remembers why no (further) attempt was made, for DebugHandler.
func (c *call) noteForDebug(r *result, reason Reason) {
	now := time.Now()
	note := refusal{
		at: now.Sub(c.t.peers.origin), reason: reason, attempts: c.attempts,
		bounded: c.bounded, remaining: c.remaining(now),
	}
	// Where time ran out during an attempt, nobody had weighed it against a need.
	if reason == ReasonDeadline && r.reason == "" {
		note.need = c.need
	}
	c.peer.refusals.add(note)
}

// drop throws away what the last attempt left. Closing an answer can take its
// time, on HTTP/2 until the connection's writer is free: where the turn is overdue
// by then, another is taken. If that is refused, the failure is all that is left
// to return.
func (c *call) drop(r *result) (refused Reason) {
	resp, last := r.resp, r.failure()
	r.resp, r.err, c.inHand = nil, last, nil
	switch {
	case resp == nil:
	case c.held:
		patience := drainPatience
		if c.bounded {
			now := time.Now()
			// Half of what is left, or draining would use up the retry's time.
			patience = max(0, min(patience, c.latest(now).Sub(now)/2))
		}
		drain(resp.Body, patience)
	default:
		resp.Body.Close() // read already, or nothing to read
	}
	c.unhold()
	c.last.release()
	switch now := time.Now(); {
	case c.overdue(now):
		refused = c.takeTurn()
	case c.tooLate(now):
		refused = ReasonDeadline
	}
	if refused != "" {
		*r = result{verdict: terminal, err: last}
		if refused != ReasonCanceled {
			if refused == ReasonDeadline {
				last = join(context.DeadlineExceeded, last)
			}
			r.err = c.error(refused, last)
		}
	}
	return refused
}

func (c *call) unhold() {
	if c.held {
		c.held = false
		c.peer.held.Add(-1)
	}
}

// abandon ends a request whose caller went, or whose deadline passed, while it
// waited. An answer in hand is closed: nobody is there to take it.
func (c *call) abandon(r result) (*http.Response, error) {
	reason, why := ReasonCanceled, contextError(c.ctx)
	switch {
	case c.ctx.Err() == context.Canceled:
	case c.bound.Err() != nil, c.bounded && !time.Now().Before(c.sendBy):
		reason, why = ReasonDeadline, context.DeadlineExceeded
	default: // Request.Cancel
		why = context.Canceled
	}
	joined := join
	if reason == ReasonCanceled {
		joined = canceled
	}
	return c.finish(result{verdict: terminal, err: c.error(reason, joined(why, r.failure()))}, reason)
}

// contextError returns why a context ended, its cause included.
func contextError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if cause == nil || errors.Is(err, cause) {
		return err
	}
	return &both{err, cause}
}

func (c *call) error(reason Reason, err error) *Error {
	return &Error{Peer: c.peer.name, Attempts: c.attempts, Reason: reason, Err: err}
}

// finish accounts for the request and returns what its caller gets.
func (c *call) finish(r result, reason Reason) (*http.Response, error) {
	c.unhold()
	if cut, ok := r.err.(*cutError); ok {
		r.err = c.error(reason, cut)
	}
	outcome := c.outcome(&r, reason)
	if reason != "" {
		c.peer.metrics.refused(reason)
		c.noteForDebug(&r, reason)
	}
	c.count(outcome, reason)
	c.leaveNote(&r, outcome, reason)
	c.park(&r, reason)
	if c.t.cfg.Hook != nil {
		now := time.Now()
		if reason != "" {
			c.emit(Event{Kind: EventRefused, Reason: reason, Remaining: c.remaining(now), Status: r.status(), Err: r.err})
		}
		c.emit(Event{Kind: EventDone, Reason: reason, Remaining: c.remaining(now), Took: now.Sub(c.start), Status: r.status(), Err: r.err})
	}
	if r.resp == nil {
		return nil, r.err
	}
	c.handOver(r.resp)
	c.inHand = nil
	return r.resp, nil
}

// count counts the request's end, once, and fills in what its caller asked for.
func (c *call) count(o outcome, reason Reason) {
	c.counted = true
	c.peer.metrics.done(c.ctx, o, c.attempts)
	if out := c.opts.Outcome; out != nil {
		*out = Outcome{Attempts: c.attempts, Reason: reason, Key: c.key.value}
	}
}

// outcome sorts a request into exactly one of the outcomes that are counted.
func (c *call) outcome(r *result, reason Reason) outcome {
	switch reason {
	case ReasonDeadline:
		return outcomeDeadline
	case ReasonCanceled:
		return outcomeCanceled
	case ReasonBudget, ReasonTurn, ReasonSlow, ReasonHeld, ReasonRetryAfter, ReasonThrottle:
		return outcomeRefused
	case "":
		if r.verdict == done && !c.t.failure(r.resp.StatusCode) {
			return outcomeOK
		}
	}
	return outcomeError
}

// leaveNote tells the request being served, if there is one, that this call has
// failed and that its retries are done: a layer above that retries on top would
// multiply. Not where the call was not allowed to retry at all; then the layer
// above is the one that may.
func (c *call) leaveNote(r *result, o outcome, reason Reason) {
	a := c.arrival
	if a == nil || a.detached {
		return
	}
	told := r.resp != nil && !r.skewed && r.resp.StatusCode >= 400 && toldNotTo(r.resp.Header)
	switch {
	case told, reason == ReasonBudget, reason == ReasonTurn, reason == ReasonThrottle, o != outcomeOK && c.attempts > 1 && !r.skewed:
		a.note.fail(c.peer.name)
	case o == outcomeOK:
		a.note.succeed(c.peer.name)
	}
}

// handOver ties the contexts made for the request to the answer's body: to end
// them sooner would cut it. After a 101 net/http's connection is the caller's and
// heeds no context any more, and its body must stay writable.
func (c *call) handOver(resp *http.Response) {
	if c.cancelBound == nil && c.last.cancel == nil {
		return
	}
	// The request in the answer is ours; its context ends with the body, which
	// the caller's does not.
	resp.Request = resp.Request.WithContext(c.ctx)
	if resp.StatusCode == http.StatusSwitchingProtocols || resp.Body == http.NoBody {
		return
	}
	c.handedOver = true
	resp.Body = &boundBody{ReadCloser: resp.Body, last: c.last, cancelBound: c.cancelBound}
}

// release ends the contexts made for the request.
func (c *call) release() {
	c.last.release()
	if c.cancelBound != nil {
		c.cancelBound()
	}
}

// end runs however RoundTrip ends. After a panic, of the base or of a callback, it
// closes what nobody else can: answers in hand, and bodies from GetBody.
func (c *call) end() {
	c.hedge.abort(c)
	if !c.counted {
		c.last.bodies().close()
		c.count(outcomeError, "")
	}
	if c.last != nil {
		closeUnsent(c.last.unsent)
	}
	if c.inHand != nil {
		c.inHand.Body.Close() // and not drained: nobody waits for the connection
	}
	c.unhold()
	if !c.handedOver {
		c.release()
	}
	now := c.seen
	if now.IsZero() {
		now = time.Now()
	}
	c.t.peers.leave(c.peer, now)
}

func (c *call) remaining(now time.Time) time.Duration {
	if !c.bounded {
		return 0
	}
	return c.deadline.Sub(now)
}

// emitRetry reports that the attempt which ended with r will be followed by another.
func (c *call) emitRetry(r *result, wait time.Duration) {
	if c.t.cfg.Hook != nil {
		c.emit(Event{Kind: EventRetry, Wait: wait, Remaining: c.remaining(time.Now()), Status: r.status(), Err: r.err})
	}
}

// emit hands an event to the hook, which the caller has checked for.
func (c *call) emit(e Event) {
	e.Peer, e.Attempt, e.DeadlineMS = c.peer.name, c.attempts, c.wireMS
	e.Host = c.last.host()
	if e.Kind == EventAttemptSent || e.Kind == EventAttemptDone {
		e.Attempt = c.last.number // a hedge may have been sent meanwhile
	}
	c.t.cfg.Hook(c.ctx, e)
}
