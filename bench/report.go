package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/stinthttp/stint"
)

// A run is one run of all measurements.
type run struct {
	effort   effort
	wall     effort // over loopback, in wall clock time
	micro    string // -benchtime of the decisions
	progress func(name string)

	guard   guard
	tables  []*table
	targets *table
}

// all measures everything and fills in the tables.
func (r *run) all() error {
	r.guard.measured = make(map[string]int)
	r.targets = r.table("targets", "target", "bound", "measured", "")
	r.tables = nil // the targets come last
	r.requestTable("get", http.MethodGet)
	r.requestTable("post", http.MethodPost)
	r.pathTable()
	r.contention()
	r.retryTable()
	r.refusalTable()
	r.serverTable()
	for i, w := range wires {
		r.wireTable("loopback-"+strconv.Itoa(i+1), w)
	}
	if err := r.microTable(); err != nil {
		return err
	}
	r.memoryTable()
	r.growthTable()
	r.floorTable()
	r.tables = append(r.tables, r.targets)
	return nil
}

func (r *run) table(name string, head ...string) *table {
	if r.progress != nil {
		r.progress(name)
	}
	t := &table{name: name, head: head}
	r.tables = append(r.tables, t)
	return t
}

// target notes whether a figure is at most its bound.
func (r *run) target(what string, measured, bound float64, format string) {
	r.verdict(what, "≤ "+fmt.Sprintf(format, bound), fmt.Sprintf(format, measured), measured <= bound)
}

func (r *run) verdict(what, bound, measured string, met bool) {
	state := "met"
	if !met {
		state = "**not met**"
	}
	r.targets.add(what, bound, measured, state)
}

// cells are the settings in which a request is measured.
var cells = []struct {
	procs, goroutines int
}{{1, 1}, {1, 8}, {2, 1}, {2, 8}}

// headline is the cell that ratios and targets are taken from.
const headline = 2

// requestTable: what each library adds to a request that succeeds.
func (r *run) requestTable(name, method string) {
	head := []string{method, "allocations"}
	for _, c := range cells {
		head = append(head, fmt.Sprintf("%s, %s", count(c.goroutines, "goroutine"), count(c.procs, "core")))
	}
	t := r.table(name, append(head, "× failsafe-go with budget")...)
	costs := make([][]cost, len(cells))
	for i, c := range cells {
		l := inProcess(method, edgeContext, c.goroutines)
		withProcs(c.procs, func() { costs[i] = measure(r.effort, l.through("bare", noop()), l.subjects(libraries)...) })
	}
	l := inProcess(method, edgeContext, 1)
	bare := l.through("bare", noop())
	row := []string{"bare (all of it)", strconv.Itoa(allocs(bare))}
	for i := range cells {
		row = append(row, micros(median(costs[i][0].base)))
	}
	t.add(append(row, "")...)
	added := make(map[string]int)
	for n, s := range l.subjects(libraries) {
		added[s.name] = addedAllocs(bare, s)
		r.guard.check(name, s.name, added[s.name])
		row := []string{s.name, strconv.Itoa(added[s.name])}
		for i := range cells {
			row = append(row, micros(median(costs[i][n].added())))
		}
		t.add(append(row, overBudgeted(costs[headline], s.name))...)
	}
	bound, what := 8, "GET at the edge"
	if method == http.MethodPost {
		bound, what = 15, "POST with a fresh key"
	}
	for i := range cells {
		r.target(fmt.Sprintf("%s, CPU time added, × failsafe-go with a budget (%s)", what, head[2+i]),
			ratio(find(costs[i], nameMetrics).added(), find(costs[i], nameBudget).added()), 1, "%.2f")
	}
	r.target(what+", allocations added", float64(added[nameMetrics]), float64(bound), "%.0f")
}

func overBudgeted(costs []cost, name string) string {
	return fmt.Sprintf("%.2f", ratio(find(costs, name).added(), find(costs, nameBudget).added()))
}

func (l load) subjects(libraries []library) []subject {
	all := make([]subject, len(libraries))
	for i, lib := range libraries {
		all[i] = l.through(lib.name, lib.wrap(noop()))
	}
	return all
}

// pathTable: what the ways through a Transport with everything on add, each
// beside failsafe-go with a budget doing the same.
func (r *run) pathTable() {
	const name = "paths"
	t := r.table(name, "stint, metrics", "allocations", "added", "× failsafe-go with budget")
	timed := func(base http.RoundTripper) http.RoundTripper {
		return newStint(stint.Config{Base: base, Metrics: newMetrics(), AttemptTimeout: time.Hour})
	}
	budgeted := wrapOf(nameBudget)
	extra := make(map[string]int)
	for _, p := range []struct {
		name, method string
		ctx          context.Context
		wrap         func(http.RoundTripper) http.RoundTripper
	}{
		{"GET at the edge", http.MethodGet, edgeContext, everything},
		{"GET in a middle tier", http.MethodGet, middleTier(), everything},
		{"GET without a deadline", http.MethodGet, context.Background(), everything},
		{"GET, AttemptTimeout", http.MethodGet, edgeContext, timed},
		{"POST at the edge", http.MethodPost, edgeContext, everything},
		{"POST in a middle tier", http.MethodPost, middleTier(), everything},
		{"POST, AttemptTimeout", http.MethodPost, edgeContext, timed},
	} {
		l := inProcess(p.method, p.ctx, 1)
		bare, with := l.through("bare", noop()), l.through(p.name, p.wrap(noop()))
		costs := measure(r.effort, bare, with, l.through(nameBudget, budgeted(noop())))
		extra[p.name] = addedAllocs(bare, with)
		r.guard.check(name, p.name, extra[p.name])
		t.add(p.name, strconv.Itoa(extra[p.name]), micros(median(costs[0].added())), overBudgeted(costs, p.name))
		if p.name == "GET in a middle tier" {
			r.target(p.name+", CPU time added, × failsafe-go with a budget", ratio(costs[0].added(), costs[1].added()), 1, "%.2f")
			r.target(p.name+", allocations added", float64(extra[p.name]), 8, "%.0f")
		}
	}
	for _, method := range []string{"GET", "POST"} {
		r.target(method+", allocations that AttemptTimeout adds", float64(extra[method+", AttemptTimeout"]-extra[method+" at the edge"]), 6, "%.0f")
	}
	// Only a Transport with state for each peer has a first contact.
	l := inProcess(http.MethodGet, edgeContext, 1)
	bare := l.newcomers("bare", noop)
	for _, p := range []struct {
		name string
		wrap func() http.RoundTripper
	}{
		{"first contact, without metrics", func() http.RoundTripper { return newStint(stint.Config{Base: noop()}) }},
		{"first contact", func() http.RoundTripper { return everything(noop()) }},
	} {
		with := l.newcomers(p.name, p.wrap)
		costs := measure(r.effort, bare, with, l.newcomers(nameBudget, func() http.RoundTripper { return budgeted(noop()) }))
		// Over all of a hundred, because each hundred has a new Transport.
		n := func(s subject) int { return int(allocsOver(s, 100) + 0.5) }
		t.add(p.name, strconv.Itoa(n(with)-n(bare)), micros(median(costs[0].added())), overBudgeted(costs, p.name))
	}
}

// contention: eight goroutines to one peer, against one.
func (r *run) contention() {
	t := r.table("contention", "CPU time of a GET, 2 cores", "8 goroutines ÷ 1 goroutine")
	withProcs(2, func() {
		for _, lib := range []library{{"bare", func(base http.RoundTripper) http.RoundTripper { return base }}, {nameMetrics, everything}, {nameBudget, wrapOf(nameBudget)}} {
			rt := lib.wrap(noop())
			c := measure(r.effort, inProcess(http.MethodGet, edgeContext, 1).through(lib.name, rt), inProcess(http.MethodGet, edgeContext, 8).through(lib.name, rt))[0]
			part := ratio(c.total, c.base)
			t.add(lib.name, times(part))
			if lib.name == nameMetrics {
				r.target("eight goroutines to one peer on two cores, CPU time of a GET ÷ that with one goroutine", part, 1.2, "%.2f")
			}
		}
	})
}

// retryTable: the first attempt gets 503, the second 200.
func (r *run) retryTable() {
	t := r.table("retry", "a retry that succeeds", "allocations", "added")
	l := inProcess(http.MethodGet, edgeContext, 1)
	bare := l.through("bare, one attempt", noop())
	subjects := []subject{
		l.through(nameStint, generous(failingOnce(), nil)),
		l.through(nameMetrics, generous(failingOnce(), newMetrics())),
	}
	for _, name := range []string{nameRetryable, nameRetry, nameBudget, nameRehttp} {
		subjects = append(subjects, l.through(name, wrapOf(name)(failingOnce())))
	}
	for i, c := range measure(r.effort, bare, subjects...) {
		n := addedAllocs(bare, subjects[i])
		r.guard.check(t.name, c.name, n)
		t.add(c.name, strconv.Itoa(n), micros(median(c.added())))
	}
}

// refusalTable: what a request costs that fails at once, all of it, beside an
// attempt over loopback, which is what it saves.
func (r *run) refusalTable() {
	t := r.table("refusal", "a request while the peer is down", "CPU time", "÷ an attempt over loopback")
	w := wires[0]
	target, stop := w.open()
	defer stop()
	pool := w.base()
	defer pool.CloseIdleConnections()
	sending := w.load(target, edgeContext, 1).through("an attempt over loopback, bare", pool)

	spent := func(m *stint.Metrics) http.RoundTripper {
		return newStint(stint.Config{Base: down(), Metrics: m, Budget: stint.BudgetConfig{MinPerSecond: -1}})
	}
	l, tooLate := inProcess(http.MethodGet, edgeContext, 1), inProcess(http.MethodGet, late{edgeContext}, 1)
	subjects := []subject{
		l.through("bare: an attempt in process", down()),
		l.through("stint: the budget is exhausted", spent(nil)),
		l.through("stint, metrics: the budget is exhausted", spent(newMetrics())),
		l.through("failsafe-go: the budget is exhausted", newSpent(down())),
		tooLate.through("stint: too late to send", newStint(stint.Config{Base: down()})),
		tooLate.through("stint, metrics: too late to send", everything(down())),
	}
	costs := measure(r.effort, sending, subjects...)
	t.add(sending.name, micros(median(costs[0].base)), "1")
	for _, c := range costs {
		t.add(c.name, micros(median(c.total)), fmt.Sprintf("%.3f", ratio(c.total, c.base)))
	}
	c := find(costs, "stint, metrics: the budget is exhausted")
	r.target("a request refused its retry by an exhausted budget, ÷ an attempt over loopback", ratio(c.total, c.base), 0.3, "%.3f")
}

// serverTable: what each middleware adds to a handler that writes a few bytes.
func (r *run) serverTable() {
	const name = "server"
	t := r.table(name, "server", "allocations", "added", "× http.TimeoutHandler")
	in := inbound(time.Now().Add(30 * time.Minute))
	bare := serving("bare", hello, in)
	subjects := make([]subject, 0, len(wrappers)+1)
	for _, w := range wrappers {
		subjects = append(subjects, serving(w.name, w.wrap(hello), in))
	}
	all := func() http.Handler { return middleware(stint.MiddlewareConfig{Metrics: newMetrics()}).Handler(hello) }
	subjects = append(subjects, serving("stint, metrics: no deadline in the request", all(), inbound(time.Time{})))
	costs := measure(r.effort, bare, subjects...)
	t.add("bare (all of it)", strconv.Itoa(allocs(bare)), micros(median(costs[0].base)), "")
	var added int
	for i, c := range costs {
		n := addedAllocs(bare, subjects[i])
		if r.guard.check(name, c.name, n); c.name == nameMetrics {
			added = n
		}
		t.add(c.name, strconv.Itoa(n), micros(median(c.added())),
			fmt.Sprintf("%.2f", ratio(c.added(), find(costs, nameTimeoutHandler).added())))
	}
	ours := find(costs, nameMetrics).added()
	r.target("middleware, CPU time added, × http.TimeoutHandler", ratio(ours, find(costs, nameTimeoutHandler).added()), 1, "%.2f")
	r.target("middleware, CPU time added, × its necessary parts", ratio(ours, find(costs, nameParts).added()), 1.2, "%.2f")
	r.target("middleware, allocations added", float64(added), 26, "%.0f")

	h := middleware(stint.MiddlewareConfig{Metrics: newMetrics()}).Handler(empty)
	expired := serving("stint, metrics: expired, refused", h, inbound(time.UnixMilli(1)))
	serve := serving("stint, metrics: an empty answer", h, in)
	c := measure(r.effort, serve, expired)[0]
	bareEmpty := serving("bare", empty, in)
	for _, s := range []subject{serve, expired} {
		cost := median(c.base)
		if s.name == expired.name {
			cost = median(c.total)
		}
		n := addedAllocs(bareEmpty, s)
		r.guard.check(name, s.name, n)
		t.add(s.name, strconv.Itoa(n), micros(cost), "")
	}
	part := ratio(c.total, c.base)
	r.verdict("refusing an expired request, ÷ serving an empty one", "< 1.00", times(part), part < 1)
}

// wireTable: what a caller sees over loopback.
func (r *run) wireTable(name string, w wire) {
	t := r.table(name, w.name, "p50", "bare", "p99", "bare", "throughput", "÷ bare", "CPU time ÷ bare")
	for _, c := range roundTrips(r.wall, w) {
		throughput := ratio(each(c.throughput, perSecond), each(c.baseline, perSecond))
		t.add(c.name,
			wholeMicros(quantile(c.latency, 0.5)), wholeMicros(quantile(c.baseLatency, 0.5)),
			wholeMicros(quantile(c.latency, 0.99)), wholeMicros(quantile(c.baseLatency, 0.99)),
			fmt.Sprintf("%.0f/s", median(each(c.throughput, perSecond))), fmt.Sprintf("%.3f", throughput),
			fmt.Sprintf("%.3f", ratio(each(c.throughput, perRequest), each(c.baseline, perRequest))))
		if c.name == nameMetrics {
			r.verdict("saturated throughput over loopback, ÷ bare ("+w.name+")", "≥ 0.97", fmt.Sprintf("%.3f", throughput), throughput >= 0.97)
		}
	}
}

// microTable: the decisions alone, measured by the root package's benchmarks.
func (r *run) microTable() error {
	t := r.table("decisions", "decision", "1 goroutine", "8 goroutines", "allocations")
	found, err := microBenchmarks(r.micro)
	if err != nil {
		return err
	}
	for _, m := range decisions {
		one, many := found[m.serial+"-1"], found[m.parallel+"-8"]
		if one.ns == 0 || many.ns == 0 {
			return fmt.Errorf("the root package has no benchmark %s or %s", m.serial, m.parallel)
		}
		t.add(m.name, nanos(one.ns), nanos(many.ns), strconv.Itoa(max(one.allocs, many.allocs)))
		r.guard.check("decisions", m.name, max(one.allocs, many.allocs))
		r.target(m.name+", one goroutine", one.ns, m.bound, "%.0f ns")
		r.target(m.name+", eight goroutines", many.ns, m.bound, "%.0f ns")
	}
	return nil
}

func (r *run) memoryTable() {
	t := r.table("memory", "memory", "")
	all := peersMemory(1000)
	each := float64(all) / 1000 / 1024
	grown := float64(heapAfter(1_000_000)) / 1024
	t.add("a peer, all included", fmt.Sprintf("%.1f KiB", each))
	t.add("1,000 peers", fmt.Sprintf("%.1f MiB", float64(all)/(1<<20)))
	t.add("growth of the heap by a million requests", fmt.Sprintf("%.1f KiB", grown))
	r.target("memory of a peer, all included", each, 16, "%.1f KiB")
	r.target("memory of 1,000 peers", float64(all)/(1<<20), 16, "%.1f MiB")
	// What the runtime itself keeps moves by some KiB from one look to the next.
	r.target("growth of the heap by a million requests", grown, 64, "%.1f KiB")
}

func (r *run) growthTable() {
	t := r.table("growth", "GET, added", "few or short", "many or long", "ratio")
	for _, g := range growths(r.effort) {
		a, b := median(g.small.added()), median(g.large.added())
		t.add(g.name, micros(a), micros(b), fmt.Sprintf("%.2f", b/a))
		r.target("cost of a request does not grow: "+g.name, b/a, 1.2, "%.2f")
	}
}

func micros(ns float64) string      { return fmt.Sprintf("%.2f µs", ns/1000) }
func times(x float64) string        { return fmt.Sprintf("%.2f", x) }
func wholeMicros(ns float64) string { return fmt.Sprintf("%.0f µs", ns/1000) }
func nanos(ns float64) string       { return fmt.Sprintf("%.0f ns", ns) }

func count(n int, what string) string {
	if n > 1 {
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}
