package stint

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// histStart is the origin of the histograms here: it has a monotonic reading,
// as the real ones have.
var histStart = time.Now()

func TestAdmissionConfig(t *testing.T) {
	def := AdmissionConfig{}.withDefaults()
	if def.Quantile != 0.99 || def.MinSamples != 20 || def.Window != 30*time.Second || def.Class != nil {
		t.Errorf("defaults: %+v", def)
	}
	set := AdmissionConfig{Quantile: 0.5, MinSamples: 1, Window: time.Second, Class: func(*http.Request) string { return "" }}
	if got := set.withDefaults(); got.Quantile != 0.5 || got.MinSamples != 1 || got.Window != time.Second || got.Class == nil {
		t.Errorf("withDefaults changed what was set: %+v", got)
	}
	for _, tt := range []struct {
		name string
		c    AdmissionConfig
		want []string // fields
	}{
		{"zero", AdmissionConfig{}, nil},
		{"defaults", def, nil},
		{"edges", AdmissionConfig{Quantile: math.SmallestNonzeroFloat64, MinSamples: 1, Window: time.Hour}, nil},
		{"quantile 1", AdmissionConfig{Quantile: 1}, []string{"Config.Admission.Quantile"}},
		{"quantile below 0", AdmissionConfig{Quantile: -0.1}, []string{"Config.Admission.Quantile"}},
		{"quantile in percent", AdmissionConfig{Quantile: 99}, []string{"Config.Admission.Quantile"}},
		{"NaN", AdmissionConfig{Quantile: math.NaN()}, []string{"Config.Admission.Quantile"}},
		{"infinite", AdmissionConfig{Quantile: math.Inf(1)}, []string{"Config.Admission.Quantile"}},
		{"window too short", AdmissionConfig{Window: time.Second - 1}, []string{"Config.Admission.Window"}},
		{"window too long", AdmissionConfig{Window: time.Hour + 1}, []string{"Config.Admission.Window"}},
		{"everything", AdmissionConfig{Quantile: 2, MinSamples: -1, Window: -time.Second}, []string{"Config.Admission.Quantile", "Config.Admission.MinSamples", "Config.Admission.Window"}},
	} {
		var errs configErrors
		tt.c.check(&errs)
		if got := badFields(t, errs); !slices.Equal(got, tt.want) {
			t.Errorf("%s: bad fields %q, want %q", tt.name, got, tt.want)
		}
	}
}

// badFields returns the fields that errs names.
func badFields(t *testing.T, errs configErrors) []string {
	t.Helper()
	var fields []string
	for _, err := range errs {
		var c *ConfigError
		if !errors.As(err, &c) {
			t.Fatalf("%v is a %T, want a *ConfigError", err, err)
		}
		fields = append(fields, c.Field)
	}
	return fields
}

func TestHistogramScale(t *testing.T) {
	lower := time.Duration(1 << histMinExp)
	if lower > 100*time.Microsecond || histUpper(histBuckets-1) < 10*time.Minute {
		t.Errorf("the scale goes from %v to %v, want at least 100 µs to 10 min", lower, histUpper(histBuckets-1))
	}
	for b := range histBuckets {
		upper := histUpper(b)
		if upper <= lower || upper-lower > lower/10 {
			t.Fatalf("bucket %d: [%v, %v) is wider than 10 %%", b, lower, upper)
		}
		if histBucket(lower) != b || histBucket(upper-1) != b {
			t.Fatalf("bucket %d: [%v, %v) go to %d and %d", b, lower, upper, histBucket(lower), histBucket(upper-1))
		}
		lower = upper
	}
	for _, tt := range []struct {
		latency time.Duration
		want    int
	}{
		{math.MinInt64, 0},
		{-1, 0},
		{0, 0},
		{1, 0},
		{1<<histMinExp - 1, 0},
		{1 << histMaxExp, histBuckets - 1},
		{time.Hour, histBuckets - 1},
		{math.MaxInt64, histBuckets - 1},
	} {
		if got := histBucket(tt.latency); got != tt.want {
			t.Errorf("histBucket(%d) = %d, want %d", tt.latency, got, tt.want)
		}
	}
	if size := unsafe.Sizeof(histogram{}); size > 8<<10 {
		t.Errorf("a histogram has %d bytes, want at most 8 KiB", size)
	}
}

func TestHistogramQuantile(t *testing.T) {
	const ms = time.Millisecond
	many := func(n int, d time.Duration) []time.Duration { return slices.Repeat([]time.Duration{d}, n) }
	for _, tt := range []struct {
		name    string
		samples []time.Duration
		q       float64
		want    time.Duration // the sample whose bucket holds it
	}{
		{"one", []time.Duration{5 * ms}, 0.99, 5 * ms},
		{"one, low", []time.Duration{5 * ms}, 0.0001, 5 * ms},
		{"median of two", []time.Duration{5 * ms, 50 * ms}, 0.5, 5 * ms},
		{"just above the median", []time.Duration{5 * ms, 50 * ms}, 0.51, 50 * ms},
		{"99 of 100", append(many(99, 5*ms), 50*ms), 0.99, 5 * ms},
		{"98 of 100", append(many(98, 5*ms), many(2, 50*ms)...), 0.99, 50 * ms},
		{"out of range, low", append(many(9, 5*ms), 50*ms), -1, 5 * ms},
		{"out of range, high", append(many(9, 5*ms), 50*ms), 2, 50 * ms},
	} {
		h := newHistogram(30*time.Second, histStart)
		for _, s := range tt.samples {
			h.record(histStart, s)
		}
		got, n := h.quantile(histStart, tt.q)
		if want := histUpper(histBucket(tt.want)); got != want || n != len(tt.samples) {
			t.Errorf("%s: quantile(%v) = %v of %d, want %v of %d", tt.name, tt.q, got, n, want, len(tt.samples))
		}
	}
	h := newHistogram(30*time.Second, histStart)
	if got, n := h.quantile(histStart, 0.99); got != 0 || n != 0 {
		t.Errorf("empty: %v of %d, want 0 of 0", got, n)
	}
	h.record(histStart, ms)
	h.quantile(histStart.Add(time.Second), math.NaN()) // must not panic
}

func FuzzHistogramQuantile(f *testing.F) {
	add := func(q1, q2 float64, samples ...time.Duration) {
		var b []byte
		for _, s := range samples {
			b = binary.LittleEndian.AppendUint64(b, uint64(s))
		}
		f.Add(b, q1, q2)
	}
	add(0.5, 0.99)
	add(0.5, 0.99, time.Millisecond)
	add(0.01, 0.999, 0, -1, math.MinInt64, math.MaxInt64)
	add(0.5, 0.51, 1<<histMinExp-1, 1<<histMinExp, 1<<histMaxExp-1, 1<<histMaxExp)
	add(0.99, 0.5, 100*time.Millisecond, 101*time.Millisecond, 2*time.Second, 2*time.Second)
	f.Fuzz(func(t *testing.T, b []byte, q1, q2 float64) {
		for _, q := range []float64{q1, q2} {
			if !(q > 0 && q < 1) {
				return
			}
		}
		var samples []time.Duration
		h := newHistogram(30*time.Second, histStart)
		now := histStart
		for ; len(b) >= 8; b = b[8:] {
			s := time.Duration(binary.LittleEndian.Uint64(b))
			samples = append(samples, s)
			now = now.Add(time.Microsecond)
			h.record(now, s)
		}
		slices.Sort(samples)
		got := make(map[float64]time.Duration)
		for _, q := range []float64{q1, q2} {
			latency, n := h.quantile(now, q)
			if n != len(samples) {
				t.Fatalf("quantile(%v) rests on %d samples, want %d", q, n, len(samples))
			}
			if n == 0 {
				if latency != 0 {
					t.Fatalf("quantile(%v) = %v without samples", q, latency)
				}
				return
			}
			// The sample that the quantile stands for, within the scale.
			exact := samples[max(1, int(math.Ceil(q*float64(n))))-1]
			exact = min(max(exact, 1<<histMinExp), 1<<histMaxExp-1)
			if latency <= exact || latency > exact+exact/10 {
				t.Fatalf("quantile(%v) = %v, want at most 10 %% above %v", q, latency, exact)
			}
			got[q] = latency
		}
		if (q1 < q2 && got[q1] > got[q2]) || (q1 > q2 && got[q1] < got[q2]) {
			t.Fatalf("quantile(%v) = %v and quantile(%v) = %v: not monotone", q1, got[q1], q2, got[q2])
		}
	})
}

// TestHistogramFades: a sample counts for at least the window and at most a
// third of it longer, wherever in a sub-window it fell, and whether or not
// anybody looks in between.
func TestHistogramFades(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 30 * time.Second, time.Hour, 1e9 + 1, 1e9 + 2} {
		for _, at := range []time.Duration{0, 1, window / 7, window/3 - 1, window / 3, window / 2, 100 * window} {
			for _, busy := range []bool{false, true} {
				h := newHistogram(window, histStart)
				now := histStart.Add(at)
				h.record(now, time.Second)
				h.ended(now, true)
				held := time.Duration(0)
				for d := time.Duration(0); d < 2*window; d += window / 60 {
					if busy {
						h.record(now.Add(d), time.Millisecond)
					}
					// Not quantile, whose answers may be 100 ms old.
					latency, _ := h.compute(h.number(h.elapsed(now.Add(d))), 1)
					cut, _ := h.cutOff(now.Add(d))
					if (latency >= time.Second) != (cut == 1) {
						t.Fatalf("window %v, sample at %v: %v later the latency is %v and %d cut off", window, at, d, latency, cut)
					}
					if latency >= time.Second {
						if held != d && held+window/60 != d {
							t.Fatalf("window %v, sample at %v: back after %v", window, at, d)
						}
						held = d
					}
				}
				if held < window-window/60 || held > window*4/3 {
					t.Errorf("window %v, sample at %v, busy %v: counted for %v, want %v to %v", window, at, busy, held, window, window*4/3)
				}
			}
		}
	}
}

// TestHistogramCoversTheWindow: three closed sub-windows are all of the window,
// to the nanosecond.
func TestHistogramCoversTheWindow(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 1e9 + 1, 1e9 + 2, time.Hour} {
		h := newHistogram(window, histStart)
		h.record(histStart.Add(h.width-1), time.Millisecond)
		for d, want := range map[time.Duration]int{h.width - 1 + window: 1, 4*h.width - 1: 1, 4 * h.width: 0} {
			if _, n := h.compute(h.number(d), 0.5); n != want {
				t.Errorf("window %v, sub-windows of %v: %d samples after %v, want %d", window, h.width, n, d, want)
			}
		}
		if h.width > window/3+1 {
			t.Errorf("window %v: sub-windows of %v, want a third", window, h.width)
		}
	}
}

// TestP4_HistogramForgetsASlowSpell: what admission reads follows a peer that
// slows down and recovers.
func TestP4_HistogramForgetsASlowSpell(t *testing.T) {
	h := newHistogram(30*time.Second, histStart)
	p99 := func(s float64) time.Duration {
		d, _ := h.quantile(histStart.Add(time.Duration(s*1e9)), 0.99)
		return d
	}
	for i := range 9000 { // 90 s at 100/s, slow from 30 s to 40 s
		latency := 200 * time.Millisecond
		if i >= 3000 && i < 4000 {
			latency = 2 * time.Second
		}
		now := histStart.Add(time.Duration(i) * 10 * time.Millisecond)
		h.record(now, latency)
		if i == 2999 && p99(30) > 220*time.Millisecond {
			t.Errorf("p99 = %v before the slow spell", p99(30))
		}
		// One slow sample in a hundred is enough to be seen.
		if i == 3100 && p99(31.1) < 2*time.Second {
			t.Errorf("p99 = %v a second into the slow spell", p99(31.1))
		}
		if i == 7999 && p99(80) > 220*time.Millisecond {
			t.Errorf("p99 = %v, 40 s after the slow spell", p99(80))
		}
	}
}

// TestHistogramOutOfOrder: readings of the clock reach the histogram late and
// in any order.
func TestHistogramOutOfOrder(t *testing.T) {
	const window = 30 * time.Second
	at := func(s float64) time.Time { return histStart.Add(time.Duration(s * 1e9)) }
	total := func(h *histogram, now time.Time, want int) {
		t.Helper()
		if _, n := h.quantile(now, 0.99); n != want {
			t.Errorf("%d samples at %v, want %d", n, now.Sub(histStart), want)
		}
		if _, n := h.cutOff(now); n != want {
			t.Errorf("%d attempts at %v, want %d", n, now.Sub(histStart), want)
		}
	}
	add := func(h *histogram, now time.Time) {
		h.record(now, time.Millisecond)
		h.ended(now, false)
	}

	// Older than the open sub-window, whose own place is free or in use: both
	// count where they belong and fade at their time.
	h := newHistogram(window, histStart)
	add(h, at(25))
	add(h, at(9))
	add(h, at(19))
	add(h, at(25))
	total(h, at(25), 4)
	total(h, at(45), 3)
	total(h, at(59), 2)
	total(h, at(60), 0)

	// So old that a later sub-window has its place: dropped, and the later one
	// stays.
	add(h, at(105))
	add(h, at(65))
	total(h, at(105), 1)

	// Before the origin: at the origin.
	h = newHistogram(window, histStart)
	add(h, at(-0.001))
	add(h, at(-3600))
	total(h, at(-3600), 2)
	total(h, at(0), 2)
	add(h, time.Time{})
	h.quantile(time.Time{}, 0.5)
	// And as far away as time goes.
	end := time.Unix(1<<40, 0)
	add(h, end)
	total(h, end, 1)

	// A reader whose now is older than what has been counted sees it.
	h = newHistogram(window, histStart)
	add(h, at(31))
	total(h, at(29), 1)
}

// TestHistogramCache: an answer is reused for 100 ms, for the same quantile,
// and never for an earlier moment.
func TestHistogramCache(t *testing.T) {
	at := func(ms int) time.Time { return histStart.Add(time.Duration(ms) * time.Millisecond) }
	samples := func(h *histogram, ms int, q float64) int {
		_, n := h.quantile(at(ms), q)
		return n
	}
	h := newHistogram(time.Second, histStart)
	h.record(at(1000), time.Millisecond)
	samples(h, 1000, 0.99)
	h.record(at(1000), time.Millisecond)
	for _, tt := range []struct {
		name string
		ms   int
		q    float64
		want int
	}{
		{"same moment", 1000, 0.99, 1},
		{"100 ms later", 1100, 0.99, 1},
		{"other quantile", 1050, 0.5, 2},
		{"first quantile again", 1050, 0.99, 2}, // the other one took the cache
	} {
		if got := samples(h, tt.ms, tt.q); got != tt.want {
			t.Errorf("%s: %d samples, want %d", tt.name, got, tt.want)
		}
	}
	for _, ms := range []int{1101, 999, 0} {
		h := newHistogram(time.Second, histStart)
		samples(h, 1000, 0.99)
		h.record(at(1000), time.Millisecond)
		if got := samples(h, ms, 0.99); got != 1 {
			t.Errorf("cached at 1000 ms, read at %d ms: %d samples, want 1", ms, got)
		}
	}
}

// TestO21_HistogramDoesNotSeeTheWallClock: the wall clock is stepped between
// the samples and the reading, by an hour either way.
func TestO21_HistogramDoesNotSeeTheWallClock(t *testing.T) {
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		h := newHistogram(30*time.Second, histStart)
		for i := range 100 {
			now := histStart.Add(time.Duration(i) * 100 * time.Millisecond)
			if i >= 50 {
				now = steppedWall(t, now, step)
			}
			h.record(now, 100*time.Millisecond)
			h.ended(now, i%2 == 0)
		}
		now := steppedWall(t, histStart.Add(10*time.Second), step)
		if latency, n := h.quantile(now, 0.99); n != 100 || latency < 100*time.Millisecond || latency > 110*time.Millisecond {
			t.Errorf("step %v: quantile %v of %d, want about 100 ms of 100", step, latency, n)
		}
		if cut, n := h.cutOff(now); cut != 50 || n != 100 {
			t.Errorf("step %v: %d of %d cut off, want 50 of 100", step, cut, n)
		}
		now = steppedWall(t, histStart.Add(50*time.Second), step)
		if _, n := h.quantile(now, 0.99); n != 0 {
			t.Errorf("step %v: %d samples after the window, want 0", step, n)
		}
		// Summer time: another offset of the same instants.
		now = histStart.Add(10 * time.Second).In(time.FixedZone("summer", 2*60*60))
		if _, n := h.quantile(now, 0.5); n != 100 {
			t.Errorf("in another zone: %d samples, want 100", n)
		}
	}
}

// TestO37_EstimateFollowsWhatWasRecorded: what a thousand instant failures
// would do to the estimate, and what "at least this long" does not do: the rule
// for what enters is the transport's, and it can rest on these two.
func TestO37_EstimateFollowsWhatWasRecorded(t *testing.T) {
	h := newHistogram(30*time.Second, histStart)
	now := histStart
	for range 1000 {
		now = now.Add(10 * time.Millisecond)
		h.record(now, 100*time.Millisecond)
	}
	p99, _ := h.quantile(now, 0.99)
	if p99 < 100*time.Millisecond || p99 > 110*time.Millisecond {
		t.Fatalf("p99 = %v, want about 100 ms", p99)
	}
	// Failures count in their own series, and enter only if slower than p99.
	for range 1000 {
		now = now.Add(time.Millisecond)
		h.ended(now, false)
		if d, _ := h.quantile(now, 0.99); 50*time.Microsecond > d {
			h.record(now, 50*time.Microsecond)
		}
	}
	if got, n := h.quantile(now, 0.99); got != p99 || n != 1000 {
		t.Errorf("after 1000 instant failures p99 = %v of %d, want %v of 1000", got, n, p99)
	}
	for range 100 {
		now = now.Add(10 * time.Millisecond)
		h.record(now, 2*time.Second)
		h.ended(now, true)
	}
	if got, _ := h.quantile(now.Add(time.Second), 0.99); got < 2*time.Second {
		t.Errorf("after 100 attempts cut off at 2 s p99 = %v", got)
	}
	if cut, n := h.cutOff(now); cut != 100 || n != 1100 {
		t.Errorf("%d of %d cut off, want 100 of 1100", cut, n)
	}
}

// TestHistogramConcurrent lets time pass over many sub-windows while samples
// come in from all sides. Each sample is 10 ms; no quantile may say otherwise,
// and no count may exceed what was recorded.
func TestHistogramConcurrent(t *testing.T) {
	const window, goroutines, each = time.Second, 8, 20000
	h := newHistogram(window, histStart)
	want := histUpper(histBucket(10 * time.Millisecond))
	var clock, recorded atomic.Int64
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(g), 1))
			for range each {
				// Readings up to a second old.
				now := histStart.Add(time.Duration(clock.Add(int64(20*time.Microsecond))) - time.Duration(rnd.Int64N(int64(time.Second))))
				switch rnd.IntN(4) {
				case 0:
					if got, n := h.quantile(now, 0.99); n > 0 && got != want || n < 0 || n > goroutines*each {
						t.Errorf("quantile = %v of %d, want %v", got, n, want)
						return
					}
					if cut, n := h.cutOff(now); cut != n || n > int(recorded.Load()) {
						t.Errorf("%d of %d cut off, want all, and at most %d", cut, n, recorded.Load())
						return
					}
				default:
					recorded.Add(1)
					h.record(now, 10*time.Millisecond)
					h.ended(now, true)
				}
			}
		})
	}
	wg.Wait()
	if s := h.cached.seq.Load(); s%2 != 0 {
		t.Errorf("cache left locked: seq %d", s)
	}
	for i := range h.slots {
		if h.slots[i].number.Load() == histClearing {
			t.Errorf("sub-window %d left in clearing", i)
		}
	}
	// All of it in one sub-window: nothing may be lost.
	h = newHistogram(time.Hour, histStart)
	h.record(histStart, 10*time.Millisecond)
	h.ended(histStart, false)
	for range goroutines {
		wg.Go(func() {
			for range each {
				h.record(histStart, 10*time.Millisecond)
				h.ended(histStart, false)
			}
		})
	}
	wg.Wait()
	_, n := h.quantile(histStart, 0.5)
	_, attempts := h.cutOff(histStart)
	if want := goroutines*each + 1; n != want || attempts != want {
		t.Errorf("%d samples and %d attempts, want %d", n, attempts, want)
	}
}

// TestHistogramCacheConcurrent: an answer that one goroutine keeps while others
// read and keep theirs is never a mix of two.
func TestHistogramCacheConcurrent(t *testing.T) {
	h := newHistogram(30*time.Second, histStart)
	for i := range 100 {
		h.record(histStart, time.Millisecond<<(i/25))
	}
	ask := func(part int) bool {
		q := 0.2 + 0.25*float64(part)
		got, n := h.quantile(histStart, q)
		if want := histUpper(histBucket(time.Millisecond << part)); got != want || n != 100 {
			t.Errorf("quantile(%v) = %v of %d, want %v of 100", q, got, n, want)
			return false
		}
		return true
	}
	var wg sync.WaitGroup
	for g := range 2 { // each answer takes the cache
		wg.Go(func() {
			for i := range 20000 {
				if !ask(2*g + i%2) {
					return
				}
			}
		})
	}
	for part := range 4 { // most answers come from the cache
		wg.Go(func() {
			for range 100000 {
				if !ask(part) {
					return
				}
			}
		})
	}
	wg.Wait()
	// Somebody is in the middle of writing: its answer is not read, and not
	// touched.
	h.cached.seq.Store(7)
	h.cached.q.Store(math.Float64bits(0.2))
	h.cached.latency.Store(1)
	ask(0)
	ask(1)
	if seq, latency := h.cached.seq.Load(), h.cached.latency.Load(); seq != 7 || latency != 1 {
		t.Errorf("the answer being written is now %d, seq %d", latency, seq)
	}
}

func TestHistogramAllocatesNothing(t *testing.T) {
	h := newHistogram(time.Second, histStart)
	c := newClasses(time.Second, histStart)
	c.get("a")
	c.get("")
	now := histStart
	if n := testing.AllocsPerRun(1000, func() {
		now = now.Add(30 * time.Millisecond) // old answers and old sub-windows on the way
		h.record(now, time.Millisecond)
		h.ended(now, true)
		h.quantile(now, 0.99)
		h.cutOff(now)
		c.get("")
		c.get("a")
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func TestClasses(t *testing.T) {
	for _, tt := range []struct {
		name  string
		names []string
	}{
		{"with the empty name", []string{"", "a", "b", "c", "d", "e", "f"}},
		{"empty name last", []string{"a", "b", "c", "d", "e", "f", ""}},
		{"without the empty name", []string{"a", "b", "c", "d", "e", "f", "g"}},
	} {
		c := newClasses(30*time.Second, histStart)
		seen := make(map[*histogram]string)
		for _, name := range tt.names {
			h := c.get(name)
			if other, ok := seen[h]; h == nil || ok {
				t.Fatalf("%s: %q has the histogram of %q", tt.name, name, other)
			}
			seen[h] = name
		}
		other := c.get("one more")
		if name, ok := seen[other]; ok {
			t.Errorf("%s: the eighth name has the histogram of %q", tt.name, name)
		}
		for i := range 1000 {
			if c.get(fmt.Sprint("late ", i)) != other {
				t.Fatalf("%s: a late name has a histogram of its own", tt.name)
			}
		}
		for h, name := range seen {
			if c.get(name) != h {
				t.Errorf("%s: %q has another histogram now", tt.name, name)
			}
		}
		if !slices.Contains(tt.names, "") && c.get("") != other {
			t.Errorf("%s: the empty name, come late, has a histogram of its own", tt.name)
		}
	}
	// The name that is kept is a copy, not a view of the URL it was cut from.
	long := strings.Repeat("x", 1<<20)
	c := newClasses(time.Second, histStart)
	c.get(long[:3])
	if kept := c.set.Load().named[0].name; kept != "xxx" || unsafe.StringData(kept) == unsafe.StringData(long) {
		t.Errorf("kept %q, which shares memory with what it was cut from", kept)
	}
}

// TestClassesConcurrent: goroutines that meet a name for the first time at the
// same moment get the same histogram, and there are never more than eight.
func TestClassesConcurrent(t *testing.T) {
	for range 50 {
		c := newClasses(30*time.Second, histStart)
		var wg sync.WaitGroup
		got := make([][20]*histogram, 8)
		for g := range got {
			wg.Go(func() {
				for i := range got[g] {
					n := (i + 5*g) % len(got[g])
					got[g][n] = c.get(strings.Repeat("x", n))
				}
			})
		}
		wg.Wait()
		distinct := make(map[*histogram]bool)
		for g := range got {
			if got[g] != got[0] {
				t.Fatalf("goroutines 0 and %d have different histograms", g)
			}
			for _, h := range got[g] {
				distinct[h] = true
			}
		}
		if len(distinct) != maxClasses {
			t.Fatalf("%d histograms for 20 names, want %d", len(distinct), maxClasses)
		}
	}
}

func BenchmarkHistogramRecord(b *testing.B) {
	h := newHistogram(30*time.Second, histStart)
	now := histStart
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Microsecond)
		h.record(now, 123*time.Millisecond)
	}
}

func BenchmarkHistogramRecordParallel(b *testing.B) {
	h := newHistogram(30*time.Second, histStart)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		now, latency := histStart, time.Millisecond
		for pb.Next() {
			now = now.Add(time.Microsecond)
			latency = latency*33/32 + 1
			if latency > time.Second {
				latency = time.Millisecond
			}
			h.record(now, latency)
		}
	})
}

func BenchmarkHistogramQuantile(b *testing.B) {
	for _, bb := range []struct {
		name string
		q    [2]float64 // asked in turn: the cache holds one
	}{{"Cached", [2]float64{0.99, 0.99}}, {"Computed", [2]float64{0.99, 0.98}}} {
		b.Run(bb.name, func(b *testing.B) {
			h := newHistogram(30*time.Second, histStart)
			now := histStart
			for i := range 4000 { // in all four sub-windows
				now = histStart.Add(time.Duration(i) * 9 * time.Millisecond)
				h.record(now, time.Duration(i)*time.Millisecond)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				h.quantile(now, bb.q[i%2])
			}
		})
	}
}

func BenchmarkHistogramQuantileParallel(b *testing.B) {
	h := newHistogram(30*time.Second, histStart)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		now := histStart
		for pb.Next() {
			now = now.Add(time.Microsecond)
			h.record(now, 123*time.Millisecond)
			h.quantile(now, 0.99)
		}
	})
}

func BenchmarkClassesGet(b *testing.B) {
	for _, name := range []string{"", "export"} {
		b.Run(fmt.Sprintf("%q", name), func(b *testing.B) {
			c := newClasses(30*time.Second, histStart)
			c.get("search")
			b.ReportAllocs()
			for b.Loop() {
				c.get(name)
			}
		})
	}
}
