package pgstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
)

// Store is a [replay.Store] in PostgreSQL. Make it with [New]: all methods of the
// zero value, and of nil, return an error that says so. It is safe for concurrent
// use.
type Store struct{ pool *pgxpool.Pool }

var _ replay.Store = (*Store)(nil)

// New returns a store on pool, which remains the caller's, to be closed after the
// last request. The error is a [*stint.ConfigError] if pool is nil.
//
// A call of the store needs a connection of the pool for a moment. If it is the
// pool of the handlers as well, it must not be possible that handlers hold all of
// it and wait for one that waits for the store.
func New(pool *pgxpool.Pool) (*Store, error) {
	if pool == nil {
		return nil, &stint.ConfigError{Field: "pgstore.New: pool", Value: nil, Reason: "is required"}
	}
	return &Store{pool: pool}, nil
}

var errZeroStore = errors.New("pgstore: Store was not made with pgstore.New")

// Shared implements [replay.Store]: true.
func (*Store) Shared() bool { return true }

// enter is the beginning of every method.
func (s *Store) enter(ctx context.Context) error {
	if s == nil || s.pool == nil {
		return errZeroStore
	}
	return ctx.Err()
}

// migrateLock is held by Migrate: CREATE … IF NOT EXISTS fails when two do it at the
// same time. The number is the beginning of the SHA-256 of "stint_replay".
const migrateLock = 0x996eed18897a82

// Migrate creates what the store needs, where it is missing: the table
// stint_replay, its index and a sequence, as in schema.sql. It may be called by
// many at the same time, at every start. It needs the right to create them; without
// it, have somebody execute schema.sql.
func (s *Store) Migrate(ctx context.Context) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", int64(migrateLock)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, schema)
		return err
	})
	return wrap("migrate", err)
}

// wrap says which call has failed.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("pgstore: %s: %w", what, err)
}

// tries bounds how often a statement is repeated, or the record looked at again
// since it has changed meanwhile.
const tries = 16

// Begin implements [replay.Store].
func (s *Store) Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (c replay.Claim, err error) {
	if err := s.enter(ctx); err != nil {
		return c, err
	}
	for range tries {
		c, err = s.begin(ctx, key, print, micros(lease), micros(ttl))
		if err == nil && c.State != 0 || err != nil && !undone(err) {
			return c, wrap("begin", err)
		}
	}
	if err != nil {
		return c, wrap("begin", err)
	}
	// Others have had it, one after the other, each for a moment.
	return replay.Claim{State: replay.StateBusy, Left: time.Millisecond}, nil
}

// undone reports whether the server has undone a statement that may be repeated,
// as it does under stricter isolation levels than its default.
func undone(err error) bool {
	e := (*pgconn.PgError)(nil)
	return errors.As(err, &e) && (e.Code == "40001" || e.Code == "40P01") // serialization_failure, deadlock_detected
}

// begin returns no State where it is to be called again.
func (s *Store) begin(ctx context.Context, key, print [32]byte, lease, ttl int64) (c replay.Claim, err error) {
	var fence int64
	err = s.pool.QueryRow(ctx, beginSQL, key[:], print[:], lease, ttl).Scan(&fence)
	if err == nil {
		return replay.Claim{State: replay.StateNew, Fence: fence}, nil
	}
	if !errors.Is(err, pgx.ErrNoRows) {
		return c, err
	}

	var its, answer []byte
	var done, expired bool
	var left int64
	err = s.pool.QueryRow(ctx, lookSQL, key[:]).Scan(&its, &fence, &done, &expired, &left, &answer)
	state := replay.StateTaken
	switch {
	case errors.Is(err, pgx.ErrNoRows): // swept
		return c, nil
	case err != nil:
		return c, err
	case expired:
		state = replay.StateNew
	case !bytes.Equal(its, print[:]):
		return replay.Claim{State: replay.StateMismatch}, nil
	case done:
		return replay.Claim{State: replay.StateDone, Answer: answer}, nil
	case left > 0:
		return replay.Claim{State: replay.StateBusy, Left: time.Duration(left) * time.Microsecond}, nil
	}

	err = s.pool.QueryRow(ctx, takeSQL, key[:], print[:], lease, ttl, fence).Scan(&fence)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // somebody else was first
		return c, nil
	case err != nil:
		return c, err
	}
	return replay.Claim{State: state, Fence: fence}, nil
}

// decide executes a statement that changes the record if it is in flight under a
// fence, in a transaction of its own.
func (s *Store) decide(ctx context.Context, what, sql string, args ...any) (err error) {
	if err := s.enter(ctx); err != nil {
		return err
	}
	for range tries {
		var tag pgconn.CommandTag
		if tag, err = s.pool.Exec(ctx, sql, args...); err == nil {
			return changed(tag)
		}
		if !undone(err) {
			break
		}
	}
	return wrap(what, err)
}

// changed returns ErrLost if no row was.
func changed(tag pgconn.CommandTag) error {
	if tag.RowsAffected() == 0 {
		return replay.ErrLost
	}
	return nil
}

// Renew implements [replay.Store].
func (s *Store) Renew(ctx context.Context, key [32]byte, fence int64, lease time.Duration) error {
	return s.decide(ctx, "renew", renewSQL, key[:], fence, micros(lease))
}

// Finish implements [replay.Store].
func (s *Store) Finish(ctx context.Context, key [32]byte, fence int64, answer []byte, ttl time.Duration) error {
	return s.decide(ctx, "finish", finishSQL, key[:], fence, answer, micros(ttl))
}

// Release implements [replay.Store].
func (s *Store) Release(ctx context.Context, key [32]byte, fence int64) error {
	return s.decide(ctx, "release", releaseSQL, key[:], fence)
}

// ErrNoRun is returned by [Store.FinishTx] for a request that runs without a record:
// it has no key, or its method needs none.
var ErrNoRun = errors.New("pgstore: the context is not that of a request with a key")

// FinishTx has the answer stored by the handler's own transaction: with the commit
// of tx the effect is there and every repetition gets this answer, without it
// neither. It is for the last statement before the commit, since the row is locked
// from here on. ctx is, or comes from, that of the request; tx is on the database of
// the store.
//
// The answer that is stored is the one that is sent, whatever the handler writes
// after the commit: so it need not write anything. header is what it sets, nil for
// nothing; body may be longer than [replay.Config].MaxAnswer. status is final whatever
// it is, from 200 on.
//
// [replay.ErrLost] says that the run no longer holds the key: another one has taken
// it over, or has done it already. Roll back, and return without an answer or with
// one; what the client gets is the other run's. With any other error roll back as
// well.
func (s *Store) FinishTx(ctx context.Context, tx pgx.Tx, status int, header http.Header, body []byte) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	if status < 200 || status > 999 {
		return &stint.ConfigError{Field: "pgstore.FinishTx: status", Value: status, Reason: "must lie in [200, 999]"}
	}
	run, ok := replay.Running(ctx)
	if !ok {
		return ErrNoRun
	}
	tag, err := tx.Exec(ctx, finishSQL, run.Key[:], run.Fence, run.Encode(status, header, body), micros(run.TTL))
	if err != nil {
		return wrap("finish in a transaction", err)
	}
	return changed(tag)
}

const (
	maxSweep = 10_000

	// fenceKept is how long a row stays after it has expired. Its fence is what the
	// next one has to exceed, also if that was drawn from the sequence earlier and is
	// inserted later; within this time any call is over.
	fenceKept = time.Minute
)

// Sweep removes records that have expired a minute ago or earlier, at most limit of
// them, the oldest first, and returns how many there were. Call it from time to time
// on one or all servers, again at once while it returns limit: for 100 keys a second,
// 1,000 rows every ten seconds. limit is at least 1 and at most 10,000.
func (s *Store) Sweep(ctx context.Context, limit int) (removed int, err error) {
	if err := s.enter(ctx); err != nil {
		return 0, err
	}
	if limit < 1 || limit > maxSweep {
		return 0, &stint.ConfigError{Field: "pgstore.Sweep: limit", Value: limit, Reason: "must lie in [1, 10,000]"}
	}
	return s.sweep(ctx, limit, fenceKept)
}

func (s *Store) sweep(ctx context.Context, limit int, expiredFor time.Duration) (removed int, err error) {
	tag, err := s.pool.Exec(ctx, sweepSQL, limit, micros(expiredFor))
	if err != nil {
		return 0, wrap("sweep", err)
	}
	return int(tag.RowsAffected()), nil
}

// micros rounds up.
func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }
