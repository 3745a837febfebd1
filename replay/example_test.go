package replay_test

import (
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/stinthttp/stint/replay"
)

// An order that is placed twice under the same key is one order.
func Example() {
	once, err := replay.New(replay.Config{
		Store: replay.NewMemory(replay.MemoryConfig{}),
		Scope: func(r *http.Request) (string, error) {
			// Whom the key belongs to. A layer outside has authenticated them.
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
	orders := 0
	handler := once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		orders++
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "order %d", orders)
	}))

	for _, body := range []string{"a book", "a book", "a car"} {
		r := httptest.NewRequest("POST", "/orders", strings.NewReader(body))
		r.SetBasicAuth("ada", "secret")
		r.Header.Set("Idempotency-Key", "9b2a2a0e-8f1e-4f0e-9d6c-1f1b7d2a3c4d")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if w.Code == http.StatusCreated {
			fmt.Printf("%d %s, replayed: %t\n", w.Code, w.Body, w.Header().Get("Idempotent-Replayed") == "true")
		} else {
			fmt.Println(w.Code)
		}
	}
	// Output:
	// 201 order 1, replayed: false
	// 201 order 1, replayed: true
	// 422
}

// Wrong: a token is not whom a key belongs to. It changes between two attempts of
// the same request, which then runs twice.
func ExampleConfig_scopeThatChanges() {
	once, err := replay.New(replay.Config{
		Store: replay.NewMemory(replay.MemoryConfig{}),
		Scope: func(r *http.Request) (string, error) { return r.Header.Get("Authorization"), nil },
	})
	if err != nil {
		log.Fatal(err)
	}
	runs := 0
	handler := once.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs++ }))
	for _, token := range []string{"Bearer morning", "Bearer evening"} {
		r := httptest.NewRequest("POST", "/orders", strings.NewReader("a book"))
		r.Header.Set("Authorization", token)
		r.Header.Set("Idempotency-Key", "9b2a2a0e-8f1e-4f0e-9d6c-1f1b7d2a3c4d")
		handler.ServeHTTP(httptest.NewRecorder(), r)
	}
	fmt.Println("runs:", runs)
	// Output: runs: 2
}

// All fields that cannot be used are reported at once.
func ExampleNew_invalid() {
	_, err := replay.New(replay.Config{Store: replay.NewMemory(replay.MemoryConfig{MaxEntries: -1}), MaxAnswer: -1})
	fmt.Println(err)
	// Output:
	// stint: replay.MemoryConfig.MaxEntries = -1: must be at least 1, or 0 for 10,000
	// stint: replay.Config.Scope = <nil>: is required: whom a key belongs to, or SingleTenant
	// stint: replay.Config.MaxAnswer = -1: must lie in [1, 64 MiB], or be 0 for 1 MiB
}
