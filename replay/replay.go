package replay

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of Config.
const (
	DefaultTTL          = 24 * time.Hour
	DefaultMaxWait      = 2 * time.Second
	DefaultMaxWaiters   = 256
	DefaultMaxAnswer    = 1 << 20
	DefaultStoreTimeout = 250 * time.Millisecond
)

// Limits of Config, and times that are none of its business.
const (
	minLeaseSetting = 100 * time.Millisecond
	maxTTL          = 365 * 24 * time.Hour
	maxMaxWait      = time.Hour
	maxMaxAnswer    = 64 << 20
	maxStoreTimeout = time.Minute

	minLease, maxLease = 10 * time.Second, time.Minute // where Config.Lease is 0
	leaseGrace         = 5 * time.Second               // of these, for the answer to be stored

	firstPoll, lastPoll    = 25 * time.Millisecond, 250 * time.Millisecond
	minReserve, maxReserve = 5 * time.Millisecond, 250 * time.Millisecond // of a waiting request, for its 409

	finishTime  = 5 * time.Second // for storing an answer that nobody's deadline bounds
	finishPause = 25 * time.Millisecond
)

// Config configures [New]. Store and Scope are required; the zero value of every
// other field is valid.
//
// The functions are called on the goroutine of the request, several at once,
// and must not modify the request.
type Config struct {
	// Store keeps the records. Required. Middlewares of all processes that
	// serve the same operations use the same one, with the same settings.
	Store Store

	// Scope returns whom a key belongs to: the tenant, account or user that
	// layers outside have authenticated. Required: without it one client could
	// fetch the answer of another by its key. It must not depend on what changes
	// between two attempts of the same request, as a token does. An error, or an
	// empty scope, is answered 500, and the handler does not run. [SingleTenant]
	// is for services with one.
	Scope func(*http.Request) (string, error)

	// Service is the value of the label "service" of every metric, and
	// Event.Service: valid UTF-8, at most 128 bytes. Empty is allowed.
	Service string

	// Methods are those whose requests are made safe to repeat, in upper case.
	// Nil: POST and PATCH. Others pass through. GET, HEAD, OPTIONS, TRACE and
	// CONNECT are not possible.
	Methods []string

	// Required refuses requests of these methods that have no key with 400.
	// False: they pass through.
	Required bool

	// Fingerprint returns what two requests with the same key must have in
	// common to be the same operation; body is the first 64 KiB of the request's
	// body and must be neither kept nor modified. It is for clients that encode
	// their body anew for each attempt: multipart boundaries, JSON in random
	// order. Nil: the query, Content-Type, Content-Digest, the length of the
	// body and its first 64 KiB.
	Fingerprint func(r *http.Request, body []byte) []byte

	// TTL is how long an answer is kept, at least a second and at most a year.
	// 0: DefaultTTL, 24 h. Publish it: a retry that comes later runs again.
	TTL time.Duration

	// Lease is how long a key stays taken when the process that runs its request
	// dies. While the handler runs the lease is renewed, however long that
	// takes. At least 100 ms, at most TTL. 0: the time that the request has left
	// and 5 s, between 10 s and a minute; a minute without a deadline.
	Lease time.Duration

	// MaxWait bounds how long a request waits for another one with its key. It
	// does not wait into the last quarter of the time that it has left. Then the
	// answer is 409. 0: DefaultMaxWait, 2 s. At most an hour. Negative: no
	// waiting.
	MaxWait time.Duration

	// MaxWaiters is how many requests may wait at the same time. 0:
	// DefaultMaxWaiters, 256. Those beyond get their 409 at once. Negative: no
	// waiting.
	MaxWaiters int

	// MaxAnswer is how many bytes of a body are held back and stored. A longer
	// answer, and one that is flushed, is passed on as it is written. A flushed
	// one is stored when it has ended; one that is longer is not, and its
	// repetition is answered 409 and does not run. 0: DefaultMaxAnswer, 1 MiB.
	// At most 64 MiB. The store must take answers of this size and 64 KiB more.
	MaxAnswer int

	// StoreTimeout bounds a call of the store that a request waits for before it
	// runs; it is never longer than a quarter of the time that the request has
	// left. 0: DefaultStoreTimeout, 250 ms. At most a minute.
	StoreTimeout time.Duration

	// RefuseUnknown is for operations that are better not done than done twice.
	// A run whose end says nothing about what it has done (a panic, a 502 or
	// 504, a silent end at the deadline, a request body that broke off, a process
	// that died) is not repeated: requests with its key are answered 409 until
	// the TTL ends. False: they run.
	RefuseUnknown bool

	// FailOpen runs requests unprotected when the store fails before they have
	// begun. False: they are answered 503, and nothing runs.
	FailOpen bool

	// Detach lets the handler run on when the client leaves, up to the deadline,
	// so that its answer is there when the client comes back. False: its context
	// ends when the client leaves.
	Detach bool

	// Hook, if not nil, is told what became of each request that has a key, or
	// should have one. It is called inline, after the answer was written.
	Hook func(context.Context, Event)

	// Metrics, if not nil, counts. One Metrics serves many middlewares.
	Metrics *Metrics
}

// SingleTenant is a [Config].Scope for services whose clients may all see each
// other's answers.
func SingleTenant(*http.Request) (string, error) { return "single tenant", nil }

// validate fills in the defaults and returns every field that cannot be used.
func (c *Config) validate() error {
	var errs configErrors
	errs.check(c.Store != nil, "Config.Store", nil, "is required")
	if m, ok := c.Store.(*Memory); ok && m != nil && m.err != nil {
		errs = append(errs, m.err)
	}
	errs.check(c.Scope != nil, "Config.Scope", nil, "is required: whom a key belongs to, or SingleTenant")
	errs.check(validService(c.Service), "Config.Service", strconv.QuoteToASCII(c.Service[:min(len(c.Service), maxServiceLen)]), "must be valid UTF-8 of at most 128 bytes")
	if c.Methods == nil {
		c.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	for _, method := range c.Methods {
		switch method {
		case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodConnect, "":
			errs.check(false, "Config.Methods", strconv.Quote(method), "is not a method whose requests run once")
		}
		errs.check(method == strings.ToUpper(method), "Config.Methods", strconv.Quote(method), "must be in upper case")
	}
	duration := func(d *time.Duration, zero, least, most time.Duration, name, reason string) {
		if *d == 0 {
			*d = zero
		}
		errs.check(*d >= least && *d <= most, "Config."+name, *d, reason)
	}
	duration(&c.TTL, DefaultTTL, time.Second, maxTTL, "TTL", "must lie in [1 s, a year], or be 0 for 24 h")
	if c.Lease != 0 {
		duration(&c.Lease, 0, minLeaseSetting, max(c.TTL, minLeaseSetting), "Lease", "must lie in [100 ms, TTL], or be 0")
	}
	if c.MaxWait >= 0 {
		duration(&c.MaxWait, DefaultMaxWait, 0, maxMaxWait, "MaxWait", "must not be longer than an hour")
	}
	if c.MaxWaiters == 0 {
		c.MaxWaiters = DefaultMaxWaiters
	}
	if c.MaxAnswer == 0 {
		c.MaxAnswer = DefaultMaxAnswer
	}
	errs.check(c.MaxAnswer > 0 && c.MaxAnswer <= maxMaxAnswer, "Config.MaxAnswer", c.MaxAnswer, "must lie in [1, 64 MiB], or be 0 for 1 MiB")
	duration(&c.StoreTimeout, DefaultStoreTimeout, time.Millisecond, maxStoreTimeout, "StoreTimeout", "must lie in [1 ms, a minute], or be 0 for 250 ms")
	return errs.join()
}

// A Middleware runs one request of all with the same key, and gives the others
// its answer. Make it with [New]: the zero value, and nil, refuse everything
// with an error that says so. It is safe for concurrent use and may stand in
// front of any number of handlers.
type Middleware struct {
	cfg     Config
	methods map[string]bool
	metrics *serviceMetrics
	memory  *Memory // the store, if it is one: its calls need no time limit
	shared  bool
	waiters atomic.Int64

	mu   sync.Mutex
	runs map[[32]byte]*exchange // guarded by mu; those of this process that have a key
}

// New returns a Middleware for c, which it copies. The error joins one
// [*stint.ConfigError] for every field that cannot be used.
func New(c Config) (*Middleware, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	m := &Middleware{
		cfg: c, methods: make(map[string]bool), metrics: c.Metrics.service(c.Service),
		shared: c.Store.Shared(), runs: make(map[[32]byte]*exchange),
	}
	for _, method := range c.Methods {
		m.methods[method] = true
	}
	m.memory, _ = c.Store.(*Memory)
	return m, nil
}

var errZeroMiddleware = errors.New("replay: Middleware was not made with replay.New")

// Handler returns a handler that passes requests on to next. Those that have no
// key, or another method than Config.Methods, or that ask to switch protocols,
// pass through untouched. Of the others, by what the store says of their key:
//
//   - Nothing: next runs. Its answer is held back, stored, and then sent, so
//     that who has seen an answer can have it again.
//   - It is running: the request waits for the answer. If that takes too long,
//     409 with Retry-After and X-Should-Retry: true.
//   - It is done: the same status, header and body again, and
//     Idempotent-Replayed: true.
//   - It is that of another request: 422.
//
// Whatever next answers is final, with these exceptions. 408, 425, 429 and 503,
// any error with the header X-Should-Retry: true, and a call of [Forget] say
// that nothing was done: the next request runs. A panic, [runtime.Goexit], 502,
// 504, an end without an answer when the context is over, an answer of 400 or
// more after the request's body broke off, and one that is shorter than its
// Content-Length say nothing about what was done; see Config.RefuseUnknown.
//
// The header of a replay is what next has set, without what belongs to one
// answer, one client or one connection: Date, Set-Cookie, Retry-After, Alt-Svc,
// Server-Timing, rate limits, the IDs of requests and traces, hop-by-hop fields
// and those that Connection names. What layers outside set is set by them
// again.
//
// A shared store is announced: the answer echoes the header Idempotency-Key, so
// that a client knows that its key is honoured. Not where that would be wrong:
// the answer could not be stored, had begun before it was, or is one of those
// that say nothing.
//
// Put it inside of what authenticates, sets deadlines and compresses, around
// the handlers alone. The body's first 64 KiB are read before next runs. Panics
// pass through. The response writer offers the optional interfaces of the one
// that it wraps; a connection that is hijacked leaves a record that the answer
// was not kept.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	if m == nil || m.runs == nil {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, errZeroMiddleware.Error(), http.StatusInternalServerError)
		})
	}
	if next == nil {
		panic("replay: Middleware.Handler: nil handler")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !m.methods[r.Method] || wantsUpgrade(r) {
			next.ServeHTTP(w, r)
			return
		}
		key, found, ok := keyOf(r.Header)
		if !found && !m.cfg.Required {
			next.ServeHTTP(w, r)
			return
		}
		x := &exchange{m: m, w: w, r: r, start: time.Now()}
		defer x.report() // for a handler that panics as well
		switch {
		case !found:
			x.refuse(&missingKey, nil)
		case !ok:
			x.refuse(&invalidKey, nil)
		default:
			x.serve(key, next)
		}
	})
}

// wantsUpgrade reports whether r asks to switch to a protocol that ends HTTP on
// the connection. h2c, which some clients offer with every request, does not.
func wantsUpgrade(r *http.Request) bool {
	lines := r.Header["Upgrade"]
	return len(lines) > 0 && r.ProtoMajor == 1 && hasMember(r.Header["Connection"], "upgrade") && !hasMember(lines, "h2c")
}
