package stint

//lint:file-ignore SA1019 http.CloseNotifier is deprecated, and still asked for by handlers

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

const (
	// stopGrace is what an answer that has begun is given after the deadline to
	// end by itself, and a Write that is under way to come back.
	stopGrace = 50 * time.Millisecond
	// bodyGrace is how long a Read of the body that has been interrupted is
	// waited for. From net/http's own bodies it comes back at once.
	bodyGrace = 50 * time.Millisecond
	// copyChunk is what ReadFrom copies under one hold of the lock.
	copyChunk = 32 << 10
)

// stoppable reports whether the handler runs on a goroutine of its own.
func (x *exchange) stoppable() bool {
	// Without a deadline there is nothing to stop at. For a request to switch
	// protocols it is the handshake's alone, and not in the context.
	return x.m.cfg.HardStop && !x.m.cfg.ReportOnly && !x.end.IsZero() && !x.upgrade && !x.connect
}

// serveStoppable runs next on a goroutine of its own and returns when it has
// returned, or when it is cut off from its writer and the body (x.cut). A panic
// of next, and a Goexit, come out here.
func (x *exchange) serveStoppable(w http.ResponseWriter, req *http.Request, next http.Handler) {
	g := &guard{x: x, w: w, readable: readable(req), hadForm: req.MultipartForm != nil, done: make(chan struct{})}
	if header := w.Header(); len(header) > 0 {
		g.header = header.Clone()
	} else {
		g.header = make(http.Header)
	}
	if req.Body != nil && req.Body != http.NoBody {
		g.body.ReadCloser = req.Body
		req.Body = &g.body
	}
	x.body = &g.body
	go g.run(g.writer(), req, next)

	select {
	case <-g.done:
	case <-req.Context().Done():
		// Where it is the client that left, the handler is waited for as it is
		// without HardStop, but not beyond the deadline: a client that has only
		// closed its half of the connection still reads, and looks the same.
		if left := x.remaining(time.Now()); left > 0 {
			t := time.NewTimer(left)
			select {
			case <-g.done:
			case <-t.C:
			}
			t.Stop()
		}
		x.cut = g.stop()
	}
	if x.cut {
		return
	}

	// Trailers, and whatever layers outside look at. The handler has ended: the
	// map can be read, and its values shared.
	if !x.hijacked.Load() {
		header := w.Header()
		clear(header)
		for k, v := range g.header {
			header[k] = v
		}
	}
	switch {
	case g.panicked != nil:
		if g.stack != nil {
			// The server logs the panic with a stack that ends here.
			x.logf("stint: the stack of the handler whose panic follows: %v\n%s", g.panicked, g.stack)
		}
		panic(g.panicked)
	case !g.returned:
		runtime.Goexit()
	}
}

// breakOff ends an answer that has begun, or that nobody waits for, without an
// end. It panics.
func (x *exchange) breakOff(w http.ResponseWriter, r *http.Request) {
	if readable(r) {
		// Before it closes the connection, net/http reads up to 256 KiB of the
		// body and waits for it as long as the client likes.
		x.body.interrupt(w)
		http.NewResponseController(w).SetReadDeadline(longAgo)
	}
	panic(http.ErrAbortHandler)
}

// longAgo is a deadline that interrupts.
var longAgo = time.Unix(1, 0)

// logf writes to where net/http logs a handler's panic.
func (x *exchange) logf(format string, args ...any) {
	if srv, ok := x.Context.Value(http.ServerContextKey).(*http.Server); ok && srv.ErrorLog != nil {
		srv.ErrorLog.Printf(format, args...)
		return
	}
	log.Printf(format, args...)
}

// A guard stands between a handler and its writer, which belongs to the
// server's goroutine again once the handler is cut off: net/http reuses it.
// What the handler does through any method of the writer, it does under a lock,
// and has not been cut off while it does. Its header map is its own until it is
// copied under the same lock.
type guard struct {
	x    *exchange
	w    http.ResponseWriter
	body guardedBody

	readable bool // see there
	hadForm  bool

	mu     sync.Mutex
	state  guardState  // guarded by mu
	header http.Header // the handler's; of ours only read, under mu or when it has ended

	// connMu is held while the connection is hijacked, and while a deadline is
	// set: by the server's goroutine, if it is not the handler's by then, or by
	// a handler that interrupts a Write of its own, which holds mu.
	connMu sync.Mutex
	closed bool // guarded by connMu; the state is not open

	// inline: the handler runs on the server's goroutine and is never cut off.
	// The guard is there to see an answer begin, see watch.
	inline bool

	done chan struct{} // closed when the handler has ended in time
	// How it ended; written before state is.
	returned bool
	panicked any
	stack    []byte // of a panic, unless it is http.ErrAbortHandler
}

type guardState uint8

const (
	guardOpen  guardState = iota
	guardEnded            // the handler is through
	guardCut              // the server's goroutine has gone on without it
)

// run is the handler's goroutine.
func (g *guard) run(w http.ResponseWriter, req *http.Request, next http.Handler) {
	defer g.end(req) // runs for a Goexit as well
	next.ServeHTTP(w, req)
	g.returned = true
}

// end is the last thing on the handler's goroutine.
func (g *guard) end(req *http.Request) {
	if !g.returned {
		// Without this, a panic on this goroutine would end the process.
		if g.panicked = recover(); g.panicked != nil && g.panicked != http.ErrAbortHandler {
			g.stack = debug.Stack()
		}
	}
	g.x.leaveSlot(true) // late or not: until now it was at work
	g.mu.Lock()
	late := g.state == guardCut
	if !late {
		g.closeLocked(guardEnded)
	}
	g.mu.Unlock()
	if !late {
		close(g.done)
		return
	}

	// The server has long finished with the request and does not do this.
	if req.MultipartForm != nil && !g.hadForm {
		req.MultipartForm.RemoveAll()
	}
	if g.stack != nil {
		g.panickedLate()
	}
}

// panickedLate reports the panic of a handler that was cut off.
func (g *guard) panickedLate() {
	x := g.x
	if x.m.cfg.Hook == nil {
		x.logf("stint: panic of a handler after its deadline: %v\n%s", g.panicked, g.stack)
		return
	}
	// Elsewhere a hook that panics is net/http's to recover. Here it would end
	// the process.
	defer func() {
		if v := recover(); v != nil {
			x.logf("stint: panic of a hook: %v\n%s", v, debug.Stack())
		}
	}()
	now := time.Now()
	x.m.cfg.Hook(x, Event{
		Kind: EventPanicked, Service: x.m.cfg.Service,
		DeadlineMS: x.endMS, Remaining: x.remaining(now), Took: now.Sub(x.start),
		Err: &latePanic{value: g.panicked, stack: g.stack},
	})
}

// A latePanic is the error of EventPanicked.
type latePanic struct {
	value any
	stack []byte
}

func (e *latePanic) Error() string {
	return fmt.Sprintf("stint: the handler panicked after its deadline: %v\n%s", e.value, e.stack)
}

func (e *latePanic) Unwrap() error {
	err, _ := e.value.(error)
	return err
}

// stop cuts the handler off, and reports whether it has: not where it has ended
// after all, or has taken the connection over and was waited for.
func (g *guard) stop() bool {
	if g.x.answered() || !g.mu.TryLock() {
		// It has begun, or is about to. What the client has of the answer would
		// be lost, for the sake of a moment: a handler that heeds its context is
		// ending it.
		t := time.NewTimer(stopGrace)
		defer t.Stop()
		select {
		case <-g.done:
			return false
		case <-t.C:
		}
		if !g.mu.TryLock() {
			g.interrupt()
			g.mu.Lock()
		}
	}
	defer g.mu.Unlock()
	if g.x.hijacked.Load() {
		g.mu.Unlock()
		<-g.done
		g.mu.Lock()
	}
	if g.state == guardEnded {
		return false
	}
	g.closeLocked(guardCut)
	return true
}

// closeLocked ends what the handler, and whoever it has left behind, can do.
func (g *guard) closeLocked(s guardState) {
	g.state = s
	g.body.seal()
	g.connMu.Lock()
	defer g.connMu.Unlock()
	g.closed = true
}

// interrupt ends a Write that holds the lock: it waits for a client that does
// not read or, on HTTP/1, for the rest of the request's body, which net/http
// reads before it sends a header.
func (g *guard) interrupt() {
	g.connMu.Lock()
	defer g.connMu.Unlock()
	if g.x.hijacked.Load() {
		return
	}
	g.x.spoiled = true
	rc := http.NewResponseController(g.w)
	rc.SetWriteDeadline(longAgo)
	if g.readable {
		rc.SetReadDeadline(longAgo)
	}
}

// beginLocked comes before every method by which an answer begins, if it does
// not name a status.
func (g *guard) beginLocked() {
	g.publishLocked()
	g.markLocked()
	g.x.answer(http.StatusOK)
}

// markLocked sets the header by which a probed hop reports, if that is still to be
// sent.
func (g *guard) markLocked() {
	if g.x.probe == nil || g.x.answered() {
		return
	}
	g.x.probe.mark(g.w.Header(), http.StatusOK)
	g.keepLocked(HeaderDebugDeadline)
}

// keepLocked keeps a header that we have set on the answer when the handler's map
// is copied once more, at its end: a layer outside may send it only then.
func (g *guard) keepLocked(name string) {
	if v, ok := g.w.Header()[name]; ok {
		g.header[name] = v
	}
}

// publishLocked copies the handler's header map to the writer's, if that is
// still to be sent. The handler goes on to own the values of its map: they are
// copied too.
func (g *guard) publishLocked() {
	if g.inline || g.x.answered() {
		return
	}
	n := 0
	for _, v := range g.header {
		n += len(v)
	}
	header, values := g.w.Header(), make([]string, n)
	clear(header)
	for k, v := range g.header {
		if v == nil {
			header[k] = nil // tells net/http not to add its own
			continue
		}
		n := copy(values, v)
		header[k] = values[:n:n]
		values = values[n:]
	}
}

func (g *guard) Header() http.Header { return g.header }

func (g *guard) WriteHeader(code int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return
	}
	first := !g.x.answered()
	g.publishLocked()
	g.x.writeHeader(g.w, code)
	if first {
		g.keepLocked(HeaderShouldRetry)
		if g.x.probe != nil {
			g.keepLocked(HeaderDebugDeadline)
		}
	}
	g.w.WriteHeader(code)
}

func (g *guard) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return 0, http.ErrHandlerTimeout
	}
	g.beginLocked()
	return g.w.Write(b)
}

func (g *guard) WriteString(s string) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return 0, http.ErrHandlerTimeout
	}
	g.beginLocked()
	return io.WriteString(g.w, s)
}

var copyBuffers = sync.Pool{New: func() any { return new([copyChunk]byte) }}

// ReadFrom reads without the lock and writes piece by piece: a source that
// keeps the handler waiting does not keep the server waiting.
func (g *guard) ReadFrom(src io.Reader) (int64, error) {
	buf := copyBuffers.Get().(*[copyChunk]byte)
	defer copyBuffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{g}, src, buf[:])
}

func (g *guard) Flush() { g.FlushError() }

func (g *guard) FlushError() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return http.ErrHandlerTimeout
	}
	g.publishLocked()
	g.markLocked()
	err := http.NewResponseController(g.w).Flush()
	if !errors.Is(err, http.ErrNotSupported) {
		g.x.answer(http.StatusOK)
	}
	return err
}

func (g *guard) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return nil, nil, http.ErrHandlerTimeout
	}
	g.connMu.Lock()
	defer g.connMu.Unlock()
	conn, rw, err := http.NewResponseController(g.w).Hijack()
	if err == nil {
		g.x.tookOver()
	}
	return conn, rw, err
}

func (g *guard) Push(target string, opts *http.PushOptions) error {
	p, ok := g.w.(http.Pusher)
	if !ok {
		return http.ErrNotSupported
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return http.ErrHandlerTimeout
	}
	return p.Push(target, opts)
}

func (g *guard) CloseNotify() <-chan bool {
	n, ok := g.w.(http.CloseNotifier)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !ok || g.state != guardOpen {
		c := make(chan bool, 1)
		c <- true
		return c
	}
	return n.CloseNotify()
}

func (g *guard) SetReadDeadline(t time.Time) error {
	g.connMu.Lock()
	defer g.connMu.Unlock()
	if g.closed {
		return http.ErrHandlerTimeout
	}
	return http.NewResponseController(g.w).SetReadDeadline(t)
}

func (g *guard) SetWriteDeadline(t time.Time) error {
	g.connMu.Lock()
	defer g.connMu.Unlock()
	if g.closed {
		return http.ErrHandlerTimeout
	}
	return http.NewResponseController(g.w).SetWriteDeadline(t)
}

func (g *guard) EnableFullDuplex() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != guardOpen {
		return http.ErrHandlerTimeout
	}
	return http.NewResponseController(g.w).EnableFullDuplex()
}

// guarded is what the writer of every handler offers. The last four have no name
// in net/http and are for http.ResponseController, which would look for them
// below a writer that has none: where nothing below has them either, they
// return what it would.
type guarded struct{ guardedWriter }

type guardedWriter interface {
	http.ResponseWriter
	io.StringWriter
	FlushError() error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	EnableFullDuplex() error
}

// Unwrap returns what offers everything there may be below, under the same
// guard, and with HardStop never the writer itself.
func (w guarded) Unwrap() http.ResponseWriter {
	if g := w.guardedWriter.(*guard); g.inline {
		return seeing{g}
	}
	return w.guardedWriter
}

// seeing sees an answer begin that is found by unwrapping.
type seeing struct{ *guard }

func (w seeing) Unwrap() http.ResponseWriter { return w.w }

// hides reports whether w stands before a writer that can do more, which
// http.ResponseController would find, and httpsnoop has no hook for.
func hides(w http.ResponseWriter) bool {
	if _, ok := w.(interface{ Unwrap() http.ResponseWriter }); !ok {
		return false
	}
	_, flush := w.(http.Flusher)
	if !flush {
		_, flush = w.(interface{ FlushError() error })
	}
	_, hijack := w.(http.Hijacker)
	return !flush || !hijack
}

// writer returns the handler's writer. Of the interfaces that net/http and io
// have a name for it offers those of the writer below, and io.StringWriter.
func (g *guard) writer() http.ResponseWriter {
	b := guarded{g}
	n := 0
	if _, ok := g.w.(http.Flusher); ok {
		n |= 1
	}
	if _, ok := g.w.(http.Hijacker); ok {
		n |= 2
	}
	if _, ok := g.w.(io.ReaderFrom); ok {
		n |= 4
	}
	if _, ok := g.w.(http.Pusher); ok {
		n |= 8
	}
	if _, ok := g.w.(http.CloseNotifier); ok {
		n |= 16
	}
	return shape(n, b, g)
}

// A guardedBody is the request's body as the handler sees it. It lets go of the
// body below when it is sealed, and knows whether somebody is inside.
type guardedBody struct {
	io.ReadCloser
	mu     sync.Mutex // not held while the body is read
	sealed bool
	users  int
	left   chan struct{} // made by seal if there are users: closed by the last
}

func (b *guardedBody) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sealed {
		return false
	}
	b.users++
	return true
}

func (b *guardedBody) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.users--
	if b.users == 0 && b.left != nil {
		close(b.left)
	}
}

func (b *guardedBody) Read(p []byte) (int, error) {
	if !b.enter() {
		return 0, http.ErrHandlerTimeout
	}
	defer b.leave()
	return b.ReadCloser.Read(p)
}

// Close may read, as net/http's does.
func (b *guardedBody) Close() error {
	if !b.enter() {
		return nil // it is net/http's to close
	}
	defer b.leave()
	return b.ReadCloser.Close()
}

func (b *guardedBody) seal() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.sealed && b.users > 0 {
		b.left = make(chan struct{})
	}
	b.sealed = true
}

// interrupt makes a Read that is under way come back, by a read deadline that
// has passed, and reports whether there was one. Nobody else must read meanwhile.
// To be called when sealed, for an HTTP/1 request that has a body. It costs the
// connection (golang/go#70834).
func (b *guardedBody) interrupt(w http.ResponseWriter) bool {
	if b == nil || b.left == nil {
		return false
	}
	select {
	case <-b.left:
		return false
	default:
	}
	http.NewResponseController(w).SetReadDeadline(longAgo)
	t := time.NewTimer(bodyGrace)
	defer t.Stop()
	// A new deadline set before it has come back would undo this one.
	select {
	case <-b.left:
	case <-t.C:
	}
	return true
}

// shape returns b with the methods of g that n stands for.
func shape(n int, b guarded, g *guard) http.ResponseWriter {
	switch n {
	case 1:
		return struct {
			guarded
			http.Flusher
		}{b, g}
	case 2:
		return struct {
			guarded
			http.Hijacker
		}{b, g}
	case 3:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
		}{b, g, g}
	case 4:
		return struct {
			guarded
			io.ReaderFrom
		}{b, g}
	case 5:
		return struct {
			guarded
			http.Flusher
			io.ReaderFrom
		}{b, g, g}
	case 6:
		return struct {
			guarded
			http.Hijacker
			io.ReaderFrom
		}{b, g, g}
	case 7:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			io.ReaderFrom
		}{b, g, g, g}
	case 8:
		return struct {
			guarded
			http.Pusher
		}{b, g}
	case 9:
		return struct {
			guarded
			http.Flusher
			http.Pusher
		}{b, g, g}
	case 10:
		return struct {
			guarded
			http.Hijacker
			http.Pusher
		}{b, g, g}
	case 11:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			http.Pusher
		}{b, g, g, g}
	case 12:
		return struct {
			guarded
			io.ReaderFrom
			http.Pusher
		}{b, g, g}
	case 13:
		return struct {
			guarded
			http.Flusher
			io.ReaderFrom
			http.Pusher
		}{b, g, g, g}
	case 14:
		return struct {
			guarded
			http.Hijacker
			io.ReaderFrom
			http.Pusher
		}{b, g, g, g}
	case 15:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			io.ReaderFrom
			http.Pusher
		}{b, g, g, g, g}
	case 16:
		return struct {
			guarded
			http.CloseNotifier
		}{b, g}
	case 17:
		return struct {
			guarded
			http.Flusher
			http.CloseNotifier
		}{b, g, g}
	case 18:
		return struct {
			guarded
			http.Hijacker
			http.CloseNotifier
		}{b, g, g}
	case 19:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			http.CloseNotifier
		}{b, g, g, g}
	case 20:
		return struct {
			guarded
			io.ReaderFrom
			http.CloseNotifier
		}{b, g, g}
	case 21:
		return struct {
			guarded
			http.Flusher
			io.ReaderFrom
			http.CloseNotifier
		}{b, g, g, g}
	case 22:
		return struct {
			guarded
			http.Hijacker
			io.ReaderFrom
			http.CloseNotifier
		}{b, g, g, g}
	case 23:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			io.ReaderFrom
			http.CloseNotifier
		}{b, g, g, g, g}
	case 24:
		return struct {
			guarded
			http.Pusher
			http.CloseNotifier
		}{b, g, g}
	case 25:
		return struct {
			guarded
			http.Flusher
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g}
	case 26:
		return struct {
			guarded
			http.Hijacker
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g}
	case 27:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g, g}
	case 28:
		return struct {
			guarded
			io.ReaderFrom
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g}
	case 29:
		return struct {
			guarded
			http.Flusher
			io.ReaderFrom
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g, g}
	case 30:
		return struct {
			guarded
			http.Hijacker
			io.ReaderFrom
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g, g}
	case 31:
		return struct {
			guarded
			http.Flusher
			http.Hijacker
			io.ReaderFrom
			http.Pusher
			http.CloseNotifier
		}{b, g, g, g, g, g}
	}
	return b
}
