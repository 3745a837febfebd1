package stint

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// failedFrom counts the requests that failed, and of these those that Throttle
// held back.
func (l *stormLog) failedFrom(from time.Duration) (failed, throttled int) {
	for _, r := range l.requests {
		if r.start >= from && !r.ok {
			failed++
			if r.reason == ReasonThrottle {
				throttled++
			}
		}
	}
	return failed, throttled
}

// TestS26_ThrottleQueueRecovers is the queue of P3: it takes 110 requests a
// second, gets 100 and stands still for 5 s. With no retries at all it takes 40 s
// to recover. Held back by half, it takes less than 25 s, and fewer than half as
// many requests fail, those that were held back included.
func TestS26_ThrottleQueueRecovers(t *testing.T) {
	const from, to, lasts = 30 * time.Second, 35 * time.Second, 110 * time.Second
	queue := func(timeout time.Duration) *fifo {
		return &fifo{perSecond: 110, stallFrom: from, stallTo: to, timeout: timeout}
	}
	plain := budgetStorm{peer: queue(time.Second), lasts: lasts, config: BudgetConfig{Ratio: -1, MinPerSecond: -1}}.run()
	plainTook := plain.recovered(to) - to
	plainFailed, _ := plain.failedFrom(from)
	t.Logf("no retries: recovered after %v, %d failed", plainTook, plainFailed)
	if plainTook < 38*time.Second || plainTook > 42*time.Second {
		t.Errorf("with no retries it recovered after %v, want about 40 s", plainTook)
	}
	for _, test := range []struct {
		name    string
		timeout time.Duration // of the base
		limit   time.Duration
		config  Config
	}{
		{name: "attempt timeout", config: Config{AttemptTimeout: time.Second}},
		{name: "deadline", limit: time.Second},
		{name: "timeout of the base", timeout: time.Second},
		{name: "no retries", limit: time.Second, config: Config{MaxAttempts: 1}},
	} {
		for seed := range uint64(3) {
			t.Run(fmt.Sprint(test.name, " ", seed), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					c := test.config
					c.Throttle = true
					log := storm(t, queue(test.timeout), c, 100, lasts, test.limit, seed)
					took := log.recovered(to) - to
					failed, throttled := log.failedFrom(from)
					p, _ := peak(log.sent)
					t.Logf("recovered after %v, %d failed, %d of these held back, peak %d", took, failed, throttled, p)
					if took > 25*time.Second {
						t.Errorf("recovered after %v, want within 25 s", took)
					}
					if failed > plainFailed/2 {
						t.Errorf("%d requests failed, want at most half of %d", failed, plainFailed)
					}
					if throttled == 0 {
						t.Error("nothing was held back: it is not Throttle that helps")
					}
					wantUnderCeiling(t, &timeline{name: "queue"}, log, ceiling)
				})
			})
		}
	}
}

// TestS26_ThrottleHoldsBackHalf: at most half of the requests to a peer that is
// down, no more, and none once it has been up again for a window.
func TestS26_ThrottleHoldsBackHalf(t *testing.T) {
	const from, to, lasts = 20 * time.Second, 60 * time.Second, 90 * time.Second
	for _, tl := range []*timeline{
		{name: "failing", phases: []phase{{lasts: from}, {lasts: to - from, fault: failing}}},
		{name: "resetting", phases: []phase{{lasts: from}, {lasts: to - from, fault: resetting}}},
	} {
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				log := storm(t, tl, Config{Throttle: true}, 100, lasts, 0, 1)
				held := func(from, to time.Duration) (share float64) {
					n, all := 0, 0
					for _, r := range log.requests {
						if r.start >= from && r.start < to {
							all++
							if r.reason == ReasonThrottle {
								n++
							}
						}
					}
					return float64(n) / float64(all)
				}
				if got := held(0, from); got != 0 {
					t.Errorf("%.3f are held back from a healthy peer", got)
				}
				// Where the window holds failures alone.
				if got := held(from+15*time.Second, to); got < 0.47 || got > 0.53 {
					t.Errorf("%.3f are held back from a peer that is down, want half", got)
				}
				window := to + DefaultBudgetWindow + DefaultBudgetWindow/budgetSlots
				if got := held(to, window); got == 0 {
					t.Error("it lets go at once: then the window means nothing")
				}
				if got := held(window, lasts); got != 0 {
					t.Errorf("%.3f are held back once the peer has been up for a window, want none", got)
				}
			})
		})
	}
}

// TestS26_ThrottleLeavesAlone what is no sign of a peer that fails.
func TestS26_ThrottleLeavesAlone(t *testing.T) {
	for _, test := range []struct {
		name string
		send func(t *testing.T, tr *Transport)
		base baseFunc
	}{
		{"a third failing", nil, func() baseFunc {
			n := 0
			return func(r *http.Request) (*http.Response, error) {
				n++
				if n%3 == 0 {
					return stormAnswer(r, http.StatusServiceUnavailable), nil
				}
				return stormAnswer(r, http.StatusOK), nil
			}
		}()},
		{"answers 404 and 500", nil, func() baseFunc {
			n := 0
			return func(r *http.Request) (*http.Response, error) {
				n++
				return stormAnswer(r, []int{404, 500}[n%2]), nil
			}
		}()},
		{"callers who leave", func(t *testing.T, tr *Transport) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Millisecond, cancel)
			tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
		}, func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}},
		{"malformed requests", nil, func(r *http.Request) (*http.Response, error) {
			return nil, errors.New("http: no Host in request URL")
		}},
		{"an open breaker", nil, func(r *http.Request) (*http.Response, error) {
			return nil, errors.New("open")
		}},
		{"slow answers", func(t *testing.T, tr *Transport) {
			go tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
			time.Sleep(10 * time.Millisecond)
		}, func(r *http.Request) (*http.Response, error) {
			time.Sleep(5 * time.Second)
			return stormAnswer(r, http.StatusOK), nil
		}},
		{"few requests, all failing", func(t *testing.T, tr *Transport) {
			time.Sleep(4 * time.Second)
			tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		}, func(r *http.Request) (*http.Response, error) {
			return stormAnswer(r, http.StatusServiceUnavailable), nil
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newTestMetrics(t)
				tr := stormTransport(t, Config{
					Throttle: true, MaxAttempts: 1, Metrics: m,
					RetryError: func(err error) bool { return err.Error() != "open" },
				}, test.base, 1)
				for range 200 {
					if test.send != nil {
						test.send(t, tr)
						continue
					}
					tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
				}
				time.Sleep(10 * time.Second)
				if got := counter(t, m, "stint_refused_total", "peer", "peer.test:80", "reason", "throttle"); got != 0 {
					t.Errorf("%v requests were held back, want none", got)
				}
			})
		})
	}
}

// TestS26_ThrottleError: what a caller gets says that it is the client, for which
// peer, and by which setting; the body is closed, and nothing was sent.
func TestS26_ThrottleError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		tr := stormTransport(t, Config{Throttle: true, MaxAttempts: 1}, baseFunc(func(r *http.Request) (*http.Response, error) {
			sent++
			closeBody(r)
			return stormAnswer(r, http.StatusServiceUnavailable), nil
		}), 1)
		for range 30 {
			tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		}
		for range 100 {
			before, closed := sent, 0
			var o Outcome
			req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "POST", "http://peer.test/", nil)
			req.Body = closeFunc{strings.NewReader("x"), func() { closed++ }}
			resp, err := tr.RoundTrip(req)
			if closed != 1 {
				t.Fatalf("the body was closed %d times", closed)
			}
			if resp != nil {
				continue
			}
			var e *Error
			if !errors.As(err, &e) || e.Reason != ReasonThrottle || e.Peer != "peer.test:80" || e.Attempts != 0 || e.Timeout() {
				t.Errorf("got %#v", err)
			}
			for _, word := range []string{"client", "peer.test:80", "Config.Throttle", "0 attempts"} {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q does not say %q", err, word)
				}
			}
			if sent != before || o.Reason != ReasonThrottle || o.Attempts != 0 {
				t.Errorf("%d sent, %+v, want none", sent-before, o)
			}
			return
		}
		t.Error("none of 100 requests was held back")
	})
}

// TestThrottleShare is the formula.
func TestThrottleShare(t *testing.T) {
	origin := time.Now()
	for _, test := range []struct {
		accepts, failures, refusals int
		want                        float64
	}{
		{0, 0, 0, 0},
		{0, 9, 100, 0}, // too few to say
		{0, 10, 0, 0.5},
		{100, 100, 0, 0},
		{100, 101, 0, 1.0 / 202},
		{100, 150, 50, 0.332225}, // (300−200)/301
		{100, 100, 50, 0.199203}, // (250−200)/251
		{1, 1000, 1000, 0.5},
		{1000, 1, 0, 0},
	} {
		b := newBudget(BudgetConfig{}.withDefaults(), origin)
		h := newThrottle(true, b)
		now := origin.Add(3 * time.Second)
		for range test.accepts {
			b.success(now)
		}
		e := b.epoch(now)
		for range test.failures {
			h.failures.add(e)
		}
		for range test.refusals {
			h.refusals.add(e)
		}
		if got := h.share(now.Add(9 * time.Second)); got < test.want-1e-5 || got > test.want+1e-5 {
			t.Errorf("%+v: %v", test, got)
		}
		if got := h.share(now.Add(12 * time.Second)); got != 0 {
			t.Errorf("%+v: %v after a window, want 0", test, got)
		}
	}
}

// TestS26_ThrottleMarksTheHandlersAnswer: the layer above must not retry what was
// held back: that would be a second draw for the same request.
func TestS26_ThrottleMarksTheHandlersAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := stormTransport(t, Config{Throttle: true, MaxAttempts: 1}, baseFunc(func(r *http.Request) (*http.Response, error) {
			return stormAnswer(r, http.StatusServiceUnavailable), nil
		}), 1)
		for range 30 {
			tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		}
		tr.jitter = func() float64 { return 0 }
		m, err := NewMiddleware(MiddlewareConfig{})
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", "http://peer.test/", nil)); err == nil {
				t.Error("it was not held back")
			}
			w.WriteHeader(http.StatusBadGateway)
		}))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		if got := w.Header().Get(HeaderShouldRetry); got != "false" {
			t.Errorf("%s: %q, want false", HeaderShouldRetry, got)
		}
	})
}
