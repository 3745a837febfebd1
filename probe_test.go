package stint

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func everybody(*http.Request) bool { return true }

// probeServe starts a service and returns its address and a base to call it by.
func probeServe(t testing.TB, h2 bool, c MiddlewareConfig, h http.HandlerFunc) (string, http.RoundTripper) {
	t.Helper()
	s := httptest.NewUnstartedServer(mwNew(t, c).Handler(h))
	s.Config.ErrorLog = quiet
	client := startServer(t, s, h2)
	return s.URL, client.Transport
}

// probeDo sends a request with these headers, names and values in turn.
func probeDo(t testing.TB, base http.RoundTripper, method, url string, pairs ...string) *http.Response {
	t.Helper()
	req := newRequest(t, t.Context(), method, url, nil)
	for i := 0; i < len(pairs); i += 2 {
		req.Header.Add(pairs[i], pairs[i+1])
	}
	resp, err := base.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// probeRead reads the answer of a probed edge, and checks what always holds.
func probeRead(t testing.TB, resp *http.Response) hopReport {
	t.Helper()
	body := readAll(t, resp)
	if got := resp.Header.Get("Content-Type"); got != "application/json" {
		t.Fatalf("%d, %q: %s", resp.StatusCode, got, body)
	}
	if got := resp.Header.Get("Content-Length"); got != strconv.Itoa(len(body)) {
		t.Errorf("a Content-Length of %s for %d bytes", got, len(body))
	}
	if len(resp.Header[HeaderDebugDeadline]) > 0 {
		t.Error("the edge answers in the header as well")
	}
	return probeParse(t, body)
}

func probeParse(t testing.TB, text string) (r hopReport) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &r); err != nil || r.V != 1 {
		t.Fatalf("%v in %q", err, text)
	}
	if i := strings.IndexFunc(text, func(r rune) bool { return r >= 0x7f }); i >= 0 {
		t.Errorf("not ASCII at %d: %q", i, text)
	}
	if len(r.Hops) == 0 || len(r.Hops) > maxHops {
		t.Fatalf("%d hops", len(r.Hops))
	}
	for i, h := range r.Hops {
		if i == 0 && (h.Depth != 0 || h.Peer != "" || h.Attempt != 0 || h.Status != r.Status) ||
			i > 0 && (h.Depth < 1 || h.Depth > r.Hops[i-1].Depth+1) {
			t.Errorf("hop %d is %+v", i, h)
		}
	}
	return r
}

// probeShape writes a report as indented lines: service, attempt, status.
func probeShape(r hopReport) string {
	var b strings.Builder
	for _, h := range r.Hops {
		name := h.Service
		if h.ArrivedMS == nil {
			name = "?"
		}
		fmt.Fprintf(&b, "%s%s %d %d\n", strings.Repeat(" ", h.Depth), name, h.Attempt, h.Status)
	}
	return b.String()
}

func probeProxy(t testing.TB, to string, tr http.RoundTripper) http.HandlerFunc {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	return (&httputil.ReverseProxy{Transport: tr, ErrorLog: quiet, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(u) }}).ServeHTTP
}

// S8, S9: over five real hops, of which two are reverse proxies and one makes a
// fresh, longer timeout, every hop reports a deadline within a few milliseconds of
// the value sent, and it never rises. The handlers notice nothing.
func TestS8_ProbeOverFiveHops(t *testing.T) {
	const hops = 5
	const text = "the bottom's answer"
	for _, h2 := range []bool{false, true} {
		for _, hardStop := range []bool{false, true} {
			t.Run(fmt.Sprintf("HTTP2=%v,HardStop=%v", h2, hardStop), func(t *testing.T) {
				var base http.RoundTripper
				urls := make([]string, hops)
				for i := hops - 1; i >= 0; i-- {
					var h http.HandlerFunc
					switch i {
					case hops - 1:
						h = func(w http.ResponseWriter, r *http.Request) {
							if got := r.Header[HeaderDebugEcho]; !slices.Equal(got, []string{"hop"}) {
								t.Errorf("the bottom is asked with %q", got)
							}
							io.WriteString(w, text)
						}
					case 0, 2:
						h = probeProxy(t, urls[i+1], newTestTransport(t, Config{Base: base}))
					default:
						tr := newTestTransport(t, Config{Base: base})
						h = func(w http.ResponseWriter, r *http.Request) {
							ctx := r.Context()
							if i == 3 {
								var cancel context.CancelFunc
								ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
								defer cancel()
							}
							resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", urls[i+1], nil))
							if err != nil {
								t.Error(err)
								return
							}
							if got := readAll(t, resp); got != text || resp.Header[HeaderDebugDeadline] != nil {
								t.Errorf("handler %d got %q, and the header %q", i, got, resp.Header[HeaderDebugDeadline])
							}
							w.Header()["Content-Length"] = []string{strconv.Itoa(len(text))}
							w.WriteHeader(resp.StatusCode)
							io.WriteString(w, text)
						}
					}
					urls[i], base = probeServe(t, h2, MiddlewareConfig{Service: fmt.Sprint("tier ", i), DebugEcho: everybody, HardStop: hardStop}, h)
				}
				sent := time.Now().Add(3 * time.Second).UnixMilli()
				r := probeRead(t, probeDo(t, base, "GET", urls[0], HeaderDeadline, fmt.Sprint(sent), HeaderDebugEcho, "1"))
				if len(r.Hops) != hops || r.Status != 200 || r.Truncated {
					t.Fatalf("%d, truncated %v:\n%s", r.Status, r.Truncated, probeShape(r))
				}
				previous, left := sent+1, int64(3001)
				for i, h := range r.Hops {
					if h.Depth != i || h.Service != fmt.Sprint("tier ", i) || h.Status != 200 || *h.Source != "header" {
						t.Errorf("hop %d: %+v, source %s", i, h, *h.Source)
					}
					if i > 0 && (h.Attempt != 1 || !strings.HasSuffix(urls[i], "//"+h.Peer)) {
						t.Errorf("hop %d: attempt %d at %q", i, h.Attempt, h.Peer)
					}
					got := *h.DeadlineMS
					if *h.ReceivedMS != got || got >= previous || got < previous-5 || i == 0 && got != sent {
						t.Errorf("hop %d received %d and kept to %d; the one before it %d", i, *h.ReceivedMS, got, previous)
					}
					if *h.RemainingMS >= left || *h.RemainingMS < 500 || *h.ArrivedMS < sent-3001 || *h.ArrivedMS > got {
						t.Errorf("hop %d had %d ms left at %d, the one before it %d", i, *h.RemainingMS, *h.ArrivedMS, left)
					}
					previous, left = got, *h.RemainingMS
				}

				// A proxy that is asked itself: once, and the body is whole.
				resp := probeDo(t, base, "GET", urls[2], HeaderDebugEcho, "hop")
				if got := readAll(t, resp); got != text || len(resp.Header[HeaderDebugDeadline]) != 1 {
					t.Fatalf("%q, reported %q", got, resp.Header[HeaderDebugDeadline])
				}
				if got, want := probeShape(probeParse(t, resp.Header.Get(HeaderDebugDeadline))), "tier 2 0 200\n tier 3 1 200\n  tier 4 1 200\n"; got != want {
					t.Errorf("got\n%swant\n%s", got, want)
				}
			})
		}
	}
}

// Where a hop has its deadline from.
func TestProbeSources(t *testing.T) {
	soon := func() string { return mwIn(time.Minute) }
	for _, tt := range []struct {
		name   string
		c      MiddlewareConfig
		header string
		source string
		left   time.Duration // about; 0: no deadline
	}{
		{"the caller's", MiddlewareConfig{Timeout: time.Second}, soon(), "header", time.Minute},
		{"of several", MiddlewareConfig{}, mwIn(time.Hour) + ", " + soon(), "header", time.Minute},
		{"shortened", MiddlewareConfig{MaxTimeout: time.Second}, soon(), "clamped", time.Second},
		{"configured", MiddlewareConfig{Timeout: time.Second}, "", "default", time.Second},
		{"not trusted", MiddlewareConfig{Timeout: time.Second, TrustHeader: func(*http.Request) bool { return false }}, soon(), "default", time.Second},
		{"unusable", MiddlewareConfig{Timeout: time.Second}, "soon", "malformed", time.Second},
		{"unusable and none", MiddlewareConfig{}, "-1", "malformed", 0},
		{"none", MiddlewareConfig{}, "", "none", 0},
		{"observed", MiddlewareConfig{ReportOnly: true}, soon(), "header", time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.c.DebugEcho = everybody
			r := mwRequest(HeaderDebugEcho, "1")
			if tt.header != "" {
				r.Header.Set(HeaderDeadline, tt.header)
			}
			w := httptest.NewRecorder()
			mwNew(t, tt.c).Handler(http.NotFoundHandler()).ServeHTTP(w, r)
			h := probeRead(t, w.Result()).Hops[0]
			if *h.Source != tt.source || h.Status != 404 {
				t.Errorf("source %q, status %d, want %q", *h.Source, h.Status, tt.source)
			}
			if usable := tt.source == "header" || tt.source == "clamped"; (h.ReceivedMS != nil) != usable {
				t.Errorf("received %v", h.ReceivedMS)
			}
			if tt.left == 0 {
				if h.DeadlineMS != nil || h.RemainingMS != nil {
					t.Errorf("got a deadline: %+v", h)
				}
				return
			}
			want := tt.left.Milliseconds()
			if left := *h.DeadlineMS - *h.ArrivedMS; left > want || left < want-5000 || *h.RemainingMS > want || *h.RemainingMS < want-5000 {
				t.Errorf("%d, or %d ms left of %d", left, *h.RemainingMS, want)
			}
		})
	}
}

// A hop that refuses appears with how much it was too late by, on each attempt:
// one whose clock is ahead is asked again. So does an edge.
func TestProbeRefusedHops(t *testing.T) {
	late := mwNew(t, MiddlewareConfig{Service: "late", DebugEcho: everybody})
	late.wall = skewed(2 * time.Second)
	s := httptest.NewServer(late.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler runs") })))
	defer s.Close()
	tr := newTestTransport(t, Config{Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{Ratio: 1, MinPerSecond: 1000, PeakFactor: 1000}})
	defer tr.CloseIdleConnections()
	edge, base := probeServe(t, false, MiddlewareConfig{Service: "edge", DebugEcho: everybody}, probeProxy(t, s.URL, tr))

	resp := probeDo(t, base, "GET", edge, HeaderDeadline, mwIn(time.Second), HeaderDebugEcho, "1")
	r := probeRead(t, resp)
	if got, want := probeShape(r), "edge 0 504\n late 1 504\n late 2 504\n late 3 504\n"; got != want || resp.StatusCode != 504 {
		t.Errorf("%d, got\n%swant\n%s", resp.StatusCode, got, want)
	}
	for _, h := range r.Hops[1:] {
		if h.RemainingMS == nil || *h.RemainingMS >= 0 || *h.RemainingMS < -2000 || *h.Source != "header" {
			t.Errorf("%+v, remaining %v", h, h.RemainingMS)
		}
	}

	resp = probeDo(t, base, "GET", edge, HeaderDeadline, "1", HeaderDebugEcho, "1")
	r = probeRead(t, resp)
	if resp.StatusCode != 504 || resp.Header.Get(HeaderDeadlineExpired) != "1" || resp.Header.Get(HeaderShouldRetry) != "false" {
		t.Errorf("%d, %v", resp.StatusCode, resp.Header)
	}
	if got := probeShape(r); got != "edge 0 504\n" || *r.Hops[0].RemainingMS >= 0 {
		t.Errorf("%d ms left in\n%s", *r.Hops[0].RemainingMS, got)
	}
	resp = probeDo(t, base, "GET", edge, HeaderDeadline, "1", HeaderDebugEcho, "hop")
	if got := readAll(t, resp); resp.StatusCode != 504 || !strings.HasPrefix(got, "deadline exceeded: late by ") {
		t.Errorf("%d, %q", resp.StatusCode, got)
	}
	if got := probeShape(probeParse(t, resp.Header.Get(HeaderDebugDeadline))); got != "edge 0 504\n" {
		t.Errorf("the hop reports %q", got)
	}
}

// Off, and where DebugEcho says no, nothing of it goes in or out, in any
// spelling; what others call a report is theirs.
func TestProbeOffLeavesNoTrace(t *testing.T) {
	var seen atomic.Pointer[http.Header]
	behind := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := r.Header.Clone()
		seen.Store(&h)
		w.Header().Set(HeaderDebugDeadline, "something else")
		io.WriteString(w, "ok")
	}))
	defer behind.Close()
	for _, tt := range []struct {
		name  string
		echo  func(asked *int) func(*http.Request) bool
		asked int // how often it was for 4 requests, of which 2 can be a probe
	}{
		{"off", func(*int) func(*http.Request) bool { return nil }, 0},
		{"not allowed", func(asked *int) func(*http.Request) bool {
			return func(*http.Request) bool { *asked++; return false }
		}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asked := 0
			tr := newTestTransport(t, Config{})
			defer tr.CloseIdleConnections()
			h := mwNew(t, MiddlewareConfig{DebugEcho: tt.echo(&asked)}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if arrivalFrom(r.Context()).probe != nil {
					t.Error("there is a probe")
				}
				// net/http's server would have put it into the canonical form.
				r.Header["x-debug-echo-deadline"] = []string{"hop"}
				probeProxy(t, behind.URL, tr)(w, r)
			}))
			for _, ask := range [][]string{{}, {"1"}, {"hop"}, {"1", "hop"}} {
				r := mwRequest()
				if r.Header[HeaderDebugEcho] = ask; len(ask) == 0 {
					delete(r.Header, HeaderDebugEcho)
				}
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				if w.Code != 200 || w.Body.String() != "ok" || !slices.Equal(w.Header()[HeaderDebugDeadline], []string{"something else"}) {
					t.Errorf("%q: %d, %q, %v", ask, w.Code, w.Body, w.Header())
				}
				if got := headerLines(*seen.Load(), HeaderDebugEcho); len(got) > 0 {
					t.Errorf("%q: the peer is asked with %q", ask, got)
				}
			}
			if asked != tt.asked {
				t.Errorf("asked %d times, want %d", asked, tt.asked)
			}
		})
	}

	// Nor does a client bring it along that serves no request.
	tr := newTestTransport(t, Config{})
	defer tr.CloseIdleConnections()
	resp := probeDo(t, tr, "GET", behind.URL, HeaderDebugEcho, "1")
	readAll(t, resp)
	if got := headerLines(*seen.Load(), HeaderDebugEcho); len(got) > 0 {
		t.Errorf("a client asks with %q", got)
	}
}

// A hop that does not allow it ends the probe there, and appears as an attempt of
// its caller's.
func TestProbeEndsAtAHopThatSaysNo(t *testing.T) {
	bottom, base := probeServe(t, false, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
		if len(r.Header[HeaderDebugEcho]) > 0 {
			t.Error("the bottom is asked")
		}
		io.WriteString(w, "ok")
	})
	middle, _ := probeServe(t, false, MiddlewareConfig{Service: "middle"}, probeProxy(t, bottom, newTestTransport(t, Config{Base: base})))
	edge, _ := probeServe(t, false, MiddlewareConfig{Service: "edge", DebugEcho: everybody}, probeProxy(t, middle, newTestTransport(t, Config{Base: base})))
	sent := mwIn(time.Minute)
	r := probeRead(t, probeDo(t, base, "GET", edge, HeaderDebugEcho, "1", HeaderDeadline, sent))
	if got, want := probeShape(r), "edge 0 200\n ? 1 200\n"; got != want {
		t.Fatalf("got\n%swant\n%s", got, want)
	}
	if h := r.Hops[1]; h.Source != nil || h.DeadlineMS != nil || h.RemainingMS != nil || h.Peer != strings.TrimPrefix(middle, "http://") || *h.ReceivedMS >= *r.Hops[0].DeadlineMS {
		t.Errorf("%+v", h)
	}
}

// Foreign peers are not asked, and not believed.
func TestProbeIsNotForForeignPeers(t *testing.T) {
	foreign := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if got := headerLines(r.Header, HeaderDebugEcho); len(got) > 0 {
			t.Errorf("asked with %q", got)
		}
		w.Header().Set(HeaderDebugDeadline, `{"v":1,"status":200,"hops":[{"depth":0,"service":"mole","arrived_ms":1}]}`)
		io.WriteString(w, "ok")
	}))
	defer foreign.Close()
	tr := newTestTransport(t, Config{Foreign: everybody})
	defer tr.CloseIdleConnections()
	h := mwNew(t, MiddlewareConfig{DebugEcho: everybody, Service: "edge", Timeout: time.Minute}).Handler(probeProxy(t, foreign.URL, tr))

	w := httptest.NewRecorder()
	h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "1"))
	r := probeRead(t, w.Result())
	if got, want := probeShape(r), "edge 0 200\n ? 1 200\n"; got != want || r.Hops[1].ReceivedMS != nil {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "hop"))
	if lines := w.Header()[HeaderDebugDeadline]; len(lines) != 1 || strings.Contains(lines[0], "mole") || w.Body.String() != "ok" {
		t.Errorf("%q, %q", lines, w.Body)
	}
}

// Every attempt that was answered appears, with what lies below it: the answers
// that are retried as well as the last.
func TestProbeSeesEveryAttempt(t *testing.T) {
	bottom, base := probeServe(t, false, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {})
	tr := newTestTransport(t, Config{Base: base})
	var n atomic.Int32
	middle, _ := probeServe(t, false, MiddlewareConfig{Service: "middle", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
		resp, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", bottom, nil))
		if err != nil {
			t.Error(err)
			return
		}
		readAll(t, resp)
		if n.Add(1) < 3 {
			w.WriteHeader(503)
		}
	})
	outer := newTestTransport(t, Config{Base: base, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{Ratio: 1, MinPerSecond: 1000, PeakFactor: 1000}})
	edge, _ := probeServe(t, false, MiddlewareConfig{Service: "edge", DebugEcho: everybody}, probeProxy(t, middle, outer))
	r := probeRead(t, probeDo(t, base, "GET", edge, HeaderDebugEcho, "1"))
	want := "edge 0 200\n middle 1 503\n  bottom 1 200\n middle 2 503\n  bottom 1 200\n middle 3 200\n  bottom 1 200\n"
	if got := probeShape(r); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// A handler's calls may run in parallel, begin after the answer, or outlive the
// request.
func TestProbeParallelCalls(t *testing.T) {
	const calls = 6
	bottom, base := probeServe(t, false, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "ok")
	})
	tr := newTestTransport(t, Config{Base: base})
	var stragglers sync.WaitGroup
	fanOut := func(w http.ResponseWriter, r *http.Request) {
		call := func(ctx context.Context) {
			resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", bottom, nil))
			if err != nil {
				t.Error(err)
				return
			}
			readAll(t, resp)
		}
		ctx := context.WithoutCancel(r.Context())
		stragglers.Go(func() { call(ctx) })
		var all sync.WaitGroup
		for range calls / 2 {
			all.Go(func() { call(ctx) })
		}
		all.Wait()
		w.(http.Flusher).Flush()
		for range calls / 2 {
			all.Go(func() { call(ctx) })
		}
		all.Wait()
		call(Detach(ctx)) // not part of the request
	}
	for _, hardStop := range []bool{false, true} {
		edge, _ := probeServe(t, false, MiddlewareConfig{Service: "edge", DebugEcho: everybody, Timeout: time.Minute, HardStop: hardStop}, fanOut)
		r := probeRead(t, probeDo(t, base, "GET", edge, HeaderDebugEcho, "1"))
		if n := len(r.Hops) - 1; n != calls && n != calls+1 || strings.Count(probeShape(r), "\n bottom 1 200") != n {
			t.Errorf("%d calls:\n%s", n, probeShape(r))
		}
		// In a header there is only what was there when the answer began.
		resp := probeDo(t, base, "GET", edge, HeaderDebugEcho, "hop")
		readAll(t, resp)
		r = probeParse(t, resp.Header.Get(HeaderDebugDeadline))
		if n := len(r.Hops) - 1; n != calls/2 && n != calls/2+1 {
			t.Errorf("%d calls before the answer:\n%s", n, probeShape(r))
		}
		stragglers.Wait()
	}
}

// What a peer reports may be anything: it is bounded, checked and never passed
// on, and the answer is untouched.
func TestProbeHostileReports(t *testing.T) {
	const good = `{"depth":0,"service":"x","peer":"","attempt":9,"received_ms":null,"deadline_ms":null,"source":"none","arrived_ms":1,"remaining_ms":null,"status":999}`
	child := strings.Replace(good, `"depth":0`, `"depth":1`, 1)
	for _, tt := range []struct {
		name  string
		lines []string
		ok    bool
	}{
		{"fine", []string{`{"v":1,"status":200,"hops":[` + good + `]}`}, true},
		{"full", []string{`{"v":1,"hops":[` + good + strings.Repeat(`,`+child, 15) + `]}`}, true},
		{"more than there may be", []string{`{"v":1,"hops":[` + good + strings.Repeat(`,{"depth":1}`, 16) + `]}`}, false},
		{"1 MB", []string{`{"v":1,"hops":[` + good + `],"x":"` + strings.Repeat("x", 1<<20) + `"}`}, false},
		{"a byte too long", []string{fmt.Sprintf(`{"v":1,"hops":[%s],"x":"%s"}`, good, strings.Repeat("x", maxReport-len(good)-22))}, false},
		{"no JSON", []string{"hello"}, false},
		{"cut", []string{`{"v":1,"status":200,"hops":[` + good}, false},
		{"more behind it", []string{`{"v":1,"hops":[` + good + `]} {}`}, false},
		{"deep", []string{strings.Repeat("[", maxReport)}, false},
		{"two", []string{`{"v":1,"hops":[` + good + `]}`, `{"v":1,"hops":[` + good + `]}`}, false},
		{"empty", []string{""}, false},
		{"null", []string{"null"}, false},
		{"no hops", []string{`{"v":1,"hops":[]}`}, false},
		{"another version", []string{`{"v":2,"hops":[` + good + `]}`}, false},
		{"begins below", []string{`{"v":1,"hops":[` + child + `]}`}, false},
		{"skips a depth", []string{`{"v":1,"hops":[` + good + `,{"depth":2}]}`}, false},
		{"rises above", []string{`{"v":1,"hops":[` + good + `,{"depth":0}]}`}, false},
		{"negative depth", []string{`{"v":1,"hops":[{"depth":-1,"arrived_ms":1}]}`}, false},
		{"unknown source", []string{`{"v":1,"hops":[{"depth":0,"arrived_ms":1,"source":"<script>"}]}`}, false},
		{"number out of range", []string{`{"v":1,"hops":[{"depth":0,"arrived_ms":1,"deadline_ms":1e300}]}`}, false},
		{"not ASCII", []string{`{"v":1,"hops":[{"depth":0,"arrived_ms":1,"service":"` + strings.Repeat("\xff", 100) + `"}]}`}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header()[HeaderDebugDeadline] = tt.lines
				io.WriteString(w, "ok")
			}))
			defer peer.Close()
			tr := newTestTransport(t, Config{})
			defer tr.CloseIdleConnections()
			h := mwNew(t, MiddlewareConfig{Service: "edge", DebugEcho: everybody}).Handler(probeProxy(t, peer.URL, tr))

			w := httptest.NewRecorder()
			h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "1"))
			if w.Body.Len() > 16<<10 {
				t.Errorf("%d bytes", w.Body.Len())
			}
			r := probeRead(t, w.Result())
			top := r.Hops[1]
			if reported := top.ArrivedMS != nil; reported != tt.ok {
				t.Errorf("believed: %v:\n%s", reported, probeShape(r))
			}
			if !tt.ok && (len(r.Hops) != 2 || top.Service != "") {
				t.Errorf("something is left of it:\n%s", probeShape(r))
			}
			// What its caller knows better counts.
			if top.Attempt != 1 || top.Status != 200 || top.Peer != strings.TrimPrefix(peer.URL, "http://") {
				t.Errorf("%+v", top)
			}

			w = httptest.NewRecorder()
			h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "hop"))
			lines := w.Header()[HeaderDebugDeadline]
			if len(lines) != 1 || len(lines[0]) > maxReport || w.Body.String() != "ok" {
				t.Fatalf("%d lines, %q", len(lines), w.Body)
			}
			probeParse(t, lines[0])
		})
	}
}

// However many calls there are, and whatever they are called, 16 hops and 4 KiB is
// what a hop sends, and what is left of the list is in order.
func TestProbeIsBounded(t *testing.T) {
	odd := strings.Repeat("\u00e9\"\n\x7f<\U0001F600", 12) // what has to be escaped in every way
	for _, tt := range []struct {
		service string
		hops    int // 0: as many as fit
	}{{"bottom", maxHops}, {odd, 0}} {
		bottom, base := probeServe(t, false, MiddlewareConfig{Service: tt.service, DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {})
		tr := newTestTransport(t, Config{Base: base})
		middle, _ := probeServe(t, false, MiddlewareConfig{Service: tt.service, DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
			for range 40 {
				resp, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", bottom, nil))
				if err != nil {
					t.Error(err)
					return
				}
				readAll(t, resp)
			}
		})
		resp := probeDo(t, base, "GET", middle, HeaderDebugEcho, "hop")
		readAll(t, resp)
		lines := resp.Header[HeaderDebugDeadline]
		if len(lines) != 1 || len(lines[0]) > maxReport {
			t.Fatalf("%d lines, %d bytes", len(lines), len(lines[0]))
		}
		if size := headerSize(resp.Header); size > maxAnswerHeader+100 { // Date, Content-Length
			t.Errorf("the header has %d bytes", size)
		}
		r := probeParse(t, lines[0])
		if !r.Truncated || tt.hops > 0 && len(r.Hops) != tt.hops || len(r.Hops) < 4 {
			t.Errorf("%d hops, truncated: %v", len(r.Hops), r.Truncated)
		}
		for _, h := range r.Hops {
			if h.Service != tt.service {
				t.Errorf("%q has become %q", tt.service, h.Service)
			}
		}

		// The edge has room for more, but not for more hops, and says that some
		// are missing further down.
		outer := newTestTransport(t, Config{Base: base})
		edge, _ := probeServe(t, false, MiddlewareConfig{DebugEcho: everybody}, probeProxy(t, middle, outer))
		r = probeRead(t, probeDo(t, base, "GET", edge, HeaderDebugEcho, "1"))
		if !r.Truncated {
			t.Errorf("%d hops, not truncated", len(r.Hops))
		}
	}
}

// An answer whose header is long already gets a short report, or none, on HEAD too.
// Its caller knows that much less, and loses nothing.
func TestProbeLeavesRoom(t *testing.T) {
	bottom, base := probeServe(t, false, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(http.ResponseWriter, *http.Request) {})
	tr := newTestTransport(t, Config{Base: base})
	for _, tt := range []struct {
		cookie   int // bytes
		min, max int // hops
	}{{0, 6, 6}, {2700, 3, 5}, {3200, 1, 1}, {3500, 0, 0}, {5000, 0, 0}} {
		cookie := strings.Repeat("x", tt.cookie)
		middle, _ := probeServe(t, false, MiddlewareConfig{Service: "middle", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
			for range 5 {
				resp, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", bottom, nil))
				if err != nil {
					t.Error(err)
					return
				}
				readAll(t, resp)
			}
			w.Header().Set("Set-Cookie", cookie)
		})
		resp := probeDo(t, base, "GET", middle, HeaderDebugEcho, "hop")
		readAll(t, resp)
		if resp.StatusCode != 200 || resp.Header.Get("Set-Cookie") != cookie {
			t.Errorf("%d bytes: status %d, and the cookie has %d", tt.cookie, resp.StatusCode, len(resp.Header.Get("Set-Cookie")))
		}
		hops := 0
		if text := resp.Header.Get(HeaderDebugDeadline); text != "" {
			r := probeParse(t, text)
			if hops = len(r.Hops); r.Truncated != (hops < 6) {
				t.Errorf("%d bytes: %d hops, truncated: %v", tt.cookie, hops, r.Truncated)
			}
			if size := headerSize(resp.Header); size > maxAnswerHeader+100 {
				t.Errorf("%d bytes: the header has %d", tt.cookie, size)
			}
		}
		if hops < tt.min || hops > tt.max {
			t.Errorf("%d bytes: %d hops, want %d to %d", tt.cookie, hops, tt.min, tt.max)
		}

		// What the middle does not say, the edge says of it.
		edge, _ := probeServe(t, false, MiddlewareConfig{Service: "edge", DebugEcho: everybody}, probeProxy(t, middle, newTestTransport(t, Config{Base: base})))
		r := probeRead(t, probeDo(t, base, "GET", edge, HeaderDebugEcho, "1"))
		if want := 1 + max(1, hops); r.Status != 200 || len(r.Hops) != want || r.Hops[1].Status != 200 || r.Hops[1].Peer == "" {
			t.Errorf("%d bytes: the edge has %d and\n%swant %d hops", tt.cookie, r.Status, probeShape(r), want)
		}
	}
}

func headerSize(h http.Header) (n int) {
	for k, lines := range h {
		for _, v := range lines {
			n += len(k) + len(": \r\n") + len(v)
		}
	}
	return n
}

// The edge answers with the handler's status, and with nothing else of its answer,
// however it writes.
func TestProbeReplacesTheEdgesAnswer(t *testing.T) {
	for _, tt := range []struct {
		name string
		h    http.HandlerFunc
		want int // the list's status
		sent int // if it differs
	}{
		{"nothing", func(http.ResponseWriter, *http.Request) {}, 200, 0},
		{"stream", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range 1000 {
				fmt.Fprintf(w, "data: %d\n\n", i)
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Error(err)
				}
			}
			if n, err := io.Copy(w, io.LimitReader(strings.NewReader("end"), 3)); n != 3 || err != nil {
				t.Error(n, err)
			}
			w.(http.Flusher).Flush()
			w.Header().Set(http.TrailerPrefix+"Sum", "1")
		}, 200, 0},
		{"compressed", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Content-Length", "3")
			w.Header().Set("Set-Cookie", "secret=1")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusTeapot)
			w.WriteHeader(http.StatusOK)
			io.WriteString(w, "abc")
		}, 418, 0},
		{"no content", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) }, 204, 200},
		{"not modified", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(304) }, 304, 200},
		{"body read", func(w http.ResponseWriter, r *http.Request) {
			if b, err := io.ReadAll(r.Body); len(b) != 0 || err != nil {
				t.Error(b, err)
			}
			rc := http.NewResponseController(w)
			if err := rc.SetWriteDeadline(time.Now()); err != nil {
				t.Error(err)
			}
			if _, _, err := rc.Hijack(); err == nil {
				t.Error("hijacked")
			}
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(503)
		}, 503, 0},
	} {
		for _, hardStop := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,HardStop=%v", tt.name, hardStop), func(t *testing.T) {
				mwEachProtocol(t, func(t *testing.T, major int) {
					metrics := newTestMetrics(t)
					edge, base := probeServe(t, major == 2, MiddlewareConfig{Service: "edge", DebugEcho: everybody, Metrics: metrics, HardStop: hardStop, Timeout: time.Minute},
						func(w http.ResponseWriter, r *http.Request) {
							tt.h(w, r)
							if got := r.Header.Get(HeaderDebugEcho); got != "1" {
								t.Errorf("the handler sees %q", got)
							}
						})
					resp := probeDo(t, base, "GET", edge, HeaderDebugEcho, "1")
					r := probeRead(t, resp)
					sent := tt.sent
					if sent == 0 {
						sent = tt.want
					}
					if resp.StatusCode != sent || r.Status != tt.want || resp.ProtoMajor != major || len(resp.Trailer) > 0 {
						t.Errorf("%s, %+v, %v", resp.Status, r, resp.Trailer)
					}
					h := resp.Header
					if h.Get("Content-Encoding") != "" || h.Get("Set-Cookie") != "" || tt.want == 503 && h.Get("Retry-After") != "7" {
						t.Errorf("%v", h)
					}
					if got := counter(t, metrics, "http_server_requests_total", "code", strconv.Itoa(tt.want)); got != 1 {
						t.Errorf("%v answers counted", got)
					}
				})
			})
		}
	}
}

// HEAD gets its list in the header, from the edge as from a hop.
func TestProbeHEAD(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		bottom, base := probeServe(t, major == 2, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "1234")
		})
		edge, _ := probeServe(t, major == 2, MiddlewareConfig{Service: "edge", DebugEcho: everybody}, probeProxy(t, bottom, newTestTransport(t, Config{Base: base})))
		for _, ask := range []string{"1", "hop"} {
			resp := probeDo(t, base, "HEAD", edge, HeaderDebugEcho, ask)
			if body := readAll(t, resp); body != "" || resp.StatusCode != 200 || len(resp.Header[HeaderDebugDeadline]) != 1 {
				t.Fatalf("%s: %d, %q, %v", ask, resp.StatusCode, body, resp.Header)
			}
			if got, want := probeShape(probeParse(t, resp.Header.Get(HeaderDebugDeadline))), "edge 0 200\n bottom 1 200\n"; got != want {
				t.Errorf("%s: got\n%swant\n%s", ask, got, want)
			}
			if got := resp.ContentLength; (got == 1234) != (ask == "hop") {
				t.Errorf("%s: a Content-Length of %d", ask, got)
			}
		}
	})
}

// Time runs out at the edge: in a handler that heeds its context, and in one that
// does not, which HardStop ends, whether it had begun to answer or not. The client
// gets the list and not a broken connection.
func TestProbeOfAnEdgeThatRunsOutOfTime(t *testing.T) {
	for _, tt := range []struct {
		name     string
		hardStop bool
		body     string
		h        func(w http.ResponseWriter, r *http.Request, over <-chan struct{})
	}{
		{"heeds", false, "", func(w http.ResponseWriter, r *http.Request, _ <-chan struct{}) { <-r.Context().Done() }},
		{"does not", true, "", func(w http.ResponseWriter, r *http.Request, over <-chan struct{}) { <-over }},
		{"does not, a body is left", true, "body", func(w http.ResponseWriter, r *http.Request, over <-chan struct{}) { <-over }},
		{"has begun", true, "", func(w http.ResponseWriter, r *http.Request, over <-chan struct{}) {
			io.WriteString(w, "begun")
			<-over
		}},
		{"writes on", true, "body", func(w http.ResponseWriter, r *http.Request, over <-chan struct{}) {
			var all sync.WaitGroup // several, so that the writer is always in use
			for range 8 {
				all.Go(func() {
					for {
						if _, err := w.Write(nil); err != nil {
							return
						}
					}
				})
			}
			all.Wait()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mwEachProtocol(t, func(t *testing.T, major int) {
				bottom, base := probeServe(t, major == 2, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {})
				tr := newTestTransport(t, Config{Base: base})
				over := make(chan struct{})
				edge, _ := probeServe(t, major == 2, MiddlewareConfig{Service: "edge", DebugEcho: everybody, HardStop: tt.hardStop}, func(w http.ResponseWriter, r *http.Request) {
					resp, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", bottom, nil))
					if err != nil {
						t.Error(err)
						return
					}
					readAll(t, resp)
					tt.h(w, r, over)
				})
				t.Cleanup(func() { close(over) })
				req := newRequest(t, t.Context(), "POST", edge, strings.NewReader(tt.body))
				req.Header.Set(HeaderDebugEcho, "1")
				req.Header.Set(HeaderDeadline, mwIn(2*hsLeft))
				resp, err := base.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				r := probeRead(t, resp)
				if got, want := probeShape(r), "edge 0 504\n bottom 1 200\n"; got != want || resp.StatusCode != 504 || resp.Header.Get(HeaderDeadlineExpired) != "1" {
					t.Errorf("%d, %v, got\n%swant\n%s", resp.StatusCode, resp.Header, got, want)
				}
			})
		})
	}
}

// A handler at the edge that ends when it cannot write ends when the client leaves.
func TestProbedHandlerNoticesThatTheClientLeft(t *testing.T) {
	ended := make(chan struct{})
	edge, base := probeServe(t, false, MiddlewareConfig{DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		for {
			if _, err := w.Write([]byte("x")); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	req := newRequest(t, ctx, "GET", edge, nil)
	req.Header.Set(HeaderDebugEcho, "1")
	if resp, err := base.RoundTrip(req); err == nil {
		t.Errorf("answer %d", resp.StatusCode)
	}
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("the handler runs on")
	}
}

// The panic of a probed handler is what it is without a probe.
func TestProbePanicPassesThrough(t *testing.T) {
	for _, hardStop := range []bool{false, true} {
		h := mwNew(t, MiddlewareConfig{DebugEcho: everybody, HardStop: hardStop, Timeout: time.Minute}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			panic(http.ErrAbortHandler)
		}))
		w := httptest.NewRecorder()
		func() {
			defer func() {
				if v := recover(); v != http.ErrAbortHandler {
					t.Errorf("recovered %v", v)
				}
			}()
			h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "1"))
		}()
		if w.Body.Len() > 0 || w.Flushed {
			t.Errorf("answered %q", w.Body)
		}
	}
}

// Of two middlewares, one inside the other, one reports; the inner one ends the
// probe if it does not allow it.
func TestProbeNestedMiddlewares(t *testing.T) {
	bottom, base := probeServe(t, false, MiddlewareConfig{Service: "bottom", DebugEcho: everybody}, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "ok")
	})
	tr := newTestTransport(t, Config{Base: base})
	for _, tt := range []struct {
		inner MiddlewareConfig
		want  string
	}{
		{MiddlewareConfig{Service: "inner", DebugEcho: everybody}, "outer 0 200\n bottom 1 200\n"},
		{MiddlewareConfig{Service: "inner", DebugEcho: everybody, ReportOnly: true}, "outer 0 200\n bottom 1 200\n"},
		{MiddlewareConfig{Service: "inner"}, "outer 0 200\n"}, // the call is no longer one of a probed request
	} {
		inner := mwNew(t, tt.inner).Handler(probeProxy(t, bottom, tr))
		h := mwNew(t, MiddlewareConfig{Service: "outer", DebugEcho: everybody}).Handler(inner)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "1"))
		if got := probeShape(probeRead(t, w.Result())); got != tt.want {
			t.Errorf("%+v: got\n%swant\n%s", tt.inner, got, tt.want)
		}
		w = httptest.NewRecorder()
		h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "hop"))
		if lines := w.Header()[HeaderDebugDeadline]; len(lines) != 1 || w.Body.String() != "ok" {
			t.Errorf("%+v: %q, %q", tt.inner, lines, w.Body)
		}
	}
}

// A layer outside that sends the header only at the end, as one that compresses
// does, still has the report, with HardStop as well.
func TestProbeReachesALayerOutside(t *testing.T) {
	for _, hardStop := range []bool{false, true} {
		for name, h := range map[string]http.HandlerFunc{
			"WriteHeader": func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(201) },
			"Write":       func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") },
			"Flush":       func(w http.ResponseWriter, r *http.Request) { w.(http.Flusher).Flush() },
			"nothing":     func(w http.ResponseWriter, r *http.Request) {},
		} {
			w := &late{h: make(http.Header)}
			mwNew(t, MiddlewareConfig{DebugEcho: everybody, HardStop: hardStop, Timeout: time.Minute}).Handler(h).ServeHTTP(w, mwRequest(HeaderDebugEcho, "hop"))
			if lines := w.h[HeaderDebugDeadline]; len(lines) != 1 {
				t.Errorf("%s, HardStop %v: %q", name, hardStop, lines)
			} else if r := probeParse(t, lines[0]); (r.Status == 201) != (name == "WriteHeader") {
				t.Errorf("%s, HardStop %v: status %d", name, hardStop, r.Status)
			}
		}
	}
}

type late struct{ h http.Header }

func (l *late) Header() http.Header         { return l.h }
func (l *late) WriteHeader(int)             {}
func (l *late) Write(b []byte) (int, error) { return len(b), nil }
func (l *late) Flush()                      {}

// A request to switch protocols cannot be answered otherwise.
func TestProbeLeavesUpgradesAlone(t *testing.T) {
	h := mwNew(t, MiddlewareConfig{DebugEcho: everybody}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "ok")
	}))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, mwRequest(HeaderDebugEcho, "1", "Connection", "upgrade", "Upgrade", "echo"))
	if w.Body.String() != "ok" {
		t.Errorf("%q", w.Body)
	}
}

// What encode writes parseReport reads, whatever is in it.
func FuzzProbeReport(f *testing.F) {
	f.Add(`{"v":1,"status":200,"hops":[{"depth":0,"service":"\u00e9\ud83d\ude00<","source":"header","deadline_ms":1}]}`)
	f.Add(`{"v":1,"status":200,"truncated":true,"hops":[{"depth":0},{"depth":1},{"depth":2},{"depth":1}]}`)
	f.Fuzz(func(t *testing.T, line string) {
		r, ok := parseReport([]string{line})
		if !ok {
			return
		}
		again := r.encode(maxReport)
		if len(again) > maxReport {
			t.Fatalf("%d bytes", len(again))
		}
		if back, ok := parseReport([]string{again}); !ok || len(back.Hops) > len(r.Hops) || len(back.Hops) < len(r.Hops) && !back.Truncated {
			t.Errorf("%q became %q", line, again)
		}
	})
}
