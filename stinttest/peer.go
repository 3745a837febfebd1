package stinttest

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"
)

// A Peer is the other side of a client under test. It does what its script says
// and notes what arrives. The script is a list of steps: every arrival takes the
// next, and the last one lasts for ever.
//
// A Peer is an [http.Handler] for servers of any kind, and an
// [http.RoundTripper] that a client can have as its base. As a RoundTripper it
// heeds the request's context, starts no goroutine that outlives a call or an
// answer's body, and waits on nothing but time and context, so it works in a
// bubble of testing/synctest.
//
// The zero Peer answers every request with 200. A Peer is safe for concurrent
// use and must not be copied after first use.
type Peer struct {
	// URL is where the checks of this package send their requests. Empty:
	// http://peer.test/, which is for a Peer in memory. Set it before use.
	URL string

	mu       sync.Mutex // guards what follows
	script   []Step
	at       int       // in script
	used     int       // arrivals that script[at] has had
	since    time.Time // the first of them
	arrivals []Arrival
}

// An Arrival is a request as it came to a [Peer].
type Arrival struct {
	At     time.Time // when its header had come
	Method string
	URI    string // path and query
	Host   string
	// Header has its names in canonical form, as on a server, however the
	// client wrote them. It is shared: do not modify it.
	Header http.Header
	// Body is what was read of the body, which is all of it once the peer has
	// answered, unless BodyErr says why not. It is shared: do not modify it.
	Body    []byte
	BodyErr error
}

// NewPeer returns a Peer with a script. Without steps it answers every request
// with 200.
func NewPeer(script ...Step) *Peer {
	p := new(Peer)
	p.Use(script...)
	return p
}

// StartPeer returns a Peer that listens on a loopback address, which its URL
// names. It speaks HTTP/1.1, and HTTP/2 to clients that begin with it. The TB's
// Cleanup stops it and drops its connections. If there is nothing to listen on,
// it calls Fatalf; the Peer is then in memory.
func StartPeer(t TB, script ...Step) *Peer {
	t.Helper()
	p := NewPeer(script...)
	p.URL = serve(t, p)
	return p
}

// Use replaces the script. Requests already under way are not affected, and
// arrivals are kept.
func (p *Peer) Use(script ...Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.script, p.at, p.used = slices.Clone(script), 0, 0
}

// Arrivals returns what has arrived so far, in order.
func (p *Peer) Arrivals() []Arrival {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.arrivals)
}

// Count returns how many requests have arrived so far.
func (p *Peer) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.arrivals)
}

func (p *Peer) url() string {
	if p.URL == "" {
		return "http://peer.test/"
	}
	return p.URL
}

// arrive notes a request, and returns what to do with it and its number.
func (p *Peer) arrive(a Arrival) (Step, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arrivals = append(p.arrivals, a)
	number := len(p.arrivals) - 1
	if len(p.script) == 0 {
		return OK(), number
	}
	if p.used >= max(1, p.script[p.at].times) && p.at < len(p.script)-1 {
		p.at++
		p.used = 0
	}
	if p.used == 0 {
		p.since = a.At
	}
	n := p.used
	p.used++
	return p.script[p.at].choose(n, a.At.Sub(p.since)), number
}

// receive reads the body of an arrival and notes it.
func (p *Peer) receive(number int, body io.Reader) error {
	if body == nil {
		return nil
	}
	var all bytes.Buffer
	_, err := io.Copy(&all, body)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.arrivals[number].Body = all.Bytes()
	p.arrivals[number].BodyErr = err
	return err
}
