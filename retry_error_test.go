package stint

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// TestS27_RetryError: an error that is not worth a retry ends the request as it
// is, and nobody learns from it.
func TestS27_RetryError(t *testing.T) {
	errOpen := errors.New("breaker open")
	synctest.Test(t, func(t *testing.T) {
		open := false
		asked := 0
		tr := stormTransport(t, Config{
			Admission: AdmissionConfig{MinSamples: 1},
			RetryError: func(err error) bool {
				asked++
				return !errors.Is(err, errOpen)
			},
		}, baseFunc(func(r *http.Request) (*http.Response, error) {
			time.Sleep(10 * time.Millisecond)
			if open {
				time.Sleep(time.Second) // slower than the good answers: news, were it the peer's
				return nil, fmt.Errorf("base: %w", errOpen)
			}
			return stormAnswer(r, http.StatusOK), nil
		}), 1)
		send := func() (*Outcome, error) {
			var o Outcome
			req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "GET", "http://peer.test/", nil)
			resp, err := tr.RoundTrip(req)
			if err == nil {
				resp.Body.Close()
			}
			return &o, err
		}
		for range 5 {
			send()
		}
		if asked != 0 {
			t.Errorf("RetryError was asked about %d answers", asked)
		}
		p := tr.peers.enter("peer.test:80", time.Now())
		before, samples := p.latency.get("").quantile(time.Now(), 0.99)
		_, ended := p.latency.get("").cutOff(time.Now())
		open = true
		for range 10 {
			if o, err := send(); !errors.Is(err, errOpen) || o.Attempts != 1 || o.Reason != "" {
				t.Fatalf("%v, %+v, want the base's error after one attempt and no reason", err, o)
			}
		}
		if asked != 10 {
			t.Errorf("RetryError was asked %d times about 10 errors", asked)
		}
		if after, n := p.latency.get("").quantile(time.Now(), 0.99); after != before || n != samples {
			t.Errorf("the latencies went from %v of %d to %v of %d", before, samples, after, n)
		}
		if _, n := p.latency.get("").cutOff(time.Now()); n != ended {
			t.Errorf("%d attempts count for the reason slow, want %d", n, ended)
		}
		if s := p.budget.state(time.Now()); s.taken != 0 {
			t.Errorf("%d turns were taken", s.taken)
		}
	})
}

// TestS27_RetryErrorIsNotAskedAboutOurOwn: AttemptTimeout is stint's, and errors
// that are never retried need no opinion.
func TestS27_RetryErrorIsNotAskedAboutOurOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := stormTransport(t, Config{
			AttemptTimeout: time.Second, MaxAttempts: 2,
			RetryError: func(err error) bool {
				t.Errorf("asked about %v", err)
				return false
			},
		}, baseFunc(func(r *http.Request) (*http.Response, error) {
			if r.URL.Path == "/cut" {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			return nil, errors.New("http: no Host in request URL")
		}), 1)
		var o Outcome
		ctx := WithOverride(t.Context(), Override{Outcome: &o})
		if _, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/cut", nil)); err == nil || o.Attempts != 2 {
			t.Errorf("%v, %+v, want two attempts that are cut off", err, o)
		}
		if _, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/malformed", nil)); err == nil || o.Attempts != 1 {
			t.Errorf("%v, %+v, want one attempt", err, o)
		}
	})
}
