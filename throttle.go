package stint

import (
	"errors"
	"time"
)

// Of adaptive throttling, as the Google SRE book has it in "Handling Overload".
const (
	// throttleK is how many attempts for each that succeeds pass without any
	// being held back.
	throttleK = 2
	// maxThrottle is the largest share that is held back. Without it a queue that
	// only those can empty who ask for nothing takes longer than with no throttle
	// at all: too few successes are left to raise the share again.
	maxThrottle = 0.5
	// minThrottled is how many attempts have to have ended within the window
	// before any request is held back: one failure of a caller of few requests
	// says nothing.
	minThrottled = 10
)

// A throttle holds requests back from one peer while most attempts fail. It looks
// back as far as the peer's budget, and shares its successes. Unlike the credit of
// the budget it counts the open slot too: it is there to act at once. What is
// under way counts for nothing yet, or a peer that is only slow would look as if
// it failed. Safe for concurrent use; a nil one holds nothing back.
type throttle struct {
	budget   *budget
	failures slotCounts // attempts that ended in a failure of the peer
	refusals slotCounts // requests held back
}

func newThrottle(on bool, b *budget) *throttle {
	if !on {
		return nil
	}
	return &throttle{budget: b}
}

// share returns the share of requests to hold back, in [0, maxThrottle].
func (t *throttle) share(now time.Time) float64 {
	to := t.budget.epoch(now)
	from := to - budgetSlots
	accepts, failures := t.budget.successes.sum(from, to), t.failures.sum(from, to)
	if accepts+failures < minThrottled {
		return 0
	}
	requests := float64(accepts + failures + t.refusals.sum(from, to))
	return min(maxThrottle, max(0, (requests-throttleK*float64(accepts))/(requests+1)))
}

// holds reports whether a request is held back, and counts it. jitter is uniform
// in [0, 1), and only asked for where there is a doubt.
func (t *throttle) holds(now time.Time, jitter func() float64) bool {
	if t == nil {
		return false
	}
	share := t.share(now)
	if share == 0 || jitter() >= share {
		return false
	}
	t.refusals.add(t.budget.epoch(now))
	return true
}

// failure counts an attempt that failed because of the peer. Those that succeed
// are in the budget.
func (t *throttle) failure(now time.Time) {
	if t != nil {
		t.failures.add(t.budget.epoch(now))
	}
}

var errThrottled = errors.New("held back on the client's side by Config.Throttle, as the peer fails more than half of what it gets")

// throttled returns what the caller gets where the request is held back, else nil.
func (c *call) throttled() error {
	if !c.peer.throttle.holds(c.start, c.t.jitter) {
		return nil
	}
	closeBody(c.req)
	return c.error(ReasonThrottle, errThrottled)
}
