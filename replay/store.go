package replay

import (
	"context"
	"errors"
	"time"
)

// ErrLost is returned, possibly wrapped, by a [Store] whose record of the key
// is not in flight under the fence that was shown: another run has taken the
// key over, the record is done, or it has expired and gone.
var ErrLost = errors.New("replay: the key is no longer held under this fence")

// ErrFull is returned, possibly wrapped, by the Begin of a [Store] that has no
// room for another key and nothing that it may forget. It is an error like
// others: the request is answered 503 and does not run.
var ErrFull = errors.New("replay: the store is full of keys in flight")

// A Store keeps one record for each key: in flight under a fence and a lease,
// or done with an answer. A key without a record is absent.
//
//	absent ── Begin ──▶ in flight ── Finish ──▶ done ── ttl ──▶ absent
//	                     │  │  ▲
//	                     │  │  └─ Begin after the end of the lease: Taken, a greater fence
//	                     │  └─ Release ──▶ absent
//	                     └─ ttl ──▶ absent
//
// Each method is one decision, made at one instant on the store's own clock,
// and is safe for concurrent use, also from several processes where the store
// is shared. Only durations cross this interface, for two hosts do not agree on
// an instant. A store may round a duration up to its resolution, never down,
// and takes anything from 1 ms to a year. Keys and prints are hashes: nothing
// of a client's choosing reaches the store but answers.
//
// A fence is positive and grows: whoever begins a key later, for whatever
// reason, holds a greater one than all before, also after the record has been
// released or has expired.
//
// Methods obey ctx. With any error but ErrLost it is open whether the store
// has carried out what it was asked for. They are not to be repeated silently
// below this interface: a Begin that was carried out, and is sent again since
// its answer was lost, finds the key busy with itself.
//
// Package storetest has the tests that a store must pass.
type Store interface {
	// Begin claims key for a run of the request with this print, or says why
	// it cannot: see [Claim]. A new record is in flight, with an end of lease
	// in lease from now, and expires in ttl, which is at least lease, from now.
	Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (Claim, error)

	// Renew moves the end of the lease to lease from now, and the expiry of
	// the record, should it come before that, likewise. A lease that has
	// ended can be renewed while nobody has taken the key over. ErrLost: key
	// is not in flight under fence, and nothing has changed.
	Renew(ctx context.Context, key [32]byte, fence int64, lease time.Duration) error

	// Finish makes the record done: it holds answer, which is not kept by
	// reference and may hold any bytes, and expires in ttl from now. The end
	// of the lease does not matter while nobody has taken the key over.
	// ErrLost: key is not in flight under fence, and nothing has changed.
	Finish(ctx context.Context, key [32]byte, fence int64, answer []byte, ttl time.Duration) error

	// Release removes the record, so that the next Begin is New. ErrLost: key
	// is not in flight under fence, and nothing has changed.
	Release(ctx context.Context, key [32]byte, fence int64) error

	// Shared reports whether all servers that may get a retry of the same
	// request share the records. If they do not, a client must not be told
	// that its keys are honoured.
	Shared() bool
}

// A State is what Begin has found.
type State int

const (
	// StateNew: the key was absent. It is now in flight for the caller.
	StateNew State = iota + 1

	// StateTaken: the key was in flight, with the same print, but its lease
	// had ended. It is now in flight for the caller, under a greater fence.
	// What became of the run before is unknown.
	StateTaken

	// StateBusy: the key is in flight elsewhere, with the same print, and its
	// lease has not ended.
	StateBusy

	// StateDone: the record, with the same print, holds an answer.
	StateDone

	// StateMismatch: the record, done or in flight with its lease ended or
	// not, has another print.
	StateMismatch
)

// String returns the state in one word: new, taken, busy, done or mismatch.
func (s State) String() string {
	switch s {
	case StateNew:
		return "new"
	case StateTaken:
		return "taken"
	case StateBusy:
		return "busy"
	case StateDone:
		return "done"
	case StateMismatch:
		return "mismatch"
	}
	return "invalid"
}

// A Claim is the answer of Begin. Fields that State does not mention are zero.
type Claim struct {
	State  State
	Fence  int64         // StateNew, StateTaken: to be shown to all other methods
	Left   time.Duration // StateBusy: until the lease ends, > 0
	Answer []byte        // StateDone: as given to Finish; not to be modified
}
