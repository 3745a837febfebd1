package stint

import "time"

// Reason says why a request was refused or why no (further) retry of it was
// made. The set is closed: the values below are also the only values of the
// metric label "reason".
type Reason string

// Client side, in the order in which they are asked: the first "no" is the
// reason.
const (
	ReasonThrottle      Reason = "throttle"       // Config.Throttle holds it back: the peer fails most of what it gets
	ReasonAttempts      Reason = "attempts"       // MaxAttempts is used up
	ReasonNotReplayable Reason = "not_replayable" // the body cannot be sent again
	ReasonNotIdempotent Reason = "not_idempotent" // repeating it might execute it twice
	ReasonToldNotTo     Reason = "told_not_to"    // the answer says X-Should-Retry: false, or a form of it
	ReasonRetryAfter    Reason = "retry_after"    // the peer asks for a longer wait than Backoff.MaxRetryAfter
	ReasonDeadline      Reason = "deadline"       // no retry could end before the deadline, or it has passed
	ReasonSlow          Reason = "slow"           // most attempts are cut off by AttemptTimeout
	ReasonBudget        Reason = "budget"         // the retries of this window are spent
	ReasonTurn          Reason = "turn"           // the next free turn is too far away
	ReasonHeld          Reason = "held"           // too many answers of this peer are held open by waiting retries
	ReasonCanceled      Reason = "canceled"       // the caller has gone
)

// Server side.
const (
	ReasonExpired Reason = "expired" // the deadline had passed on arrival: 504
	ReasonInvalid Reason = "invalid" // the deadline header is unusable and RejectInvalid is set: 400
	ReasonLimit   Reason = "limit"   // Limit: as many as may are served, and wait: 503
	ReasonQueue   Reason = "queue"   // Limit: the queue and the handler take longer than there is time: 503
	ReasonRetries Reason = "retries" // more retries arrive than RetryBudget allows: 503
)

// EventKind tells what an Event reports.
type EventKind string

// What a Transport reports, in the order of one request.
const (
	EventAttemptSent EventKind = "attempt_sent" // Peer, DeadlineMS, Remaining, Attempt
	EventAttemptDone EventKind = "attempt_done" // and Took, Status or Err
	EventHedge       EventKind = "hedge"        // Took: how long the first attempt has run without an answer; the hedge's own events follow
	EventRetry       EventKind = "retry"        // Wait; Attempt, and Status or Err: the one that failed
	EventRefused     EventKind = "refused"      // Reason: why no (further) attempt is made
	EventDone        EventKind = "done"         // Attempt: how many were sent; Took: all of it; Status or Err
)

// What a Middleware reports; Service, DeadlineMS and Remaining are always set.
const (
	// Attempt is 1 and the caller's X-Retry-Count; Reason and Err are set where
	// the header is invalid and refused.
	EventArrived EventKind = "arrived"
	// The deadline had passed on arrival, Took is then 0, or passed before the
	// handler returned. Remaining is negative by how much.
	EventExpired EventKind = "expired"
	EventServed  EventKind = "served" // Status, Took; Reason where the answer is the middleware's own
	// Limit or RetryBudget refuses the request, or would under ReportOnly: Reason;
	// Took: in the queue; Wait: what the queue and the handler were expected to
	// take; Attempt as in EventArrived.
	EventShed EventKind = "shed"
	// With HardStop: a handler has panicked that ran on after EventServed. Took;
	// Err: the panic's value, which it unwraps to if that is an error, and stack.
	EventPanicked EventKind = "panicked"
)

// An Event is one step of a request, handed to Config.Hook or
// MiddlewareConfig.Hook by value. Which fields are set depends on Kind; the
// comment at each kind names them.
type Event struct {
	Kind       EventKind
	Reason     Reason        // EventRefused, EventDone: see Reason
	Peer       string        // client side: the budget's key
	Host       string        // client side, with Config.Elsewhere: where the latest attempt goes, or went
	Service    string        // server side: MiddlewareConfig.Service
	DeadlineMS int64         // the deadline in force, Unix milliseconds; client side: as sent, after the reserve; 0: none
	Remaining  time.Duration // until our own deadline, before the reserve; negative once it has passed; 0 without one
	Wait       time.Duration // EventRetry: backoff and Retry-After; the wait for a turn is not known yet
	Took       time.Duration // of the attempt for EventAttemptDone, else since the request began or arrived
	Attempt    int           // counts from 1
	Status     int           // 0: no answer
	Err        error
}
