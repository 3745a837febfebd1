package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stinthttp/stint"
)

const (
	maxBody     = 48 << 10
	maxAttempts = 3
	// The defaults of stint.BudgetConfig, which the checks are about.
	ratio  = stint.DefaultBudgetRatio
	window = stint.DefaultBudgetWindow
)

// A lane is one peer, its clients, and what is known of both.
type lane struct {
	name      string
	peer      *peer
	base      *http.Transport
	client    *http.Client
	metrics   *stint.Metrics
	records   *records
	watch     *budgetWatch
	found     *findings
	pool      []byte // random bytes that bodies are cut from
	ids       atomic.Uint64
	attempts  atomic.Int64
	retries   atomic.Int64
	tooLate   atomic.Int64 // by how much an attempt began after its deadline, at worst
	answers   atomic.Int64 // read whole and compared
	cut       atomic.Int64 // ended in an error
	errors    atomic.Int64
	abandoned atomic.Int64 // closed before the end
}

func newLane(c config, h2 bool, rnd *rand.Rand, found *findings) (*lane, error) {
	l := &lane{name: "HTTP/1.1", records: new(records), watch: newBudgetWatch(), found: found, pool: make([]byte, 1<<20)}
	if h2 {
		l.name = "HTTP/2"
	}
	for i := range l.pool {
		l.pool[i] = byte(rnd.Uint32())
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!h2)
	protocols.SetUnencryptedHTTP2(h2)
	l.base = &http.Transport{Protocols: protocols, MaxConnsPerHost: 2 * c.workers, MaxIdleConnsPerHost: c.workers}
	metrics, err := stint.NewMetrics(stint.MetricsConfig{})
	if err != nil {
		return nil, err
	}
	l.metrics = metrics
	transport, err := stint.NewTransport(stint.Config{
		Base: l.base, Timeout: 5 * time.Second, MaxAttempts: maxAttempts, Metrics: metrics, Hook: l.hook,
		Backoff: stint.Backoff{Base: 10 * time.Millisecond, Max: 100 * time.Millisecond},
		Budget:  stint.BudgetConfig{MaxWait: 200 * time.Millisecond},
	})
	if err != nil {
		return nil, err
	}
	var rt http.RoundTripper = transport
	if c.wrap != nil {
		rt = c.wrap(rt)
	}
	l.client = &http.Client{Transport: rt}
	skews := c.skews
	if skews == nil {
		skews = allSkews
	}
	l.peer, err = newPeer(h2, skews, rnd, l.records, l.watch, found)
	return l, err
}

func (l *lane) hook(_ context.Context, e stint.Event) {
	if e.Kind != stint.EventAttemptSent {
		return
	}
	l.attempts.Add(1)
	if e.Attempt > 1 {
		l.retries.Add(1)
	}
	raise(&l.tooLate, int64(-e.Remaining)) // Config.Timeout: there always is a deadline
}

// work is one client: one request after the other until ctx ends.
func (l *lane) work(ctx context.Context, rnd *rand.Rand) {
	for ctx.Err() == nil {
		l.request(rnd)
	}
}

// request makes one random request and checks its answer. It is not stopped by
// the end of the run: it ends by itself within 5 s.
func (l *lane) request(rnd *rand.Rand) {
	id := l.ids.Add(1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if rnd.IntN(5) > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(2+rnd.IntN(1500))*time.Millisecond)
		defer cancel()
	}
	if rnd.IntN(10) == 0 {
		timer := time.AfterFunc(time.Duration(rnd.IntN(200))*time.Millisecond, cancel)
		defer timer.Stop()
	}
	o := stint.Override{}
	if rnd.IntN(10) == 0 {
		o.AttemptTimeout = time.Duration(20+rnd.IntN(300)) * time.Millisecond
	}
	method, limit := http.MethodGet, 0 // GET, PUT: no bound, net/http resends them as it does without us
	switch rnd.IntN(5) {
	case 1:
		method = http.MethodPut
	case 2, 3:
		method, limit = http.MethodPost, 1
	case 4:
		method, limit = http.MethodPost, maxAttempts
		o.IdempotencyKey = "soak-" + strconv.FormatUint(id, 10)
	}
	var sent []byte
	if method != http.MethodGet {
		n := rnd.IntN(maxBody) >> rnd.IntN(10)
		at := rnd.IntN(len(l.pool) - n)
		sent = l.pool[at : at+n]
	}
	req, err := http.NewRequestWithContext(stint.WithOverride(ctx, o), method, l.peer.url, bytes.NewReader(sent))
	if err != nil {
		l.found.add("%v", err)
		return
	}
	if len(sent) > 0 && rnd.IntN(3) == 0 {
		// Of unknown length: cut short, it would pass for whole if its end came
		// in an orderly way.
		req.GetBody = func() (io.ReadCloser, error) {
			return io.NopCloser(struct{ io.Reader }{bytes.NewReader(sent)}), nil
		}
		req.Body, _ = req.GetBody()
		req.ContentLength = -1
	}
	req.Header.Set(headerID, strconv.FormatUint(id, 10))
	req.Header.Set(headerSum, sum(sent))

	done := l.records.begin(id, limit)
	defer done()
	l.watch.started(time.Now())
	resp, err := l.client.Do(req)
	if err != nil {
		l.errors.Add(1)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		l.watch.succeeded(time.Now())
	}
	switch rnd.IntN(8) {
	case 0:
		l.abandoned.Add(1)
		return
	case 1:
		io.CopyN(io.Discard, resp.Body, 100)
		l.abandoned.Add(1)
		return
	}
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		l.cut.Add(1)
		return
	}
	l.answers.Add(1)
	want := sent
	if method == http.MethodGet {
		want = content(id)
	}
	switch {
	case resp.Header.Get(stint.HeaderDeadlineExpired) != "" && strings.HasPrefix(string(got), "deadline exceeded: "):
	case resp.StatusCode == 200 && !bytes.Equal(got, want):
		l.found.add("%s %d: the answer has %d bytes and is not the %d that it should be", method, id, len(got), len(want))
	case resp.StatusCode != 200 && string(got) != apology(id) && string(got) != strings.Repeat(apology(id), 2000):
		l.found.add("%s %d: %s with %d bytes that are not what was said", method, id, resp.Status, len(got))
	}
}

// check looks at what can be judged when all is over.
func (l *lane) check(slack time.Duration) {
	if by := time.Duration(l.tooLate.Load()); by > slack {
		l.found.add("%s: an attempt began %v after its deadline", l.name, by)
	}
	if by := time.Duration(l.peer.overdue.Load()); by > slack {
		l.found.add("%s: a request arrived %v after its deadline", l.name, by)
	}
	if worst := l.watch.report(); worst.over > slack {
		l.found.add("%s: %d retries in a second where the budget gives %.1f", l.name, worst.n, worst.rate)
	}
	// Each request in exactly one outcome, each attempt counted once.
	registry := prometheus.NewRegistry()
	registry.MustRegister(l.metrics)
	families, err := registry.Gather()
	if err != nil {
		l.found.add("%s: %v", l.name, err)
	}
	for name, want := range map[string]int64{
		"stint_client_outcomes_total": int64(l.ids.Load()),
		"http_client_requests_total":  l.attempts.Load(),
		"stint_client_retries_total":  l.retries.Load(),
	} {
		got := 0.0
		for _, f := range families {
			if f.GetName() == name {
				for _, m := range f.GetMetric() {
					got += m.GetCounter().GetValue()
				}
			}
		}
		if int64(got) != want {
			l.found.add("%s: %s is %.0f, want %d", l.name, name, got, want)
		}
	}
}

func (l *lane) close() {
	l.base.CloseIdleConnections()
	l.peer.server.Close()
}

func (l *lane) report(out io.Writer) {
	var did []string
	for f := range faults {
		did = append(did, fmt.Sprintf("%s %d", faultNames[f], l.peer.arrivals[f].Load()))
	}
	worst := l.watch.report()
	fmt.Fprintf(out, "%-8s  %d requests, %d attempts, of them %d retries, at most %d in a second (the budget then gave %.1f)\n",
		l.name, l.ids.Load(), l.attempts.Load(), l.retries.Load(), worst.n, worst.rate)
	fmt.Fprintf(out, "          %d answers compared, %d cut, %d left unread, %d errors; %d connections killed\n",
		l.answers.Load(), l.cut.Load(), l.abandoned.Load(), l.errors.Load(), l.peer.kills.Load())
	fmt.Fprintf(out, "          the peer's faults: %s\n", strings.Join(did, ", "))
	fmt.Fprintf(out, "          its clock was stepped %d times; being ahead, it refused %d requests that were in time\n", l.peer.steps.Load(), l.peer.refused.Load())
}

// records counts how often each request arrived. One is forgotten some time
// after its end, so that their number is bounded. Safe for concurrent use.
type records struct {
	byID sync.Map // uint64 → *record
}

type record struct {
	limit    int64 // 0: none
	arrivals atomic.Int64
	ended    atomic.Int64 // Unix nanoseconds; 0: not yet
}

// begin makes the record of a request, which may arrive limit times, and returns
// what ends it.
func (r *records) begin(id uint64, limit int) (done func()) {
	rec := &record{limit: int64(limit)}
	r.byID.Store(id, rec)
	return func() { rec.ended.Store(time.Now().UnixNano()) }
}

// arrived counts an arrival and returns what is wrong with it.
func (r *records) arrived(id uint64) (why string) {
	v, ok := r.byID.Load(id)
	if !ok {
		return "arrived long after it was over"
	}
	rec := v.(*record)
	if n := rec.arrivals.Add(1); rec.limit > 0 && n > rec.limit {
		return fmt.Sprintf("arrival %d, at most %d are allowed", n, rec.limit)
	}
	return ""
}

func (r *records) sweep(ctx context.Context) {
	const remember = 3 * time.Second
	for ctx.Err() == nil {
		before := time.Now().Add(-remember).UnixNano()
		r.byID.Range(func(k, v any) bool {
			if ended := v.(*record).ended.Load(); ended != 0 && ended < before {
				r.byID.Delete(k)
			}
			return true
		})
		select {
		case <-time.After(time.Second / 2):
		case <-ctx.Done():
		}
	}
}

// A budgetWatch compares the retries that arrive in any second with the rate
// that the budget gives at most: a share of the requests of its window or of the
// successes, whichever are fewer, and one a second where that is less. Safe for concurrent use.
type budgetWatch struct {
	mu     sync.Mutex
	origin time.Time
	slots  [256]watchCount // guarded by mu: a ring of 100 ms each
	recent []time.Time     // guarded by mu: retries of the last second
	worst  excess          // guarded by mu
}

type watchCount struct {
	slot                int64
	requests, successes int
}

// An excess is the second in which most was retried for what the budget gave.
type excess struct {
	n    int
	rate float64
	over time.Duration // by how much longer than a second so many turns take
}

func newBudgetWatch() *budgetWatch {
	return &budgetWatch{origin: time.Now(), worst: excess{over: -time.Hour}}
}

const watchSlot = 100 * time.Millisecond

func (b *budgetWatch) started(now time.Time)   { b.count(now, 1, 0) }
func (b *budgetWatch) succeeded(now time.Time) { b.count(now, 0, 1) }

func (b *budgetWatch) count(now time.Time, requests, successes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	slot := int64(now.Sub(b.origin) / watchSlot)
	c := &b.slots[slot%int64(len(b.slots))]
	if c.slot != slot {
		*c = watchCount{slot: slot}
	}
	c.requests += requests
	c.successes += successes
}

func (b *budgetWatch) retried(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recent = append(b.recent, now)
	for now.Sub(b.recent[0]) >= time.Second {
		b.recent = b.recent[1:]
	}
	slot := int64(now.Sub(b.origin) / watchSlot)
	requests, successes := 0, 0
	for _, c := range b.slots {
		// The window that the second's first turn was given by, and a slot of
		// the budget for where ours and its do not meet.
		if c.slot >= slot-int64((window+2*time.Second+window/10)/watchSlot) {
			requests += c.requests
			successes += c.successes
		}
	}
	rate := max(1, ratio*float64(min(requests, successes))/window.Seconds())
	n := len(b.recent)
	over := time.Duration((float64(n-1)/rate - 1) * float64(time.Second))
	if over > b.worst.over {
		b.worst = excess{n, rate, over}
	}
}

func (b *budgetWatch) report() excess {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.worst
}
