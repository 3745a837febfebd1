package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"

	"github.com/redis/go-redis/v9"

	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/redisstore"
)

func Example() {
	client := redis.NewClient(&redis.Options{Addr: "redis.internal:6379"})
	store, err := redisstore.New(client, redisstore.Config{})
	if err != nil {
		log.Fatal(err)
	}
	once, err := replay.New(replay.Config{
		Store: store,
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
		// A run that was paused and has lost its key has a fence that is less than
		// what the later one has left, and changes nothing.
		fence, _ := replay.Fence(r.Context())
		if err := place(r.Context(), fence); err != nil {
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})))
}

// place is what the service does.
func place(ctx context.Context, fence int64) error {
	const sql = `INSERT INTO orders (id, fence) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET fence = $2 WHERE orders.fence <= $2`
	_, err := fmt.Println(sql, fence)
	return err
}

// Without a client there is no store.
func ExampleNew_invalid() {
	_, err := redisstore.New(nil, redisstore.Config{})
	fmt.Println(err)
	// Output: stint: redisstore.New: client = <nil>: is required
}
