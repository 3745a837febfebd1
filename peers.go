package stint

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultMaxPeers is how many peers a Transport keeps apart.
const DefaultMaxPeers = 1000

const (
	overflowPeer = "_other"
	maxPeerName  = 512 // bytes; a longer name, which no host has, shares the overflow peer
	// labelIdle is how long a peer has to be quiet before its metric labels go
	// to a newcomer. Much longer than a budget's window: a series that comes
	// and goes is of no use to anybody.
	labelIdle = 10 * time.Minute
)

// A peer is what a Transport knows of one peer.
type peer struct {
	name     string
	budget   *budget
	throttle *throttle // nil: Config.Throttle is off
	latency  *classes
	metrics  *peerMetrics
	hedges   *hedgeWatch  // nil: Config.Hedge is off
	held     atomic.Int32 // answers kept open by waiting retries

	refusals ring[refusal] // the latest, for DebugHandler

	inflight atomic.Int64 // requests inside RoundTrip; negative: evicted
	lastUsed atomic.Int64 // when the last of them ended, nanoseconds since peers.origin
}

const evicted = -1 << 62

// enter reports whether p may still be used. Each true is undone by leave.
func (p *peer) enter() bool {
	if p.inflight.Add(1) > 0 {
		return true
	}
	p.inflight.Add(-1)
	return false
}

func (p *peer) leave(at time.Duration) {
	p.lastUsed.Store(int64(at))
	p.inflight.Add(-1)
}

// peers is a bounded table of peers. Only one that has been idle for a whole
// budget window gives way to a newcomer: it has neither credit nor spent
// retries to forget. Where all are active, newcomers share one overflow peer,
// so that whoever invents host names gets neither memory nor budget from it.
// Safe for concurrent use; a look-up takes no lock.
type peers struct {
	cfg    *Config
	origin time.Time
	byName sync.Map // string → *peer
	mu     sync.Mutex
	n      int           // guarded by mu: peers in byName
	oldest time.Duration // guarded by mu: no peer was last used before that, since origin
	other  *peer
}

func newPeers(c *Config, origin time.Time) *peers {
	return &peers{cfg: c, origin: origin}
}

// enter returns the peer of that name for one request, which calls leave.
func (t *peers) enter(name string, now time.Time) *peer {
	if p, ok := t.byName.Load(name); ok && p.(*peer).enter() {
		return p.(*peer)
	}
	return t.add(name, now)
}

func (t *peers) leave(p *peer, now time.Time) { p.leave(now.Sub(t.origin)) }

func (t *peers) add(name string, now time.Time) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p, ok := t.byName.Load(name); ok && p.(*peer).enter() {
		return p.(*peer) // another request was quicker
	}
	if len(name) > maxPeerName {
		return t.overflowLocked()
	}
	if t.n >= t.cfg.MaxPeers {
		t.sweepLocked(now, t.cfg.Budget.memory())
		if t.n >= t.cfg.MaxPeers {
			return t.overflowLocked()
		}
	} else if t.cfg.Metrics.labelsFull() {
		t.sweepLocked(now, labelIdle)
	}
	p := t.newPeer(strings.Clone(name)) // the name may be part of a long URL
	t.byName.Store(p.name, p)
	t.n++
	return p
}

func (t *peers) overflowLocked() *peer {
	if t.other == nil {
		t.other = t.newPeer(overflowPeer)
	} else {
		t.other.enter()
	}
	return t.other
}

// newPeer returns a peer that its first request has entered.
func (t *peers) newPeer(name string) *peer {
	p := &peer{
		name:    name,
		budget:  newBudget(t.cfg.Budget, t.origin),
		latency: newClasses(t.cfg.Admission.Window, t.origin),
		metrics: t.cfg.Metrics.acquirePeer(name),
	}
	p.throttle = newThrottle(t.cfg.Throttle, p.budget)
	if t.cfg.Hedge.on() {
		p.hedges, p.budget.turns = new(hedgeWatch), new(turnLog)
	}
	p.inflight.Store(1)
	return p
}

// sweepLocked evicts all peers that have been idle for that long, and remembers
// how long the idlest of the others has been: a flood of new names costs one
// pass over the table, not one each.
func (t *peers) sweepLocked(now time.Time, idle time.Duration) {
	at := now.Sub(t.origin)
	if at-t.oldest < idle {
		return
	}
	oldest := at
	t.byName.Range(func(k, v any) bool {
		p := v.(*peer)
		last := time.Duration(p.lastUsed.Load())
		if p.inflight.Load() == 0 && at-last >= idle && p.inflight.CompareAndSwap(0, evicted) {
			if time.Duration(p.lastUsed.Load()) != last {
				p.inflight.Add(-evicted) // it was used in between
				return true
			}
			t.byName.Delete(k)
			t.n--
			t.cfg.Metrics.releasePeer(p.metrics)
			return true
		}
		if p.inflight.Load() == 0 {
			oldest = min(oldest, last)
		}
		return true
	})
	t.oldest = oldest
}

// peerName returns the default key of a budget: host and port in lower case,
// the port always spelled out. Ports are different peers, spellings are not.
func peerName(req *http.Request) string {
	host := req.URL.Host
	if spelledOut(host) {
		return host // as a rule within a fleet; the long way takes 80 ns
	}
	port := req.URL.Port()
	if port == "" {
		host = strings.TrimSuffix(host, ":")
		if req.URL.Scheme == "https" {
			host += ":443"
		} else {
			host += ":80"
		}
	}
	return strings.ToLower(host)
}

// spelledOut reports whether host is a name or an IPv4 address in lower case, with
// a port.
func spelledOut(host string) bool {
	colon := -1
	for i := range len(host) {
		switch b := host[i]; {
		case b == ':' && colon < 0:
			colon = i
		case '0' <= b && b <= '9':
		case colon < 0 && ('a' <= b && b <= 'z' || b == '.' || b == '-' || b == '_'):
		default:
			return false
		}
	}
	return colon >= 0 && colon < len(host)-1
}
