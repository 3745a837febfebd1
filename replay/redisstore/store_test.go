package redisstore_test

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/internal/servers"
	"github.com/stinthttp/stint/replay/redisstore"
	"github.com/stinthttp/stint/replay/storetest"
)

func start(t testing.TB, options ...string) *servers.Redis {
	t.Helper()
	s, err := servers.StartRedis(options...)
	servers.Need(t, err)
	t.Cleanup(s.Close)
	return s
}

func connect(t testing.TB, s *servers.Redis, o redis.Options) *redis.Client {
	t.Helper()
	o.Addr = s.Addr()
	c := redis.NewClient(&o)
	t.Cleanup(func() { c.Close() })
	return c
}

func open(t testing.TB, c redis.Scripter) *redisstore.Store {
	t.Helper()
	s, err := redisstore.New(c, redisstore.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The tests that every store must pass.
func TestRedisConformance(t *testing.T) {
	c := connect(t, start(t), redis.Options{})
	storetest.Run(t, func(t *testing.T) replay.Store { return open(t, c) })
}

// The cases of the middleware.
func TestRedisMiddleware(t *testing.T) {
	c := connect(t, start(t), redis.Options{})
	storetest.RunMiddleware(t, func(t *testing.T) replay.Store { return open(t, c) })
}
