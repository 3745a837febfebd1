// Package storetest has the tests that every [replay.Store] must pass, for
// those that come with stint and for any other.
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) replay.Store { return mystore.New(…) })
//	}
package storetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stinthttp/stint/replay"
)

const (
	// long does not end within a test.
	long = time.Minute

	// short ends within a test, and does so by waiting past for it. Nothing is
	// asserted of what happens before its end, on a machine that may be slow.
	short = 20 * time.Millisecond
	past  = 10 * short
)

// Run runs all tests of the [replay.Store] interface, each as a subtest. open
// returns the store to use, and registers with its t what is to be cleaned up;
// it is called once for each subtest and may return the same store, or another
// client of the same store, each time. Keys are random, so that old records do
// no harm. The store must have room for a few hundred records and take answers
// of 2 MiB.
func Run(t *testing.T, open func(t *testing.T) replay.Store) {
	for _, c := range storeCases {
		t.Run(c.name, func(t *testing.T) {
			c.run(&suite{T: t, s: open(t), ctx: t.Context()})
		})
	}
}

var storeCases = []struct {
	name string
	run  func(*suite)
}{
	{"Fresh", testFresh},
	{"Busy", testBusy},
	{"Done", testDone},
	{"Mismatch", testMismatch},
	{"Released", testReleased},
	{"Taken", testTaken},
	{"LeaseEndedNotTaken", testLeaseEnded},
	{"Renewed", testRenewed},
	{"RenewExtendsExpiry", testRenewExtendsExpiry},
	{"LeaseShortened", testLeaseShortened},
	{"WrongFence", testWrongFence},
	{"DoneIsFinal", testDoneIsFinal},
	{"AbsentKey", testAbsentKey},
	{"ExpiredDone", testExpiredDone},
	{"ExpiredInFlight", testExpiredInFlight},
	{"FinishSetsExpiry", testFinishSetsExpiry},
	{"KeysApart", testKeysApart},
	{"Answers", testAnswers},
	{"AnswerNotShared", testAnswerNotShared},
	{"Durations", testDurations},
	{"FencesGrow", testFencesGrow},
	{"ContextOver", testContextOver},
	{"RaceForFresh", testRaceForFresh},
	{"RaceForTaken", testRaceForTaken},
	{"RaceToFinish", testRaceToFinish},
	{"RaceForReleased", testRaceForReleased},
	{"SharedIsConstant", testShared},
}

// suite is one subtest with its store.
type suite struct {
	*testing.T
	s   replay.Store
	ctx context.Context
}

// random32 returns a key or a print that nobody has used.
func random32() (k [32]byte) {
	rand.Read(k[:])
	return k
}

func (t *suite) begin(key, print [32]byte, lease, ttl time.Duration) replay.Claim {
	t.Helper()
	c, err := t.s.Begin(t.ctx, key, print, lease, ttl)
	if err != nil {
		t.Fatalf("Begin: %v", err)
	}
	t.check(c)
	return c
}

// check looks for what is wrong with c in any case.
func (t *suite) check(c replay.Claim) {
	t.Helper()
	holds := c.State == replay.StateNew || c.State == replay.StateTaken
	switch {
	case c.State < replay.StateNew || c.State > replay.StateMismatch:
		t.Errorf("Begin: invalid state %d", c.State)
	case holds && c.Fence <= 0:
		t.Errorf("Begin: %v with fence %d, want a positive one", c.State, c.Fence)
	case !holds && c.Fence != 0:
		t.Errorf("Begin: %v with fence %d, which is none of the caller's business", c.State, c.Fence)
	case c.State == replay.StateBusy && c.Left <= 0:
		t.Errorf("Begin: busy with %v left, want more than 0", c.Left)
	case c.State != replay.StateBusy && c.Left != 0:
		t.Errorf("Begin: %v with %v left, want 0", c.State, c.Left)
	case c.State != replay.StateDone && c.Answer != nil:
		t.Errorf("Begin: %v with an answer of %d bytes", c.State, len(c.Answer))
	}
}

// want begins key and expects the state.
func (t *suite) want(state replay.State, key, print [32]byte, lease, ttl time.Duration) replay.Claim {
	t.Helper()
	c := t.begin(key, print, lease, ttl)
	if c.State != state {
		t.Fatalf("Begin: got %v, want %v", c.State, state)
	}
	return c
}

func (t *suite) ok(what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func (t *suite) lost(what string, err error) {
	t.Helper()
	if !errors.Is(err, replay.ErrLost) {
		t.Fatalf("%s: got error %v, want ErrLost", what, err)
	}
}

func testFresh(t *suite) {
	t.want(replay.StateNew, random32(), random32(), long, long)
}

func testBusy(t *suite) {
	key, print := random32(), random32()
	t.want(replay.StateNew, key, print, long, long)
	for range 2 { // asking changes nothing
		c := t.want(replay.StateBusy, key, print, 2*long, 2*long)
		if c.Left > long {
			t.Fatalf("busy for %v, want at most the %v that the lease was given", c.Left, long)
		}
	}
}

func testDone(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("answer"), long))
	for range 2 {
		c := t.want(replay.StateDone, key, print, long, long)
		if string(c.Answer) != "answer" {
			t.Fatalf("got answer %q, want %q", c.Answer, "answer")
		}
	}
}

func testMismatch(t *suite) {
	key, print, other := random32(), random32(), random32()
	c := t.want(replay.StateNew, key, print, long, long)
	t.want(replay.StateMismatch, key, other, long, long)
	t.want(replay.StateBusy, key, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("answer"), long))
	t.want(replay.StateMismatch, key, other, long, long)
	t.want(replay.StateDone, key, print, long, long)

	// The end of a lease does not make room for another request: the run
	// before may have had its effect.
	key = random32()
	t.want(replay.StateNew, key, print, short, long)
	time.Sleep(past)
	t.want(replay.StateMismatch, key, other, long, long)
	t.want(replay.StateTaken, key, print, long, long)
	t.want(replay.StateMismatch, key, other, long, long)
}

func testReleased(t *suite) {
	key := random32()
	first := t.want(replay.StateNew, key, random32(), long, long)
	t.ok("Release", t.s.Release(t.ctx, key, first.Fence))
	second := t.want(replay.StateNew, key, random32(), long, long) // any print
	if second.Fence <= first.Fence {
		t.Fatalf("fence %d after %d, want a greater one", second.Fence, first.Fence)
	}
	t.lost("Release of what is released", t.s.Release(t.ctx, key, first.Fence))
	t.lost("Finish of what is released", t.s.Finish(t.ctx, key, first.Fence, []byte("x"), long))
	t.lost("Renew of what is released", t.s.Renew(t.ctx, key, first.Fence, long))
	t.ok("Finish", t.s.Finish(t.ctx, key, second.Fence, []byte("x"), long))
}

func testTaken(t *suite) {
	key, print := random32(), random32()
	first := t.want(replay.StateNew, key, print, short, long)
	time.Sleep(past)
	second := t.want(replay.StateTaken, key, print, long, long)
	if second.Fence <= first.Fence {
		t.Fatalf("fence %d after %d, want a greater one", second.Fence, first.Fence)
	}
	t.want(replay.StateBusy, key, print, long, long)

	// The owner of before has lost all rights.
	t.lost("Renew under the old fence", t.s.Renew(t.ctx, key, first.Fence, long))
	t.lost("Release under the old fence", t.s.Release(t.ctx, key, first.Fence))
	t.lost("Finish under the old fence", t.s.Finish(t.ctx, key, first.Fence, []byte("old"), long))
	t.want(replay.StateBusy, key, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, second.Fence, []byte("new"), long))
	t.lost("Finish under the old fence", t.s.Finish(t.ctx, key, first.Fence, []byte("old"), long))
	if c := t.want(replay.StateDone, key, print, long, long); string(c.Answer) != "new" {
		t.Fatalf("got answer %q, want %q", c.Answer, "new")
	}
}

func testLeaseEnded(t *suite) {
	print := random32()
	finished, released, renewed := random32(), random32(), random32()
	f := t.want(replay.StateNew, finished, print, short, long)
	r := t.want(replay.StateNew, released, print, short, long)
	n := t.want(replay.StateNew, renewed, print, short, long)
	time.Sleep(past)
	t.ok("Finish after the lease", t.s.Finish(t.ctx, finished, f.Fence, []byte("late"), long))
	t.ok("Release after the lease", t.s.Release(t.ctx, released, r.Fence))
	t.ok("Renew after the lease", t.s.Renew(t.ctx, renewed, n.Fence, long))
	t.want(replay.StateDone, finished, print, long, long)
	t.want(replay.StateNew, released, print, long, long)
	t.want(replay.StateBusy, renewed, print, long, long)
}

func testRenewed(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, short, long)
	t.ok("Renew", t.s.Renew(t.ctx, key, c.Fence, long))
	time.Sleep(past)
	t.want(replay.StateBusy, key, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("x"), long))
}

func testRenewExtendsExpiry(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, past, past)
	t.ok("Renew", t.s.Renew(t.ctx, key, c.Fence, long))
	time.Sleep(2 * past)
	t.want(replay.StateBusy, key, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("x"), long))
}

func testLeaseShortened(t *suite) {
	// Renew counts from now, it does not add, and it leaves a later expiry be.
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, long, long)
	t.ok("Renew", t.s.Renew(t.ctx, key, c.Fence, short))
	time.Sleep(past)
	t.want(replay.StateTaken, key, print, long, long)
}

func testWrongFence(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, long, long)
	for _, fence := range []int64{0, -1, c.Fence - 1, c.Fence + 1, -c.Fence} {
		t.lost("Renew", t.s.Renew(t.ctx, key, fence, long))
		t.lost("Release", t.s.Release(t.ctx, key, fence))
		t.lost("Finish", t.s.Finish(t.ctx, key, fence, []byte("x"), long))
	}
	t.want(replay.StateBusy, key, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("x"), long))
}

func testDoneIsFinal(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, short, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("first"), long))
	t.lost("second Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("second"), long))
	t.lost("Renew of what is done", t.s.Renew(t.ctx, key, c.Fence, long))
	t.lost("Release of what is done", t.s.Release(t.ctx, key, c.Fence))
	time.Sleep(past) // the lease is history
	if c := t.want(replay.StateDone, key, print, long, long); string(c.Answer) != "first" {
		t.Fatalf("got answer %q, want %q", c.Answer, "first")
	}
}

func testAbsentKey(t *suite) {
	key := random32()
	t.lost("Renew", t.s.Renew(t.ctx, key, 1, long))
	t.lost("Release", t.s.Release(t.ctx, key, 1))
	t.lost("Finish", t.s.Finish(t.ctx, key, 1, []byte("x"), long))
	t.want(replay.StateNew, key, random32(), long, long)
}

func testExpiredDone(t *suite) {
	key := random32()
	first := t.want(replay.StateNew, key, random32(), long, long)
	t.ok("Finish", t.s.Finish(t.ctx, key, first.Fence, []byte("x"), short))
	time.Sleep(past)
	second := t.want(replay.StateNew, key, random32(), long, long) // any print
	if second.Fence <= first.Fence {
		t.Fatalf("fence %d after %d, want a greater one", second.Fence, first.Fence)
	}
	t.want(replay.StateMismatch, key, random32(), long, long)
}

func testExpiredInFlight(t *suite) {
	// Also where the record is still there for want of someone to remove it.
	key := random32()
	first := t.want(replay.StateNew, key, random32(), short, short)
	time.Sleep(past)
	t.lost("Renew of what has expired", t.s.Renew(t.ctx, key, first.Fence, long))
	t.lost("Finish of what has expired", t.s.Finish(t.ctx, key, first.Fence, []byte("x"), long))
	t.lost("Release of what has expired", t.s.Release(t.ctx, key, first.Fence))
	second := t.want(replay.StateNew, key, random32(), long, long) // any print, and not Taken
	if second.Fence <= first.Fence {
		t.Fatalf("fence %d after %d, want a greater one", second.Fence, first.Fence)
	}
	t.lost("Finish of what has expired", t.s.Finish(t.ctx, key, first.Fence, []byte("x"), long))
	t.ok("Finish", t.s.Finish(t.ctx, key, second.Fence, []byte("x"), long))
}

func testFinishSetsExpiry(t *suite) {
	// In both directions: from Finish on, the ttl of Finish counts.
	longer, shorter, print := random32(), random32(), random32()
	l := t.want(replay.StateNew, longer, print, past, past)
	s := t.want(replay.StateNew, shorter, print, long, long)
	t.ok("Finish", t.s.Finish(t.ctx, longer, l.Fence, []byte("x"), long))
	t.ok("Finish", t.s.Finish(t.ctx, shorter, s.Fence, []byte("x"), short))
	time.Sleep(2 * past)
	t.want(replay.StateDone, longer, print, long, long)
	t.want(replay.StateNew, shorter, print, long, long)
}

func testKeysApart(t *suite) {
	// Keys that differ in one bit, or hold bytes that a text protocol minds.
	print := random32()
	base := random32()
	keys := [][32]byte{base, {0: '{', 1: '}', 31: base[0]}, {0: '\r', 1: '\n', 31: base[1]}}
	for bit := range 8 {
		first, last := base, base
		first[0] ^= 1 << bit
		last[31] ^= 1 << bit
		keys = append(keys, first, last)
	}
	for i, key := range keys {
		if i == 1 || i == 2 { // not random
			copy(key[2:], base[2:])
		}
		c := t.want(replay.StateNew, key, print, long, long)
		t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte{byte(i)}, long))
		keys[i] = key
	}
	for i, key := range keys {
		c := t.want(replay.StateDone, key, print, long, long)
		if !bytes.Equal(c.Answer, []byte{byte(i)}) {
			t.Fatalf("key %d: got answer %q, want %q", i, c.Answer, []byte{byte(i)})
		}
	}
}

func testAnswers(t *suite) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	big := make([]byte, 2<<20)
	rand.Read(big)
	for _, answer := range [][]byte{{0}, []byte("\r\n$-1\r\n"), []byte("0"), []byte(`\x00'`), all, big} {
		key, print := random32(), random32()
		c := t.want(replay.StateNew, key, print, long, long)
		t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, answer, long))
		if c = t.want(replay.StateDone, key, print, long, long); !bytes.Equal(c.Answer, answer) {
			t.Fatalf("an answer of %d bytes came back as another, of %d", len(answer), len(c.Answer))
		}
	}
}

func testAnswerNotShared(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, long, long)
	answer := []byte("answer")
	t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, answer, long))
	copy(answer, "XXXXXX") // the caller's buffer is used again
	if c = t.want(replay.StateDone, key, print, long, long); string(c.Answer) != "answer" {
		t.Fatalf("got answer %q, want %q", c.Answer, "answer")
	}
}

func testDurations(t *suite) {
	for _, d := range []time.Duration{
		time.Millisecond, time.Millisecond + time.Microsecond, time.Second + time.Nanosecond, 24 * time.Hour, 365 * 24 * time.Hour,
	} {
		key, print := random32(), random32()
		c := t.want(replay.StateNew, key, print, d, 365*24*time.Hour)
		if d < long {
			t.ok("Renew", t.s.Renew(t.ctx, key, c.Fence, long))
		}
		busy := t.want(replay.StateBusy, key, print, long, long)
		if want := max(d, long); busy.Left > want || busy.Left < want-long/2 {
			t.Fatalf("lease of %v: %v left, want about %v", d, busy.Left, want)
		}
		t.ok("Finish", t.s.Finish(t.ctx, key, c.Fence, []byte("x"), max(d, long)))
		t.want(replay.StateDone, key, print, long, long)
	}
}

func testFencesGrow(t *suite) {
	// As fast as it goes: a fence made of a clock must not repeat.
	key, print := random32(), random32()
	var last int64
	for i := range 100 {
		c := t.want(replay.StateNew, key, print, long, long)
		if c.Fence <= last {
			t.Fatalf("fence %d after %d at turn %d, want a greater one", c.Fence, last, i)
		}
		last = c.Fence
		t.ok("Release", t.s.Release(t.ctx, key, c.Fence))
	}
}

func testContextOver(t *suite) {
	key, print := random32(), random32()
	c := t.want(replay.StateNew, key, print, long, long)
	over, cancel := context.WithCancel(t.ctx)
	cancel()
	if _, err := t.s.Begin(over, random32(), print, long, long); !errors.Is(err, context.Canceled) {
		t.Errorf("Begin: got error %v, want context.Canceled", err)
	}
	for what, err := range map[string]error{
		"Renew":   t.s.Renew(over, key, c.Fence, long),
		"Finish":  t.s.Finish(over, key, c.Fence, []byte("x"), long),
		"Release": t.s.Release(over, key, c.Fence),
	} {
		if !errors.Is(err, context.Canceled) || errors.Is(err, replay.ErrLost) {
			t.Errorf("%s: got error %v, want context.Canceled", what, err)
		}
	}
	t.want(replay.StateBusy, key, print, long, long)
}

// race calls f from n goroutines at once and waits for all.
func race(n int, f func(i int)) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			<-start
			f(i)
		}()
	}
	close(start)
	wg.Wait()
}

const racers, rounds = 16, 10

// contend has many begin key and returns the one claim of the given state, all
// others being Busy.
func (t *suite) contend(state replay.State, key, print [32]byte) replay.Claim {
	t.Helper()
	claims := make([]replay.Claim, racers)
	race(racers, func(i int) {
		c, err := t.s.Begin(t.ctx, key, print, long, long)
		if err != nil {
			t.Errorf("Begin: %v", err)
		}
		claims[i] = c
	})
	var won []replay.Claim
	for _, c := range claims {
		t.check(c)
		switch c.State {
		case state:
			won = append(won, c)
		case replay.StateBusy:
		default:
			t.Errorf("Begin: got %v, want %v or busy", c.State, state)
		}
	}
	if len(won) != 1 {
		t.Fatalf("%d of %d got %v, want exactly one", len(won), racers, state)
	}
	return won[0]
}

func testRaceForFresh(t *suite) {
	for range rounds {
		t.contend(replay.StateNew, random32(), random32())
	}
}

func testRaceForTaken(t *suite) {
	print := random32()
	var keys [][32]byte
	var fences []int64
	for range rounds {
		key := random32()
		keys = append(keys, key)
		fences = append(fences, t.want(replay.StateNew, key, print, short, long).Fence)
	}
	time.Sleep(past)
	for i, key := range keys {
		if c := t.contend(replay.StateTaken, key, print); c.Fence <= fences[i] {
			t.Fatalf("fence %d after %d, want a greater one", c.Fence, fences[i])
		}
	}
}

func testRaceToFinish(t *suite) {
	for range rounds {
		key, print := random32(), random32()
		c := t.want(replay.StateNew, key, print, long, long)
		errs := make([]error, racers)
		race(racers, func(i int) { errs[i] = t.s.Finish(t.ctx, key, c.Fence, []byte{byte(i)}, long) })
		winner := -1
		for i, err := range errs {
			switch {
			case err == nil && winner >= 0:
				t.Fatalf("both %d and %d have finished the key", winner, i)
			case err == nil:
				winner = i
			default:
				t.lost("Finish", err)
			}
		}
		if winner < 0 {
			t.Fatal("nobody has finished the key")
		}
		if c := t.want(replay.StateDone, key, print, long, long); !bytes.Equal(c.Answer, []byte{byte(winner)}) {
			t.Fatalf("got answer %v, want that of %d, who finished", c.Answer, winner)
		}
	}
}

func testRaceForReleased(t *suite) {
	// Everybody claims, whoever has the key has it alone, and gives it back.
	key, print := random32(), random32()
	var mu sync.Mutex
	var owner, last int64
	race(racers, func(int) {
		for range rounds {
			c, err := t.s.Begin(t.ctx, key, print, long, long)
			if err != nil {
				t.Errorf("Begin: %v", err)
				return
			}
			if c.State != replay.StateNew {
				continue
			}
			mu.Lock()
			if owner != 0 {
				t.Errorf("fences %d and %d hold the key at the same time", owner, c.Fence)
			}
			if c.Fence <= last {
				t.Errorf("fence %d after %d, want a greater one", c.Fence, last)
			}
			owner, last = c.Fence, c.Fence
			mu.Unlock()

			mu.Lock()
			owner = 0
			mu.Unlock()
			if err := t.s.Release(t.ctx, key, c.Fence); err != nil {
				t.Errorf("Release: %v", err)
			}
		}
	})
}

func testShared(t *suite) {
	before := t.s.Shared()
	t.want(replay.StateNew, random32(), random32(), long, long)
	if t.s.Shared() != before {
		t.Error("Shared changes its mind")
	}
}
