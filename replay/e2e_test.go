package replay_test

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
)

// shared is a memory store that says it is everywhere, which it is for the
// servers of one test.
type shared struct{ *replay.Memory }

func (shared) Shared() bool { return true }

// effects is a service whose operation has an effect, and answers 201 with its
// number.
func effects(t *testing.T, store replay.Store, n *atomic.Int64, answer func(w http.ResponseWriter, n int64)) http.Handler {
	t.Helper()
	mw, err := replay.New(replay.Config{Store: store, Scope: replay.SingleTenant})
	if err != nil {
		t.Fatal(err)
	}
	outer, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "orders"})
	if err != nil {
		t.Fatal(err)
	}
	return outer.Handler(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		answer(w, n.Add(1))
	})))
}

func created(w http.ResponseWriter, n int64) {
	w.WriteHeader(201)
	fmt.Fprintf(w, "effect %d", n)
}

func server(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func client(t *testing.T, c stint.Config) *http.Client {
	t.Helper()
	tr, err := stint.NewTransport(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// A cut is a proxy that loses answers. It is told when the server has answered,
// so the effect is there by then.
type cut struct {
	t      *testing.T
	server string
	lose   atomic.Int64 // so many answers
	mu     sync.Mutex
	keys   []string // guarded by mu; as they arrived
}

func (c *cut) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	c.keys = append(c.keys, r.Header.Get("Idempotency-Key"))
	c.mu.Unlock()
	out, err := http.NewRequest(r.Method, c.server+r.URL.Path, r.Body)
	if err != nil {
		c.t.Error(err)
		return
	}
	out.ContentLength = r.ContentLength
	out.Header = r.Header.Clone()
	resp, err := http.DefaultTransport.RoundTrip(out)
	if err != nil {
		c.t.Error(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if c.lose.Add(-1) >= 0 {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			c.t.Error(err)
			return
		}
		conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
		return
	}
	for k, v := range resp.Header {
		w.Header()[k] = v
	}
	w.WriteHeader(resp.StatusCode)
	w.Write(body)
}

func (c *cut) arrivals() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.keys...)
}

func post(t *testing.T, c *http.Client, url string) (status int, body string, header http.Header, err error) {
	t.Helper()
	resp, err := c.Post(url+"/", "text/plain", strings.NewReader("one, please"))
	if err != nil {
		return 0, "", nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header, nil
}

// The answer is cut off after the effect, the client retries, and gets it: one
// effect.
func TestReplayE1_AnswerCutAfterTheEffect(t *testing.T) {
	var n atomic.Int64
	c := &cut{t: t, server: server(t, effects(t, shared{replay.NewMemory(replay.MemoryConfig{})}, &n, created)).URL}
	c.lose.Store(2)
	status, body, header, err := post(t, client(t, stint.Config{Keys: stint.KeysHonoured}), server(t, c).URL)
	if err != nil || status != 201 || body != "effect 1" {
		t.Fatalf("got %d %q, %v, want 201 %q", status, body, err, "effect 1")
	}
	if header.Get("Idempotent-Replayed") != "true" {
		t.Error("not marked as replayed")
	}
	keys := c.arrivals()
	if len(keys) != 3 || keys[0] == "" || keys[1] != keys[0] || keys[2] != keys[0] {
		t.Errorf("arrived with the keys %q, want one key three times", keys)
	}
	if n.Load() != 1 {
		t.Errorf("%d effects, want 1", n.Load())
	}
}

// With KeysAuto it is the echo of the key that permits to retry: here from a
// gateway that has seen the answer's header, loses its body, and answers 502 with
// the header that it has.
func TestReplayE1_EchoPermitsRetry(t *testing.T) {
	for _, echoed := range []bool{true, false} {
		var n, arrivals atomic.Int64
		var store replay.Store = replay.NewMemory(replay.MemoryConfig{})
		if echoed {
			store = shared{store.(*replay.Memory)}
		}
		h := effects(t, store, &n, created)
		s := server(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if arrivals.Add(1) > 1 {
				h.ServeHTTP(w, r)
				return
			}
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, r)
			if echo := rec.Header().Get("Idempotency-Key"); echo != "" {
				w.Header().Set("Idempotency-Key", echo)
			}
			w.WriteHeader(502)
		}))
		status, body, _, err := post(t, client(t, stint.Config{}), s.URL)
		if err != nil {
			t.Fatal(err)
		}
		if echoed && (status != 201 || body != "effect 1" || arrivals.Load() != 2) {
			t.Errorf("echoed: got %d %q after %d arrivals, want 201 after 2", status, body, arrivals.Load())
		}
		if !echoed && (status != 502 || arrivals.Load() != 1) {
			t.Errorf("not echoed: got %d %q after %d arrivals, want 502 after 1", status, body, arrivals.Load())
		}
		if n.Load() != 1 {
			t.Errorf("echoed %v: %d effects, want 1", echoed, n.Load())
		}
	}
}

// A handler that says 503 has done nothing, and its echo lets KeysAuto try again
// with the same key. One that says 502 does not know what was done: no echo.
func TestReplayE1_HandlersOwnFailures(t *testing.T) {
	for status, want := range map[int]int64{503: 2, 502: 1} {
		var n atomic.Int64
		h := effects(t, shared{replay.NewMemory(replay.MemoryConfig{})}, &n, func(w http.ResponseWriter, n int64) {
			if n == 1 {
				w.WriteHeader(status)
				return
			}
			created(w, n)
		})
		if _, _, _, err := post(t, client(t, stint.Config{}), server(t, h).URL); err != nil {
			t.Fatal(err)
		}
		if n.Load() != want {
			t.Errorf("%d: %d runs, want %d", status, n.Load(), want)
		}
	}
}

// Two replicas with a memory each: nothing is announced, so the client does not
// retry what may have run on the other one.
func TestReplayE2_MemoryIsNotAnnounced(t *testing.T) {
	var n atomic.Int64
	a := &cut{t: t, server: server(t, effects(t, replay.NewMemory(replay.MemoryConfig{}), &n, created)).URL}
	b := effects(t, replay.NewMemory(replay.MemoryConfig{}), &n, created)
	var turn atomic.Int64
	balancer := server(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if turn.Add(1)%2 == 1 {
			a.ServeHTTP(w, r)
		} else {
			b.ServeHTTP(w, r)
		}
	}))
	c := client(t, stint.Config{})
	for range 2 { // also after an answer from either
		_, _, header, err := post(t, c, balancer.URL)
		if err != nil {
			t.Fatal(err)
		}
		if echo := header.Get("Idempotency-Key"); echo != "" {
			t.Errorf("the key is echoed: %q", echo)
		}
	}
	a.lose.Store(1)
	before := n.Load()
	if status, _, _, err := post(t, c, balancer.URL); err == nil {
		t.Errorf("got %d, want the lost connection", status)
	}
	if n.Load() != before+1 {
		t.Errorf("%d effects of one request, want 1", n.Load()-before)
	}
}
