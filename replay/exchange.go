package replay

import (
	"context"
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"
)

// An exchange is one request with a key and what becomes of it.
type exchange struct {
	m     *Middleware
	w     http.ResponseWriter
	r     *http.Request // as it came
	start time.Time

	clientKey  string
	key, print [32]byte
	body       body
	run        *Run // nil: none
	rec        recorder
	own        answer // of the handler
	lease      lease
	done       chan struct{} // guarded by m.mu; closed when the run has ended; nil: nobody waits

	outcome Outcome
	status  int
	taken   bool
	waited  time.Duration
	err     error
}

// report tells the metrics and the hook what became of the request.
func (x *exchange) report() {
	x.m.metrics.ended(x.outcome)
	if x.m.cfg.Hook == nil {
		return
	}
	e := Event{
		Outcome: x.outcome, Service: x.m.cfg.Service, Status: x.status, Taken: x.taken,
		Waited: x.waited, Took: time.Since(x.start), Err: x.err,
	}
	if x.run != nil {
		e.Fence = x.run.Fence
	}
	x.m.cfg.Hook(x.r.Context(), e)
}

// echo returns what tells the client that its key is honoured; "" where the
// store does not see all of its attempts.
func (x *exchange) echo() string {
	if !x.m.shared {
		return ""
	}
	return x.clientKey
}

var errNoScope = errors.New("replay: Config.Scope returned an empty scope")

// serve decides about a request with a usable key.
func (x *exchange) serve(key string, next http.Handler) {
	x.clientKey = key
	scope, err := x.m.cfg.Scope(x.r)
	if err == nil && scope == "" {
		err = errNoScope
	}
	if err != nil {
		x.err = err
		x.refuse(&noScope, nil)
		return
	}
	length, err := x.body.readPrefix(x.r)
	if err != nil {
		x.err = err
		how := &brokenBody
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			how = &tooLargeBody
		}
		x.refuse(how, nil)
		return
	}
	x.key = storeKey(scope, x.r, key)
	if f := x.m.cfg.Fingerprint; f != nil {
		x.print = sha256.Sum256(f(x.r, x.body.prefix))
	} else {
		x.print = fingerprint(x.r, x.body.prefix, length)
	}

	claim, err := x.acquire(x.r.Context())
	switch {
	case err != nil:
		x.err = err
		if x.m.cfg.FailOpen {
			x.unprotected(next)
			return
		}
		x.refuse(&storeError, nil)
	case claim.State == StateBusy:
		x.refuse(&conflict, nil)
	case claim.State == StateMismatch:
		x.refuse(&mismatch, nil)
	case claim.State == StateDone:
		a, err := decode(claim.Answer)
		switch {
		case err != nil:
			x.err = err
			x.refuse(&storeError, nil)
		case a.kind == kindNotKept:
			x.refuse(&notKept, a)
		case a.kind == kindUnknown:
			x.refuse(&refused, a)
		default:
			x.replay(a)
		}
	default:
		x.m.metrics.begin(claim.State)
		x.taken = claim.State == StateTaken
		ctx := &running{run: Run{Key: x.key, Fence: claim.Fence, TTL: x.m.cfg.TTL}}
		x.run = &ctx.run
		if x.taken && x.m.cfg.RefuseUnknown {
			// The run before has never ended. That is as unknown as it gets.
			x.err = x.bury()
			x.refuse(&refused, nil)
			return
		}
		x.execute(ctx, next)
	}
}

// bury leaves a record that keeps the operation from running again.
func (x *exchange) bury() error {
	ctx, cancel := x.finishContext()
	defer cancel()
	_, err := x.finish(ctx, &answer{kind: kindUnknown, fence: x.run.Fence})
	return err
}

// call makes a call of the store.
func (m *Middleware) call(op storeOp, f func() error) error {
	if m.metrics == nil {
		return f()
	}
	start := time.Now()
	err := f()
	m.metrics.called(op, time.Since(start), err)
	return err
}

// leaseFor returns how long a key is taken at a time.
func (m *Middleware) leaseFor(left time.Duration, bounded bool) time.Duration {
	switch {
	case m.cfg.Lease != 0:
		return m.cfg.Lease
	case bounded:
		return min(max(left+leaseGrace, minLease), maxLease, m.cfg.TTL)
	}
	return min(maxLease, m.cfg.TTL)
}

// begin asks the store for the key.
func (x *exchange) begin(ctx context.Context) (claim Claim, err error) {
	left, bounded := timeLeft(ctx)
	lease := x.m.leaseFor(left, bounded)
	if x.m.memory == nil {
		limit := x.m.cfg.StoreTimeout
		if bounded {
			limit = min(limit, max(left/4, minReserve))
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	err = x.m.call(opBegin, func() (err error) {
		claim, err = x.m.cfg.Store.Begin(ctx, x.key, x.print, lease, x.m.cfg.TTL)
		return err
	})
	return claim, err
}

func timeLeft(ctx context.Context) (left time.Duration, bounded bool) {
	end, bounded := ctx.Deadline()
	if !bounded {
		return 0, false
	}
	return time.Until(end), true
}

// acquire claims the key, and waits while it is busy, for as long as it may. It
// returns StateBusy when that is over.
func (x *exchange) acquire(ctx context.Context) (Claim, error) {
	claim, err := x.begin(ctx)
	if err != nil || claim.State != StateBusy {
		return claim, err
	}
	wait := x.m.cfg.MaxWait
	if left, bounded := timeLeft(ctx); bounded {
		wait = min(wait, left-min(max(left/4, minReserve), maxReserve))
	}
	if wait <= 0 {
		return claim, nil
	}
	defer x.m.waiters.Add(-1)
	if x.m.waiters.Add(1) > int64(x.m.cfg.MaxWaiters) {
		return claim, nil
	}
	x.m.metrics.wait()
	from := time.Now()
	defer func() { x.waited += time.Since(from) }()
	return x.await(ctx, claim, from.Add(wait))
}

// await asks for the key again and again until it is no longer busy, or end.
func (x *exchange) await(ctx context.Context, claim Claim, end time.Time) (Claim, error) {
	poll := firstPoll
	for {
		left := time.Until(end)
		if left <= 0 {
			return claim, nil
		}
		// The jitter keeps waiters from asking in step. One more moment than the
		// lease has, so as to find it ended.
		pause := poll/2 + rand.N(poll)
		t := time.NewTimer(min(pause, left, claim.Left+time.Millisecond))
		select {
		case <-x.m.endOf(x.key):
			poll = firstPoll
		case <-t.C:
			poll = min(2*poll, lastPoll)
		case <-ctx.Done():
			t.Stop()
			return claim, nil
		}
		t.Stop()
		var err error
		if claim, err = x.begin(ctx); err != nil || claim.State != StateBusy {
			return claim, err
		}
	}
}

// endOf returns a channel that is closed when the run of key in this process
// ends; nil where there is none, or it runs elsewhere.
func (m *Middleware) endOf(key [32]byte) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	x := m.runs[key]
	if x == nil {
		return nil
	}
	if x.done == nil {
		x.done = make(chan struct{})
	}
	return x.done
}

func (m *Middleware) runBegins(x *exchange) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.runs[x.key] = x
}

func (m *Middleware) runEnds(x *exchange) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runs[x.key] == x { // and not another one, that has taken the key over
		delete(m.runs, x.key)
	}
	if x.done != nil {
		close(x.done)
	}
}

// request returns the request for the handler.
func (x *exchange) request(ctx context.Context) *http.Request {
	req := x.r.WithContext(ctx)
	if x.body.rest != nil {
		req.Body = &x.body
	}
	return req
}

// unprotected runs the handler as if there were no key.
func (x *exchange) unprotected(next http.Handler) {
	x.outcome = OutcomeUnprotected
	req := x.request(x.r.Context())
	defer x.handBack(req)
	next.ServeHTTP(x.w, req)
}

// handBack sets what net/http, and layers outside, would find in their own
// request without a middleware in between: the server removes the temporary
// files of a form that the handler has parsed, and they read the pattern that
// matched.
func (x *exchange) handBack(req *http.Request) {
	if req.MultipartForm != nil && x.r.MultipartForm == nil {
		x.r.MultipartForm = req.MultipartForm
	}
	if x.r.Pattern != req.Pattern {
		x.r.Pattern = req.Pattern
	}
}

// execute runs the handler under the claimed key. run is the handler's context,
// without one to stand on.
func (x *exchange) execute(run *running, next http.Handler) {
	x.outcome = OutcomeUnknown
	x.m.runBegins(x)
	defer x.m.runEnds(x)

	ctx := x.r.Context()
	if x.m.cfg.Detach {
		end, bounded := ctx.Deadline()
		ctx = context.WithoutCancel(ctx)
		if bounded {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, end)
			defer cancel()
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	run.Context = ctx
	req := x.request(run)
	defer x.handBack(req)

	x.rec.init(x.w, x.m.cfg.MaxAnswer)
	x.lease.x, x.lease.cancel = x, cancel
	x.lease.length = x.m.leaseFor(timeLeft(x.r.Context()))
	x.lease.start()
	returned := false
	// Deferred, for a handler that panics or ends its goroutine. There is no
	// recover: what panics passes through.
	defer func() {
		x.lease.stop()
		x.conclude(ctx, returned)
	}()
	next.ServeHTTP(x.rec.writer(), req)
	returned = true
}
