// Package replay makes the repetition of a request safe on the server: of all
// requests with the same idempotency key one runs, and the others are given its
// answer.
//
//	store := replay.NewMemory(replay.MemoryConfig{})
//	once, err := replay.New(replay.Config{Store: store, Scope: replay.SingleTenant})
//	…
//	http.Handle("/", once.Handler(mux))
//
// A [Store] keeps the records: [Memory] for one process, others for several. The
// key is a name that the client gives to an operation, and belongs to a scope:
// another client's key is another key. What two requests with one key must have in
// common is their fingerprint. A run holds its key under a fence, a number that
// grows, and a lease, which is renewed while the handler runs and ends when its
// process dies. [Middleware.Handler] says what becomes of a request; each ends in
// exactly one [Outcome].
package replay
