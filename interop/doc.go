// Package interop has no code, only tests: stint between the neighbours that it
// meets in real fleets, seen from outside, through its public names alone.
//
//   - nginx and haproxy between two hops: headers, deadlines, 504s in front of
//     bodies that nobody reads, kept-alive connections, upgrades, event streams,
//     compression, HTTP/2 over TLS, and the proxies' own retries, counted in
//     arrivals at the backend
//   - the probe through nginx and haproxy with their default buffers
//   - curl as the client
//   - net/http's own resends over HTTP/1.1 and HTTP/2: connections that die,
//     GOAWAY, refused streams
//   - gobreaker and otelhttp, inside and around the transport and the middleware
//   - httputil.ReverseProxy between two hops
//   - a gRPC client in a handler
//
// It is a module of its own so that none of these is a dependency of stint. It
// needs the Debian packages nginx (or nginx-light), haproxy and curl, whose
// programs it looks up in PATH:
//
//	apt-get install -y --no-install-recommends nginx haproxy curl
//	cd interop && go test -race ./...
//
// A test whose program is missing is skipped, but fails where the environment
// variable CI is set. The tests start the proxies themselves, as the current
// user, on free ports of the loopback interface and with a configuration made
// from testdata, and stop them.
package interop
