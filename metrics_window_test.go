package stint

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestWindowEpoch(t *testing.T) {
	start := time.Now()
	at := func(d time.Duration) uint32 { return windowEpoch(start, start.Add(d)) }
	if at(0) != 1<<31 {
		t.Errorf("epoch of the start is %d", at(0))
	}
	for _, c := range []struct {
		from, to time.Duration
		steps    uint32
	}{
		{0, windowSlot - 1, 0},
		{0, windowSlot, 1},
		{-1, 0, 1},
		{-windowSlot + 1, -1, 0}, // slot 0 is no longer than the others
		{-time.Minute, 0, 13},
		{0, time.Minute, 12},
		{time.Hour, time.Hour + time.Minute, 12},
	} {
		if got := at(c.to) - at(c.from); got != c.steps {
			t.Errorf("from %v to %v: %d slots, want %d", c.from, c.to, got, c.steps)
		}
	}
	// Never 0, which is what an unused slot holds, and never wrapped, however
	// far off the time is.
	early, late := at(math.MinInt64), at(math.MaxInt64)
	if early == 0 || early >= at(0) || late <= at(0) || windowEpoch(start, time.Time{}) != early {
		t.Errorf("epochs %d, %d, %d do not rise", early, at(0), late)
	}
}

// The ring against a plain list of events.
func TestWindowModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for round := range 200 {
		var counts, highest window
		type event struct{ e, v uint32 }
		var events []event
		e := uint32(1<<31) + uint32(rnd.IntN(20))
		newest := e
		for range 300 {
			switch rnd.IntN(10) {
			case 0:
				e += uint32(rnd.IntN(4))
			case 1:
				if rnd.IntN(10) == 0 {
					e += uint32(rnd.IntN(40))
				}
			}
			// Some writers are behind: within the window they count, in the past
			// of it they change nothing.
			at := e
			if rnd.IntN(5) == 0 {
				at -= uint32(rnd.IntN(20))
			}
			newest = max(newest, at)
			v := uint32(rnd.IntN(100))
			counts.add(at)
			highest.raise(at, v)
			events = append(events, event{at, v})

			now := newest + uint32(rnd.IntN(3))
			var n uint64
			var top uint32
			for _, ev := range events {
				if ev.e+windowSlots > now {
					n++
					top = max(top, ev.v)
				}
			}
			if got := counts.sum(now); got != n {
				t.Fatalf("round %d: %d events, want %d", round, got, n)
			}
			if got := highest.highest(now); got != top {
				t.Fatalf("round %d: highest %d, want %d", round, got, top)
			}
		}
	}
}

// A reader whose clock was read before a writer's does not count the future, nor
// what the future has overwritten.
func TestWindowReaderBehind(t *testing.T) {
	const e = 1 << 31
	var w window
	w.add(e)
	w.add(e + 1)
	w.add(e + windowSlots) // over e
	if got := w.sum(e + windowSlots - 1); got != 1 {
		t.Errorf("sum %d, want 1", got)
	}
	if got := w.sum(e); got != 0 {
		t.Errorf("sum %d, want 0", got)
	}
}

// Slots change hands under contention and no event is lost or counted twice. The
// danger is in the first event of a slot, so the workers meet, leave together,
// and all take over every slot of the ring.
func TestWindowConcurrent(t *testing.T) {
	const workers, rounds, perSlot = 2, 50_000, 2
	var counts, top window
	var arrivals atomic.Int64
	var stop atomic.Bool // a busy machine needs long for all rounds
	start := time.Now()
	meet := func(n int) {
		arrivals.Add(1)
		for spins := 1; arrivals.Load() < int64(n)*workers; spins++ {
			if spins%1000 == 0 { // not at once: they are to leave together
				runtime.Gosched()
			}
		}
	}
	var wg sync.WaitGroup
	for g := range uint32(workers) {
		wg.Go(func() {
			for i := range rounds {
				if g == 0 && time.Since(start) > time.Second {
					stop.Store(true)
				}
				meet(2*i + 1)
				if stop.Load() {
					return
				}
				first := uint32(1<<31 + i*windowSlots)
				last := first + windowSlots - 1
				for e := first; e <= last; e++ {
					for n := range uint32(perSlot) {
						counts.add(e)
						top.raise(e, (g+e)%workers*perSlot+n)
					}
				}
				meet(2*i + 2)
				if g != 0 {
					continue // and wait for worker 0
				}
				if got, want := counts.sum(last), uint64(workers*perSlot*windowSlots); got != want {
					t.Errorf("round %d: %d events, want %d", i, got, want)
				}
				for slot := range windowSlots {
					if got := top.live(slot, last); got != workers*perSlot-1 {
						t.Errorf("round %d: highest of slot %d is %d, want %d", i, slot, got, workers*perSlot-1)
					}
				}
				if t.Failed() {
					stop.Store(true)
				}
			}
		})
	}
	wg.Wait()
}

func TestAmplification(t *testing.T) {
	for _, c := range []struct {
		first, retries uint64
		want           float64
	}{
		{0, 0, 1},
		{1, 0, 1},
		{10, 1, 1.1},
		{1, 2, 3},
		{0, 1, 1}, // its first attempt has left the window
		{0, 3, 3},
	} {
		if got := amplification(c.first, c.retries); got != c.want {
			t.Errorf("amplification(%d, %d) = %v, want %v", c.first, c.retries, got, c.want)
		}
	}
}

func TestPresentRatio(t *testing.T) {
	for _, c := range []struct {
		usable, other uint64
		want          float64
	}{{0, 0, 1}, {1, 0, 1}, {0, 1, 0}, {3, 1, 0.75}} {
		if got := presentRatio(c.usable, c.other); got != c.want {
			t.Errorf("presentRatio(%d, %d) = %v, want %v", c.usable, c.other, got, c.want)
		}
	}
}
