package redisstore

import "github.com/redis/go-redis/v9"

// A record is a hash of these fields:
//
//	s  0: in flight, 1: done; missing: released, and only f is left
//	f  the fence
//	p  the print
//	l  the end of the lease, in µs on the clock of Redis
//	n  a number that the Begin had made up, c what it was answered
//	a  the answer
//
// Numbers are formatted with %.0f: Lua's are float64, exact up to 2⁵³ µs, which is
// the year 2255, and it would write them as 1.7e+15.

// beginScript has the arguments print, n, lease in µs and ttl in ms.
//
// A client that repeats the command because the answer was lost, as go-redis does
// by default, must not find the key busy with itself: it is known by its n.
//
// The fence is the clock, so that it grows over a record that has expired, and at
// least one more than that of the record before, for a clock that was set back or
// is that of a replica that was promoted.
var beginScript = redis.NewScript(`
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local r = redis.call('HMGET', KEYS[1], 's', 'f', 'p', 'l', 'n', 'c')
local state, fence, print, ends, number, said = r[1], r[2], r[3], r[4], r[5], r[6]
if state then
	if print ~= ARGV[1] then return {'mismatch'} end
	if state == '1' then return {'done', redis.call('HGET', KEYS[1], 'a')} end
	if number == ARGV[2] then return {said, fence} end
	if tonumber(ends) > now then return {'busy', string.format('%.0f', ends - now)} end
end
local f = now
if fence and tonumber(fence) >= f then f = fence + 1 end
f = string.format('%.0f', f)
said = state and 'taken' or 'new'
redis.call('HSET', KEYS[1], 's', '0', 'f', f, 'p', ARGV[1], 'l', string.format('%.0f', now + ARGV[3]), 'n', ARGV[2], 'c', said)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {said, f}
`)

// renewScript has the arguments fence, lease in µs and lease in ms.
var renewScript = redis.NewScript(`
local r = redis.call('HMGET', KEYS[1], 's', 'f')
if r[1] ~= '0' or r[2] ~= ARGV[1] then return 0 end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'l', string.format('%.0f', t[1] * 1000000 + t[2] + ARGV[2]))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
`)

// finishScript has the arguments fence, answer and ttl in ms.
var finishScript = redis.NewScript(`
local r = redis.call('HMGET', KEYS[1], 's', 'f')
if r[1] ~= '0' or r[2] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 's', '1', 'a', ARGV[2])
redis.call('HDEL', KEYS[1], 'l', 'n', 'c')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
`)

// releaseScript has the arguments fence and how long to remember it, in ms.
var releaseScript = redis.NewScript(`
local r = redis.call('HMGET', KEYS[1], 's', 'f')
if r[1] ~= '0' or r[2] ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 's', 'p', 'l', 'n', 'c')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
`)
