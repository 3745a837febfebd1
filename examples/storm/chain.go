package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stinthttp/stint"
)

// tiers are the four services, from the one that users call to the one that
// breaks. Each calls the next.
var tiers = [...]string{"edge", "orders", "ledger", "database"}

const bottom = len(tiers) - 1

// Both chains give a user's request about a second; only the one with stint
// tells the tiers below.
const (
	timeout       = time.Second
	plainAttempts = 3
	plainPause    = 10 * time.Millisecond
)

// A caller sends one request to the next tier, with whatever it knows of
// retries. *http.Client is one.
type caller interface {
	Do(*http.Request) (*http.Response, error)
	CloseIdleConnections()
}

// A guard is how the tiers of a chain call each other and receive calls.
type guard interface {
	// caller returns how to call the tier named peer.
	caller(peer string) (caller, error)
	// receive wraps the handler of a tier.
	receive(tier int, next http.Handler) (http.Handler, error)
}

// unguarded is what grows where nobody decides: each service tries three times
// and knows nothing of the others.
type unguarded struct{}

func (unguarded) caller(string) (caller, error) {
	return plainRetries{&http.Client{Transport: pooledTransport(), Timeout: timeout}}, nil
}

func (unguarded) receive(_ int, next http.Handler) (http.Handler, error) { return next, nil }

// plainRetries makes up to three attempts, each with the full timeout.
type plainRetries struct{ *http.Client }

func (p plainRetries) Do(req *http.Request) (*http.Response, error) {
	for attempt := 1; ; attempt++ {
		resp, err := p.Client.Do(req)
		if err == nil && resp.StatusCode < 500 || attempt == plainAttempts {
			return resp, err
		}
		if err == nil {
			discard(resp)
		}
		if !pause(req.Context(), plainPause) {
			return nil, req.Context().Err()
		}
	}
}

// guarded puts stint between the tiers: defaults everywhere, and a deadline at
// the edge. One set of metrics serves all tiers: labels tell them apart.
type guarded struct {
	config    stint.Config // of every caller; zero: the defaults
	metrics   *stint.Metrics
	debugEcho func(*http.Request) bool // of every tier
	clients   int                      // the ledger is so many callers of the database, each of its share
	capped    bool                     // the database holds all their retries to one budget
	limited   bool                     // the database has a Limit
	hedged    bool                     // the ledger hedges; in one layer, or hedges would multiply
	halves    *[len(tiers)]halves
}

// halves is the stint of one tier: what it calls with, which the database lacks,
// and what it receives with.
type halves struct {
	transport  *stint.Transport
	middleware *stint.Middleware
}

func newGuarded() (guarded, error) {
	metrics, err := stint.NewMetrics(stint.MetricsConfig{})
	return guarded{metrics: metrics, halves: new([len(tiers)]halves)}, err
}

func (g guarded) caller(peer string) (caller, error) {
	if peer != tiers[bottom] || g.clients <= 1 {
		return g.client(peer)
	}
	m := new(manyCallers)
	for range g.clients {
		c, err := g.client(peer)
		if err != nil {
			return nil, err
		}
		m.callers = append(m.callers, c)
	}
	return m, nil
}

// A manyCallers is as many instances of a service as it has callers, which take
// turns. Each knows its own requests alone.
type manyCallers struct {
	callers []caller
	next    atomic.Uint64
}

func (m *manyCallers) Do(req *http.Request) (*http.Response, error) {
	return m.callers[m.next.Add(1)%uint64(len(m.callers))].Do(req)
}

func (m *manyCallers) CloseIdleConnections() {
	for _, c := range m.callers {
		c.CloseIdleConnections()
	}
}

func (g guarded) client(peer string) (caller, error) {
	config := g.config
	// By default a peer is called by its host and port. The ports here are new each
	// time, and metrics read better with names.
	config.Peer = func(*http.Request) string { return peer }
	config.Metrics = g.metrics
	if g.hedged && peer == tiers[bottom] {
		config.Hedge = stint.HedgeConfig{Quantile: 0.95}
	}
	transport, err := stint.NewTransport(config)
	if err != nil {
		return nil, err
	}
	g.halves[slices.Index(tiers[:], peer)-1].transport = transport
	return &http.Client{Transport: transport}, nil
}

func (g guarded) receive(tier int, next http.Handler) (http.Handler, error) {
	config := stint.MiddlewareConfig{Service: tiers[tier], Metrics: g.metrics, DebugEcho: g.debugEcho}
	if tier == 0 {
		config.Timeout = timeout
	}
	if tier == bottom {
		if g.capped {
			config.RetryBudget = &stint.BudgetConfig{}
		}
		if g.limited {
			config.Limit = stint.LimitConfig{MaxConcurrent: 10}
		}
	}
	middleware, err := stint.NewMiddleware(config)
	if err != nil {
		return nil, err
	}
	g.halves[tier].middleware = middleware
	return middleware.Handler(next), nil
}

// A chain is the four services, running.
type chain struct {
	url      string // of the edge
	database *database
	servers  []*http.Server
	callers  []caller
	cancel   context.CancelFunc
}

// A chainConfig says what to run.
type chainConfig struct {
	guard    guard
	capacity float64      // of the database, requests per second
	record   *record      // nil: nothing is counted
	inside   bool         // of the database, count what its handler gets, not what arrives
	edge     net.Listener // nil: a free port
	// outside, where set, wraps the edge from outside all that is measured.
	outside func(d *database, edge http.Handler) http.Handler
}

// startChain starts the services bottom up, each on a port of its own on the
// loopback interface.
func startChain(c chainConfig) (_ *chain, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	ch := &chain{database: newDatabase(ctx, c.capacity), cancel: cancel}
	defer func() {
		if err != nil {
			ch.stop()
		}
	}()
	var handler http.Handler = ch.database
	for tier := bottom; tier >= 0; tier-- {
		if tier < bottom {
			next, err := c.guard.caller(tiers[tier+1])
			if err != nil {
				return nil, err
			}
			ch.callers = append(ch.callers, next)
			handler = service{next: next, url: ch.url}
		}
		inside := c.inside && tier == bottom
		if inside {
			handler = c.record.count(tier, handler)
		}
		if handler, err = c.guard.receive(tier, handler); err != nil {
			return nil, err
		}
		if inside {
			handler = c.record.countDoor(handler)
		} else {
			handler = c.record.count(tier, handler)
		}
		if tier == 0 && c.outside != nil {
			handler = c.outside(ch.database, handler)
		}
		listener := c.edge
		if tier > 0 || listener == nil {
			if listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
				return nil, fmt.Errorf("%s: %w", tiers[tier], err)
			}
		}
		ch.url = "http://" + listener.Addr().String() + "/"
		server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
		ch.servers = append(ch.servers, server)
		go func() {
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				log.Printf("%s: %v", tiers[tier], err)
			}
		}()
	}
	return ch, nil
}

// stop ends the services from the edge down, so that each can finish what it
// has begun.
func (c *chain) stop() {
	// First the connections that were opened and never used: to a server they
	// look as if a request were about to come.
	for _, caller := range c.callers {
		caller.CloseIdleConnections()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for i := len(c.servers) - 1; i >= 0; i-- {
		if c.servers[i].Shutdown(ctx) != nil {
			c.servers[i].Close()
		}
	}
	c.cancel()
}

// A service is a tier above the bottom: it answers with what the next tier
// says.
type service struct {
	next caller
	url  string
}

func (s service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, s.url, nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if cohort := r.Header[cohortHeader]; cohort != nil {
		req.Header[cohortHeader] = cohort
	}
	resp, err := s.next.Do(req)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		http.Error(w, err.Error(), http.StatusGatewayTimeout)
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadGateway)
	default:
		defer resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
		io.Copy(w, resp.Body) // an error is the caller's going, or the peer's: nobody is left to tell
	}
}

// pooledTransport returns the base for callers without stint. A storm is
// thousands of requests a second: too few idle connections would be as many
// new ones, and use up the ports.
func pooledTransport() *http.Transport {
	return &http.Transport{
		MaxIdleConnsPerHost: 1000,
		MaxConnsPerHost:     2000,
		IdleConnTimeout:     30 * time.Second,
		DisableCompression:  true,
	}
}

// discard ends a response so that its connection can be used again.
func discard(resp *http.Response) {
	io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	resp.Body.Close()
}
