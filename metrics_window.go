package stint

import (
	"math"
	"sync/atomic"
	"time"
)

// The gauges look at the last minute. A ratio over the life of the process
// hides change: after 30 days at 1.01, an amplification of 3 needs five days to
// lift it over 1.3. A difference "since the last scrape" is stolen by whoever
// else scrapes: the second Prometheus of a pair, or somebody with curl.
//
// One slot is always filling, so twelve more cover a full minute: a gauge sees
// at least the last 60 s and less than 65 s.
const (
	windowSlots = 13
	windowSlot  = 5 * time.Second
)

// windowEpoch numbers the slots of time. All users of one ring pass the same
// start; its only purpose is that the difference is taken on the monotonic
// clock. Sub saturates at 292 years, which is below 1<<31 slots: the number
// neither wraps nor is ever 0, and 0 is what an unused slot holds.
func windowEpoch(start, now time.Time) uint32 {
	d := now.Sub(start)
	n := int64(d / windowSlot)
	if d < 0 {
		n-- // division rounds towards zero: slot 0 would last twice as long
	}
	return uint32(n + 1<<31)
}

// A window holds one 32-bit value for each slot of the last minute. The epoch
// stands beside the value in the same word: a slot is taken over, and its old
// value gone, in one compare-and-swap, without a lock and without a goroutine
// that clears.
type window [windowSlots]atomic.Uint64

// add counts one event.
func (w *window) add(e uint32) {
	slot := &w[e%windowSlots]
	for {
		old := slot.Load()
		switch held := uint32(old >> 32); {
		case held == e:
			// 32 bits cannot overflow into the epoch: in 5 s that would take
			// more than one event per 1.2 ns. And should the slot pass to a
			// later epoch right here, which takes a caller whose now is 65 s
			// old, the event is counted there: once in any case.
			slot.Add(1)
			return
		case held > e:
			return // more than a minute late: in no window any more
		case slot.CompareAndSwap(old, uint64(e)<<32|1):
			return
		}
	}
}

// raise lifts the slot's value to v if it is lower.
func (w *window) raise(e, v uint32) {
	slot := &w[e%windowSlots]
	for {
		old := slot.Load()
		held := uint32(old >> 32)
		if held > e || held == e && uint32(old) >= v {
			return
		}
		if slot.CompareAndSwap(old, uint64(e)<<32|uint64(v)) {
			return
		}
	}
}

// sum returns the events of the minute that ends with e.
func (w *window) sum(e uint32) (n uint64) {
	for i := range w {
		n += uint64(w.live(i, e))
	}
	return n
}

// highest returns the greatest value of the minute that ends with e.
func (w *window) highest(e uint32) (v uint32) {
	for i := range w {
		v = max(v, w.live(i, e))
	}
	return v
}

// live returns the value of slot i, or 0 if it lies outside of the window.
// Unsigned: a slot that is newer than e, because its writer's clock was read
// after ours, is far outside too.
func (w *window) live(i int, e uint32) uint32 {
	old := w[i].Load()
	if e-uint32(old>>32) >= windowSlots {
		return 0
	}
	return uint32(old)
}

// amplification returns attempts per request, at least 1. Without traffic it is
// 1: NaN would turn sums and averages over peers into NaN, and an absent series
// breaks panels and rules that ask whether it exists. A lone retry whose first
// attempt has left the window counts as the one attempt of one request.
func amplification(first, retries uint64) float64 {
	if first+retries == 0 {
		return 1
	}
	return float64(first+retries) / float64(max(first, 1))
}

// presentRatio returns the share of requests with a usable header; 1 without
// traffic, for the same reasons.
func presentRatio(usable, other uint64) float64 {
	if usable+other == 0 {
		return 1
	}
	return float64(usable) / float64(usable+other)
}

// billion is the unit of shares in a window: whole numbers order like the
// fractions they stand for, and 0.1 comes back as 0.1, which float32 would not
// give.
const billion = 1_000_000_000

// toBillionths clamps share to [0, 1]. NaN is 0.
func toBillionths(share float64) uint32 {
	switch {
	case share >= 1:
		return billion
	case share > 0:
		return uint32(math.Round(share * billion))
	}
	return 0
}
