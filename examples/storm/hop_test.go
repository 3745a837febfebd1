package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// TestHop looks at what each way to call the database does to it, when it is
// down.
func TestHop(t *testing.T) {
	var requests, withDeadline atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		if r.Header.Get(stint.HeaderDeadline) != "" {
			withDeadline.Add(1)
		}
		http.Error(w, "down", http.StatusServiceUnavailable)
	}))
	defer server.Close()
	g, err := newGuarded()
	if err != nil {
		t.Fatal(err)
	}
	hop := &switchedHop{guarded: g}
	database, err := hop.caller(tiers[bottom])
	if err != nil {
		t.Fatal(err)
	}
	defer database.CloseIdleConnections()
	if other, err := hop.caller(tiers[1]); err != nil || other == database {
		t.Errorf("the other hops can be switched too (%v)", err)
	}

	const calls = 10
	for kind, want := range map[hopKind]struct {
		attempts [2]int32 // least and most
		deadline bool
	}{
		hopGuarded:   {[2]int32{calls, calls + 5}, true},
		hopLavish:    {[2]int32{3 * calls, 3 * calls}, true},
		hopForgetful: {[2]int32{calls, calls + 5}, false},
		hopPlain:     {[2]int32{3 * calls, 3 * calls}, false},
	} {
		if err := hop.set(kind); err != nil {
			t.Fatal(err)
		}
		requests.Store(0)
		withDeadline.Store(0)
		for range calls {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := database.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			discard(resp)
			cancel()
		}
		if got := requests.Load(); got < want.attempts[0] || got > want.attempts[1] {
			t.Errorf("%s: %d attempts for %d calls, want %v", kind, got, calls, want.attempts)
		}
		if got := withDeadline.Load(); want.deadline && got != requests.Load() || !want.deadline && got != 0 {
			t.Errorf("%s: %d of %d attempts bring a deadline", kind, got, requests.Load())
		}
	}
	if err := hop.set("loud"); err == nil {
		t.Error("there is no such hop")
	}
}
