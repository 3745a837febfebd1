package stinttest

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"time"
)

// ServeHTTP does what the script says. Where it drops the connection it does not
// return on HTTP/2, or where the connection cannot be had: it panics with
// [http.ErrAbortHandler], which is net/http's way to reset a stream.
func (p *Peer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	step, number := p.arrive(Arrival{
		At: time.Now(), Method: r.Method, URI: r.URL.RequestURI(), Host: r.Host, Header: r.Header.Clone(),
	})
	if p.receive(number, r.Body) != nil || wait(r.Context(), step.after) != nil {
		panic(http.ErrAbortHandler) // nobody is there any more
	}
	switch step.kind {
	case kindStall:
		// The body has been read, so net/http watches for the client to leave.
		<-r.Context().Done()
		panic(http.ErrAbortHandler) // to return would be to answer 200
	case kindReset:
		drop(w, r)
		return
	}
	a := step.answer(r.Method)
	for name, values := range a.header {
		w.Header()[name] = values
	}
	w.WriteHeader(a.status)
	rc := http.NewResponseController(w)
	if a.every > 0 {
		rc.Flush()
		for i := range a.cut {
			if wait(r.Context(), a.every) != nil {
				panic(http.ErrAbortHandler)
			}
			io.WriteString(w, a.body[i:i+1])
			rc.Flush()
		}
		return
	}
	io.WriteString(w, a.body[:a.cut])
	if step.kind == kindHalf {
		rc.Flush() // else net/http would throw it away with the connection
		panic(http.ErrAbortHandler)
	}
}

// drop ends the connection by a reset, or the stream where there are others on
// the connection.
func drop(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 1 {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			if c, ok := conn.(*tls.Conn); ok {
				conn = c.NetConn() // tls would take leave first
			}
			if c, ok := conn.(*net.TCPConn); ok {
				c.SetLinger(0) // a reset, and not the orderly end of a server that closes an idle connection
			}
			conn.Close()
			return
		}
	}
	panic(http.ErrAbortHandler)
}

// wait waits for d, or returns why the context ended first, as net/http does.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
