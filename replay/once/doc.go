//go:build unix

// Command once counts how often an operation has its effect when everything
// around it fails: 64 clients with a stint transport each, three server processes
// on one store, a row in PostgreSQL for each operation. Meanwhile processes are
// killed, also between the effect and its record, and paused for longer than their
// lease; connections are cut, those of clients when the answer is on its way; the
// store stands still, and is killed and started again.
//
//	go run .
//
// prints the rows for each key. It starts its own servers, which have to be
// installed: redis-server and postgresql. README.md has what it prints.
package main
