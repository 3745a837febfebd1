package main

import (
	"context"
	"hash/crc32"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stinthttp/stint"
)

// Headers of the soak's own.
const (
	headerID  = "X-Soak-Id"
	headerSum = "X-Soak-Sum"
)

// A fault is what a peer does to a request.
type fault int

const (
	faultNone       fault = iota
	faultBusy             // 503 or 429, of known or unknown length, with or without a hint
	faultStall            // no answer for a while
	faultTrickle          // the answer comes in small pieces
	faultHalf             // half of the answer, then a reset
	faultResetEarly       // a reset with the body unread
	faultResetLate        // a reset with the body read: the work may be done
	faultEarly            // 503 with the body unread
	faults
)

var faultNames = [faults]string{"none", "busy", "stall", "trickle", "half", "reset early", "reset late", "early"}

// A peer is a server that fails in all ways that it knows.
type peer struct {
	url      string
	server   *http.Server
	records  *records
	watch    *budgetWatch
	found    *findings
	arrivals [faults]atomic.Int64
	kills    atomic.Int64
	overdue  atomic.Int64 // by how much a request came after its deadline, at worst
	skews    []time.Duration
	ahead    atomic.Int64 // by how much the host's clock is ahead, a time.Duration
	steps    atomic.Int64 // of that clock
	refused  atomic.Int64 // requests refused because of it

	mu    sync.Mutex
	rnd   *rand.Rand            // guarded by mu
	conns map[net.Conn]struct{} // guarded by mu
	phase fault                 // guarded by mu: what happens most at the moment
}

func newPeer(h2 bool, skews []time.Duration, rnd *rand.Rand, r *records, w *budgetWatch, found *findings) (*peer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &peer{url: "http://" + l.Addr().String(), skews: skews, rnd: rnd, records: r, watch: w, found: found, conns: make(map[net.Conn]struct{})}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!h2)
	protocols.SetUnencryptedHTTP2(h2)
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "soak"})
	if err != nil {
		return nil, err
	}
	p.server = &http.Server{
		Handler: p.clocked(middleware.Handler(http.HandlerFunc(p.serve))), Protocols: protocols,
		ErrorLog: log.New(io.Discard, "", 0), // about clients that leave
		ConnState: func(c net.Conn, state http.ConnState) {
			p.mu.Lock()
			defer p.mu.Unlock()
			switch state {
			case http.StateNew:
				p.conns[c] = struct{}{}
			case http.StateClosed, http.StateHijacked:
				delete(p.conns, c)
			}
		},
	}
	go p.server.Serve(l)
	return p, nil
}

// allSkews are the clocks that a peer's host may have, relative to the clients'.
var allSkews = []time.Duration{0, 0, 50 * time.Millisecond, -50 * time.Millisecond, 30 * time.Second, -30 * time.Second, time.Hour, -time.Hour}

// gross is from where on stint takes a clock for broken, and not for a little off.
const gross = 60 * time.Second

// clocked serves as a host whose clock is off would: to such a one, a deadline
// looks that much nearer or further. Only a clock that is ahead by less than what
// shows that it is broken may make it refuse what is in time.
func (p *peer) clocked(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now := time.Now()
		id, err := strconv.ParseUint(r.Header.Get(headerID), 10, 64)
		if err != nil {
			p.found.add("a request without its number: %v", r.Header)
			return
		}
		p.arrived(r, id, now)
		ahead := time.Duration(p.ahead.Load())
		ms, err := strconv.ParseInt(r.Header.Get(stint.HeaderDeadline), 10, 64)
		if err == nil {
			r.Header.Set(stint.HeaderDeadline, strconv.FormatInt(ms-ahead.Milliseconds(), 10))
		}
		next.ServeHTTP(w, r)
		if err != nil || w.Header().Get(stint.HeaderDeadlineExpired) == "" {
			return
		}
		early := time.Until(time.UnixMilli(ms))
		if left, err := strconv.Atoi(r.Header.Get(stint.HeaderTimeout)); err == nil {
			early = min(early, time.Until(now.Add(time.Duration(left)*time.Millisecond)))
		}
		switch {
		case early <= time.Millisecond:
		case ahead > 0 && ahead < gross:
			p.refused.Add(1)
		default:
			p.found.add("%s %d was refused with %v left, by a host whose clock is ahead by %v", r.Method, id, early, ahead)
		}
	})
}

// breakThings kills connections, steps the clock, and changes what goes wrong,
// until ctx ends.
func (p *peer) breakThings(ctx context.Context) {
	next := time.Now()
	for ctx.Err() == nil {
		p.mu.Lock()
		var victim net.Conn
		for c := range p.conns {
			victim = c
			break
		}
		reset := p.rnd.IntN(2) == 0
		pause := time.Duration(10+p.rnd.IntN(40)) * time.Millisecond
		if time.Now().After(next) {
			// Half of the time all is well.
			p.phase = max(0, fault(p.rnd.IntN(2*int(faults)))-faults)
			next = time.Now().Add(time.Duration(100+p.rnd.IntN(400)) * time.Millisecond)
			if skew := int64(p.skews[p.rnd.IntN(len(p.skews))]); p.ahead.Swap(skew) != skew {
				p.steps.Add(1)
			}
		}
		p.mu.Unlock()
		if victim != nil {
			if tcp, ok := victim.(*net.TCPConn); ok && reset {
				tcp.SetLinger(0)
			}
			victim.Close()
			p.kills.Add(1)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// choose draws a fault: one request in ten has any, and half have the phase's.
func (p *peer) choose() (f fault, variant int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	variant = p.rnd.IntN(1 << 16)
	switch n := p.rnd.IntN(10); {
	case n == 0:
		return fault(p.rnd.IntN(int(faults))), variant
	case n <= 5:
		return p.phase, variant
	}
	return faultNone, variant
}

func (p *peer) serve(w http.ResponseWriter, r *http.Request) {
	id, _ := strconv.ParseUint(r.Header.Get(headerID), 10, 64) // clocked has checked it
	f, variant := p.choose()
	p.arrivals[f].Add(1)
	switch f {
	case faultResetEarly:
		panic(http.ErrAbortHandler)
	case faultEarly:
		p.busy(w, id, variant)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler) // the client has gone; an answer would be a lie
	}
	// What arrived whole by the protocol is whole.
	if want := r.Header.Get(headerSum); want != sum(body) {
		p.found.add("%s %d arrived with %d bytes, length %d: checksum %s, want %s", r.Method, id, len(body), r.ContentLength, sum(body), want)
	}
	if r.Method == http.MethodGet {
		body = content(id)
	}
	switch f {
	case faultBusy:
		p.busy(w, id, variant)
	case faultStall:
		select {
		case <-time.After(time.Duration(variant%400) * time.Millisecond):
		case <-r.Context().Done():
		}
		w.Write(body)
	case faultTrickle:
		for piece := range chunks(body, 4) {
			w.Write(piece)
			w.(http.Flusher).Flush()
			time.Sleep(time.Duration(variant%8) * time.Millisecond)
		}
	case faultHalf:
		w.Header().Set("Content-Length", strconv.Itoa(len(body)+1))
		w.Write(body[:len(body)/2])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	case faultResetLate:
		panic(http.ErrAbortHandler)
	default:
		w.Write(body)
	}
}

// busy answers that the peer cannot serve now, in one of many ways.
func (p *peer) busy(w http.ResponseWriter, id uint64, variant int) {
	code := http.StatusServiceUnavailable
	if variant&1 != 0 {
		code = http.StatusTooManyRequests
	}
	if variant&14 == 0 {
		w.Header().Set("Retry-After-Ms", strconv.Itoa(variant>>8))
	}
	if variant&48 == 0 {
		w.Header().Set(stint.HeaderShouldRetry, "false")
	}
	w.WriteHeader(code)
	text := apology(id)
	if variant&128 != 0 {
		w.(http.Flusher).Flush() // of unknown length
	}
	if variant&(64+128) == 64+128 {
		text = strings.Repeat(text, 2000) // more than anybody drains
	}
	io.WriteString(w, text)
}

// arrived checks what can be seen when a request begins.
func (p *peer) arrived(r *http.Request, id uint64, now time.Time) {
	if why := p.records.arrived(id); why != "" {
		p.found.add("%s %d, retry %q: %s", r.Method, id, r.Header.Get(stint.HeaderRetryCount), why)
	}
	if ms, err := strconv.ParseInt(r.Header.Get(stint.HeaderDeadline), 10, 64); err == nil {
		// One host, one clock.
		raise(&p.overdue, int64(now.Sub(time.UnixMilli(ms))))
	}
	if left := r.Header.Get(stint.HeaderTimeout); left != "" {
		if n, err := strconv.Atoi(left); err != nil || n < 1 {
			p.found.add("%s %d was sent with %q ms left", r.Method, id, left)
		}
	}
	if r.Header.Get(stint.HeaderRetryCount) != "" {
		p.watch.retried(now)
	}
}

func raise(v *atomic.Int64, to int64) {
	for {
		old := v.Load()
		if to <= old || v.CompareAndSwap(old, to) {
			return
		}
	}
}

// content is the answer to a GET.
func content(id uint64) []byte {
	return []byte(strings.Repeat(strconv.FormatUint(id, 36)+" ", int(id%997)+1))
}

// apology is the text of a refusal, or of one that is repeated.
func apology(id uint64) string { return "not now, " + strconv.FormatUint(id, 36) + "\n" }

func sum(b []byte) string { return strconv.FormatUint(uint64(crc32.ChecksumIEEE(b)), 16) }

// chunks cuts b into n pieces.
func chunks(b []byte, n int) func(func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for i := range n {
			if !yield(b[len(b)*i/n : len(b)*(i+1)/n]) {
				return
			}
		}
	}
}
