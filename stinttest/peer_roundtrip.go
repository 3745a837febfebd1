package stinttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"
)

// RoundTrip does what the script says, in memory. It reads and closes the
// request's body, and the body of its answer must be closed. When the request's
// context ends it returns the context's cause, as [http.Transport] does, also
// from Read of the answer's body.
func (p *Peer) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	body := newRequestBody(req)
	defer body.Close()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx) // it never left the client
	}
	// Whoever is inside Read of a body that does not end has to be called back.
	stop := context.AfterFunc(ctx, func() { body.Close() })
	defer stop()

	host := req.Host
	if host == "" {
		host = req.URL.Host
	}
	step, number := p.arrive(Arrival{
		At: time.Now(), Method: method(req), URI: req.URL.RequestURI(), Host: host, Header: onTheWire(req.Header),
	})
	err := p.receive(number, body)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, err
	}
	if err := wait(ctx, step.after); err != nil {
		return nil, err
	}
	switch step.kind {
	case kindStall:
		<-ctx.Done()
		return nil, context.Cause(ctx)
	case kindReset:
		return nil, &net.OpError{Op: "read", Net: "memory", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	}
	a := step.answer(req.Method)
	resp := &http.Response{
		Status: fmt.Sprintf("%d %s", a.status, http.StatusText(a.status)), StatusCode: a.status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: a.header, ContentLength: int64(len(a.body)), Body: http.NoBody, Request: req,
	}
	if a.body != "" {
		resp.Body = &answerBody{ctx: ctx, answer: a, closed: make(chan struct{})}
	}
	return resp, nil
}

// CloseIdleConnections does nothing; it is there for clients that call it.
func (p *Peer) CloseIdleConnections() {}

func method(req *http.Request) string {
	if req.Method == "" {
		return http.MethodGet
	}
	return req.Method
}

// onTheWire returns a header as a server sees it: clients may keep a name in
// another spelling, or without a value, which sends nothing.
func onTheWire(h http.Header) http.Header {
	seen := make(http.Header, len(h))
	for name, values := range h {
		for _, v := range values {
			seen.Add(name, v)
		}
	}
	return seen
}

// A requestBody is closed once, by whoever is first: the end of RoundTrip or
// that of the context.
type requestBody struct {
	io.Reader
	close func() error
}

func newRequestBody(req *http.Request) *requestBody {
	if req.Body == nil {
		return &requestBody{http.NoBody, http.NoBody.Close}
	}
	return &requestBody{req.Body, sync.OnceValue(req.Body.Close)}
}

func (b *requestBody) Close() error { return b.close() }

// An answerBody is the body of an answer in memory.
type answerBody struct {
	ctx    context.Context
	answer answer
	sent   int // read so far

	once   sync.Once
	closed chan struct{}
}

var errClosedBody = errors.New("stinttest: read on closed response body")

// Read gives what the answer gives, one byte at a time if it trickles. It ends
// early by Close, like that of net/http.
func (b *answerBody) Read(p []byte) (int, error) {
	select {
	case <-b.closed:
		return 0, errClosedBody
	case <-b.ctx.Done():
		return 0, context.Cause(b.ctx)
	default:
	}
	switch {
	case b.sent == len(b.answer.body):
		return 0, io.EOF
	case b.sent == b.answer.cut:
		return 0, io.ErrUnexpectedEOF
	case len(p) == 0:
		return 0, nil
	}
	if b.answer.every > 0 {
		timer := time.NewTimer(b.answer.every)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-b.closed:
			return 0, errClosedBody
		case <-b.ctx.Done():
			return 0, context.Cause(b.ctx)
		}
		p = p[:1]
	}
	n := copy(p, b.answer.body[b.sent:b.answer.cut])
	b.sent += n
	return n, nil
}

func (b *answerBody) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}
