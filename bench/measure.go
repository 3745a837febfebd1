package main

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
)

// A subject does the same piece of work as the base beside it, and more.
type subject struct {
	name string
	run  func(n int) // does it n times
}

// A cost is what one request costs through a subject, and through the base that
// was measured right before and after. Each slice holds one value per round:
// ratios are taken within a round, when the machine was equally busy, and only
// then is there a median.
type cost struct {
	name        string
	total, base []float64 // nanoseconds of the process's CPU time
}

// effort is how long a measurement takes: the more rounds, the steadier.
type effort struct {
	rounds int
	slice  time.Duration // of CPU time, for one subject in one round
}

// cpuTime is the CPU time of the whole process, the garbage collector's share
// included: a wall clock on a shared machine measures the neighbours.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ballast is a heap such as a service has. With the few KiB of a benchmark the
// collector would run for every 4 MiB, some thousand requests, and whether a
// slice has one collection or two would drown what it measures.
var ballast = make([]byte, 64<<20)

// slice runs a subject n times and returns the CPU time of one.
func slice(s subject, n int) float64 {
	begin := cpuTime()
	s.run(n)
	return float64(cpuTime()-begin) / float64(n)
}

// calibrate returns how often a subject has to run for a slice of that length.
// It also fills the pools and tables of what it runs.
func calibrate(s subject, length time.Duration) int {
	for n := 16; ; n *= 2 {
		begin := cpuTime()
		s.run(n)
		if spent := cpuTime() - begin; spent > length/4 {
			return max(1, int(float64(n)*float64(length)/float64(spent)))
		}
	}
}

// measure compares subjects with the base. In each round every subject gets a
// slice between two slices of the base, in an order that is shuffled.
func measure(e effort, base subject, subjects ...subject) []cost {
	costs := make([]cost, len(subjects))
	runs := make([]int, len(subjects))
	order := make([]int, len(subjects))
	for i, s := range subjects {
		costs[i].name, runs[i], order[i] = s.name, calibrate(s, e.slice), i
	}
	baseRuns := calibrate(base, e.slice/2)
	for range e.rounds {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			before := slice(base, baseRuns)
			with := slice(subjects[i], runs[i])
			after := slice(base, baseRuns)
			costs[i].total = append(costs[i].total, with)
			costs[i].base = append(costs[i].base, (before+after)/2)
		}
	}
	return costs
}

// added is what a subject adds to the base, in each round.
func (c cost) added() []float64 {
	return zip(c.total, c.base, func(a, b float64) float64 { return a - b })
}

// ratio is the median over the rounds of a to b. Both come from one measure.
func ratio(a, b []float64) float64 {
	return median(zip(a, b, func(a, b float64) float64 { return a / b }))
}

func zip(a, b []float64, f func(a, b float64) float64) []float64 {
	out := make([]float64, len(a))
	for i := range out {
		out[i] = f(a[i], b[i])
	}
	return out
}

// addedAllocs is what a subject allocates on top of the base, one request at a
// time. It is exact, and the same on every machine.
func addedAllocs(base, s subject) int { return allocs(s) - allocs(base) }

func allocs(s subject) int {
	s.run(100) // fill pools and tables
	return int(testing.AllocsPerRun(200, func() { s.run(1) }))
}

func median(v []float64) float64 { return quantile(v, 0.5) }

// quantile returns the middle of two values where the quantile lies between
// them.
func quantile(v []float64, q float64) float64 {
	v = slices.Sorted(slices.Values(v))
	at := q * float64(len(v)-1)
	low := int(at)
	high := min(low+1, len(v)-1)
	return v[low] + (at-float64(low))*(v[high]-v[low])
}

func find(costs []cost, name string) cost {
	i := slices.IndexFunc(costs, func(c cost) bool { return c.name == name })
	if i < 0 {
		panic("no row " + name)
	}
	return costs[i]
}

// allocsOver is what one of n requests allocates, on average over all n.
func allocsOver(s subject, n int) float64 {
	s.run(n)
	return testing.AllocsPerRun(20, func() { s.run(n) }) / float64(n)
}

// withProcs runs f with that many processors.
func withProcs(n int, f func()) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(n))
	f()
	runtime.KeepAlive(ballast)
}
