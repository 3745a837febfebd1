package stint

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stinthttp/stint/internal/idemkey"
)

type (
	overrideKey struct{} // *Override
	arrivalKey  struct{} // *arrival
)

// An Override changes the configuration of a Transport for the requests made
// with one context. Zero fields inherit. The budget has no override: it
// protects the peer, not the caller.
//
// An invalid Override makes RoundTrip return a [*ConfigError]; nothing is sent
// and the request's body is closed.
type Override struct {
	MaxAttempts    int           // counts the first attempt: 1 is no retry
	AttemptTimeout time.Duration // as in Config; negative: none
	Reserve        time.Duration // as in Config: in (0, 10 s]
	// IdempotencyKey is the caller's promise that the request may be repeated
	// under this key: 1 to 255 visible ASCII characters. It takes the place of
	// a key in the header.
	IdempotencyKey string
	Keys           KeyPolicy
	// NoHedge switches Config.Hedge off. False inherits.
	NoHedge bool
	// Outcome is filled in before RoundTrip returns, unless it returns a
	// *ConfigError. It is for one request at a time; on a redirect, the next
	// hop overwrites it.
	Outcome *Outcome
}

// An Outcome says what became of a request.
type Outcome struct {
	Attempts int    // how many were sent
	Reason   Reason // why no (further) retry was made; empty when none was wanted
	Key      string // the idempotency key that was sent, if any
}

// WithOverride returns a context whose requests are sent under o. Overrides
// compose: a zero field of o keeps what an outer Override says.
func WithOverride(ctx context.Context, o Override) context.Context {
	if outer, ok := ctx.Value(overrideKey{}).(*Override); ok {
		o.inherit(outer)
	}
	return context.WithValue(ctx, overrideKey{}, &o)
}

// inherit fills in the zero fields of o.
func (o *Override) inherit(outer *Override) {
	if o.MaxAttempts == 0 {
		o.MaxAttempts = outer.MaxAttempts
	}
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = outer.AttemptTimeout
	}
	if o.Reserve == 0 {
		o.Reserve = outer.Reserve
	}
	if o.IdempotencyKey == "" {
		o.IdempotencyKey = outer.IdempotencyKey
	}
	if o.Keys == 0 {
		o.Keys = outer.Keys
	}
	o.NoHedge = o.NoHedge || outer.NoHedge
	if o.Outcome == nil {
		o.Outcome = outer.Outcome
	}
}

func (o *Override) validate() error {
	var errs configErrors
	errs.check(o.MaxAttempts >= 0, "Override.MaxAttempts", o.MaxAttempts, "must be at least 1, or 0 to inherit")
	errs.check(o.Reserve == 0 || validReserve(o.Reserve), "Override.Reserve", o.Reserve, reserveRange+", or 0 to inherit")
	errs.check(o.IdempotencyKey == "" || idemkey.Valid(o.IdempotencyKey), "Override.IdempotencyKey", redacted(o.IdempotencyKey), "must be 1 to 255 visible ASCII characters")
	errs.check(o.Keys.valid(), "Override.Keys", o.Keys, "is not a KeyPolicy")
	return errs.first()
}

// IdempotencyKey returns the idempotency key of the request being served, as
// the middleware found it: one Idempotency-Key or X-Idempotency-Key line, bare
// or quoted, 1 to 255 visible ASCII characters. ok is false where the request
// has none that is usable, or did not pass the middleware.
//
// The key names the caller's operation; one that a Transport made names just one
// request, and nobody has promised that it may be repeated. Do not send it on as
// the key of calls that the handler makes: two of them would share it.
func IdempotencyKey(ctx context.Context) (key string, ok bool) {
	a := arrivalFrom(ctx)
	if a == nil || a.key == "" {
		return "", false
	}
	return a.key, true
}

// Detach returns a context for work that may outlive the request being served.
// The values of ctx stay. Its deadline and cancellation go, and so do the
// adopted deadline, which [context.WithoutCancel] alone keeps, and the note by
// which failed calls of a handler mark its answer as not worth retrying.
func Detach(ctx context.Context) context.Context {
	detached := context.WithoutCancel(ctx)
	if a := arrivalFrom(ctx); a != nil {
		return context.WithValue(detached, arrivalKey{}, &arrival{key: a.key, detached: true})
	}
	return detached
}

// An arrival is what the middleware leaves in the context of a request being
// served, for the transports that the handler uses.
type arrival struct {
	key      string    // idempotency key, "" for none
	deadline *deadline // adopted; nil: none
	distrust bool      // TrustHeader said no: a copied header means nothing
	// reportOnly: nothing may come of the header, copied or not.
	reportOnly bool
	detached   bool
	over       atomic.Bool // the upgrade is done: the deadline was for the handshake
	probe      *probe      // nil: the request is not probed, and neither are calls
	note       note
}

func arrivalFrom(ctx context.Context) *arrival {
	a, _ := ctx.Value(arrivalKey{}).(*arrival)
	return a
}

// mute reports whether a deadline header in an outgoing request, which is then a
// copy of what arrived, counts for nothing.
func (a *arrival) mute() bool { return a.distrust || a.reportOnly || a.detached }

// adopted returns the deadline that calls made for this arrival inherit.
func (a *arrival) adopted() *deadline {
	if a == nil || a.over.Load() {
		return nil
	}
	return a.deadline
}

// A note holds the peers whose calls, made for one request being served, ended
// in a failure that further retries, by any layer above, can only multiply.
// Safe for concurrent use; the zero value is empty.
type note struct {
	any    atomic.Bool // failed is not empty: successes look here first, without the lock
	mu     sync.Mutex
	failed map[string]struct{} // guarded by mu
}

func (n *note) fail(peer string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failed == nil {
		n.failed = make(map[string]struct{})
	}
	n.failed[peer] = struct{}{}
	n.any.Store(true)
}

func (n *note) succeed(peer string) {
	if !n.any.Load() {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.failed, peer)
	n.any.Store(len(n.failed) > 0)
}

// set reports whether any peer's last call has failed for good.
func (n *note) set() bool { return n.any.Load() }
