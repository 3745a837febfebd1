package stint

import (
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// How long a host is left out after a failure. It doubles with each in a row.
const (
	hostPause    = time.Second
	maxHostPause = 30 * time.Second
)

// Hosts are the hosts behind one name: a static list, for [Config].Elsewhere.
//
// Attempts go to one of them at random. One that fails is left out for a second,
// then for two, four, and up to 30 s: after each pause it gets one attempt, and is
// back for good when that succeeds. A retry does not go where the request has just
// failed. Where more than half of the list is left out, all of it is in again:
// then it is the peer that is down, and no host gets more than twice its share
// because others fail.
//
// The name stays the peer: it has the budget, the latencies and the metrics. Hosts
// are told apart by what each attempt shows and not by health checks. Make one
// with [NewHosts]. Safe for concurrent use, also by several Transports.
type Hosts struct {
	name   string
	hosts  []string
	origin time.Time

	mu     sync.Mutex // guards what follows
	states []hostState
	in     []int // room for the choice
}

type hostState struct {
	fails int           // in a row
	until time.Duration // left out until then, since origin
	trial bool          // one attempt is to show whether it is back
}

// NewHosts returns the list of hosts, each with a port or without, that requests
// to URLs with the host name go to; requests to others are left as they are. The
// error joins a [*ConfigError] for each argument that cannot be used.
//
// Requests keep the name in their Host header. With https, certificates have to be
// valid for the host in the list, or the base has to have the name as its TLS
// ServerName.
func NewHosts(name string, hosts ...string) (*Hosts, error) {
	var errs configErrors
	const form = "must be a host as in a URL, with or without a port"
	errs.check(validHost(name), "NewHosts.name", name, form)
	errs.check(len(hosts) > 0, "NewHosts.hosts", hosts, "must not be empty")
	seen := make(map[string]bool)
	for i, host := range hosts {
		field := "NewHosts.hosts[" + strconv.Itoa(i) + "]"
		errs.check(validHost(host), field, host, form)
		errs.check(!seen[host], field, host, "is in the list already")
		seen[host] = true
	}
	if err := errs.join(); err != nil {
		return nil, err
	}
	return &Hosts{
		name: name, hosts: append([]string(nil), hosts...), origin: time.Now(),
		states: make([]hostState, len(hosts)), in: make([]int, 0, len(hosts)),
	}, nil
}

func validHost(s string) bool {
	u, err := url.Parse("http://" + s)
	return err == nil && s != "" && u.Host == s && u.Hostname() != ""
}

// Pick chooses the host of an attempt: it is what Config.Elsewhere takes.
func (h *Hosts) Pick(out *http.Request, failed string) (done func(ok bool)) {
	if !strings.EqualFold(out.URL.Host, h.name) {
		return nil
	}
	i := h.choose(time.Since(h.origin), failed, rand.IntN)
	out.URL.Host = h.hosts[i]
	return func(ok bool) { h.learn(time.Since(h.origin), i, ok) }
}

// choose returns the index of a host; below(n) is uniform in [0, n).
func (h *Hosts) choose(at time.Duration, failed string, below func(int) int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.in = h.in[:0]
	for i, s := range h.states {
		if at >= s.until {
			h.in = append(h.in, i)
		}
	}
	if 2*len(h.in) < len(h.hosts) {
		h.in = h.in[:0]
		for i := range h.hosts {
			h.in = append(h.in, i)
		}
	}
	if k := h.find(failed); k >= 0 && len(h.in) > 1 {
		h.in = append(h.in[:k], h.in[k+1:]...)
	}
	i := h.in[below(len(h.in))]
	if s := &h.states[i]; s.fails > 0 && at >= s.until {
		// Back on trial: the others wait until it has shown how it is. If nobody
		// hears of this attempt again, there is another after the pause.
		s.trial, s.until = true, at+pause(s.fails)
	}
	return i
}

// find returns where in h.in the host is, or -1.
func (h *Hosts) find(host string) int {
	for k, i := range h.in {
		if h.hosts[i] == host {
			return k
		}
	}
	return -1
}

func (h *Hosts) learn(at time.Duration, i int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.states[i]
	switch {
	case ok:
		*s = hostState{}
	case at < s.until && !s.trial:
		// It is out already: this attempt began before.
	default:
		s.fails++
		s.trial, s.until = false, at+pause(s.fails)
	}
}

func pause(fails int) time.Duration {
	return min(maxHostPause, hostPause<<min(fails-1, 10))
}
