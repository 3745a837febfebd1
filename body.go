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
	// bodyPatience is how long we wait for a body: for an answer to be read into
	// memory, and for the base to be done with the request's.
	bodyPatience = 50 * time.Millisecond
	// drainPatience is how long we wait, once a turn has come, for a long answer
	// to be drained. It stays within the slack between turns, so that a peer that
	// trickles cannot push retries into one second.
	drainPatience = 20 * time.Millisecond
)

// A requestBodies holds the bodies that one attempt has handed to the base: one,
// and those that net/http gets for resends of its own. net/http may still be
// inside Read of a body when its answer has arrived and was closed, and the next
// attempt's body may share a source with it; so no attempt begins before the
// bodies of the one before it are settled. Safe for concurrent use.
type requestBodies struct {
	mu      sync.Mutex
	n       int            // guarded by mu: bodies handed to the base
	first   requestBody    // guarded by mu; the only one, as a rule
	more    []*requestBody // guarded by mu
	open    int            // guarded by mu: bodies that the base has not closed
	reading int            // guarded by mu: Reads that run now
	sealed  bool           // guarded by mu: no Read may begin
	// settling, guarded by mu, is closed once the bodies are settled; nil: nobody
	// waits for it. seal is how they are to be.
	settling chan struct{}
	seal     bool
	readErr  error // guarded by mu: the first error of the caller's own body
}

func (b *requestBodies) add(rc io.ReadCloser) io.ReadCloser {
	if rc == nil || rc == http.NoBody {
		return rc // net/http compares with NoBody; it has nothing to guard
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	body := &b.first
	if b.n > 0 {
		body = new(requestBody)
		b.more = append(b.more, body)
	}
	body.of, body.rc = b, rc
	b.n++
	b.open++
	return body
}

// settled waits a moment until the base has closed the bodies and no Read of them
// runs. With seal it need not close them: once no Read runs, no other reaches the
// caller's reader, and what the base has not closed is closed. It reports false
// if a Read, or without seal the base, takes longer; nothing is sealed then.
func (b *requestBodies) settled(ctx context.Context, seal bool) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	if !b.settleLocked(seal) {
		settled := make(chan struct{})
		b.settling, b.seal = settled, seal
		b.mu.Unlock()
		patience := time.NewTimer(bodyPatience)
		defer patience.Stop()
		select {
		case <-settled:
		case <-patience.C:
		case <-ctx.Done():
		}
		b.mu.Lock()
		b.settling = nil
	}
	ok := b.sealed
	b.mu.Unlock()
	if ok {
		b.close()
	}
	return ok
}

// close closes those bodies that the base has not closed.
func (b *requestBodies) close() {
	if b == nil {
		return
	}
	b.mu.Lock()
	n, more := b.n, b.more
	b.mu.Unlock()
	if n > 0 {
		b.first.Close()
	}
	for _, body := range more {
		body.Close()
	}
}

// finished reports whether the base has closed all bodies and no Read of them runs.
// With seal no other may begin then.
func (b *requestBodies) finished(seal bool) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reading > 0 || b.open > 0 {
		return false
	}
	b.sealed = b.sealed || seal
	return true
}

// settleLocked reports whether the next attempt may begin, and if so lets no other
// Read begin.
func (b *requestBodies) settleLocked(seal bool) bool {
	if b.reading > 0 || !seal && b.open > 0 {
		return false
	}
	b.sealed = true
	return true
}

// changedLocked is called when open or reading has fallen. It settles here, under
// the lock, and not where that is waited for: another Read would begin in between.
func (b *requestBodies) changedLocked() {
	if b.settling != nil && b.settleLocked(b.seal) {
		close(b.settling)
		b.settling = nil
	}
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
	b.changedLocked()
	return n, err
}

// Close closes the caller's body once, however often the base does.
func (r *requestBody) Close() error {
	if !r.closed.CompareAndSwap(false, true) {
		return nil
	}
	err := r.rc.Close()
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	r.of.open--
	r.of.changedLocked()
	return err
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
	data   bytes.Reader // not embedded: its other methods end with io.EOF
	end    error
	closed atomic.Bool
}

func (k *keptBody) Read(p []byte) (int, error) {
	if k.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := k.data.Read(p)
	if err == io.EOF {
		err = k.end
	}
	return n, err
}

func (k *keptBody) Close() error {
	k.closed.Store(true)
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
	kept.data.Reset(data)
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
	last        *attempt
	cancelBound context.CancelFunc // nil: no context was derived for the deadline
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

func (b *boundBody) release() {
	b.last.release()
	if b.cancelBound != nil {
		b.cancelBound()
	}
}
