// Package redisstore keeps the records of package replay in Redis, for services
// of several processes.
//
//	client := redis.NewClient(&redis.Options{Addr: "…"})
//	store, err := redisstore.New(client, redisstore.Config{})
//	…
//	once, err := replay.New(replay.Config{Store: store, Scope: …})
//
// A record is one hash. Each call is one script, which Redis runs alone and on its
// own clock: a request that runs costs two round trips, its repetition one.
//
// What Redis has forgotten runs again. So its maxmemory-policy has to be
// noeviction: other policies drop records to make room, those of requests in
// flight among them. And what it has acknowledged it loses when it crashes before
// its log is on disk (appendfsync), or when a replica is promoted that has not got
// it yet (min-replicas-to-write narrows the gap, nothing closes it). Two runs of
// one key may then go on at the same time. They hold different fences, of which
// the later is greater where the clocks of the two servers agree, so have your
// writes carry the fence (see [replay.Fence]), or use package pgstore, which can
// commit the effect and the record together.
//
// It needs Redis 5 or later, and is tested on 7.0.
package redisstore
