package pgstore_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stinthttp/stint/replay"
)

// S22: the process that runs a request is killed. Its key is busy until its lease
// ends, and is then taken over under a greater fence.
func TestPostgresS22_ProcessKilled(t *testing.T) {
	server := start(t)
	store := open(t, connect(t, server.URL(), nil))
	began := time.Now()
	fence := beginAndDie(t, server.URL())
	c, err := store.Begin(ctx, theKey, thePrint, time.Minute, time.Hour)
	ok(t, "Begin", err)
	if time.Since(began) < theLease && c.State != replay.StateBusy {
		t.Fatalf("got %v, want busy", c.State)
	}
	time.Sleep(theLease + 100*time.Millisecond)
	if c.State == replay.StateBusy {
		c = want(t, store, replay.StateTaken, theKey, thePrint, time.Minute)
	}
	if c.State != replay.StateTaken || c.Fence <= fence {
		t.Fatalf("%v under the fence %d after %d, want taken under a greater one", c.State, c.Fence, fence)
	}
	// Had it been paused, and not killed, it could do nothing.
	lost(t, "Finish of the process of before", store.Finish(ctx, theKey, fence, []byte("old"), time.Hour))
	ok(t, "Finish", store.Finish(ctx, theKey, c.Fence, []byte("new"), time.Hour))
}

// The server is killed between Begin and Finish and started again.
func TestPostgresKilledAndRestarted(t *testing.T) {
	server := start(t)
	pool := connect(t, server.URL(), nil)
	store := open(t, pool)
	print := random32()
	flight, done, leased := random32(), random32(), random32()
	f := want(t, store, replay.StateNew, flight, print, time.Minute)
	d := want(t, store, replay.StateNew, done, print, time.Minute)
	l := want(t, store, replay.StateNew, leased, print, 200*time.Millisecond)
	ok(t, "Finish", store.Finish(ctx, done, d.Fence, []byte("answer"), time.Hour))

	server.Kill()
	// Its children end when they notice, and may serve one more statement.
	for end := time.Now().Add(10 * time.Second); ; {
		short, cancel := context.WithTimeout(ctx, time.Second)
		_, err := store.Begin(short, random32(), print, time.Minute, time.Hour)
		cancel()
		if err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("Begin has no error, and there is no server")
		}
	}
	ok(t, "Start", server.Start())
	pool.Reset() // connections that are gone would be an error each
	time.Sleep(200 * time.Millisecond)

	want(t, store, replay.StateBusy, flight, print, time.Minute)
	ok(t, "Finish", store.Finish(ctx, flight, f.Fence, []byte("x"), time.Hour))
	if c := want(t, store, replay.StateDone, done, print, time.Minute); string(c.Answer) != "answer" {
		t.Errorf("got answer %q, want %q", c.Answer, "answer")
	}
	if c := want(t, store, replay.StateTaken, leased, print, time.Minute); c.Fence <= l.Fence {
		t.Errorf("fence %d after %d, want a greater one", c.Fence, l.Fence)
	}
	lost(t, "Finish under the old fence", store.Finish(ctx, leased, l.Fence, []byte("x"), time.Hour))
}

// The server is killed while the transaction of a handler is open, with its answer in
// it: neither is there afterwards. Killed when it is committed: both are.
func TestPostgresKilledAroundTheCommit(t *testing.T) {
	o := openOrders(t)
	s := start(t)
	o.pool = connect(t, s.URL(), nil)
	_, err := o.pool.Exec(ctx, "CREATE TABLE orders (run bigint)")
	ok(t, "CREATE", err)
	o.store = open(t, o.pool)
	restart := func() {
		s.Kill()
		ok(t, "Start", s.Start())
		o.pool.Reset()
	}
	o.before = func(run int64, finished error) error {
		ok(t, "FinishTx", finished)
		if run == 1 {
			restart()
		}
		return nil
	}
	o.after = func(w http.ResponseWriter, _ *http.Request, err error) {
		switch run := o.runs.Load(); {
		case run == 1 && err == nil:
			t.Error("the commit has no error, and its server was killed before")
		case run == 1:
			w.WriteHeader(503)
		default:
			ok(t, "commit", err)
			restart()
			w.WriteHeader(502) // whatever it says
		}
	}
	h := middleware(t, o.store, nil).Handler(o)
	if w := post(h, "a"); w.Code != 503 {
		t.Fatalf("got %d, want 503", w.Code)
	}
	o.rows(t, 0)
	answered(t, post(h, "a"), 201, "order 2", false)
	answered(t, post(h, "a"), 201, "order 2", true)
	o.rows(t, 1)
}

// A server that is not there is an error of its own, and the request a 503.
func TestPostgresIsDown(t *testing.T) {
	server := start(t)
	pool := connect(t, server.URL(), nil)
	store := open(t, pool)
	server.Kill()
	pool.Reset()
	h := middleware(t, store, nil).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler ran") }))
	w := post(h, "a")
	if w.Code != 503 || !strings.Contains(w.Body.String(), `"reason":"store_error"`) || w.Header().Get("X-Should-Retry") != "true" {
		t.Fatalf("got %d %s", w.Code, w.Body)
	}
}
