package stint

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// What the storms have in common: peers that misbehave on a schedule, a
// simulation of requests in passed time, and a base that plays the same peers
// behind the real Transport.

// A fault is what a peer does in one phase of a timeline.
type fault int

const (
	healthy      fault = iota
	failing            // answers 503
	resetting          // drops the connection
	partly             // some attempts fail, the others are answered
	silent             // never answers
	stallFails         // holds everything until the phase ends, then fails it
	stallFlushes       // holds everything until the phase ends, then answers it
)

func (f fault) String() string {
	return [...]string{"healthy", "failing", "resetting", "partly", "silent", "stallFails", "stallFlushes"}[f]
}

// A phase is one stretch of a timeline.
type phase struct {
	lasts time.Duration
	fault fault
	share float64       // partly: how many attempts fail, in [0, 1]
	takes time.Duration // until the answer or the failure; 0: 20 ms and 5 ms
	fails time.Duration // until a failure, where that differs
	hint  time.Duration // failing, partly: Retry-After, whole seconds
}

// A timeline is how a peer behaves over time. After its last phase it is
// healthy.
type timeline struct {
	name    string
	phases  []phase
	timeout time.Duration // after which an attempt is given up on our side; 0: never
}

func (tl *timeline) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (timeout %v):", tl.name, tl.timeout)
	for _, p := range tl.phases {
		fmt.Fprintf(&b, " %v %v", p.lasts, p.fault)
		if p.share > 0 {
			fmt.Fprintf(&b, " %.2f", p.share)
		}
		if p.takes > 0 {
			fmt.Fprintf(&b, " in %v", p.takes)
		}
		if p.fails > 0 {
			fmt.Fprintf(&b, " failing in %v", p.fails)
		}
		if p.hint > 0 {
			fmt.Fprintf(&b, " hint %v", p.hint)
		}
		b.WriteByte(';')
	}
	return b.String()
}

func (tl *timeline) length() (d time.Duration) {
	for _, p := range tl.phases {
		d += p.lasts
	}
	return d
}

type replyKind int

const (
	replyOK replyKind = iota
	replyFailure
	replyReset
	replyTimeout
)

// A reply is the end of one attempt as its sender sees it.
type reply struct {
	at   time.Duration
	kind replyKind
	hint time.Duration
}

// A faulty is a peer in passed time. Calls come in the order of sent; draw is
// uniform in [0, 1).
type faulty interface {
	reply(sent time.Duration, draw float64) reply
}

const neverEnds = time.Duration(math.MaxInt64)

func (tl *timeline) reply(sent time.Duration, draw float64) reply {
	ok, bad := 20*time.Millisecond, 5*time.Millisecond
	r := reply{at: sent + ok, kind: replyOK}
	var ends time.Duration
	for _, p := range tl.phases {
		if ends += p.lasts; sent >= ends {
			continue
		}
		if p.takes > 0 {
			ok, bad = p.takes, p.takes
		}
		if p.fails > 0 {
			bad = p.fails
		}
		r.at = sent + ok
		switch f := p.fault; {
		case f == failing, f == partly && draw < p.share:
			r = reply{sent + bad, replyFailure, p.hint}
		case f == resetting:
			r = reply{sent + bad, replyReset, 0}
		case f == silent:
			r.at = neverEnds
		case f == stallFails:
			r = reply{ends + bad, replyFailure, 0}
		case f == stallFlushes:
			r.at = ends + bad
		}
		break
	}
	if tl.timeout > 0 && r.at-sent > tl.timeout {
		r = reply{sent + tl.timeout, replyTimeout, 0}
	}
	return r
}

// randomTimeline returns faults of all kinds for about as long as lasts.
func randomTimeline(seed uint64, lasts time.Duration) *timeline {
	rng := rand.New(rand.NewPCG(seed, 0xfa017))
	// Evenly over orders of magnitude: the trouble lies in short and long ones.
	spread := func(least, most time.Duration) time.Duration {
		return time.Duration(float64(least) * math.Pow(float64(most)/float64(least), rng.Float64()))
	}
	tl := &timeline{name: fmt.Sprintf("random %d", seed), timeout: spread(200*time.Millisecond, 5*time.Second)}
	if rng.IntN(4) > 0 { // else there is no health to begin with
		tl.phases = append(tl.phases, phase{lasts: spread(time.Second, 30*time.Second)})
	}
	for tl.length() < lasts {
		p := phase{fault: fault(rng.IntN(int(stallFlushes) + 1)), lasts: spread(50*time.Millisecond, 15*time.Second)}
		switch p.fault {
		case partly:
			p.share = rng.Float64()
			fallthrough
		case failing:
			if rng.IntN(4) == 0 {
				p.hint = time.Duration(1+rng.IntN(3)) * time.Second
			}
			fallthrough
		case healthy, resetting:
			if rng.IntN(2) == 0 {
				p.takes = spread(time.Millisecond, 5*time.Second)
			}
		}
		tl.phases = append(tl.phases, p)
	}
	return tl
}

// A fifo is a server with a queue: it does one attempt after the other, also
// those whose senders have long gone, and stands still from stallFrom to
// stallTo.
type fifo struct {
	perSecond          int
	stallFrom, stallTo time.Duration
	timeout            time.Duration // after which an attempt is given up on our side; 0: never

	free time.Duration // when all that has arrived is done
}

func (q *fifo) reply(sent time.Duration, _ float64) reply {
	start := max(sent, q.free)
	if start >= q.stallFrom && start < q.stallTo {
		start = q.stallTo
	}
	q.free = start + time.Second/time.Duration(q.perSecond)
	if q.timeout > 0 && q.free-sent > q.timeout {
		return reply{sent + q.timeout, replyTimeout, 0}
	}
	return reply{q.free, replyOK, 0}
}

// A stormLog is what happened in a storm, all times since its start.
type stormLog struct {
	sent     []time.Duration // all attempts as the peer sees them, in order
	retries  []time.Duration // of these, attempts after the first
	requests []stormRequest  // in the order of their arrival
}

type stormRequest struct {
	start, end time.Duration
	attempts   int
	ok         bool
	reason     Reason // why there was no (further) retry
}

// peak returns the most attempts in any half-open second, wherever it begins,
// and where the worst one ends.
func peak(sent []time.Duration) (n int, at time.Duration) {
	first := 0
	for i, t := range sent {
		for sent[first] <= t-time.Second {
			first++
		}
		if i-first+1 > n {
			n, at = i-first+1, t
		}
	}
	return n, at
}

// between counts the times in [from, to).
func between(times []time.Duration, from, to time.Duration) int {
	i, _ := slices.BinarySearch(times, from)
	j, _ := slices.BinarySearch(times, to)
	return j - i
}

// succeeded returns the share of the requests that arrived in [from, to) and
// succeeded, and how many there were.
func (l *stormLog) succeeded(from, to time.Duration) (share float64, n int) {
	ok := 0
	for _, r := range l.requests {
		if r.start >= from && r.start < to {
			n++
			if r.ok {
				ok++
			}
		}
	}
	return float64(ok) / float64(max(n, 1)), n
}

// recovered returns the earliest time, in whole seconds from after on, from
// which on all requests of ten seconds succeed; neverEnds if there is none.
func (l *stormLog) recovered(after time.Duration) time.Duration {
	end := l.requests[len(l.requests)-1].start
	for from := after; from+10*time.Second <= end; from += time.Second {
		if share, _ := l.succeeded(from, from+10*time.Second); share == 1 {
			return from
		}
	}
	return neverEnds
}

// A budgetStorm sends evenly arriving requests to a peer with nothing but a
// budget in between: the decisions that Transport makes, in the same order, and
// no goroutine.
type budgetStorm struct {
	peer    faulty
	lasts   time.Duration // of the arrivals
	rate    float64       // requests a second; 0: 100
	seed    uint64
	config  BudgetConfig
	nobody  bool // no budget asks: plain retries
	retries int  // at most for each request; 0: 2, MaxAttempts 3
	backoff Backoff
	late    time.Duration // by how much timers are late, at most
}

type stormEvent struct {
	at      time.Duration
	order   uint64 // among those of one moment
	kind    stormEventKind
	request int32
	reply   reply
}

type stormEventKind uint8

const (
	eventEnd  stormEventKind = iota // an attempt has ended
	eventTake                       // a backoff has
	eventSend                       // a wait for a turn has
)

func (e *stormEvent) before(f *stormEvent) bool {
	return e.at < f.at || e.at == f.at && e.order < f.order
}

// stormEvents is a heap. container/heap would box every event, and there are
// millions.
type stormEvents []stormEvent

func (h *stormEvents) push(e stormEvent) {
	*h = append(*h, e)
	s := *h
	for i := len(s) - 1; i > 0; {
		up := (i - 1) / 2
		if !s[i].before(&s[up]) {
			break
		}
		s[i], s[up] = s[up], s[i]
		i = up
	}
}

func (h *stormEvents) pop() stormEvent {
	s := *h
	top := s[0]
	s[0] = s[len(s)-1]
	s = s[:len(s)-1]
	*h = s
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < len(s); down++ {
			if s[down].before(&s[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		s[i], s[least] = s[least], s[i]
		i = least
	}
}

func (s budgetStorm) run() *stormLog {
	rng := rand.New(rand.NewPCG(s.seed, 1))
	draws := rand.New(rand.NewPCG(s.seed, 2)) // the peer's, so that it does not depend on ours
	if s.rate == 0 {
		s.rate = 100
	}
	if s.retries == 0 {
		s.retries = DefaultMaxAttempts - 1
	}
	backoff := s.backoff.withDefaults()
	origin := time.Unix(1e9, 0)
	b := newBudget(s.config.withDefaults(), origin)
	lateness := func() time.Duration {
		if s.late == 0 {
			return 0
		}
		return time.Duration(rng.Int64N(int64(s.late) + 1))
	}

	var (
		events stormEvents
		log    stormLog
	)
	push := func(at time.Duration, kind stormEventKind, request int32, r reply) {
		// What happens at one moment happens in any order.
		events.push(stormEvent{at, rng.Uint64(), kind, request, r})
	}
	send := func(at time.Duration, request int32) {
		log.sent = append(log.sent, at)
		log.requests[request].attempts++
		if r := s.peer.reply(at, draws.Float64()); r.at < neverEnds {
			push(r.at, eventEnd, request, r)
		}
	}
	over := func(at time.Duration, request int32, ok bool, reason Reason) {
		r := &log.requests[request]
		r.end, r.ok, r.reason = at, ok, reason
	}
	arrivals := int(s.lasts.Seconds() * s.rate)
	for next := 0; next < arrivals || len(events) > 0; {
		arrival := time.Duration(float64(next) * float64(time.Second) / s.rate)
		if next < arrivals && (len(events) == 0 || arrival <= events[0].at) {
			log.requests = append(log.requests, stormRequest{start: arrival, end: neverEnds})
			b.request(origin.Add(arrival))
			send(arrival, int32(next))
			next++
			continue
		}
		e := events.pop()
		now := origin.Add(e.at)
		switch e.kind {
		case eventEnd:
			if e.reply.kind == replyOK {
				b.success(now)
				over(e.at, e.request, true, "")
				continue
			}
			n := log.requests[e.request].attempts
			if n > s.retries {
				over(e.at, e.request, false, ReasonAttempts)
				continue
			}
			wait := e.reply.hint + backoff.delay(n, rng.Float64())
			if s.nobody {
				push(e.at+wait, eventSend, e.request, reply{})
				continue
			}
			if refused := b.ask(now, wait, time.Time{}); refused != "" {
				over(e.at, e.request, false, refused)
				continue
			}
			push(e.at+wait+lateness(), eventTake, e.request, reply{})
		case eventTake:
			wait, refused := b.take(now, time.Time{})
			if refused != "" {
				over(e.at, e.request, false, refused)
				continue
			}
			if wait > 0 {
				wait += lateness()
			}
			push(e.at+wait, eventSend, e.request, reply{})
		case eventSend:
			log.retries = append(log.retries, e.at)
			send(e.at, e.request)
		}
	}
	return &log
}

// A stormPeer is a base that plays a faulty peer in a synctest bubble.
type stormPeer struct {
	peer  faulty
	start time.Time

	mu    sync.Mutex // guards what follows; never held while time passes
	draws *rand.Rand
	log   stormLog
}

func newStormPeer(peer faulty, seed uint64) *stormPeer {
	return &stormPeer{peer: peer, start: time.Now(), draws: rand.New(rand.NewPCG(seed, 2))}
}

func (p *stormPeer) RoundTrip(req *http.Request) (*http.Response, error) {
	p.mu.Lock()
	sent := time.Since(p.start)
	p.log.sent = append(p.log.sent, sent)
	if req.Header[HeaderRetryCount] != nil {
		p.log.retries = append(p.log.retries, sent)
	}
	r := p.peer.reply(sent, p.draws.Float64())
	p.mu.Unlock()

	if err := stormSleep(req.Context(), r.at-sent); err != nil {
		return nil, err
	}
	switch r.kind {
	case replyReset:
		return nil, &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
	case replyTimeout:
		return nil, stormTimeout{}
	}
	resp := stormAnswer(req, http.StatusOK)
	if r.kind == replyFailure {
		resp = stormAnswer(req, http.StatusServiceUnavailable)
		if r.hint > 0 {
			resp.Header.Set("Retry-After", strconv.Itoa(int(r.hint/time.Second)))
		}
	}
	return resp, nil
}

// stormTimeout is a timeout of the base's own.
type stormTimeout struct{}

func (stormTimeout) Error() string   { return "storm: i/o timeout" }
func (stormTimeout) Timeout() bool   { return true }
func (stormTimeout) Temporary() bool { return true }

// stormSleep waits, as long as the context allows.
func stormSleep(ctx context.Context, d time.Duration) error {
	if d == neverEnds {
		<-ctx.Done()
		return ctx.Err()
	}
	if ctx.Done() == nil {
		time.Sleep(d)
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func stormAnswer(req *http.Request, status int) *http.Response {
	return &http.Response{
		StatusCode: status, ProtoMajor: 1, ProtoMinor: 1,
		Header: make(http.Header), Body: http.NoBody, Request: req,
	}
}

// stormTransport returns a Transport over base whose jitter has a seed.
func stormTransport(t testing.TB, c Config, base http.RoundTripper, seed uint64) *Transport {
	t.Helper()
	c.Base = base
	tr, err := NewTransport(c)
	if err != nil {
		t.Fatal(err)
	}
	tr.jitter = seededJitter(seed)
	return tr
}

func seededJitter(seed uint64) func() float64 {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 3))
	return func() float64 {
		mu.Lock()
		defer mu.Unlock()
		return rng.Float64()
	}
}

// evenly starts rate requests a second, each on a goroutine of its own, and
// returns when the last has ended.
func evenly(rate float64, lasts time.Duration, request func(n int)) {
	start := time.Now()
	var wg sync.WaitGroup
	for n := range int(lasts.Seconds() * rate) {
		time.Sleep(time.Duration(float64(n)*float64(time.Second)/rate) - time.Since(start))
		wg.Go(func() { request(n) })
	}
	wg.Wait()
}

// storm sends requests through the Transport to a faulty peer; it has to be in
// a bubble. limit is the deadline of each request, 0 for none.
func storm(t testing.TB, peer faulty, c Config, rate float64, lasts, limit time.Duration, seed uint64) *stormLog {
	t.Helper()
	p := newStormPeer(peer, seed)
	tr := stormTransport(t, c, p, seed)
	requests := make([]stormRequest, int(lasts.Seconds()*rate))
	evenly(rate, lasts, func(n int) {
		var o Outcome
		ctx := WithOverride(context.Background(), Override{Outcome: &o})
		if limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, limit)
			defer cancel()
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://peer.test/", nil)
		if err != nil {
			t.Error(err)
			return
		}
		r := stormRequest{start: time.Since(p.start)}
		resp, err := tr.RoundTrip(req)
		r.end = time.Since(p.start)
		if err == nil {
			resp.Body.Close()
			r.ok = resp.StatusCode == http.StatusOK
		}
		r.attempts, r.reason = o.Attempts, o.Reason
		requests[n] = r
	})
	p.log.requests = requests
	return &p.log
}

// A stormSample is one series of a scrape.
type stormSample struct {
	name   string
	labels map[string]string
	value  float64
}

// stormScrape returns counters and gauges.
func stormScrape(t testing.TB, m *Metrics) (samples []stormSample) {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(m)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			s := stormSample{name: f.GetName(), labels: make(map[string]string)}
			for _, l := range m.GetLabel() {
				s.labels[l.GetName()] = l.GetValue()
			}
			switch {
			case m.GetCounter() != nil:
				s.value = m.GetCounter().GetValue()
			case m.GetGauge() != nil:
				s.value = m.GetGauge().GetValue()
			default:
				continue
			}
			samples = append(samples, s)
		}
	}
	return samples
}
