package pgstore

import _ "embed"

//go:embed schema.sql
var schema string

// beginSQL claims a key that is not there: $1 key, $2 print, $3 lease and $4 ttl in
// µs. No row: somebody has it. It looks before it inserts, since ON CONFLICT, with
// whatever action, waits for a transaction that has changed the row: that of a
// handler which has finished it and is about to commit.
const beginSQL = `
INSERT INTO stint_replay (key, print, fence, lease_end, expires_at)
SELECT $1::bytea, $2::bytea, nextval('stint_replay_fence'),
	clock_timestamp() + $3::bigint * interval '1 microsecond',
	clock_timestamp() + $4::bigint * interval '1 microsecond'
WHERE NOT EXISTS (SELECT FROM stint_replay WHERE key = $1)
ON CONFLICT (key) DO NOTHING
RETURNING fence`

// lookSQL finds out who has a key: $1 key. It is a statement of its own, since the
// snapshot of the first may be older than the row that was in its way.
const lookSQL = `
SELECT print, fence, done, expires_at <= t.now,
	ceil(extract(epoch FROM lease_end - t.now) * 1000000)::bigint, answer
FROM stint_replay, (SELECT clock_timestamp() AS now) AS t
WHERE key = $1`

// takeSQL takes over a record that has expired or whose lease has ended, if it is
// still as it was when looked at: $1 to $4 as beginSQL, $5 the fence that it had.
// The fence grows also over one that was drawn earlier and inserted later. The
// conditions are looked at again when the row was locked by somebody who changed it
// meanwhile, so that of many one gets it.
const takeSQL = `
UPDATE stint_replay SET
	print = $2, fence = greatest(nextval('stint_replay_fence'), fence + 1), done = false, answer = NULL,
	lease_end = clock_timestamp() + $3::bigint * interval '1 microsecond',
	expires_at = clock_timestamp() + $4::bigint * interval '1 microsecond'
WHERE key = $1 AND fence = $5
	AND (expires_at <= clock_timestamp() OR NOT done AND lease_end <= clock_timestamp() AND print = $2)
RETURNING fence`

// held is what Renew, Finish and Release have in common: $1 key, $2 fence.
const held = ` WHERE key = $1 AND fence = $2 AND NOT done AND expires_at > clock_timestamp()`

// renewSQL: $3 lease in µs.
const renewSQL = `
UPDATE stint_replay SET
	lease_end = clock_timestamp() + $3::bigint * interval '1 microsecond',
	expires_at = greatest(expires_at, clock_timestamp() + $3::bigint * interval '1 microsecond')` + held

// finishSQL: $3 answer, $4 ttl in µs.
const finishSQL = `
UPDATE stint_replay SET
	done = true, answer = $3,
	expires_at = clock_timestamp() + $4::bigint * interval '1 microsecond'` + held

// releaseSQL lets the record expire. The row remains until it is swept, and with
// it its fence.
const releaseSQL = `
UPDATE stint_replay SET expires_at = clock_timestamp()` + held

// sweepSQL: $1 how many, $2 in µs for how long they must have been expired. Rows
// that somebody is about to take are left alone.
const sweepSQL = `
DELETE FROM stint_replay WHERE ctid = ANY (ARRAY (
	SELECT ctid FROM stint_replay
	WHERE expires_at <= clock_timestamp() - $2::bigint * interval '1 microsecond'
	ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))`
