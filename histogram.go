package stint

import (
	"math"
	"math/bits"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of AdmissionConfig.
const (
	DefaultQuantile        = 0.99
	DefaultMinSamples      = 20
	DefaultAdmissionWindow = 30 * time.Second
)

// AdmissionConfig sets when a retry is held to be able to end in time: only if
// now + the wait before it + a quantile of this peer's latency lies before the
// deadline. The latency is that until response headers. A peer that has become
// slow is no longer sent retries that nobody could wait for.
//
// First attempts are not held back: they show when the peer has recovered.
type AdmissionConfig struct {
	// Quantile is the share of attempts that the expected latency covers, in
	// (0, 1). 0: DefaultQuantile, 0.99.
	Quantile float64
	// MinSamples is how many latencies must be known, at least 1; with fewer
	// every retry is admitted that the deadline itself allows. 0:
	// DefaultMinSamples, 20.
	MinSamples int
	// Window is how long a latency counts, from 1 s to 1 h. What is read goes
	// back between Window and 4/3 of it. 0: DefaultAdmissionWindow, 30 s.
	Window time.Duration
	// Class names the kind of request, for a peer with fast and slow routes:
	// each class has its own latencies. A peer keeps at most 8: the first 7
	// names, the empty one among them, and one for all other names. It is
	// called from many goroutines and must not change the request. nil: one
	// class.
	Class func(*http.Request) string
}

func (c AdmissionConfig) withDefaults() AdmissionConfig {
	if c.Quantile == 0 {
		c.Quantile = DefaultQuantile
	}
	if c.MinSamples == 0 {
		c.MinSamples = DefaultMinSamples
	}
	if c.Window == 0 {
		c.Window = DefaultAdmissionWindow
	}
	return c
}

// check reports the fields that cannot be used. Zero stands for the default, so
// it makes no difference whether withDefaults was called before.
func (c AdmissionConfig) check(errs *configErrors) {
	// Written so that NaN, which compares false with everything, fails.
	errs.check(c.Quantile == 0 || c.Quantile > 0 && c.Quantile < 1,
		"Config.Admission.Quantile", c.Quantile, "must lie in (0, 1), or be 0 for the default")
	errs.check(c.MinSamples >= 0,
		"Config.Admission.MinSamples", c.MinSamples, "must be at least 1, or 0 for the default")
	errs.check(c.Window == 0 || c.Window >= time.Second && c.Window <= time.Hour,
		"Config.Admission.Window", c.Window, "must lie in [1 s, 1 h], or be 0 for the default")
}

// The scale of a histogram: octaves of nanoseconds, from 2^histMinExp (66 µs)
// to 2^histMaxExp (18 minutes), each cut into equal buckets. A bucket is at
// most 1/16 of its lower edge wide, 6.25 %.
const (
	histMinExp    = 16
	histMaxExp    = 40
	histOctaveExp = 4 // 2^4 buckets in an octave
	histBuckets   = (histMaxExp - histMinExp) << histOctaveExp
)

// histBucket returns the bucket of a latency. What lies below or above the
// scale goes into the first or the last one.
func histBucket(latency time.Duration) int {
	if latency < 1<<histMinExp {
		return 0
	}
	if latency >= 1<<histMaxExp {
		return histBuckets - 1
	}
	exp := bits.Len64(uint64(latency)) - 1
	// The bits below the leading one are the position in the octave.
	within := int(latency>>(exp-histOctaveExp)) & (1<<histOctaveExp - 1)
	return (exp-histMinExp)<<histOctaveExp | within
}

// histUpper returns the upper edge of a bucket, the first latency beyond it.
func histUpper(bucket int) time.Duration {
	exp := histMinExp + bucket>>histOctaveExp
	within := bucket & (1<<histOctaveExp - 1)
	return time.Duration(1<<histOctaveExp+within+1) << (exp - histOctaveExp)
}

const (
	// histSlots is the open sub-window and three closed ones. With three, a
	// sub-window is a third of the window, and what is read covers the window
	// and at most a third more.
	histSlots = 4
	// histStale is how old a cached quantile may be. An uncached one looks at
	// every counter; a peer in trouble asks at each failure.
	histStale = 100 * time.Millisecond
	// histClearing, in place of a sub-window's number, is later than any: so
	// whoever meets it takes the sub-window for one that it may not touch.
	histClearing = math.MaxInt64
)

// A histogram is the latencies of one peer, or one class of its requests, over
// the last window. It says what an attempt has to expect, within a bucket's
// width. The size is fixed (6 KiB).
//
// Time is a parameter and monotonic: the difference to origin counts, which a
// step of the wall clock does not move. Forgetting needs nobody to look and no
// goroutine: a sub-window whose time has come round again is emptied by the
// first that writes into it. Samples which arrive during that fraction of a
// millisecond are dropped; waiting for it would be a lock, and a handful of
// samples in each third of a window changes no quantile.
//
// All methods are safe for concurrent use, take no lock and allocate nothing.
type histogram struct {
	origin time.Time
	width  time.Duration // of a sub-window
	slots  [histSlots]histSlot

	// The last quantile that was computed. seq is odd while it is written; a
	// reader that saw it change computes its own. A pointer to a fresh struct
	// would be simpler, and an allocation for each.
	cached struct {
		seq     atomic.Uint64
		at      atomic.Int64  // since origin
		q       atomic.Uint64 // the quantile's bits
		latency atomic.Int64
		samples atomic.Int64
	}
}

// A histSlot is one sub-window.
//
// There is no counter of all samples: it and the buckets could not be read as
// one. A writer that was held up between finding its slot and counting, for
// longer than a window, counts in a later sub-window: a late sample, but a true
// one, in a histogram that still adds up.
type histSlot struct {
	number  atomic.Int64  // of the sub-window, from 1; 0: never used; histClearing
	ended   atomic.Uint64 // attempts that ended, times 2^32, plus those cut off: read as one
	buckets [histBuckets]atomic.Uint32
}

// newHistogram returns an empty histogram whose time starts at origin. A sample
// counts for window, and for up to a third longer.
func newHistogram(window time.Duration, origin time.Time) *histogram {
	// Rounded up, so that three closed sub-windows are never less than window.
	return &histogram{origin: origin, width: max(1, (window+histSlots-2)/(histSlots-1))}
}

// elapsed returns now on the histogram's time. What lies before the origin, as
// a reading taken just before the histogram was made, counts as at the origin.
func (h *histogram) elapsed(now time.Time) time.Duration {
	return max(0, now.Sub(h.origin))
}

// number returns the number of the sub-window that is open at elapsed.
func (h *histogram) number(elapsed time.Duration) int64 {
	return int64(elapsed/h.width) + 1
}

// slot returns the sub-window to count in at now, emptied if its time has come
// round. It is nil where the sample must be dropped: another goroutine is
// emptying the sub-window, or now is so old that a later one has its place.
func (h *histogram) slot(now time.Time) *histSlot {
	n := h.number(h.elapsed(now))
	s := &h.slots[n%histSlots]
	have := s.number.Load()
	if have == n {
		return s
	}
	if have > n || !s.number.CompareAndSwap(have, histClearing) {
		return nil
	}
	s.ended.Store(0)
	for i := range s.buckets {
		// Most buckets are empty, and an atomic store costs far more than a
		// load.
		if b := &s.buckets[i]; b.Load() != 0 {
			b.Store(0)
		}
	}
	s.number.Store(n)
	return s
}

// holds reports whether s counts at n, the number of the open sub-window.
// Sub-windows after n, of goroutines that read the clock later, count as well:
// what they hold is true and fresh.
func (s *histSlot) holds(n int64) bool {
	have := s.number.Load()
	return have > n-histSlots && have != histClearing
}

// record adds one latency to response headers.
func (h *histogram) record(now time.Time, latency time.Duration) {
	if s := h.slot(now); s != nil {
		s.buckets[histBucket(latency)].Add(1)
	}
}

// quantile returns the q-quantile of the window and the number of samples it
// rests on, 0 and 0 where there are none. The latency is the upper edge of the
// bucket that holds the quantile: at least q of the samples are below it. It
// does not fall as q grows. The answer may be up to 100 ms old by now.
func (h *histogram) quantile(now time.Time, q float64) (latency time.Duration, samples int) {
	at := h.elapsed(now)
	c := &h.cached
	seq := c.seq.Load()
	if seq != 0 && seq%2 == 0 {
		age := at - time.Duration(c.at.Load())
		sameQ := c.q.Load() == math.Float64bits(q)
		latency, samples = time.Duration(c.latency.Load()), int(c.samples.Load())
		// A now before that of the cached answer comes from a goroutine that
		// was held up: rare, and not worth a rule of its own.
		if sameQ && age >= 0 && age <= histStale && c.seq.Load() == seq {
			return latency, samples
		}
	}
	latency, samples = h.compute(h.number(at), q)
	// Whoever comes second keeps its answer to itself.
	if seq%2 == 0 && c.seq.CompareAndSwap(seq, seq+1) {
		c.at.Store(int64(at))
		c.q.Store(math.Float64bits(q))
		c.latency.Store(int64(latency))
		c.samples.Store(int64(samples))
		c.seq.Store(seq + 2)
	}
	return latency, samples
}

// compute returns the quantile at sub-window n from the counters.
//
// A sub-window that is emptied meanwhile is read in part. That needs no second
// look: each of its samples was about to fade or has just been added.
func (h *histogram) compute(n int64, q float64) (latency time.Duration, samples int) {
	var counts [histBuckets]uint64
	var total uint64
	for i := range h.slots {
		s := &h.slots[i]
		if !s.holds(n) {
			continue
		}
		for b := range s.buckets {
			c := uint64(s.buckets[b].Load())
			counts[b] += c
			total += c
		}
	}
	if total == 0 {
		return 0, 0
	}
	// The smallest rank, from 1, with at least q of the samples up to it.
	rank := uint64(max(1, min(math.Ceil(q*float64(total)), float64(total))))
	for b, c := range counts {
		if rank <= c {
			return histUpper(b), int(total)
		}
		rank -= c
	}
	return histUpper(histBuckets - 1), int(total) // not reached: the ranks end at total
}

// ended counts an attempt that ended, cut off by AttemptTimeout or not.
func (h *histogram) ended(now time.Time, cut bool) {
	s := h.slot(now)
	if s == nil {
		return
	}
	if cut {
		s.ended.Add(1<<32 | 1)
	} else {
		s.ended.Add(1 << 32)
	}
}

// cutOff returns how many of the window's attempts AttemptTimeout cut off, and
// how many there were; cut is never the larger.
func (h *histogram) cutOff(now time.Time) (cut, attempts int) {
	n := h.number(h.elapsed(now))
	for i := range h.slots {
		if s := &h.slots[i]; s.holds(n) {
			v := s.ended.Load()
			cut += int(v & math.MaxUint32)
			attempts += int(v >> 32)
		}
	}
	return cut, attempts
}

// maxClasses bounds the histograms of one peer: names can come from paths that
// an outsider chose.
const maxClasses = 8

// classes is the histograms of one peer by class of request. All methods are
// safe for concurrent use.
type classes struct {
	window time.Duration
	origin time.Time

	unnamed atomic.Pointer[histogram] // of "", which is the only one without AdmissionConfig.Class
	set     atomic.Pointer[classSet]  // nil: no other name yet. What it points to does not change
	mu      sync.Mutex                // held to make a histogram
}

type classSet struct {
	named []class
	other *histogram // of names that came too late; nil: none yet
}

type class struct {
	name      string
	histogram *histogram
}

// newClasses returns a set without histograms: each is made at first sight of
// its name.
func newClasses(window time.Duration, origin time.Time) *classes {
	return &classes{window: window, origin: origin}
}

// get returns the histogram of a class, the same one for each call. Names
// beyond the first maxClasses-1 share one. No lock is taken for a name that is
// known.
func (c *classes) get(name string) *histogram {
	if h := c.lookup(name); h != nil {
		return h
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// Another goroutine can have made it while this one waited.
	if h := c.lookup(name); h != nil {
		return h
	}
	h := newHistogram(c.window, c.origin)
	var next classSet
	if old := c.set.Load(); old != nil {
		next = *old
	}
	switch {
	case len(next.named)+c.unnamedCount() >= maxClasses-1:
		next.other = h
	case name == "":
		c.unnamed.Store(h)
		return h
	default:
		// Readers of the old list, which ends before, see nothing of this. The
		// name is a copy, as it can be a piece of a long URL that would be kept
		// alive with it.
		next.named = append(next.named, class{strings.Clone(name), h})
	}
	c.set.Store(&next)
	return h
}

// lookup returns the histogram of a class, nil where it has to be made.
func (c *classes) lookup(name string) *histogram {
	if name == "" {
		if h := c.unnamed.Load(); h != nil {
			return h
		}
	}
	set := c.set.Load()
	if set == nil {
		return nil
	}
	for i := range set.named {
		if set.named[i].name == name {
			return set.named[i].histogram
		}
	}
	// The list was full when other was made, so a name that is not in it never
	// will be.
	return set.other
}

// list returns the histograms that there are, with the names of their classes;
// overflowPeer stands for all names that came too late.
func (c *classes) list() (list []class) {
	if h := c.unnamed.Load(); h != nil {
		list = append(list, class{"", h})
	}
	if set := c.set.Load(); set != nil {
		list = append(list, set.named...)
		if set.other != nil {
			list = append(list, class{overflowPeer, set.other})
		}
	}
	return list
}

func (c *classes) unnamedCount() int {
	if c.unnamed.Load() != nil {
		return 1
	}
	return 0
}
