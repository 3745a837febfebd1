package stint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var budgetOrigin = time.Unix(1_700_000_000, 0)

// testBudget is a budget with its time in durations since its origin.
type testBudget struct{ *budget }

func newTestBudget(c BudgetConfig) testBudget {
	return testBudget{newBudget(c.withDefaults(), budgetOrigin)}
}

func (b testBudget) deposit(at time.Duration, requests, successes int) {
	for range requests {
		b.request(budgetOrigin.Add(at))
	}
	for range successes {
		b.success(budgetOrigin.Add(at))
	}
}

func (b testBudget) askAt(at, wait time.Duration) Reason {
	return b.ask(budgetOrigin.Add(at), wait, time.Time{})
}

func (b testBudget) takeAt(at time.Duration) (time.Duration, Reason) {
	return b.take(budgetOrigin.Add(at), time.Time{})
}

// drain takes turns at one moment until there are no more, and returns how many
// there were and why there are no more.
func (b testBudget) drain(at time.Duration) (n int, refused Reason) {
	for n < 10000 { // more than any test has to give
		if _, refused = b.takeAt(at); refused != "" {
			break
		}
		n++
	}
	return n, refused
}

// tight lets turns lie so close together that only the window's limit counts.
func tight(c BudgetConfig) BudgetConfig {
	c.PeakFactor, c.MaxWait = 1e6, time.Hour
	return c
}

func TestBudget_CreditComesFromClosedSlots(t *testing.T) {
	c := tight(BudgetConfig{Ratio: 0.5, MinPerSecond: -1})
	for _, test := range []struct {
		at   time.Duration
		want int
	}{
		{500 * time.Millisecond, 0}, // the slot of the deposits is open
		{999 * time.Millisecond, 0},
		{time.Second, 50},
		{10 * time.Second, 50},
		{10999 * time.Millisecond, 50}, // ten slots later its slot still counts
		{11 * time.Second, 0},
		{16500 * time.Millisecond, 0}, // and not when the ring comes round
		{17 * time.Second, 0},
		{time.Hour, 0},
	} {
		b := newTestBudget(c)
		b.deposit(500*time.Millisecond, 100, 100)
		if got, refused := b.drain(test.at); got != test.want || refused != ReasonBudget {
			t.Errorf("at %v: %d retries and then %q, want %d and then %q", test.at, got, refused, test.want, ReasonBudget)
		}
	}
}

// TestS1_Defaults: the numbers that users copy.
func TestS1_Defaults(t *testing.T) {
	want := BudgetConfig{Ratio: 0.1, Window: 10 * time.Second, MinPerSecond: 0.3, PeakFactor: 1, MaxWait: 2 * time.Second}
	if got := (BudgetConfig{}).withDefaults(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	tr, err := NewTransport(Config{})
	if err != nil {
		t.Fatal(err)
	}
	if tr.cfg.Budget != want || tr.cfg.MaxAttempts != 3 || tr.cfg.MaxPeers != 1000 {
		t.Errorf("a zero Config: %+v, MaxAttempts %d, MaxPeers %d, want %+v, 3, 1000", tr.cfg.Budget, tr.cfg.MaxAttempts, tr.cfg.MaxPeers, want)
	}
}

// TestS1_LimitOfAWindow: a tenth of the smaller of requests and successes, or
// the floor where that is more. Never the sum.
func TestS1_LimitOfAWindow(t *testing.T) {
	for _, test := range []struct {
		name                string
		config              BudgetConfig
		requests, successes int
		want                int
	}{
		{"nothing yet: the floor", BudgetConfig{}, 0, 0, 3},
		{"a tenth", BudgetConfig{}, 100, 100, 10},
		{"max, not sum", BudgetConfig{}, 30, 30, 3},
		{"just above the floor", BudgetConfig{}, 40, 40, 4},
		{"no part of a retry", BudgetConfig{}, 49, 49, 4},
		{"requests without success", BudgetConfig{}, 1000, 50, 5},
		{"successes of earlier requests", BudgetConfig{}, 50, 1000, 5},
		{"outage", BudgetConfig{}, 1000, 0, 3},
		{"flush", BudgetConfig{}, 0, 1000, 3},
		{"ratio", BudgetConfig{Ratio: 0.25}, 100, 100, 25},
		{"all", BudgetConfig{Ratio: 1}, 100, 100, 100},
		{"no credit", BudgetConfig{Ratio: -1}, 1000, 1000, 3},
		{"no floor", BudgetConfig{MinPerSecond: -1}, 20, 20, 2},
		{"no floor, little credit", BudgetConfig{MinPerSecond: -1}, 9, 9, 0},
		{"neither", BudgetConfig{Ratio: -1, MinPerSecond: -1}, 1000, 1000, 0},
		{"another floor", BudgetConfig{MinPerSecond: 2}, 100, 100, 20},
		{"the floor is at least one", BudgetConfig{MinPerSecond: 0.001}, 0, 0, 1},
		{"a longer window has more of the floor", BudgetConfig{Window: time.Minute}, 0, 0, 18},
		// In floating point 0.1 × 30 is a little more than 3, 0.29 × 100 a little
		// less than 29.
		{"rounding down", BudgetConfig{Ratio: 0.1, MinPerSecond: -1}, 30, 30, 3},
		{"rounding up", BudgetConfig{Ratio: 0.29, MinPerSecond: -1}, 100, 100, 29},
		{"rounding up the floor", BudgetConfig{Window: 100 * time.Second, MinPerSecond: 0.29}, 0, 0, 29},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newTestBudget(tight(test.config))
			b.deposit(0, test.requests, test.successes)
			at := b.slot // of the deposits, just closed
			if refused := b.askAt(at, 0); (refused == "") != (test.want > 0) {
				t.Errorf("ask says %q with %d retries to be had", refused, test.want)
			}
			if got, refused := b.drain(at); got != test.want || refused != ReasonBudget {
				t.Errorf("%d retries and then %q, want %d and then %q", got, refused, test.want, ReasonBudget)
			}
			if refused := b.askAt(at, time.Hour); refused != ReasonBudget {
				t.Errorf("ask says %q of a spent window, want %q", refused, ReasonBudget)
			}
		})
	}
}

// TestBudget_MinIsTakenOfSums: a slot with requests and a slot with their
// answers make credit together. The smaller of each slot would be nothing.
func TestBudget_MinIsTakenOfSums(t *testing.T) {
	b := newTestBudget(tight(BudgetConfig{MinPerSecond: -1}))
	b.deposit(0, 100, 0)
	b.deposit(time.Second, 0, 100)
	if got, _ := b.drain(2 * time.Second); got != 10 {
		t.Errorf("%d retries, want 10", got)
	}
}

// TestBudget_TakenCountsAtOnce: what was taken in the open slot is spent, and
// for as long as credit counts.
func TestBudget_TakenCountsAtOnce(t *testing.T) {
	b := newTestBudget(tight(BudgetConfig{}))
	if n, _ := b.drain(500 * time.Millisecond); n != 3 {
		t.Fatalf("%d retries, want 3", n)
	}
	for _, test := range []struct {
		at   time.Duration
		want int
	}{{500 * time.Millisecond, 0}, {5 * time.Second, 0}, {10999 * time.Millisecond, 0}, {11 * time.Second, 3}} {
		if n, _ := b.drain(test.at); n != test.want {
			t.Errorf("at %v: %d retries, want %d", test.at, n, test.want)
		}
	}
}

func TestBudget_Spacing(t *testing.T) {
	for _, test := range []struct {
		name   string
		config BudgetConfig
		credit int
		want   time.Duration
	}{
		{"100 a second", BudgetConfig{}, 1000, 105 * time.Millisecond},
		{"1000 a second", BudgetConfig{}, 10000, 10500 * time.Microsecond},
		{"the least is one a second", BudgetConfig{}, 30, 1050 * time.Millisecond},
		{"nothing", BudgetConfig{}, 0, 1050 * time.Millisecond},
		{"floor above one a second", BudgetConfig{MinPerSecond: 4}, 0, 262500 * time.Microsecond},
		{"of floor and share the larger", BudgetConfig{MinPerSecond: 4}, 1000, 105 * time.Millisecond},
		{"peak factor", BudgetConfig{PeakFactor: 3}, 1000, 35 * time.Millisecond},
		{"no credit", BudgetConfig{Ratio: -1}, 1000, 1050 * time.Millisecond},
		{"window", BudgetConfig{Window: 20 * time.Second}, 1000, 210 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newTestBudget(test.config)
			b.deposit(0, test.credit, test.credit)
			at := b.slot
			for i := range 3 {
				wait, refused := b.takeAt(at)
				if refused == ReasonTurn && time.Duration(i)*test.want > DefaultBudgetMaxWait {
					break
				}
				if want := time.Duration(i) * test.want; refused != "" || (wait-want).Abs() > time.Microsecond {
					t.Errorf("turn %d: a wait of %v (%q), want %v", i, wait, refused, want)
				}
			}
			// A turn that nobody took is not saved up: the next one begins now.
			later := at + 5*time.Second
			if wait, refused := b.takeAt(later); wait != 0 || refused != "" {
				t.Errorf("after 5 s: a wait of %v (%q), want none", wait, refused)
			}
			if wait, refused := b.takeAt(later); wait == 0 && refused == "" {
				t.Error("after 5 s there are two turns at once")
			}
		})
	}
}

func TestBudget_MaxWait(t *testing.T) {
	b := newTestBudget(BudgetConfig{MinPerSecond: 0.9, MaxWait: 2 * time.Second})
	for i, want := range []time.Duration{0, 1050 * time.Millisecond} {
		if wait, refused := b.takeAt(0); wait != want || refused != "" {
			t.Fatalf("turn %d: a wait of %v (%q), want %v", i, wait, refused, want)
		}
	}
	// The next turn is at 2.1 s.
	before := b.state()
	if wait, refused := b.takeAt(99 * time.Millisecond); refused != ReasonTurn || wait != 0 {
		t.Errorf("2.001 s before the turn: a wait of %v, %q, want %q", wait, refused, ReasonTurn)
	}
	if refused := b.askAt(0, 99*time.Millisecond); refused != ReasonTurn {
		t.Errorf("asked for 99 ms later: %q, want %q", refused, ReasonTurn)
	}
	// The backoff passes anyway: only what comes on top of it is a wait.
	if refused := b.askAt(0, 100*time.Millisecond); refused != "" {
		t.Errorf("asked for 100 ms later: %q, want leave", refused)
	}
	if !slices.Equal(before, b.state()) {
		t.Error("a refusal was charged")
	}
	if wait, refused := b.takeAt(100 * time.Millisecond); wait != 2*time.Second || refused != "" {
		t.Errorf("2 s before the turn: a wait of %v (%q), want 2 s", wait, refused)
	}

	b = newTestBudget(BudgetConfig{MaxWait: -1})
	if wait, refused := b.takeAt(0); wait != 0 || refused != "" {
		t.Errorf("first turn: a wait of %v (%q), want none", wait, refused)
	}
	if _, refused := b.takeAt(1049 * time.Millisecond); refused != ReasonTurn {
		t.Errorf("without MaxWait, a moment early: %q, want %q", refused, ReasonTurn)
	}
	if refused := b.askAt(1049*time.Millisecond, 0); refused != ReasonTurn {
		t.Errorf("asked a moment early: %q, want %q", refused, ReasonTurn)
	}
	if refused := b.askAt(1049*time.Millisecond, time.Millisecond); refused != "" {
		t.Errorf("asked for the right moment: %q, want leave", refused)
	}
	if wait, refused := b.takeAt(1050 * time.Millisecond); wait != 0 || refused != "" {
		t.Errorf("second turn: a wait of %v (%q), want none", wait, refused)
	}
}

func TestBudget_Latest(t *testing.T) {
	b := newTestBudget(BudgetConfig{})
	at := func(d time.Duration) time.Time { return budgetOrigin.Add(d) }
	for _, test := range []struct {
		now, latest time.Duration
		wait        time.Duration
		refused     Reason
	}{
		{0, 0, 0, ReasonDeadline}, // it has to be before latest, not at it
		{0, time.Nanosecond, 0, ""},
		{0, 1050 * time.Millisecond, 0, ReasonTurn}, // it is the one in front that makes it too late
		{0, 1051 * time.Millisecond, 1050 * time.Millisecond, ""},
		{200 * time.Millisecond, 2 * time.Second, 0, ReasonTurn},
		{1100 * time.Millisecond, time.Hour, time.Second, ""},
		{1100 * time.Millisecond, time.Hour, 0, ReasonBudget}, // the third was the last: the two refusals cost nothing
	} {
		if wait, refused := b.take(at(test.now), at(test.latest)); wait != test.wait || refused != test.refused {
			t.Errorf("at %v, latest %v: a wait of %v, %q, want %v, %q", test.now, test.latest, wait, refused, test.wait, test.refused)
		}
	}
}

func slotValues(s *slotCounts) []uint64 {
	c := make([]uint64, len(s))
	for i := range s {
		c[i] = s[i].Load()
	}
	return c
}

func (b testBudget) state() []uint64 {
	s := append(slotValues(&b.requests), slotValues(&b.successes)...)
	return append(append(s, slotValues(&b.retries)...), uint64(b.next))
}

// TestBudget_LookingChangesNothing: neither asking nor the gauge charges,
// refills or expires anything, however often, and whenever.
func TestBudget_LookingChangesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	watched, alone := newTestBudget(BudgetConfig{}), newTestBudget(BudgetConfig{})
	for at := time.Duration(0); at < 2*time.Minute; at += time.Duration(rng.IntN(int(300 * time.Millisecond))) {
		before := watched.state()
		for range rng.IntN(20) {
			watched.askAt(at+time.Duration(rng.IntN(int(30*time.Second))), time.Duration(rng.IntN(int(3*time.Second))))
			watched.utilisation(budgetOrigin.Add(at + time.Duration(rng.IntN(int(time.Hour)))))
		}
		if !slices.Equal(before, watched.state()) {
			t.Fatalf("at %v: a look has changed the budget", at)
		}
		n, m := rng.IntN(30), rng.IntN(30)
		watched.deposit(at, n, m)
		alone.deposit(at, n, m)
		wait, refused := watched.takeAt(at)
		if w, r := alone.takeAt(at); w != wait || r != refused {
			t.Fatalf("at %v: %v, %q for the one that is watched, %v, %q for the other", at, wait, refused, w, r)
		}
	}
}

// TestBudget_TimeOutOfOrder: requests read the clock and are then held up, so a
// budget meets times that lie before others.
func TestBudget_TimeOutOfOrder(t *testing.T) {
	b := newTestBudget(tight(BudgetConfig{MinPerSecond: -1}))
	for i := range 1000 { // to and fro over the border of two slots
		b.deposit(3*time.Second+time.Duration(i%2)*100*time.Millisecond-50*time.Millisecond, 1, 1)
	}
	if n, _ := b.drain(4100 * time.Millisecond); n != 100 {
		t.Errorf("%d retries, want 100: a deposit was lost or counted twice", n)
	}

	// A turn taken with an old time does not come before one that was given
	// out, and does not give away the same one.
	b = newTestBudget(BudgetConfig{MaxWait: time.Hour})
	if wait, refused := b.takeAt(5 * time.Second); wait != 0 || refused != "" {
		t.Fatalf("first turn: %v, %q", wait, refused)
	}
	if wait, refused := b.takeAt(4900 * time.Millisecond); refused != "" || wait != 1150*time.Millisecond {
		t.Errorf("turn of an earlier time: a wait of %v (%q), want 1.15 s", wait, refused)
	}

	// Before the origin there is no slot; and nothing to break.
	b = newTestBudget(BudgetConfig{})
	b.deposit(-time.Hour, 1, 1)
	if refused := b.askAt(-time.Second, 0); refused != "" && refused != ReasonTurn {
		t.Errorf("before the origin: %q", refused)
	}
	b.utilisation(budgetOrigin.Add(-time.Hour))
	b.takeAt(-time.Second)
	if n, _ := b.drain(time.Minute); n == 0 {
		t.Error("a time before the origin has broken the budget")
	}
}

// TestO28_QuietSpell: after a quiet spell the budget is that of a fresh
// transport, neither frozen nor with a surplus of what was before.
func TestO28_QuietSpell(t *testing.T) {
	const loaded = 20 * time.Second
	for _, quiet := range []time.Duration{12 * time.Second, 15 * time.Second, 16 * time.Second, 17 * time.Second, 32 * time.Second, 100 * time.Second, 24 * time.Hour, 365 * 24 * time.Hour} {
		for _, exhausted := range []bool{false, true} {
			used, fresh := newTestBudget(BudgetConfig{}), newTestBudget(BudgetConfig{})
			for at := time.Duration(0); at < loaded; at += 10 * time.Millisecond {
				used.deposit(at, 1, 1)
				if exhausted {
					used.takeAt(at)
				}
			}
			after := loaded + quiet
			if u := used.utilisation(budgetOrigin.Add(after)); u != 0 {
				t.Errorf("quiet for %v: utilisation %v, want 0", quiet, u)
			}
			rescued := 0
			for i := range 3000 {
				at := time.Duration(i) * 10 * time.Millisecond
				used.deposit(after+at, 1, 1)
				fresh.deposit(at, 1, 1)
				if i%20 == 0 {
					wait, refused := used.takeAt(after + at)
					if w, r := fresh.takeAt(at); w != wait || r != refused {
						t.Fatalf("quiet for %v, %v later: %v, %q, fresh: %v, %q", quiet, at, wait, refused, w, r)
					}
					if refused == "" {
						rescued++
					}
				}
			}
			if rescued < 130 { // in the first seconds there is the floor alone
				t.Errorf("quiet for %v: %d of 150 retries granted", quiet, rescued)
			}
		}
	}
}

func TestBudget_SlotCounts(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	for range 50 {
		var s slotCounts
		want := map[int64]uint64{}
		latest := int64(rng.IntN(100))
		for range 2000 {
			if rng.IntN(10) == 0 {
				latest += int64(rng.IntN(1 << rng.IntN(8)))
			}
			e := max(0, latest-int64(rng.IntN(5))) // late by up to four slots
			s.add(e)
			want[e]++
			from := max(0, latest-int64(rng.IntN(budgetSlots+1)))
			var sum uint64
			for i := from; i <= latest; i++ {
				sum += want[i]
			}
			if got := s.sum(from, latest); got != sum {
				t.Fatalf("slots %d to %d: %d, want %d", from, latest, got, sum)
			}
		}
	}

	var s slotCounts
	s.add(40)
	s.add(40 - int64(len(s))) // a whole ring late: in no window any more
	if got := s.sum(0, 100); got != 1 {
		t.Errorf("after a very late event: %d, want 1", got)
	}
	s[5].Store(5<<32 | math.MaxUint32)
	s.add(5)
	if got := s.sum(5, 6); got != math.MaxUint32 {
		t.Errorf("a full slot: %d, want it to stay full", got)
	}
}

// A budgetModel is the budget by its definition: lists of everything that ever
// happened, counted anew for each question.
type budgetModel struct {
	c                          BudgetConfig
	requests, successes, taken []time.Duration
	next                       time.Duration
}

func (m *budgetModel) slot(at time.Duration) int64 { return int64(at / (m.c.Window / 10)) }

func (m *budgetModel) count(times []time.Duration, at time.Duration, open bool) (n float64) {
	now := m.slot(at)
	for _, t := range times {
		if age := now - m.slot(t); age >= 1 && age <= 10 || age == 0 && open {
			n++
		}
	}
	return n
}

func (m *budgetModel) share(at time.Duration) float64 {
	if m.c.Ratio < 0 {
		return 0
	}
	return m.c.Ratio * min(m.count(m.requests, at, false), m.count(m.successes, at, false))
}

func (m *budgetModel) limit(at time.Duration) float64 {
	floor := 0.0
	if m.c.MinPerSecond > 0 {
		floor = max(1, m.c.MinPerSecond*m.c.Window.Seconds())
	}
	return max(floor, m.share(at))
}

func (m *budgetModel) take(at, latest time.Duration) (wait time.Duration, refused Reason) {
	if m.count(m.taken, at, true)+1 > m.limit(at)+1e-6 {
		return 0, ReasonBudget
	}
	turn := max(at, m.next)
	switch {
	case turn-at > max(0, m.c.MaxWait):
		return 0, ReasonTurn
	case latest > 0 && at >= latest:
		return 0, ReasonDeadline
	case latest > 0 && turn >= latest:
		return 0, ReasonTurn
	}
	rate := max(1, m.c.MinPerSecond, m.c.PeakFactor*m.share(at)/m.c.Window.Seconds())
	m.next = turn + time.Duration(1.05*float64(time.Second)/rate)
	m.taken = append(m.taken, at)
	return turn - at, ""
}

// TestBudget_AgainstModel compares random sequences of everything with lists
// of everything: each decision, and what is taken against what is allowed at
// that very time.
func TestBudget_AgainstModel(t *testing.T) {
	runs := 150
	if raceEnabled || testing.Short() {
		runs = 40
	}
	granted := 0
	for seed := range runs {
		rng := rand.New(rand.NewPCG(uint64(seed), 3))
		pick := func(values ...float64) float64 { return values[rng.IntN(len(values))] }
		c := BudgetConfig{
			Ratio:        pick(0, 0.1, 0.01, 0.33, 1, -1),
			Window:       time.Duration(pick(0, 1, 3.7, 10, 60) * float64(time.Second)),
			MinPerSecond: pick(0, 0, -1, 0.1, 2, 20),
			PeakFactor:   pick(0, 1, 3, 1000),
			MaxWait:      time.Duration(pick(0, -1, 0.1, 60) * float64(time.Second)),
		}.withDefaults()
		var errs configErrors
		if c.check(&errs, "Config.Budget"); errs != nil {
			t.Fatal(errs.join())
		}
		b, m := newTestBudget(c), &budgetModel{c: c}
		at := time.Duration(0)
		for range 600 {
			switch rng.IntN(8) {
			case 0:
				at += time.Duration(rng.Int64N(int64(c.Window) / 50))
			case 1:
				at += time.Duration(rng.Int64N(int64(c.Window) / 5))
			case 2:
				if rng.IntN(40) == 0 {
					at += time.Duration(rng.Int64N(3 * int64(c.Window)))
				}
			}
			now := max(0, at-time.Duration(rng.Int64N(int64(c.Window)/5))*time.Duration(rng.IntN(2)))
			switch rng.IntN(4) {
			case 0, 1:
				n, k := rng.IntN(20), rng.IntN(20)
				b.deposit(now, n, k)
				for range n {
					m.requests = append(m.requests, now)
				}
				for range k {
					m.successes = append(m.successes, now)
				}
			case 2:
				latest, limit := time.Duration(0), time.Time{}
				if rng.IntN(3) == 0 {
					latest = now + time.Duration(rng.Int64N(int64(3*time.Second))) + 1
					limit = budgetOrigin.Add(latest)
				}
				wait, refused := b.take(budgetOrigin.Add(now), limit)
				// The last bit of a product may differ; turns must not drift apart
				// by it.
				w, r := m.take(now, latest)
				if (m.next - b.next).Abs() <= 2 {
					m.next = b.next
				}
				if (w-wait).Abs() > 2 || r != refused {
					t.Fatalf("seed %d, %+v, at %v: %v, %q, want %v, %q", seed, c, now, wait, refused, w, r)
				}
				if refused == "" {
					granted++
					if taken, limit := m.count(m.taken, now, true), m.limit(now); taken > limit+1e-6 {
						t.Fatalf("seed %d, at %v: %v taken of %v", seed, now, taken, limit)
					}
				}
			case 3:
				wait := time.Duration(rng.Int64N(int64(3 * time.Second)))
				want := Reason("")
				if m.count(m.taken, now, true)+1 > m.limit(now)+1e-6 {
					want = ReasonBudget
				} else if m.next > now+wait+max(0, c.MaxWait) {
					want = ReasonTurn
				}
				if got := b.askAt(now, wait); got != want {
					t.Fatalf("seed %d, %+v, at %v: ask says %q, want %q", seed, c, now, got, want)
				}
			}
			if u := b.utilisation(budgetOrigin.Add(at)); u < 0 || u > 1 || math.IsNaN(u) {
				t.Fatalf("seed %d: utilisation %v", seed, u)
			}
		}
	}
	if granted < 20*runs {
		t.Errorf("%d turns granted in %d runs: too few to show anything", granted, runs)
	}
}

// TestO29_Ratios: a share of the requests that lies below the ratio is retried
// whole, and what lies above never gets more than the ratio, not by the last
// bit.
func TestO29_Ratios(t *testing.T) {
	for _, ratio := range []float64{0.01, 0.1, 0.15, 0.3, 0.33, 0.6, 0.99, 1} {
		for _, share := range []float64{0.8 * ratio, min(1, 2*ratio)} {
			t.Run(fmt.Sprintf("%v of %v", share, ratio), func(t *testing.T) {
				b := newTestBudget(BudgetConfig{Ratio: ratio, MinPerSecond: -1, PeakFactor: 1000})
				const warm, n = 2000, 10000
				fails, retries := 0, 0
				var answers []time.Duration // of retries
				for i := range warm + n {
					at := time.Duration(i) * 10 * time.Millisecond
					for len(answers) > 0 && answers[0] <= at {
						b.deposit(answers[0], 0, 1)
						answers = answers[1:]
					}
					b.deposit(at, 1, 0)
					// Every so manyth fails, so that luck has no part in it.
					k := i - warm
					if k < 0 || math.Floor(float64(k+1)*share+1e-9) == math.Floor(float64(k)*share+1e-9) {
						b.deposit(at, 0, 1)
						continue
					}
					fails++
					if b.askAt(at, 0) != "" {
						continue
					}
					if wait, refused := b.takeAt(at); refused == "" {
						retries++
						answers = append(answers, at+wait)
					}
				}
				if want := int(share*n + 0.5); fails < want-1 || fails > want+1 {
					t.Fatalf("%d first attempts failed, want %d", fails, want)
				}
				if share < ratio && retries != fails {
					t.Errorf("%d of %d failures retried, want all", retries, fails)
				}
				if float64(retries) > ratio*n {
					t.Errorf("%d retries for %d requests are more than the ratio", retries, n)
				}
				if share > ratio && retries == fails || retries == 0 {
					t.Errorf("%d of %d failures retried", retries, fails)
				}
			})
		}
	}
}

// TestO26_FloorAndBase: the first request ever can be retried, and the share is
// one of all requests that ended well, never added to the floor; and what there
// is can be spent.
func TestO26_FloorAndBase(t *testing.T) {
	b := newTestBudget(BudgetConfig{})
	b.deposit(0, 1, 0)
	if refused := b.askAt(time.Millisecond, 0); refused != "" {
		t.Errorf("the first request ever: asked, %q", refused)
	}
	if wait, refused := b.takeAt(time.Millisecond); wait != 0 || refused != "" {
		t.Errorf("the first request ever: a wait of %v, %q", wait, refused)
	}

	const from, to = 15 * time.Second, 20 * time.Second
	for _, rate := range []float64{2, 10, 100, 1000} {
		for seed := range uint64(5) {
			tl := &timeline{name: "outage", phases: []phase{{lasts: from}, {lasts: time.Hour, fault: failing}}}
			log := budgetStorm{peer: tl, lasts: to, rate: rate, seed: seed}.run()
			got := float64(between(log.retries, from, to))
			// The credit at the beginning, which is the highest.
			most := max(3, 0.1*10*rate)
			// What turns leave: the share falls by a tenth each second, from
			// when the first slot without success has closed.
			turns := 0.0
			for s := range 5 {
				turns += max(1, 0.1*rate*float64(10-max(0, s))/10) / 1.05
			}
			least := min(max(3, 0.1*5*rate), math.Floor(turns)) - 1
			if got > most || got < least {
				t.Errorf("%v a second: %v retries in 5 s of outage, want from %v to %v", rate, got, least, most)
			}
		}
	}
}

// TestO27_ManyFailAtOnce: 60 requests in flight fail at the same instant. The
// allowance does not depend on how many are under way, so each gets its turn,
// in whatever order they come.
func TestO27_ManyFailAtOnce(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) {
			const warm, dead = 15 * time.Second, 20 * time.Millisecond
			tl := &timeline{name: "gone for 20 ms", phases: []phase{
				{lasts: warm - time.Second}, {lasts: time.Second}, {lasts: dead, fault: failing, takes: time.Millisecond},
			}}
			p := newStormPeer(tl, seed)
			tr := stormTransport(t, Config{Budget: BudgetConfig{Ratio: 0.5}}, p, seed)
			send := func() (status int, o Outcome) {
				req, err := http.NewRequestWithContext(WithOverride(context.Background(), Override{Outcome: &o}), http.MethodGet, "http://peer.test/", nil)
				if err != nil {
					t.Error(err)
					return 0, o
				}
				resp, err := tr.RoundTrip(req)
				if err != nil {
					t.Error(err)
					return 0, o
				}
				return resp.StatusCode, o
			}
			evenly(300, warm-time.Second, func(int) { send() })
			time.Sleep(warm - time.Since(p.start))
			retried := len(p.log.sent)
			var wg sync.WaitGroup
			for range 60 {
				wg.Go(func() {
					if status, o := send(); status != http.StatusOK || o.Attempts < 2 {
						t.Errorf("seed %d: %d after %d attempts, reason %q, want 200 after a retry", seed, status, o.Attempts, o.Reason)
					}
				})
			}
			wg.Wait()
			if n := len(p.log.sent) - retried; n < 120 {
				t.Errorf("%d attempts of 60 requests, want two each", n)
			}
			if took := time.Since(p.start) - warm; took > 2*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// TestO30_DrainedAndBack: a budget that was drained says so at once, and fills
// again.
func TestO30_DrainedAndBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const dead, well = 30 * time.Second, 40 * time.Second
		tl := &timeline{name: "down and up", phases: []phase{
			{lasts: dead, fault: failing}, {lasts: well - dead}, {lasts: time.Second, fault: failing},
		}}
		m, err := NewMetrics(MetricsConfig{})
		if err != nil {
			t.Fatal(err)
		}
		log := storm(t, tl, Config{Metrics: m}, 100, well, 0, 1)
		// What an empty budget does: the first answer, at once, and says why.
		// Only those who asked just before another took the last turn have
		// waited for nothing, and no longer than their backoff.
		empty, all := 0, 0
		for _, r := range log.requests {
			if r.reason != ReasonBudget {
				continue
			}
			all++
			if r.attempts > 1 {
				continue
			}
			switch took := r.end - r.start; {
			case took == 5*time.Millisecond:
				empty++
			case took > 55*time.Millisecond || r.ok:
				t.Fatalf("refused by an empty budget after %v", took)
			}
		}
		counted := 0.0
		for _, s := range stormScrape(t, m) {
			if s.name == "stint_refused_total" && s.labels["reason"] == string(ReasonBudget) {
				counted += s.value
			}
		}
		if empty < 2000 || counted != float64(all) {
			t.Errorf("%d requests refused at once, %v refusals counted, want more than 2000, and %d", empty, counted, all)
		}
	})
	// The budget alone: drained, then a thousand successes, then one failure.
	b := newTestBudget(BudgetConfig{})
	for at := time.Duration(0); at < 10*time.Minute; at += 10 * time.Millisecond {
		b.deposit(at, 1, 0)
		b.takeAt(at)
	}
	if b.askAt(10*time.Minute, 0) == "" {
		t.Fatal("the budget is not drained")
	}
	at := 10 * time.Minute
	for range 1000 {
		b.deposit(at, 1, 1)
		at += 5 * time.Millisecond
	}
	if wait, refused := b.takeAt(at); refused != "" || wait > DefaultBudgetMaxWait {
		t.Errorf("after 1000 successes: a wait of %v, %q, want a retry", wait, refused)
	}
}

// TestO30_EarlyExits takes each way out of a request between its failure and
// its retry 10,000 times. Before the turn is taken they cost nothing, after it
// that turn.
func TestO30_EarlyExits(t *testing.T) {
	const n = 10000
	type exit struct {
		name    string
		reason  Reason
		request func(ctx context.Context) *http.Request
		limit   time.Duration // deadline
		cancel  time.Duration // after which the caller goes
		ahead   bool          // another request has taken the turn, the next is a second away
		turns   uint64        // that it costs itself
	}
	get := func(ctx context.Context) *http.Request {
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://peer.test/", nil)
		return req
	}
	put := func(ctx context.Context) *http.Request {
		req, _ := http.NewRequestWithContext(ctx, http.MethodPut, "http://peer.test/", bytes.NewReader([]byte("body")))
		return req
	}
	for _, e := range []exit{
		{name: "cancel in the backoff", reason: ReasonCanceled, request: get, cancel: 10 * time.Millisecond},
		{name: "deadline before the end of the backoff", reason: ReasonDeadline, request: get, limit: 30 * time.Millisecond},
		{name: "turn after the deadline", reason: ReasonTurn, request: get, limit: 500 * time.Millisecond, ahead: true},
		{name: "cancel while waiting for the turn", reason: ReasonCanceled, request: get, cancel: 500 * time.Millisecond, ahead: true, turns: 1},
		{name: "body not replayable", reason: ReasonNotReplayable, request: func(ctx context.Context) *http.Request {
			req := put(ctx)
			req.GetBody = nil
			return req
		}},
		{name: "GetBody fails", reason: ReasonNotReplayable, request: func(ctx context.Context) *http.Request {
			req := put(ctx)
			req.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("gone") }
			return req
		}},
		{name: "not idempotent", reason: ReasonNotIdempotent, request: func(ctx context.Context) *http.Request {
			req := put(ctx)
			req.Method = http.MethodPost
			return req
		}},
	} {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				tl := &timeline{name: "down", phases: []phase{{lasts: neverEnds / 2, fault: failing, takes: time.Millisecond}}}
				tr := stormTransport(t, Config{}, newStormPeer(tl, 1), 1)
				tr.jitter = func() float64 { return 0.99 } // a wait of 49.5 ms
				b := tr.peers.enter("peer.test:80", time.Now()).budget
				taken := func() uint64 {
					now := b.epoch(time.Now())
					return b.retries.sum(now-budgetSlots, now)
				}
				for range n {
					if e.ahead {
						// The window forgets what the last one has cost.
						time.Sleep(12 * time.Second)
						if _, refused := b.take(time.Now(), time.Time{}); refused != "" {
							t.Fatalf("refused: %q", refused)
						}
					}
					before := taken()
					var o Outcome
					ctx := WithOverride(context.Background(), Override{Outcome: &o})
					cancel := context.CancelFunc(func() {})
					switch {
					case e.limit > 0:
						ctx, cancel = context.WithTimeout(ctx, e.limit)
					case e.cancel > 0:
						ctx, cancel = context.WithCancel(ctx)
						time.AfterFunc(e.cancel, cancel)
					}
					resp, err := tr.RoundTrip(e.request(ctx))
					cancel()
					if o.Attempts != 1 || o.Reason != e.reason || e.reason == ReasonCanceled != errors.Is(err, context.Canceled) {
						t.Fatalf("%d attempts, reason %q, %v, want one and %q", o.Attempts, o.Reason, err, e.reason)
					}
					if err == nil && resp.StatusCode != http.StatusServiceUnavailable {
						t.Fatalf("got %d", resp.StatusCode)
					}
					if cost := taken() - before; cost != e.turns {
						t.Fatalf("it cost %d turns, want %d", cost, e.turns)
					}
				}
				if refused := b.ask(time.Now(), 0, time.Time{}); refused != "" {
					t.Errorf("after all that a retry is refused: %q", refused)
				}
			})
		})
	}
}

func TestBudget_Utilisation(t *testing.T) {
	b := newTestBudget(tight(BudgetConfig{}))
	at := func(d time.Duration) float64 { return b.utilisation(budgetOrigin.Add(d)) }
	if u := at(time.Second); u != 0 {
		t.Errorf("unused: %v, want 0", u)
	}
	for i, want := range []float64{1. / 3, 2. / 3, 1} {
		b.takeAt(time.Second)
		if u := at(time.Second); math.Abs(u-want) > 1e-9 {
			t.Errorf("%d of 3 taken: %v, want %v", i+1, u, want)
		}
	}
	b.deposit(2*time.Second, 100, 100)
	if u := at(3 * time.Second); math.Abs(u-0.3) > 1e-9 {
		t.Errorf("3 of 10 taken: %v, want 0.3", u)
	}
	b.drain(3 * time.Second)
	if u := at(13500 * time.Millisecond); u != 1 {
		t.Errorf("more taken than the credit is worth by now: %v, want 1", u)
	}
	if u := at(14 * time.Second); u != 0 {
		t.Errorf("idle for a window: %v, want 0", u)
	}
	none := newTestBudget(BudgetConfig{Ratio: -1, MinPerSecond: -1})
	if u := none.utilisation(budgetOrigin); u != 0 {
		t.Errorf("without any budget: %v, want 0", u)
	}
}

// TestS2_ConcurrentUse: a thousand goroutines at once never get more than the
// limit, and no two of them the same turn.
func TestS2_ConcurrentUse(t *testing.T) {
	for round := range 5 {
		b := newTestBudget(BudgetConfig{MaxWait: time.Hour})
		var wg sync.WaitGroup
		for i := range 1000 { // credit of 1000 in ten slots
			wg.Go(func() { b.deposit(time.Duration(i%10)*time.Second, 1, 1) })
		}
		wg.Wait()
		var mu sync.Mutex
		var turns []time.Duration
		start := make(chan bool) // else each has ended before the next begins
		for i := range 1000 {
			wg.Go(func() {
				<-start
				// Deposits of the open slot and looks go on meanwhile.
				at := 10*time.Second + time.Duration(i%900)*time.Millisecond
				b.deposit(at, 1, 1)
				b.askAt(at, time.Duration(i)*time.Millisecond)
				b.utilisation(budgetOrigin.Add(at))
				wait, refused := b.takeAt(at)
				if refused != "" {
					if refused != ReasonBudget {
						t.Errorf("refused: %q", refused)
					}
					return
				}
				mu.Lock()
				defer mu.Unlock()
				turns = append(turns, at+wait)
			})
		}
		close(start)
		wg.Wait()
		if len(turns) != 100 {
			t.Errorf("round %d: %d retries, want 100", round, len(turns))
		}
		slices.Sort(turns)
		for i := range turns[1:] {
			if gap := turns[i+1] - turns[i]; gap < 105*time.Millisecond {
				t.Fatalf("round %d: two turns %v apart, want 105 ms", round, gap)
			}
		}
		if n := b.requests.sum(10, 10); n != 1000 {
			t.Errorf("round %d: %d of 1000 requests counted", round, n)
		}
	}

	// Nothing but turns, as close to each other as can be: more than there are.
	b := newTestBudget(tight(BudgetConfig{Ratio: 1}))
	b.deposit(0, 50000, 50000)
	var granted atomic.Int64
	var turns sync.WaitGroup
	start := make(chan bool)
	for range 1000 {
		turns.Go(func() {
			<-start
			for range 60 {
				if _, refused := b.takeAt(time.Second); refused == "" {
					granted.Add(1)
				}
			}
		})
	}
	close(start)
	turns.Wait()
	if n := granted.Load(); n != 50000 {
		t.Errorf("%d retries, want 50000", n)
	}

	// Slots that are taken over by a later one, from many goroutines at once.
	var s slotCounts
	var wg sync.WaitGroup
	for range 1000 {
		wg.Go(func() {
			for e := range int64(100) {
				s.add(e)
			}
		})
	}
	wg.Wait()
	if n := s.sum(99, 99); n != 1000 {
		t.Errorf("%d events in the last slot, want 1000", n)
	}
}

// TestBudgetConfig: what can be used, and that all that cannot is reported.
func TestBudgetConfig(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []BudgetConfig{
		{},
		{Ratio: 1}, {Ratio: 1e-9}, {Ratio: -1}, {Ratio: -math.MaxFloat64},
		{Window: time.Second}, {Window: time.Hour},
		{MinPerSecond: 1e6}, {MinPerSecond: 1e-9}, {MinPerSecond: -1},
		{PeakFactor: 1}, {PeakFactor: 1e6},
		{MaxWait: time.Hour}, {MaxWait: 1}, {MaxWait: -1}, {MaxWait: math.MinInt64},
		{Ratio: 1, Window: time.Hour, MinPerSecond: 1e6, PeakFactor: 1e6, MaxWait: time.Hour},
	} {
		if _, err := NewTransport(Config{Budget: c}); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
		// Whatever is valid has to work, too.
		b := newTestBudget(c)
		for at := time.Duration(0); at < time.Minute; at += 100 * time.Millisecond {
			b.deposit(at, 10, 10)
			if wait, refused := b.takeAt(at); wait < 0 || wait > max(0, b.cfg.MaxWait) || refused != "" && wait != 0 {
				t.Errorf("%+v: a wait of %v (%q)", c, wait, refused)
				break
			}
		}
	}
	for _, test := range []struct {
		field  string
		config BudgetConfig
	}{
		{"Ratio", BudgetConfig{Ratio: 1.0000001}},
		{"Ratio", BudgetConfig{Ratio: 10}},
		{"Ratio", BudgetConfig{Ratio: nan}},
		{"Ratio", BudgetConfig{Ratio: inf}},
		{"Ratio", BudgetConfig{Ratio: -inf}},
		{"Window", BudgetConfig{Window: time.Second - 1}},
		{"Window", BudgetConfig{Window: -time.Second}},
		{"Window", BudgetConfig{Window: time.Hour + 1}},
		{"MinPerSecond", BudgetConfig{MinPerSecond: 1e6 + 1}},
		{"MinPerSecond", BudgetConfig{MinPerSecond: nan}},
		{"MinPerSecond", BudgetConfig{MinPerSecond: inf}},
		{"MinPerSecond", BudgetConfig{MinPerSecond: -inf}},
		{"PeakFactor", BudgetConfig{PeakFactor: 0.5}},
		{"PeakFactor", BudgetConfig{PeakFactor: -1}},
		{"PeakFactor", BudgetConfig{PeakFactor: nan}},
		{"PeakFactor", BudgetConfig{PeakFactor: inf}},
		{"MaxWait", BudgetConfig{MaxWait: time.Hour + 1}},
	} {
		_, err := NewTransport(Config{Budget: test.config})
		var c *ConfigError
		if !errors.As(err, &c) || c.Field != "Config.Budget."+test.field {
			t.Errorf("%+v: got %v, want an error of Config.Budget.%s", test.config, err, test.field)
		}
	}
	_, err := NewTransport(Config{Budget: BudgetConfig{Ratio: nan, Window: 1, MinPerSecond: nan, PeakFactor: nan, MaxWait: 2 * time.Hour}})
	all, ok := err.(interface{ Unwrap() []error })
	if !ok || len(all.Unwrap()) != 5 {
		t.Errorf("five bad fields: got %v", err)
	}
}
