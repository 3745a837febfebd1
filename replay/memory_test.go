package replay_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/storetest"
)

func openMemory(*testing.T) replay.Store { return replay.NewMemory(replay.MemoryConfig{}) }

// S27, for this store.
func TestReplayS27_Memory(t *testing.T) { storetest.Run(t, openMemory) }

func key(n int) (k [32]byte) {
	copy(k[:], fmt.Sprint("key ", n))
	return k
}

// fill puts n keys in the store, done or in flight, from the number from on.
func fill(t *testing.T, m *replay.Memory, from, n int, answer []byte) {
	t.Helper()
	for i := from; i < from+n; i++ {
		c, err := m.Begin(t.Context(), key(i), key(0), time.Minute, time.Hour)
		if err != nil || c.State != replay.StateNew {
			t.Fatalf("Begin %d: %v, %v", i, c.State, err)
		}
		if answer == nil {
			continue
		}
		if err := m.Finish(t.Context(), key(i), c.Fence, answer, time.Hour); err != nil {
			t.Fatalf("Finish %d: %v", i, err)
		}
	}
}

func state(t *testing.T, m *replay.Memory, n int) replay.State {
	t.Helper()
	c, err := m.Begin(t.Context(), key(n), key(0), time.Minute, time.Hour)
	if err != nil {
		t.Fatalf("Begin %d: %v", n, err)
	}
	return c.State
}

func TestReplayS24_MemoryFullOfKeysInFlight(t *testing.T) {
	m := replay.NewMemory(replay.MemoryConfig{MaxEntries: 3})
	fill(t, m, 0, 3, nil)
	if _, err := m.Begin(t.Context(), key(3), key(0), time.Minute, time.Hour); !errors.Is(err, replay.ErrFull) {
		t.Fatalf("got error %v, want ErrFull", err)
	}
	for i := range 3 {
		if got := state(t, m, i); got != replay.StateBusy {
			t.Errorf("key %d: got %v, want busy", i, got)
		}
	}
}

func TestReplayS24_MemoryEvictsTheOldestDone(t *testing.T) {
	m := replay.NewMemory(replay.MemoryConfig{MaxEntries: 4})
	fill(t, m, 0, 1, nil)         // in flight, and the oldest
	fill(t, m, 1, 3, []byte("x")) // done
	fill(t, m, 4, 1, []byte("x")) // in the place of 1
	if m.Len() != 4 {
		t.Errorf("%d records, want 4", m.Len())
	}
	for i, want := range map[int]replay.State{0: replay.StateBusy, 2: replay.StateDone, 3: replay.StateDone, 4: replay.StateDone} {
		if got := state(t, m, i); got != want {
			t.Errorf("key %d: got %v, want %v", i, got, want)
		}
	}
	if got := state(t, m, 1); got != replay.StateNew {
		t.Errorf("key 1: got %v, want new", got)
	}
}

func TestMemoryBoundsBytes(t *testing.T) {
	const limit = 64 << 10
	m := replay.NewMemory(replay.MemoryConfig{MaxBytes: limit})
	fill(t, m, 0, 100, make([]byte, 10<<10))
	if n := m.Len(); n > 6 || n < 5 {
		t.Errorf("%d records of 10 KiB in 64 KiB, want 6", n)
	}
	if got := state(t, m, 99); got != replay.StateDone {
		t.Errorf("the last key: got %v, want done", got)
	}

	// One that is too large alone: all others go, and it still has no room.
	c, err := m.Begin(t.Context(), key(200), key(0), time.Minute, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Finish(t.Context(), key(200), c.Fence, make([]byte, limit), time.Hour); !errors.Is(err, replay.ErrFull) {
		t.Errorf("got error %v, want ErrFull", err)
	}
	if got := state(t, m, 200); got != replay.StateBusy {
		t.Errorf("the key whose answer had no room: got %v, want busy", got)
	}
}

// Records that nobody asks for again go as well, and the store is empty again
// after an hour of silence and a few requests.
func TestMemoryForgetsWhatHasExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := replay.NewMemory(replay.MemoryConfig{})
		fill(t, m, 0, 50, []byte("x"))
		fill(t, m, 50, 50, nil)
		time.Sleep(time.Hour)
		for i := range 30 {
			fill(t, m, 1000+i, 1, nil)
		}
		if m.Len() != 30 {
			t.Errorf("%d records, want the 30 new ones", m.Len())
		}
	})
}

// In flight, expired and not swept: full for none but the living.
func TestMemoryFullOfTheExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := replay.NewMemory(replay.MemoryConfig{MaxEntries: 100})
		fill(t, m, 0, 100, nil)
		time.Sleep(time.Hour)
		fill(t, m, 1000, 100, nil)
		if m.Len() != 100 {
			t.Errorf("%d records, want 100", m.Len())
		}
	})
}

func TestMemoryConfigErrors(t *testing.T) {
	m := replay.NewMemory(replay.MemoryConfig{MaxEntries: -1, MaxBytes: 1000})
	_, err := m.Begin(t.Context(), key(1), key(1), time.Second, time.Second)
	var c *stint.ConfigError
	if !errors.As(err, &c) {
		t.Fatalf("got error %v, want a ConfigError", err)
	}
	want := "stint: replay.MemoryConfig.MaxEntries = -1: must be at least 1, or 0 for 10,000\n" +
		"stint: replay.MemoryConfig.MaxBytes = 1000: must be at least 64 KiB, or 0 for 64 MiB"
	if err.Error() != want {
		t.Errorf("got\n%v\nwant\n%v", err, want)
	}
	if err := new(replay.Memory).Release(context.Background(), key(1), 1); err == nil {
		t.Error("the zero Memory works, want an error that names the constructor")
	}
}
