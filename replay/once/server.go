//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/pgstore"
	"github.com/stinthttp/stint/replay/redisstore"
)

// serverEnv holds the settings of a server process.
const serverEnv = "STINT_ONCE_SERVER"

// lease is short, for the runs of those who were killed to be taken over soon. Those
// who are paused are so for longer.
const lease = time.Second

type settings struct {
	Store    string // postgres or redis
	Naive    bool   // the effect on its own
	Database string // a URL
	Redis    string // an address
	CrashOne int64  // of so many runs one ends the process right after the effect, and one after its record
}

// isServer reports whether this process is to be a server, and is it.
func isServer() bool {
	env := os.Getenv(serverEnv)
	if env == "" {
		return false
	}
	var s settings
	err := json.Unmarshal([]byte(env), &s)
	if err == nil {
		err = s.serve()
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
	return true
}

// serve prints the address and serves until stdin ends, which it does with the
// process that started this one.
func (s settings) serve() error {
	ctx := context.Background()
	c, err := pgxpool.ParseConfig(s.Database)
	if err != nil {
		return err
	}
	c.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, c)
	if err != nil {
		return err
	}
	o := &operation{settings: s, pool: pool}
	var store replay.Store
	if s.Store == "redis" {
		store, err = redisstore.New(redis.NewClient(&redis.Options{Addr: s.Redis, PoolSize: 32}), redisstore.Config{})
	} else {
		o.records, err = pgstore.New(pool)
		store = o.records
	}
	if err != nil {
		return err
	}
	once, err := replay.New(replay.Config{Store: store, Scope: replay.SingleTenant, Required: true, Lease: lease})
	if err != nil {
		return err
	}
	outer, err := stint.NewMiddleware(stint.MiddlewareConfig{})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	return http.Serve(l, outer.Handler(once.Handler(o)))
}

// An operation inserts a row with its number and a token of its run's own, which is
// the answer.
type operation struct {
	settings
	pool    *pgxpool.Pool
	records *pgstore.Store
}

var errFenced = errors.New("a later run has been here")

func (o *operation) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	number, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	n, err := strconv.Atoi(string(number))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	token := uuid.NewString()
	time.Sleep(rand.N(50 * time.Millisecond))
	// A run that has lost its key or its client is told to stop. This one does not listen:
	// it could have been in the middle of its write when it was paused.
	ctx := context.WithoutCancel(r.Context())
	switch {
	case o.Naive:
		err = o.plain(ctx, n, token)
	case o.records != nil:
		err = o.inTransaction(ctx, n, token)
	default:
		fence, _ := replay.Fence(ctx)
		err = o.fenced(ctx, n, token, fence)
	}
	if err != nil {
		// Whether it was done is for the record to say, or for the fence.
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	}
	if o.CrashOne > 0 && rand.Int64N(o.CrashOne) == 0 {
		// Between the effect and its record, or, where they are one, after both.
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	time.Sleep(rand.N(20 * time.Millisecond))
	w.WriteHeader(http.StatusCreated)
	io.WriteString(w, token)
}

// plain is how it is done without thinking: first the effect, then the record.
func (o *operation) plain(ctx context.Context, n int, token string) error {
	_, err := o.pool.Exec(ctx, "INSERT INTO effects (operation, token) VALUES ($1, $2)", n, token)
	return err
}

// inTransaction commits both.
func (o *operation) inTransaction(ctx context.Context, n int, token string) error {
	return pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO effects (operation, token) VALUES ($1, $2)", n, token); err != nil {
			return err
		}
		if err := o.records.FinishTx(ctx, tx, http.StatusCreated, nil, []byte(token)); err != nil {
			if errors.Is(err, replay.ErrLost) {
				// For the report.
				if _, err := o.pool.Exec(ctx, "INSERT INTO refused VALUES ($1)", n); err != nil {
					return err
				}
			}
			return err
		}
		if o.CrashOne > 0 && rand.Int64N(o.CrashOne) == 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL) // before the commit
		}
		return nil
	})
}

// fenced makes the effect one that can be repeated, and not by a run that is over: of
// the runs of one operation the last one's row remains.
func (o *operation) fenced(ctx context.Context, n int, token string, fence int64) error {
	tag, err := o.pool.Exec(ctx, `
		INSERT INTO effects AS e (operation, token, fence) VALUES ($1, $2, $3)
		ON CONFLICT (operation) DO UPDATE SET token = $2, fence = $3, runs = e.runs + 1 WHERE e.fence <= $3`, n, token, fence)
	if err != nil {
		return err
	}
	if tag.RowsAffected() == 0 {
		// For the report.
		if _, err := o.pool.Exec(ctx, "INSERT INTO refused VALUES ($1)", n); err != nil {
			return err
		}
		return errFenced
	}
	return nil
}
