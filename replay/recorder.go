package replay

import (
	"bufio"
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// A recorder holds back the handler's answer until it is stored. An answer that
// is flushed, or too large, goes straight through from there on.
//
// The handler's header map is that of the writer below.
type recorder struct {
	w     http.ResponseWriter
	max   int         // bytes of an answer that is kept
	entry http.Header // what layers outside had set; nil: nothing

	// mu: a handler may write from several goroutines, a reverse proxy flushes
	// from a timer.
	mu       sync.Mutex
	status   int         // guarded by mu, as all below; 0: nothing answered
	header   http.Header // as the answer began
	declared int64       // Content-Length; -1: none
	written  int64       // bytes of the body
	body     []byte      // unless dropped
	passing  bool        // the answer goes straight through
	dropped  bool        // it is not kept
	hijacked bool
}

func (rec *recorder) init(w http.ResponseWriter, max int) {
	rec.w, rec.max, rec.declared = w, max, -1
	if h := w.Header(); len(h) > 0 {
		rec.entry = h.Clone()
	}
}

func (rec *recorder) WriteHeader(code int) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.writeHeaderLocked(code)
}

func (rec *recorder) writeHeaderLocked(code int) {
	switch {
	case rec.hijacked:
		return
	case code < 100 || code > 999:
		rec.w.WriteHeader(code) // panics
		return
	case rec.status != 0:
		if rec.passing {
			rec.w.WriteHeader(code) // superfluous: net/http logs who did it
		}
		return
	case code == http.StatusSwitchingProtocols:
		rec.status, rec.passing, rec.dropped = code, true, true
		rec.w.WriteHeader(code)
		return
	case code < 200: // informational: the answer is yet to come
		rec.w.WriteHeader(code)
		return
	}
	rec.status = code
	rec.header = rec.w.Header().Clone()
	if v := rec.header.Get("Content-Length"); v != "" {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil && n >= 0 {
			rec.declared = n
		}
	}
}

// bodyAllowed is net/http's rule.
func (rec *recorder) bodyAllowedLocked() bool {
	return rec.status != http.StatusNoContent && rec.status != http.StatusNotModified
}

// admitLocked is asked before n bytes of the body, and says what net/http would.
func (rec *recorder) admitLocked(n int) error {
	if rec.hijacked {
		return http.ErrHijacked
	}
	if rec.status == 0 {
		rec.writeHeaderLocked(http.StatusOK)
	}
	if n == 0 {
		return nil
	}
	if !rec.bodyAllowedLocked() {
		return http.ErrBodyNotAllowed
	}
	if rec.declared >= 0 && rec.written+int64(n) > rec.declared {
		return http.ErrContentLength
	}
	return nil
}

func (rec *recorder) Write(b []byte) (int, error) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if err := rec.admitLocked(len(b)); err != nil {
		return 0, err
	}
	if rec.keepLocked(len(b)) {
		rec.body = append(rec.body, b...)
	}
	rec.written += int64(len(b))
	if rec.passing {
		return rec.w.Write(b)
	}
	return len(b), nil
}

func (rec *recorder) WriteString(s string) (int, error) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if err := rec.admitLocked(len(s)); err != nil {
		return 0, err
	}
	if rec.keepLocked(len(s)) {
		rec.body = append(rec.body, s...)
	}
	rec.written += int64(len(s))
	if rec.passing {
		return io.WriteString(rec.w, s)
	}
	return len(s), nil
}

// keepLocked reports whether another n bytes are kept. Where they are too many,
// the answer goes straight through.
func (rec *recorder) keepLocked(n int) bool {
	if rec.dropped {
		return false
	}
	if len(rec.body)+n <= rec.max {
		return true
	}
	rec.passLocked()
	rec.dropped, rec.body = true, nil
	return false
}

func (rec *recorder) ReadFrom(src io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{rec}, src)
}

func (rec *recorder) Flush() { rec.FlushError() }

func (rec *recorder) FlushError() error {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.hijacked {
		return http.ErrHijacked
	}
	if rec.status == 0 {
		rec.writeHeaderLocked(http.StatusOK)
	}
	rec.passLocked()
	return http.NewResponseController(rec.w).Flush()
}

func (rec *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	conn, rw, err := http.NewResponseController(rec.w).Hijack()
	if err == nil {
		rec.hijacked, rec.dropped, rec.body = true, true, nil
	}
	return conn, rw, err
}

// passLocked sends what has been held back, and holds nothing back any more.
func (rec *recorder) passLocked() {
	if rec.passing {
		return
	}
	rec.passing = true
	rec.sendLocked("")
}

// sendLocked sends the answer as far as it goes. echo, if not empty, tells the
// client that its key is honoured.
func (rec *recorder) sendLocked(echo string) {
	live := rec.w.Header()
	// What the handler has changed since is not to be seen in the header, and
	// still has to be there for trailers.
	var later http.Header
	if !maps.EqualFunc(live, rec.header, slices.Equal) {
		later = maps.Clone(live)
		clear(live)
		maps.Copy(live, rec.header)
	}
	if echo != "" {
		live["Idempotency-Key"] = []string{echo}
	}
	rec.w.WriteHeader(rec.status)
	if len(rec.body) > 0 {
		rec.w.Write(rec.body) // an error means that the client has gone
	}
	if later != nil {
		clear(live)
		maps.Copy(live, later)
	}
}

// resetHeader removes what the handler has set.
func (rec *recorder) resetHeader() {
	h := rec.w.Header()
	clear(h)
	maps.Copy(h, rec.entry)
}

// A verdict is how a run has ended.
type verdict int

const (
	final   verdict = iota // the handler's answer
	notDone                // the handler says that nothing was done
	unknown                // nobody knows
)

// judge says how the run has ended. broken says that the request's body broke
// off while the handler read it.
func (rec *recorder) judge(ctx context.Context, run *Run, returned, broken bool) verdict {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	switch {
	case rec.hijacked || rec.status == http.StatusSwitchingProtocols:
		return final
	case !returned:
		return unknown
	case run.forget.Load():
		return notDone
	case rec.status == 0:
		if broken || ctx.Err() != nil {
			return unknown
		}
		rec.writeHeaderLocked(http.StatusOK) // as net/http does for a handler that just returns
		return final
	case broken && rec.status >= 400:
		return unknown // an answer to half a request is none to the whole one
	case rec.declared >= 0 && rec.written != rec.declared && rec.bodyAllowedLocked():
		return unknown // net/http breaks the connection
	}
	switch rec.status {
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		return unknown
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return notDone
	}
	if rec.status >= 400 && shouldRetry(rec.header) {
		return notDone
	}
	return final
}

// shouldRetry reports whether an answer says that no work was done for it.
func shouldRetry(h http.Header) bool {
	yes := false
	for _, line := range h["X-Should-Retry"] {
		switch {
		case strings.EqualFold(strings.TrimSpace(line), "false"):
			return false
		case strings.EqualFold(strings.TrimSpace(line), "true"):
			yes = true
		}
	}
	return yes
}

// begun returns the status that the handler has answered, 0 for none, and
// whether it has been sent.
func (rec *recorder) begun() (status int, passing bool) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.status, rec.passing
}

// answer sets a to what is stored for a final answer.
func (rec *recorder) answer(a *answer, fence int64) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	a.fence, a.status = fence, rec.status
	if rec.dropped {
		a.kind = kindNotKept
		return
	}
	a.kind, a.length = kindAnswer, rec.declared >= 0
	a.header, a.trailers = difference(rec.entry, rec.header), trailersOf(rec.header, rec.w.Header())
	a.body = rec.body
}
