package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/pgstore"
)

// The order and the answer are committed together: exactly one of each.
func Example() {
	pool, err := pgxpool.New(context.Background(), "postgres://orders@db.internal/orders")
	if err != nil {
		log.Fatal(err)
	}
	store, err := pgstore.New(pool)
	if err != nil {
		log.Fatal(err)
	}
	if err := store.Migrate(context.Background()); err != nil {
		log.Fatal(err)
	}
	once, err := replay.New(replay.Config{
		Store:    store,
		Required: true, // FinishTx needs a key
		Scope: func(r *http.Request) (string, error) { // whom the key belongs to
			account, _, ok := r.BasicAuth()
			if !ok {
				return "", errors.New("no account")
			}
			return account, nil
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/orders", once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO orders (what) VALUES ($1)", r.FormValue("what")); err != nil {
				return err
			}
			// The last statement before the commit. What it is given is the answer.
			return store.FinishTx(ctx, tx, http.StatusCreated, nil, []byte("ordered"))
		})
		if err != nil {
			// If it was committed all the same, or by another run, its answer is sent
			// in place of this one.
			http.Error(w, "try again", http.StatusServiceUnavailable)
		}
	})))
}

// On one server or on all of them.
func ExampleStore_Sweep() {
	sweepers := func(ctx context.Context, store *pgstore.Store) {
		for tick := time.Tick(10 * time.Second); ; {
			select {
			case <-tick:
			case <-ctx.Done():
				return
			}
			for {
				n, err := store.Sweep(ctx, 1000)
				if err != nil {
					log.Print(err)
				}
				if n < 1000 {
					break
				}
			}
		}
	}
	_ = sweepers
}

// Without a pool there is no store.
func ExampleNew_invalid() {
	_, err := pgstore.New(nil)
	fmt.Println(err)
	// Output: stint: pgstore.New: pool = <nil>: is required
}
