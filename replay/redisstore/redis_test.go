package redisstore_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/redisstore"
	"github.com/stinthttp/stint/replay/storetest"
)

var ctx = context.Background()

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

// A roundTrips counts what a client sends and waits for.
type roundTrips struct{ n, text atomic.Int64 }

func (r *roundTrips) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *roundTrips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		r.n.Add(1)
		if cmd.Name() == "eval" { // with the script's text
			r.text.Add(1)
		}
		return next(ctx, cmd)
	}
}

func (r *roundTrips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		r.n.Add(1)
		return next(ctx, cmds)
	}
}

// A request that runs costs two round trips, its repetition one.
func TestRedisRoundTrips(t *testing.T) {
	c := connect(t, start(t), redis.Options{})
	store := open(t, c)
	mw, err := replay.New(replay.Config{Store: store, Scope: replay.SingleTenant})
	ok(t, "New", err)
	h := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, strings.Repeat("x", 1024)) }))
	post := func(key string) *httptest.ResponseRecorder {
		r := httptest.NewRequest("POST", "/", strings.NewReader("body"))
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	if w := post("first"); w.Code != 200 { // the scripts are sent, and the connection is made
		t.Fatalf("got %d", w.Code)
	}

	var trips roundTrips
	c.AddHook(&trips)
	for _, tt := range []struct {
		what     string
		replayed string
		most     int64
	}{{"run", "", 2}, {"repetition", "true", 1}, {"repetition", "true", 1}} {
		trips.n.Store(0)
		if w := post("a"); w.Code != 200 || w.Header().Get("Idempotent-Replayed") != tt.replayed {
			t.Fatalf("%s: got %d, replayed %q", tt.what, w.Code, w.Header().Get("Idempotent-Replayed"))
		}
		if n := trips.n.Load(); n < 1 || n > tt.most {
			t.Errorf("%s: %d round trips, want at most %d", tt.what, n, tt.most)
		}
	}
	if n := trips.text.Load(); n != 0 {
		t.Errorf("a script was sent %d times more", n)
	}
}

// A server that was started again, or promoted, does not know the scripts.
func TestRedisScriptsAreSentAgain(t *testing.T) {
	c := connect(t, start(t), redis.Options{})
	store := open(t, c)
	key, print := random32(), random32()
	claim := want(t, store, replay.StateNew, key, print, time.Minute)
	ok(t, "SCRIPT FLUSH", c.ScriptFlush(ctx).Err())
	ok(t, "Renew", store.Renew(ctx, key, claim.Fence, time.Minute))
	ok(t, "SCRIPT FLUSH", c.ScriptFlush(ctx).Err())
	ok(t, "Finish", store.Finish(ctx, key, claim.Fence, []byte("x"), time.Minute))
	ok(t, "SCRIPT FLUSH", c.ScriptFlush(ctx).Err())
	want(t, store, replay.StateDone, key, print, time.Minute)
}

// One hash for each key, with an expiry, and nothing else.
func TestRedisOneHashForEachKey(t *testing.T) {
	c := connect(t, start(t), redis.Options{})
	store, err := redisstore.New(c, redisstore.Config{Prefix: "{a}:"})
	ok(t, "New", err)
	const n = 10
	for i := range n {
		key := random32()
		claim := want(t, store, replay.StateNew, key, random32(), time.Minute)
		switch i % 3 {
		case 0:
			ok(t, "Finish", store.Finish(ctx, key, claim.Fence, []byte("x"), time.Minute))
		case 1:
			ok(t, "Release", store.Release(ctx, key, claim.Fence))
		}
	}
	names, err := c.Keys(ctx, "*").Result()
	ok(t, "KEYS", err)
	if len(names) != n {
		t.Fatalf("%d keys, want %d: %q", len(names), n, names)
	}
	for _, name := range names {
		if !strings.HasPrefix(name, "{a}:") || strings.ContainsAny(name[4:], "{}") || len(name) != 4+43 {
			t.Errorf("the name %q", name)
		}
		kind, err := c.Type(ctx, name).Result()
		ok(t, "TYPE", err)
		ttl, err := c.PTTL(ctx, name).Result()
		ok(t, "PTTL", err)
		if kind != "hash" || ttl <= 0 || ttl > time.Hour {
			t.Errorf("%s: a %s that expires in %v", name, kind, ttl)
		}
	}
}

// The fence of a released key is remembered, so that the next one is greater on a
// server whose clock is behind as well.
func TestRedisFenceOutlivesTheClock(t *testing.T) {
	c := connect(t, start(t), redis.Options{})
	store := open(t, c)
	key, print := random32(), random32()
	claim := want(t, store, replay.StateNew, key, print, time.Minute)
	names, err := c.Keys(ctx, "*").Result()
	ok(t, "KEYS", err)
	ahead := claim.Fence + time.Hour.Microseconds() // as if it had been given by a clock that is ahead
	ok(t, "HSET", c.HSet(ctx, names[0], "f", fmt.Sprint(ahead)).Err())
	ok(t, "Release", store.Release(ctx, key, ahead))
	if next := want(t, store, replay.StateNew, key, print, time.Minute); next.Fence <= ahead {
		t.Fatalf("fence %d after %d, want a greater one", next.Fence, ahead)
	}
}

// An answer that is lost on the way back has its command sent again by go-redis: the
// claim is the same, not one that is busy with itself.
func TestRedisRepeatedByTheClient(t *testing.T) {
	server := start(t)
	var lose atomic.Int64
	c := connect(t, server, redis.Options{MaxRetries: 3, Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return &losing{Conn: conn, lose: &lose}, err
	}})
	store := open(t, c)
	direct := open(t, connect(t, server, redis.Options{}))
	print := random32()
	want(t, store, replay.StateNew, random32(), print, time.Minute) // the scripts are there

	key := random32()
	lose.Store(1)
	claim := want(t, store, replay.StateNew, key, print, time.Minute)
	if lose.Load() > 0 {
		t.Fatal("no answer was lost")
	}
	want(t, direct, replay.StateBusy, key, print, time.Minute)
	ok(t, "Renew", direct.Renew(ctx, key, claim.Fence, time.Millisecond))
	time.Sleep(20 * time.Millisecond)
	lose.Store(1)
	again := want(t, store, replay.StateTaken, key, print, time.Minute)
	if again.Fence <= claim.Fence {
		t.Fatalf("fence %d after %d, want a greater one", again.Fence, claim.Fence)
	}
	ok(t, "Finish", store.Finish(ctx, key, again.Fence, []byte("x"), time.Minute))
}

// A losing connection breaks where the next answer would be read.
type losing struct {
	net.Conn
	lose *atomic.Int64
	sent atomic.Bool
}

func (c *losing) Write(b []byte) (int, error) {
	if strings.Contains(string(b), "evalsha") {
		c.sent.Store(true)
	}
	return c.Conn.Write(b)
}

func (c *losing) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && c.sent.Swap(false) && c.lose.Add(-1) >= 0 {
		c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// A server that stands still holds nobody for longer than the context says.
func TestRedisStands(t *testing.T) {
	server := start(t)
	store := open(t, connect(t, server, redis.Options{ReadTimeout: 20 * time.Second, MaxRetries: -1}))
	key, print := random32(), random32()
	claim := want(t, store, replay.StateNew, key, print, time.Minute)
	ok(t, "Finish", store.Finish(ctx, key, claim.Fence, nil, time.Minute)) // the script is there

	key = random32()
	claim = want(t, store, replay.StateNew, key, print, time.Minute)
	answer := []byte("answer")
	server.Pause()
	defer server.Continue()
	for _, tt := range []struct {
		what string
		call func(context.Context) error
	}{
		// The first goes out on the connection that there is.
		{"Finish", func(ctx context.Context) error { return store.Finish(ctx, key, claim.Fence, answer, time.Hour) }},
		{"Renew", func(ctx context.Context) error { return store.Renew(ctx, key, claim.Fence, time.Minute) }},
		{"Begin", func(ctx context.Context) error {
			_, err := store.Begin(ctx, key, print, time.Minute, time.Hour)
			return err
		}},
	} {
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		from := time.Now()
		if err := tt.call(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got error %v, want context.DeadlineExceeded", tt.what, err)
		}
		cancel()
		if took := time.Since(from); took > 10*time.Second {
			t.Errorf("%s took %v, want about 50 ms", tt.what, took)
		}
	}
	copy(answer, "XXXXXX") // it is the caller's again
	server.Continue()
	// What was sent arrives, and was not changed by what became of the buffer.
	for range 200 {
		c, err := store.Begin(ctx, key, print, time.Minute, time.Hour)
		ok(t, "Begin", err)
		if c.State == replay.StateDone {
			if string(c.Answer) != "answer" {
				t.Fatalf("got answer %q, want %q", c.Answer, "answer")
			}
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal("the Finish that was given up has not arrived")
}

// A Redis that has no memory left refuses to begin, and refuses to keep an answer.
func TestRedisS24_Full(t *testing.T) {
	server := start(t, "--maxmemory-policy", "noeviction")
	c := connect(t, server, redis.Options{})
	store := open(t, c)
	key, print := random32(), random32()
	claim := want(t, store, replay.StateNew, key, print, time.Minute)
	ok(t, "CONFIG SET", c.ConfigSet(ctx, "maxmemory", "1").Err())
	if _, err := store.Begin(ctx, random32(), print, time.Minute, time.Hour); !errors.Is(err, replay.ErrFull) {
		t.Errorf("Begin: got error %v, want ErrFull", err)
	}
	if err := store.Finish(ctx, key, claim.Fence, []byte("x"), time.Hour); !errors.Is(err, replay.ErrFull) {
		t.Errorf("Finish: got error %v, want ErrFull", err)
	}
	ok(t, "CONFIG SET", c.ConfigSet(ctx, "maxmemory", "0").Err())
	ok(t, "Finish", store.Finish(ctx, key, claim.Fence, []byte("x"), time.Hour))
}

// S23: the clock of a server that uses the store does not matter. In a bubble it
// says that it is the year 2000.
func TestRedisS23_ClockOfAServer(t *testing.T) {
	server := start(t)
	now := open(t, connect(t, server, redis.Options{}))
	key, print := random32(), random32()
	first := want(t, now, replay.StateNew, key, print, time.Minute)
	synctest.Test(t, func(t *testing.T) {
		if year := time.Now().Year(); year != 2000 {
			t.Fatalf("the year is %d", year)
		}
		c := redis.NewClient(&redis.Options{Addr: server.Addr()})
		defer c.Close()
		past := open(t, c)
		if busy := want(t, past, replay.StateBusy, key, print, time.Minute); busy.Left > time.Minute || busy.Left < 30*time.Second {
			t.Errorf("%v left, want about a minute", busy.Left)
		}
		ok(t, "Renew", past.Renew(ctx, key, first.Fence, time.Minute))
		other := random32()
		second := want(t, past, replay.StateNew, other, print, time.Millisecond)
		if second.Fence <= first.Fence {
			t.Errorf("fence %d after %d", second.Fence, first.Fence)
		}
		ok(t, "Finish", past.Finish(ctx, other, second.Fence, []byte("x"), time.Hour))
		key = other
	})
	want(t, now, replay.StateDone, key, print, time.Minute)
}

// The same on a cluster, which refuses a script that touches keys of another node.
func TestRedisCluster(t *testing.T) {
	server := start(t, "--cluster-enabled", "yes")
	single := connect(t, server, redis.Options{})
	ok(t, "CLUSTER ADDSLOTSRANGE", single.Do(ctx, "cluster", "addslotsrange", 0, 16383).Err())
	for range 200 {
		if info := single.ClusterInfo(ctx).Val(); strings.Contains(info, "cluster_state:ok") {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{server.Addr()}})
	t.Cleanup(func() { c.Close() })
	storetest.Run(t, func(t *testing.T) replay.Store { return open(t, c) })
}

func TestRedisConfig(t *testing.T) {
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer c.Close()
	for _, tt := range []struct {
		client redis.Scripter
		config redisstore.Config
		fields []string
	}{
		{nil, redisstore.Config{Prefix: strings.Repeat("x", 257)}, []string{"redisstore.New: client", "redisstore.Config.Prefix"}},
		{(*redis.Client)(nil), redisstore.Config{}, []string{"redisstore.New: client"}},
		{c.Pipeline(), redisstore.Config{}, []string{"redisstore.New: client"}},
		{c, redisstore.Config{Prefix: strings.Repeat("x", 256)}, nil},
	} {
		_, err := redisstore.New(tt.client, tt.config)
		var fields []string
		if joined, is := err.(interface{ Unwrap() []error }); is {
			for _, err := range joined.Unwrap() {
				bad := (*stint.ConfigError)(nil)
				if !errors.As(err, &bad) {
					t.Fatalf("%T is no ConfigError", err)
				}
				fields = append(fields, bad.Field)
			}
		}
		if !reflect.DeepEqual(fields, tt.fields) {
			t.Errorf("got %v, want errors of %q", err, tt.fields)
		}
	}

	if !open(t, c).Shared() {
		t.Error("it is not shared")
	}
	for _, s := range []*redisstore.Store{nil, {}} {
		if _, err := s.Begin(ctx, random32(), random32(), time.Minute, time.Hour); err == nil || !strings.Contains(err.Error(), "redisstore.New") {
			t.Errorf("got error %v, want one that names the constructor", err)
		}
	}
}

// A server that is not there is an error of its own, and the request a 503.
func TestRedisIsDown(t *testing.T) {
	server := start(t)
	c := connect(t, server, redis.Options{})
	store := open(t, c)
	server.Kill()
	mw, err := replay.New(replay.Config{Store: store, Scope: replay.SingleTenant})
	ok(t, "New", err)
	r := httptest.NewRequest("POST", "/", nil)
	r.Header.Set("Idempotency-Key", "a")
	w := httptest.NewRecorder()
	mw.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler ran") })).ServeHTTP(w, r)
	if w.Code != 503 || !strings.Contains(w.Body.String(), `"reason":"store_error"`) || w.Header().Get("X-Should-Retry") != "true" {
		t.Fatalf("got %d %s", w.Code, w.Body)
	}
}
