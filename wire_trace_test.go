package stint

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"testing"
)

// The attempt is ended for net/http's resends in the moment in which the answer
// arrives: the answer is closed, as nobody gets it.
func TestResendsEndAnAttemptThatIsAnswered(t *testing.T) {
	body := &closeCounter{}
	base := baseFunc(func(r *http.Request) (*http.Response, error) {
		trace := httptrace.ContextClientTrace(r.Context())
		trace.GetConn("peer.test:80")
		trace.GotConn(httptrace.GotConnInfo{})
		trace.WroteHeaders()
		trace.GotConn(httptrace.GotConnInfo{})
		if context.Cause(r.Context()) != errResends {
			t.Errorf("the attempt goes on: %v", context.Cause(r.Context()))
		}
		return &http.Response{StatusCode: 200, Body: body, ContentLength: -1}, nil
	})
	req := newRequest(t, t.Context(), "POST", "http://peer.test/", nil)
	req.Header.Set(HeaderIdempotencyKey, "order-1")
	resp, err := newTestTransport(t, Config{Base: base, MaxAttempts: 1}).RoundTrip(req)
	if resp != nil || !errors.Is(err, errResends) || errors.Is(err, context.Canceled) {
		t.Errorf("got %v, %v", resp, err)
	}
	if body.closed != 1 {
		t.Errorf("the answer was closed %d times", body.closed)
	}
}

type closeCounter struct{ closed int }

func (c *closeCounter) Read([]byte) (int, error) { return 0, io.EOF }
func (c *closeCounter) Close() error             { c.closed++; return nil }
