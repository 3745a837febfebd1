package stint

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// What a hostile reading of the library tried. Each of these once failed, or was
// looked at closely because it might.

// A base that ignored its context and answered after AttemptTimeout once made
// RoundTrip return neither a response nor an error.
func TestHostile_CutAttemptReturnsOneError(t *testing.T) {
	broken := io.NopCloser(readFunc(func([]byte) (int, error) { return 0, errors.New("body failed") }))
	for _, tt := range []struct {
		name         string
		failingBody  bool
		legacyCancel bool // Request.Cancel is closed
		answers      bool // else the base returns the cause of its context
		reason       Reason
	}{
		{"late answer", false, false, true, ReasonAttempts},
		{"late answer, Request.Cancel closed", false, true, true, ReasonCanceled},
		{"late answer, the caller's body failed", true, false, true, ReasonAttempts},
		{"cause", false, false, false, ReasonAttempts},
		{"cause, the caller's body failed", true, false, false, ReasonAttempts},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var answered, closed atomic.Int32
				tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, MaxAttempts: 2, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
					if r.Body != nil {
						io.Copy(io.Discard, r.Body)
						r.Body.Close()
					}
					if !tt.answers {
						<-r.Context().Done()
						return nil, context.Cause(r.Context())
					}
					time.Sleep(time.Second)
					answered.Add(1)
					resp := answer(200, "")
					resp.Body = closeFunc{strings.NewReader("late"), func() { closed.Add(1) }}
					return resp, nil
				})})
				req := newRequest(t, t.Context(), "PUT", "http://peer.test/", nil)
				if tt.failingBody {
					req.Body, req.ContentLength = broken, -1
					req.GetBody = func() (io.ReadCloser, error) { return broken, nil }
				}
				if tt.legacyCancel {
					gone := make(chan struct{})
					close(gone)
					req.Cancel = gone
				}
				resp, err := tr.RoundTrip(req)
				var e *Error
				if resp != nil || !errors.As(err, &e) || e.Reason != tt.reason || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v, %v", resp, err)
				}
				if answered.Load() != closed.Load() || (answered.Load() > 0) != tt.answers {
					t.Errorf("%d answers, %d were closed", answered.Load(), closed.Load())
				}
			})
		})
	}
}

// An answer that comes at the very moment of AttemptTimeout was returned as if it
// were whole, and its body was cut a moment later.
func TestHostile_AnswerAtTheTimeoutIsWholeOrNone(t *testing.T) {
	const perAttempt = 10 * time.Millisecond
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			var attempt context.Context
			tr := newTestTransport(t, Config{AttemptTimeout: perAttempt, MaxAttempts: 1, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				attempt = r.Context()
				time.Sleep(perAttempt)
				return answer(200, "whole"), nil
			})})
			resp, err, o := roundTrip(t, tr, t.Context())
			if err != nil {
				if !os.IsTimeout(err) || o.Reason != ReasonAttempts {
					t.Errorf("%v, %+v", err, o)
				}
				return
			}
			synctest.Wait()
			if attempt.Err() != nil {
				t.Errorf("an answer was returned, and its attempt then ended: %v", context.Cause(attempt))
			}
			resp.Body.Close()
		})
	}
}

// The time that it takes to throw an answer away could push the retry past its
// deadline, and X-Request-Timeout-Ms below 1.
func TestHostile_NoRetryBeginsPastItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		tr := newTestTransport(t, Config{MaxAttempts: 2, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			n++
			if ms, err := strconv.Atoi(r.Header.Get(HeaderTimeout)); err != nil || ms < 1 {
				t.Errorf("attempt %d: %s is %v", n, HeaderTimeout, r.Header[HeaderTimeout])
			}
			time.Sleep(85 * time.Millisecond)
			resp := answer(503, "")
			resp.ContentLength = -1
			pr, _ := io.Pipe() // whose other end says nothing, so that draining takes its time
			resp.Body = pr
			return resp, nil
		})})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		resp, err, o := roundTrip(t, tr, ctx)
		if o.Reason != ReasonDeadline || o.Attempts != n || err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d attempts, %v, %+v", n, err, o)
		}
		if err == nil {
			resp.Body.Close()
		}
	})
}

// A hint for ever, added to the backoff, overflowed to a wait of nothing where
// MaxRetryAfter set no bound.
func TestHostile_EndlessRetryAfterDoesNotOverflow(t *testing.T) {
	for _, bound := range []time.Duration{math.MaxInt64, math.MaxInt64 - 1} {
		synctest.Test(t, func(t *testing.T) {
			tr := newTestTransport(t, Config{Backoff: Backoff{MaxRetryAfter: bound}, Base: answers(status(503, "Retry-After", "99999999999"))})
			tr.jitter = func() float64 { return 0.5 }
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			start := time.Now()
			resp, err, o := roundTrip(t, tr, ctx)
			if err != nil || resp.StatusCode != 503 || o.Attempts != 1 || o.Reason != ReasonRetryAfter || time.Since(start) != 0 {
				t.Errorf("%v, %+v after %v", err, o, time.Since(start))
			}
		})
	}
}

// With one source behind every GetBody, a retry that rewound it while the upload
// before still went on made the peer answer 200 to half a body.
func TestHostile_SharedBodySourceIsNeverTruncated(t *testing.T) {
	const size = 8 << 20
	for _, waits := range []bool{false, true} {
		t.Run(fmt.Sprint("waits for a turn: ", waits), func(t *testing.T) {
			var arrivals atomic.Int32
			var second atomic.Int64
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if arrivals.Add(1) > 1 {
					n, _ := io.Copy(io.Discard, r.Body)
					second.Store(n)
					return
				}
				rc := http.NewResponseController(w)
				rc.EnableFullDuplex()
				w.WriteHeader(503)
				rc.Flush()
				for buf := make([]byte, 4096); ; time.Sleep(100 * time.Microsecond) {
					if _, err := r.Body.Read(buf); err != nil {
						return
					}
				}
			}))
			client := startServer(t, s, false)
			tr := newTestTransport(t, Config{Base: client.Transport, Backoff: Backoff{Base: 1, Max: 1}})
			if waits {
				tr.peers.enter(s.Listener.Addr().String(), time.Now()).budget.take(time.Now(), time.Time{})
			}
			source := bytes.NewReader(make([]byte, size))
			var o Outcome
			req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "PUT", s.URL, io.NopCloser(source))
			req.ContentLength = size
			req.GetBody = func() (io.ReadCloser, error) {
				source.Seek(0, io.SeekStart)
				return io.NopCloser(source), nil
			}
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			switch {
			case resp.StatusCode == 503 && o.Reason == ReasonNotReplayable && o.Attempts == 1:
			case resp.StatusCode == 200 && second.Load() == size:
			default:
				t.Errorf("answer %d to %d of %d bytes, %+v", resp.StatusCode, second.Load(), size, o)
			}
		})
	}
}

// Work that a handler detaches with a clone of its request, deadline header
// included, was bound by the very deadline that it was detached from.
func TestHostile_DetachedCloneForgetsTheDeadline(t *testing.T) {
	for _, trust := range []bool{true, false} {
		m := mwNew(t, MiddlewareConfig{TrustHeader: func(*http.Request) bool { return trust }})
		tr := newTestTransport(t, Config{Timeout: time.Minute, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			if d, ok := r.Context().Deadline(); !ok || time.Until(d) < 30*time.Second {
				t.Errorf("trust=%v: %v are left, want a minute", trust, time.Until(d))
			}
			ms, _ := strconv.ParseInt(r.Header.Get(HeaderDeadline), 10, 64)
			if left := time.Until(time.UnixMilli(ms)); left < 30*time.Second {
				t.Errorf("trust=%v: the peer is told %v, want a minute", trust, left)
			}
			return answer(200, ""), nil
		})})
		served := false
		m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			served = true
			out := r.Clone(Detach(r.Context()))
			out.URL, out.RequestURI = &url.URL{Scheme: "http", Host: "peer.test"}, ""
			if _, err := tr.RoundTrip(out); err != nil {
				t.Errorf("trust=%v: %v", trust, err)
			}
		})).ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderDeadline, mwIn(20*time.Second)))
		if !served {
			t.Errorf("trust=%v: not served", trust)
		}
	}
}

// The timeout of the last attempt, which the error also holds, made the error of
// a caller who cancelled call itself a timeout.
func TestHostile_CancelIsNotATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, Backoff: Backoff{Base: time.Second}, Base: hang})
		tr.jitter = func() float64 { return 0.9 }
		time.AfterFunc(20*time.Millisecond, cancel)
		_, err := (&http.Client{Transport: tr}).Do(newRequest(t, ctx, "GET", "http://peer.test/", nil))
		if err == nil || !errors.Is(err, context.Canceled) || isTimeout(err) {
			t.Errorf("%v: is a timeout: %v", err, isTimeout(err))
		}
	})
}

// After a context had been cancelled, its deadline passed as well, and the request
// was said to be out of time.
func TestHostile_CanceledStaysCanceledPastTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		cancel()
		time.Sleep(20 * time.Millisecond)
		_, err, o := roundTrip(t, newTestTransport(t, Config{Base: answers(status(200))}), ctx)
		if !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || os.IsTimeout(err) || o.Reason != ReasonCanceled || o.Attempts != 0 {
			t.Errorf("%v, %+v", err, o)
		}
	})
}

// A kept answer that was cut short had methods of bytes.Reader besides Read, by
// which it ended as if it were whole.
func TestHostile_KeptBodyEndsAsItWasCut(t *testing.T) {
	resp := answer(503, "half")
	resp.ContentLength = 8
	resp.Body = io.NopCloser(io.MultiReader(strings.NewReader("half"), readFunc(func([]byte) (int, error) { return 0, io.ErrUnexpectedEOF })))
	if !keep(resp) {
		t.Fatal("not kept")
	}
	if r, ok := resp.Body.(io.ByteReader); ok {
		t.Errorf("%T is an io.ByteReader", r)
	}
	if r, ok := resp.Body.(io.Seeker); ok {
		t.Errorf("%T is an io.Seeker", r)
	}
	var got strings.Builder
	if _, err := io.Copy(&got, resp.Body); got.String() != "half" || err != io.ErrUnexpectedEOF {
		t.Errorf("copied %q, %v; want half, %v", got.String(), err, io.ErrUnexpectedEOF)
	}
}

// A kept answer that is closed beside a Read, as callers may, was a data race.
func TestHostile_KeptBodyMayBeClosedDuringRead(t *testing.T) {
	for range 100 {
		resp := answer(503, "some")
		if !keep(resp) {
			t.Fatal("not kept")
		}
		var wg sync.WaitGroup
		wg.Go(func() { resp.Body.Close() })
		b, err := io.ReadAll(resp.Body)
		if err != nil && err != http.ErrBodyReadAfterClose || err == nil && string(b) != "some" {
			t.Errorf("read %q, %v", b, err)
		}
		wg.Wait()
	}
}

// net/http resends a PUT or DELETE on its own too where the caller's key stands
// in its header.
func TestHostile_KeyedPutIsSentOnceWithoutRetries(t *testing.T) {
	for _, method := range []string{"PUT", "DELETE"} {
		s := startLosingServer(t)
		tr := newTestTransport(t, Config{MaxAttempts: 1})
		defer tr.CloseIdleConnections()
		warm, err, _ := roundTripTo(t, tr, s.url+"/warm")
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, warm)
		req := newRequest(t, t.Context(), method, s.url, strings.NewReader("body"))
		req.Header.Set(HeaderIdempotencyKey, "k")
		_, err = tr.RoundTrip(req)
		if got := s.arrivals(); err == nil || len(got) != 1 || len(got[0].lines(HeaderIdempotencyKey)) != 1 {
			t.Errorf("%s: %v, %+v", method, err, got)
		}
	}
}

// A proxy or a handler that sends an inbound key on made a promise of a key that a
// transport further up had only made up, and the operation ran twice.
func TestHostile_CopiedKeyPromisesNothing(t *testing.T) {
	forwards := map[string]func(t *testing.T, target *url.URL, tr *Transport) http.Handler{
		"proxy": func(_ *testing.T, target *url.URL, tr *Transport) http.Handler {
			return forwarder(target, tr)
		},
		"proxy behind the middleware": func(t *testing.T, target *url.URL, tr *Transport) http.Handler {
			return mwNew(t, MiddlewareConfig{}).Handler(forwarder(target, tr))
		},
		"handler behind the middleware": func(t *testing.T, target *url.URL, tr *Transport) http.Handler {
			return mwNew(t, MiddlewareConfig{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				out := newRequest(t, r.Context(), r.Method, target.String()+r.URL.Path, nil)
				if key, ok := IdempotencyKey(r.Context()); ok {
					out.Header.Set(HeaderIdempotencyKey, key)
				}
				resp, err := tr.RoundTrip(out)
				if err != nil {
					w.WriteHeader(502)
					return
				}
				readAll(t, resp)
				w.WriteHeader(resp.StatusCode)
			}))
		},
	}
	for name, forward := range forwards {
		for _, lost := range []bool{true, false} {
			for _, tt := range []struct {
				promise  string
				config   Config
				override Override
				arrivals int
				status   int
			}{
				{"none", Config{}, Override{}, 1, 0},
				{"KeysHonoured", Config{Keys: KeysHonoured}, Override{}, 2, 200},
				{"Override", Config{}, Override{IdempotencyKey: "promised"}, 2, 200},
			} {
				t.Run(fmt.Sprintf("%s, lost: %v, promise: %s", name, lost, tt.promise), func(t *testing.T) {
					backend, arrivals := startFailingOnce(t, lost)
					target, err := url.Parse(backend)
					if err != nil {
						t.Fatal(err)
					}
					config := tt.config
					config.Backoff = Backoff{Base: 1, Max: 1}
					tr := newTestTransport(t, config)
					t.Cleanup(tr.CloseIdleConnections)
					inner := forward(t, target, tr)
					front := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						inner.ServeHTTP(w, r.WithContext(WithOverride(r.Context(), tt.override)))
					}))
					client := startServer(t, front, false)
					// Only what stands behind it may retry, and net/http must have
					// a kept-alive connection there that can turn out dead.
					outer := newTestTransport(t, Config{Base: client.Transport, MaxAttempts: 1})
					warm, err, _ := roundTripTo(t, outer, front.URL+"/warm")
					if err != nil {
						t.Fatal(err)
					}
					readAll(t, warm)

					var o Outcome
					resp, err := outer.RoundTrip(newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "POST", front.URL+"/charge", nil))
					if err != nil {
						t.Fatal(err)
					}
					readAll(t, resp)
					want := tt.status
					if want == 0 {
						want = 503
						if lost {
							want = 502
						}
					}
					keys := arrivals()
					if len(keys) != tt.arrivals || resp.StatusCode != want {
						t.Errorf("answer %d, %d arrivals, want %d, %d", resp.StatusCode, len(keys), want, tt.arrivals)
					}
					key := o.Key
					if tt.override.IdempotencyKey != "" {
						key = tt.override.IdempotencyKey
					}
					for i, got := range keys {
						if got != key || key == "" {
							t.Errorf("arrival %d has the key %q, want %q", i+1, got, key)
						}
					}
				})
			}
		}
	}
}

// forwarder is a reverse proxy that says nothing of its failures but 502.
func forwarder(target *url.URL, tr http.RoundTripper) http.Handler {
	return &httputil.ReverseProxy{Transport: tr, ErrorLog: quiet, Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(target) }}
}

// startFailingOnce starts a backend that loses its first request for /charge, as a
// losingServer does, or else answers it with 503. arrivals returns the keys of all
// of them.
func startFailingOnce(t *testing.T, lost bool) (address string, arrivals func() (keys []string)) {
	t.Helper()
	if lost {
		s := startLosingServer(t)
		return s.url, func() (keys []string) {
			for _, a := range s.arrivals() {
				keys = append(keys, strings.Join(a.lines(HeaderIdempotencyKey), ", "))
			}
			return keys
		}
	}
	var mu sync.Mutex
	var seen []string
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/warm" {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if seen = append(seen, strings.Join(r.Header.Values(HeaderIdempotencyKey), ", ")); len(seen) == 1 {
			w.WriteHeader(503)
		}
	}))
	startServer(t, s, false)
	return s.URL, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), seen...)
	}
}

// The timer that ends the draining of a long answer closes it while it is read,
// which net/http's unpacking of gzip might not stand.
func TestHostile_GzipAnswerMayBeClosedDuringDrain(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		var n atomic.Int32
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1)%2 == 0 {
				return
			}
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(503)
			packed := gzip.NewWriter(w)
			for r.Context().Err() == nil { // longer than drainPatience
				io.WriteString(packed, time.Now().String())
				packed.Flush()
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond)
			}
		}))
		client := startServer(t, s, h2)
		tr := newTestTransport(t, Config{Base: client.Transport, MaxAttempts: 2, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1000}})
		for range 20 {
			resp, err, o := roundTripTo(t, tr, s.URL)
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			if resp.StatusCode != 200 || o.Attempts != 2 {
				t.Errorf("h2=%v: answer %d, %+v", h2, resp.StatusCode, o)
			}
		}
	}
}

// A hook that panics while an answer is in hand left it open, and its connection
// with it.
func TestHostile_PanickingHookLeaksNothing(t *testing.T) {
	for _, kind := range []EventKind{EventAttemptDone, EventRetry, EventRefused, EventDone} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				body := &trackedBody{Reader: strings.NewReader("long")}
				last := body
				tr := newTestTransport(t, Config{MaxAttempts: 2, Base: baseFunc(func(*http.Request) (*http.Response, error) {
					last = &trackedBody{Reader: strings.NewReader("long")}
					resp := answer(503, "")
					resp.ContentLength, resp.Body = -1, last
					return resp, nil
				}), Hook: func(_ context.Context, e Event) {
					if e.Kind == kind {
						panic("hook")
					}
				}})
				func() {
					defer func() {
						if v := recover(); v != "hook" {
							t.Errorf("recovered %v", v)
						}
					}()
					tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
				}()
				if got := last.closes.Load(); got != 1 {
					t.Errorf("the answer was closed %d times", got)
				}
				p := tr.peers.enter("peer.test:80", time.Now())
				if held, others := p.held.Load(), p.inflight.Load()-1; held != 0 || others != 0 {
					t.Errorf("%d answers held, %d requests in flight", held, others)
				}
			})
		})
	}
}

// On HTTP/2 closing an answer can wait for a stalled connection, and all retries
// whose turn had come meanwhile went out in the moment when it moved again.
func TestHostile_BlockedCloseDoesNotBunchRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate = 100 // a second, a tenth of which may be retried
		start := time.Now()
		moves := make(chan struct{}) // closed when the connection does
		failsFrom, movesAt := 12*time.Second, 15*time.Second
		var mu sync.Mutex
		var retries []time.Duration
		tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			now := time.Since(start)
			if r.Header.Get(HeaderRetryCount) != "" {
				mu.Lock()
				defer mu.Unlock()
				retries = append(retries, now)
				return answer(200, ""), nil
			}
			if now < failsFrom {
				return answer(200, ""), nil
			}
			resp := answer(503, "")
			resp.ContentLength = -1
			resp.Body = closeFunc{readFunc(func([]byte) (int, error) { <-moves; return 0, io.EOF }), func() { <-moves }}
			return resp, nil
		})})
		time.AfterFunc(movesAt, func() { close(moves) })
		evenly(rate, movesAt+time.Second, func(int) {
			if resp, err, _ := roundTrip(t, tr, t.Context()); err == nil {
				resp.Body.Close()
			}
		})
		if n, at := peak(retries); n > rate/10 {
			t.Errorf("%d retries in the second up to %v, want at most %d", n, at, rate/10)
		}
		if n := between(retries, movesAt, math.MaxInt64); n < rate/10 {
			t.Errorf("%d retries after the stall: nothing has been tried", n)
		}
	})
}

// Where closing an answer takes so long that another turn is needed, and that is
// refused, the answer is gone; its caller must learn both why and of what.
func TestHostile_RefusalAfterTheAnswerIsGoneNamesBoth(t *testing.T) {
	slow := BudgetConfig{MaxWait: time.Minute}
	for _, tt := range []struct {
		name    string
		want    Reason
		budget  BudgetConfig
		timeout time.Duration
		closing time.Duration // how long it takes to close the answer
		others  int           // turns that others take meanwhile
		cancel  time.Duration // when the caller leaves; 0: never
	}{
		{"budget", ReasonBudget, slow, 0, 2 * maxOverdue, 100, 0},
		{"turn", ReasonTurn, BudgetConfig{MaxWait: -1}, 0, 2 * maxOverdue, 1, 0},
		{"deadline", ReasonDeadline, BudgetConfig{MinPerSecond: 1000}, 100 * time.Millisecond, 97 * time.Millisecond, 0, 0},
		{"deadline, the turn not overdue", ReasonDeadline, slow, 30 * time.Millisecond, 28 * time.Millisecond, 0, 0},
		{"caller leaves in the second wait", ReasonCanceled, slow, 0, 2 * maxOverdue, 1, time.Second / 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var p *peer
				closes := 0
				tr := newTestTransport(t, Config{Timeout: tt.timeout, Budget: tt.budget, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(*http.Request) (*http.Response, error) {
					resp := answer(503, "")
					resp.ContentLength = -1
					resp.Body = closeFunc{strings.NewReader("long"), func() {
						closes++
						time.Sleep(tt.closing)
						for range tt.others {
							p.budget.take(time.Now(), time.Time{})
						}
					}}
					return resp, nil
				})})
				p = tr.peers.enter("peer.test:80", time.Now())
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.cancel > 0 {
					time.AfterFunc(tt.cancel, cancel)
				}
				_, err, o := roundTrip(t, tr, ctx)
				var e *Error
				if !errors.As(err, &e) || e.Reason != tt.want || e.Attempts != 1 || o.Reason != tt.want || o.Attempts != 1 {
					t.Errorf("%v, %+v", err, o)
				}
				var last statusError
				if !errors.As(err, &last) || last != 503 {
					t.Errorf("%v: does not reach the answer", err)
				}
				if errors.Is(err, context.DeadlineExceeded) != (tt.want == ReasonDeadline) || errors.Is(err, context.Canceled) != (tt.want == ReasonCanceled) {
					t.Errorf("%v is what it is not", err)
				}
				if closes != 1 || p.held.Load() != 0 {
					t.Errorf("closed %d times, %d answers held", closes, p.held.Load())
				}
			})
		})
	}
}

// A source that flushes while it is copied from sends the header, and the
// middleware appended its own 504 to the answer that had begun.
func TestHostile_FlushInsideReadFromIsAnAnswer(t *testing.T) {
	metrics := newTestMetrics(t)
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{Timeout: 100 * time.Millisecond, Metrics: metrics, Hook: events.hook})
	s, client := mwServe(t, 1, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(w, readFunc(func([]byte) (int, error) {
			http.NewResponseController(w).Flush() // let the client have the header while data is waited for
			<-r.Context().Done()
			return 0, r.Context().Err()
		}))
	})))
	resp, body := mwDo(t, client, "GET", s.URL, nil)
	if resp.StatusCode != 200 || body != "" {
		t.Errorf("answer %d, to which %q was added", resp.StatusCode, body)
	}
	events.await(t, "arrived, expired, served 200")
	if n := counter(t, metrics, "http_server_requests_total", "code", "504"); n != 0 {
		t.Errorf("%v counted as 504", n)
	}
}

// http.MaxBytesReader behind the middleware cannot close the connection, so the
// documentation's way to put http.MaxBytesHandler outside has to.
func TestHostile_MaxBytesHandlerOutsideClosesTheConnection(t *testing.T) {
	h := mwNew(t, MiddlewareConfig{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			w.WriteHeader(413)
		}
	}))
	s, client := mwServe(t, 1, http.MaxBytesHandler(h, 10))
	resp, _ := mwDo(t, client, "POST", s.URL, strings.NewReader(strings.Repeat("x", 1000)))
	if resp.StatusCode != 413 || !resp.Close {
		t.Errorf("answer %d, closes: %v", resp.StatusCode, resp.Close)
	}
}

// Every timeout of transport and middlewares at once must leave an upgraded
// connection through a reverse proxy alone, however deep it is wrapped.
func TestHostile_ProxiedUpgradeOutlivesEveryTimeout(t *testing.T) {
	backend, _ := mwServe(t, 1, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n")
		rw.Flush()
		io.Copy(conn, rw)
	}))
	target, _ := url.Parse(backend.URL)
	tr := newTestTransport(t, Config{Timeout: 500 * time.Millisecond, AttemptTimeout: 400 * time.Millisecond, CountResends: true})
	defer tr.CloseIdleConnections()
	proxy := forwarder(target, tr)
	m := mwNew(t, MiddlewareConfig{Timeout: 450 * time.Millisecond})
	upgraded := make(map[string]*bufio.ReadWriter)
	for name, h := range map[string]http.Handler{
		"alone": proxy, "behind the middleware": m.Handler(proxy), "behind two": m.Handler(m.Handler(proxy)), "with its prefix stripped": http.StripPrefix("/a", m.Handler(proxy)),
	} {
		s, _ := mwServe(t, 1, h)
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(conn, "GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		rw := bufio.NewReadWriter(bufio.NewReader(conn), bufio.NewWriter(conn))
		if resp, err := http.ReadResponse(rw.Reader, nil); err != nil || resp.StatusCode != 101 {
			t.Fatalf("%s: %v, %v", name, resp, err)
		}
		upgraded[name] = rw
	}
	time.Sleep(600 * time.Millisecond)
	for name, rw := range upgraded {
		rw.WriteString("ping\n")
		rw.Flush()
		if line, err := rw.ReadString('\n'); line != "ping\n" {
			t.Errorf("%s: read %q, %v", name, line, err)
		}
	}
}

// An upload that goes on beside its answer, with trailers at the end, must not be
// cut when AttemptTimeout is over.
func TestHostile_BidirectionalStreamIsNotCut(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.Flush()
		buf := make([]byte, 100)
		for r.Method == "PUT" {
			n, err := r.Body.Read(buf)
			w.Write(buf[:n])
			rc.Flush()
			if err != nil {
				w.Header().Set(http.TrailerPrefix+"X-End", "yes")
				return
			}
		}
	}))
	client := startServer(t, s, true)
	const perAttempt = 400 * time.Millisecond
	tr := newTestTransport(t, Config{Base: client.Transport, Timeout: time.Minute, AttemptTimeout: perAttempt})
	warm, err, _ := roundTripTo(t, tr, s.URL) // so that the attempt's time is not spent on the handshake
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, warm)
	pr, pw := io.Pipe()
	resp, err := tr.RoundTrip(newRequest(t, t.Context(), "PUT", s.URL, pr))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		time.Sleep(perAttempt / 2)
		sent := fmt.Sprint("message ", i)
		io.WriteString(pw, sent)
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(resp.Body, got); string(got) != sent {
			t.Fatalf("read %q, %v; want %q", got, err, sent)
		}
	}
	pw.Close()
	if rest := readAll(t, resp); rest != "" || resp.Trailer.Get("X-End") != "yes" {
		t.Errorf("at the end %q, trailers %v", rest, resp.Trailer)
	}
}

// URLs without a host, or with an odd or very long one, might break the table of
// peers or the metrics' labels.
func TestHostile_OddURLsShareTheOverflowPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		metrics := newTestMetrics(t)
		tr := newTestTransport(t, Config{MaxPeers: 1, Metrics: metrics, Base: answers(status(503))})
		urls := []string{"http://first.test/", "http:///x", "http://[::1]/", "http://[fe80::1%25eth0]:1/", "http://" + strings.Repeat("h", 1000) + "/", "mailto:x"}
		for _, u := range urls {
			resp, err, o := roundTripTo(t, tr, u)
			if err != nil || resp.StatusCode != 503 || o.Attempts < 1 {
				t.Errorf("%.50s: %v, %+v", u, err, o)
			}
		}
		if n := counter(t, metrics, "stint_client_outcomes_total", "peer", overflowPeer); n != float64(len(urls)-1) {
			t.Errorf("%v requests counted for %q, want all but one of %d", n, overflowPeer, len(urls))
		}
	})
}

// http.TimeoutHandler answers beside its handler's goroutine, in which a
// middleware still works on the same exchange.
func TestHostile_TimeoutHandlerInsideAndOutside(t *testing.T) {
	const timeout = 20 * time.Millisecond
	metrics := newTestMetrics(t)
	var arrived, served atomic.Int64
	m := mwNew(t, MiddlewareConfig{Timeout: timeout, Metrics: metrics, Hook: func(_ context.Context, e Event) {
		switch e.Kind {
		case EventArrived:
			arrived.Add(1)
		case EventServed:
			served.Add(1)
		}
	}})
	tr := newTestTransport(t, Config{Backoff: Backoff{Base: 1}, Base: answers(status(503))})
	var outliving sync.WaitGroup // calls made for a request, and handlers that were given up
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		outliving.Go(func() {
			time.Sleep(timeout / 4)
			req, err := http.NewRequestWithContext(context.WithoutCancel(r.Context()), "GET", "http://peer.test/", nil)
			if err != nil {
				t.Error(err)
				return
			}
			if resp, err := tr.RoundTrip(req); err == nil {
				resp.Body.Close()
			}
		})
		if r.URL.RawQuery == "waits" {
			<-r.Context().Done()
			return
		}
		w.WriteHeader(503)
	})
	timed := func(h http.Handler) http.Handler {
		limited := http.TimeoutHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer outliving.Done()
			h.ServeHTTP(w, r)
		}), timeout, "late")
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			outliving.Add(1)
			limited.ServeHTTP(w, r)
		})
	}
	paths := []string{"/outside", "/between", "/nested"}
	mux := http.NewServeMux()
	mux.Handle(paths[0], timed(m.Handler(h)))
	mux.Handle(paths[1], m.Handler(timed(m.Handler(h))))
	mux.Handle(paths[2], m.Handler(m.Handler(h)))
	s, client := mwServe(t, 1, m.Handler(mux))
	defer client.CloseIdleConnections()
	const clients, rounds = 4, 5
	var wg sync.WaitGroup
	for range clients {
		for _, path := range paths {
			for _, query := range []string{"", "?waits"} {
				wg.Go(func() {
					for range rounds {
						resp, err := client.Post(s.URL+path+query, "text/plain", strings.NewReader("body"))
						if err != nil {
							t.Error(err)
							continue
						}
						readAll(t, resp)
						if resp.StatusCode != 503 && resp.StatusCode != 504 {
							t.Errorf("%s%s: answer %d", path, query, resp.StatusCode)
						}
					}
				})
			}
		}
	}
	wg.Wait()
	outliving.Wait()
	s.Close() // waits for what is left
	counted := int64(counter(t, metrics, "http_server_requests_total"))
	// Under load some arrive too late to be passed on.
	requests := int64(clients * rounds * len(paths) * 2)
	if arrived.Load() <= requests || served.Load() != arrived.Load() || counted != arrived.Load() {
		t.Errorf("%d arrived in the middleware, %d were served, %d counted; %d requests", arrived.Load(), served.Load(), counted, requests)
	}
}

// A handler that fans one request out to several goroutines serves the same
// *http.Request many times at once, to which the middleware must not write.
func TestHostile_OneRequestServedManyTimesAtOnce(t *testing.T) {
	var served atomic.Int32
	h := mwNew(t, MiddlewareConfig{}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if _, ok := r.Context().Deadline(); ok {
			served.Add(1)
		}
	}))
	r := mwRequest(HeaderDeadline, mwIn(time.Minute))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { h.ServeHTTP(httptest.NewRecorder(), r) })
	}
	wg.Wait()
	if got := served.Load(); got != 8 {
		t.Errorf("%d of 8 were served with the deadline", got)
	}
}

// A middleware that only reports made those inside it take the header for one that
// had been distrusted.
func TestHostile_ReportOnlyOutsideLeavesTheHeaderTrusted(t *testing.T) {
	metrics := newTestMetrics(t)
	outer := mwNew(t, MiddlewareConfig{ReportOnly: true})
	inner := mwNew(t, MiddlewareConfig{Metrics: metrics})
	sent := mwIn(time.Minute)
	tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		ms, _ := strconv.ParseInt(r.Header.Get(HeaderDeadline), 10, 64)
		if want, _ := strconv.ParseInt(sent, 10, 64); ms != want-DefaultReserve.Milliseconds() {
			t.Errorf("sent on: %d, want %d less the reserve", ms, want)
		}
		return answer(200, ""), nil
	})})
	served := 0
	h := outer.Handler(inner.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		served++
		if d, ok := r.Context().Deadline(); !ok || time.Until(d) > time.Minute {
			t.Errorf("deadline %v, %v", d, ok)
		}
		if _, err, _ := roundTrip(t, tr, r.Context()); err != nil {
			t.Error(err)
		}
	})))
	h.ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderDeadline, sent))
	late := httptest.NewRecorder()
	h.ServeHTTP(late, mwRequest(HeaderDeadline, mwIn(-time.Second)))
	mwCheckExpired(t, late.Result())
	if served != 1 {
		t.Errorf("served %d requests, want the one in time", served)
	}
	if got := counter(t, metrics, "stint_deadline_headers_total", "state", string(statePresent)); got != 2 {
		t.Errorf("%v headers counted as present, want 2", got)
	}
}

// A public edge counted every request of the outside as one whose header it
// distrusts, those that have none included.
func TestHostile_NoHeaderIsNothingToDistrust(t *testing.T) {
	metrics := newTestMetrics(t)
	m := mwNew(t, MiddlewareConfig{Metrics: metrics, TrustHeader: func(*http.Request) bool { return false }})
	h := m.Handler(m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	h.ServeHTTP(httptest.NewRecorder(), mwRequest())
	h.ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderDeadline, mwIn(time.Minute)))
	for _, state := range []headerState{stateAbsent, stateUntrusted} {
		if got := counter(t, metrics, "stint_deadline_headers_total", "state", string(state)); got != 2 {
			t.Errorf("%v counted as %s, want 2", got, state)
		}
	}
	if got := counter(t, metrics, "stint_deadline_headers_total"); got != 4 {
		t.Errorf("%v counted in all, want 4", got)
	}
}

// A request that could not be sent for its Override left the outcome of an earlier
// one in place.
func TestHostile_InvalidOverrideClearsTheOutcome(t *testing.T) {
	o := Outcome{Attempts: 7, Reason: ReasonBudget}
	ctx := WithOverride(t.Context(), Override{Outcome: &o, MaxAttempts: -1})
	_, err := newTestTransport(t, Config{Base: answers(status(200))}).RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
	var e *ConfigError
	if !errors.As(err, &e) || o != (Outcome{}) {
		t.Errorf("%v, %+v", err, o)
	}
}

// A sweep that read a peer's last use, while a request came and went, evicted the
// peer with the turn that had just been taken.
func TestHostile_EvictionSparesAPeerJustUsed(t *testing.T) {
	for range 3000 {
		cfg := Config{MaxPeers: 1}.withDefaults()
		origin := time.Now()
		ps := newPeers(&cfg, origin)
		ps.leave(ps.enter("a", origin), origin)
		later := origin.Add(time.Hour)
		var wg sync.WaitGroup
		wg.Go(func() {
			used := ps.enter("a", later)
			ps.leave(used, later)
			if ps.enter("a", later) != used {
				t.Error("evicted within an instant of its use")
			}
		})
		wg.Go(func() { ps.enter("b", later) })
		wg.Wait()
	}
}

// http.Client's redirects, cookies and timeout on top of retries of each hop must
// find body, cookies and Response.Request as over net/http alone.
func TestHostile_RedirectsOverRetriesKeepBodyAndCookies(t *testing.T) {
	var n atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b, err := io.ReadAll(r.Body); string(b) != "body" {
			t.Errorf("%s: read %q, %v", r.URL, b, err)
		}
		switch c, _ := r.Cookie("c"); {
		case n.Add(1)%2 == 1:
			w.WriteHeader(503)
		case r.URL.Path == "/":
			http.SetCookie(w, &http.Cookie{Name: "c", Value: "1"})
			http.Redirect(w, r, "/next", 307)
		case c == nil:
			t.Error("no cookie")
		default:
			io.WriteString(w, "fine")
		}
	}))
	client := startServer(t, s, false)
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	tr := newTestTransport(t, Config{Base: client.Transport, Timeout: 20 * time.Second, AttemptTimeout: 10 * time.Second, Keys: KeysHonoured, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 100}})
	resp, err := (&http.Client{Transport: tr, Jar: jar, Timeout: 30 * time.Second}).Post(s.URL, "text/plain", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, resp); got != "fine" || resp.Request.URL.Path != "/next" || n.Load() != 4 {
		t.Errorf("read %q from %v after %d arrivals", got, resp.Request.URL, n.Load())
	}
}

// A randomBody waits before each Read, gives a few bytes, can fail, and ends a Read
// when it is closed.
type randomBody struct {
	trackedBody
	delay  time.Duration
	fails  bool // after the first bytes
	closed chan struct{}
}

func newSlowBody(content string, delay time.Duration, fails bool) *randomBody {
	return &randomBody{trackedBody: trackedBody{Reader: strings.NewReader(content)}, delay: delay, fails: fails, closed: make(chan struct{})}
}

func (b *randomBody) Read(p []byte) (int, error) {
	if b.delay > 0 {
		timer := time.NewTimer(b.delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-b.closed:
		}
	}
	if b.fails && b.reads.Load() > 0 {
		return 0, errors.New("body failed")
	}
	return b.trackedBody.Read(p[:min(len(p), 3)])
}

func (b *randomBody) Close() error {
	b.trackedBody.Close()
	if b.closes.Load() == 1 {
		close(b.closed)
	}
	return nil
}

// A randomRun sends one random request through a random Transport to a base that
// does all that a base may do and some that it may not.
type randomRun struct {
	*rand.Rand
	outcome  Outcome
	attempts []context.Context // of each
	late     int               // attempts that began after their deadline
	headers  []string          // wrong ones
	answers  []*randomBody     // in turn
	bodies   []*randomBody     // of the request
}

func oneOf[T any](r *randomRun, list ...T) T { return list[r.IntN(len(list))] }

func (r *randomRun) oneIn(n int) bool { return r.IntN(n) == 0 }

func (r *randomRun) config() Config {
	const ms = time.Millisecond
	c := Config{
		Timeout:        oneOf(r, 0, 0, 100*ms, time.Second, 3*ms, 5*ms),
		AttemptTimeout: oneOf(r, 0, 0, 20*ms, ms),
		MaxAttempts:    1 + r.IntN(4),
		Backoff:        Backoff{Base: 30 * ms},
		Budget:         BudgetConfig{MaxWait: oneOf(r, 0, -1, 100*ms), MinPerSecond: oneOf(r, 0.0, 100)},
		Keys:           oneOf(r, 0, KeysAuto, KeysHonoured, KeysOff),
		Base:           r,
	}
	if r.oneIn(5) {
		c.RetryStatus = func(s int) bool { return s == 200 || s == 101 || s == 404 }
	}
	return c
}

// request returns a request and what releases its contexts.
func (r *randomRun) request(t *testing.T) (*http.Request, context.CancelFunc) {
	ctx, cancel := context.WithCancel(t.Context())
	if r.oneIn(3) {
		time.AfterFunc(time.Duration(r.IntN(100))*time.Millisecond, cancel)
	}
	release := cancel
	if r.oneIn(2) {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, time.Duration(r.IntN(300))*time.Millisecond)
		release = func() { stop(); cancel() }
	}
	req := newRequest(t, WithOverride(ctx, Override{Outcome: &r.outcome}), oneOf(r, "GET", "PUT", "POST"), "http://peer.test/", nil)
	fresh := func() (io.ReadCloser, error) {
		b := newSlowBody("request body", oneOf(r, 0, 0, 0, 10*time.Millisecond), r.oneIn(8))
		r.bodies = append(r.bodies, b)
		return b, nil
	}
	if r.oneIn(2) {
		req.Body, _ = fresh()
		req.ContentLength = 12
		if !r.oneIn(4) {
			req.GetBody = func() (io.ReadCloser, error) {
				if r.oneIn(6) {
					return nil, errors.New("GetBody failed")
				}
				return fresh()
			}
		}
	}
	if r.oneIn(4) {
		gone := make(chan struct{})
		req.Cancel = gone
		time.AfterFunc(time.Duration(r.IntN(100))*time.Millisecond, func() { close(gone) })
	}
	return req, release
}

// RoundTrip is the base.
func (r *randomRun) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	r.attempts = append(r.attempts, ctx)
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		r.late++
	}
	if lines, ok := req.Header[HeaderTimeout]; ok {
		if ms, err := strconv.Atoi(strings.Join(lines, ",")); err != nil || ms < 1 {
			r.headers = append(r.headers, fmt.Sprintf("%s %q", HeaderTimeout, lines))
		}
	}
	if body := req.Body; body != nil {
		read := func() { io.Copy(io.Discard, body) }
		switch r.IntN(3) {
		case 0: // it is still at it when its answer is there
			go func() {
				defer body.Close()
				read()
				time.Sleep(7 * time.Millisecond)
			}()
		case 1:
			read()
			body.Close()
		case 2:
			body.Close()
		}
	}
	took := time.Duration(r.IntN(40)) * time.Millisecond
	if r.oneIn(3) {
		time.Sleep(took) // deaf to its context
	} else if stormSleep(ctx, took) != nil {
		return nil, oneOf(r, ctx.Err(), context.Cause(ctx))
	}
	end := r.IntN(8)
	switch end {
	case 0, 1:
		return nil, errors.New("lost")
	case 2:
		return nil, nil
	}
	body := newSlowBody("answer", oneOf(r, 0, 0, 15*time.Millisecond, 200*time.Millisecond), false)
	r.answers = append(r.answers, body)
	resp := answer(oneOf(r, 200, 503, 503, 503, 429, 404, 504, 101), "")
	resp.Body = body
	resp.ContentLength = oneOf[int64](r, -1, 0, 5, 9, maxKept+1)
	if r.oneIn(6) {
		resp.Header.Set("Retry-After", oneOf(r, "0", "1", "2"))
	}
	if r.oneIn(6) {
		resp.Header.Set(HeaderShouldRetry, oneOf(r, "true", "false"))
	}
	if r.oneIn(8) {
		resp.Header.Set(HeaderDeadlineExpired, "1")
	}
	if end == 3 {
		return resp, errors.New("as well")
	}
	return resp, nil
}

// check sends the request and returns what does not hold of it.
func (r *randomRun) check(t *testing.T) (wrong []string) {
	want := func(ok bool, format string, args ...any) {
		if !ok {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	config := r.config()
	tr := newTestTransport(t, config)
	p := tr.peers.enter("peer.test:80", time.Now())
	req, release := r.request(t)
	defer release()

	resp, err := tr.RoundTrip(req)
	if resp != nil {
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	time.Sleep(time.Second) // for a base that is still at the body
	synctest.Wait()

	n, o := len(r.attempts), r.outcome
	want((resp == nil) != (err == nil), "response %v and error %v", resp, err)
	want(o.Attempts == n && n <= config.MaxAttempts, "%d attempts of %d, %+v", n, config.MaxAttempts, o)
	want(r.late == 0, "%d attempts began after their deadline", r.late)
	want(len(r.headers) == 0, "%v", r.headers)
	var e *Error
	if errors.As(err, &e) {
		want(e.Reason == o.Reason && e.Reason != "", "reason %q, %+v", e.Reason, o)
		want(e.Reason != ReasonCanceled || !e.Timeout(), "%v is a timeout", err)
		want(e.Reason != ReasonDeadline || e.Timeout() && errors.Is(err, context.DeadlineExceeded), "%v is no timeout", err)
	}
	for i, b := range r.answers {
		want(b.closes.Load() == 1, "answer %d of %d was closed %d times", i+1, len(r.answers), b.closes.Load())
	}
	for i, b := range r.bodies {
		want(b.closes.Load() == 1, "body %d of %d was closed %d times", i+1, len(r.bodies), b.closes.Load())
	}
	for i, ctx := range r.attempts {
		want(config.AttemptTimeout == 0 || ctx.Err() != nil, "the context of attempt %d is alive", i+1)
	}
	want(p.held.Load() == 0, "%d answers are held", p.held.Load())
	want(p.inflight.Load() == 1, "%d requests are in flight", p.inflight.Load()-1)
	return wrong
}

// What no single test thought of: whatever caller and base do, there is one result,
// each body and answer is closed once, and nothing is held in the end.
func TestHostile_RandomRequestsKeepTheContract(t *testing.T) {
	seeds := uint64(3000)
	if raceEnabled || testing.Short() {
		seeds = 400
	}
	attempts, reasons := make(map[int]int), make(map[Reason]int)
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			r := &randomRun{Rand: rand.New(rand.NewPCG(seed, 7))}
			for _, wrong := range r.check(t) {
				t.Errorf("seed %d: %s", seed, wrong)
			}
			attempts[len(r.attempts)]++
			reasons[r.outcome.Reason]++
		})
	}
	// Or it would be about nothing.
	for n := range 4 {
		if attempts[n] == 0 {
			t.Errorf("no request was sent %d times", n)
		}
	}
	for _, reason := range []Reason{"", ReasonAttempts, ReasonCanceled, ReasonDeadline, ReasonNotIdempotent, ReasonNotReplayable, ReasonToldNotTo, ReasonTurn} {
		if reasons[reason] == 0 {
			t.Errorf("no request ended with the reason %q", reason)
		}
	}
}
