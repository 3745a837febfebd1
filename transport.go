package stint

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/hashicorp/go-cleanhttp"
)

// Defaults of Config.
const (
	DefaultMaxAttempts = 3
	DefaultReserve     = 3 * time.Millisecond
)

// A Config configures a Transport. The zero value is valid, and every field's
// zero value is the default that its comment names. NewTransport copies it:
// later changes have no effect. The functions in it are called by many
// goroutines at once.
type Config struct {
	// Base makes the attempts. nil: a pooled transport of this Transport's own,
	// made by go-cleanhttp, with 100 idle connections per host, and pings on
	// HTTP/2 connections that have been silent for 15 s.
	//
	// RoundTrip waits for Base to return, as the RoundTripper contract has it: a
	// Base that ignores its context holds the caller. It can then still be using
	// the request's body.
	Base http.RoundTripper

	// Timeout bounds every request that has no earlier deadline. It covers all
	// attempts, the waits between them and the answer's body, and is what the
	// peer is told. 0: the deadline of the request's context alone.
	Timeout time.Duration

	// AttemptTimeout bounds one attempt until its response headers; the body is
	// not cut. It is local: the peer is not told. 0: none.
	AttemptTimeout time.Duration

	// MaxAttempts counts the first attempt. 1: never retry, which is headers and
	// metrics alone, the first step of a rollout. 0: DefaultMaxAttempts.
	MaxAttempts int

	// Reserve is kept at every tier for the answer's way back: the peer is told a
	// deadline that much earlier than our own, so that its 504 arrives and the
	// connection survives. In (0, 10 s]. 0: DefaultReserve.
	Reserve time.Duration

	// Budget bounds the retries to each peer.
	Budget BudgetConfig
	// Throttle holds requests back, first attempts too, while a peer fails more
	// than half of what it gets within Budget.Window: of n attempts of which a
	// succeed, a share of (n−2a)/(n+1), and never more than half. They end with an
	// [*Error] of ReasonThrottle, and the peer gets room to recover. It lets go by
	// itself as the peer recovers. Fewer than 10 attempts in a window are no reason
	// to hold anything back. Default: false.
	Throttle bool
	// Backoff sets how long a retry waits.
	Backoff Backoff
	// Admission sets when a retry is held to be able to end in time.
	Admission AdmissionConfig

	// Hedge sets when a slow request gets a second attempt. Zero: never.
	Hedge HedgeConfig

	// RetryStatus says which statuses are worth a retry. nil: 408, 421, 425,
	// 429, 502, 503 and 504. X-Should-Retry overrides it. Answers of the default
	// set earn no retry credit even where RetryStatus does not retry them.
	RetryStatus func(status int) bool

	// RetryError says which errors of Base are worth a retry; it is not asked
	// about errors of certificates and malformed requests, which never are, nor
	// about AttemptTimeout. nil: all others. An error that is not worth one ends
	// the request, costs no budget, and says nothing about the peer: neither its
	// latencies nor Throttle take notice. That is what the error of an open
	// circuit breaker in Base is.
	RetryError func(error) bool

	// Elsewhere chooses the host of each attempt: it may set Host in the URL of
	// out, which is the attempt's own copy of the request, and may change Scheme,
	// Path and out.Host as well. failed is the host in the URL of the attempt that
	// has just failed, "" for the first. The peer, and with it the budget, stays
	// that of the caller's request, whose Host header is sent; so does the URL that
	// the answer's Request shows. A host in the list has to be in the fleet: it gets
	// deadline and key.
	//
	// done may be nil. It is called when the attempt has ended, with whether it
	// ended well, but not where the caller has left or its request is at fault.
	// Both are called inline. [Hosts] is a ready one. nil: attempts go to the host
	// that the caller names.
	Elsewhere func(out *http.Request, failed string) (done func(ok bool))

	// FreshConn makes each retry on a connection of its own, which is closed
	// afterwards: where one name, such as that of a Kubernetes Service, stands for
	// several hosts and the connection decides which, a kept-alive one leads to the
	// host that has just failed. Base has to be nil or an *http.Transport, which is
	// cloned for that. Default: false.
	FreshConn bool

	// Peer names the peer that a request goes to, which is the key of budget,
	// histogram and metrics. nil: host and port of the URL, in lower case and
	// with the port always spelled out.
	Peer func(*http.Request) string

	// MaxPeers bounds how many peers are kept apart. Beyond it, one that has been
	// idle for a budget window gives way; if there is none, newcomers share one
	// budget. 0: DefaultMaxPeers.
	MaxPeers int

	// Keys says whether POST and PATCH get idempotency keys and what such a key
	// permits. 0: KeysAuto.
	Keys KeyPolicy

	// Foreign reports whether a request leaves the fleet. Budget and admission
	// hold for it, but no header of ours is sent, no key is made, and
	// X-Should-Retry: true does not permit repeating what is unsafe to repeat.
	// nil: no request does, except a redirect's hop to another host than the
	// first.
	Foreign func(*http.Request) bool

	// CountResends counts, by httptrace, what net/http sends again on its own
	// when a kept-alive connection turns out to be dead:
	// stint_transparent_resends_total. Off by default, as it costs allocations.
	CountResends bool

	// UsedUp is called inline, before RoundTrip returns, for each request that
	// fails with a Reason other than canceled: its retries are used up, or it gets
	// none. It is for putting the operation where it is tried again later; see
	// [UsedUp].Repeatable for which may be. What it does holds up the caller.
	// nil: none.
	UsedUp func(context.Context, UsedUp)

	// Hook is called inline for every Event of a request. nil: none.
	Hook func(context.Context, Event)

	// Metrics counts; one may serve many transports and middlewares. nil: none.
	Metrics *Metrics
}

const reserveRange = "must be in (0, 10s]"

func validReserve(d time.Duration) bool { return d > 0 && d <= 10*time.Second }

func (c Config) withDefaults() Config {
	if c.Base == nil {
		base := cleanhttp.DefaultPooledTransport()
		base.MaxIdleConns = 0 // the bound per host and the idle timeout are enough
		base.MaxIdleConnsPerHost = 100
		base.HTTP2 = &http.HTTP2Config{SendPingTimeout: 15 * time.Second}
		c.Base = base
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = DefaultMaxAttempts
	}
	if c.Reserve == 0 {
		c.Reserve = DefaultReserve
	}
	if c.MaxPeers == 0 {
		c.MaxPeers = DefaultMaxPeers
	}
	if c.Keys == 0 {
		c.Keys = KeysAuto
	}
	c.Budget = c.Budget.withDefaults()
	c.Backoff = c.Backoff.withDefaults()
	c.Admission = c.Admission.withDefaults()
	return c
}

// check expects the defaults filled in.
func (c Config) check() error {
	var errs configErrors
	errs.check(c.Timeout >= 0, "Config.Timeout", c.Timeout, "must not be negative")
	errs.check(c.AttemptTimeout >= 0, "Config.AttemptTimeout", c.AttemptTimeout, "must not be negative")
	errs.check(c.MaxAttempts >= 1, "Config.MaxAttempts", c.MaxAttempts, "must be at least 1, or 0 for the default")
	errs.check(validReserve(c.Reserve), "Config.Reserve", c.Reserve, reserveRange+", or 0 for the default")
	_, std := c.Base.(*http.Transport)
	errs.check(std || !c.FreshConn, "Config.FreshConn", c.FreshConn, "needs a Base that is nil or an *http.Transport")
	errs.check(c.MaxPeers >= 1, "Config.MaxPeers", c.MaxPeers, "must be at least 1, or 0 for the default")
	errs.check(c.Keys.valid(), "Config.Keys", c.Keys, "is not a KeyPolicy")
	c.Budget.check(&errs, "Config.Budget")
	c.Backoff.check(&errs)
	c.Admission.check(&errs)
	c.Hedge.check(&errs)
	return errs.join()
}

// A Transport is an [http.RoundTripper] that sends the caller's deadline, gives
// POST and PATCH an idempotency key, and retries what is safe to retry, within a
// budget for each peer and within the deadline.
//
// The deadline is the earliest of the context's, of Config.Timeout, of the one
// that the middleware adopted for the request being served, and of a deadline
// header that the request itself carries, as a reverse proxy's copy does.
//
// It keeps the contract of RoundTripper: it does not modify the request, and if
// there is a response it is returned with a nil error. It starts no goroutine
// that outlives a call and needs no Close. Safe for concurrent use. Make one and
// share it: the budget is per Transport. The zero Transport fails every request.
type Transport struct {
	base  http.RoundTripper
	fresh http.RoundTripper // for retries; nil: base
	std   bool              // base is net/http's own, whose resends we know
	cfg   Config
	opts  Override // what cfg says of what an Override can change
	peers *peers

	jitter func() float64                // uniform in [0, 1)
	wall   func(now time.Time) time.Time // what the wall clock shows at now; nil: now. Tests step it.
}

// NewTransport returns a Transport, or an error that joins one *ConfigError for
// each field that cannot be used.
func NewTransport(c Config) (*Transport, error) {
	c = c.withDefaults()
	if err := c.check(); err != nil {
		return nil, err
	}
	t := &Transport{base: c.Base, cfg: c, jitter: rand.Float64}
	if base, ok := c.Base.(*http.Transport); ok {
		t.std = true
		if c.FreshConn {
			t.fresh = freshConns(base)
		}
	}
	t.opts = Override{MaxAttempts: c.MaxAttempts, AttemptTimeout: c.AttemptTimeout, Reserve: c.Reserve, Keys: c.Keys}
	t.peers = newPeers(&t.cfg, time.Now())
	return t, nil
}

// CloseIdleConnections closes the idle connections of the base, if it can.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

var errZeroTransport = errors.New("stint: zero Transport: use stint.NewTransport")

// RoundTrip sends the request, and again as often as it is worth it and allowed.
//
// A response that exists is returned with a nil error, the last one if there
// were several. An error that only the base decided is returned as it is; where
// stint ended the request, because time ran out or the caller left while a retry
// waited, the error is an [*Error]. A retry that is refused after an error of the
// base returns that error: why is in the Outcome, the hook and the metrics.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	var c call
	if err := c.begin(t, req); err != nil {
		return nil, err
	}
	defer c.end()

	if c.bounded && c.sendBy.Sub(c.start) < time.Millisecond {
		// Never without the header because little is left: to the peer, no header
		// is no limit.
		closeBody(req)
		c.need = c.opts.Reserve + time.Millisecond
		reason, why := ReasonDeadline, context.DeadlineExceeded
		if c.ctx.Err() == context.Canceled {
			reason, why = ReasonCanceled, contextError(c.ctx)
		}
		return c.finish(result{verdict: terminal, err: c.error(reason, why)}, reason)
	}
	if err := c.throttled(); err != nil {
		return c.finish(result{verdict: terminal, err: err}, ReasonThrottle)
	}
	for body := req.Body; ; {
		r := c.send(body)
		if r.final() {
			return c.finish(r, r.reason)
		}
		wait, refused := c.mayRetry(&r, time.Now())
		if refused != "" {
			return c.finish(r, refused)
		}
		if !c.hold(&r) {
			return c.finish(r, ReasonHeld)
		}
		c.emitRetry(&r, wait)
		if !c.sleep(wait) {
			return c.abandon(r)
		}
		// Everything that can fail comes before the turn is spent, and nothing in
		// hand is thrown away before it is certain that there will be another.
		if !c.settle() {
			if c.bound.Err() != nil {
				return c.abandon(r)
			}
			return c.finish(r, ReasonNotReplayable)
		}
		var err error
		if body, err = c.rewind(); err != nil {
			return c.finish(r, ReasonNotReplayable)
		}
		if refused = c.takeTurn(); refused == "" {
			refused = c.drop(&r)
		}
		if refused != "" {
			closeUnsent(body)
			if refused == ReasonCanceled {
				return c.abandon(r)
			}
			return c.finish(r, refused)
		}
	}
}

func (t *Transport) wallAt(now time.Time) time.Time {
	if t.wall == nil {
		return now
	}
	return t.wall(now)
}

// transient is the set of statuses that are worth a retry.
func (t *Transport) transient(status int) bool {
	if t.cfg.RetryStatus != nil {
		return t.cfg.RetryStatus(status)
	}
	return transientStatus(status)
}

// failure is the set of statuses that earn no credit: what is retried, and what
// would be by default. Who retries nothing by status must not thereby fund
// retries of lost connections through an outage.
func (t *Transport) failure(status int) bool {
	return transientStatus(status) || t.transient(status)
}
