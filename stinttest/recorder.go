package stinttest

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stinthttp/stint"
)

// A Recorder collects the deadlines that the services of a chain receive. Put it
// in front of each handler, inside what adopts deadlines, so that it sees the
// context that the handler gets as well:
//
//	rec := new(stinttest.Recorder)
//	orders := httptest.NewServer(mw.Handler(rec.Handler("orders", ordersHandler)))
//
// Outside, it sees the header alone, and requests that are refused too.
//
// Which user request a call belongs to, and which service made it, is told by
// what is being served at that moment, not by a header or the context: a service
// that loses the deadline, by calling with context.Background for instance,
// loses those with it. So send one user request at a time, or set ID; and name
// the callers where a service makes several calls at once.
//
// The zero Recorder is ready to use. It is safe for concurrent use, keeps
// everything that it has seen, and must not be copied after first use.
type Recorder struct {
	// ID tells the requests of one user request from those of others, by a
	// header that all services pass on. With it, user requests may overlap. nil:
	// they must not. Set it before use.
	ID func(*http.Request) string

	// Caller maps the name of a hop to the name of the hop that calls it, for
	// services that call several others at once: the others are being served as
	// well, and could as well be the caller. Hops that are not in it were called
	// by the one that began last. Set it before use.
	Caller map[string]string

	mu     sync.Mutex // guards what follows
	chains []*chain
	byID   map[string]*chain // the latest; without ID, the one
}

// A Hop is what one service received with one request.
type Hop struct {
	Name string
	// Caller is the index of the calling hop in the same user request; -1: the
	// user, or something that is not recorded.
	Caller int
	At     time.Time
	// Header has the lines of X-Request-Deadline as they came; nil: none.
	Header []string
	// Bounded says that the context has a deadline, Remaining how far away it
	// was.
	Bounded   bool
	Remaining time.Duration
}

// Deadline returns the deadline in the header, in Unix milliseconds by the clock
// of whoever set it: the earliest of up to four usable values. ok is false if
// there is none.
func (h Hop) Deadline() (ms int64, ok bool) {
	members := strings.Split(strings.Join(h.Header, ","), ",")
	if len(members) > 4 {
		return 0, false
	}
	for _, m := range members {
		v, err := strconv.ParseUint(strings.Trim(m, " \t"), 10, 63)
		if err == nil && (!ok || int64(v) < ms) {
			ms, ok = int64(v), true
		}
	}
	return ms, ok
}

// A chain is one user request.
type chain struct {
	hops    []Hop
	open    []int // those being served, in the order in which they began
	overlap bool  // another one was let in while it was being served
}

// Handler returns a handler that notes what each request brings under this name,
// and passes request and response writer on to next as they are.
func (rec *Recorder) Handler(name string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer rec.enter(name, r)()
		next.ServeHTTP(w, r)
	})
}

// Requests returns what was seen so far: for each user request, in the order in
// which they began, its hops in the order in which they were reached.
func (rec *Recorder) Requests() [][]Hop {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	all := make([][]Hop, len(rec.chains))
	for i, c := range rec.chains {
		all[i] = slices.Clone(c.hops)
	}
	return all
}

// count returns how many hops were seen under any name.
func (rec *Recorder) count() (n int) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	for _, c := range rec.chains {
		n += len(c.hops)
	}
	return n
}

// serving returns the name of a hop that is still being served, "" if none is.
func (rec *Recorder) serving() string {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	for _, c := range rec.chains {
		if len(c.open) > 0 {
			return c.hops[c.open[0]].Name
		}
	}
	return ""
}

func (rec *Recorder) overlaps() bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return slices.ContainsFunc(rec.chains, func(c *chain) bool { return c.overlap })
}

// enter notes that a hop is reached, and returns what notes that it is done.
func (rec *Recorder) enter(name string, r *http.Request) (leave func()) {
	h := Hop{Name: name, Caller: -1, At: time.Now(), Header: slices.Clone(r.Header[stint.HeaderDeadline])}
	h.Bounded, h.Remaining = bound(r.Context(), h.At)
	id := ""
	if rec.ID != nil {
		id = rec.ID(r)
	}

	rec.mu.Lock()
	defer rec.mu.Unlock()
	c := rec.byID[id]
	if c == nil || id == "" && len(c.open) == 0 {
		c = new(chain)
		rec.chains = append(rec.chains, c)
		if rec.byID == nil {
			rec.byID = make(map[string]*chain)
		}
		rec.byID[id] = c
	}
	h.Caller = c.caller(name, rec.Caller[name])
	// With nothing but time to go by, the next user's request looks like a call
	// by the service that began last.
	if id == "" && len(c.open) > 0 && (h.Caller < 0 || name == c.hops[0].Name && rec.Caller[name] == "") {
		c.overlap = true
	}
	c.hops = append(c.hops, h)
	i := len(c.hops) - 1
	c.open = append(c.open, i)
	return func() {
		rec.mu.Lock()
		defer rec.mu.Unlock()
		c.open = slices.DeleteFunc(c.open, func(j int) bool { return j == i })
	}
}

// caller returns the latest hop being served that can have called this one: the
// one named, or any but its own kind, which is an earlier attempt of the same
// call.
func (c *chain) caller(name, named string) int {
	for _, i := range slices.Backward(c.open) {
		if n := c.hops[i].Name; n == named || named == "" && n != name {
			return i
		}
	}
	return -1
}

func bound(ctx context.Context, now time.Time) (bool, time.Duration) {
	d, ok := ctx.Deadline()
	if !ok {
		return false, 0
	}
	return true, d.Sub(now)
}
