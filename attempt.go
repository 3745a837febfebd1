package stint

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"
)

// HeaderRetryCount is 1, 2 … on retries and absent on the first attempt: the
// server sees the retry rate that its clients cause.
const HeaderRetryCount = "X-Retry-Count"

// A result is what became of one attempt.
type result struct {
	resp    *http.Response
	err     error
	verdict verdict
	reason  Reason // where the verdict is terminal: the deadline or the caller's leaving, "" for neither
	cut     bool   // AttemptTimeout ended it
	barred  bool   // RetryError says no: nobody learns from it
	skewed  bool   // a 504 for the deadline from a host whose clock is ahead: the rest of what it says is void
}

// final reports whether nothing is left to decide.
func (r *result) final() bool { return r.verdict == done || r.verdict == terminal }

// An attempt is one pass of a request to the base. It has an allocation of its own,
// since the base may still be reading what it was given when RoundTrip is over; the
// call stays on the stack.
type attempt struct {
	number int // from 1
	sent   time.Time
	req    http.Request // what the base gets
	// lines backs the values of req.Header, which share no memory with the
	// caller's. Eight are more than most requests have; of more, append makes
	// another array.
	lines  [8]string
	upload *upload       // nil: nothing to watch
	unsent io.ReadCloser // a body that the base does not have yet

	route *route // nil: there is no Config.Elsewhere

	cancel context.CancelCauseFunc // nil: req has the request's own context
	timer  *time.Timer             // for AttemptTimeout; nil: none
}

// An upload is what has to be watched of an attempt that is unsafe to repeat or
// has a body. Apart from the attempt, since most are neither.
type upload struct {
	trace  wireTrace
	traced bool
	bodies requestBodies
}

// send makes one attempt. The request it hands to the base is a copy with a
// header of its own, down to the values.
func (c *call) send(body io.ReadCloser) result {
	after := c.hedgeAfter()
	c.hedgeable = after > 0
	a := c.prepare(body)
	if c.t.cfg.Hook != nil {
		c.emit(Event{Kind: EventAttemptSent, Remaining: c.remaining(a.sent)})
	}
	c.seen = time.Time{}
	if after > 0 {
		h := c.armHedge(a, after)
		resp, err := c.pass(a)
		return h.settle(c, resp, err)
	}
	resp, err := c.pass(a)
	return c.conclude(a, resp, err)
}

// pass hands an attempt to the base.
func (c *call) pass(a *attempt) (*http.Response, error) {
	a.unsent = nil
	base := c.t.base
	if a.number > 1 && c.t.fresh != nil {
		base = c.t.fresh
	}
	resp, err := base.RoundTrip(&a.req)
	a.disarm()
	return resp, err
}

// prepare makes the next attempt ready to go, and counts it.
func (c *call) prepare(body io.ReadCloser) *attempt {
	a, failed := &attempt{sent: c.start}, c.last.host()
	if c.attempts > 0 {
		a.sent = time.Now()
	}
	c.attempts++
	a.number = c.attempts
	c.last = a

	ctx := c.bound
	guarded := hasBody(c.req) && replayable(c.req) && !(c.opts.MaxAttempts == 1 && c.repeatable && c.t.cfg.UsedUp == nil)
	if c.traced || guarded {
		a.upload = &upload{traced: c.traced}
	}
	if c.opts.AttemptTimeout > 0 || c.hedgeable || c.traced && !c.repeatable && !hasBody(c.req) {
		ctx, a.cancel = context.WithCancelCause(ctx)
	}
	if c.opts.AttemptTimeout > 0 {
		a.arm(c.opts.AttemptTimeout)
	}
	if c.traced {
		trace := &a.upload.trace
		trace.allowed2, trace.allowed1 = c.resendsAllowed()
		if !c.repeatable {
			trace.cancel = a.cancel
		}
		ctx = trace.attach(ctx)
	}
	if ctx == c.ctx {
		a.req = *c.req
	} else {
		a.req = *c.req.WithContext(ctx) // inlined: the copy in between is on the stack
	}
	a.req.Body = body
	if guarded {
		a.guard(body, c.req.GetBody)
	}
	a.unsent = a.req.Body
	c.setHeader(a)

	if a.number == 1 {
		c.peer.budget.request(a.sent)
	}
	c.peer.metrics.sent(a.sent, a.number)
	if c.t.cfg.Elsewhere != nil {
		c.reroute(a, failed)
	}
	return a
}

// arm starts the attempt's own timeout. It ends with the headers, so that it does
// not cut the body: a context with a timeout would.
func (a *attempt) arm(timeout time.Duration) {
	a.timer = time.AfterFunc(timeout, func() { a.cancel(causeAttemptTimeout) })
}

func (a *attempt) disarm() {
	if a.timer != nil && !a.timer.Stop() {
		a.cancel(causeAttemptTimeout) // it is about to: the attempt must not look whole
	}
}

// cause returns which of the attempt's own limits has ended it, or something else.
func (a *attempt) cause() error {
	if a.cancel == nil {
		return nil
	}
	return context.Cause(a.req.Context())
}

// release ends what was made for the attempt alone. a may be nil.
func (a *attempt) release() {
	if a == nil {
		return
	}
	if a.timer != nil {
		a.timer.Stop() // a base may have panicked
	}
	if a.cancel != nil {
		a.cancel(context.Canceled)
	}
}

// bodies returns the bodies of the attempt that are guarded; nil: none.
func (a *attempt) bodies() *requestBodies {
	if a == nil || a.upload == nil {
		return nil
	}
	return &a.upload.bodies
}

// trace returns what was seen of the wire; nil: nobody looked.
func (a *attempt) trace() *wireTrace {
	if a.upload == nil || !a.upload.traced {
		return nil
	}
	return &a.upload.trace
}

// conclude makes a result of what the base returned.
func (c *call) conclude(a *attempt, resp *http.Response, err error) result {
	ended := time.Now()
	c.seen, c.last = ended, a
	resp, err = mend(resp, err, &a.req)
	r := result{resp: resp, err: err}
	switch a.cause() {
	case nil:
	case causeAttemptTimeout:
		r.cut = true
		if resp != nil {
			// The headers came as the timer fired: the body would end in an error.
			resp.Body.Close()
			r.resp, r.err = nil, causeAttemptTimeout
		}
		r.err = &cutError{r.err}
	case errResends:
		if resp != nil {
			resp.Body.Close() // likewise
			r.resp = nil
		}
		r.err = errResends // net/http says context.Canceled
	}
	c.inHand = r.resp
	if a.route != nil {
		c.unroute(&r)
	}
	if p := c.probe(); p != nil && r.resp != nil {
		c.collect(p, r.resp)
	}
	if trace := a.trace(); trace != nil {
		resends := int(trace.resends.Load())
		c.resends += resends
		if !trace.h2.Load() {
			c.repeats += resends // on HTTP/2 they are of what was refused
		}
		c.peer.metrics.resent(resends)
	}
	c.judge(&r, ended)
	c.learn(a, &r, ended)
	if c.t.cfg.Hook != nil {
		c.emit(Event{Kind: EventAttemptDone, Remaining: c.remaining(ended), Took: ended.Sub(a.sent), Status: r.status(), Err: r.err})
	}
	return r
}

// resendsAllowed returns how often net/http may send this attempt again once it was
// written, on HTTP/2 and on HTTP/1.
func (c *call) resendsAllowed() (http2, http1 int32) {
	if c.repeatable {
		return math.MaxInt32, math.MaxInt32 // counted, and net/http's own affair
	}
	most := maxUnsafeResends
	if c.key.permits(c.opts.Keys, nil) {
		most = maxResends
	}
	http2, http1 = int32(most-c.resends), math.MaxInt32
	if !c.t.std && (c.key.promise || c.key.copied) && !c.key.replaces() {
		// The caller's key is in the header as the caller spelled it, and below
		// this base there may be an http.Transport, which resends by it.
		http1 = int32(c.opts.MaxAttempts - c.attempts - c.repeats)
	}
	return http2, http1
}

// mend makes up for a base that breaks its contract, so that nothing behind it
// has to ask.
func mend(resp *http.Response, err error, sent *http.Request) (*http.Response, error) {
	switch {
	case resp == nil && err == nil:
		return nil, errors.New("stint: base RoundTripper returned neither a response nor an error")
	case resp != nil && err != nil:
		if resp.Body != nil {
			resp.Body.Close()
		}
		return nil, err
	case resp != nil:
		if resp.Body == nil {
			resp.Body = http.NoBody
		}
		if resp.Header == nil {
			resp.Header = make(http.Header)
		}
		if resp.Request == nil {
			resp.Request = sent // redirects need it
		}
	}
	return resp, err
}

// setHeader gives the attempt a header of its own. Its values share two arrays,
// and what we write shares one string.
func (c *call) setHeader(a *attempt) {
	h := make(http.Header, len(c.req.Header)+maxAdded)
	lines := a.lines[:0]
	replaced := c.key.replaces()
	for k, v := range c.req.Header {
		// Those that only we set go in any spelling: two would both be sent.
		if c.header.fleet && fleetHeader(k) != "" || replaced && c.header.key && keyHeader(k) != "" {
			continue
		}
		if v == nil {
			h[k] = nil // means something to net/http
			continue
		}
		n := len(lines)
		lines = append(lines, v...)
		h[k] = lines[n:len(lines):len(lines)]
	}
	add := func(name, value string) {
		n := len(lines)
		lines = append(lines, value)
		h[name] = lines[n : n+1 : n+1]
	}
	c.key.apply(h, add, c.t.std)
	a.req.Header = h
	if c.foreign {
		return
	}
	if c.wire {
		var buf [40]byte
		// By the monotonic clock, and taken anew for each attempt: a peer that
		// gets a retry must not think it has the time of the first.
		text := strconv.AppendInt(buf[:0], c.wireMS, 10)
		n := len(text)
		both := string(strconv.AppendInt(text, c.sendBy.Sub(a.sent).Milliseconds(), 10))
		add(HeaderDeadline, both[:n])
		add(HeaderTimeout, both[n:])
	}
	if a.number > 1 {
		add(HeaderRetryCount, strconv.Itoa(a.number-1))
	}
	if c.probe() != nil {
		add(HeaderDebugEcho, probeHop)
	}
}

// maxAdded is how many headers setHeader adds, as a rule: a map that grows costs
// as much again.
const maxAdded = 3

// guard puts the attempt's bodies under watch: the one it begins with, and those
// that net/http gets for resends of its own. It rewinds by itself where nothing was
// written or an HTTP/2 peer refused the stream; without GetBody those requests
// would fail.
func (a *attempt) guard(body io.ReadCloser, getBody func() (io.ReadCloser, error)) {
	u := a.upload
	a.req.Body = u.bodies.add(body)
	a.req.GetBody = func() (io.ReadCloser, error) {
		if u.traced && u.trace.exhausted() {
			return nil, errResends
		}
		fresh, err := getBody()
		if err != nil {
			return nil, err
		}
		return u.bodies.add(fresh), nil
	}
}

// judge decides what the attempt's result means.
func (c *call) judge(r *result, now time.Time) {
	left := c.ctx.Err() // whether the caller has ended it, only the caller's context can tell
	// The wire counts in whole milliseconds, rounded down, so the peer may end it
	// that much sooner. Nothing is lost: a retry needs a millisecond as well.
	late := c.bounded && !now.Before(c.sendBy.Add(-time.Millisecond))
	if r.resp != nil {
		r.verdict = classifyResponse(r.resp, c.t.transient, c.foreign)
		// Without a deadline of ours on the wire, theirs is none of our business.
		expired := c.wire && r.resp.StatusCode == http.StatusGatewayTimeout && len(r.resp.Header[HeaderDeadlineExpired]) > 0
		switch {
		case expired && c.sendBy.Sub(now) > max(minSkew, c.opts.Reserve):
			// Time is left by our clock: theirs is ahead. What such a host says
			// of retries is void, or one wrong clock among several hosts would
			// be a black hole.
			r.skewed = true
			c.peer.metrics.skewed()
		case expired:
			r.verdict, r.reason = terminal, ReasonDeadline
		case r.verdict == done:
		case late, left == context.DeadlineExceeded:
			r.verdict, r.reason = terminal, ReasonDeadline
		case left != nil:
			r.verdict, r.reason = terminal, ReasonCanceled
		}
		return
	}
	switch {
	case left == context.Canceled:
		r.verdict, r.reason = terminal, ReasonCanceled
		if !errors.Is(r.err, left) && !errors.Is(r.err, context.Cause(c.ctx)) {
			r.err = c.error(ReasonCanceled, canceled(contextError(c.ctx), r.err))
		}
	case left != nil, late:
		r.verdict, r.reason = terminal, ReasonDeadline
		r.err = c.error(ReasonDeadline, join(context.DeadlineExceeded, r.err))
	case c.legacyCanceled():
		r.verdict, r.reason = terminal, ReasonCanceled
	case !r.cut && c.last.bodies().failed() != nil:
		r.verdict = terminal // the caller's own body failed, not the peer
	default:
		r.verdict = classifyError(r.err, c.last.trace().unsent(r.cut))
		if r.verdict != terminal && !r.cut && c.t.cfg.RetryError != nil && !c.t.cfg.RetryError(r.err) {
			r.verdict, r.barred = terminal, true
		}
	}
}

// minSkew is the least difference that is taken for a wrong clock and not for a
// timer that was early.
const minSkew = 10 * time.Millisecond

// learn tells the budget, the histogram, Throttle and Elsewhere, and nobody else,
// what the attempt showed.
func (c *call) learn(a *attempt, r *result, now time.Time) {
	if r.barred {
		return
	}
	took := now.Sub(a.sent)
	c.latency.ended(now, r.cut)
	well := r.verdict == done && r.resp != nil && !c.t.failure(r.resp.StatusCode)
	// Else the caller has gone, or its request is at fault.
	failed := !well && (r.verdict != terminal || r.reason == ReasonDeadline)
	if failed {
		c.peer.throttle.failure(now)
	}
	if well || failed {
		a.report(well)
	}
	switch {
	case well:
		c.peer.budget.success(now)
		c.latency.record(now, took)
	case r.verdict == done:
		// An answer that RetryStatus does not retry, but which says that the
		// peer is in trouble: no credit, and no proof of speed.
		c.recordIfSlow(now, took)
	case r.resp == nil && (r.cut || r.reason == ReasonDeadline):
		c.latency.record(now, took) // it takes at least this long
	default:
		c.recordIfSlow(now, took)
	}
}

// recordIfSlow records a failure that took longer than the peer's good answers
// do. A quick one says nothing: a broken peer would look fast.
func (c *call) recordIfSlow(now time.Time, took time.Duration) {
	usual, samples := c.latency.quantile(now, c.t.cfg.Admission.Quantile)
	if samples >= c.t.cfg.Admission.MinSamples && took > usual {
		c.latency.record(now, took)
	}
}

func (r *result) status() int {
	if r.resp == nil {
		return 0
	}
	return r.resp.StatusCode
}

// failure returns what went wrong, as an error.
func (r *result) failure() error {
	if r.resp != nil {
		return statusError(r.resp.StatusCode)
	}
	return r.err
}
