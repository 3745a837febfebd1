package stint

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf16"
)

// Headers of the probe, see MiddlewareConfig.DebugEcho.
const (
	// HeaderDebugEcho asks for a probe. "1" asks the edge, which answers with
	// the list of hops in place of what its handler writes. "hop" is what a
	// Transport asks of the next service, which keeps its answer as it is.
	HeaderDebugEcho = "X-Debug-Echo-Deadline"
	// HeaderDebugDeadline is what a service adds to its answer when it was asked
	// with "hop": the list of hops from there on, as one line of JSON.
	HeaderDebugDeadline = "X-Debug-Deadline"
)

const (
	probeEdge = "1"
	probeHop  = "hop"
)

// Bounds of what is collected, believed and sent.
const (
	maxHops = 16
	// maxReport is the longest HeaderDebugDeadline in bytes that is believed.
	maxReport = 4 << 10
	// maxAnswerHeader is how long the report may make an answer's header. nginx
	// takes one page for all of it, 4 KiB with most processors, unless
	// proxy_buffer_size says otherwise, and answers 502 where it does not fit.
	// What is left of the page is for the status line, what net/http adds, and
	// what nginx notes in front of an answer that it caches.
	maxAnswerHeader = 4<<10 - 512
)

// A hop is one attempt that answered, or the edge itself. What is not known is
// null: null is in order for the readers of such lists, a zero would be a lie.
type hop struct {
	Depth   int    `json:"depth"` // from the service that reports
	Service string `json:"service"`
	// By the caller's account; of the service that reports, nobody's.
	Peer    string `json:"peer"`
	Attempt int    `json:"attempt"`

	ReceivedMS  *int64  `json:"received_ms"`  // the header's number
	DeadlineMS  *int64  `json:"deadline_ms"`  // in force, by the clock of whoever set it first
	Source      *string `json:"source"`       // one of hopSources
	ArrivedMS   *int64  `json:"arrived_ms"`   // by this host's clock
	RemainingMS *int64  `json:"remaining_ms"` // on arrival, rounded down
	Status      int     `json:"status"`
}

// Where a hop has its deadline from.
const (
	sourceHeader    = "header"
	sourceDefault   = "default"   // configured, or the context's own
	sourceClamped   = "clamped"   // the header's, cut short here
	sourceMalformed = "malformed" // the header is unusable; there may be a default
	sourceNone      = "none"      // there is no deadline
)

func validSource(s string) bool {
	switch s {
	case sourceHeader, sourceDefault, sourceClamped, sourceMalformed, sourceNone:
		return true
	}
	return false
}

// A hopReport is what a service reports: itself, and in pre-order what its calls
// have met.
type hopReport struct {
	V         int   `json:"v"`
	Status    int   `json:"status"`
	Truncated bool  `json:"truncated,omitempty"` // hops are missing
	Hops      []hop `json:"hops"`
}

// encode returns the report in ASCII. Hops that do not fit into limit bytes are
// left off, from the end: what is left is in pre-order still.
func (r hopReport) encode(limit int) string {
	for {
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		// Each of < > & would become six bytes, and what a peer has bounded to
		// 4 KiB would grow here.
		e.SetEscapeHTML(false)
		e.Encode(r) // there is nothing in it that cannot be encoded
		text := escapeToASCII(strings.TrimSuffix(b.String(), "\n"))
		if len(text) <= limit || len(r.Hops) == 0 {
			return text
		}
		r.Hops, r.Truncated = r.Hops[:len(r.Hops)-1], true
	}
}

// escapeToASCII escapes what a header's value cannot hold, or not everywhere. In
// JSON it stands in strings and nowhere else; control characters but DEL are
// escaped already.
func escapeToASCII(text string) string {
	var b strings.Builder
	for _, r := range text {
		switch {
		case r < 0x7f:
			b.WriteByte(byte(r))
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// parseReport reads a peer's report, which may be anything. ok is false where it
// is not what encode writes; nothing of it is then used.
func parseReport(lines []string) (r hopReport, ok bool) {
	if len(lines) != 1 || len(lines[0]) > maxReport {
		return hopReport{}, false
	}
	for i := range len(lines[0]) {
		if c := lines[0][i]; c < ' ' || c >= 0x7f {
			return hopReport{}, false
		}
	}
	if json.Unmarshal([]byte(lines[0]), &r) != nil || r.V != 1 || len(r.Hops) == 0 || len(r.Hops) > maxHops {
		return hopReport{}, false
	}
	for i, h := range r.Hops {
		switch {
		case i == 0 && h.Depth != 0, i > 0 && (h.Depth < 1 || h.Depth > r.Hops[i-1].Depth+1):
			return hopReport{}, false
		case h.Source != nil && !validSource(*h.Source):
			return hopReport{}, false
		}
	}
	return r, true
}

// A probe belongs to a request being served whose caller asked for it, and
// collects what the calls of its handler report. Safe for concurrent use: they
// may run in parallel, and after the answer.
type probe struct {
	edge bool // asked with "1": the list goes out as the body
	self hop

	mu        sync.Mutex
	below     []hop // guarded by mu: at most maxHops-1
	truncated bool  // guarded by mu
}

// add appends the report of one attempt: a subtree in pre-order.
func (p *probe) add(r hopReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.truncated = p.truncated || r.Truncated
	if room := maxHops - 1 - len(p.below); len(r.Hops) > room {
		r.Hops, p.truncated = r.Hops[:room], true
	}
	p.below = append(p.below, r.Hops...)
}

// report returns what has been collected by now.
func (p *probe) report(status int) hopReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := hopReport{V: 1, Status: status, Truncated: p.truncated, Hops: make([]hop, 0, 1+len(p.below))}
	self := p.self
	self.Status = status
	r.Hops = append(append(r.Hops, self), p.below...)
	return r
}

// mark sets the header of an answer that is about to begin. Whatever stands
// there already, a proxy has copied from a peer that was not asked through a
// Transport.
func (p *probe) mark(h http.Header, status int) {
	if p.edge {
		return
	}
	removeHeader(h, HeaderDebugDeadline)
	p.report(status).set(h)
}

// set adds the report to a header, or as many of its hops as there is room for.
// Where there is room for none it adds nothing: a probe must not break an answer
// that would pass without it.
func (r hopReport) set(h http.Header) {
	room := maxAnswerHeader - len(HeaderDebugDeadline) - len(": \r\n")
	for k, lines := range h {
		for _, v := range lines {
			room -= len(k) + len(": \r\n") + len(v)
		}
	}
	if text := r.encode(room); len(text) <= room && !strings.HasSuffix(text, `"hops":[]}`) {
		h[HeaderDebugDeadline] = []string{text}
	}
}

// removeHeader removes a header in any spelling.
func removeHeader(h http.Header, name string) {
	for k := range h {
		if strings.EqualFold(k, name) {
			delete(h, k)
		}
	}
}

// startProbe looks whether the request asks for a probe and may have one. What
// it returns, if not nil, is to be given to the handler in place of w, and
// finished when that has returned. To be called where DebugEcho is set.
func (x *exchange) startProbe(w http.ResponseWriter, r *http.Request) *probeWriter {
	asked := r.Header[HeaderDebugEcho]
	if len(asked) != 1 {
		return nil
	}
	switch asked[0] {
	case probeEdge:
		if x.upgrade || x.connect {
			return nil // what comes of it is no answer that could be replaced
		}
	case probeHop:
	default:
		return nil
	}
	if !x.m.cfg.DebugEcho(r) {
		return nil
	}
	if outer := arrivalFrom(x.Context); outer != nil && outer.probe != nil {
		x.probe = outer.probe // a middleware that this one is inside of reports for both
		return nil
	}
	x.probe = &probe{edge: asked[0] == probeEdge, self: x.hop(r.Header)}
	if !x.probe.edge {
		return nil
	}
	return &probeWriter{w: w, ctx: r.Context(), header: w.Header().Clone()}
}

// hop describes the request as it arrived.
func (x *exchange) hop(header http.Header) hop {
	h := hop{Service: x.m.cfg.Service, ArrivedMS: ptr(x.m.wallAt(x.start).UnixMilli())}
	ms, state := int64(0), stateUntrusted
	if !x.distrust {
		ms, _, state = parseMillis(headerLines(header, HeaderDeadline))
	}
	if state.usable() {
		h.ReceivedMS = &ms
	}
	if !x.end.IsZero() {
		h.DeadlineMS = ptr(x.endMS)
		h.RemainingMS = ptr(-ceilMillis(-x.remaining(x.start)))
	}
	switch {
	case state.invalid():
		h.Source = ptr(sourceMalformed)
	case x.end.IsZero():
		h.Source = ptr(sourceNone)
	case !state.usable():
		h.Source = ptr(sourceDefault)
	case x.endMS < ms:
		h.Source = ptr(sourceClamped)
	default:
		h.Source = ptr(sourceHeader)
	}
	return h
}

func ptr[T any](v T) *T { return &v }

// A probeWriter takes what the handler of a probed edge writes, of which nothing
// goes out: neither the header nor the body. The status is the exchange's to
// remember. It offers what a handler may need to run as usual, and no Unwrap,
// which would lead around it; a connection that is being probed cannot be
// hijacked.
type probeWriter struct {
	w      http.ResponseWriter
	ctx    context.Context // of the request as it came: it ends when the client leaves
	header http.Header
}

func (p *probeWriter) Header() http.Header {
	if p.header == nil { // a Clone of nil
		p.header = make(http.Header)
	}
	return p.header
}

func (p *probeWriter) WriteHeader(int) {}

// Write fails when the client has left, as it does in earnest: for some handlers
// nothing else is the end.
func (p *probeWriter) Write(b []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (p *probeWriter) WriteString(s string) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, err
	}
	return len(s), nil
}

func (p *probeWriter) Flush() {}

func (p *probeWriter) FlushError() error { return p.ctx.Err() }

func (p *probeWriter) SetReadDeadline(t time.Time) error {
	return http.NewResponseController(p.w).SetReadDeadline(t)
}

// SetWriteDeadline counts for our answer, which comes after all that the handler
// writes. One in the past is to interrupt a Write that waits, and none does.
func (p *probeWriter) SetWriteDeadline(t time.Time) error {
	if !t.IsZero() && !t.After(time.Now()) {
		return nil
	}
	return http.NewResponseController(p.w).SetWriteDeadline(t)
}

func (p *probeWriter) EnableFullDuplex() error {
	return http.NewResponseController(p.w).EnableFullDuplex()
}

// keptInProbe are the headers of the handler's answer, or of our 504, that say
// something of the status and the connection, and not of the body.
var keptInProbe = []string{"Connection", "Retry-After", HeaderShouldRetry, HeaderDeadlineExpired}

// finish answers: the status that the handler chose, and the hops.
func (p *probeWriter) finish(x *exchange, method string) {
	status := int(x.status.Load())
	if status == 0 {
		status = http.StatusOK // net/http's, for a handler that just returns
	}
	report := x.probe.report(status)
	body := report.encode(math.MaxInt) + "\n"

	h := p.w.Header()
	clear(h)
	for _, k := range keptInProbe {
		if v := p.header[k]; len(v) > 0 {
			h[k] = v
		}
	}
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	// Set here and not left to net/http, which does not know it for HEAD.
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if method == http.MethodHead {
		report.set(h) // it would get nothing else
	}
	switch status {
	case http.StatusNoContent, http.StatusResetContent, http.StatusNotModified:
		// They have no body (RFC 9110, section 6.4.1). The list has the status.
		status = http.StatusOK
	}
	p.w.WriteHeader(status)
	if method != http.MethodHead {
		io.WriteString(p.w, body) // an error means that the client has gone
	}
}

// probe returns the probe of the request being served, if the caller is its
// handler.
func (c *call) probe() *probe {
	if c.arrival == nil {
		return nil
	}
	return c.arrival.probe
}

// collect takes the report out of an answer, so that a proxy does not pass it on
// beside its own. Of an answer without one there is still something to tell.
func (c *call) collect(p *probe, resp *http.Response) {
	var r hopReport
	var reported bool
	if !c.foreign { // else nobody was asked
		r, reported = parseReport(headerLines(resp.Header, HeaderDebugDeadline))
	}
	removeHeader(resp.Header, HeaderDebugDeadline)
	if !reported {
		r.Hops = []hop{{}}
		if c.wire {
			r.Hops[0].ReceivedMS = ptr(c.wireMS)
		}
	}
	for i := range r.Hops {
		r.Hops[i].Depth++
	}
	// What we know ourselves we do not let a peer say.
	top := &r.Hops[0]
	top.Peer, top.Attempt, top.Status = c.peer.name, c.attempts, resp.StatusCode
	p.add(r)
}
