-- The records of package replay. Migrate executes this file; it changes nothing
-- where all is there already, so a tool for migrations may execute it as well.
-- Other schemas than the first of the search_path work if it is set for all
-- connections of the pool.

-- Fences: each is greater than all before.
CREATE SEQUENCE IF NOT EXISTS stint_replay_fence AS bigint;

CREATE TABLE IF NOT EXISTS stint_replay (
	key        bytea       NOT NULL PRIMARY KEY, -- a SHA-256 of scope, method, path and key
	print      bytea       NOT NULL,             -- a SHA-256 of what the request must have in common with its repetition
	fence      bigint      NOT NULL,
	done       boolean     NOT NULL DEFAULT false,
	lease_end  timestamptz NOT NULL,
	expires_at timestamptz NOT NULL,             -- from then on there is no record, whether or not it is still here
	answer     bytea                             -- of a record that is done
);

-- For Sweep.
CREATE INDEX IF NOT EXISTS stint_replay_expires_at ON stint_replay (expires_at);
