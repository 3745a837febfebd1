package pgstore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/pgstore"
)

func random32() (k [32]byte) {
	rand.Read(k[:])
	return k
}

// want begins key and expects the state.
func want(t *testing.T, s replay.Store, state replay.State, key, print [32]byte, lease time.Duration) replay.Claim {
	t.Helper()
	c, err := s.Begin(ctx, key, print, lease, time.Hour)
	if err != nil || c.State != state {
		t.Fatalf("Begin: got %v, %v, want %v", c.State, err, state)
	}
	return c
}

func ok(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func lost(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, replay.ErrLost) {
		t.Fatalf("%s: got error %v, want ErrLost", what, err)
	}
}

// count returns what a query counts.
func count(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	ok(t, sql, pool.QueryRow(ctx, sql, args...).Scan(&n))
	return n
}

// statements counts them.
type statements struct{ n atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.n.Add(1)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func middleware(t *testing.T, s replay.Store, change func(*replay.Config)) *replay.Middleware {
	t.Helper()
	c := replay.Config{Store: s, Scope: replay.SingleTenant, StoreTimeout: 10 * time.Second}
	if change != nil {
		change(&c)
	}
	m, err := replay.New(c)
	ok(t, "New", err)
	return m
}

func post(h http.Handler, key string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", "/", strings.NewReader("body"))
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func answered(t *testing.T, w *httptest.ResponseRecorder, status int, body string, replayed bool) {
	t.Helper()
	if w.Code != status || w.Body.String() != body || (w.Header().Get("Idempotent-Replayed") == "true") != replayed {
		t.Fatalf("got %d %q, replayed %q, want %d %q, %v", w.Code, w.Body, w.Header().Get("Idempotent-Replayed"), status, body, replayed)
	}
}

// A request that runs costs two statements, its repetition two.
func TestPostgresStatements(t *testing.T) {
	var n statements
	store := open(t, connect(t, start(t).URL(), func(c *pgxpool.Config) { c.ConnConfig.Tracer = &n }))
	h := middleware(t, store, nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, strings.Repeat("x", 1024))
	}))
	for _, tt := range []struct {
		key      string
		replayed bool
	}{{"a", false}, {"a", true}, {"b", false}, {"b", true}} {
		n.n.Store(0)
		answered(t, post(h, tt.key), 200, strings.Repeat("x", 1024), tt.replayed)
		if got := n.n.Load(); got < 1 || got > 2 {
			t.Errorf("key %s, replayed %v: %d statements, want at most 2", tt.key, tt.replayed, got)
		}
	}
}

// Everybody may migrate at the same time, again and again, and what schema.sql says
// is what Migrate does.
func TestPostgresMigrate(t *testing.T) {
	pool := connect(t, start(t).URL(), nil)
	store, err := pgstore.New(pool)
	ok(t, "New", err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := store.Migrate(ctx); err != nil {
				t.Errorf("Migrate: %v", err)
			}
		})
	}
	wg.Wait()
	key, print := random32(), random32()
	c := want(t, store, replay.StateNew, key, print, time.Minute)
	ok(t, "Migrate", store.Migrate(ctx))
	ok(t, "Finish", store.Finish(ctx, key, c.Fence, []byte("x"), time.Hour))

	_, err = pool.Exec(ctx, "DROP TABLE stint_replay; DROP SEQUENCE stint_replay_fence")
	ok(t, "DROP", err)
	if _, err := store.Begin(ctx, key, print, time.Minute, time.Hour); err == nil {
		t.Error("Begin has no error, and there is no table")
	}
	sql, err := os.ReadFile("schema.sql")
	ok(t, "schema.sql", err)
	for range 2 {
		_, err = pool.Exec(ctx, string(sql))
		ok(t, "schema.sql", err)
	}
	want(t, store, replay.StateNew, key, print, time.Minute)
}

// At most limit rows, of those that have expired for a minute.
func TestPostgresSweep(t *testing.T) {
	pool := connect(t, start(t).URL(), nil)
	store := open(t, pool)
	print, released := random32(), random32()
	const n = 25
	for range n {
		_, err := store.Begin(ctx, random32(), print, time.Millisecond, time.Millisecond)
		ok(t, "Begin", err)
	}
	c := want(t, store, replay.StateNew, released, print, time.Minute)
	ok(t, "Release", store.Release(ctx, released, c.Fence))
	done, flight := random32(), random32()
	d := want(t, store, replay.StateNew, done, print, time.Millisecond)
	ok(t, "Finish", store.Finish(ctx, done, d.Fence, []byte("x"), time.Hour))
	want(t, store, replay.StateNew, flight, print, time.Millisecond) // its lease has ended, and it has not expired
	time.Sleep(50 * time.Millisecond)

	removed, err := store.Sweep(ctx, 1000)
	if err != nil || removed != 0 {
		t.Fatalf("removed %d, %v, want none within a minute", removed, err)
	}
	for _, want := range []int{10, 10, 6, 0} {
		removed, err := store.SweepExpiredFor(ctx, 10, time.Millisecond)
		if err != nil || removed != want {
			t.Fatalf("removed %d, %v, want %d", removed, err, want)
		}
	}
	if left := count(t, pool, "SELECT count(*) FROM stint_replay"); left != 2 {
		t.Errorf("%d rows are left, want 2", left)
	}
	want(t, store, replay.StateDone, done, print, time.Minute)
	want(t, store, replay.StateTaken, flight, print, time.Minute)
	if next := want(t, store, replay.StateNew, released, print, time.Minute); next.Fence <= c.Fence {
		t.Errorf("fence %d after %d, want a greater one", next.Fence, c.Fence)
	}
	for _, limit := range []int{-1, 0, 10_001} {
		bad := (*stint.ConfigError)(nil)
		if _, err := store.Sweep(ctx, limit); !errors.As(err, &bad) {
			t.Errorf("limit %d: got error %v, want a ConfigError", limit, err)
		}
	}
}

// Sweepers and those who begin do not mind each other, and fences grow over rows that
// are gone. (Without any grace they would not: a fence that was drawn before a row was
// removed can be inserted after it.)
func TestPostgresSweepInTheMiddle(t *testing.T) {
	store := open(t, connect(t, start(t).URL(), nil))
	print := random32()
	keys := [4][32]byte{random32(), random32(), random32(), random32()}
	var wg sync.WaitGroup
	var mu sync.Mutex
	last := map[[32]byte]int64{}
	swept := 0
	for i := range 8 {
		wg.Go(func() {
			for j := range 100 {
				if i < 2 {
					n, err := store.SweepExpiredFor(ctx, 100, 300*time.Millisecond)
					if err != nil {
						t.Errorf("Sweep: %v", err)
					}
					mu.Lock()
					swept += n
					mu.Unlock()
					time.Sleep(15 * time.Millisecond)
					continue
				}
				if j == 50 {
					time.Sleep(700 * time.Millisecond)
				}
				key := keys[j%len(keys)]
				c, err := store.Begin(ctx, key, print, time.Minute, time.Hour)
				if err != nil {
					t.Errorf("Begin: %v", err)
					return
				}
				if c.State != replay.StateNew {
					continue
				}
				mu.Lock()
				if c.Fence <= last[key] {
					t.Errorf("fence %d after %d, want a greater one", c.Fence, last[key])
				}
				last[key] = c.Fence
				mu.Unlock()
				if err := store.Release(ctx, key, c.Fence); err != nil {
					t.Errorf("Release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if len(last) == 0 || swept == 0 {
		t.Errorf("%d keys were had, %d rows swept, want some", len(last), swept)
	}
}

// A statement that waits for a lock holds nobody for longer than the context says.
func TestPostgresWaits(t *testing.T) {
	pool := connect(t, start(t).URL(), nil)
	store := open(t, pool)
	key, print := random32(), random32()
	c := want(t, store, replay.StateNew, key, print, time.Minute)
	tx, err := pool.Begin(ctx)
	ok(t, "begin", err)
	defer tx.Rollback(ctx)
	_, err = tx.Exec(ctx, "LOCK TABLE stint_replay IN ACCESS EXCLUSIVE MODE")
	ok(t, "LOCK", err)
	for what, call := range map[string]func(context.Context) error{
		"Begin": func(ctx context.Context) error {
			_, err := store.Begin(ctx, key, print, time.Minute, time.Hour)
			return err
		},
		"Renew":   func(ctx context.Context) error { return store.Renew(ctx, key, c.Fence, time.Minute) },
		"Finish":  func(ctx context.Context) error { return store.Finish(ctx, key, c.Fence, nil, time.Hour) },
		"Release": func(ctx context.Context) error { return store.Release(ctx, key, c.Fence) },
	} {
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		if err := call(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got error %v, want context.DeadlineExceeded", what, err)
		}
		cancel()
	}
	ok(t, "rollback", tx.Rollback(ctx))
	want(t, store, replay.StateBusy, key, print, time.Minute)
}

// S23: the clock of a server that uses the store does not matter. In a bubble it
// says that it is the year 2000.
func TestPostgresS23_ClockOfAServer(t *testing.T) {
	url := start(t).URL()
	now := open(t, connect(t, url, nil))
	key, other, print := random32(), random32(), random32()
	first := want(t, now, replay.StateNew, key, print, time.Minute)
	synctest.Test(t, func(t *testing.T) {
		if year := time.Now().Year(); year != 2000 {
			t.Fatalf("the year is %d", year)
		}
		pool, err := pgxpool.New(ctx, url)
		ok(t, "pool", err)
		defer pool.Close()
		past, err := pgstore.New(pool)
		ok(t, "New", err)
		if busy := want(t, past, replay.StateBusy, key, print, time.Minute); busy.Left > time.Minute || busy.Left < 30*time.Second {
			t.Errorf("%v left, want about a minute", busy.Left)
		}
		ok(t, "Renew", past.Renew(ctx, key, first.Fence, time.Minute))
		second := want(t, past, replay.StateNew, other, print, time.Millisecond)
		if second.Fence <= first.Fence {
			t.Errorf("fence %d after %d", second.Fence, first.Fence)
		}
		ok(t, "Finish", past.Finish(ctx, other, second.Fence, []byte("x"), time.Hour))
		if n, err := past.Sweep(ctx, 1000); err != nil || n != 0 {
			t.Errorf("swept %d, %v, want none", n, err)
		}
	})
	want(t, now, replay.StateBusy, key, print, time.Minute)
	want(t, now, replay.StateDone, other, print, time.Minute)
}

func TestPostgresConfig(t *testing.T) {
	bad := (*stint.ConfigError)(nil)
	if _, err := pgstore.New(nil); !errors.As(err, &bad) {
		t.Errorf("got error %v, want a ConfigError", err)
	}
	for _, s := range []*pgstore.Store{nil, {}} {
		if !s.Shared() {
			t.Error("it is not shared")
		}
		_, begin := s.Begin(ctx, random32(), random32(), time.Minute, time.Hour)
		_, sweep := s.Sweep(ctx, 1)
		for what, err := range map[string]error{
			"Begin": begin, "Sweep": sweep, "Migrate": s.Migrate(ctx), "Release": s.Release(ctx, random32(), 1),
			"FinishTx": s.FinishTx(ctx, nil, 200, nil, nil),
		} {
			if err == nil || !strings.Contains(err.Error(), "pgstore.New") {
				t.Errorf("%s: got error %v, want one that names the constructor", what, err)
			}
		}
	}
}
