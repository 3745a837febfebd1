package stint

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxKept is the longest answer that is read into memory while a retry
	// waits, so that it does not hold its connection.
	maxKept = 16 << 10
	// maxHeld is how many longer answers of one peer waiting retries hold open.
	maxHeld = 64
	// bodyPatience is how long we wait for an answer to be read into memory.
	bodyPatience = 50 * time.Millisecond
	// turnPatience is how long we wait, once a turn has come, for a long answer
	// to be drained, and again for the base to come out of a Read of the
	// request's body. The two together stay within the slack between turns, so
	// that a peer that trickles cannot push retries into one second.
	turnPatience = 20 * time.Millisecond
)

// A requestBodies holds the bodies that one attempt has handed to the base: one,
// and those that net/http gets for resends of its own. net/http may still be
// inside Read of a body when its answer has arrived and was closed, and the next
// attempt's body may share a source with it; so no attempt begins before the
// one before it is sealed. Safe for concurrent use.
type requestBodies struct {
	mu      sync.Mutex
	bodies  []*requestBody // guarded by mu
	reading int            // guarded by mu: Reads that run now
	sealing chan struct{}  // guarded by mu: closed when seal may go on
	sealed  bool           // guarded by mu
	readErr error          // guarded by mu: the first error of the caller's own body
}

func (b *requestBodies) add(rc io.ReadCloser) io.ReadCloser {
	if rc == nil || rc == http.NoBody {
		return rc // net/http compares with NoBody; it has nothing to guard
	}
	body := &requestBody{of: b, rc: rc}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bodies = append(b.bodies, body)
	return body
}

// seal ends the base's use of the bodies: they are closed if the base has not,
// and no Read reaches the caller's reader any more. It waits a moment for a Read
// that runs, and reports false if that does not come back.
func (b *requestBodies) seal(ctx context.Context) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	if b.reading > 0 {
		sealing := make(chan struct{})
		b.sealing = sealing
		b.mu.Unlock()
		patience := time.NewTimer(turnPatience)
		defer patience.Stop()
		select {
		case <-sealing:
		case <-patience.C:
		case <-ctx.Done():
		}
		b.mu.Lock()
		b.sealing = nil
	} else {
		b.sealed = true
	}
	sealed, bodies := b.sealed, b.bodies
	b.mu.Unlock()
	if sealed {
		for _, body := range bodies {
			body.Close()
		}
	}
	return sealed
}

// failed returns the error with which the caller's own body failed, if it did.
func (b *requestBodies) failed() error {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.readErr
}

type requestBody struct {
	of     *requestBodies
	rc     io.ReadCloser
	closed atomic.Bool
}

func (r *requestBody) Read(p []byte) (int, error) {
	b := r.of
	b.mu.Lock()
	if b.sealed || r.closed.Load() {
		b.mu.Unlock()
		return 0, http.ErrBodyReadAfterClose
	}
	b.reading++
	b.mu.Unlock()

	n, err := r.rc.Read(p)

	b.mu.Lock()
	defer b.mu.Unlock()
	b.reading--
	if err != nil && err != io.EOF && b.readErr == nil && !r.closed.Load() {
		b.readErr = err
	}
	if b.reading == 0 && b.sealing != nil && !b.sealed {
		b.sealed = true // here, under the lock: no other Read can begin in between
		close(b.sealing)
	}
	return n, err
}

// Close closes the caller's body once, however often the base does.
func (r *requestBody) Close() error {
	if !r.closed.CompareAndSwap(false, true) {
		return nil
	}
	return r.rc.Close()
}

// closeBody closes the body of a request that is not sent.
func closeBody(req *http.Request) {
	if req != nil && req.Body != nil {
		req.Body.Close()
	}
}

// A keptBody is an answer's body that was read while a retry waited. It ends as
// the reading did: with io.EOF, or with the error that cut it.
type keptBody struct {
	bytes.Reader
	end    error
	closed bool
}

func (k *keptBody) Read(p []byte) (int, error) {
	if k.closed {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := k.Reader.Read(p)
	if err == io.EOF {
		err = k.end
	}
	return n, err
}

// WriteTo hides the reader's own, which ends without the error.
func (k *keptBody) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{k})
}

func (k *keptBody) Close() error {
	k.closed = true
	return nil
}

// keep reads an answer of known, small length into memory and closes it, so that
// its connection is free while the retry waits. If it does not arrive within a
// moment, a timer closes it: what came, and io.ErrUnexpectedEOF, is then all
// that anybody can read. It reports false where the answer still holds its
// connection.
func keep(resp *http.Response) bool {
	if resp.ContentLength < 0 || resp.ContentLength > maxKept {
		return false
	}
	body := &closeOnce{ReadCloser: resp.Body}
	var late atomic.Bool
	timer := time.AfterFunc(bodyPatience, func() {
		late.Store(true)
		body.Close()
	})
	data := make([]byte, 0, resp.ContentLength+1) // one more, to meet the end
	var err error
	for err == nil && len(data) < cap(data) {
		var n int
		n, err = body.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
	}
	timer.Stop()
	if err == nil {
		// Longer than it says: a base that is not net/http. Nothing is lost.
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(data), body), body}
		return false
	}
	body.Close()
	if late.Load() && err != io.EOF {
		err = io.ErrUnexpectedEOF
	}
	kept := &keptBody{end: err}
	kept.Reset(data)
	resp.Body = kept
	return true
}

// drain reads what is left of an answer that is thrown away, up to a bound, and
// closes it: a connection whose answer was read to its end can be used again.
func drain(body io.ReadCloser, patience time.Duration) {
	once := &closeOnce{ReadCloser: body}
	timer := time.AfterFunc(patience, func() { once.Close() })
	io.CopyN(io.Discard, once, maxKept)
	timer.Stop()
	once.Close()
}

// closeOnce lets a timer and its maker close the same body: the first closes it,
// the other waits until that is done.
type closeOnce struct {
	io.ReadCloser
	once sync.Once
	err  error
}

func (c *closeOnce) Close() error {
	c.once.Do(func() { c.err = c.ReadCloser.Close() })
	return c.err
}

// A boundBody is the final answer's body where contexts were derived for the
// request: they end with it, and not before.
type boundBody struct {
	io.ReadCloser
	release func() // idempotent
}

func (b *boundBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.release()
	}
	return n, err
}

func (b *boundBody) Close() error {
	err := b.ReadCloser.Close()
	b.release()
	return err
}
