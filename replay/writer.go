package replay

//lint:file-ignore SA1019 http.CloseNotifier is deprecated, and still asked for by handlers

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/felixge/httpsnoop"
)

// commonWriter is what the writers of net/http have in common on HTTP/1 and 2.
// For writers of just these two shapes, which nearly all are, it takes the place
// of httpsnoop: a hook is an allocation for each method, and all are hooked.
type commonWriter struct{ rec *recorder }

func (c commonWriter) Header() http.Header                { return c.rec.w.Header() }
func (c commonWriter) WriteHeader(code int)               { c.rec.WriteHeader(code) }
func (c commonWriter) Write(b []byte) (int, error)        { return c.rec.Write(b) }
func (c commonWriter) WriteString(s string) (int, error)  { return c.rec.WriteString(s) }
func (c commonWriter) Flush()                             { c.rec.Flush() }
func (c commonWriter) FlushError() error                  { return c.rec.FlushError() }
func (c commonWriter) CloseNotify() <-chan bool           { return c.rec.w.(http.CloseNotifier).CloseNotify() }
func (c commonWriter) Unwrap() http.ResponseWriter        { return c.rec.w }
func (c commonWriter) SetReadDeadline(t time.Time) error  { return c.controller().SetReadDeadline(t) }
func (c commonWriter) SetWriteDeadline(t time.Time) error { return c.controller().SetWriteDeadline(t) }
func (c commonWriter) EnableFullDuplex() error            { return c.controller().EnableFullDuplex() }
func (c commonWriter) controller() *http.ResponseController {
	return http.NewResponseController(c.rec.w)
}

type http1Writer struct{ commonWriter }

func (h http1Writer) Hijack() (net.Conn, *bufio.ReadWriter, error) { return h.rec.Hijack() }
func (h http1Writer) ReadFrom(src io.Reader) (int64, error)        { return h.rec.ReadFrom(src) }

type http2Writer struct{ commonWriter }

func (h http2Writer) Push(target string, opts *http.PushOptions) error {
	return h.rec.w.(http.Pusher).Push(target, opts)
}

// A snoop is a set of hooks that are bound to a recorder while the writer is
// wrapped and at no other time; see the middleware of package stint.
type snoop struct {
	rec   *recorder
	hooks httpsnoop.Hooks
}

var snoops = sync.Pool{New: func() any {
	s := new(snoop)
	s.hooks = httpsnoop.Hooks{
		WriteHeader: func(httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc { return s.rec.WriteHeader },
		Write:       func(httpsnoop.WriteFunc) httpsnoop.WriteFunc { return s.rec.Write },
		WriteString: func(httpsnoop.WriteStringFunc) httpsnoop.WriteStringFunc { return s.rec.WriteString },
		ReadFrom:    func(httpsnoop.ReadFromFunc) httpsnoop.ReadFromFunc { return s.rec.ReadFrom },
		Flush:       func(httpsnoop.FlushFunc) httpsnoop.FlushFunc { return s.rec.Flush },
		FlushError:  func(httpsnoop.FlushErrorFunc) httpsnoop.FlushErrorFunc { return s.rec.FlushError },
		Hijack:      func(httpsnoop.HijackFunc) httpsnoop.HijackFunc { return s.rec.Hijack },
	}
	return s
}}

// writer returns the handler's writer. It offers the optional interfaces of the
// writer below, and those that http.ResponseController would find further down:
// what is flushed there would overtake what is held back here.
func (rec *recorder) writer() http.ResponseWriter {
	_, flush := rec.w.(http.Flusher)
	_, hijack := rec.w.(http.Hijacker)
	_, readFrom := rec.w.(io.ReaderFrom)
	_, push := rec.w.(http.Pusher)
	_, notify := rec.w.(http.CloseNotifier)
	switch {
	case flush && hijack && readFrom && notify && !push:
		return http1Writer{commonWriter{rec}}
	case flush && push && notify && !hijack && !readFrom:
		return http2Writer{commonWriter{rec}}
	}
	s := snoops.Get().(*snoop)
	s.rec = rec
	wrapped := httpsnoop.Wrap(reachable(rec.w), s.hooks)
	s.rec = nil
	snoops.Put(s)
	return wrapped
}

func reachable(w http.ResponseWriter) http.ResponseWriter {
	_, flush := w.(http.Flusher)
	_, hijack := w.(http.Hijacker)
	if flush && hijack {
		return w
	}
	deepFlush, deepHijack := flush, hijack
	for u := w; !deepFlush || !deepHijack; {
		below, ok := u.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		u = below.Unwrap()
		if _, ok := u.(http.Flusher); ok {
			deepFlush = true
		}
		if _, ok := u.(interface{ FlushError() error }); ok {
			deepFlush = true
		}
		if _, ok := u.(http.Hijacker); ok {
			deepHijack = true
		}
	}
	if _, ok := w.(interface{ FlushError() error }); ok {
		deepFlush = true // and no Flush: the controller uses it
	}
	switch d := (deep{w}); {
	case deepFlush == flush && deepHijack == hijack:
		return w
	case deepFlush && deepHijack:
		return struct {
			deep
			http.Flusher
			http.Hijacker
		}{d, d.flusher(), d.hijacker()}
	case deepFlush:
		return struct {
			deep
			http.Flusher
		}{d, d.flusher()}
	default:
		return struct {
			deep
			http.Hijacker
		}{d, d.hijacker()}
	}
}

// deep is a writer whose optional methods are those of a writer below it.
type deep struct{ http.ResponseWriter }

func (d deep) Unwrap() http.ResponseWriter { return d.ResponseWriter }
func (d deep) flusher() http.Flusher       { return deepMethods{d.ResponseWriter} }
func (d deep) hijacker() http.Hijacker     { return deepMethods{d.ResponseWriter} }

type deepMethods struct{ w http.ResponseWriter }

func (d deepMethods) Flush() { http.NewResponseController(d.w).Flush() }
func (d deepMethods) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return http.NewResponseController(d.w).Hijack()
}
