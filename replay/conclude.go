package replay

import (
	"context"
	"errors"
	"time"
)

// finishContext is for what has to be stored whether or not somebody still waits
// for the answer.
func (x *exchange) finishContext() (context.Context, context.CancelFunc) {
	ctx := context.WithoutCancel(x.r.Context())
	if x.m.memory != nil {
		return ctx, func() {}
	}
	limit := finishTime
	if left, bounded := timeLeft(x.r.Context()); bounded && left > 0 {
		// The answer is to arrive in time, without the store's blessing if need
		// be.
		limit = min(max(left*3/4, x.m.cfg.StoreTimeout), finishTime)
	}
	return context.WithTimeout(ctx, limit)
}

// finish stores a, and returns what was stored: a tombstone where the store has
// no room for the answer. A store that fails is asked twice.
func (x *exchange) finish(ctx context.Context, a *answer) (*answer, error) {
	for again := false; ; again = true {
		encoded := a.encode()
		err := x.m.call(opFinish, func() error {
			if x.m.memory != nil {
				return x.m.memory.finish(ctx, x.key, a.fence, encoded, x.m.cfg.TTL)
			}
			return x.m.cfg.Store.Finish(ctx, x.key, a.fence, encoded, x.m.cfg.TTL)
		})
		if err == nil || errors.Is(err, ErrLost) || again || ctx.Err() != nil {
			return a, err
		}
		if errors.Is(err, ErrFull) && a.kind == kindAnswer {
			a = &answer{kind: kindNotKept, fence: a.fence, status: a.status}
			continue
		}
		t := time.NewTimer(finishPause)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

func (x *exchange) release(ctx context.Context, fence int64) error {
	return x.m.call(opRelease, func() error { return x.m.cfg.Store.Release(ctx, x.key, fence) })
}

// An ending is what is to be sent when the handler has returned: its own answer,
// unless a field says otherwise.
type ending struct {
	announce bool    // the answer is safe: the key may be echoed
	stored   *answer // this is the record's answer
	busy     bool    // another run has the key, and no answer yet
	buried   bool    // sending the request again leads to a refusal
}

// conclude writes down how the run has ended, and then sends the answer. ctx is
// the handler's.
func (x *exchange) conclude(ctx context.Context, returned bool) {
	v := x.rec.judge(ctx, x.run, returned, x.body.broken.Load())
	storeCtx, cancel := x.finishContext()
	defer cancel()
	e := x.settle(storeCtx, v)
	if returned {
		x.deliver(e)
	} else if status, passing := x.rec.begun(); passing {
		x.status = status
	}
}

func (x *exchange) settle(ctx context.Context, v verdict) ending {
	fence := x.run.Fence
	if x.run.encoded.Load() {
		// The handler had the answer written in a transaction of its own. Whether
		// that was committed is for the store to say: a commit can fail after
		// the fact, and a handler that has committed can panic.
		claim, err := x.begin(ctx)
		switch {
		case err != nil: // what comes next finds out
		case claim.State == StateDone:
			return x.yield(claim)
		case claim.State == StateNew || claim.State == StateTaken:
			fence = claim.Fence
		}
	}

	switch v {
	case notDone:
		switch err := x.release(ctx, fence); {
		case err == nil:
			x.outcome = OutcomeReleased
			return ending{announce: true}
		case errors.Is(err, ErrLost):
			x.outcome, x.err = OutcomeLost, err
		default:
			x.outcome, x.err = OutcomeUnsaved, err
		}
		return ending{}
	case unknown:
		x.outcome = OutcomeUnknown
		var err error
		if x.m.cfg.RefuseUnknown {
			status, _ := x.rec.begun()
			_, err = x.finish(ctx, &answer{kind: kindUnknown, fence: fence, status: status})
		} else {
			err = x.release(ctx, fence)
		}
		if x.err = err; errors.Is(err, ErrLost) {
			x.outcome = OutcomeLost
		}
		return ending{buried: x.m.cfg.RefuseUnknown && err == nil}
	}

	x.rec.answer(&x.own, fence)
	a, err := x.finish(ctx, &x.own)
	if errors.Is(err, ErrLost) {
		return x.reclaim(ctx, a)
	}
	return x.finished(a, err)
}

// finished notes what was stored.
func (x *exchange) finished(a *answer, err error) ending {
	switch {
	case err != nil:
		x.outcome, x.err = OutcomeUnsaved, err
		return ending{}
	case a.kind == kindNotKept:
		x.outcome = OutcomeTombstone
		return ending{}
	}
	x.outcome = OutcomeExecuted
	return ending{announce: true}
}

// reclaim finds out who has the key, where Finish has found that it is no longer
// this run.
func (x *exchange) reclaim(ctx context.Context, a *answer) ending {
	// Not as long as a request may wait that has nothing to say.
	ctx, cancel := context.WithTimeout(ctx, finishTime)
	defer cancel()
	claim, err := x.acquire(ctx)
	switch {
	case err != nil:
		x.outcome, x.err = OutcomeUnsaved, err
	case claim.State == StateDone:
		return x.yield(claim)
	case claim.State == StateBusy:
		x.outcome, x.err = OutcomeLost, ErrLost
		return ending{busy: true}
	case claim.State == StateMismatch:
		x.outcome, x.err = OutcomeLost, ErrLost
	default:
		// Nobody: the record has expired or was evicted, or whoever had the key
		// has gone without an answer. So there is one, and it is this.
		a.fence = claim.Fence
		return x.finished(x.finish(ctx, a))
	}
	return ending{}
}

// yield gives in to the answer of the record, which is that of another run, or
// was written by this one in a way that the middleware did not see: in a
// transaction, or by a call of Finish whose answer was lost.
func (x *exchange) yield(claim Claim) ending {
	a, err := decode(claim.Answer)
	if err != nil {
		x.outcome, x.err = OutcomeUnsaved, err
		return ending{}
	}
	if a.fence == x.run.Fence {
		x.outcome = OutcomeExecuted
		if a.kind == kindNotKept {
			x.outcome = OutcomeTombstone
		}
	} else {
		x.outcome, x.err = OutcomeLost, ErrLost
	}
	return ending{stored: a}
}

// deliver sends what has been held back.
func (x *exchange) deliver(e ending) {
	rec := &x.rec
	rec.mu.Lock()
	defer rec.mu.Unlock()
	switch own := e.stored != nil && e.stored.fence == x.run.Fence; {
	case rec.hijacked:
	case rec.passing:
		x.status = rec.status
	case e.busy:
		rec.resetHeader()
		x.writeRefusal(&conflict, nil)
	case own && (e.stored.kind != kindAnswer || e.stored.same(rec.status, rec.body)):
		x.send(e.stored.kind == kindAnswer, false)
	case e.stored != nil:
		rec.resetHeader()
		switch e.stored.kind {
		case kindNotKept:
			x.writeRefusal(&notKept, e.stored)
		case kindUnknown:
			x.writeRefusal(&refused, e.stored)
		default:
			x.writeStored(e.stored, !own)
		}
	default:
		x.send(e.announce, e.buried)
	}
}

// send sends the handler's own answer. The recorder's lock is held.
func (x *exchange) send(announce, buried bool) {
	if x.rec.status == 0 {
		return // nothing was answered, and what is to be said is for others to say
	}
	x.status = x.rec.status
	if buried {
		x.rec.header.Set("X-Should-Retry", "false")
	}
	echo := ""
	if announce {
		echo = x.echo()
	}
	x.rec.sendLocked(echo)
}
