package stint

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"html/template"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Bounds of what a DebugHandler shows.
const (
	debugPeers     = 200 // of a Transport's peers, those in most trouble
	debugUnfolded  = 5   // of these, how many the page opens by itself
	debugNameRunes = 64  // of a name on the page; in the JSON it is as in the metrics
	debugRecent    = time.Minute
	debugTimeLeft  = time.Minute // how far back the time left on arrival goes, or a third more
)

// DebugHandler returns a handler that shows what t and m know at this moment:
// for each peer its budget, the next turn, the latencies that retries are
// admitted by and the last 16 refusals, and for the service how many requests
// ran out of time, the last 16 of them, and how much of their deadlines requests
// had left when they arrived. Either may be nil, and is then left
// out. It panics if both are, or if one was not made by its constructor.
//
// It answers GET and HEAD, with JSON, or with one HTML page where the Accept
// header prefers text/html, as browsers do. Peers in trouble come first: by the
// share of the budget that is taken, then those that have refused something in
// the last minute, then by name. At most 200 are shown, and the rest is counted.
// Names of peers are as in the metrics.
//
// Nothing is registered anywhere. Mount it where operators can reach it and the
// outside cannot, one for each pair of transport and middleware:
//
//	internal.Handle("/debug/stint", stint.DebugHandler(transport, middleware))
//	internal.Handle("/debug/stint/search", stint.DebugHandler(searchTransport, nil))
//
// It asks for no credentials. It discloses the names of peers, classes and the
// service, and numbers: no URL, header, key or text of an error, as long as
// Config.Peer and AdmissionConfig.Class make no names of these.
//
// The numbers of the last minute are the metrics': they are there only where
// Config.Metrics or MiddlewareConfig.Metrics is set, and are the sum over all
// that share the set and the name. The rest is t's and m's own. Looking costs
// requests nothing, and changes nothing; the time left on arrival is counted
// from the first DebugHandler on, which is some 20 ns for each request.
func DebugHandler(t *Transport, m *Middleware) http.Handler {
	switch {
	case t == nil && m == nil:
		panic("stint: DebugHandler: neither a Transport nor a Middleware")
	case t != nil && t.peers == nil:
		panic(errZeroTransport.Error())
	case m != nil && !m.made:
		panic(errZeroMiddleware.Error())
	}
	if m != nil {
		m.timeLeft.CompareAndSwap(nil, newHistogram(debugTimeLeft, time.Now()))
	}
	// Parsed here and not into a package variable: the linker leaves most of
	// html/template out of programs that have no use for it.
	page := template.Must(template.New("debug").Funcs(template.FuncMap{
		"ago":    showAgo,
		"age":    showAge,
		"count":  showCount,
		"ms":     showMillis,
		"short":  showName,
		"share":  showShare,
		"len64":  func(list []debugRefusal) uint64 { return uint64(len(list)) },
		"number": func(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) },
		"width":  func(v float64) float64 { return math.Round(100 * v) },
		"time":   func(ms int64) string { return time.UnixMilli(ms).UTC().Format("2 January 2006, 15:04:05 UTC") },
		"exact":  showExact,
	}).Parse(debugPage))
	return &debugHandler{t, m, page}
}

//go:embed debug.html.tmpl
var debugPage string

type debugHandler struct {
	t    *Transport
	m    *Middleware
	page *template.Template
}

func (d *debugHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "GET and HEAD only", http.StatusMethodNotAllowed)
		return
	}
	// What is collected is a copy and is rendered into memory: neither the
	// template nor a client that reads slowly is waited for with anything held,
	// and nobody gets half a page.
	state := d.collect(time.Now())
	var body bytes.Buffer
	var err error
	if prefersHTML(r.Header) {
		h.Set("Content-Type", "text/html; charset=utf-8")
		err = d.page.Execute(&body, state)
	} else {
		h.Set("Content-Type", "application/json")
		enc := json.NewEncoder(&body)
		enc.SetIndent("", "  ") // it is read with curl as often as by programs
		err = enc.Encode(state)
	}
	if err != nil { // not reached: every value has a form in both
		http.Error(w, "stint: the debug page cannot be rendered", http.StatusInternalServerError)
		return
	}
	h.Set("Vary", "Accept")
	// Names come from elsewhere. They are escaped; this is for the case that
	// somebody finds a way around it. The last three do not fall back to
	// default-src.
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	if r.Method == http.MethodGet {
		w.Write(body.Bytes()) // an error means that the client has gone
	}
}

// prefersHTML reports whether Accept gives text/html a greater weight than JSON.
// The */* of curl, and no header, prefer nothing.
func prefersHTML(h http.Header) bool {
	return accepted(h, "text", "html") > accepted(h, "application", "json")
}

// accepted returns the weight of a media type, that of the range in Accept which
// names it most precisely (RFC 9110, section 12.5.1).
func accepted(h http.Header, typ, subtype string) (q float64) {
	precision := 0
	for _, line := range h["Accept"] {
		for member := range strings.SplitSeq(line, ",") {
			name, params, _ := strings.Cut(member, ";")
			p := 0
			switch strings.ToLower(strings.Trim(name, " \t")) {
			case typ + "/" + subtype:
				p = 3
			case typ + "/*":
				p = 2
			case "*/*":
				p = 1
			}
			if p > precision {
				precision, q = p, weight(params)
			}
		}
	}
	return q
}

// ringSize is how many refusals of a peer, and how many expired requests of a
// service, are remembered.
const ringSize = 16

// A ring remembers the latest values that were added. The zero value is empty,
// and small until something is added: most peers never refuse anything. Safe for
// concurrent use.
type ring[T any] struct {
	mu   sync.Mutex
	n    uint64       // guarded by mu: added so far
	kept *[ringSize]T // guarded by mu; the value of number n is at n % ringSize
}

func (r *ring[T]) add(v T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept == nil {
		r.kept = new([ringSize]T)
	}
	r.kept[r.n%ringSize] = v
	r.n++
}

// latest returns a copy of what is remembered, the newest first, and how many
// there were in all.
func (r *ring[T]) latest() (list []T, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list = make([]T, min(r.n, ringSize))
	for i := range list {
		list[i] = r.kept[(r.n-1-uint64(i))%ringSize]
	}
	return list, r.n
}

func (r *ring[T]) newest() (v T, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n == 0 {
		return v, false
	}
	return r.kept[(r.n-1)%ringSize], true
}

// A refusal is one (further) attempt that a Transport did not make. It has no
// room for anything that a request brings along.
type refusal struct {
	at        time.Duration // since peers.origin
	reason    Reason
	attempts  int // sent before
	bounded   bool
	remaining time.Duration
	need      time.Duration // 0: nobody asked
}

// An expiry is a request that ran out of time at a Middleware, on arrival where
// took is 0.
type expiry struct {
	at         time.Time
	took, late time.Duration
}

// What a DebugHandler shows. The JSON is for programs too: fields are added, and
// v changes where one goes or gets another meaning.
type (
	debugState struct {
		V     int   `json:"v"`
		NowMS int64 `json:"now_ms"`
		// All that there are, and how many of them are not in Peers.
		PeersKnown   int          `json:"peers_known"`
		PeersLeftOut int          `json:"peers_left_out"`
		Peers        []debugPeer  `json:"peers,omitzero"` // absent without a Transport
		Server       *debugServer `json:"server,omitempty"`

		Client bool `json:"-"` // there is a Transport
	}
	debugPeer struct {
		Peer       string           `json:"peer"`
		Budget     debugBudget      `json:"budget"`
		Latency    []debugLatency   `json:"latency"` // by class
		LastMinute *debugPeerMinute `json:"last_minute,omitempty"`
		Inflight   int64            `json:"inflight"`         // requests inside RoundTrip
		Held       int32            `json:"held"`             // answers that waiting retries keep open
		IdleMS     float64          `json:"idle_ms,omitzero"` // since the last request ended, where none is inside
		Refusals   uint64           `json:"refusals"`         // since the peer is known
		Refused    []debugRefusal   `json:"refused"`          // the last of these, newest first

		// For the page.
		Open  bool  `json:"-"`
		NowMS int64 `json:"-"`
	}
	debugBudget struct {
		Limit       float64 `json:"limit"` // retries that the window allows
		Taken       uint64  `json:"taken"`
		Balance     float64 `json:"balance"`
		Utilisation float64 `json:"utilisation"`
		Spent       bool    `json:"spent"` // the next retry would be refused, whenever its turn
		NextTurnMS  float64 `json:"next_turn_ms"`
		Requests    uint64  `json:"requests"` // of the window, and those that succeeded: the smaller is the credit
		Successes   uint64  `json:"successes"`
		Ratio       float64 `json:"ratio"`
		WindowMS    float64 `json:"window_ms"`
	}
	debugLatency struct {
		Class    string  `json:"class"`
		P50MS    float64 `json:"p50_ms"`
		P99MS    float64 `json:"p99_ms"`
		Samples  int     `json:"samples"`
		Attempts int     `json:"attempts"` // of the window that have ended
		CutOff   int     `json:"cut_off"`  // of these, by AttemptTimeout
	}
	debugPeerMinute struct {
		Requests      uint64  `json:"requests"`
		Attempts      uint64  `json:"attempts"`
		Retries       uint64  `json:"retries"`
		Amplification float64 `json:"amplification"`
	}
	debugRefusal struct {
		AtMS        int64    `json:"at_ms"`
		Reason      Reason   `json:"reason"`
		Attempt     int      `json:"attempt"`                // the last one sent; 0: not even the first was
		RemainingMS *float64 `json:"remaining_ms,omitempty"` // absent without a deadline
		NeedMS      float64  `json:"need_ms,omitzero"`       // the wait and the latency that were too long for it

		Why string `json:"-"` // for the page; empty where the same was said further up
	}
	debugServer struct {
		Service          string             `json:"service"`
		ReportOnly       bool               `json:"report_only"`
		LastMinute       *debugServerMinute `json:"last_minute,omitempty"`
		Remaining        debugRemaining     `json:"remaining"`          // on arrival, where a usable header came along
		Expired          uint64             `json:"expired"`            // since the start
		ExpiredOnArrival uint64             `json:"expired_on_arrival"` // of these
		RecentExpired    []debugExpiry      `json:"recent_expired"`     // newest first
	}
	debugServerMinute struct {
		Requests           uint64  `json:"requests"`
		HeaderPresentRatio float64 `json:"header_present_ratio"`

		Low bool `json:"-"` // for the page: somebody forgets the deadline
	}
	debugRemaining struct {
		P50MS   float64 `json:"p50_ms"` // half had at least that much left
		P1MS    float64 `json:"p1_ms"`  // 99 of 100 had
		Samples int     `json:"samples"`
	}
	debugExpiry struct {
		AtMS      int64   `json:"at_ms"`
		OnArrival bool    `json:"on_arrival"`
		TookMS    float64 `json:"took_ms"` // since it arrived
		LateMS    float64 `json:"late_ms"`
	}
)

// ExpiredServing is for the page.
func (d *debugServer) ExpiredServing() uint64 { return d.Expired - d.ExpiredOnArrival }

func (d *debugHandler) collect(now time.Time) *debugState {
	s := &debugState{V: 1, NowMS: now.UnixMilli()}
	if d.t != nil {
		s.Client = true
		s.Peers, s.PeersKnown = d.t.peers.debug(now, s.NowMS)
		s.PeersLeftOut = s.PeersKnown - len(s.Peers)
	}
	if d.m != nil {
		s.Server = d.m.debug(now, s.NowMS)
	}
	return s
}

// debug returns the peers in most trouble, and how many there are.
func (t *peers) debug(now time.Time, nowMS int64) (shown []debugPeer, known int) {
	at := now.Sub(t.origin)
	// What they are sorted by is looked at once: it changes while we look.
	type candidate struct {
		*peer
		budget   budgetState
		refusing bool
	}
	var all []candidate
	consider := func(p *peer) {
		if p.inflight.Load() < 0 {
			return // evicted since
		}
		last, ok := p.refusals.newest()
		all = append(all, candidate{p, p.budget.state(now), ok && at-last.at < debugRecent})
	}
	t.byName.Range(func(_, v any) bool {
		consider(v.(*peer))
		return true
	})
	t.mu.Lock()
	other := t.other
	t.mu.Unlock()
	if other != nil {
		consider(other)
	}
	slices.SortFunc(all, func(a, b candidate) int {
		switch {
		case a.budget.used != b.budget.used:
			return cmp.Compare(b.budget.used, a.budget.used)
		case a.refusing != b.refusing:
			if a.refusing {
				return -1
			}
			return 1
		}
		return strings.Compare(a.name, b.name)
	})
	shown = make([]debugPeer, 0, min(len(all), debugPeers))
	for i, c := range all[:cap(shown)] {
		p := c.debug(now, at, nowMS, c.budget)
		p.Open = len(all) == 1 || i < debugUnfolded && (c.budget.used > 0 || c.refusing)
		shown = append(shown, p)
	}
	return shown, len(all)
}

func (p *peer) debug(now time.Time, at time.Duration, nowMS int64, b budgetState) debugPeer {
	cfg := p.budget.cfg
	d := debugPeer{
		Peer:  debugName(p.name),
		NowMS: nowMS,
		Budget: debugBudget{
			Limit: round(b.limit), Taken: b.taken, Balance: round(max(0, b.limit-float64(b.taken))),
			Utilisation: round(b.used), Spent: b.spent, NextTurnMS: millis(b.turn),
			Requests: b.requests, Successes: b.successes, Ratio: cfg.Ratio, WindowMS: millis(cfg.Window),
		},
		Latency:  []debugLatency{},
		Inflight: max(0, p.inflight.Load()),
		Held:     p.held.Load(),
		Refused:  []debugRefusal{},
	}
	if d.Inflight == 0 {
		d.IdleMS = millis(max(0, at-time.Duration(p.lastUsed.Load())))
	}
	for _, c := range p.latency.list() {
		// Not by quantile: its cache is for the one that admission asks for.
		n := c.histogram.number(c.histogram.elapsed(now))
		p50, _ := c.histogram.compute(n, 0.5)
		p99, samples := c.histogram.compute(n, 0.99)
		cut, ended := c.histogram.cutOff(now)
		d.Latency = append(d.Latency, debugLatency{
			// Samples may have come in between.
			Class: debugName(c.name), P50MS: millis(min(p50, p99)), P99MS: millis(p99), Samples: samples,
			Attempts: ended, CutOff: cut,
		})
	}
	if pm := p.metrics; pm != nil && pm.name == labelValue(p.name) { // else it is that of all without a label of their own
		e := windowEpoch(pm.m.start, now)
		first, retries := pm.firstSent.sum(e), pm.retriesSent.sum(e)
		d.LastMinute = &debugPeerMinute{
			Requests: first, Attempts: first + retries, Retries: retries,
			Amplification: round(amplification(first, retries)),
		}
	}
	list, n := p.refusals.latest()
	d.Refusals = n
	explained := make(map[Reason]string)
	for _, r := range list {
		// By the age, so that a step of the clock does not move what was before.
		x := debugRefusal{AtMS: nowMS - (at - r.at).Milliseconds(), Reason: r.reason, Attempt: r.attempts, NeedMS: millis(r.need)}
		if r.bounded {
			remaining := millis(r.remaining)
			x.RemainingMS = &remaining
		}
		if why := showReason(x); explained[r.reason] != why {
			explained[r.reason], x.Why = why, why
		}
		d.Refused = append(d.Refused, x)
	}
	return d
}

func (m *Middleware) debug(now time.Time, nowMS int64) *debugServer {
	d := &debugServer{
		Service:          debugName(m.cfg.Service),
		ReportOnly:       m.cfg.ReportOnly,
		ExpiredOnArrival: m.tooLate.Load(),
		RecentExpired:    []debugExpiry{},
	}
	if sm := m.metrics; sm != nil && sm.name == labelValue(m.cfg.Service) {
		e := windowEpoch(sm.m.start, now)
		usable, unusable := sm.usable.sum(e), sm.unusable.sum(e)
		d.LastMinute = &debugServerMinute{Requests: usable + unusable, HeaderPresentRatio: round(presentRatio(usable, unusable))}
		// Who sets deadlines itself does not expect any: an edge.
		edge := m.cfg.Timeout > 0 || m.cfg.TimeoutFor != nil
		d.LastMinute.Low = !edge && d.LastMinute.HeaderPresentRatio < 0.95
	}
	h := m.timeLeft.Load() // set: there is a DebugHandler
	window := h.number(h.elapsed(now))
	p50, _ := h.compute(window, 0.5)
	p1, samples := h.compute(window, 0.01)
	d.Remaining = debugRemaining{P50MS: millis(atLeast(max(p1, p50))), P1MS: millis(atLeast(p1)), Samples: samples}
	list, n := m.expiries.latest()
	d.Expired = n
	for _, x := range list {
		d.RecentExpired = append(d.RecentExpired, debugExpiry{
			AtMS: nowMS - now.Sub(x.at).Milliseconds(), OnArrival: x.took == 0,
			TookMS: millis(x.took), LateMS: millis(x.late),
		})
	}
	return d
}

// atLeast turns the upper edge of a histogram's bucket into the lower one: of the
// time that was left nobody is promised more than there was.
func atLeast(upper time.Duration) time.Duration {
	if b := histBucket(upper); b > 1 {
		return histUpper(b - 2)
	}
	return 0 // the lowest bucket, that of requests that came too late
}

// millis is what JSON and page show of a duration: quick peers answer in less
// than one, and nobody reads nanoseconds.
func millis(d time.Duration) float64 { return round(float64(d) / float64(time.Millisecond)) }

func round(v float64) float64 { return math.Round(v*100) / 100 }

// debugName makes a name fit to be shown: the label of the metrics, without what
// a terminal or a browser would obey instead of showing it.
func debugName(name string) string {
	name = name[:min(len(name), 4*maxLabelBytes)] // a class may be long
	return labelValue(strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, name))
}

// debugReasons says on the page what the README says of the reasons.
var debugReasons = map[Reason]string{
	ReasonAttempts:      "MaxAttempts is used up",
	ReasonNotReplayable: "the body cannot be sent again",
	ReasonNotIdempotent: "repeating it might execute it twice",
	ReasonToldNotTo:     "the answer says X-Should-Retry: false",
	ReasonRetryAfter:    "the peer asks for too long a wait",
	ReasonDeadline:      "no attempt could end in time",
	ReasonSlow:          "AttemptTimeout cuts off most attempts",
	ReasonBudget:        "the window's retries are spent",
	ReasonTurn:          "the next free turn is too far away",
	ReasonHeld:          "too many answers are held open",
	ReasonCanceled:      "the caller has gone",
	ReasonThrottle:      "Throttle holds it back, as most fails",
}

func showReason(r debugRefusal) string {
	if r.Reason == ReasonDeadline && r.NeedMS == 0 {
		return "time ran out" // no attempt was thought of that could have ended in it
	}
	return debugReasons[r.Reason]
}

func showName(s string) string {
	n := 0
	for i := range s {
		if n == debugNameRunes {
			return s[:i] + "…"
		}
		n++
	}
	return s
}

func showMillis(v float64) string {
	decimals := func(v float64) string {
		v = round(v)
		switch a := math.Abs(v); {
		case a < 1:
			return strconv.FormatFloat(v, 'f', -1, 64)
		case a < 10:
			return strconv.FormatFloat(v, 'f', 1, 64)
		default:
			return strconv.FormatFloat(v, 'f', 0, 64)
		}
	}
	switch a := math.Abs(v); {
	case a < 999.5:
		return decimals(v) + " ms"
	case a < 120_000:
		return decimals(v/1000) + " s"
	case a < 120*60_000:
		return decimals(v/60_000) + " min"
	case a < 48*3600_000:
		return decimals(v/3600_000) + " h"
	default:
		return decimals(v/(24*3600_000)) + " d"
	}
}

// showShare rounds down: 100 % is all of it.
func showShare(v float64) string {
	return strconv.FormatFloat(math.Floor(100*v+1e-9), 'f', 0, 64) + " %"
}

// showExact is showMillis for numbers to be compared: 995 ms and 1,055 ms are
// not both 1.0 s.
func showExact(v float64) string {
	if a := math.Abs(v); a < 999.5 || a >= 10_000 {
		return showMillis(v)
	}
	s := showCount(int64(math.Round(math.Abs(v)))) + " ms"
	if v < 0 {
		s = "-" + s
	}
	return s
}

func showAgo(nowMS, atMS int64) string {
	if nowMS-atMS < 100 {
		return "just now"
	}
	return showAge(nowMS, atMS) + " ago"
}

func showAge(nowMS, atMS int64) string {
	age := max(0, nowMS-atMS)
	if age < 1000 {
		// Under each other with those that are seconds old.
		return "0." + strconv.FormatInt(age/100, 10) + " s"
	}
	return showMillis(float64(age))
}

func showCount(n any) string {
	var s string
	switch n := n.(type) {
	case int:
		s = strconv.Itoa(n)
	case int32:
		s = strconv.Itoa(int(n))
	case int64:
		s = strconv.FormatInt(n, 10)
	case uint64:
		s = strconv.FormatUint(n, 10)
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
