// Package pgstore keeps the records of package replay in PostgreSQL, for services
// of several processes. It is the one to choose where the effect of a request is
// in the same database: [Store.FinishTx] commits the effect and the answer
// together, so that there is exactly one of each, whatever is killed when.
//
//	store, err := pgstore.New(pool)
//	…
//	if err := store.Migrate(ctx); err != nil { … }
//	once, err := replay.New(replay.Config{Store: store, Scope: …})
//
// A record is a row of the table stint_replay: schema.sql. All instants are on the
// server's clock. A request that runs costs two statements, its repetition two, each
// a transaction of its own; no connection and no lock is held while the handler
// runs. Rows that have expired stay until [Store.Sweep] is called, which is the
// caller's to do, now and then.
//
// What the server has acknowledged and lost (synchronous_commit off, a standby
// promoted that has not got it yet) runs again, and its fences may be handed out
// twice: the effect, in the same database, is lost along with them.
//
// It is tested on PostgreSQL 15.
package pgstore
