package redisstore

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
)

// DefaultPrefix is the default of Config.Prefix.
const DefaultPrefix = "stint:replay:"

// maxPrefix bounds a prefix, which every record has.
const maxPrefix = 256

// fenceKept is how long the fence of a key that was released is remembered, for
// the next one to be greater whatever the clock does meanwhile.
const fenceKept = 10 * time.Minute

// Config configures [New]. The zero value is valid.
type Config struct {
	// Prefix begins the name of every hash; the rest is 43 characters of a hash
	// of the key, A to Z, a to z, 0 to 9, - and _. Services that share a Redis
	// may share a prefix: the key of a record has the scope in it. At most 256
	// bytes. Empty: DefaultPrefix, "stint:replay:". A prefix with {braces} puts
	// all records on one node of a cluster.
	Prefix string
}

// Store is a [replay.Store] in Redis. Make it with [New]: all methods of the zero
// value, and of nil, return an error that says so. It is safe for concurrent use.
type Store struct {
	client redis.Scripter
	prefix string
}

var _ replay.Store = (*Store)(nil)

// New returns a store on client: a [redis.Client], also one of
// redis.NewFailoverClient, or a [redis.ClusterClient]. Not a [redis.Ring], which
// looks for a key elsewhere while its server is down, and not a pipeline. The
// client remains the caller's, to be closed after the last request.
//
// The time limits of package replay hold whatever the client's own are: a call
// whose context ends returns at once, and leaves behind a goroutine that waits
// for the client, at most for its DialTimeout or ReadTimeout. With MaxRetries the
// client may repeat a call, which does no harm.
//
// The error joins one [*stint.ConfigError] for each argument that cannot be used.
func New(client redis.Scripter, c Config) (*Store, error) {
	var errs []error
	if v := reflect.ValueOf(client); client == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		errs = append(errs, &stint.ConfigError{Field: "redisstore.New: client", Value: nil, Reason: "is required"})
	}
	if _, pipeline := client.(redis.Pipeliner); pipeline {
		errs = append(errs, &stint.ConfigError{Field: "redisstore.New: client", Value: "a pipeline", Reason: "must answer at once"})
	}
	if c.Prefix == "" {
		c.Prefix = DefaultPrefix
	}
	if len(c.Prefix) > maxPrefix {
		errs = append(errs, &stint.ConfigError{
			Field: "redisstore.Config.Prefix", Value: strconv.QuoteToASCII(c.Prefix[:maxPrefix]), Reason: "must not be longer than 256 bytes",
		})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Store{client: client, prefix: c.Prefix}, nil
}

var errZeroStore = errors.New("redisstore: Store was not made with redisstore.New")

// Shared implements [replay.Store]: true.
func (*Store) Shared() bool { return true }

// Begin implements [replay.Store]. Where Redis has reached its maxmemory, the
// error is [replay.ErrFull].
func (s *Store) Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (replay.Claim, error) {
	var number [16]byte
	rand.Read(number[:])
	v, err := s.run(ctx, "begin", beginScript, key, string(print[:]), string(number[:]), micros(lease), expiry(ttl))
	if err != nil {
		return replay.Claim{}, err
	}
	claim, ok := parse(v)
	if !ok {
		return replay.Claim{}, fmt.Errorf("redisstore: begin: an answer that cannot be read, of type %T", v)
	}
	return claim, nil
}

// parse reads the answer of beginScript.
func parse(v any) (c replay.Claim, ok bool) {
	list, _ := v.([]any)
	if len(list) == 0 {
		return c, false
	}
	var value string
	if len(list) > 1 {
		if value, ok = list[1].(string); !ok {
			return c, false
		}
	}
	switch list[0] {
	case "mismatch":
		return replay.Claim{State: replay.StateMismatch}, true
	case "done":
		return replay.Claim{State: replay.StateDone, Answer: []byte(value)}, true
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n <= 0 {
		return c, false
	}
	switch list[0] {
	case "new":
		return replay.Claim{State: replay.StateNew, Fence: n}, true
	case "taken":
		return replay.Claim{State: replay.StateTaken, Fence: n}, true
	case "busy":
		return replay.Claim{State: replay.StateBusy, Left: time.Duration(n) * time.Microsecond}, true
	}
	return c, false
}

// Renew implements [replay.Store].
func (s *Store) Renew(ctx context.Context, key [32]byte, fence int64, lease time.Duration) error {
	return s.decide(ctx, "renew", renewScript, key, fence, micros(lease), expiry(lease))
}

// Finish implements [replay.Store]. Where Redis has reached its maxmemory, the
// error is [replay.ErrFull].
func (s *Store) Finish(ctx context.Context, key [32]byte, fence int64, answer []byte, ttl time.Duration) error {
	// A copy, for the client may still write it when this has returned.
	return s.decide(ctx, "finish", finishScript, key, fence, string(answer), expiry(ttl))
}

// Release implements [replay.Store].
func (s *Store) Release(ctx context.Context, key [32]byte, fence int64) error {
	return s.decide(ctx, "release", releaseScript, key, fence, expiry(fenceKept))
}

// decide runs a script that says whether key is in flight under fence.
func (s *Store) decide(ctx context.Context, what string, script *redis.Script, key [32]byte, fence int64, args ...any) error {
	v, err := s.run(ctx, what, script, key, append([]any{strconv.FormatInt(fence, 10)}, args...)...)
	switch {
	case err != nil:
		return err
	case v == int64(1):
		return nil
	case v == int64(0):
		return replay.ErrLost
	}
	return fmt.Errorf("redisstore: %s: an answer that cannot be read, of type %T", what, v)
}

// run runs a script, and sends its text along only where Redis does not know it.
func (s *Store) run(ctx context.Context, what string, script *redis.Script, key [32]byte, args ...any) (any, error) {
	if s == nil || s.client == nil {
		return nil, errZeroStore
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	type result struct {
		v   any
		err error
	}
	// On a goroutine, for go-redis heeds a context while it reads only where its
	// client was told to.
	done := make(chan result, 1)
	go func() {
		v, err := script.Run(ctx, s.client, []string{s.name(key)}, args...).Result()
		done <- result{v, err}
	}()
	var r result
	select {
	case r = <-done:
	case <-ctx.Done():
		return nil, fmt.Errorf("redisstore: %s: %w", what, ctx.Err())
	}
	switch {
	case r.err == nil:
		return r.v, nil
	case redis.IsOOMError(r.err):
		return nil, fmt.Errorf("redisstore: %s: %w: %w", what, replay.ErrFull, r.err)
	}
	return nil, fmt.Errorf("redisstore: %s: %w", what, r.err)
}

// name returns the hash of a record. It has no braces of its own, so that records
// spread over a cluster.
func (s *Store) name(key [32]byte) string {
	return s.prefix + base64.RawURLEncoding.EncodeToString(key[:])
}

// micros rounds up.
func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }

// expiry rounds up to what PEXPIRE takes, and adds one since that counts from the
// beginning of the current millisecond.
func expiry(d time.Duration) int64 { return int64((d+time.Millisecond-1)/time.Millisecond) + 1 }
