package stinttest

import (
	"io"
	"log"
	"net"
	"net/http"
)

// serve starts a server on loopback and returns its URL; Cleanup stops it. It is
// not httptest's, which knows HTTP/2 with TLS only, whose certificates a client
// under test would have to be told of, and which waits for stalled handlers when
// it is closed.
func serve(t TB, h http.Handler) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		l, err = net.Listen("tcp6", "[::1]:0")
	}
	if err != nil {
		t.Fatalf("stinttest: nothing to listen on: %v", err)
		return ""
	}
	s := &http.Server{Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Serve(l)
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	return "http://" + l.Addr().String() + "/"
}
