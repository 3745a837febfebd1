package stint

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/felixge/httpsnoop"

	"github.com/stinthttp/stint/internal/idemkey"
)

// DefaultMaxTimeout is what MiddlewareConfig.MaxTimeout is when it is zero.
const DefaultMaxTimeout = time.Hour

// Limits of MiddlewareConfig, and of what is believed of a request.
const (
	maxMaxTimeout    = 30 * 24 * time.Hour
	maxSkewTolerance = 60 * time.Second // beyond it a clock is broken, see grossSkew
	maxServiceLen    = 128              // bytes of a metric label
	maxRetryCount    = 1000             // of X-Retry-Count
)

// Values of the metric label "code" that are no status.
const (
	// codeHijacked counts a request whose connection the handler took over:
	// what was answered on it is not known.
	codeHijacked = -1
	// codeClientGone counts a request whose client had left before anything was
	// answered. Nothing of the kind is ever sent; the number is nginx's.
	codeClientGone = 499
)

// What becomes of a request body that nobody read, see releaseBody.
const (
	drainBytes = 64 << 10
	drainTime  = 10 * time.Millisecond
	lingerTime = 500 * time.Millisecond
)

// MiddlewareConfig configures a Middleware. The zero value is valid: it adopts
// the deadlines of callers up to an hour away and sets none of its own.
//
// The functions are called on the goroutine of the request, several at once,
// and must not modify the request.
type MiddlewareConfig struct {
	// Service is the value of the label "service" of every metric, and
	// Event.Service: valid UTF-8, at most 128 bytes. Empty is allowed.
	Service string

	// Timeout is the deadline of a request without a usable header, counted
	// from its arrival: what an edge gives to the requests of the outside.
	// 0: none. It must not exceed MaxTimeout.
	Timeout time.Duration

	// TimeoutFor, if not nil, takes the place of Timeout: what it returns
	// counts, cut to MaxTimeout, and zero or less is no deadline. It is for
	// routes that differ: event streams, exports and long polls have none. A
	// usable header still holds; TimeoutFor is only asked where there is none.
	TimeoutFor func(*http.Request) time.Duration

	// MaxTimeout bounds what a caller can ask for: no adopted deadline lies
	// further away. 0: DefaultMaxTimeout, an hour. At most 30 days.
	MaxTimeout time.Duration

	// SkewTolerance is by how much this host's clock may be ahead of the
	// caller's before requests are refused that still have time by the
	// companion header X-Request-Timeout-Ms. Without that header it does
	// nothing: a deadline that only tolerates lets every request overrun its
	// caller. 0: strict, the time spent on the way and in queues is charged. At
	// most a minute.
	SkewTolerance time.Duration

	// RejectInvalid answers a request whose deadline header is unusable with
	// 400. False: the header is counted and ignored, and the request is served
	// as one without a header. Either way an unusable value goes no further.
	RejectInvalid bool

	// TrustHeader, if not nil, tells whose deadline header is looked at. A
	// public edge returns false for requests from outside. A distrusted header
	// is as none, and a reverse proxy behind it does not pass it on.
	TrustHeader func(*http.Request) bool

	// Exempt, if not nil, tells which requests are passed through untouched
	// and uncounted: health checks, metrics.
	Exempt func(*http.Request) bool

	// ReportOnly observes and nothing else, the first step of a rollout:
	// header states, time left and what would have been refused are counted and
	// reported to Hook. The request's context gets no deadline, neither do the
	// calls the handler makes, no answer of ours is written and none is marked.
	// So a deadline ends here: a header that a reverse proxy copies is removed
	// by the transport, which would otherwise act on it.
	ReportOnly bool

	// HardStop is for handlers that ignore their context: Handler answers 504 at
	// the deadline while the handler still runs. An answer that has begun by
	// then is given 50 ms to end by itself, and is broken off with
	// [http.ErrAbortHandler] if it does not. False: the handler is waited for.
	// Requests without a deadline, and those to switch protocols, are served as
	// without HardStop, and so is everything under ReportOnly. A handler that
	// hijacks its connection is waited for.
	//
	// It frees the caller, not the server: the handler runs on until it ends by
	// itself, with all that it holds. Nothing but Limit bounds how many of them
	// do, since the caller, answer in hand, may send its next request; and
	// [http.Server.Shutdown] does not wait for them. The cure is a handler that
	// heeds its context. What HardStop costs:
	//
	//   - A goroutine for each request with a deadline, a private header map,
	//     and a mutex over every method of the writer: a microsecond or two, as
	//     [http.TimeoutHandler], but nothing is held back. ReadFrom copies through
	//     a buffer: no sendfile.
	//   - A handler that heeds its context, and begins an answer of its own at
	//     the deadline, comes too late.
	//   - Once it is stopped, the handler's writes and reads of the body return
	//     [http.ErrHandlerTimeout]. It must not touch what layers outside recycle
	//     when ServeHTTP has returned. Unwrap leads to a writer that is guarded
	//     as well, and to none below it: what layers outside have added to
	//     theirs is out of reach.
	//   - A Read of the body that waits at the deadline is interrupted, and a
	//     Write 50 ms after it, which costs an HTTP/1 connection. Below a writer
	//     for which http.ResponseController cannot set deadlines, a Write that
	//     waits is waited for.
	//   - A panic comes out on the server's goroutine, with its value; the stack
	//     of the handler is written to http.Server.ErrorLog before. A panic after
	//     the handler was stopped ends nothing: it is reported to Hook as
	//     EventPanicked or, without Hook, written there too, and
	//     http.ErrAbortHandler is neither.
	//   - A client that leaves is no deadline: the handler is waited for, but
	//     not beyond the deadline. It may have closed only its half of the
	//     connection, and still be reading.
	HardStop bool

	// Limit bounds how many requests the handler serves at once, and refuses those
	// that could not end in time. The zero value is no limit. Under ReportOnly what
	// would have been refused is counted, and served. Adopt does not see the end of
	// a request, and has no Limit.
	Limit LimitConfig

	// RetryBudget, if not nil, bounds the retries that reach the handler, however
	// many clients they come from: each client has a floor of its own, and a
	// hundred of them are a hundred floors. It is the budget that a Transport has
	// for a peer, over what arrives here: requests with X-Retry-Count are
	// retries, those without are what its share is a share of, as far as the
	// handler answers them with a status that is not retried by default. A retry
	// waits for its turn up to MaxWait, without a slot of a handler. One beyond
	// the share is answered 503 with X-Should-Retry: false, and the handler not
	// called: its client has no use for another. nil: none. A pointer to the zero
	// value has the defaults.
	//
	// A client that does not send X-Retry-Count is not bounded, and one that sends
	// it in vain takes turns away from the retries of others. Adopt does not see
	// answers, and has no RetryBudget.
	RetryBudget *BudgetConfig

	// DebugEcho, if not nil, tells who may probe: find out where on its way a
	// deadline gets lost. It is asked for requests with the header
	// X-Debug-Echo-Deadline, and should say yes to the fleet, and to operators by
	// an address or a secret: what they are told names services and peers, though
	// neither URLs nor headers. nil: nobody; the header is then not looked at.
	//
	// A request with X-Debug-Echo-Deadline: 1 is served as usual and answered
	// with its status, and in place of the body with JSON: a list of the hops
	// that took part, each with the deadline that it got and kept to, in
	// pre-order, one for each attempt that was answered, at most 16. Transports
	// ask the services that the handler calls with the value "hop", as far as
	// they are not foreign. Where those allow it as well, they keep their answer
	// and add the header X-Debug-Deadline with their part of the list, as
	// much of it as fits into an answer's header of 3.5 KiB. A call that ends after the answer has begun is not in it.
	// Others appear as what their caller saw of them.
	//
	// Requests to switch protocols are not probed with 1, and neither are
	// requests that Exempt lets through. For 204, 205 and 304, which have no
	// body, 200 is answered and the list has the status; on HEAD the list is in
	// X-Debug-Deadline.
	DebugEcho func(*http.Request) bool

	// Hook, if not nil, gets EventArrived, EventExpired, EventShed, EventServed
	// and, with HardStop, EventPanicked. It is called inline; its context carries the
	// values of the request's, and lives on when the deadline passes.
	Hook func(context.Context, Event)

	// Metrics, if not nil, counts. One Metrics serves many middlewares and
	// transports.
	Metrics *Metrics
}

// validate fills in the defaults and returns every field that cannot be used.
func (c *MiddlewareConfig) validate() error {
	var errs configErrors
	errs.check(utf8.ValidString(c.Service), "MiddlewareConfig.Service", strconv.QuoteToASCII(c.Service), "must be valid UTF-8")
	errs.check(len(c.Service) <= maxServiceLen, "MiddlewareConfig.Service", fmt.Sprintf("(%d bytes)", len(c.Service)), "must not be longer than 128 bytes")
	if c.MaxTimeout == 0 {
		c.MaxTimeout = DefaultMaxTimeout
	}
	maxOK := c.MaxTimeout > 0 && c.MaxTimeout <= maxMaxTimeout
	errs.check(maxOK, "MiddlewareConfig.MaxTimeout", c.MaxTimeout, "must lie in (0, 30 days], or be 0 for an hour")
	errs.check(c.Timeout >= 0, "MiddlewareConfig.Timeout", c.Timeout, "must not be negative")
	// Against a MaxTimeout that is itself wrong there is nothing to compare.
	errs.check(!maxOK || c.Timeout <= c.MaxTimeout, "MiddlewareConfig.Timeout", c.Timeout, "must not be longer than MaxTimeout")
	errs.check(c.SkewTolerance >= 0 && c.SkewTolerance <= maxSkewTolerance, "MiddlewareConfig.SkewTolerance", c.SkewTolerance, "must lie in [0, 60 s]")
	c.Limit.check(&errs)
	if c.RetryBudget != nil {
		b := c.RetryBudget.withDefaults()
		b.check(&errs, "MiddlewareConfig.RetryBudget")
		c.RetryBudget = &b // the caller's stays theirs
	}
	return errs.join()
}

// A Middleware is the server's half: it adopts the deadline that came with a
// request, which it may shorten and never extends, and answers 504 before any
// work is done for a request that is already too late.
//
// Make it with [NewMiddleware]: the zero value, and nil, refuse everything with
// an error that says so. A Middleware is safe for concurrent use and may stand
// in front of any number of handlers.
type Middleware struct {
	cfg     MiddlewareConfig
	metrics *serviceMetrics
	retries *budget  // nil without RetryBudget
	limit   *limiter // nil without Limit
	made    bool
	// For DebugHandler: the latest requests that ran out of time, and how many of
	// all of them had done so on arrival.
	expiries ring[expiry]
	tooLate  atomic.Uint64
	// timeLeft is what the latest requests with a usable header had left on
	// arrival; nil until there is a DebugHandler to show it.
	timeLeft atomic.Pointer[histogram]
	// wall maps a reading of time.Now to what the wall clock shows at that
	// moment; nil is the identity. Tests skew and step the clock with it.
	wall func(time.Time) time.Time
}

// NewMiddleware returns a Middleware for c, which it copies. The error joins
// one [*ConfigError] for every field that cannot be used.
func NewMiddleware(c MiddlewareConfig) (*Middleware, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	m := &Middleware{cfg: c, metrics: c.Metrics.service(c.Service), made: true}
	now := time.Now()
	if c.RetryBudget != nil {
		m.retries = newBudget(*c.RetryBudget, now)
	}
	m.limit = newLimiter(c.Limit, c.ReportOnly, now)
	return m, nil
}

var errZeroMiddleware = errors.New("stint: Middleware was not made with stint.NewMiddleware")

// Handler returns a handler that passes requests on to next with the deadline
// in their context.
//
// A request that arrives too late is answered 504 with the headers
// X-Deadline-Expired: 1 and X-Should-Retry: false; next is not called. The
// answer is written from a clean header map: what layers outside have set for
// next's answer is not sent with it. It is application/problem+json for
// clients that accept JSON, else text. An unusable deadline header is answered
// 400 in the same way where RejectInvalid is set.
//
// next runs on the calling goroutine, unless MiddlewareConfig.HardStop is set.
// The deadline ends its context; it does not interrupt a Read of the request's
// body or a Write, and a handler that ignores its context runs on. When next
// returns after the deadline without having answered, the answer is that 504.
// What next has answered stands: any of WriteHeader, Write, WriteString,
// ReadFrom, Flush and Hijack is an answer, an informational status (1xx) other
// than 101 is not. A client that has left is sent nothing. A
// [net/http/httputil.ReverseProxy] answers 502 when its call ends at the
// deadline, unless its ErrorHandler writes nothing where the context of the
// request itself, not the error, is past its deadline: then that, too, is the
// 504. An error that is a timeout of the transport's own it has to answer itself,
// as net/http makes a 200 of an answer that was never written.
//
// When next answers 502, 503 or 504 after calls that it made through a
// [Transport] failed in a way that retries from above can only multiply, the
// answer is marked X-Should-Retry: false.
//
// A request to switch protocols (Connection: upgrade, or CONNECT) has its
// deadline checked on arrival, and its context is left without it: the
// deadline is for the handshake. Calls that the handler makes keep to it until
// the connection is hijacked or, for CONNECT, until the answer begins. An
// offer of h2c is no such request, since HTTP clients attach one to everything.
// Other streams, such as server-sent events, honour a deadline that the client
// chose to send.
//
// The response writer offers exactly the optional interfaces of the one it
// wraps, and Unwrap. What http.ResponseController can do it does, also where a
// layer outside hides it behind an Unwrap of its own. An answer that is written
// to a writer further below is not seen. [http.MaxBytesReader] knows net/http's
// own writer by an unexported method and does not close the connection behind any
// other: put [http.MaxBytesHandler] outside. Panics of next pass through.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	if m == nil || !m.made {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, errZeroMiddleware.Error(), http.StatusInternalServerError)
		})
	}
	if next == nil {
		panic("stint: Middleware.Handler: nil handler")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
}

// Adopt is the decision of [Middleware.Handler] without the handler, for
// routers of another shape and for tests. It counts the request, and returns it
// with the adopted deadline in its context. Call the cancel function when the
// request has been served. The request and the function are never nil.
//
// The error is an [*Error], and the request is not to be served: its Reason is
// ReasonExpired, for a 504, where the deadline has passed, and then
// errors.Is(err, [context.DeadlineExceeded]); or it is ReasonInvalid, for a
// 400, where the header is unusable and RejectInvalid is set. The request
// returned has its deadline all the same. Under ReportOnly there is no error.
//
// Adopt does not see the answer. It counts no status, and for a request to
// switch protocols the calls of the handler keep to the deadline for good; use
// [Detach] for those made after the handshake.
func (m *Middleware) Adopt(r *http.Request) (*http.Request, context.CancelFunc, error) {
	if m == nil || !m.made {
		return r, func() {}, errZeroMiddleware
	}
	if m.cfg.Exempt != nil && m.cfg.Exempt(r) {
		return r, func() {}, nil
	}
	x := m.arrive(r)
	req, cancel := x.arm(r)
	if x.refusal != nil {
		return req, cancel, x.refusal
	}
	return req, cancel, nil
}

// serve is what Handler returns, after the check of its receiver.
func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if m.cfg.Exempt != nil && m.cfg.Exempt(r) {
		next.ServeHTTP(w, r)
		return
	}
	x := m.arrive(r)
	var probed *probeWriter
	if m.cfg.DebugEcho != nil {
		if probed = x.startProbe(w, r); probed != nil {
			w = probed
		}
	}
	if x.refusal == nil {
		x.capRetries()
	}
	if x.refusal == nil {
		x.takeSlot(r)
	}
	if x.refusal != nil {
		now := x.start
		if !x.finished.IsZero() {
			now = x.finished
		}
		x.refuse(w, r, x.refusal.Reason, now)
		if x.left {
			// It may be there after all, and have closed its half of the
			// connection; but it was nobody to answer.
			x.status.Store(0)
		}
		if probed != nil {
			probed.finish(x, r.Method)
		}
		x.served(x)
		return
	}
	req, cancel := x.arm(r)
	defer cancel()
	// Deferred, so that a handler that panics, or ends its goroutine, is counted
	// as well. There is no recover: what panics passes through.
	defer x.served(req.Context())

	// A panic as well goes on to layers, and an HTTP/2 server, that look.
	defer x.handBack(r, req)

	if x.stoppable() {
		x.serveStoppable(w, req, next)
	} else {
		x.serveInline(w, req, next)
	}
	x.returned = true
	x.finish(req.Context())

	switch {
	case x.cut && (x.left || x.answered() && probed == nil) || x.spoiled && probed == nil:
		x.breakOff(w, r)
	case x.exceeded && (!x.answered() || x.cut) && !m.cfg.ReportOnly:
		// What a probed edge had begun to answer has not gone out.
		x.refuse(w, r, ReasonExpired, x.finished)
	}
	switch {
	case probed != nil:
		probed.finish(x, r.Method)
	case x.probe != nil && !x.answered():
		x.probe.mark(w.Header(), http.StatusOK) // net/http answers for a handler that just returns
	}
}

// serveInline runs next on this goroutine.
func (x *exchange) serveInline(w http.ResponseWriter, req *http.Request, next http.Handler) {
	defer x.leaveSlot(true)
	next.ServeHTTP(x.watch(w), req)
}

// handBack sets what net/http, and layers outside, would find in their own
// request without a middleware in between: the server removes the temporary
// files of a form that the handler has parsed, and they read the pattern that
// matched.
func (x *exchange) handBack(r, req *http.Request) {
	if x.cut {
		return // the handler is still using it
	}
	if req.MultipartForm != nil && r.MultipartForm == nil {
		r.MultipartForm = req.MultipartForm
	}
	if r.Pattern != req.Pattern {
		r.Pattern = req.Pattern
	}
}

// An exchange is one request and what becomes of it. It is the context that
// holds the request's arrival: a context.WithValue would be one more
// allocation. It must not hold the response writer, because contexts outlive
// requests.
type exchange struct {
	context.Context // of the request, as it came
	arrival

	m     *Middleware
	start time.Time
	end   time.Time // the deadline in force, with a monotonic reading; zero: none
	// endMS is the same by the clock of whoever set the deadline.
	endMS     int64
	refusal   *Error    // why next is not called
	armed     bool      // the context does not end by end on its own, and is to
	retries   int       // as X-Retry-Count says
	slotSince time.Time // of Limit
	hidden    bool      // ReportOnly inside another middleware, whose arrival goes on to count
	upgrade   bool      // HTTP/1: over once hijacked
	connect   bool      // over once answered

	// Touched by the answer's hooks, which may run on another goroutine: a
	// reverse proxy flushes from a timer.
	status   atomic.Int32 // the first that is an answer; 0: none so far
	hijacked atomic.Bool
	slot     atomic.Bool // has one of Limit
	firm     atomic.Bool // something went out besides what ReadFrom copies

	// Touched by the request's own goroutine alone.
	returned bool // the handler has, neither by panic nor by Goexit
	cut      bool // or it goes on, and was left to itself: HardStop
	spoiled  bool // the connection, on the way there
	body     *guardedBody
	finished time.Time // when it did, in any way
	left     bool      // the client had left by then
	exceeded bool      // counted as out of time
	reason   Reason    // of our own answer
}

func (x *exchange) Value(key any) any {
	if key == (arrivalKey{}) && !x.hidden {
		return &x.arrival
	}
	return x.Context.Value(key)
}

// arrive decides about a request and counts it.
func (m *Middleware) arrive(r *http.Request) *exchange {
	now := time.Now()
	x := &exchange{Context: r.Context(), m: m, start: now}
	header := scanHeader(r.Header)
	x.key = keyOfRequest(&header)
	x.connect = r.Method == http.MethodConnect
	x.upgrade = !x.connect && wantsUpgrade(r)
	state := x.adopt(r, &header, now, m.wallAt(now))

	x.retries = retryCount(&header)
	m.metrics.arrived(x, now, state, x.remaining(now), x.retries > 0)
	if h := m.timeLeft.Load(); h != nil && state.usable() {
		h.record(now, max(0, x.remaining(now)))
	}
	expired := x.expired(now)
	switch {
	case m.cfg.ReportOnly:
	case state.invalid() && m.cfg.RejectInvalid:
		x.refusal = &Error{Reason: ReasonInvalid, Err: fmt.Errorf("%s is unusable (%s)", HeaderDeadline, state)}
		expired = false // one refusal has one reason
	case expired:
		x.refusal = &Error{Reason: ReasonExpired, Err: context.DeadlineExceeded}
	}
	if x.refusal != nil {
		m.metrics.refused(x.refusal.Reason)
	}
	if m.cfg.Hook != nil {
		e := Event{
			Kind: EventArrived, Service: m.cfg.Service,
			DeadlineMS: x.endMS, Remaining: x.remaining(now), Attempt: 1 + x.retries,
		}
		// A request that is too late has an event of its own.
		if x.refusal != nil && !expired {
			e.Reason, e.Err = x.refusal.Reason, x.refusal
		}
		m.cfg.Hook(x, e)
	}
	if expired {
		m.metrics.late(now.Sub(x.end))
		x.outOfTime(now)
	}
	return x
}

// adopt finds the deadline: the earliest of the header's, or else what is
// configured, and of the context's own.
func (x *exchange) adopt(r *http.Request, header *scannedHeader, now, wall time.Time) headerState {
	cfg := &x.m.cfg
	outer := arrivalFrom(x.Context) // of a middleware that this one is inside of
	var d *deadline
	state := stateUntrusted
	if (outer == nil || !outer.distrust) && (cfg.TrustHeader == nil || cfg.TrustHeader(r)) {
		var gross bool
		d, state, gross = readDeadline(header, now, wall, cfg.MaxTimeout, cfg.SkewTolerance)
		if gross {
			x.m.metrics.skewed()
		}
	} else {
		x.distrust = true
		if len(header.lines(HeaderDeadline)) == 0 {
			state = stateAbsent // nothing there to distrust
		}
	}
	if d == nil {
		// The outer deadline goes on to hold, by the number that it came with:
		// one made anew would be by this host's clock, and might be higher than
		// the caller's.
		if inherited := outer.adopted(); inherited != nil {
			c := *inherited
			d = &c
		}
		timeout := cfg.Timeout
		if cfg.TimeoutFor != nil {
			timeout = min(cfg.TimeoutFor(r), cfg.MaxTimeout)
		}
		if timeout > 0 {
			e := now.Add(timeout)
			if d == nil {
				d = &deadline{ms: wallMillis(e, now, wall), e0: e, e: e}
			} else if e.Before(d.e) {
				d.e = e
			}
		}
	}
	if d != nil {
		x.end, x.armed = d.e, true
	}
	// The context's own deadline may be a bare reading of the wall clock, which
	// a step of the clock would make incomparable with ours. As a duration from
	// now, taken once, it is as good as any.
	if own, ok := x.Context.Deadline(); ok {
		if left := own.Sub(now); d == nil || left <= d.e.Sub(now) {
			x.armed = false
			// Far away, the sum could lose its monotonic reading.
			x.end = now.Add(min(left, maxMaxTimeout))
		}
	}
	switch {
	case d != nil:
		d.e = x.end
		x.endMS = d.onWire(d.e)
	case !x.end.IsZero():
		x.endMS = wallMillis(x.end, now, wall)
	}
	if cfg.ReportOnly {
		x.armed, x.hidden = false, outer != nil
		// A proxy copies the header, and its transport would refuse by it what
		// this mode only counts.
		x.reportOnly = true
		return state
	}
	x.deadline = d
	if x.upgrade || x.connect {
		x.armed = false
	}
	return state
}

// arm returns the request with its arrival, and its deadline, in the context.
func (x *exchange) arm(r *http.Request) (*http.Request, context.CancelFunc) {
	if !x.armed {
		return r.WithContext(x), func() {}
	}
	ctx, cancel := context.WithDeadline(x, x.end)
	return r.WithContext(ctx), cancel
}

// remaining returns the time left, negative where the deadline has passed, 0
// where there is none.
func (x *exchange) remaining(now time.Time) time.Duration {
	if x.end.IsZero() {
		return 0
	}
	return x.end.Sub(now)
}

func (x *exchange) expired(now time.Time) bool {
	return !x.end.IsZero() && !now.Before(x.end)
}

func (m *Middleware) wallAt(now time.Time) time.Time {
	if m.wall == nil {
		return now
	}
	return m.wall(now)
}

// answered reports whether the handler has begun to answer.
func (x *exchange) answered() bool { return x.status.Load() != 0 || x.hijacked.Load() }

// finish judges, once and at one moment, what became of the request's time. ctx
// is the handler's. Where the client left first, it is not the deadline that
// ended the request, however late it is by now.
func (x *exchange) finish(ctx context.Context) {
	if !x.finished.IsZero() {
		return
	}
	x.finished = time.Now()
	switch err := ctx.Err(); {
	case x.over.Load():
		// The deadline was for the handshake.
	case errors.Is(err, context.DeadlineExceeded):
		x.outOfTime(x.finished)
	case err != nil:
		x.left = true
	case x.expired(x.finished):
		// The context's timer is a moment behind, or there is none: upgrades,
		// ReportOnly.
		x.outOfTime(x.finished)
	}
}

// outOfTime counts and reports, once, that the deadline has passed.
func (x *exchange) outOfTime(now time.Time) {
	if x.exceeded {
		return
	}
	x.exceeded = true
	x.m.metrics.exceeded()
	x.m.noteForDebug(x, now)
	if x.m.cfg.Hook != nil {
		x.m.cfg.Hook(x, Event{
			Kind: EventExpired, Reason: ReasonExpired, Service: x.m.cfg.Service,
			DeadlineMS: x.endMS, Remaining: x.remaining(now), Took: now.Sub(x.start),
		})
	}
}

// noteForDebug remembers a request that is out of time, for DebugHandler.
func (m *Middleware) noteForDebug(x *exchange, now time.Time) {
	e := expiry{at: now, took: now.Sub(x.start), late: now.Sub(x.end)}
	m.expiries.add(e)
	if e.took == 0 {
		m.tooLate.Add(1) // after it is in the sum, so that the part is never seen to be the larger
	}
}

// served counts how the request ended. ctx is the handler's.
func (x *exchange) served(ctx context.Context) {
	if x.refusal == nil {
		x.finish(ctx)
	}
	now := time.Now()
	status := int(x.status.Load())
	code := status
	switch {
	case x.hijacked.Load():
		code = codeHijacked
	case status != 0:
	case !x.returned:
		// net/http drops the connection; a layer outside that recovers will
		// most likely answer this.
		code = http.StatusInternalServerError
	case x.left:
		code = codeClientGone
	default:
		// net/http sends it for a handler that just returns.
		status = http.StatusOK
		code = status
	}
	x.earn(now, code)
	x.m.metrics.answered(code)
	if x.m.cfg.Hook != nil {
		x.m.cfg.Hook(x, Event{
			Kind: EventServed, Reason: x.reason, Service: x.m.cfg.Service,
			DeadlineMS: x.endMS, Remaining: x.remaining(now), Took: now.Sub(x.start), Status: status,
		})
	}
}

// answer notes the first status that is an answer, and reports whether this is
// it.
func (x *exchange) answer(code int) bool {
	if x.connect {
		x.over.Store(true)
		x.leaveSlot(true)
	}
	return x.status.Load() == 0 && x.status.CompareAndSwap(0, int32(code))
}

// tookOver notes that the handler has hijacked the connection.
func (x *exchange) tookOver() {
	x.hijacked.Store(true)
	x.over.Store(true)
	x.leaveSlot(true)
}

// A snoop is a set of hooks that are bound to an exchange while the writer is
// wrapped and at no other time. httpsnoop asks for functions that make the
// hooks; made anew for each request, these alone would be seven allocations.
type snoop struct {
	x     *exchange
	w     http.ResponseWriter
	hooks httpsnoop.Hooks
}

var snoops = sync.Pool{New: func() any { return newSnoop() }}

// watch returns w with the hooks that see an answer begin.
func (x *exchange) watch(w http.ResponseWriter) http.ResponseWriter {
	// The guard is told before an answer begins, whatever begins it, as the hooks
	// are not: early enough to set a header.
	if hides(w) || x.probe != nil {
		return (&guard{x: x, w: w, header: w.Header(), inline: true}).writer()
	}
	s := snoops.Get().(*snoop)
	s.x, s.w = x, w
	wrapped := httpsnoop.Wrap(w, s.hooks)
	s.x, s.w = nil, nil
	snoops.Put(s)
	return wrapped
}

// newSnoop makes the hooks, one for every method by which an answer begins.
// FlushError and WriteString need theirs although httpsnoop falls back to Flush
// and Write: for FlushError it would ask for a new Flush hook at every call,
// when the snoop is long bound to another exchange, and for WriteString it
// would copy the string.
func newSnoop() *snoop {
	s := new(snoop)
	s.hooks = httpsnoop.Hooks{
		WriteHeader: func(next httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc {
			x, w := s.x, s.w
			return func(code int) {
				x.writeHeader(w, code)
				next(code)
			}
		},
		Write: func(next httpsnoop.WriteFunc) httpsnoop.WriteFunc {
			x := s.x
			return func(b []byte) (int, error) {
				x.answer(http.StatusOK)
				x.firm.Store(true)
				return next(b)
			}
		},
		WriteString: func(next httpsnoop.WriteStringFunc) httpsnoop.WriteStringFunc {
			x := s.x
			return func(str string) (int, error) {
				x.answer(http.StatusOK)
				x.firm.Store(true)
				return next(str)
			}
		},
		ReadFrom: func(next httpsnoop.ReadFromFunc) httpsnoop.ReadFromFunc {
			x := s.x
			return func(src io.Reader) (int64, error) {
				first := x.answer(http.StatusOK)
				n, err := next(src)
				if first && n == 0 && !x.firm.Load() {
					// A source that has nothing to give, for instance because the
					// deadline cut it off, has not made net/http send a header.
					x.status.CompareAndSwap(http.StatusOK, 0)
				}
				return n, err
			}
		},
		Flush: func(next httpsnoop.FlushFunc) httpsnoop.FlushFunc {
			x := s.x
			return func() {
				x.answer(http.StatusOK)
				x.firm.Store(true)
				next()
			}
		},
		FlushError: func(next httpsnoop.FlushErrorFunc) httpsnoop.FlushErrorFunc {
			x := s.x
			return func() error {
				x.answer(http.StatusOK)
				x.firm.Store(true)
				return next()
			}
		},
		Hijack: func(next httpsnoop.HijackFunc) httpsnoop.HijackFunc {
			x := s.x
			return func() (net.Conn, *bufio.ReadWriter, error) {
				conn, rw, err := next()
				if err == nil {
					x.tookOver()
				}
				return conn, rw, err
			}
		},
	}
	return s
}

// writeHeader comes before every WriteHeader of the handler.
func (x *exchange) writeHeader(w http.ResponseWriter, code int) {
	if code < 200 && code != http.StatusSwitchingProtocols || code > 999 {
		// Informational: the answer is yet to come. Or no status at all, and
		// net/http panics.
		return
	}
	if !x.answer(code) {
		return // superfluous: net/http ignores it
	}
	if x.probe != nil {
		x.probe.mark(w.Header(), code)
	}
	switch code {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		if x.note.set() && !x.m.cfg.ReportOnly {
			w.Header().Set(HeaderShouldRetry, "false")
		}
	}
}

// refuse writes our own answer: 504 for ReasonExpired, 400 for ReasonInvalid, or
// else 503. w is the writer as it came, to which nothing has been written.
func (x *exchange) refuse(w http.ResponseWriter, r *http.Request, reason Reason, now time.Time) {
	code, body := http.StatusGatewayTimeout, []byte(nil)
	problem := wantsProblem(r.Header)
	switch {
	case reason != ReasonExpired:
		code = http.StatusServiceUnavailable
		if reason == ReasonInvalid {
			code = http.StatusBadRequest
		}
		// The error names the header and why, and shows nothing of its value.
		detail := x.refusal.Err.Error()
		if problem {
			body = fmt.Appendf(nil, `{"type":"about:blank","title":%q,"status":%d,"detail":%q}`+"\n", http.StatusText(code), code, detail)
		} else {
			body = append([]byte(detail), '\n')
		}
	default:
		// All three, so that a client can tell its own clock's error: late by
		// this server's reckoning, and what its clock shows.
		nowMS := x.m.wallAt(now).UnixMilli()
		late := max(0, -x.remaining(now).Milliseconds())
		if problem {
			body = fmt.Appendf(nil, `{"type":"about:blank","title":"Gateway Timeout","status":504,"detail":"deadline exceeded",`+
				`"deadline_ms":%d,"now_ms":%d,"late_by_ms":%d}`+"\n", x.endMS, nowMS, late)
		} else {
			body = fmt.Appendf(nil, "deadline exceeded: late by %d ms\n", late)
		}
	}

	h := w.Header()
	// What was set for another answer (Content-Encoding, ETag, Set-Cookie, a
	// Content-Length) would make this one wrong or unreadable.
	clear(h)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if problem {
		h.Set("Content-Type", "application/problem+json")
	}
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	// Set here and not left to net/http, which does not know it for HEAD.
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set(HeaderShouldRetry, "false")
	switch code {
	case http.StatusGatewayTimeout:
		h.Set(HeaderDeadlineExpired, "1")
	case http.StatusServiceUnavailable:
		markShed(h, reason)
	}
	if x.probe != nil {
		x.probe.mark(h, code)
	}
	x.reason = reason
	x.status.Store(int32(code))
	releaseBody(w, r, x.body)
	w.WriteHeader(code)
	if r.Method != http.MethodHead {
		w.Write(body) // an error means that the client has gone
	}
}

// releaseBody prepares for an answer that comes before the request's body has
// been read. On HTTP/1, net/http reads up to 256 KiB of it before it sends a
// header, for clients that do not listen before they have sent everything, and
// it waits for them as long as they like. So a body that is as good as here is
// read, and the connection kept; any other costs the connection.
//
// HTTP/2 has no such problem, and Connection: close would end the connection
// with all its other requests. sealed is what a handler that still runs sees of
// the body, or nil.
func releaseBody(w http.ResponseWriter, r *http.Request, sealed *guardedBody) {
	if !readable(r) {
		return
	}
	rc := http.NewResponseController(w)
	// To read would be to ask for the body where the client waits for leave to
	// send it (RFC 9110, section 10.1.1).
	expects := strings.EqualFold(strings.TrimSpace(r.Header.Get("Expect")), "100-continue")
	if sealed.interrupt(w) {
		// Somebody was reading, and waiting for more. What is left is not ours.
	} else if limit := time.Now().Add(drainTime); !expects && r.ContentLength <= drainBytes && rc.SetReadDeadline(limit) == nil {
		// One byte more than allowed, so as to see the end of a body that is
		// just as long as that.
		_, err := io.CopyN(io.Discard, r.Body, drainBytes+1)
		// A handler has closed it: net/http then neither waits nor reads.
		if err == io.EOF || errors.Is(err, http.ErrBodyReadAfterClose) {
			// A handler may have read to the end long before, in which case our
			// deadline hangs over the read described above. It is safe if it
			// was lifted in time.
			if rc.SetReadDeadline(time.Time{}) == nil && time.Now().Before(limit) {
				return
			}
		}
	}
	w.Header().Set("Connection", "close")
	// After the answer net/http reads on, lest the client's system throw the
	// answer away with a reset. This bounds for how long. Not in the past, which
	// would lose answers in just that way. EnableFullDuplex is not the way out:
	// it makes the server panic here (golang/go#68560).
	rc.SetReadDeadline(time.Now().Add(lingerTime))
}

// readable reports whether a read deadline can be set for the sake of the
// request's body. On HTTP/1 without one, net/http is reading already, to see the
// client leave. A deadline that fires in that read cancels this request and
// every later one of the connection (golang/go#70834). After the body's end it
// does too, which cannot be told here.
func readable(r *http.Request) bool {
	return r.ProtoMajor == 1 && r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0
}

// wantsProblem reports whether an error in JSON (RFC 9457) is welcome: it, or
// JSON in general, is named in Accept. The */* of curl and browsers is not
// enough, a person may be reading.
func wantsProblem(h http.Header) bool {
	for _, line := range h["Accept"] {
		for member := range strings.SplitSeq(line, ",") {
			name, params, _ := strings.Cut(member, ";")
			switch strings.ToLower(strings.Trim(name, " \t")) {
			case "application/problem+json", "application/json", "application/*":
				if weight(params) > 0 {
					return true
				}
			}
		}
	}
	return false
}

// weight returns the quality value among the parameters of a media range, 1 where
// there is no usable one. 0 is not acceptable (RFC 9110, section 12.4.2).
func weight(params string) float64 {
	for p := range strings.SplitSeq(params, ";") {
		name, value, _ := strings.Cut(p, "=")
		if strings.EqualFold(strings.Trim(name, " \t"), "q") {
			if q, err := strconv.ParseFloat(strings.Trim(value, " \t"), 64); err == nil && q >= 0 && q <= 1 {
				return q
			}
			break
		}
	}
	return 1
}

// wantsUpgrade reports whether r asks to switch protocols (RFC 9110, section
// 7.8) to one that ends HTTP on the connection. h2c is none: it is HTTP, it has
// been withdrawn (RFC 9113, section 3.1), and clients such as curl --http2 and
// Java's offer it with every request, which must not cost all of them their
// deadline.
func wantsUpgrade(r *http.Request) bool {
	if r.ProtoMajor != 1 || r.ProtoMinor < 1 || len(r.Header["Upgrade"]) == 0 || !hasMember(r.Header["Connection"], "upgrade") {
		return false
	}
	for _, line := range r.Header["Upgrade"] {
		for member := range strings.SplitSeq(line, ",") {
			if p := strings.Trim(member, " \t"); p != "" && !strings.EqualFold(p, "h2c") {
				return true
			}
		}
	}
	return false
}

// hasMember reports whether a list-valued header has a member, in any letter
// case.
func hasMember(lines []string, want string) bool {
	for _, line := range lines {
		for member := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.Trim(member, " \t"), want) {
				return true
			}
		}
	}
	return false
}

// retryCount returns what X-Retry-Count says, 0 where it says nothing usable.
func retryCount(h *scannedHeader) int {
	lines := h.lines(HeaderRetryCount)
	if len(lines) != 1 {
		return 0
	}
	n, _ := parseMember(strings.Trim(lines[0], " \t"))
	return int(min(n, maxRetryCount))
}

// keyOfRequest returns the request's idempotency key. Of two lines neither is
// believed, they could be of two operations.
func keyOfRequest(h *scannedHeader) string {
	if !h.key {
		return ""
	}
	lines, others := h.lines(HeaderIdempotencyKey), h.lines(headerXIdempotencyKey)
	if len(lines)+len(others) != 1 {
		return ""
	}
	var key string
	if len(lines) == 1 {
		key = lines[0]
	} else {
		key = others[0]
	}
	key, _ = idemkey.Parse(key)
	return key
}
