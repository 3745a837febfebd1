package replay

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Defaults of MemoryConfig.
const (
	DefaultMaxEntries = 10_000
	DefaultMaxBytes   = 64 << 20
)

const (
	// recordBytes is what a record is charged with besides its answer: itself,
	// its place in the map, and what the allocator rounds up.
	recordBytes = 256
	minMaxBytes = 64 << 10
)

// MemoryConfig configures [NewMemory]. The zero value is valid.
type MemoryConfig struct {
	// MaxEntries is how many keys are remembered, in flight and done. 0:
	// DefaultMaxEntries, 10,000.
	MaxEntries int

	// MaxBytes bounds the memory of all records together, with 256 bytes for
	// each besides its answer. 0: DefaultMaxBytes, 64 MiB. At least 64 KiB.
	MaxBytes int64
}

// Memory is a [Store] in the memory of one process, for services of one process
// and for tests. It is not shared: a retry that arrives at another process, or
// at this one after a restart, finds nothing. So with it the middleware does
// not tell clients that their keys are honoured.
//
// It is bounded. Where there is no more room, the records that have been done
// for longest are forgotten before their time; those in flight never are, and
// with no others left Begin returns [ErrFull]. It starts no goroutine and needs
// no Close. Time is measured by the monotonic clock: a step of the wall clock
// changes nothing.
//
// Make it with [NewMemory]. It is safe for concurrent use.
type Memory struct {
	maxEntries int
	maxBytes   int64
	start      time.Time // instants are durations since then
	err        error     // of the configuration; all methods return it

	mu       sync.Mutex
	records  map[[32]byte]*record // guarded by mu
	bytes    int64                // guarded by mu; of all records
	fence    int64                // guarded by mu; the last one handed out
	inFlight queue                // guarded by mu; by begin
	done     queue                // guarded by mu; by finish
}

// A record belongs to one of the queues and is guarded by the lock of the store.
type record struct {
	key, print [32]byte
	fence      int64
	done       bool
	leaseEnd   time.Duration
	expiry     time.Duration
	answer     []byte

	prev, next *record // in its queue
}

// NewMemory returns an empty store. A field that cannot be used is reported by
// [New], as a [*stint.ConfigError] among others, and by every call of the store.
func NewMemory(c MemoryConfig) *Memory {
	var errs configErrors
	if c.MaxEntries == 0 {
		c.MaxEntries = DefaultMaxEntries
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = DefaultMaxBytes
	}
	errs.check(c.MaxEntries > 0, "MemoryConfig.MaxEntries", c.MaxEntries, "must be at least 1, or 0 for 10,000")
	errs.check(c.MaxBytes >= minMaxBytes, "MemoryConfig.MaxBytes", c.MaxBytes, "must be at least 64 KiB, or 0 for 64 MiB")
	start := time.Now()
	return &Memory{
		maxEntries: c.MaxEntries,
		maxBytes:   c.MaxBytes,
		start:      start,
		err:        errs.join(),
		fence:      start.UnixMicro(), // so that it grows over a restart as well
		records:    make(map[[32]byte]*record),
	}
}

var errZeroMemory = errors.New("replay: Memory was not made with replay.NewMemory")

// Shared implements [Store]: false.
func (*Memory) Shared() bool { return false }

// Len returns the number of records, those included that have expired and have
// not been removed yet.
func (m *Memory) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.records)
}

// enter is the beginning of every method: it takes the lock if there is no
// error.
func (m *Memory) enter(ctx context.Context) (now time.Duration, err error) {
	if m == nil || m.records == nil {
		return 0, errZeroMemory
	}
	if m.err != nil {
		return 0, m.err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	m.mu.Lock()
	return time.Since(m.start), nil
}

// Begin implements [Store].
func (m *Memory) Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (Claim, error) {
	now, err := m.enter(ctx)
	if err != nil {
		return Claim{}, err
	}
	defer m.mu.Unlock()
	m.sweepLocked(now)
	r := m.records[key]
	if r != nil && r.expiry <= now {
		m.removeLocked(r)
		r = nil
	}
	state := StateNew
	switch {
	case r == nil:
		if !m.makeRoomLocked(1, recordBytes, now) {
			return Claim{}, ErrFull
		}
		r = &record{key: key, print: print}
		m.records[key] = r
		m.bytes += recordBytes
		m.inFlight.push(r)
	case r.print != print:
		return Claim{State: StateMismatch}, nil
	case r.done:
		return Claim{State: StateDone, Answer: r.answer}, nil
	case r.leaseEnd > now:
		return Claim{State: StateBusy, Left: r.leaseEnd - now}, nil
	default:
		state = StateTaken
		m.inFlight.remove(r)
		m.inFlight.push(r)
	}
	m.fence++
	r.fence, r.leaseEnd, r.expiry = m.fence, now+lease, now+ttl
	return Claim{State: state, Fence: m.fence}, nil
}

// Renew implements [Store].
func (m *Memory) Renew(ctx context.Context, key [32]byte, fence int64, lease time.Duration) error {
	now, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer m.mu.Unlock()
	r := m.heldLocked(key, fence, now)
	if r == nil {
		return ErrLost
	}
	r.leaseEnd = now + lease
	r.expiry = max(r.expiry, r.leaseEnd)
	return nil
}

// Finish implements [Store]. It returns [ErrFull] for an answer for which there
// is no room although nothing else is kept.
func (m *Memory) Finish(ctx context.Context, key [32]byte, fence int64, answer []byte, ttl time.Duration) error {
	return m.finish(ctx, key, fence, append(make([]byte, 0, len(answer)), answer...), ttl)
}

// finish is Finish for an answer that nobody else will touch.
func (m *Memory) finish(ctx context.Context, key [32]byte, fence int64, answer []byte, ttl time.Duration) error {
	now, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer m.mu.Unlock()
	r := m.heldLocked(key, fence, now)
	if r == nil {
		return ErrLost
	}
	if !m.makeRoomLocked(0, int64(len(answer)), now) {
		return ErrFull
	}
	r.answer = answer
	r.done, r.expiry = true, now+ttl
	m.bytes += int64(len(answer))
	m.inFlight.remove(r)
	m.done.push(r)
	return nil
}

// Release implements [Store].
func (m *Memory) Release(ctx context.Context, key [32]byte, fence int64) error {
	now, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer m.mu.Unlock()
	r := m.heldLocked(key, fence, now)
	if r == nil {
		return ErrLost
	}
	m.removeLocked(r)
	return nil
}

// heldLocked returns the record of key if it is in flight under fence.
func (m *Memory) heldLocked(key [32]byte, fence int64, now time.Duration) *record {
	r := m.records[key]
	if r == nil || r.done || r.fence != fence || r.expiry <= now {
		return nil
	}
	return r
}

// sweepLocked forgets what has expired, a few records at a time, so that no
// call pays for all. With one ttl for all, the first in a queue expires first.
func (m *Memory) sweepLocked(now time.Duration) {
	for range 4 {
		swept := false
		for _, q := range []*queue{&m.done, &m.inFlight} {
			if r := q.first; r != nil && r.expiry <= now {
				m.removeLocked(r)
				swept = true
			}
		}
		if !swept {
			return
		}
	}
}

// makeRoomLocked forgets records that are done, the oldest first, until there
// is room for what is to be added, and reports whether there is.
func (m *Memory) makeRoomLocked(entries int, bytes int64, now time.Duration) bool {
	for len(m.records)+entries > m.maxEntries || m.bytes+bytes > m.maxBytes {
		r := m.done.first
		if r == nil {
			// One in flight that has expired is nobody's.
			if r = m.inFlight.first; r == nil || r.expiry > now {
				return false
			}
		}
		m.removeLocked(r)
	}
	return true
}

func (m *Memory) removeLocked(r *record) {
	delete(m.records, r.key)
	m.bytes -= recordBytes + int64(len(r.answer))
	if r.done {
		m.done.remove(r)
	} else {
		m.inFlight.remove(r)
	}
}

// A queue is a list of records. container/list would be an allocation for each.
type queue struct{ first, last *record }

func (q *queue) push(r *record) {
	r.prev, r.next = q.last, nil
	if q.last != nil {
		q.last.next = r
	} else {
		q.first = r
	}
	q.last = r
}

func (q *queue) remove(r *record) {
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		q.first = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	} else {
		q.last = r.prev
	}
	r.prev, r.next = nil, nil
}
