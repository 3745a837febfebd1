package stint

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of BudgetConfig.
const (
	DefaultBudgetRatio        = 0.1
	DefaultBudgetWindow       = 10 * time.Second
	DefaultBudgetMinPerSecond = 0.3
	DefaultBudgetPeakFactor   = 1.0
	DefaultBudgetMaxWait      = 2 * time.Second
)

// BudgetConfig sets how many retries one peer may get. There is one budget for
// each peer of a Transport, shared by all its requests.
//
// A window's retries are at most Ratio of its credit, or the floor where that
// is more, never both. The credit is the smaller of the requests sent and the
// requests that succeeded: successes alone pay for a storm when a stalled peer
// flushes its queue, requests alone go on paying through an outage. Besides
// that, retries take turns that lie apart, so that no single second gets more
// than its share: at 100 requests a second and the defaults, 110 attempts. A
// caller of few requests gets one turn a second: its second retry in a row waits
// about a second, if the deadline and MaxWait let it.
type BudgetConfig struct {
	// Ratio is the share of the credit, in (0, 1]. 0: DefaultBudgetRatio.
	// Negative: no credit, the floor alone.
	Ratio float64
	// Window is how far back requests count, from 1 s to 1 h. 0:
	// DefaultBudgetWindow.
	Window time.Duration
	// MinPerSecond is the floor, in retries a second over the window, and at
	// least one in a window: what a caller of few requests may retry. 0:
	// DefaultBudgetMinPerSecond, which is 3 in 10 s. Negative: no floor.
	MinPerSecond float64
	// PeakFactor, at least 1, lets turns lie that many times closer together
	// than the ratio alone would have them; those of the floor do not change. 0: DefaultBudgetPeakFactor, the
	// strict ceiling in every second. 3 rescues nearly all of a blip of 0.3 s,
	// at a peak of 129 instead of 110.
	PeakFactor float64
	// MaxWait is the longest that a retry waits for its turn, at most 1 h. 0:
	// DefaultBudgetMaxWait. Negative: it does not wait.
	MaxWait time.Duration
}

func (c BudgetConfig) withDefaults() BudgetConfig {
	if c.Ratio == 0 {
		c.Ratio = DefaultBudgetRatio
	}
	if c.Window == 0 {
		c.Window = DefaultBudgetWindow
	}
	if c.MinPerSecond == 0 {
		c.MinPerSecond = DefaultBudgetMinPerSecond
	}
	if c.PeakFactor == 0 {
		c.PeakFactor = DefaultBudgetPeakFactor
	}
	if c.MaxWait == 0 {
		c.MaxWait = DefaultBudgetMaxWait
	}
	return c
}

// check expects the defaults filled in. field is where c stands. NaN fails every
// comparison.
func (c BudgetConfig) check(errs *configErrors, field string) {
	errs.check(c.Ratio <= 1 && c.Ratio >= -math.MaxFloat64, field+".Ratio", c.Ratio, "must be in (0, 1], 0 for the default, or negative for the floor alone")
	errs.check(c.Window >= time.Second && c.Window <= time.Hour, field+".Window", c.Window, "must be from 1s to 1h, or 0 for the default")
	errs.check(c.MinPerSecond <= 1e6 && c.MinPerSecond >= -math.MaxFloat64, field+".MinPerSecond", c.MinPerSecond, "must be at most 1e6, 0 for the default, or negative for none")
	errs.check(c.PeakFactor >= 1 && c.PeakFactor <= 1e6, field+".PeakFactor", c.PeakFactor, "must be from 1 to 1e6, or 0 for the default")
	errs.check(c.MaxWait <= time.Hour, field+".MaxWait", c.MaxWait, "must be at most 1h, 0 for the default, or negative for none")
}

// memory returns how long after its last retry a budget may still be affected by
// it: the window and the open slot.
func (c BudgetConfig) memory() time.Duration { return c.Window + c.Window/budgetSlots }

const (
	budgetSlots = 10 // closed slots that count; the open one pays out nothing
	// turnSlack keeps turns a little further apart than the rate alone asks
	// for, so that timers that fire late cannot put one too many into a second.
	turnSlack = 1.05
	// rounding forgives the last bit of products such as 0.1 × 30.
	rounding = 1e-9
)

// A budget is one peer's credit for retries: a sliding window, and one word for
// the next free turn. Time is a parameter; nothing is counted, refilled or
// expired by looking. Safe for concurrent use, and without a lock on the path
// of a request that succeeds.
type budget struct {
	cfg    BudgetConfig
	floor  float64 // retries in a window, 0 for none
	slot   time.Duration
	origin time.Time

	requests  slotCounts // first attempts sent
	successes slotCounts // requests that ended with an answer that is no failure

	mu      sync.Mutex    // guards what follows: the decision and its update are one step
	retries slotCounts    // turns taken
	next    time.Duration // the next free turn, since origin
	turns   *turnLog      // nil: nobody hedges
}

func newBudget(c BudgetConfig, origin time.Time) *budget {
	b := &budget{cfg: c, slot: c.Window / budgetSlots, origin: origin}
	if c.MinPerSecond > 0 {
		b.floor = max(1, c.MinPerSecond*c.Window.Seconds())
	}
	return b
}

// request counts a request whose first attempt is sent now.
func (b *budget) request(now time.Time) { b.requests.add(b.epoch(now)) }

// success counts a request that succeeded, in the slot in which its answer
// arrived.
func (b *budget) success(now time.Time) { b.successes.add(b.epoch(now)) }

// ask reports why a retry that is to be sent after wait would be refused; empty
// if it would not. Where latest is not zero, the retry has to be sent before it.
// ask charges nothing: charging before the wait breaks the ceiling, because what
// was charged a while ago is sent now.
func (b *budget) ask(now time.Time, wait time.Duration, latest time.Time) Reason {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := now.Sub(b.origin)
	if b.spentLocked(b.epoch(now)) {
		return ReasonBudget
	}
	return b.turnLocked(at+wait, b.turnAfterLocked(at+wait, b.epoch(now)), latest)
}

// take takes the next free turn, and returns how long the caller has to wait
// for it. A retry that is refused is charged nothing. A turn that was taken is
// spent, whether the retry is then sent or not.
func (b *budget) take(now, latest time.Time) (wait time.Duration, refused Reason) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, e := now.Sub(b.origin), b.epoch(now)
	if b.spentLocked(e) {
		return 0, ReasonBudget
	}
	turn := b.turnAfterLocked(at, e)
	if refused := b.turnLocked(at, turn, latest); refused != "" {
		return 0, refused
	}
	b.next = turn + b.spacing(e)
	if b.turns != nil {
		b.turns.add(turn)
	}
	b.retries.add(e)
	return turn - at, ""
}

// turnAfterLocked returns the next turn that is free from at on.
func (b *budget) turnAfterLocked(at time.Duration, e int64) time.Duration {
	turn := max(at, b.next)
	if b.turns != nil {
		turn = max(turn, b.turns.free(b.rate(e)))
	}
	return turn
}

// turnLocked reports why a retry that could be sent from at on cannot have that
// turn.
func (b *budget) turnLocked(at, turn time.Duration, latest time.Time) Reason {
	switch {
	case turn-at > max(0, b.cfg.MaxWait):
		return ReasonTurn
	case latest.IsZero() || b.origin.Add(turn).Before(latest):
		return ""
	case turn == at:
		return ReasonDeadline // even the free turn is too late
	default:
		// The deadline would do; it is the others that are in front. So the
		// budget is what refuses, and layers above must not retry on top.
		return ReasonTurn
	}
}

// utilisation returns the share of the window's retries that is taken, in
// [0, 1].
func (b *budget) utilisation(now time.Time) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.usedLocked(b.epoch(now))
}

func (b *budget) usedLocked(e int64) float64 {
	taken := float64(b.takenLocked(e))
	if taken == 0 {
		return 0
	}
	return min(1, taken/max(1, b.limit(e)))
}

// A budgetState is what there is to see of a budget at one moment.
type budgetState struct {
	limit, used         float64 // retries that the window allows; utilisation
	taken               uint64
	requests, successes uint64 // of the closed slots, which the credit is made of
	spent               bool
	turn                time.Duration // until the next free turn
}

// state returns it. As utilisation it is for those who look on, and charges
// nothing.
func (b *budget) state(now time.Time) (s budgetState) {
	at, e := now.Sub(b.origin), b.epoch(now)
	s.requests, s.successes = b.requests.sum(e-budgetSlots, e-1), b.successes.sum(e-budgetSlots, e-1)
	b.mu.Lock()
	defer b.mu.Unlock()
	s.limit, s.taken = b.limit(e), b.takenLocked(e)
	s.used, s.spent = b.usedLocked(e), b.spentLocked(e)
	s.turn = max(0, b.next-at)
	return s
}

func (b *budget) spentLocked(e int64) bool {
	return float64(b.takenLocked(e)+1) > b.limit(e)+rounding
}

// takenLocked counts the open slot too: a retry is spent at once, credit is
// earned when its slot has closed.
func (b *budget) takenLocked(e int64) uint64 {
	return b.retries.sum(e-budgetSlots, e)
}

// limit returns how many retries the window allows.
func (b *budget) limit(e int64) float64 {
	return max(b.floor, b.cfg.Ratio*b.credit(e))
}

func (b *budget) credit(e int64) float64 {
	if b.cfg.Ratio < 0 {
		return 0
	}
	from, to := e-budgetSlots, e-1
	return float64(min(b.requests.sum(from, to), b.successes.sum(from, to)))
}

// spacing returns how far apart turns lie at the rate that the credit allows.
func (b *budget) spacing(e int64) time.Duration {
	return time.Duration(turnSlack * float64(time.Second) / b.rate(e))
}

// rate returns how many turns a second has at most.
func (b *budget) rate(e int64) float64 {
	return max(1, b.cfg.MinPerSecond, b.cfg.PeakFactor*b.cfg.Ratio*b.credit(e)/b.cfg.Window.Seconds())
}

// epoch numbers the slots since origin.
func (b *budget) epoch(now time.Time) int64 {
	return max(0, int64(now.Sub(b.origin)/b.slot))
}

// slotCounts counts events by slot in a ring. Each word holds the slot's number
// above its count, so that reuse and count change in one step and nobody has to
// clear anything: a slot of another number counts as empty.
type slotCounts [16]atomic.Uint64 // a power of two above budgetSlots + 1

func (s *slotCounts) add(epoch int64) {
	w := &s[epoch&int64(len(s)-1)]
	for {
		old := w.Load()
		next := old + 1
		switch held := int64(old >> 32); {
		case held < epoch:
			next = uint64(epoch)<<32 | 1
		case held > epoch || uint32(old) == math.MaxUint32:
			return // older than the whole ring, or full: not worth a wrong count
		}
		if w.CompareAndSwap(old, next) {
			return
		}
	}
}

// sum adds up the slots from and to, both included.
func (s *slotCounts) sum(from, to int64) (n uint64) {
	for e := max(0, from); e <= to; e++ {
		if w := s[e&int64(len(s)-1)].Load(); int64(w>>32) == e {
			n += uint64(uint32(w))
		}
	}
	return n
}
