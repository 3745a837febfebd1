package main

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"

	"github.com/stinthttp/stint"
)

// A hopKind is how the ledger calls the database under -serve: as it should, or
// with one of the mistakes that the alerts are for.
type hopKind string

const (
	hopGuarded   hopKind = "guarded"   // as all other hops
	hopLavish    hopKind = "lavish"    // with stint, but the budget was opened wide
	hopForgetful hopKind = "forgetful" // with stint, but with context.Background: the deadline is lost
	hopPlain     hopKind = "plain"     // three plain attempts, as if nobody had heard of stint
)

// A switchedHop guards all tiers, and lets somebody change the last hop while
// it runs.
type switchedHop struct {
	guarded
	kinds  map[hopKind]caller
	lavish *stint.Transport
	now    atomic.Pointer[caller]
}

func (s *switchedHop) caller(peer string) (caller, error) {
	next, err := s.guarded.caller(peer)
	if err != nil || peer != tiers[bottom] {
		return next, err
	}
	lavish, err := stint.NewTransport(stint.Config{
		Peer:    func(*http.Request) string { return peer },
		Metrics: s.metrics,
		Budget:  stint.BudgetConfig{Ratio: 1, MinPerSecond: 1e6, PeakFactor: 1e6},
	})
	if err != nil {
		return nil, err
	}
	s.lavish = lavish
	plain, err := unguarded{}.caller(peer)
	if err != nil {
		return nil, err
	}
	s.kinds = map[hopKind]caller{
		hopGuarded:   next,
		hopLavish:    &http.Client{Transport: lavish},
		hopForgetful: forgetful{next},
		hopPlain:     plain,
	}
	return s, s.set(hopGuarded)
}

func (s *switchedHop) set(k hopKind) error {
	c, ok := s.kinds[k]
	if !ok {
		return fmt.Errorf("no hop is called %q: there are guarded, lavish, forgetful, plain", k)
	}
	s.now.Store(&c)
	return nil
}

func (s *switchedHop) Do(req *http.Request) (*http.Response, error) { return (*s.now.Load()).Do(req) }

func (s *switchedHop) CloseIdleConnections() {
	for _, c := range s.kinds {
		c.CloseIdleConnections()
	}
}

// forgetful makes its calls with a context of its own.
type forgetful struct{ caller }

func (f forgetful) Do(req *http.Request) (*http.Response, error) {
	return f.caller.Do(req.WithContext(context.Background()))
}
