// Package replay makes the repetition of a request safe on the server: of all
// requests with the same idempotency key one runs, and the others are given its
// answer.
package replay
