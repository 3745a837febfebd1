package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/pgstore"
)

// orders is a service whose effect is a row, committed with its answer.
type orders struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
	runs  atomic.Int64
	// before is called when the answer is in the transaction, and says what
	// becomes of that.
	before func(run int64, finished error) error
	after  func(w http.ResponseWriter, r *http.Request, err error)
}

func openOrders(t *testing.T) *orders {
	pool := connect(t, start(t).URL(), nil)
	_, err := pool.Exec(ctx, "CREATE TABLE orders (run bigint)")
	ok(t, "CREATE", err)
	return &orders{
		pool: pool, store: open(t, pool),
		before: func(_ int64, finished error) error { return finished },
		after:  func(http.ResponseWriter, *http.Request, error) {},
	}
}

func (o *orders) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	run := o.runs.Add(1)
	err := pgx.BeginFunc(context.WithoutCancel(r.Context()), o.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders VALUES ($1)", run); err != nil {
			return err
		}
		return o.before(run, o.store.FinishTx(r.Context(), tx, 201, http.Header{"X-Run": {fmt.Sprint(run)}}, fmt.Appendf(nil, "order %d", run)))
	})
	o.after(w, r, err)
}

func (o *orders) rows(t *testing.T, want int) {
	t.Helper()
	if n := count(t, o.pool, "SELECT count(*) FROM orders"); n != want {
		t.Fatalf("%d orders, want %d", n, want)
	}
}

// The effect and the answer are committed together. The handler writes nothing, or
// something else, or 503: what was committed is what is sent.
func TestPostgresFinishTx(t *testing.T) {
	o := openOrders(t)
	h := middleware(t, o.store, nil).Handler(o)
	for i, after := range []func(http.ResponseWriter){
		func(http.ResponseWriter) {},
		func(w http.ResponseWriter) { w.Write([]byte("something else")) },
		func(w http.ResponseWriter) { w.WriteHeader(503) },
		func(w http.ResponseWriter) { w.WriteHeader(502) },
	} {
		o.after = func(w http.ResponseWriter, _ *http.Request, err error) {
			ok(t, "commit", err)
			after(w)
		}
		key, want := fmt.Sprint("key-", i), fmt.Sprint("order ", i+1)
		first, second := post(h, key), post(h, key)
		answered(t, first, 201, want, false)
		answered(t, second, 201, want, true)
		for _, w := range []*httptest.ResponseRecorder{first, second} {
			if got := w.Header().Get("X-Run"); got != fmt.Sprint(i+1) {
				t.Errorf("X-Run: %q, want %d", got, i+1)
			}
			if got := w.Header().Get("Idempotency-Key"); got != key {
				t.Errorf("the key is echoed as %q, want %q", got, key)
			}
		}
		o.rows(t, i+1)
	}
}

// A panic after the commit: the client of before gets nothing, and the next the
// answer.
func TestPostgresFinishTxAndPanic(t *testing.T) {
	o := openOrders(t)
	o.after = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	h := middleware(t, o.store, nil).Handler(o)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic does not pass through")
			}
		}()
		post(h, "a")
	}()
	answered(t, post(h, "a"), 201, "order 1", true)
	o.rows(t, 1)
}

// A transaction that is rolled back leaves neither, and the next request runs.
func TestPostgresFinishTxRolledBack(t *testing.T) {
	o := openOrders(t)
	broken := errors.New("on purpose")
	o.before = func(run int64, finished error) error {
		ok(t, "FinishTx", finished)
		if run == 1 {
			return broken
		}
		return nil
	}
	o.after = func(w http.ResponseWriter, _ *http.Request, err error) {
		if err != nil {
			w.WriteHeader(503)
		}
	}
	h := middleware(t, o.store, nil).Handler(o)
	answered(t, post(h, "a"), 503, "", false)
	o.rows(t, 0)
	answered(t, post(h, "a"), 201, "order 2", false)
	answered(t, post(h, "a"), 201, "order 2", true)
	o.rows(t, 1)
}

// S26: a run that has lost its key to another one cannot commit, and its client gets
// the answer of the other one.
func TestPostgresS26_FinishTxUnderAnOldFence(t *testing.T) {
	o := openOrders(t)
	paused, resume := make(chan struct{}), make(chan struct{})
	h := middleware(t, dead{o.store}, func(c *replay.Config) { c.Lease, c.MaxWait = 200*time.Millisecond, 10*time.Second }).Handler(
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if o.runs.Load() == 0 {
				o.runs.Add(1) // run 1 is the one that is paused
				close(paused)
				<-resume
				err := pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "INSERT INTO orders VALUES (1)"); err != nil {
						return err
					}
					return o.store.FinishTx(r.Context(), tx, 201, nil, []byte("order 1"))
				})
				if !errors.Is(err, replay.ErrLost) {
					t.Errorf("FinishTx of a run that was paused: got error %v, want ErrLost", err)
				}
				return
			}
			o.ServeHTTP(w, r)
		}))
	first := make(chan *httptest.ResponseRecorder)
	go func() { first <- post(h, "a") }()
	<-paused
	answered(t, post(h, "a"), 201, "order 2", false) // when the lease has ended
	close(resume)
	answered(t, <-first, 201, "order 2", true)
	o.rows(t, 1)
}

// dead is a store that cannot be reached for renewals.
type dead struct{ *pgstore.Store }

func (dead) Renew(context.Context, [32]byte, int64, time.Duration) error {
	return errors.New("the network is down")
}

// Those who look at a key do not wait for the transaction that is about to finish
// it; who takes it over waits, and finds it done.
func TestPostgresTransactionIsOpen(t *testing.T) {
	pool := connect(t, start(t).URL(), nil)
	store := open(t, pool)
	var key [32]byte
	print := make(chan [32]byte, 1)
	m := middleware(t, spy{store, print}, func(c *replay.Config) { c.Lease = 500 * time.Millisecond })
	h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		run, _ := replay.Running(r.Context())
		key = run.Key
		p := <-print
		tx, err := pool.Begin(ctx)
		ok(t, "begin", err)
		defer tx.Rollback(ctx)
		ok(t, "FinishTx", store.FinishTx(r.Context(), tx, 201, nil, []byte("x")))

		short, cancel := context.WithTimeout(ctx, 400*time.Millisecond)
		defer cancel()
		if c, err := store.Begin(short, key, p, time.Minute, time.Hour); err != nil || c.State != replay.StateBusy {
			t.Errorf("Begin while the transaction is open: got %v, %v, want busy", c.State, err)
		}
		time.Sleep(600 * time.Millisecond) // the lease has ended; its renewal waits
		taker := make(chan replay.Claim)
		go func() {
			c, err := store.Begin(ctx, key, p, time.Minute, time.Hour)
			if err != nil {
				t.Errorf("Begin: %v", err)
			}
			taker <- c
		}()
		time.Sleep(50 * time.Millisecond)
		ok(t, "commit", tx.Commit(ctx))
		if c := <-taker; c.State != replay.StateDone {
			t.Errorf("Begin when the transaction is committed: got %v, want done", c.State)
		}
	}))
	answered(t, post(h, "a"), 201, "x", false)
}

// spy tells the print of the first Begin.
type spy struct {
	*pgstore.Store
	print chan [32]byte
}

func (s spy) Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (replay.Claim, error) {
	select {
	case s.print <- print:
	default:
	}
	return s.Store.Begin(ctx, key, print, lease, ttl)
}

// What could not be read again is not committed.
func TestPostgresFinishTxStatus(t *testing.T) {
	o := openOrders(t)
	h := middleware(t, o.store, nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, status := range []int{-1, 0, 100, 199, 1000} {
			bad := (*stint.ConfigError)(nil)
			if err := o.store.FinishTx(r.Context(), nil, status, nil, nil); !errors.As(err, &bad) {
				t.Errorf("status %d: got error %v, want a ConfigError", status, err)
			}
		}
		w.Write([]byte("as usual"))
	}))
	answered(t, post(h, "a"), 200, "as usual", false)
	answered(t, post(h, "a"), 200, "as usual", true)
}

func TestPostgresFinishTxWithoutARun(t *testing.T) {
	o := openOrders(t)
	h := middleware(t, o.store, nil).Handler(o)
	o.after = func(_ http.ResponseWriter, _ *http.Request, err error) {
		if !errors.Is(err, pgstore.ErrNoRun) {
			t.Errorf("got error %v, want ErrNoRun", err)
		}
	}
	post(h, "")
	o.rows(t, 0)
}
