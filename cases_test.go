package stint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// The tests here are named after public bug reports of other projects, O-01 to
// O-40, whose failures must not happen here. Others of the same series stand
// beside what they test.

func eachProtocol(t *testing.T, f func(t *testing.T, h2 bool)) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2=", h2), func(t *testing.T) { f(t, h2) })
	}
}

// O-03: with a context for each attempt, each attempt gets the whole body, and
// what the caller holds is the same values as before.
func TestO03_EveryAttemptIsRewoundFromTheCallersRequest(t *testing.T) {
	eachProtocol(t, func(t *testing.T, h2 bool) {
		for _, method := range []string{"PUT", "POST"} {
			whole := strings.Repeat("0123456789", 20_000)
			var got []string
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				b, err := io.ReadAll(r.Body)
				if err != nil || r.ContentLength != int64(len(whole)) {
					t.Errorf("length %d, %v", r.ContentLength, err)
				}
				if got = append(got, string(b)); len(got) < 3 {
					w.WriteHeader(503)
				}
			}))
			client := startServer(t, s, h2)
			tr := newTestTransport(t, Config{Base: client.Transport, Timeout: time.Minute, AttemptTimeout: 20 * time.Second, Keys: KeysHonoured, Budget: BudgetConfig{MinPerSecond: 1e4}})
			req := newRequest(t, t.Context(), method, s.URL, strings.NewReader(whole))
			changed := snapshot(req)
			resp, err := tr.RoundTrip(req)
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("%v, %v", resp, err)
			}
			readAll(t, resp)
			for i, b := range got {
				if b != whole {
					t.Errorf("%s: attempt %d had %d bytes", method, i+1, len(b))
				}
			}
			if names := changed(); len(got) != 3 || len(names) > 0 {
				t.Errorf("%s: %d attempts; changed in the caller's request: %v", method, len(got), names)
			}
		}
	})
}

// O-09 where the answer is held open: whatever the moment at which the caller
// leaves, it is returned or closed, once.
func TestO09_HeldAnswerAsTheContextEnds(t *testing.T) {
	for i := range 1000 {
		ctx, cancel := context.WithCancel(t.Context())
		var closed atomic.Int32
		tr := newTestTransport(t, Config{Timeout: time.Minute, Backoff: Backoff{Base: time.Millisecond, Max: time.Millisecond}, Base: baseFunc(func(*http.Request) (*http.Response, error) {
			if i%2 == 0 {
				go cancel()
			} else {
				time.AfterFunc(time.Duration(i)*time.Microsecond, cancel)
			}
			resp := answer(503, "")
			resp.ContentLength = -1
			resp.Body = closeFunc{strings.NewReader("held"), func() { closed.Add(1) }}
			return resp, nil
		})})
		var o Outcome
		resp, err := tr.RoundTrip(newRequest(t, WithOverride(ctx, Override{Outcome: &o}), "GET", "http://peer.test/", nil))
		cancel()
		if err == nil {
			resp.Body.Close()
		} else if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if int(closed.Load()) != o.Attempts {
			t.Fatalf("%v: %d attempts, %d answers closed", err, o.Attempts, closed.Load())
		}
	}
}

// O-16, its second case: each attempt takes longer than what is left. No attempt
// begins that cannot end, and RoundTrip returns at the deadline.
func TestO16_AttemptsLongerThanWhatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		metrics := newTestMetrics(t)
		begun := 0
		tr := newTestTransport(t, Config{MaxAttempts: 1000, Metrics: metrics, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1e5}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			begun++
			timer := time.NewTimer(400 * time.Millisecond)
			defer timer.Stop()
			select {
			case <-timer.C:
				return answer(503, ""), nil
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
		})})
		call := func(timeout time.Duration) (took time.Duration, o Outcome, err error) {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			start := time.Now()
			resp, err, o := roundTrip(t, tr, ctx)
			if resp != nil {
				resp.Body.Close()
			}
			return time.Since(start), o, err
		}
		// The first attempt alone is too long.
		if took, o, err := call(300 * time.Millisecond); took != 300*time.Millisecond || o.Attempts != 1 || o.Reason != ReasonDeadline || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v after %v, %+v", err, took, o)
		}
		// With nothing known of the peer, a second one begins and is cut off at
		// the deadline, not after it.
		if took, o, err := call(700 * time.Millisecond); took != 700*time.Millisecond || o.Attempts != 2 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v after %v, %+v", err, took, o)
		}
		// Once it is known how long an answer takes, what cannot end is not begun.
		for range DefaultMinSamples {
			tr.peers.enter("peer.test:80", time.Now()).latency.get("").record(time.Now(), 400*time.Millisecond)
		}
		if took, o, err := call(700 * time.Millisecond); took != 400*time.Millisecond || o.Attempts != 1 || o.Reason != ReasonDeadline || err != nil {
			t.Errorf("%v after %v, %+v", err, took, o)
		}
		if got := counter(t, metrics, "http_client_requests_total"); got != float64(begun) || begun != 4 {
			t.Errorf("%v attempts counted, %d begun", got, begun)
		}
	})
}

// O-18: what RoundTrip makes of Retry-After in all its forms: future dates are
// waited for, everything else means a normal backoff, never an immediate retry.
func TestO18_RetryAfterThroughTheTransport(t *testing.T) {
	const backoff = DefaultBackoffBase / 2
	in := func(layout string, d time.Duration) string { return time.Now().Add(d).UTC().Format(layout) }
	for _, tt := range []struct {
		name   string
		header func() []string // names and values in turn; in the bubble
		hint   time.Duration
		none   bool // the answer comes back at once: longer than allowed
	}{
		{name: "IMF-fixdate", header: func() []string { return []string{"Retry-After", in(http.TimeFormat, 2*time.Second)} }, hint: 2 * time.Second},
		{name: "RFC 850", header: func() []string { return []string{"Retry-After", in("Monday, 02-Jan-06 15:04:05 GMT", 2*time.Second)} }, hint: 2 * time.Second},
		{name: "asctime", header: func() []string { return []string{"Retry-After", in(time.ANSIC, 2*time.Second)} }, hint: 2 * time.Second},
		{name: "an hour ago", header: func() []string { return []string{"Retry-After", in(http.TimeFormat, -time.Hour)} }},
		{name: "another zone", header: func() []string {
			return []string{"Retry-After", time.Now().Add(2 * time.Second).In(time.FixedZone("CET", 3600)).Format(time.RFC1123)}
		}},
		{name: "garbage", header: func() []string { return []string{"Retry-After", "soon \xff\xfe"} }},
		{name: "empty", header: func() []string { return []string{"Retry-After", ""} }},
		{name: "negative", header: func() []string { return []string{"Retry-After", "-5"} }},
		{name: "fraction", header: func() []string { return []string{"Retry-After", "1.5"} }},
		{name: "zero", header: func() []string { return []string{"Retry-After", "0"} }},
		{name: "two lines", header: func() []string { return []string{"Retry-After", "1", "Retry-After", "3"} }, hint: 3 * time.Second},
		{name: "two lines, the other way", header: func() []string { return []string{"Retry-After", "3", "Retry-After", "1"} }, hint: 3 * time.Second},
		{name: "two lines, one past", header: func() []string {
			return []string{"Retry-After", "2", "Retry-After", in(http.TimeFormat, -time.Hour)}
		}, hint: 2 * time.Second},
		{name: "two lines, one unusable", header: func() []string { return []string{"Retry-After", "-3", "Retry-After", "1"} }, hint: time.Second},
		{name: "milliseconds", header: func() []string { return []string{"retry-after-ms", "1500.5"} }, hint: 1500*time.Millisecond + 500*time.Microsecond},
		{name: "the peer's clock a minute behind", header: func() []string {
			return []string{"Retry-After", in(http.TimeFormat, 2*time.Second-time.Minute), "Date", in(http.TimeFormat, -time.Minute)}
		}, hint: 2 * time.Second},
		{name: "the peer's clock a day ahead", header: func() []string {
			return []string{"Retry-After", in(http.TimeFormat, 2*time.Second+24*time.Hour), "Date", in(http.TimeFormat, 24*time.Hour)}
		}, hint: 2 * time.Second},
		{name: "a date beyond what is allowed", header: func() []string { return []string{"Retry-After", in(http.TimeFormat, time.Minute)} }, none: true},
		{name: "100,000 digits", header: func() []string { return []string{"Retry-After", strings.Repeat("9", 100_000)} }, none: true},
	} {
		for _, code := range []int{429, 503} {
			t.Run(fmt.Sprint(tt.name, " ", code), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var at []time.Duration
					start := time.Now()
					tr := newTestTransport(t, Config{Base: baseFunc(func(*http.Request) (*http.Response, error) {
						if at = append(at, time.Since(start)); len(at) == 1 {
							return answer(code, "", tt.header()...), nil
						}
						return answer(200, ""), nil
					})})
					tr.jitter = func() float64 { return .5 }
					resp, err, o := roundTrip(t, tr, t.Context())
					if err != nil {
						t.Fatal(err)
					}
					if tt.none {
						if resp.StatusCode != code || o.Reason != ReasonRetryAfter || time.Since(start) != 0 {
							t.Errorf("%d, %+v after %v", resp.StatusCode, o, time.Since(start))
						}
						return
					}
					if want := tt.hint + backoff; len(at) != 2 || at[1] != want {
						t.Errorf("attempts at %v, want the second at %v", at, want)
					}
				})
			})
		}
	}
}

// O-19: a hint that overflows a duration is longer than allowed, on every form
// of it, and the answer goes back at once with nothing spent.
func TestO19_HintsThatOverflow(t *testing.T) {
	for _, header := range [][]string{
		{"Retry-After", "9223372037"}, {"Retry-After", "18446744074"}, {"Retry-After", "99999999999999999999"},
		{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT"}, {"retry-after-ms", "9223372036855"}, {"retry-after-ms", "18446744073709552.5"},
		{"Retry-After", "1", "retry-after-ms", "99999999999999999999999"},
	} {
		for _, timeout := range []time.Duration{0, 200 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				tr := newTestTransport(t, Config{Base: answers(status(503, header...)), Timeout: timeout})
				resp, err, o := roundTrip(t, tr, t.Context())
				if err != nil || resp.StatusCode != 503 || o != (Outcome{Attempts: 1, Reason: ReasonRetryAfter}) || time.Since(start) != 0 {
					t.Errorf("%q, %v: %+v after %v", header, err, o, time.Since(start))
				}
				if p := tr.peers.enter("peer.test:80", start); total(&p.budget.retries) != 0 {
					t.Errorf("%q: budget spent", header)
				}
			})
		}
	}
}

// O-21: the wall clock is stepped in the middle of a backoff, and of a wait for
// a turn. Waits, deadline, header, budget and histogram do not notice.
func TestO21_WallClockSteppedInTheMiddleOfABackoff(t *testing.T) {
	type attempt struct {
		at                  time.Duration
		deadline, companion string
	}
	run := func(t *testing.T, step time.Duration, zone *time.Location, header func() []string) (got []attempt, took time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			var stepped atomic.Bool
			tr := newTestTransport(t, Config{Timeout: 20 * time.Second, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				got = append(got, attempt{at: time.Since(start), deadline: r.Header.Get(HeaderDeadline), companion: r.Header.Get(HeaderTimeout)})
				return answer(503, "", header()...), nil
			})})
			tr.jitter = func() float64 { return .5 }
			tr.wall = func(now time.Time) time.Time {
				if stepped.Load() {
					now = now.Add(step)
				}
				return now.In(zone)
			}
			time.AfterFunc(time.Second, func() { stepped.Store(true) })
			resp, err, o := roundTrip(t, tr, t.Context())
			if err != nil || o.Attempts != 3 || o.Reason != ReasonAttempts {
				t.Errorf("%v: %v, %+v", step, err, o)
			} else {
				resp.Body.Close()
			}
			took = time.Since(start)
			p := tr.peers.enter("peer.test:80", time.Now())
			if n := total(&p.budget.retries); n != 2 {
				t.Errorf("%v: %d turns", step, n)
			}
			// One more at once: its turn is where it is without a step.
			_, _, o = roundTrip(t, tr, WithOverride(t.Context(), Override{MaxAttempts: 2}))
			took += time.Since(start)
		})
		return got, took
	}
	summer, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		summer = time.FixedZone("summer", 7200) // no zone data here
	}
	for name, header := range map[string]func() []string{
		"hint":    func() []string { return []string{"Retry-After", "2"} },
		"no hint": func() []string { return nil }, // 25 ms, then a second for the turn: the step falls into that
	} {
		want, wantTook := run(t, 0, time.UTC, header)
		for _, step := range []time.Duration{time.Hour, -time.Hour, 30 * time.Second, -30 * time.Second, 365 * 24 * time.Hour} {
			for _, zone := range []*time.Location{time.UTC, summer} {
				got, took := run(t, step, zone, header)
				if took != wantTook {
					t.Errorf("%s, %v: took %v, want %v", name, step, took, wantTook)
				}
				// The fourth and fifth belong to a request that began after the
				// step: its header follows the clock, as every new one does.
				if !reflect.DeepEqual(got[:3], want[:3]) {
					t.Errorf("%s, %v: attempts %+v, want %+v", name, step, got[:3], want[:3])
				}
				for i := range got {
					if got[i].at != want[i].at || got[i].companion != want[i].companion {
						t.Errorf("%s, %v: attempt %d at %v with %s ms, want %v with %s", name, step, i+1, got[i].at, got[i].companion, want[i].at, want[i].companion)
					}
				}
			}
		}
	}
}

// O-22: a request that may have run is not sent again unless somebody made that
// safe, whether the answer was lost or late, on both protocols.
func TestO22_MayHaveRun(t *testing.T) {
	key := http.Header{"Idempotency-Key": {"k"}}
	for _, tt := range []struct {
		method string
		config Config
		header http.Header
		want   int
	}{
		{"POST", Config{}, nil, 1},
		{"PATCH", Config{}, nil, 1},
		{"POST", Config{Keys: KeysOff}, nil, 1},
		{"PATCH", Config{Keys: KeysOff}, nil, 1},
		{"LOCK", Config{}, nil, 1},
		{"POST", Config{Keys: KeysHonoured}, nil, 2},
		{"POST", Config{}, key, 2},
		{"PATCH", Config{Keys: KeysOff}, key, 2},
		{"LOCK", Config{}, key, 2},
		{"PUT", Config{}, nil, 2},
		{"DELETE", Config{}, nil, 2},
		{"GET", Config{}, nil, 2},
	} {
		for _, late := range []bool{false, true} {
			for _, h2 := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s keys=%v caller's=%v late=%v h2=%v", tt.method, tt.config.Keys, tt.header != nil, late, h2), func(t *testing.T) {
					t.Parallel()
					var arrivals, whole atomic.Int32
					s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						if r.URL.Path == "/warm" {
							return
						}
						n := arrivals.Add(1)
						if b, _ := io.ReadAll(r.Body); string(b) == "charge" {
							whole.Add(1)
						}
						switch {
						case n > 1:
						case late:
							<-r.Context().Done()
						default:
							panic(http.ErrAbortHandler) // the connection, or the stream, is reset
						}
					}))
					s.Config.ErrorLog = quiet
					client := startServer(t, s, h2)
					cfg := tt.config
					cfg.Base, cfg.MaxAttempts = client.Transport, 2
					if late {
						cfg.AttemptTimeout = 300 * time.Millisecond
					}
					tr := newTestTransport(t, cfg)
					if h2 { // on HTTP/1.1 net/http resends a GET over a used connection
						warm, err := tr.RoundTrip(newRequest(t, WithOverride(t.Context(), Override{AttemptTimeout: -1}), "GET", s.URL+"/warm", nil))
						if err != nil {
							t.Fatal(err)
						}
						readAll(t, warm)
					}
					req := newRequest(t, t.Context(), tt.method, s.URL, strings.NewReader("charge"))
					maps.Copy(req.Header, tt.header)
					resp, err := tr.RoundTrip(req)
					if err == nil {
						readAll(t, resp)
					}
					if got := int(arrivals.Load()); got != tt.want || (err == nil) != (tt.want == 2) || int(whole.Load()) != got {
						t.Errorf("%d arrivals, %d of them whole, want %d (%v)", got, whole.Load(), tt.want, err)
					}
				})
			}
		}
	}
}

// O-23, its second half: Retry-After on an answer that is no failure repeats
// nothing, on any method.
func TestO23_SuccessIsNeverRepeated(t *testing.T) {
	for _, method := range []string{"GET", "PUT", "POST"} {
		for _, code := range []int{200, 201, 202, 204, 206, 301, 304, 400, 404, 409, 500} {
			synctest.Test(t, func(t *testing.T) {
				n := 0
				tr := newTestTransport(t, Config{Keys: KeysHonoured, Base: baseFunc(func(*http.Request) (*http.Response, error) {
					n++
					return answer(code, "", "Retry-After", "1", "Idempotency-Key", "k"), nil
				})})
				start := time.Now()
				resp, err := tr.RoundTrip(newRequest(t, t.Context(), method, "http://peer.test/", nil))
				if err != nil || resp.StatusCode != code || n != 1 || time.Since(start) != 0 {
					t.Errorf("%s %d: %d attempts, %v", method, code, n, err)
				}
			})
		}
	}
}

// O-24: one request value in many goroutines at once, over real sockets: no race,
// the request stays as it was, each has a key and a deadline of its own.
func TestO24_OneRequestValueManyCallers(t *testing.T) {
	eachProtocol(t, func(t *testing.T, h2 bool) {
		var mu sync.Mutex
		keys, deadlines := make(map[string]int), 0
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			k := r.Header.Get(HeaderIdempotencyKey)
			keys[k]++
			deadlines += len(r.Header[HeaderDeadline])
			if keys[k] == 1 {
				w.WriteHeader(425) // so that there are retries too
			}
		}))
		s.Config.ErrorLog = quiet // 50 handshakes at once: those not needed are given up
		client := startServer(t, s, h2)
		tr := newTestTransport(t, Config{Base: client.Transport, Timeout: time.Minute, AttemptTimeout: time.Minute, Budget: BudgetConfig{MinPerSecond: 1e4}})
		shared := newRequest(t, t.Context(), "POST", s.URL, nil)
		shared.Header["x-request-deadline"] = []string{"99999999999999"}
		shared.Header["X-Mine"] = []string{"a"}
		changed := snapshot(shared)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				resp, err := tr.RoundTrip(shared)
				if err != nil || resp.StatusCode != 200 {
					t.Errorf("%v, %v", resp, err)
					return
				}
				readAll(t, resp)
			})
		}
		wg.Wait()
		if names := changed(); len(names) > 0 {
			t.Errorf("changed: %v", names)
		}
		if len(keys) != 50 || deadlines != 100 {
			t.Errorf("%d keys and %d deadlines in 100 attempts", len(keys), deadlines)
		}
		for k, n := range keys {
			if n != 2 || k == "" {
				t.Errorf("key %q in %d attempts", k, n)
			}
		}
	})
}

// O-31: what arrives, attempt by attempt, on both protocols.
func TestO31_HeadersAsTheyArrive(t *testing.T) {
	eachProtocol(t, func(t *testing.T, h2 bool) {
		var got []http.Header
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if got = append(got, r.Header); len(got) < 3 {
				time.Sleep(30 * time.Millisecond)
				w.WriteHeader(503)
			}
		}))
		client := startServer(t, s, h2)
		tr := newTestTransport(t, Config{Base: client.Transport, AttemptTimeout: 10 * time.Second, Budget: BudgetConfig{MinPerSecond: 1e4}})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		req := newRequest(t, ctx, "GET", s.URL, nil)
		deadline, _ := ctx.Deadline()
		req.Header.Set(HeaderDeadline, strconv.FormatInt(deadline.Add(time.Hour).UnixMilli(), 10))
		req.Header["x-request-deadline"] = []string{"soon", strconv.FormatInt(deadline.Add(2*time.Hour).UnixMilli(), 10)}
		req.Header["X-REQUEST-TIMEOUT-MS"] = []string{"3620000"}
		req.Header["x-retry-count"] = []string{"5"}
		resp, err := tr.RoundTrip(req)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v, %v", resp, err)
		}
		readAll(t, resp)
		// Lowered from the copy's number by whole milliseconds, twice rounded.
		want := deadline.Add(-DefaultReserve).UnixMilli()
		left := 20_000
		for i, h := range got {
			d, err := strconv.ParseInt(h.Get(HeaderDeadline), 10, 64)
			if err != nil || len(h[HeaderDeadline]) != 1 || d > want || d < want-2 || h.Get(HeaderDeadline) != got[0].Get(HeaderDeadline) {
				t.Errorf("attempt %d: %q, want %d", i+1, h[HeaderDeadline], want)
			}
			ms, err := strconv.Atoi(h.Get(HeaderTimeout))
			if err != nil || len(h[HeaderTimeout]) != 1 || i > 0 && ms > left-30 || ms > left {
				t.Errorf("attempt %d: %q ms left, %d before", i+1, h[HeaderTimeout], left)
			}
			left = ms
			if c := h.Get(HeaderRetryCount); i == 0 && c != "" || i > 0 && c != strconv.Itoa(i) {
				t.Errorf("attempt %d: retry count %q", i+1, h[HeaderRetryCount])
			}
		}
	})
}

// O-34: clients and servers that are made at the same time on one registry share
// one set, and all of them count in it. A name that is taken is an error when the
// set is registered; the transport works all the same.
func TestO34_TransportsAndMiddlewaresShareARegistry(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	register := func(c MetricsConfig) *Metrics {
		m := mustMetrics(t, c)
		err := reg.Register(m)
		var already prometheus.AlreadyRegisteredError
		switch {
		case errors.As(err, &already):
			return already.ExistingCollector.(*Metrics)
		case err != nil:
			t.Errorf("register: %v", err)
		}
		return m
	}
	const sets, each = 4, 25
	var wg sync.WaitGroup
	for i := range sets {
		wg.Go(func() {
			mw, err := NewMiddleware(MiddlewareConfig{Service: "s", Metrics: register(MetricsConfig{NativeHistograms: i%2 == 0})})
			if err != nil {
				t.Error(err)
				return
			}
			s := httptest.NewServer(mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })))
			defer s.Close()
			tr := newTestTransport(t, Config{Metrics: register(MetricsConfig{}), MaxAttempts: 1 + i, Peer: func(*http.Request) string { return "p" }})
			defer tr.CloseIdleConnections()
			for range each {
				resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", s.URL, nil))
				if err != nil {
					t.Error(err)
					return
				}
				readAll(t, resp)
				if _, err := reg.Gather(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s, _ := gather(t, reg)
	s.check(t, `http_client_requests_total{peer="p"}`, sets*each)
	s.check(t, `stint_client_outcomes_total{outcome="ok",peer="p"}`, sets*each)
	s.check(t, `http_server_requests_total{code="200",service="s"}`, sets*each)

	taken := prometheus.NewRegistry()
	taken.MustRegister(prometheus.NewCounter(prometheus.CounterOpts{Name: "retry_amplification_factor", Help: "Another."}))
	m := mustMetrics(t, MetricsConfig{})
	if err := taken.Register(m); err == nil {
		t.Error("a clash is no error")
	}
	for _, metrics := range []*Metrics{m, nil, {}} {
		tr := newTestTransport(t, Config{Metrics: metrics, Base: answers(status(503), status(200))})
		if resp, err, _ := roundTrip(t, tr, t.Context()); err != nil || resp.StatusCode != 503 && resp.StatusCode != 200 {
			t.Error(err)
		}
	}
	if _, err := taken.Gather(); err != nil {
		t.Errorf("the other's scrape is broken: %v", err)
	}
}

// O-35: every value of every client metric after a fixed script over real
// sockets: 2 successes, 1 retried success, 1 whose attempts are used up, 1 stopped
// by the budget, 1 by admission, 1 cancelled. Seven requests, ten attempts.
func TestO35_EveryValueAfterAScript(t *testing.T) {
	sampled := func(context.Context) prometheus.Labels { return prometheus.Labels{"trace_id": "4bf92f3577b34da6"} }
	for name, c := range map[string]MetricsConfig{"plain": {}, "exemplars": {Exemplar: sampled}, "native": {NativeHistograms: true}} {
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " h2=", h2), func(t *testing.T) {
				t.Parallel()
				const slow = 400 * time.Millisecond
				var arrivals atomic.Int32
				var flaky atomic.Bool
				hanging := make(chan struct{})
				s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					arrivals.Add(1)
					switch r.URL.Path {
					case "/slow":
						time.Sleep(slow)
					case "/flaky":
						if flaky.CompareAndSwap(false, true) {
							w.WriteHeader(503)
						}
					case "/down":
						w.WriteHeader(503)
					case "/hang":
						close(hanging)
						<-r.Context().Done()
					}
				}))
				client := startServer(t, s, h2)
				m := mustMetrics(t, c)
				tr := newTestTransport(t, Config{
					Base: client.Transport, Metrics: m, Peer: func(*http.Request) string { return "ledger:8080" },
					Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1000}, Admission: AdmissionConfig{MinSamples: 1},
				})
				call := func(ctx context.Context, path string, wantStatus int, want Outcome) {
					t.Helper()
					var o Outcome
					resp, err := tr.RoundTrip(newRequest(t, WithOverride(ctx, Override{Outcome: &o}), "GET", s.URL+path, nil))
					got := 0
					if err == nil {
						got = resp.StatusCode
						readAll(t, resp)
					}
					if got != wantStatus || o != want {
						t.Errorf("%s: %d, %v, %+v; want %d, %+v", path, got, err, o, wantStatus, want)
					}
				}
				call(t.Context(), "/slow", 200, Outcome{Attempts: 1})
				call(t.Context(), "/", 200, Outcome{Attempts: 1})
				call(t.Context(), "/flaky", 200, Outcome{Attempts: 2})
				call(t.Context(), "/down", 503, Outcome{Attempts: 3, Reason: ReasonAttempts})
				// Admission: an answer takes 400 ms here, and less is left.
				ctx, cancel := context.WithTimeout(t.Context(), slow-50*time.Millisecond)
				call(ctx, "/down", 503, Outcome{Attempts: 1, Reason: ReasonDeadline})
				cancel()
				p := tr.peers.enter("ledger:8080", time.Now())
				for range 10_000 { // what others have spent
					p.budget.retries.add(p.budget.epoch(time.Now()))
				}
				call(t.Context(), "/down", 503, Outcome{Attempts: 1, Reason: ReasonBudget})
				ctx, cancel = context.WithCancel(t.Context())
				go func() {
					<-hanging
					cancel()
				}()
				call(ctx, "/hang", 0, Outcome{Attempts: 1, Reason: ReasonCanceled})

				golden, err := os.Open("testdata/metrics_client.golden")
				if err != nil {
					t.Fatal(err)
				}
				defer golden.Close()
				if err := testutil.CollectAndCompare(m, golden); err != nil {
					t.Error(err)
				}
				samples, _ := scrape(t, m)
				const peer = `{peer="ledger:8080"}`
				samples.check(t, "http_client_requests_total"+peer, float64(arrivals.Load()))
				if got := samples.sum("stint_client_outcomes_total"); got != 7 {
					t.Errorf("%v outcomes of 7 requests", got)
				}
				if n, ok := samples["stint_attempts_per_success_count"+peer], samples[`stint_client_outcomes_total{outcome="ok",peer="ledger:8080"}`]; n != ok {
					t.Errorf("%v samples for %v successes", n, ok)
				}
				if got := p.inflight.Load(); got != 1 { // ours
					t.Errorf("%d requests in flight", got-1)
				}
			})
		}
	}
}

// O-36, client side: whatever hosts, methods, codes and headers go through
// RoundTrip, series and memory stay within constants, and nothing that is not
// UTF-8 reaches a label or an error's text.
func TestO36_RandomRequestsThroughTheTransport(t *testing.T) {
	n := 50_000
	if testing.Short() {
		n = 5_000
	}
	const (
		maxSeries = (maxPeerLabels+1)*seriesPerPeer + seriesOfProxies
		// A peer is a budget, a histogram of 6 KiB or two, and its metrics.
		maxHeap = (DefaultMaxPeers+1)*20<<10 + maxPeerLabels*50<<10
	)
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	var tr *Transport
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(3, 4))
		bytes := make([]byte, 1<<20)
		for i := range bytes {
			bytes[i] = byte(rnd.Uint32())
		}
		pool := string(bytes)
		junk := func(limit int) string {
			n := rnd.IntN(limit)
			at := rnd.IntN(len(pool) - n)
			return pool[at : at+n]
		}
		m := newTestMetrics(t)
		var badText atomic.Int32
		name := func(r *http.Request) string {
			if len(r.URL.Host)%2 == 0 {
				return r.URL.Host // a Peer of the caller's, who thinks nothing of it
			}
			return peerName(r)
		}
		most := 0
		tr = newTestTransport(t, Config{Metrics: m, MaxAttempts: 2, Backoff: Backoff{Base: 1, Max: 1}, Timeout: time.Minute, Peer: name, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			switch rnd.IntN(4) {
			case 0:
				return nil, errors.New("lost")
			case 1:
				return answer(503, junk(20), "Retry-After", junk(12), HeaderShouldRetry, junk(6)), nil
			}
			return answer(rnd.IntN(1200)-200, "", junk(10), junk(30), "Retry-After", strconv.Itoa(rnd.IntN(30)-10), HeaderDeadlineExpired, junk(2)), nil
		})})
		for i := range n {
			req := newRequest(t, t.Context(), "GET", "http://peer.test/"+strconv.Itoa(i), nil)
			req.Method = junk(8)
			if rnd.IntN(2) == 0 {
				req.Method = []string{"GET", "PUT", "POST"}[rnd.IntN(3)]
			}
			req.URL.Host = junk(30) + ":" + strconv.Itoa(rnd.IntN(65536))
			if i%1000 == 0 {
				req.URL.Host = junk(10_000)
			}
			req.URL.Scheme = junk(6)
			req.Header[HeaderDeadline] = []string{junk(25)}
			req.Header[HeaderTimeout] = []string{junk(25), strconv.FormatUint(rnd.Uint64(), 10)}
			req.Header[HeaderIdempotencyKey] = []string{junk(300)}
			if i%5 == 0 { // past: an error of ours, which names the peer
				ctx, cancel := context.WithDeadline(t.Context(), time.Now())
				req = req.WithContext(ctx)
				cancel()
			}
			resp, err := tr.RoundTrip(req)
			if err == nil {
				resp.Body.Close()
			} else if !utf8.ValidString(err.Error()) {
				badText.Add(1)
			}
			most = max(most, tr.peers.n)
			if i%10 == 0 {
				time.Sleep(20 * time.Millisecond) // so that peers come and go
			}
		}
		if badText.Load() > 0 {
			t.Errorf("%d errors with invalid UTF-8", badText.Load())
		}
		s, series := scrape(t, m) // a registry refuses what is not UTF-8
		if series > maxSeries {
			t.Errorf("%d series, want at most %d", series, maxSeries)
		}
		if got := s.sum("stint_client_outcomes_total"); got > float64(n) {
			t.Errorf("%v outcomes of %d requests", got, n)
		}
		for name := range s {
			if !utf8.ValidString(name) || len(name) > 4*maxLabelBytes+200 {
				t.Errorf("series %q", name)
			}
		}
		if most > DefaultMaxPeers {
			t.Errorf("%d peers", most)
		}
		t.Logf("%d peers, %d series", most, series)
	})
	grown := heap() - before
	if grown > maxHeap {
		t.Errorf("the heap grew by %d KiB, want at most %d", grown>>10, maxHeap>>10)
	}
	t.Logf("%d KiB", grown>>10)
	runtime.KeepAlive(tr)
}

// O-37: failures that come at once do not make a broken peer look fast.
func TestO37_FastFailuresThroughTheTransport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mode := "good"
		m := newTestMetrics(t)
		tr := newTestTransport(t, Config{Metrics: m, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1e5}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			switch mode {
			case "good":
				time.Sleep(100 * time.Millisecond)
				return answer(200, ""), nil
			case "refused":
				return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
			case "told":
				return answer(409, "", HeaderShouldRetry, "false"), nil
			case "hang":
				return hang(r)
			}
			return answer(503, ""), nil
		})})
		send := func(o Override, timeout time.Duration) Outcome {
			t.Helper()
			ctx := t.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			resp, _, out := roundTrip(t, tr, WithOverride(ctx, o))
			if resp != nil {
				resp.Body.Close()
			}
			return out
		}
		h := tr.peers.enter("peer.test:80", time.Now()).latency.get("")
		estimate := func() time.Duration {
			time.Sleep(histStale + 1)
			d, _ := h.quantile(time.Now(), .99)
			return d
		}
		for range 50 {
			send(Override{}, 0)
		}
		good := estimate()
		if good < 100*time.Millisecond || good > 110*time.Millisecond {
			t.Fatalf("the estimate is %v", good)
		}
		for _, mode = range []string{"503", "refused"} {
			for range 1000 {
				send(Override{MaxAttempts: 1}, 0)
			}
			if got := estimate(); got != good {
				t.Errorf("after 1000 × %s the estimate is %v", mode, got)
			}
		}
		// Admission rejects, which also say nothing.
		mode = "503"
		for range 100 {
			if o := send(Override{}, 30*time.Millisecond); o.Reason != ReasonDeadline || o.Attempts != 1 {
				t.Fatalf("30 ms left: %+v", o)
			}
		}
		// Local refusals too.
		for range 100 {
			send(Override{}, time.Millisecond)
		}
		if got := estimate(); got != good {
			t.Errorf("after admission rejects the estimate is %v", got)
		}
		// With time enough a retry is admitted.
		if o := send(Override{}, 300*time.Millisecond); o.Attempts != 3 {
			t.Errorf("300 ms left: %+v", o)
		}
		// Timeouts enter as "at least this long".
		mode = "hang"
		for range 5 {
			send(Override{MaxAttempts: 1, AttemptTimeout: time.Second}, 0)
		}
		if got := estimate(); got < time.Second {
			t.Errorf("after timeouts of a second the estimate is %v", got)
		}
		if got := counter(t, m, "stint_client_outcomes_total", "outcome", "ok"); got != 50 {
			t.Errorf("%v requests counted as good", got)
		}
	})
}

// O-40: a base that ignores its context. RoundTrip waits for it, as Config.Base
// says: it may still be reading the request's body. What it returns in the end is
// what the caller gets, and nothing is counted twice.
func TestO40_BaseThatHangs(t *testing.T) {
	const hang, deadline = 5 * time.Second, 100 * time.Millisecond
	lost := &sentinel{"lost"}
	for _, tt := range []struct {
		name    string
		finally func() (*http.Response, error)
		reason  Reason
		outcome outcome
	}{
		{"200", status(200), "", outcomeOK},
		{"503", status(503), ReasonDeadline, outcomeDeadline},
		{"error", failure(lost), ReasonDeadline, outcomeDeadline},
	} {
		for _, how := range []string{"deadline", "cancel", "Config.Timeout", "AttemptTimeout", "Client.Timeout"} {
			t.Run(tt.name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					m := newTestMetrics(t)
					cfg := Config{Metrics: m}
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					reason, end := tt.reason, tt.outcome
					client := &http.Client{}
					switch how {
					case "deadline":
						ctx, cancel = context.WithTimeout(ctx, deadline)
						defer cancel()
					case "cancel":
						time.AfterFunc(deadline, cancel)
						if reason != "" {
							reason, end = ReasonCanceled, outcomeCanceled
						}
					case "Config.Timeout":
						cfg.Timeout = deadline
					case "AttemptTimeout":
						cfg.AttemptTimeout, cfg.MaxAttempts = deadline, 1
						reason, end = ReasonAttempts, outcomeError // a late answer is not one
					case "Client.Timeout":
						client.Timeout = deadline
					}
					var bases, closed atomic.Int32
					body := &trackedBody{Reader: strings.NewReader("in use")}
					cfg.Base = baseFunc(func(r *http.Request) (*http.Response, error) {
						bases.Add(1)
						time.Sleep(hang)
						if b, err := io.ReadAll(r.Body); string(b) != "in use" || err != nil {
							t.Errorf("after the deadline the base read %q, %v", b, err)
						}
						r.Body.Close()
						resp, err := tt.finally()
						if resp != nil {
							resp.Body = closeFunc{resp.Body, func() { closed.Add(1) }}
						}
						return resp, err
					})
					client.Transport = newTestTransport(t, cfg)
					var o Outcome
					req := newRequest(t, WithOverride(ctx, Override{Outcome: &o}), "PUT", "http://peer.test/", nil)
					req.Body = body
					req.GetBody = func() (io.ReadCloser, error) { t.Error("asked for another body"); return nil, errors.New("no") }
					start := time.Now()
					resp, err := client.Do(req)
					if got := time.Since(start); got != hang {
						t.Errorf("returned after %v, want %v", got, hang)
					}
					if resp != nil {
						resp.Body.Close()
					}
					if how == "AttemptTimeout" && err == nil {
						t.Error("an answer after AttemptTimeout")
					}
					if want := tt.name != "error"; (closed.Load() == 1) != want || body.closes.Load() != 1 {
						t.Errorf("answer closed %d times, body %d (%v)", closed.Load(), body.closes.Load(), err)
					}
					time.Sleep(time.Minute) // nothing comes after it
					if bases.Load() != 1 || o.Reason != reason || o.Attempts != 1 {
						t.Errorf("%d attempts, %+v, want reason %q", bases.Load(), o, reason)
					}
					s, _ := scrape(t, m)
					s.check(t, `http_client_requests_total{peer="peer.test:80"}`, 1)
					s.check(t, fmt.Sprintf(`stint_client_outcomes_total{outcome=%q,peer="peer.test:80"}`, end), 1)
					if got := s.sum("stint_client_outcomes_total"); got != 1 {
						t.Errorf("%v outcomes", got)
					}
					if got := s.sum("stint_refused_total"); got > 1 || got == 0 && reason != "" {
						t.Errorf("%v refusals", got)
					}
				})
			})
		}
	}
}

// Answers that are hostile on purpose, through RoundTrip: no panic, no wait that
// nobody allowed, memory within bounds, and always a response or an error.
func TestHostileAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(5, 6))
		values := []string{
			"", "0", "1", "-1", "+1", "1e9", "9223372036854775807", strings.Repeat("9", 100_000), strings.Repeat(",", 10_000), "true", "false", "TRUE\x00",
			"\xff\xfe", "Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "Sat, 01 Jan 2000 00:00:05 GMT", "5", "0.5", "nan", strings.Repeat("x", 1<<16),
		}
		names := []string{
			"Retry-After", "Retry-After-Ms", "Date", HeaderShouldRetry, "Stripe-Should-Retry", "X-Envoy-Overloaded", HeaderDeadlineExpired,
			HeaderIdempotencyKey, "Idempotent-Replayed", HeaderDeadline, "Content-Length", "\xff",
		}
		metrics := newTestMetrics(t)
		tr := newTestTransport(t, Config{Metrics: metrics, Timeout: 20 * time.Second, Backoff: Backoff{MaxRetryAfter: 2 * time.Second}, Budget: BudgetConfig{MinPerSecond: 1e5}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			consume(r)
			resp := answer([]int{503, 503, 504, 429, 421, 425, 408, 200, 0, -7, 999, 101}[rnd.IntN(12)], "body")
			for range rnd.IntN(5) {
				name := names[rnd.IntN(len(names))]
				resp.Header[name] = append(resp.Header[name], values[rnd.IntN(len(values))])
			}
			switch rnd.IntN(6) {
			case 0: // without end
				resp.ContentLength, resp.Body = -1, io.NopCloser(readFunc(func(p []byte) (int, error) { return len(p), nil }))
			case 1: // longer than it says
				resp.Body = io.NopCloser(io.LimitReader(readFunc(func(p []byte) (int, error) { return len(p), nil }), 1<<20))
			case 2: // shorter
				resp.ContentLength = 1000
			case 3: // trickles for ever
				resp.Body = &slowBody{closed: make(chan struct{})}
			case 4:
				resp.ContentLength = -1 << 62
			}
			return resp, nil
		})})
		for i := range 3000 {
			var body io.Reader
			if i%2 == 0 {
				body = bytes.NewReader([]byte("body"))
			}
			req := newRequest(t, t.Context(), []string{"GET", "POST", "PUT"}[i%3], "http://peer.test/", body)
			start := time.Now()
			resp, err := tr.RoundTrip(req)
			if (resp == nil) == (err == nil) {
				t.Fatalf("%v, %v", resp, err)
			}
			// Two waits of a hint, backoff and turn each, and as many bodies.
			if took := time.Since(start); took > 2*(2*time.Second+DefaultBackoffMax)+6*bodyPatience {
				t.Errorf("RoundTrip took %v", took)
			}
			if resp != nil {
				resp.Body.Close()
			}
		}
		s, _ := scrape(t, metrics)
		if got := s.sum("stint_client_outcomes_total"); got != 3000 {
			t.Errorf("%v outcomes", got)
		}
		p := tr.peers.enter("peer.test:80", time.Now())
		if p.held.Load() != 0 || p.inflight.Load() != 1 {
			t.Errorf("held %d, in flight %d", p.held.Load(), p.inflight.Load()-1)
		}
	})
}

// A slowBody hands out a byte a second until it is closed.
type slowBody struct {
	once   sync.Once
	closed chan struct{}
}

func (b *slowBody) Read(p []byte) (int, error) {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-b.closed:
		return 0, errors.New("closed")
	case <-timer.C:
		p[0] = 'x'
		return 1, nil
	}
}

func (b *slowBody) Close() error {
	b.once.Do(func() { close(b.closed) })
	return nil
}

// A caller that leaves has left, however the attempt before had failed: that one
// of them timed out does not make the time run out.
func TestO14_CanceledAfterATimeoutIsNoDeadline(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config Config
		base   func(*http.Request) (*http.Response, error)
	}{
		{"in backoff, after AttemptTimeout", Config{AttemptTimeout: time.Second, Backoff: Backoff{Base: time.Hour, Max: time.Hour}}, hang},
		{"in backoff, after a timeout of the base", Config{Backoff: Backoff{Base: time.Hour, Max: time.Hour}}, func(*http.Request) (*http.Response, error) {
			return nil, &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}
		}},
		{"in backoff, after a deadline of the base's own", Config{Backoff: Backoff{Base: time.Hour, Max: time.Hour}}, func(*http.Request) (*http.Response, error) {
			return nil, fmt.Errorf("base: %w", context.DeadlineExceeded)
		}},
		{"waiting for a turn", Config{AttemptTimeout: time.Second, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MaxWait: time.Hour}, MaxAttempts: 100}, hang},
		{"in the moment of AttemptTimeout", Config{AttemptTimeout: 90 * time.Minute}, hang},
	} {
		for _, client := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				tt.config.Base = baseFunc(tt.base)
				tr := newTestTransport(t, tt.config)
				tr.jitter = func() float64 { return 0.99 }
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(90*time.Minute, cancel)
				if tt.config.MaxAttempts > 0 {
					cancel()
					ctx, cancel = context.WithCancel(t.Context())
					time.AfterFunc(2500*time.Millisecond, cancel)
				}
				req := newRequest(t, ctx, "GET", "http://peer.test/", nil)
				var err error
				if client {
					_, err = (&http.Client{Transport: tr}).Do(req)
				} else {
					_, err = tr.RoundTrip(req)
				}
				var timeout interface{ Timeout() bool }
				if !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
					t.Errorf("%s, client %v: %v", tt.name, client, err)
				}
				var netErr net.Error
				if errors.As(err, &netErr) && netErr.Timeout() {
					t.Errorf("%s, client %v: a net.Error with Timeout: %v", tt.name, client, err)
				}
				cancel()
			})
		}
	}
}
