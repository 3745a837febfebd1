// Soak sends mixed traffic at full speed through stint to two faulty peers on
// the loopback interface, one over HTTP/1.1 and one over HTTP/2, and checks that
// nothing is lost, doubled, late, leaked or above the budget.
//
//	go run ./examples/soak
//	go run ./examples/soak -for 10m -seed 7
//
// The peers kill connections, stall, answer in bursts of 503, trickle their
// answers, send half of them, and reset; and their clocks are stepped, by up to an
// hour. The clients have random deadlines, leave
// at random, and read answers in whole, in half or not at all. It needs nothing
// but Go, opens a bounded number of connections, and exits with 1, and a line for
// each, if something did not hold.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// patience is what the checks of real time allow for: how long a request may
	// be on its way from one goroutine to another on this machine. How late a
	// timer of this process has been seen to fire comes on top.
	patience = 250 * time.Millisecond
	// heapSlack is how much the heap may have grown when it is measured again.
	heapSlack = 32 << 20
	// fdSlack and goroutineSlack are what the runtime may keep for itself.
	fdSlack        = 2
	goroutineSlack = 2
)

type config struct {
	duration time.Duration
	seed     uint64
	workers  int
	grace    time.Duration // for what is to end at the end; 0: 5 s

	// wrap stands between the load and stint: a test breaks it, to see the
	// checks fail.
	wrap  func(http.RoundTripper) http.RoundTripper
	skews []time.Duration // nil: all
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait for anything
	c, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(2)
	}
	if err := soak(ctx, c, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func parse(args []string) (config, error) {
	var c config
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.DurationVar(&c.duration, "for", 10*time.Second, "how long")
	flags.Uint64Var(&c.seed, "seed", 1, "of the faults and of the traffic")
	flags.IntVar(&c.workers, "workers", 32, "clients at a time for each peer, 1 to 256")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return config{}, err
		}
		return config{}, errors.New("see -help")
	}
	switch {
	case flags.NArg() > 0:
		return config{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case c.duration < time.Second || c.duration > 24*time.Hour:
		return config{}, fmt.Errorf("-for %v: must be 1s to 24h", c.duration)
	case c.workers < 1 || c.workers > 256:
		return config{}, fmt.Errorf("-workers %d: must be 1 to 256", c.workers)
	}
	return c, nil
}

// findings collects what did not hold. Safe for concurrent use.
type findings struct {
	mu    sync.Mutex
	lines []string // guarded by mu: the first few
	n     int      // guarded by mu
}

func (f *findings) add(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n++; len(f.lines) < 10 {
		f.lines = append(f.lines, fmt.Sprintf(format, args...))
	}
}

func (f *findings) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == 0 {
		return nil
	}
	text := strings.Join(f.lines, "\n  ")
	if more := f.n - len(f.lines); more > 0 {
		text += fmt.Sprintf("\n  and %d more", more)
	}
	return fmt.Errorf("%d things did not hold:\n  %s", f.n, text)
}

// soak runs the whole of it.
func soak(ctx context.Context, c config, out io.Writer) error {
	if err := warmUp(); err != nil {
		return err
	}
	goroutines, fds := runtime.NumGoroutine(), openFiles()
	found := new(findings)
	ctx, cancel := context.WithTimeout(ctx, c.duration)
	defer cancel()

	late := new(lateness)
	var background sync.WaitGroup
	background.Go(func() { late.watch(ctx) })

	var lanes []*lane
	for i, h2 := range []bool{false, true} {
		l, err := newLane(c, h2, rand.New(rand.NewPCG(c.seed, uint64(i))), found)
		if err != nil {
			return err
		}
		lanes = append(lanes, l)
	}
	start := time.Now()
	var load sync.WaitGroup
	for _, l := range lanes {
		background.Go(func() { l.peer.breakThings(ctx) })
		background.Go(func() { l.records.sweep(ctx) })
		for i := range c.workers {
			load.Go(func() { l.work(ctx, rand.New(rand.NewPCG(c.seed+1, uint64(i)))) })
		}
	}
	// The heap is in its steady state when a quarter of the time is over.
	heapBefore := uint64(0)
	select {
	case <-time.After(c.duration / 4):
		heapBefore = heap()
	case <-ctx.Done():
	}
	load.Wait()
	took := time.Since(start)
	background.Wait()
	if heapAfter := heap(); heapBefore > 0 && heapAfter > heapBefore+heapSlack {
		found.add("the heap grew from %d to %d MiB", heapBefore>>20, heapAfter>>20)
	}

	slack := patience + late.worst()
	for _, l := range lanes {
		l.check(slack)
	}
	for _, l := range lanes {
		l.close()
	}
	if left := settle(runtime.NumGoroutine, goroutines+goroutineSlack, c.grace); left > goroutines+goroutineSlack {
		buf := make([]byte, 1<<16)
		found.add("%d goroutines were there at the start, %d at the end:\n%s", goroutines, left, buf[:runtime.Stack(buf, true)])
	}
	if left := settle(openFiles, fds+fdSlack, c.grace); left > fds+fdSlack {
		found.add("%d file descriptors were open at the start, %d at the end", fds, left)
	}

	fmt.Fprintf(out, "%v of traffic by %d clients, seed %d; timers were up to %v late\n", took.Round(time.Second/10), c.workers*len(lanes), c.seed, late.worst().Round(time.Millisecond))
	for _, l := range lanes {
		l.report(out)
	}
	if err := found.err(); err != nil {
		return err
	}
	fmt.Fprintln(out, "nothing lost, doubled, late, leaked or above the budget")
	return nil
}

// warmUp makes the runtime open what it keeps open.
func warmUp() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	return l.Close()
}

// openFiles returns the number of open file descriptors, or 0 where the system
// does not tell.
func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(entries)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// settle waits until count is at most want, but not longer than grace.
func settle(count func() int, want int, grace time.Duration) int {
	const step = 50 * time.Millisecond
	for range cmp.Or(grace, 5*time.Second) / step {
		if n := count(); n <= want {
			return n
		}
		time.Sleep(step)
	}
	return count()
}

// A lateness is how late timers of this process fire: what it cannot see of its
// machine's other work it must not blame on stint.
type lateness struct{ most atomic.Int64 }

func (l *lateness) watch(ctx context.Context) {
	const step = 5 * time.Millisecond
	for ctx.Err() == nil {
		before := time.Now()
		time.Sleep(step)
		if by := int64(time.Since(before) - step); by > l.most.Load() {
			l.most.Store(by)
		}
	}
}

func (l *lateness) worst() time.Duration { return time.Duration(l.most.Load()) }
