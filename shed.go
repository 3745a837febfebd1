package stint

import (
	"context"
	"errors"
	"net/http"
	"time"
)

// Shedding is what the middleware answers in place of a handler that has too much
// to do: 503, before any work.

var errTooManyRetries = errors.New("more retries arrive here than MiddlewareConfig.RetryBudget allows")

// capRetries holds the request to RetryBudget.
func (x *exchange) capRetries() {
	b := x.m.retries
	switch {
	case b == nil:
		return
	case x.retries == 0:
		b.request(x.start)
		return
	case x.expired(x.start):
		return // ReportOnly, which has counted it
	}
	wait, refused := b.take(x.start, x.end)
	switch {
	case refused != "":
		x.shed(x.start, ReasonRetries, errTooManyRetries, 0)
	case wait > 0 && !x.m.cfg.ReportOnly:
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-t.C:
		case <-x.Context.Done():
		}
		x.stillWanted(time.Now())
	}
}

// earn counts an answer of the handler as credit for RetryBudget.
func (x *exchange) earn(now time.Time, code int) {
	whole := x.returned && !x.cut || code == codeHijacked
	if x.m.retries != nil && x.refusal == nil && whole && code != codeClientGone && !transientStatus(code) {
		x.m.retries.success(now)
	}
}

// shed counts and reports a request that is not served, or would not be were it
// not for ReportOnly. wait is what it would have taken to serve it.
func (x *exchange) shed(now time.Time, reason Reason, why error, wait time.Duration) {
	if !x.m.cfg.ReportOnly {
		x.refuseAt(now, &Error{Reason: reason, Err: why})
	}
	x.m.metrics.refused(reason)
	if x.m.cfg.Hook != nil {
		x.m.cfg.Hook(x, Event{
			Kind: EventShed, Reason: reason, Service: x.m.cfg.Service, Wait: wait,
			DeadlineMS: x.endMS, Remaining: x.remaining(now), Took: now.Sub(x.start), Attempt: 1 + x.retries,
		})
	}
}

func (x *exchange) refuseAt(now time.Time, why *Error) {
	x.refusal, x.finished = why, now
}

// stillWanted is asked after a wait, and refuses a request that nobody waits for
// any more.
func (x *exchange) stillWanted(now time.Time) {
	err := x.Context.Err()
	switch {
	case errors.Is(err, context.DeadlineExceeded) || err == nil && x.expired(now):
		x.refuseAt(now, &Error{Reason: ReasonExpired, Err: context.DeadlineExceeded})
		x.m.metrics.refused(ReasonExpired)
		x.outOfTime(now)
	case err != nil:
		x.left, x.returned = true, true
		x.refuseAt(now, &Error{Reason: ReasonCanceled, Err: err})
	}
}

// shedRetryAfter is what a shed request's client is asked to wait: the whole second
// that Retry-After has room for.
const shedRetryAfter = "1"

// markShed sets what tells a client of a 503 of ours what to do.
func markShed(h http.Header, reason Reason) {
	h.Set("Retry-After", shedRetryAfter)
	if reason != ReasonRetries {
		h.Set(HeaderShouldRetry, "true") // nothing was done
	}
}
