package interop

import (
	"context"
	"errors"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// P6: an HTTP/2 peer that refuses or resets every stream. net/http takes
// PROTOCOL_ERROR for "not processed" (golang/go#47635) even where the peer has read
// and executed the request, and by itself sends it again without a pause and
// without an end: hundreds of times a second. What it may do is bounded.
func TestP6_HTTP2ResendsAreBounded(t *testing.T) {
	for _, fault := range []h2Fault{h2Refuse, h2GoAway, h2ProtocolError} {
		for _, body := range []string{"", "charge"} {
			for _, tt := range []struct {
				key      string
				attempts int
				most     int64 // arrivals
			}{
				{"", 3, 2}, // one rescue is net/http's: it may be a graceful shutdown
				{"", 1, 2},
				{"caller", 3, 11}, // may be repeated, but not for ever
				{"caller", 1, 11},
			} {
				s, base := startRawH2(t, fault, 1_000_000)
				tr := newTransport(t, eager(stint.Config{Base: base, Timeout: 2500 * time.Millisecond, MaxAttempts: tt.attempts}))
				_, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), "POST", s.url+"/", strings.NewReader(body)), stint.Override{IdempotencyKey: tt.key})
				arrivals, executed, _ := s.counts()
				if int64(arrivals) > tt.most || int64(executed) > tt.most {
					t.Errorf("fault %d, body %q, key %q, MaxAttempts %d: %d arrivals, %d executed, %+v, %v", fault, body, tt.key, tt.attempts, arrivals, executed, o, err)
				}
				if err == nil || errors.Is(err, context.Canceled) {
					t.Errorf("fault %d, body %q, key %q, MaxAttempts %d: %v", fault, body, tt.key, tt.attempts, err)
				}
			}
		}
	}
}

// P6: a POST without a body, with the key that the first hop made, through a
// ReverseProxy with our transport. There it looks like the caller's, and is nobody's
// promise.
func TestP6_CopiedKeyIsNoPromise(t *testing.T) {
	for _, middleware := range []bool{true, false} {
		for _, path := range []string{"/lost", "/503"} {
			var at recorder
			backend := startBackend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				at.record(r)
				if r.URL.Path == "/lost" {
					panic(http.ErrAbortHandler)
				}
				w.WriteHeader(503)
			}))
			target, _ := url.Parse(backend.url())
			var h http.Handler = &httputil.ReverseProxy{
				Transport: newTransport(t, eager(stint.Config{})), ErrorLog: quiet,
				Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
			}
			if middleware {
				h = newMiddleware(t, stint.MiddlewareConfig{}).Handler(h)
			}
			front := startBackend(t, h)
			outer := newTransport(t, eager(stint.Config{Timeout: patience}))
			_, _, o, err := roundTrip(t, outer, newRequest(t, t.Context(), "POST", front.url()+path, nil), stint.Override{})
			if got := len(at.take()); got != 1 {
				t.Errorf("%s, middleware %v: an unsafe POST arrived %d times (%+v, %v)", path, middleware, got, o, err)
			}
		}
	}
}
