package stint

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http/httptrace"
	"sync/atomic"
)

// A wireTrace sees whether anything of an attempt was written. Its hooks may run
// on other goroutines.
//
// It also bounds what net/http sends again by itself where that is not safe: on
// HTTP/2 it repeats any request whose connection winds down (GOAWAY), whose stream
// was refused, or reset with PROTOCOL_ERROR, which a peer can do after it has
// executed it; and it does so without a pause, as often as the peer likes. Which of
// the three it was cannot be told from here. On HTTP/1 it repeats unsafe requests
// only if nothing was written, and those with a key that it recognises whenever a
// kept-alive connection dies.
type wireTrace struct {
	hooks                 httptrace.ClientTrace
	asked, got, wrote, h2 atomic.Bool
	resends               atomic.Int32 // connections that net/http took after it had written

	allowed1, allowed2 int32                   // resends on HTTP/1 and 2
	cancel             context.CancelCauseFunc // ends an attempt without a body, whose resends do not ask for one
}

const (
	// maxUnsafeResends leaves one to net/http: a server that shuts down refuses
	// what is under way, and plain net/http does not fail there.
	maxUnsafeResends = 1
	// maxResends is for requests that may be repeated. Three were needed with a
	// proxy that reloads; a peer that never stops would get hundreds in a second.
	maxResends = 10
)

var errResends = errors.New("stint: net/http was to send the request again, and has done so as often as it may")

// exhausted reports whether net/http may not send the request again.
func (w *wireTrace) exhausted() bool {
	if !w.wrote.Load() {
		return false
	}
	allowed := w.allowed1
	if w.h2.Load() {
		allowed = w.allowed2
	}
	return w.resends.Load() >= allowed
}

func (w *wireTrace) attach(ctx context.Context) context.Context {
	w.hooks.GetConn = func(string) { w.asked.Store(true) }
	w.hooks.GotConn = w.gotConn
	w.hooks.WroteHeaders = func() { w.wrote.Store(true) }
	return httptrace.WithClientTrace(ctx, &w.hooks)
}

func (w *wireTrace) gotConn(info httptrace.GotConnInfo) {
	if w.cancel != nil && w.exhausted() {
		w.cancel(errResends)
		return
	}
	w.got.Store(true)
	if w.wrote.Load() {
		w.resends.Add(1)
	}
	if conn, ok := info.Conn.(*tls.Conn); ok && conn.ConnectionState().NegotiatedProtocol == "h2" {
		w.h2.Store(true)
	}
}

// unsent reports whether nothing of the attempt can have reached the peer. A base
// that does not call the hooks proves nothing. Nor does an attempt that was cut
// off with a connection in hand: its writer may still be running.
func (w *wireTrace) unsent(cut bool) bool {
	return w != nil && w.asked.Load() && !w.wrote.Load() && !(w.got.Load() && cut)
}
