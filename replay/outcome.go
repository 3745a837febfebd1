package replay

import "time"

// An Outcome says what became of a request with an idempotency key. It is a
// value of the metric label "outcome", and the member "reason" of an answer that
// refuses a request.
type Outcome string

// Each request has exactly one.
const (
	// The handler ran, and

	OutcomeExecuted    Outcome = "executed"    // its answer is stored
	OutcomeReleased    Outcome = "released"    // said that nothing was done: the next request runs
	OutcomeUnknown     Outcome = "unknown"     // ended in a way that says nothing about what was done
	OutcomeTombstone   Outcome = "tombstone"   // its answer was delivered and is not kept: the next request gets OutcomeNotKept
	OutcomeLost        Outcome = "lost"        // meanwhile lost its key to another run, whose answer counts
	OutcomeUnsaved     Outcome = "unsaved"     // the store failed at the end: the next request runs when the lease has ended
	OutcomeUnprotected Outcome = "unprotected" // the store had failed at the beginning: Config.FailOpen

	// The handler did not run, and the answer is

	OutcomeReplayed   Outcome = "replayed"    // that of the run before
	OutcomeConflict   Outcome = "conflict"    // 409: a request with this key is running, and was waited for
	OutcomeMismatch   Outcome = "mismatch"    // 422: the key belongs to another request
	OutcomeNotKept    Outcome = "not_kept"    // 409: it ran, and its answer was not kept
	OutcomeRefused    Outcome = "refused"     // 409: what became of the run before is unknown: Config.RefuseUnknown
	OutcomeInvalid    Outcome = "invalid"     // 400, 413: no usable key, or the body broke off
	OutcomeNoScope    Outcome = "no_scope"    // 500: Config.Scope has failed
	OutcomeStoreError Outcome = "store_error" // 503: the store has failed
)

var outcomes = [...]Outcome{
	OutcomeExecuted, OutcomeReleased, OutcomeUnknown, OutcomeTombstone, OutcomeLost, OutcomeUnsaved, OutcomeUnprotected,
	OutcomeReplayed, OutcomeConflict, OutcomeMismatch, OutcomeNotKept, OutcomeRefused, OutcomeInvalid, OutcomeNoScope, OutcomeStoreError,
}

// An Event tells [Config].Hook what became of one request. It does not have the
// key: whoever knows it may be able to fetch the answer.
type Event struct {
	Outcome Outcome
	Service string
	Status  int           // as sent; 0: nothing was, or the connection was taken over
	Fence   int64         // of the run; 0: none
	Taken   bool          // the run took the key over from one that never ended
	Waited  time.Duration // for another request with the same key
	Took    time.Duration // in all
	Err     error         // of the store, of Scope, or of the request's body
}
