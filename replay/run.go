package replay

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"
)

// A Run is the execution of one keyed request, for stores that can finish it in
// the handler's own transaction. It is safe for concurrent use.
type Run struct {
	Key   [32]byte      // of the record
	Fence int64         // under which it is held
	TTL   time.Duration // how long the answer is to be kept

	encoded atomic.Bool
	forget  atomic.Bool
}

type runKey struct{}

// Running returns the run of the request being served. ok is false where the
// handler runs without one: the request has no key, its method needs none, or
// it runs unprotected.
func Running(ctx context.Context) (run *Run, ok bool) {
	run, ok = ctx.Value(runKey{}).(*Run)
	return run, ok
}

// Fence returns the number under which the request being served holds its key.
// It is greater than that of any run of the same key before. Hand it to
// downstream writes, which refuse a fence that is less than one they have seen
// (UPDATE … SET fence = $1 … WHERE fence <= $1): that alone stops a run that was
// paused, lost its key to another one, and then goes on. ok is as for [Running].
func Fence(ctx context.Context) (fence int64, ok bool) {
	run, ok := Running(ctx)
	if !ok {
		return 0, false
	}
	return run.Fence, true
}

// Forget declares that the request being served has had no effect: whatever
// the handler answers is delivered and not kept, and the next request with the
// key runs. It does nothing without a run, or once the handler has returned.
func Forget(ctx context.Context) {
	if run, ok := Running(ctx); ok {
		run.forget.Store(true)
	}
}

// Encode returns the answer as [Store].Finish is to be given it. It is for a
// store that writes the record inside a transaction of the handler: the
// middleware then looks, when the handler has returned, whether the
// transaction was committed. If so, the answer that was stored is the one that
// is sent, whatever the handler has written.
func (r *Run) Encode(status int, header http.Header, body []byte) []byte {
	r.encoded.Store(true)
	a := answer{
		kind: kindAnswer, fence: r.Fence, status: status, body: body,
		header: difference(nil, header), length: header["Content-Length"] != nil,
	}
	return a.encode()
}

// running is the context of a run.
type running struct {
	context.Context
	run Run
}

func (c *running) Value(key any) any {
	if key == (runKey{}) {
		return &c.run
	}
	return c.Context.Value(key)
}
