package stint

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// What an exit path is run with. Each row of the table is run with all of them:
// what ends a request must leave nothing behind, whatever it was holding.
type exitVariant struct {
	held    bool          // answers are of unknown length, so that a waiting retry holds them open
	body    bool          // the request has a body that can be sent again
	timeout time.Duration // Config.Timeout: a context is derived for the request
	attempt time.Duration // Config.AttemptTimeout: one is derived for each attempt
}

func (v exitVariant) String() string {
	return fmt.Sprintf("held=%v,body=%v,timeout=%v,attempt=%v", v.held, v.body, v.timeout, v.attempt)
}

// Far away: rows that are about time set nearer ones.
const (
	exitTimeout = time.Hour
	exitAttempt = time.Minute
)

func exitVariants() (all []exitVariant) {
	for _, held := range []bool{false, true} {
		for _, body := range []bool{false, true} {
			for _, timeout := range []time.Duration{0, exitTimeout} {
				for _, attempt := range []time.Duration{0, exitAttempt} {
					all = append(all, exitVariant{held, body, timeout, attempt})
				}
			}
		}
	}
	return all
}

// An exitStep is what the base does in one attempt.
type exitStep func(x *exitRun, r *http.Request) (*http.Response, error)

// An exitPath is one way out of RoundTrip, and what is to be seen of it.
type exitPath struct {
	name    string
	only    func(exitVariant) bool // nil: all variants
	leaves  bool                   // the base never closes the request's body, and it is the base's
	method  string                 // "": PUT with a body, GET without
	config  func(*Config)
	opts    Override
	prepare func(x *exitRun) // before RoundTrip, with x.tr, x.peer and x.req
	steps   []exitStep       // in turn, the last one for ever

	timeout time.Duration // the context's
	cancel  time.Duration // when the caller leaves; negative: before RoundTrip
	ends    bool          // the caller's context is over when RoundTrip returns

	attempts int
	unseen   int     // of them, by the base
	turns    int     // spent; -1: attempts - 1
	reason   Reason  // "": none
	outcome  outcome // "": RoundTrip ends before it counts anything
	status   int     // of the answer; 0: an error
	cut      bool    // the answer's body ends in an error
	panics   any     // what RoundTrip panics with
	after    time.Duration
	timed    bool          // RoundTrip takes exactly after
	linger   time.Duration // how long the base goes on afterwards

	same  error   // the error is this very value
	is    []error // errors.Is
	isNot []error
	own   bool // it is an *Error
	late  bool // Timeout()
	check func(error) bool
}

// An exitRun is one run of one exit path, and the base of its transport.
type exitRun struct {
	t      *testing.T
	path   *exitPath
	tr     *Transport
	peer   *peer
	req    *http.Request
	cancel context.CancelFunc
	start  time.Time

	mu       sync.Mutex
	bodies   []*trackedBody // of the request: the caller's, and one for each GetBody
	answers  []*exitAnswer
	contexts []context.Context // as the base got them
	variant  exitVariant
}

// An exitAnswer is an answer's body. It is written to and closed by several
// goroutines where a timer closes it.
type exitAnswer struct {
	io.Reader
	closes atomic.Int32
	closed chan struct{}
}

func (a *exitAnswer) Close() error {
	if a.closes.Add(1) == 1 {
		close(a.closed)
	}
	return nil
}

const exitText = "an answer"

// answer returns an answer that the run keeps an eye on.
func (x *exitRun) answer(code int, header ...string) *http.Response {
	return x.answerOf(code, strings.NewReader(exitText), header...)
}

func (x *exitRun) answerOf(code int, r io.Reader, header ...string) *http.Response {
	resp := answer(code, exitText, header...)
	a := &exitAnswer{Reader: r, closed: make(chan struct{})}
	resp.Body = a
	if x.variant.held {
		resp.ContentLength = -1
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.answers = append(x.answers, a)
	return resp
}

func (x *exitRun) body() *trackedBody {
	b := &trackedBody{Reader: strings.NewReader("the request's body")}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.bodies = append(x.bodies, b)
	return b
}

// RoundTrip is the base. Before it does what the path says, it looks at what the
// attempts before this one have left.
func (x *exitRun) RoundTrip(r *http.Request) (*http.Response, error) {
	x.mu.Lock()
	n := len(x.contexts)
	x.contexts = append(x.contexts, r.Context())
	if r.Body != nil && r.Body != http.NoBody {
		for i, b := range x.bodies[:len(x.bodies)-1] {
			if got := b.closes.Load(); got != 1 {
				x.t.Errorf("attempt %d begins, the body of attempt %d was closed %d times", n+1, i+1, got)
			}
		}
	}
	for i, a := range x.answers {
		if got := a.closes.Load(); got != 1 {
			x.t.Errorf("attempt %d begins, answer %d was closed %d times", n+1, i+1, got)
		}
	}
	for i, ctx := range x.contexts[:n] {
		if x.variant.attempt > 0 && ctx.Err() == nil {
			x.t.Errorf("attempt %d begins, the context of attempt %d is alive", n+1, i+1)
		}
	}
	if got := x.peer.held.Load(); got != 0 && n > 0 {
		x.t.Errorf("attempt %d begins, %d answers are held", n+1, got)
	}
	if left := r.Header[HeaderTimeout]; len(left) > 0 {
		if ms, err := strconv.Atoi(left[0]); err != nil || ms < 1 {
			x.t.Errorf("attempt %d begins with %q ms left", n+1, left[0])
		}
	}
	if d, ok := r.Context().Deadline(); ok && n > 0 && !time.Now().Before(d) {
		x.t.Errorf("attempt %d begins %v after the deadline", n+1, time.Since(d))
	}
	x.mu.Unlock()
	steps := x.path.steps
	return steps[min(n, len(steps)-1)](x, r)
}

// consume reads the request's body and closes it, as a base has to.
func consume(r *http.Request) error {
	if r.Body == nil {
		return nil
	}
	_, err := io.Copy(io.Discard, r.Body)
	r.Body.Close()
	return err
}

func gives(code int, header ...string) exitStep {
	return func(x *exitRun, r *http.Request) (*http.Response, error) {
		consume(r)
		return x.answer(code, header...), nil
	}
}

func fails(err error) exitStep {
	return func(x *exitRun, r *http.Request) (*http.Response, error) {
		consume(r)
		return nil, err
	}
}

// hangs waits for the answer's headers, for ever.
func hangs(x *exitRun, r *http.Request) (*http.Response, error) {
	consume(r)
	return hang(r)
}

// stalls sends half of the body and then no more.
func stalls(x *exitRun, r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		r.Body.Read(make([]byte, 3))
		defer r.Body.Close()
	}
	return hang(r)
}

// breaks is lost in the middle of the body.
func breaks(err error) exitStep {
	return func(x *exitRun, r *http.Request) (*http.Response, error) {
		if r.Body != nil {
			r.Body.Read(make([]byte, 3))
			r.Body.Close()
		}
		return nil, err
	}
}

// A watchedContext counts what contexts derived from it have registered and not
// undone. The context package asks a parent that is not its own for AfterFunc;
// so this one hides that it is.
type watchedContext struct {
	context.Context
	registered *atomic.Int32
	err        error // what Err says, in place of context.Canceled
}

func (w watchedContext) Value(key any) any {
	if _, internal := key.(*int); internal {
		return nil // the context package's own key
	}
	return w.Context.Value(key)
}

func (w watchedContext) Err() error {
	if err := w.Context.Err(); err == nil || w.err == nil {
		return err
	}
	return w.err
}

func (w watchedContext) AfterFunc(f func()) func() bool {
	w.registered.Add(1)
	var once sync.Once
	stop := context.AfterFunc(w.Context, func() {
		once.Do(func() { w.registered.Add(-1) })
		f()
	})
	return func() bool {
		stopped := stop()
		if stopped {
			once.Do(func() { w.registered.Add(-1) })
		}
		return stopped
	}
}

// snapshot returns a function that says which of the request's fields are other
// than now.
func snapshot(req *http.Request) (changed func() []string) {
	before := *req
	deep := req.Clone(context.Background())
	return func() (names []string) {
		was, is, cloned := reflect.ValueOf(before), reflect.ValueOf(*req), reflect.ValueOf(*deep)
		for i := range was.NumField() {
			f := was.Type().Field(i)
			a, b, c := was.Field(i), is.Field(i), cloned.Field(i)
			same := true
			switch kind := f.Type.Kind(); {
			case !f.IsExported():
				same = fmt.Sprint(a) == fmt.Sprint(b)
			case kind == reflect.Func, kind == reflect.Chan:
				same = a.Pointer() == b.Pointer()
			case kind == reflect.Map:
				same = a.Pointer() == b.Pointer() && reflect.DeepEqual(b.Interface(), c.Interface())
			case kind == reflect.Slice:
				same = reflect.DeepEqual(b.Interface(), c.Interface())
			case f.Name == "URL":
				same = a.Pointer() == b.Pointer() && reflect.DeepEqual(b.Interface(), c.Interface())
			default:
				same = a.Equal(b)
			}
			if !same {
				names = append(names, f.Name)
			}
		}
		return names
	}
}

// run runs one path once.
func (p *exitPath) run(t *testing.T, v exitVariant, client bool) { p.runWith(t, v, client, nil) }

// runWith lets change adjust the configuration last.
func (p *exitPath) runWith(t *testing.T, v exitVariant, client bool, change func(*Config)) {
	x := &exitRun{t: t, path: p, variant: v, start: time.Now()}
	metrics := newTestMetrics(t)
	cfg := Config{Base: x, Timeout: v.timeout, AttemptTimeout: v.attempt, Metrics: metrics}
	if p.config != nil {
		p.config(&cfg)
	}
	if change != nil {
		change(&cfg)
	}
	x.variant.attempt = cfg.AttemptTimeout // as the row has it
	x.tr = newTestTransport(t, cfg)
	x.tr.jitter = func() float64 { return .5 }
	if p.outcome != "" || p.panics != nil {
		x.peer = x.tr.peers.enter("peer.test:80", time.Now())
		x.tr.peers.leave(x.peer, time.Now())
	}

	var result Outcome
	opts := p.opts
	opts.Outcome = &result
	ctx, cancel := context.WithCancel(WithOverride(context.Background(), opts))
	defer cancel()
	if p.timeout != 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, p.timeout)
		defer stop()
	}
	var registered atomic.Int32
	watched := watchedContext{Context: ctx, registered: &registered}

	method := p.method
	if method == "" {
		method = "GET"
		if v.body {
			method = "PUT"
		}
	}
	req := newRequest(t, watched, method, "http://peer.test/path", nil)
	if v.body {
		req.Body = x.body()
		req.ContentLength = -1
		req.GetBody = func() (io.ReadCloser, error) { return x.body(), nil }
	}
	req.Header["X-Mine"] = []string{"a", "b"}
	req.Header[HeaderRetryCount] = []string{"7"} // of a proxy's caller
	req.Trailer = http.Header{"X-Trailer": nil}
	x.req, x.cancel = req, cancel
	if p.prepare != nil {
		p.prepare(x)
		req = x.req
	}
	changed := snapshot(req)
	switch {
	case p.cancel < 0:
		cancel()
	case p.cancel > 0:
		time.AfterFunc(p.cancel, cancel)
	}
	taken := x.turns()

	var resp *http.Response
	var err error
	func() {
		defer func() {
			got := recover()
			if got != p.panics {
				panic(got)
			}
		}()
		if client {
			resp, err = (&http.Client{Transport: x.tr}).Do(req)
		} else {
			resp, err = x.tr.RoundTrip(req)
		}
	}()
	took := time.Since(x.start)
	if names := changed(); len(names) > 0 && !client {
		t.Errorf("the caller's request was changed: %v", names)
	}
	if p.timed && took != p.after {
		t.Errorf("RoundTrip took %v, want %v", took, p.after)
	}
	if p.panics == nil && (resp == nil) == (err == nil) {
		t.Fatalf("response %v and error %v: want exactly one", resp, err)
	}
	if p.status == 0 && resp != nil || p.status != 0 && (resp == nil || resp.StatusCode != p.status) {
		t.Fatalf("response %+v and error %v, want status %d", resp, err, p.status)
	}

	if resp != nil {
		x.takeAnswer(resp)
	} else if p.panics == nil {
		p.checkError(t, err, client)
	}
	time.Sleep(p.linger)
	synctest.Wait()

	x.mu.Lock()
	for i, ctx := range x.contexts {
		derived := x.derived() || i == 0 && x.hedgeable()
		if derived && p.status != 101 && ctx.Err() == nil {
			t.Errorf("the context of attempt %d is alive", i+1)
		}
		if !derived && !p.ends && ctx.Err() != nil {
			t.Errorf("the context of attempt %d, which is the caller's, is over", i+1)
		}
	}
	for i, b := range x.bodies {
		if got := b.closes.Load(); got != 1 && !p.leaves {
			t.Errorf("the request's body %d of %d was closed %d times", i+1, len(x.bodies), got)
		}
	}
	for i, a := range x.answers {
		if got := a.closes.Load(); got != 1 {
			t.Errorf("answer %d of %d was closed %d times", i+1, len(x.answers), got)
		}
	}
	attempts := len(x.contexts)
	x.mu.Unlock()
	if got := registered.Load(); got != 0 {
		t.Errorf("%d contexts are still tied to the caller's", got)
	}
	cancel()

	if attempts != p.attempts-p.unseen {
		t.Errorf("%d attempts, want %d", attempts, p.attempts)
	}
	x.checkAccounts(metrics, taken, result)
}

// hedgeable reports whether the first attempt has a context of its own, as there
// may be a hedge.
func (x *exitRun) hedgeable() bool {
	c := &x.tr.cfg
	return c.Hedge.on() && c.Timeout == 0 && x.path.timeout == 0 && c.MaxAttempts > 1 && x.path.opts.MaxAttempts != 1 &&
		idempotent(x.req.Method) && len(x.req.Header["Upgrade"]) == 0 && replayable(x.req)
}

// derived reports whether attempts have a context that is not the caller's.
func (x *exitRun) derived() bool {
	limit := x.tr.cfg.Timeout
	bodiless := x.path.method == "POST" && !x.variant.body // so that net/http's resends can be ended
	return bodiless || x.variant.attempt > 0 || limit > 0 && (x.path.timeout == 0 || limit < x.path.timeout)
}

// takeAnswer does with an answer what a caller does.
func (x *exitRun) takeAnswer(resp *http.Response) {
	t, p := x.t, x.path
	x.mu.Lock()
	last := x.contexts[len(x.contexts)-1]
	x.mu.Unlock()
	if p.timeout == 0 && p.cancel == 0 && x.variant.attempt > 0 && p.status != 101 {
		time.Sleep(2 * x.variant.attempt) // AttemptTimeout must not cut the body
	}
	bodyless := resp.Body == http.NoBody || p.status == 101
	if !bodyless && !p.ends && !p.cut && last.Err() != nil {
		t.Errorf("the attempt's context ended before its answer was read: %v", context.Cause(last))
	}
	if resp.Request == nil || resp.Request.URL == nil || resp.Request.URL.Host != "peer.test" {
		t.Errorf("Response.Request is %+v", resp.Request)
	} else if err := resp.Request.Context().Err(); err != nil && !p.ends {
		t.Errorf("the context of Response.Request: %v", err)
	}
	if p.status == 101 {
		if _, ok := resp.Body.(io.Writer); !ok {
			t.Errorf("%T is not writable", resp.Body)
		}
		resp.Body.Close()
		return
	}
	// Half of the variants read, the others throw the answer away.
	if x.variant.body == x.variant.held || p.cut {
		b, err := io.ReadAll(resp.Body)
		if (err != nil) != p.cut || !bodyless && !p.cut && string(b) != exitText {
			t.Errorf("read %q, %v", b, err)
		}
		if x.derived() && !bodyless && last.Err() == nil {
			t.Error("the attempt's context is alive after the end of its answer")
		}
	}
	if err := resp.Body.Close(); err != nil {
		t.Errorf("closing the answer: %v", err)
	}
}

// checkError checks that the error says who ended the request and why.
func (p *exitPath) checkError(t *testing.T, err error, client bool) {
	t.Helper()
	inner := err
	if client {
		var u *url.Error
		if !errors.As(err, &u) {
			t.Fatalf("http.Client returned %T", err)
		}
		if inner = u.Err; u.Timeout() != p.late {
			t.Errorf("Timeout() of %v (%T) is %v through *url.Error", inner, inner, u.Timeout())
		}
	} else if timeout, ok := err.(interface{ Timeout() bool }); (ok && timeout.Timeout()) != p.late {
		t.Errorf("Timeout() of %v (%T) is not %v", err, err, p.late)
	}
	if p.same != nil && inner != p.same {
		t.Errorf("%v (%T) is not the base's own error", inner, inner)
	}
	own, ok := inner.(*Error)
	if ok != p.own {
		t.Errorf("%v is a %T", inner, inner)
	}
	if ok && (own.Reason != p.reason || own.Attempts != p.attempts || own.Peer != "peer.test:80" || own.Err == nil) {
		t.Errorf("%#v", own)
	}
	for _, target := range p.is {
		if !errors.Is(err, target) {
			t.Errorf("%v is not %v", err, target)
		}
	}
	for _, target := range p.isNot {
		if errors.Is(err, target) {
			t.Errorf("%v is %v", err, target)
		}
	}
	if p.check != nil && !p.check(err) {
		t.Errorf("unexpected: %v (%#v)", err, inner)
	}
}

// total adds up what is counted, whatever its slot.
func total(s *slotCounts) (n uint64) {
	for i := range s {
		n += uint64(uint32(s[i].Load()))
	}
	return n
}

func (x *exitRun) turns() uint64 {
	if x.peer == nil {
		return 0
	}
	b := x.peer.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	return total(&b.retries)
}

// checkAccounts checks what budget, metrics and Outcome say.
func (x *exitRun) checkAccounts(metrics *Metrics, taken uint64, result Outcome) {
	t, p := x.t, x.path
	t.Helper()
	s, _ := scrape(t, metrics)
	if p.outcome == "" {
		if got := s.sum("stint_client_outcomes_total") + s.sum("stint_refused_total") + s.sum("http_client_requests_total"); got != 0 {
			t.Errorf("counted: %v", s)
		}
		if x.tr.base != nil {
			if x.tr.peers.byName.Range(func(any, any) bool { t.Error("a peer was made"); return false }); result != (Outcome{}) {
				t.Errorf("outcome %+v", result)
			}
		}
		return
	}
	if got := x.peer.inflight.Load(); got != 0 {
		t.Errorf("%d requests count as in flight", got)
	}
	if got := x.peer.held.Load(); got != 0 && p.reason != ReasonHeld || got > maxHeld {
		t.Errorf("%d answers count as held", got)
	}
	turns := p.turns
	if turns < 0 {
		turns = max(0, p.attempts-1)
	}
	if got := x.turns() - taken; got != uint64(turns) {
		t.Errorf("%d turns were spent, want %d", got, turns)
	}
	one := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	if got := float64(total(&x.peer.budget.requests)); got != one(p.attempts > 0) {
		t.Errorf("the budget counted %v requests", got)
	}
	if got := float64(total(&x.peer.budget.successes)); got != one(p.outcome == outcomeOK) {
		t.Errorf("the budget counted %v successes, outcome %q", got, p.outcome)
	}
	const peer = `{peer="peer.test:80"}`
	s.check(t, "http_client_requests_total"+peer, float64(p.attempts))
	s.check(t, "stint_client_retries_total"+peer, float64(max(0, p.attempts-1)))
	s.check(t, "stint_client_retry_successes_total"+peer, one(p.outcome == outcomeOK && p.attempts > 1))
	s.check(t, "stint_attempts_per_success_count"+peer, one(p.outcome == outcomeOK))
	s.check(t, fmt.Sprintf(`stint_client_outcomes_total{outcome=%q,peer="peer.test:80"}`, p.outcome), 1)
	if got := s.sum("stint_client_outcomes_total"); got != 1 {
		t.Errorf("%v outcomes: %v", got, s.with("outcome="))
	}
	if got := s.sum("stint_refused_total"); got != one(p.reason != "") {
		t.Errorf("%v refusals", got)
	}
	if p.reason != "" {
		s.check(t, fmt.Sprintf(`stint_refused_total{peer="peer.test:80",reason=%q}`, p.reason), 1)
	}
	s.check(t, "retry_budget_exhausted_total"+peer, one(p.reason == ReasonBudget || p.reason == ReasonTurn))
	s.check(t, `deadline_exceeded_total{peer="peer.test:80",side="client"}`, one(p.reason == ReasonDeadline))
	result.Key = ""
	if want := (Outcome{Attempts: p.attempts, Reason: p.reason}); result != want {
		t.Errorf("outcome %+v, want %+v", result, want)
	}
}

// Helpers of the table.

func withBody(v exitVariant) bool { return v.body }
func isHeld(v exitVariant) bool   { return v.held }
func isKept(v exitVariant) bool   { return !v.held }

// stream makes the request's body one that cannot be sent again.
func stream(x *exitRun) { x.req.GetBody = nil }

// takesTurn has another request take the next free turn after d.
func takesTurn(d time.Duration) func(*exitRun) {
	return func(x *exitRun) {
		take := func() { x.peer.budget.take(time.Now(), time.Time{}) }
		if d == 0 {
			take()
		} else {
			time.AfterFunc(d, take)
		}
	}
}

// slows makes the peer one whose good answers take a minute, after d.
func slows(d time.Duration) func(*exitRun) {
	return func(x *exitRun) {
		time.AfterFunc(d, func() {
			for range DefaultMinSamples {
				x.peer.latency.get("").record(time.Now(), time.Minute)
			}
		})
	}
}

// A slowReader hands out one byte, and then waits for its answer to be closed.
func (x *exitRun) trickle(code int) *http.Response {
	r := new(trickleReader)
	resp := x.answerOf(code, r)
	r.closed = resp.Body.(*exitAnswer).closed
	return resp
}

type trickleReader struct {
	n      int
	closed chan struct{}
}

func (r *trickleReader) Read(p []byte) (int, error) {
	if r.n++; r.n == 1 {
		p[0] = exitText[0]
		return 1, nil
	}
	<-r.closed
	return 0, errors.New("closed")
}

// A writableBody is the body of a 101.
type writableBody struct{ *exitAnswer }

func (writableBody) Write(p []byte) (int, error) { return len(p), nil }

// exitPaths is every way out of RoundTrip.
func exitPaths() []exitPath {
	var (
		lost        = &sentinel{"connection lost"}
		broken      = &sentinel{"disk on fire"}
		unavailable = gives(503)
		long        = func(c *Config) { c.Backoff = Backoff{Base: 10 * time.Second, Max: 10 * time.Second} } // waits 5 s
		quick       = func(c *Config) { c.Backoff = Backoff{Base: 2, Max: 2} }
		canceled    = []error{context.Canceled}
		exceeded    = []error{context.DeadlineExceeded}
	)
	const backoff = DefaultBackoffBase / 2
	retryIn := func(seconds int) exitStep { return gives(503, "Retry-After", strconv.Itoa(seconds)) }

	paths := []exitPath{
		// Answers.
		{name: "200", steps: []exitStep{gives(200)}, attempts: 1, outcome: outcomeOK, status: 200, timed: true},
		{name: "404", steps: []exitStep{gives(404)}, attempts: 1, outcome: outcomeOK, status: 404, timed: true},
		{name: "500", steps: []exitStep{gives(500)}, attempts: 1, outcome: outcomeOK, status: 500, timed: true},
		{name: "answer without a body", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			resp := answer(204, "")
			resp.Body = http.NoBody
			return resp, nil
		}}, attempts: 1, outcome: outcomeOK, status: 204},
		{name: "upgrade", method: "GET", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			resp := x.answer(101)
			resp.Body = writableBody{resp.Body.(*exitAnswer)}
			return resp, nil
		}}, attempts: 1, outcome: outcomeOK, status: 101},
		{name: "503, 200", steps: []exitStep{unavailable, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200, timed: true, after: backoff},
		{name: "503, 503, 200", steps: []exitStep{unavailable, unavailable, gives(200)}, attempts: 3, turns: -1, outcome: outcomeOK, status: 200},
		{name: "lost, 200", steps: []exitStep{fails(lost), gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		{name: "lost in the body, 200", steps: []exitStep{breaks(lost), gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		{name: "503, lost, 404", steps: []exitStep{unavailable, fails(lost), gives(404)}, attempts: 3, turns: -1, outcome: outcomeOK, status: 404},
		{name: "answer before the body is read, 200", only: func(v exitVariant) bool { return !v.held || !v.body }, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			return x.answer(503), nil // and never closes the body
		}, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		// A long answer may need the upload to go on: that is not ended for a retry.
		{name: "long answer before the body is read", only: func(v exitVariant) bool { return v.held && v.body }, leaves: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			return x.answer(503), nil // and never closes the body
		}}, attempts: 1, reason: ReasonNotReplayable, outcome: outcomeError, status: 503, timed: true, after: backoff + bodyPatience},
		{name: "base in Read of the body, 200", only: withBody, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			go func() {
				consume(r)
			}()
			return x.answer(503), nil
		}, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		{name: "resend of the base's own, 200", only: withBody, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			r.Body.Close()
			again, err := r.GetBody()
			if err != nil {
				return nil, err
			}
			r.Body = again
			consume(r)
			return x.answer(200), nil
		}}, attempts: 1, outcome: outcomeOK, status: 200},

		{name: "resend of the base's own, left open, 200", only: func(v exitVariant) bool { return !v.held && v.body }, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			r.Body.Close()
			if _, err := r.GetBody(); err != nil {
				return nil, err
			}
			return x.answer(503), nil
		}, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},

		// Refusals, in the order in which they are asked.
		{name: "held back", config: func(c *Config) { c.Throttle = true }, prepare: func(x *exitRun) {
			for range minThrottled {
				x.peer.throttle.failures.add(x.peer.budget.epoch(time.Now()))
			}
			x.tr.jitter = func() float64 { return 0 }
		}, reason: ReasonThrottle, outcome: outcomeRefused, own: true, isNot: []error{context.Canceled, context.DeadlineExceeded}, timed: true},
		{name: "attempts, 503", steps: []exitStep{unavailable}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError, status: 503},
		{name: "attempts, lost", steps: []exitStep{fails(lost)}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError, same: lost},
		{name: "attempts, 503 then lost", steps: []exitStep{unavailable, fails(lost)}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError, same: lost},
		{name: "one attempt, 503", opts: Override{MaxAttempts: 1}, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError, status: 503, timed: true},
		{name: "one attempt, lost", opts: Override{MaxAttempts: 1}, steps: []exitStep{breaks(lost)}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError, same: lost, timed: true},
		{name: "stream, 503", only: withBody, prepare: stream, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonNotReplayable, outcome: outcomeError, status: 503, timed: true},
		{name: "stream, lost", only: withBody, prepare: stream, steps: []exitStep{breaks(lost)}, attempts: 1, reason: ReasonNotReplayable, outcome: outcomeError, same: lost, timed: true},
		{name: "stream, 200", only: withBody, prepare: stream, steps: []exitStep{gives(200)}, attempts: 1, outcome: outcomeOK, status: 200},
		{name: "POST, 503", method: "POST", steps: []exitStep{unavailable}, attempts: 1, reason: ReasonNotIdempotent, outcome: outcomeError, status: 503, timed: true},
		{name: "POST, lost", method: "POST", steps: []exitStep{breaks(lost)}, attempts: 1, reason: ReasonNotIdempotent, outcome: outcomeError, same: lost, timed: true},
		{name: "told not to", steps: []exitStep{gives(503, HeaderShouldRetry, "false")}, attempts: 1, reason: ReasonToldNotTo, outcome: outcomeError, status: 503, timed: true},
		{name: "hint too long", steps: []exitStep{retryIn(3600)}, attempts: 1, reason: ReasonRetryAfter, outcome: outcomeRefused, status: 503, timed: true},
		{name: "no time for a retry, 503", timeout: 2 * time.Second, steps: []exitStep{retryIn(5)}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503, timed: true},
		{name: "no time for a retry, lost", timeout: 2 * time.Second, config: long, steps: []exitStep{fails(lost)}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, same: lost, timed: true},
		{name: "slow, 503", prepare: func(x *exitRun) {
			for range DefaultMinSamples {
				x.peer.latency.get("").ended(time.Now(), true)
			}
		}, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonSlow, outcome: outcomeRefused, status: 503, timed: true},
		{name: "budget, 503", prepare: spendsBudget(0), steps: []exitStep{unavailable}, attempts: 1, reason: ReasonBudget, outcome: outcomeRefused, status: 503, timed: true},
		{name: "budget, lost", prepare: spendsBudget(0), steps: []exitStep{fails(lost)}, attempts: 1, reason: ReasonBudget, outcome: outcomeRefused, same: lost, timed: true},
		{name: "budget spent in backoff, 503", config: long, prepare: spendsBudget(time.Second), steps: []exitStep{unavailable}, attempts: 1, turns: 3, reason: ReasonBudget, outcome: outcomeRefused, status: 503, timed: true, after: 5 * time.Second},
		{name: "budget spent in backoff, lost", config: long, prepare: spendsBudget(time.Second), steps: []exitStep{fails(lost)}, attempts: 1, turns: 3, reason: ReasonBudget, outcome: outcomeRefused, same: lost, timed: true, after: 5 * time.Second},
		{name: "turn, 503", config: func(c *Config) { c.Budget.MaxWait = -1 }, prepare: takesTurn(0), steps: []exitStep{unavailable}, attempts: 1, reason: ReasonTurn, outcome: outcomeRefused, status: 503, timed: true},
		{name: "turn taken in backoff, 503", config: func(c *Config) { c.Budget.MaxWait = -1 }, prepare: takesTurn(backoff / 2), steps: []exitStep{unavailable}, attempts: 1, turns: 1, reason: ReasonTurn, outcome: outcomeRefused, status: 503, timed: true, after: backoff},
		{name: "turn taken in backoff, lost", config: func(c *Config) { c.Budget.MaxWait = -1 }, prepare: takesTurn(backoff / 2), steps: []exitStep{fails(lost)}, attempts: 1, turns: 1, reason: ReasonTurn, outcome: outcomeRefused, same: lost},
		{name: "turn too late for the deadline", timeout: time.Second, prepare: takesTurn(0), steps: []exitStep{unavailable}, attempts: 1, reason: ReasonTurn, outcome: outcomeRefused, status: 503, timed: true},
		{name: "peer slows down in backoff", timeout: 10 * time.Second, config: long, prepare: slows(time.Second), steps: []exitStep{unavailable}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503, timed: true, after: 5 * time.Second},
		{name: "peer slows down while waiting for a turn", timeout: 10 * time.Second, prepare: func(x *exitRun) { takesTurn(0)(x); slows(time.Second / 2)(x) }, steps: []exitStep{unavailable}, attempts: 1, turns: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503, timed: true, after: 1050 * time.Millisecond},
		{name: "held", only: isHeld, prepare: func(x *exitRun) { x.peer.held.Store(maxHeld) }, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonHeld, outcome: outcomeRefused, status: 503, timed: true},
		{name: "held does not concern small answers", only: isKept, prepare: func(x *exitRun) {
			x.peer.held.Store(maxHeld)
			time.AfterFunc(time.Millisecond, func() { x.peer.held.Store(0) })
		}, steps: []exitStep{unavailable, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		{name: "GetBody fails, 503", only: withBody, prepare: func(x *exitRun) {
			x.req.GetBody = func() (io.ReadCloser, error) { return nil, broken }
		}, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonNotReplayable, outcome: outcomeError, status: 503, timed: true, after: backoff},
		{name: "GetBody fails, lost", only: withBody, prepare: func(x *exitRun) {
			x.req.GetBody = func() (io.ReadCloser, error) { return nil, broken }
		}, steps: []exitStep{fails(lost)}, attempts: 1, reason: ReasonNotReplayable, outcome: outcomeError, same: lost},
		{name: "base stays in Read of the body", only: withBody, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			begun := make(chan struct{})
			go func() {
				close(begun)
				consume(r)
			}()
			<-begun
			return x.answer(503), nil
		}}, prepare: func(x *exitRun) {
			x.bodies[0].Reader = readFunc(func([]byte) (int, error) {
				time.Sleep(time.Second)
				return 0, io.EOF
			})
		}, attempts: 1, turns: 0, reason: ReasonNotReplayable, outcome: outcomeError, status: 503, timed: true, after: backoff + bodyPatience, linger: time.Second},

		// Errors.
		{name: "certificate", steps: []exitStep{fails(x509.UnknownAuthorityError{})}, attempts: 1, outcome: outcomeError, check: func(err error) bool {
			return errors.As(err, new(x509.UnknownAuthorityError))
		}, timed: true},
		{name: "not worth a retry", config: func(c *Config) { c.RetryError = func(err error) bool { return err != lost } }, steps: []exitStep{fails(lost)}, attempts: 1, outcome: outcomeError, same: lost, timed: true},
		{name: "scheme", steps: []exitStep{fails(http.ErrSkipAltProtocol)}, attempts: 1, outcome: outcomeError, same: http.ErrSkipAltProtocol, timed: true},
		{name: "caller's body fails", only: withBody, prepare: func(x *exitRun) {
			x.bodies[0].Reader = io.MultiReader(strings.NewReader("some"), readFunc(func([]byte) (int, error) { return 0, broken }))
		}, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) { return nil, consume(r) }}, attempts: 1, outcome: outcomeError, same: broken, timed: true},
		{name: "attempt timeout", config: func(c *Config) { c.AttemptTimeout = time.Second }, opts: Override{MaxAttempts: 1}, steps: []exitStep{hangs}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError,
			own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "attempt timeout in the request's body", config: func(c *Config) { c.AttemptTimeout = time.Second }, opts: Override{MaxAttempts: 1}, steps: []exitStep{stalls}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError,
			own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "attempt timeout, all attempts", config: func(c *Config) { c.AttemptTimeout = time.Second }, steps: []exitStep{stalls, hangs}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError,
			own: true, late: true, is: exceeded, isNot: canceled},
		{name: "attempt timeout, 200", config: func(c *Config) { c.AttemptTimeout = time.Second }, steps: []exitStep{stalls, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200, timed: true, after: time.Second + backoff},
		{name: "attempt timeout reported as a cancel", config: func(c *Config) { c.AttemptTimeout = time.Second }, opts: Override{MaxAttempts: 1}, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return nil, context.Canceled
		}}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError, own: true, late: true, is: exceeded, isNot: canceled},
		{name: "attempt timeout as the headers come, 200", config: func(c *Config) { c.AttemptTimeout = time.Second }, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return x.answer(200), nil
		}, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		{name: "attempt timeout as the headers come, last attempt", config: func(c *Config) { c.AttemptTimeout = time.Second }, opts: Override{MaxAttempts: 1}, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return x.answer(200), nil
		}}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError, own: true, late: true, is: exceeded, isNot: canceled},

		// The caller leaves.
		{name: "cancel before", cancel: -1, ends: true, steps: []exitStep{hangs}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, is: canceled, isNot: exceeded, timed: true},
		{name: "cancel during send", cancel: time.Second, ends: true, steps: []exitStep{stalls}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, is: canceled, isNot: exceeded, timed: true, after: time.Second},
		{name: "cancel during headers", cancel: time.Second, ends: true, steps: []exitStep{hangs}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, is: canceled, isNot: exceeded, timed: true, after: time.Second},
		{name: "cancel during headers, other error", cancel: time.Second, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return nil, lost
		}}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: []error{context.Canceled, lost}, isNot: exceeded},
		{name: "cancel during headers of a retry", cancel: time.Second, ends: true, steps: []exitStep{unavailable, hangs}, attempts: 2, turns: -1, reason: ReasonCanceled, outcome: outcomeCanceled, is: canceled, isNot: exceeded, timed: true, after: time.Second},
		{name: "cancel as a 200 comes", cancel: time.Second, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return x.answer(200), nil
		}}, attempts: 1, outcome: outcomeOK, status: 200},
		{name: "cancel as a 503 comes", cancel: time.Second, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return x.answer(503), nil
		}}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, status: 503},
		{name: "cancel during the body", cancel: time.Second, ends: true, cut: true, steps: []exitStep{cutByContext}, attempts: 1, outcome: outcomeOK, status: 200},
		{name: "cancel in backoff, 503", config: long, cancel: time.Second, ends: true, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, isNot: exceeded,
			check: func(err error) bool { return errors.As(err, new(statusError)) }, timed: true, after: time.Second},
		{name: "cancel in backoff, lost", config: long, cancel: time.Second, ends: true, steps: []exitStep{fails(lost)}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: []error{context.Canceled, lost}, isNot: exceeded, timed: true, after: time.Second},
		{name: "cancel before a backoff of nothing", config: quick, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			x.tr.jitter = func() float64 { x.cancel(); time.Sleep(time.Nanosecond); return 0 }
			return x.answer(503), nil
		}}, ends: true, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, isNot: exceeded, timed: true, after: 1},
		{name: "cancel in backoff, attempt timeout", config: func(c *Config) { long(c); c.AttemptTimeout = time.Second }, cancel: 2 * time.Second, ends: true, steps: []exitStep{hangs}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, timed: true, after: 2 * time.Second},
		{name: "cancel waiting for a turn, 503", prepare: takesTurn(0), cancel: time.Second / 2, ends: true, steps: []exitStep{unavailable}, attempts: 1, turns: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, isNot: exceeded, timed: true, after: time.Second / 2},
		{name: "cancel waiting for a turn, lost", prepare: takesTurn(0), cancel: time.Second / 2, ends: true, steps: []exitStep{fails(lost)}, attempts: 1, turns: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: []error{context.Canceled, lost}, isNot: exceeded, timed: true, after: time.Second / 2},
		{name: "cancel while an answer is read into memory", only: isKept, cancel: 20 * time.Millisecond, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return x.trickle(503), nil
		}}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, timed: true, after: bodyPatience},
		{name: "cancel while the base is in Read of the body", only: withBody, config: quick, cancel: bodyPatience / 2, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			begun := make(chan struct{})
			go func() {
				close(begun)
				consume(r)
			}()
			<-begun
			return x.answer(503), nil
		}}, prepare: func(x *exitRun) {
			x.bodies[0].Reader = readFunc(func([]byte) (int, error) {
				time.Sleep(time.Second)
				return 0, io.EOF
			})
		}, attempts: 1, turns: 0, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, isNot: exceeded, timed: true, after: bodyPatience / 2, linger: time.Second},
		{name: "Request.Cancel in backoff", config: long, prepare: legacyCancel(time.Second), steps: []exitStep{unavailable}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, own: true, is: canceled, isNot: exceeded, timed: true, after: time.Second},
		{name: "Request.Cancel during headers", prepare: legacyCancel(time.Second), steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			//lint:ignore SA1019 what is tested
			<-r.Cancel
			return nil, lost
		}}, attempts: 1, reason: ReasonCanceled, outcome: outcomeCanceled, same: lost, timed: true, after: time.Second},

		// The deadline passes.
		{name: "deadline before", timeout: -time.Second, ends: true, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true},
		{name: "less than a millisecond for the peer", timeout: DefaultReserve + time.Millisecond - 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true},
		{name: "deadline during send", timeout: time.Second, ends: true, steps: []exitStep{stalls}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "deadline during headers", timeout: time.Second, ends: true, steps: []exitStep{hangs}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "deadline during headers of a retry", timeout: time.Second, ends: true, steps: []exitStep{unavailable, hangs}, attempts: 2, turns: -1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "lost as the deadline passes", timeout: time.Second, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			time.Sleep(time.Second - DefaultReserve)
			consume(r)
			return nil, lost
		}}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: []error{context.DeadlineExceeded, lost}, isNot: canceled},
		{name: "503 as the deadline passes", timeout: time.Second, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			time.Sleep(time.Second - DefaultReserve)
			return unavailable(x, r)
		}}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503},
		{name: "503 as the deadline passes, last attempt", timeout: time.Second, opts: Override{MaxAttempts: 1}, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			time.Sleep(time.Second - DefaultReserve)
			return unavailable(x, r)
		}}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503},
		{name: "the peer's 504 for the deadline", timeout: time.Second, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			time.Sleep(time.Second - DefaultReserve - minSkew + 2*time.Millisecond) // a little early
			return gives(504, HeaderDeadlineExpired, "1", HeaderShouldRetry, "false")(x, r)
		}}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 504},
		{name: "200 after the deadline", timeout: time.Second, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			time.Sleep(5 * time.Second) // whatever its context says
			return x.answer(200), nil
		}}, attempts: 1, outcome: outcomeOK, status: 200, timed: true, after: 5 * time.Second},
		{name: "503 after the deadline", timeout: time.Second, ends: true, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			time.Sleep(5 * time.Second)
			return x.answer(503), nil
		}}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503, timed: true, after: 5 * time.Second},
		{name: "our own deadline during headers", config: func(c *Config) { c.Timeout = time.Second }, steps: []exitStep{hangs}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "deadline during the body", timeout: time.Second, ends: true, cut: true, steps: []exitStep{cutByContext}, attempts: 1, outcome: outcomeOK, status: 200},
		{name: "our own deadline during the body", config: func(c *Config) { c.Timeout = time.Second }, cut: true, steps: []exitStep{cutByContext}, attempts: 1, outcome: outcomeOK, status: 200},
		{name: "a deadline that the context did not announce, in backoff", config: long, prepare: unannounced, cancel: time.Second, ends: true, steps: []exitStep{unavailable}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: time.Second},
		{name: "a deadline that the context did not announce, waiting for a turn", prepare: func(x *exitRun) { unannounced(x); takesTurn(0)(x) }, cancel: time.Second / 2, ends: true, steps: []exitStep{fails(lost)}, attempts: 1, turns: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: []error{context.DeadlineExceeded, lost}, isNot: canceled, timed: true, after: time.Second / 2},
		{name: "deadline while an answer is read into memory", only: isKept, timeout: 40 * time.Millisecond, ends: true, config: quick, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return x.trickle(503), nil
		}}, attempts: 1, reason: ReasonDeadline, outcome: outcomeDeadline, own: true, late: true, is: exceeded, isNot: canceled, timed: true, after: bodyPatience},
		// A turn is free until 4 ms before the deadline; draining may take 20 ms.
		{name: "deadline while an answer is drained", only: isHeld, timeout: 10 * time.Millisecond, config: quick, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return x.trickle(503), nil
		}, gives(200)}, attempts: 2, turns: -1, outcome: outcomeOK, status: 200},
		{name: "deadline while the base is in Read of the body", only: withBody, timeout: 10 * time.Millisecond, config: quick, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			begun := make(chan struct{})
			go func() {
				close(begun)
				consume(r)
			}()
			<-begun
			return x.answer(503), nil
		}}, prepare: func(x *exitRun) {
			x.bodies[0].Reader = readFunc(func([]byte) (int, error) {
				time.Sleep(8 * time.Millisecond)
				return 0, io.EOF
			})
		}, attempts: 1, turns: 0, reason: ReasonDeadline, outcome: outcomeDeadline, status: 503, timed: true, after: 8 * time.Millisecond},

		// A base that breaks its contract.
		{name: "neither answer nor error", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return nil, nil
		}}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError},
		{name: "answer and error", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return x.answer(200), lost
		}}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError, same: lost},
		{name: "nil body, header and request", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return &http.Response{StatusCode: 200, ContentLength: 5}, nil
		}}, attempts: 1, outcome: outcomeOK, status: 200},
		{name: "nil body of an answer to retry", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			return &http.Response{StatusCode: 503, ContentLength: 5}, nil
		}}, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError, status: 503},
		{name: "nil body as the attempt times out", config: func(c *Config) { c.AttemptTimeout = time.Second }, opts: Override{MaxAttempts: 1}, steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			hangs(x, r)
			return &http.Response{StatusCode: 200}, nil
		}}, attempts: 1, reason: ReasonAttempts, outcome: outcomeError, own: true, late: true, is: exceeded, isNot: canceled},
		{name: "body closed by an answer twice", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			if r.Body != nil {
				r.Body.Close()
			}
			return x.answer(503), nil
		}}, only: func(v exitVariant) bool { return v.body }, attempts: 3, turns: -1, reason: ReasonAttempts, outcome: outcomeError, status: 503},

		// Panics. What passes through is the base's own value.
		{name: "panic", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			consume(r)
			panic(http.ErrAbortHandler)
		}}, attempts: 1, outcome: outcomeError, panics: http.ErrAbortHandler},
		{name: "panic during send", steps: []exitStep{func(x *exitRun, r *http.Request) (*http.Response, error) {
			if r.Body != nil {
				r.Body.Read(make([]byte, 3))
			}
			panic(http.ErrAbortHandler)
		}}, attempts: 1, outcome: outcomeError, panics: http.ErrAbortHandler},
		{name: "panic in a retry", steps: []exitStep{unavailable, func(x *exitRun, r *http.Request) (*http.Response, error) {
			panic(http.ErrAbortHandler)
		}}, attempts: 2, turns: -1, outcome: outcomeError, panics: http.ErrAbortHandler},
		{name: "panic in GetBody", only: withBody, prepare: func(x *exitRun) {
			x.req.GetBody = func() (io.ReadCloser, error) { panic(http.ErrAbortHandler) }
		}, steps: []exitStep{unavailable}, attempts: 1, outcome: outcomeError, panics: http.ErrAbortHandler},
		{name: "panic in RetryStatus", config: func(c *Config) { c.RetryStatus = func(int) bool { panic(http.ErrAbortHandler) } }, steps: []exitStep{unavailable}, attempts: 1, outcome: outcomeError, panics: http.ErrAbortHandler},

		// Before anything begins.
		{name: "invalid override", opts: Override{MaxAttempts: -1}, check: func(err error) bool { return errors.As(err, new(*ConfigError)) }},
		{name: "zero Transport", prepare: func(x *exitRun) { *x.tr = Transport{} }, same: errZeroTransport},
	}
	for _, kind := range []EventKind{EventAttemptSent, EventAttemptDone, EventRetry, EventRefused, EventDone} {
		p := exitPath{
			name: "panic in the hook, " + string(kind), steps: []exitStep{unavailable}, opts: Override{MaxAttempts: 2}, outcome: outcomeError, panics: http.ErrAbortHandler,
			config: func(c *Config) {
				c.Hook = func(_ context.Context, e Event) {
					if e.Kind == kind {
						panic(http.ErrAbortHandler)
					}
				}
			},
			attempts: 1,
		}
		switch kind {
		case EventAttemptSent:
			// It counts as sent, though the base has not seen it.
			p.steps, p.unseen = nil, 1
			once := p
			once.name += ", body not guarded"
			once.opts.MaxAttempts = 1
			paths = append(paths, once)
		case EventRefused, EventDone:
			p.attempts, p.turns, p.reason = 2, 1, ReasonAttempts
		}
		paths = append(paths, p)
	}
	return paths
}

// cutByContext gives a 200 whose body ends with the attempt's context.
func cutByContext(x *exitRun, r *http.Request) (*http.Response, error) {
	consume(r)
	return x.answerOf(200, readFunc(func([]byte) (int, error) {
		<-r.Context().Done()
		return 0, context.Cause(r.Context())
	})), nil
}

// spendsBudget has others spend all that the floor allows, after d.
func spendsBudget(d time.Duration) func(*exitRun) {
	return func(x *exitRun) {
		spend := func() {
			b := x.peer.budget
			for total(&b.retries) < uint64(b.floor) {
				b.retries.add(b.epoch(time.Now()))
			}
		}
		if d == 0 {
			spend()
		} else {
			time.AfterFunc(d, spend)
		}
	}
}

func legacyCancel(d time.Duration) func(*exitRun) {
	return func(x *exitRun) {
		cancel := make(chan struct{})
		x.req.Cancel = cancel //nolint:staticcheck // http.Client sets it for bases that it does not know
		time.AfterFunc(d, func() { close(cancel) })
	}
}

// unannounced makes the context one that ends as a deadline does and has none.
func unannounced(x *exitRun) {
	w := x.req.Context().(watchedContext)
	w.err = context.DeadlineExceeded
	x.req = x.req.WithContext(w)
}

// TestExitPaths walks every way out of RoundTrip in virtual time. Each time:
// the request's bodies and all answers closed exactly once, in time for the next
// attempt; the caller's request as it was; contexts alive until the answer is
// closed and released then; no goroutine left (the bubble sees to that); nothing
// counted as held or in flight; budget, metrics and Outcome right; the error's
// identity intact, through http.Client as well.
func TestExitPaths(t *testing.T) {
	for _, p := range exitPaths() {
		t.Run(p.name, func(t *testing.T) {
			for _, v := range exitVariants() {
				if p.only != nil && !p.only(v) {
					continue
				}
				t.Run(v.String(), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { p.run(t, v, false) })
					if p.status == 0 && p.panics == nil {
						synctest.Test(t, func(t *testing.T) { p.run(t, v, true) })
					}
				})
			}
		})
	}
}

// TestExitPathsCoverEveryReason keeps the table complete.
func TestExitPathsCoverEveryReason(t *testing.T) {
	reasons, ends := make(map[Reason]bool), make(map[outcome]bool)
	for _, p := range exitPaths() {
		reasons[p.reason], ends[p.outcome] = true, true
	}
	for _, r := range clientReasons {
		if !reasons[r] {
			t.Errorf("no exit path ends with the reason %q", r)
		}
	}
	for _, o := range outcomes {
		if !ends[o] {
			t.Errorf("no exit path ends with the outcome %q", o)
		}
	}
}

// exitServer returns what the paths below ask for.
func exitServer() http.Handler {
	mux := http.NewServeMux()
	var tries atomic.Int32
	reply := func(w http.ResponseWriter, r *http.Request, code, length int, flush bool) {
		w.WriteHeader(code)
		if flush {
			w.(http.Flusher).Flush() // of unknown length
		}
		w.Write(make([]byte, length))
	}
	mux.HandleFunc("/ok", func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
	for name, f := range map[string]struct {
		length int
		flush  bool
	}{"small": {1000, false}, "open": {1000, true}, "long": {maxKept + 1<<20, false}} {
		mux.HandleFunc("/once/"+name, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			if tries.Add(1)%2 == 1 {
				reply(w, r, 503, f.length, f.flush)
			}
		})
		mux.HandleFunc("/always/"+name, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			reply(w, r, 503, f.length, f.flush)
		})
	}
	mux.HandleFunc("/hint/small", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "5")
		reply(w, r, 503, 1000, false)
	})
	mux.HandleFunc("/hint/open", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "5")
		reply(w, r, 503, 1000, true)
	})
	mux.HandleFunc("/expired", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set(HeaderDeadlineExpired, "1")
		ms, _ := strconv.Atoi(r.Header.Get(HeaderTimeout))
		time.Sleep(time.Duration(ms) * time.Millisecond)
		w.WriteHeader(504)
	})
	mux.HandleFunc("/hang", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	return mux
}

// TestExitPathsKeepConnections is the same over real sockets: after each way
// out, the connection serves the next request where it can, on both protocols.
func TestExitPathsKeepConnections(t *testing.T) {
	const rounds = 3
	for _, tt := range []struct {
		path    string
		body    bool
		method  string
		config  Config
		timeout time.Duration // of the context
		cancel  time.Duration
		want    int // status; 0: an error
		h1, h2  int // connections for all rounds, each followed by a plain request; 0: one
	}{
		{path: "/ok", want: 200},
		{path: "/ok", body: true, want: 200},
		{path: "/once/small", want: 200},
		{path: "/once/small", body: true, want: 200},
		{path: "/once/open", want: 200},
		{path: "/once/open", body: true, want: 200},
		// More than is worth reading: HTTP/1.1 has to drop the connection.
		{path: "/once/long", want: 200, h1: rounds + 1},
		{path: "/always/small", want: 503},
		{path: "/always/open", want: 503},
		{path: "/always/small", config: Config{MaxAttempts: 1}, want: 503},
		{path: "/always/small", method: "POST", body: true, want: 503},
		{path: "/always/small", config: Config{Budget: BudgetConfig{MinPerSecond: -1}}, want: 503}, // no credit: budget
		{path: "/always/open", config: Config{Budget: BudgetConfig{MinPerSecond: -1}}, want: 503},
		{path: "/hint/small", timeout: 4 * time.Second, want: 503}, // no time for the retry
		{path: "/hint/small", config: Config{Timeout: 4 * time.Second, AttemptTimeout: 4 * time.Second}, want: 503},
		// The answer was read before the wait: its connection is free.
		{path: "/hint/small", cancel: 100 * time.Millisecond},
		{path: "/hint/open", cancel: 100 * time.Millisecond, h1: rounds + 1},
		// The reserve: the peer's 504 arrives in time, and nothing is cut.
		{path: "/expired", config: Config{Reserve: time.Second}, timeout: 1050 * time.Millisecond, want: 504},
		{path: "/expired", body: true, config: Config{Reserve: time.Second, Timeout: 1050 * time.Millisecond}, want: 504},
		{path: "/hang", timeout: 100 * time.Millisecond, h1: rounds + 1},
		{path: "/hang", config: Config{AttemptTimeout: 100 * time.Millisecond, MaxAttempts: 1}, h1: rounds + 1},
	} {
		for _, h2 := range []bool{false, true} {
			name := fmt.Sprint(tt.path, " h2=", h2, " body=", tt.body, " ", tt.method, " ", tt.config.MaxAttempts, tt.config.Budget.MinPerSecond, tt.config.Timeout, tt.timeout)
			t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) {
				t.Parallel()
				var conns atomic.Int32
				s := httptest.NewUnstartedServer(exitServer())
				s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
					if state == http.StateNew {
						conns.Add(1)
					}
				}
				s.Config.ErrorLog = quiet
				client := startServer(t, s, h2)
				cfg := tt.config
				cfg.Base = client.Transport
				// Long enough for net/http to come out of the request's body: a body
				// that is taken away before costs the connection.
				cfg.Backoff = Backoff{Base: 10 * time.Millisecond, Max: 10 * time.Millisecond}
				if cfg.Budget == (BudgetConfig{}) {
					cfg.Budget.MinPerSecond = 1e4
				}
				tr := newTestTransport(t, cfg)
				tr.jitter = func() float64 { return .9 }
				plain := func() {
					t.Helper()
					ctx := WithOverride(t.Context(), Override{AttemptTimeout: -1})
					resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", s.URL+"/ok", nil))
					if err != nil {
						t.Fatal(err)
					}
					readAll(t, resp)
				}
				plain()
				for range rounds {
					ctx, cancel := context.WithCancel(t.Context())
					if tt.timeout > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), tt.timeout)
					}
					if tt.cancel > 0 {
						time.AfterFunc(tt.cancel, cancel)
					}
					method := tt.method
					var body io.Reader
					if tt.body {
						method, body = cmp.Or(method, "PUT"), strings.NewReader(strings.Repeat("x", 4000))
					}
					resp, err := tr.RoundTrip(newRequest(t, ctx, cmp.Or(method, "GET"), s.URL+tt.path, body))
					switch {
					case err == nil && resp.StatusCode == tt.want:
						readAll(t, resp)
					case err == nil:
						t.Errorf("answer %d", resp.StatusCode)
						resp.Body.Close()
					case tt.want != 0:
						t.Error(err)
					}
					cancel()
					plain()
				}
				want := 1
				if h2 {
					want = max(want, tt.h2)
				} else {
					want = max(want, tt.h1)
				}
				if got := int(conns.Load()); got != want {
					t.Errorf("%d connections, want %d", got, want)
				}
			})
		}
	}
}
