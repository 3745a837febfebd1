package redisstore_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/internal/servers"
)

// S22: the process that runs a request is killed. Its key is busy until its lease
// ends, and is then taken over under a greater fence.
func TestRedisS22_ProcessKilled(t *testing.T) {
	server := start(t)
	store := open(t, connect(t, server, redis.Options{}))
	began := time.Now()
	fence := beginAndDie(t, server.Addr())
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

// Redis is killed between Begin and Finish and started again. With its log on disk
// it has lost nothing.
func TestRedisKilledAndRestarted(t *testing.T) {
	server := start(t)
	store := open(t, connect(t, server, redis.Options{}))
	print := random32()
	flight, done, leased := random32(), random32(), random32()
	f := want(t, store, replay.StateNew, flight, print, time.Minute)
	d := want(t, store, replay.StateNew, done, print, time.Minute)
	l := want(t, store, replay.StateNew, leased, print, 200*time.Millisecond)
	ok(t, "Finish", store.Finish(ctx, done, d.Fence, []byte("answer"), time.Hour))

	server.Kill()
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := store.Begin(short, random32(), print, time.Minute, time.Hour); err == nil {
		t.Error("Begin has no error, and there is no Redis")
	}
	time.Sleep(200 * time.Millisecond) // the lease ends while it is down
	ok(t, "Start", server.Start())

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

// A pair is a master with its replica.
type pair struct {
	t               *testing.T
	master, replica *servers.Redis
}

func startPair(t *testing.T) *pair {
	p := &pair{t: t, master: start(t), replica: start(t)}
	host, port, _ := strings.Cut(p.master.Addr(), ":")
	p.do(p.replica, "replicaof", host, port)
	for range 600 {
		if strings.Contains(p.info(p.replica), "master_link_status:up") {
			return p
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal("the replica does not follow its master")
	return nil
}

func (p *pair) do(s *servers.Redis, args ...any) any {
	p.t.Helper()
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer c.Close()
	v, err := c.Do(ctx, args...).Result()
	ok(p.t, "command", err)
	return v
}

func (p *pair) info(s *servers.Redis) string {
	v, _ := p.do(s, "info", "replication").(string)
	return v
}

// replicated waits until the replica has all of what the master has.
func (p *pair) replicated() {
	p.t.Helper()
	offset := func(info, field string) string {
		_, rest, _ := strings.Cut(info, field+":")
		value, _, _ := strings.Cut(rest, "\r\n")
		return value
	}
	for range 600 {
		if offset(p.info(p.master), "master_repl_offset") == offset(p.info(p.replica), "slave_repl_offset") {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	p.t.Fatal("the replica does not get there")
}

func (p *pair) promote() { p.do(p.replica, "replicaof", "no", "one") }

// The master is killed and the replica, which has everything, promoted: nothing
// changes for those who hold a key.
func TestRedisFailover(t *testing.T) {
	p := startPair(t)
	before := open(t, connect(t, p.master, redis.Options{}))
	print := random32()
	flight, done, leased, released := random32(), random32(), random32(), random32()
	f := want(t, before, replay.StateNew, flight, print, time.Minute)
	d := want(t, before, replay.StateNew, done, print, time.Minute)
	l := want(t, before, replay.StateNew, leased, print, 100*time.Millisecond)
	r := want(t, before, replay.StateNew, released, print, time.Minute)
	ok(t, "Finish", before.Finish(ctx, done, d.Fence, []byte("answer"), time.Hour))
	ok(t, "Release", before.Release(ctx, released, r.Fence))
	p.replicated()
	p.master.Kill()
	p.promote()
	time.Sleep(100 * time.Millisecond)

	after := open(t, connect(t, p.replica, redis.Options{}))
	want(t, after, replay.StateBusy, flight, print, time.Minute)
	ok(t, "Renew", after.Renew(ctx, flight, f.Fence, time.Minute))
	ok(t, "Finish", after.Finish(ctx, flight, f.Fence, []byte("x"), time.Hour))
	if c := want(t, after, replay.StateDone, done, print, time.Minute); string(c.Answer) != "answer" {
		t.Errorf("got answer %q, want %q", c.Answer, "answer")
	}
	if c := want(t, after, replay.StateTaken, leased, print, time.Minute); c.Fence <= l.Fence {
		t.Errorf("fence %d after %d, want a greater one", c.Fence, l.Fence)
	}
	if c := want(t, after, replay.StateNew, released, print, time.Minute); c.Fence <= r.Fence {
		t.Errorf("fence %d after %d, want a greater one", c.Fence, r.Fence)
	}
}

// The replica is promoted without the last writes, while the master lives on: the
// worst that can happen. Two owners of a key never have the same fence, the later
// one has the greater, and when the old master comes back the later one's answer
// stands.
func TestRedisSplit(t *testing.T) {
	p := startPair(t)
	old := open(t, connect(t, p.master, redis.Options{}))
	print := random32()
	both, begun := random32(), random32()
	b := want(t, old, replay.StateNew, begun, print, 500*time.Millisecond)
	p.replicated()
	p.promote()
	fresh := open(t, connect(t, p.replica, redis.Options{}))

	// Neither server knows what the other one does.
	a1 := want(t, old, replay.StateNew, both, print, time.Minute)
	a2 := want(t, fresh, replay.StateNew, both, print, time.Minute)
	if a2.Fence <= a1.Fence {
		t.Errorf("fence %d after %d, want a greater one", a2.Fence, a1.Fence)
	}
	ok(t, "Finish on the old master", old.Finish(ctx, begun, b.Fence, []byte("lost with the master"), time.Hour))
	time.Sleep(500 * time.Millisecond)
	b2 := want(t, fresh, replay.StateTaken, begun, print, time.Minute)
	if b2.Fence <= b.Fence {
		t.Errorf("fence %d after %d, want a greater one", b2.Fence, b.Fence)
	}
	ok(t, "Finish", fresh.Finish(ctx, begun, b2.Fence, []byte("new"), time.Hour))

	// The old owner finds the new master: it is told that it has lost.
	lost(t, "Renew under the old fence", fresh.Renew(ctx, both, a1.Fence, time.Minute))
	lost(t, "Finish under the old fence", fresh.Finish(ctx, both, a1.Fence, []byte("old"), time.Hour))

	// The old master becomes a replica of the new one.
	host, port, _ := strings.Cut(p.replica.Addr(), ":")
	p.do(p.master, "replicaof", host, port)
	for range 600 {
		if strings.Contains(p.info(p.master), "master_link_status:up") {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	// It reads, and finds the other's fence; what it would have to write it refuses.
	lost(t, "Finish on what is a replica by now", old.Finish(ctx, both, a1.Fence, []byte("old"), time.Hour))
	if _, err := old.Begin(ctx, random32(), print, time.Minute, time.Hour); !redis.IsReadOnlyError(err) {
		t.Errorf("Begin on what is a replica by now: got error %v, want READONLY", err)
	}
	ok(t, "Finish", fresh.Finish(ctx, both, a2.Fence, []byte("new"), time.Hour))
	for _, key := range [][32]byte{both, begun} {
		if c := want(t, fresh, replay.StateDone, key, print, time.Minute); string(c.Answer) != "new" {
			t.Errorf("got answer %q, want %q", c.Answer, "new")
		}
	}
}

// A sentinel promotes the replica, and the client finds it: whoever holds the key
// still does.
func TestRedisSentinel(t *testing.T) {
	p := startPair(t)
	sentinel, err := servers.StartSentinel(p.master.Addr())
	servers.Need(t, err)
	t.Cleanup(sentinel.Close)
	for range 600 { // it asks the master who follows
		if c := p.do(sentinel, "sentinel", "replicas", "main"); len(c.([]any)) == 1 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	client := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "main", SentinelAddrs: []string{sentinel.Addr()}})
	t.Cleanup(func() { client.Close() })
	store := open(t, client)
	key, print := random32(), random32()
	claim := want(t, store, replay.StateNew, key, print, time.Hour)
	p.replicated()
	p.master.Kill()

	failed := 0
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		short, cancel := context.WithTimeout(ctx, 250*time.Millisecond)
		c, err := store.Begin(short, key, print, time.Minute, time.Hour)
		cancel()
		if err == nil {
			if c.State != replay.StateBusy {
				t.Fatalf("got %v, want busy", c.State)
			}
			break
		}
		if failed++; time.Now().After(end) {
			t.Fatalf("nobody was promoted: %v", err)
		}
	}
	if failed == 0 {
		t.Error("Begin had no error while there was no master")
	}
	ok(t, "Finish", store.Finish(ctx, key, claim.Fence, []byte("x"), time.Hour))
	want(t, store, replay.StateDone, key, print, time.Minute)
}
