package stint

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// mwHardStop makes all tests of the middleware use HardStop, see
// TestHardStop_IsTheMiddleware. They do not run in parallel.
var mwHardStop bool

// mwNew returns a middleware for c, which must be valid.
func mwNew(t testing.TB, c MiddlewareConfig) *Middleware {
	t.Helper()
	c.HardStop = c.HardStop || mwHardStop
	m, err := NewMiddleware(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// mwEvents records what a hook is told.
type mwEvents struct {
	mu   sync.Mutex
	list []Event
}

func (e *mwEvents) hook(_ context.Context, ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, ev)
}

// String lists the kinds so far, with the status of those that have one.
func (e *mwEvents) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var s []string
	for _, ev := range e.list {
		k := string(ev.Kind)
		if ev.Kind == EventServed {
			k += " " + strconv.Itoa(ev.Status)
		}
		s = append(s, k)
	}
	return strings.Join(s, ", ")
}

// await waits until the events are these: the last comes after the client has
// its answer.
func (e *mwEvents) await(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		got := e.String()
		if got == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("events: got %q, want %q", got, want)
		}
	}
}

func (e *mwEvents) get(kind EventKind) Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range e.list {
		if ev.Kind == kind {
			return ev
		}
	}
	return Event{}
}

// mwIn returns the value of a deadline header d from now.
func mwIn(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).UnixMilli(), 10) }

// mwServe starts a server for the given major version of HTTP.
func mwServe(t *testing.T, major int, h http.Handler) (*httptest.Server, *http.Client) {
	t.Helper()
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	if major == 2 {
		srv.EnableHTTP2 = true
		srv.StartTLS()
	} else {
		srv.Start()
	}
	t.Cleanup(srv.Close)
	return srv, srv.Client()
}

func mwEachProtocol(t *testing.T, f func(t *testing.T, major int)) {
	t.Run("HTTP1", func(t *testing.T) { f(t, 1) })
	t.Run("HTTP2", func(t *testing.T) { f(t, 2) })
}

// mwDo sends a request with header fields given in pairs, and reads the answer.
func mwDo(t *testing.T, c *http.Client, method, url string, body io.Reader, pairs ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(pairs); i += 2 {
		req.Header.Add(pairs[i], pairs[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// mwCheckExpired checks everything that is on our 504.
func mwCheckExpired(t *testing.T, resp *http.Response) {
	t.Helper()
	if resp.StatusCode != http.StatusGatewayTimeout {
		t.Fatalf("status: got %d, want 504", resp.StatusCode)
	}
	for name, want := range map[string]string{
		HeaderDeadlineExpired: "1",
		HeaderShouldRetry:     "false",
		"Cache-Control":       "no-store",
	} {
		if got := resp.Header.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	if got := resp.Header.Get("Retry-After"); got != "" {
		t.Errorf("Retry-After: got %q, want none", got)
	}
}

// mwRaw sends text over a connection of its own and reads the answer.
func mwRaw(t *testing.T, addr, text string) (net.Conn, *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, mwSend(t, conn, text)
}

func mwSend(t *testing.T, conn net.Conn, text string) *http.Response {
	t.Helper()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp
}

// The zero value and nil fail closed, with a text that names the constructor.
func TestMiddlewareZeroValue(t *testing.T) {
	for name, m := range map[string]*Middleware{"zero": {}, "nil": nil} {
		next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Errorf("%s: handler ran", name) })
		rec := httptest.NewRecorder()
		r := httptest.NewRequest("GET", "/", nil)
		m.Handler(next).ServeHTTP(rec, r)
		if rec.Code != 500 || !strings.Contains(rec.Body.String(), "stint.NewMiddleware") {
			t.Errorf("%s: got %d %q, want 500 naming stint.NewMiddleware", name, rec.Code, rec.Body)
		}
		req, cancel, err := m.Adopt(r)
		if err == nil || !strings.Contains(err.Error(), "stint.NewMiddleware") {
			t.Errorf("%s: Adopt: got error %v, want one naming stint.NewMiddleware", name, err)
		}
		if req == nil || cancel == nil {
			t.Fatalf("%s: Adopt: got request %v, cancel nil: %v; want both", name, req, cancel == nil)
		}
		cancel()
	}
	m := mwNew(t, MiddlewareConfig{})
	defer func() {
		if recover() == nil {
			t.Error("Handler(nil): got no panic, want one where the mistake is")
		}
	}()
	m.Handler(nil)
}

// Every bad field is reported at once.
func TestMiddlewareConfigErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config MiddlewareConfig
		want   []string
	}{
		{"zero", MiddlewareConfig{}, nil},
		{"limits", MiddlewareConfig{Service: strings.Repeat("x", 128), Timeout: 720 * time.Hour, MaxTimeout: 720 * time.Hour, SkewTolerance: time.Minute}, nil},
		{"all", MiddlewareConfig{Service: "\xff" + strings.Repeat("x", 128), Timeout: -1, MaxTimeout: -1, SkewTolerance: -1}, []string{"Service", "Service", "MaxTimeout", "Timeout", "SkewTolerance"}},
		{"above", MiddlewareConfig{Timeout: 2 * time.Hour, SkewTolerance: time.Minute + 1}, []string{"Timeout", "SkewTolerance"}},
		{"far", MiddlewareConfig{MaxTimeout: 721 * time.Hour}, []string{"MaxTimeout"}},
	} {
		m, err := NewMiddleware(tt.config)
		var got []string
		if err != nil {
			for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
				var ce *ConfigError
				if !errors.As(e, &ce) {
					t.Fatalf("%s: got %T, want *ConfigError", tt.name, e)
				}
				got = append(got, strings.TrimPrefix(ce.Field, "MiddlewareConfig."))
			}
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
		if (m == nil) != (tt.want != nil) {
			t.Errorf("%s: got middleware %v and error %v", tt.name, m, err)
		}
	}
}

// S7, P5: exactly 504, in well under 50 ms, no work started, whatever the state
// of the request's body.
func TestP5_ExpiredIsRefusedBeforeWork(t *testing.T) {
	const limit = 50 * time.Millisecond
	best := func(t *testing.T, f func()) {
		t.Helper()
		shortest := time.Hour
		for range 20 {
			start := time.Now()
			f()
			shortest = min(shortest, time.Since(start))
		}
		if shortest > limit {
			t.Errorf("answered in %v at best, want less than %v", shortest, limit)
		}
	}
	mwEachProtocol(t, func(t *testing.T, major int) {
		var ran atomic.Int32
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{Hook: events.hook})
		srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran.Add(1) })))

		for _, tt := range []struct {
			name string
			body func() io.Reader
		}{
			{"no body", func() io.Reader { return nil }},
			{"complete", func() io.Reader { return strings.NewReader("all of it") }},
			{"64 KiB", func() io.Reader { return bytes.NewReader(make([]byte, 64<<10)) }},
			{"unknown length", func() io.Reader { return io.MultiReader(strings.NewReader("all of it")) }},
			{"large", func() io.Reader { return bytes.NewReader(make([]byte, 8<<20)) }},
			{"half sent", func() io.Reader {
				pr, pw := io.Pipe()
				go pw.Write([]byte("half"))
				t.Cleanup(func() { pw.Close() })
				return pr
			}},
		} {
			t.Run(tt.name, func(t *testing.T) {
				best(t, func() {
					resp, _ := mwDo(t, client, "POST", srv.URL, tt.body(), HeaderDeadline, mwIn(-time.Millisecond))
					if resp.ProtoMajor != major {
						t.Fatalf("protocol: got %s, want HTTP/%d", resp.Proto, major)
					}
					mwCheckExpired(t, resp)
				})
			})
		}
		if major == 1 {
			for name, text := range map[string]string{
				"raw half sent":   "Content-Length: 100\r\n\r\nhalf",
				"raw chunked":     "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
				"raw large":       "Content-Length: 10000000\r\n\r\nhalf",
				"raw nothing yet": "Content-Length: 100\r\n\r\n",
				"raw expect":      "Expect: 100-continue\r\nContent-Length: 100\r\n\r\n",
			} {
				t.Run(name, func(t *testing.T) {
					best(t, func() {
						conn, resp := mwRaw(t, srv.Listener.Addr().String(), "POST / HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: 1\r\n"+text)
						defer conn.Close()
						mwCheckExpired(t, resp)
						if !resp.Close {
							t.Error("the connection is kept with half a body on it")
						}
					})
				})
			}
		}
		if n := ran.Load(); n != 0 {
			t.Errorf("the handler ran %d times", n)
		}
		events.mu.Lock()
		defer events.mu.Unlock()
		for i, want := range []EventKind{EventArrived, EventExpired, EventServed} {
			if got := events.list[i].Kind; got != want {
				t.Errorf("event %d: got %s, want %s", i, got, want)
			}
		}
	})
}

// A refusal does not cost the connection where the body had arrived, and does
// not leave a read deadline behind that would cancel the requests after it
// (golang/go#70834).
func TestP7_RefusalKeepsTheConnection(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{})
	h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/late": // reads all of it, and does not answer in time
			io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		case "/closed":
			io.Copy(io.Discard, r.Body)
			r.Body.Close()
			<-r.Context().Done()
		case "/unread":
			<-r.Context().Done()
		default:
			// Longer than any read deadline of ours.
			time.Sleep(drainTime + 15*time.Millisecond)
			if err := r.Context().Err(); err != nil {
				w.WriteHeader(500)
			}
		}
	}))
	var deadlines atomic.Int32
	srv, _ := mwServe(t, 1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(mwSlow{w, &deadlines}, r)
	}))

	next := "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, text := range map[string]func() string{
		"no body": func() string { return "GET / HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: 1\r\n\r\n" },
		"complete": func() string {
			return "POST / HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: 1\r\nContent-Length: 4\r\n\r\nbody"
		},
		"chunked": func() string {
			return "POST / HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: 1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
		},
		"empty": func() string {
			return "POST / HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: 1\r\nContent-Length: 0\r\n\r\n"
		},
		"late, no body": func() string {
			return "GET /late HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: " + mwIn(20*time.Millisecond) + "\r\n\r\n"
		},
		"late, read": func() string {
			return "POST /late HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: " + mwIn(20*time.Millisecond) + "\r\nContent-Length: 4\r\n\r\nbody"
		},
		"late, closed": func() string {
			return "POST /closed HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: " + mwIn(20*time.Millisecond) + "\r\nContent-Length: 4\r\n\r\nbody"
		},
		"late, unread": func() string {
			return "POST /unread HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: " + mwIn(20*time.Millisecond) + "\r\nContent-Length: 4\r\n\r\nbody"
		},
	} {
		t.Run(name, func(t *testing.T) {
			var conn net.Conn
			for try := 1; ; try++ {
				deadlines.Store(0)
				var resp *http.Response
				conn, resp = mwRaw(t, srv.Listener.Addr().String(), text())
				mwCheckExpired(t, resp)
				if !resp.Close {
					break
				}
				// A machine that is too busy to read four bytes in 10 ms gives
				// the connection up, and rightly so.
				if try == 5 {
					t.Fatal("Connection: close, want the connection kept")
				}
			}
			if n := deadlines.Load(); n != 0 && (strings.Contains(name, "no body") || name == "empty") {
				t.Errorf("%d read deadlines were set for a request without a body", n)
			}
			for range 2 {
				if resp := mwSend(t, conn, next); resp.StatusCode != 200 {
					t.Errorf("next request: got %d, want 200: its context was cancelled", resp.StatusCode)
				}
			}
		})
	}
	t.Run("late, half sent", func(t *testing.T) {
		start := time.Now()
		_, resp := mwRaw(t, srv.Listener.Addr().String(), "POST /unread HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: "+mwIn(20*time.Millisecond)+"\r\nContent-Length: 100\r\n\r\nhalf")
		mwCheckExpired(t, resp)
		if took := time.Since(start); took > 400*time.Millisecond {
			t.Errorf("answered after %v: waited for the client's body", took)
		}
		if !resp.Close {
			t.Error("the connection is kept with half a body on it")
		}
	})

	// On HTTP/2, Connection: close would be a GOAWAY.
	t.Run("HTTP2", func(t *testing.T) {
		srv, client := mwServe(t, 2, m.Handler(http.NotFoundHandler()))
		for i := range 20 {
			pr, pw := io.Pipe()
			go pw.Write([]byte("half"))
			reused := false
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
			req, _ := http.NewRequestWithContext(ctx, "POST", srv.URL, pr)
			req.Header.Set(HeaderDeadline, "1")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			pw.Close()
			mwCheckExpired(t, resp)
			if i > 0 && !reused {
				t.Fatalf("request %d came on a new connection", i)
			}
		}
	})
}

// mwSlow takes its time to write a header, so that a read deadline which is
// left behind fires.
type mwSlow struct {
	http.ResponseWriter
	deadlines *atomic.Int32
}

func (w mwSlow) Unwrap() http.ResponseWriter { return w.ResponseWriter }
func (w mwSlow) WriteHeader(code int) {
	time.Sleep(drainTime + 10*time.Millisecond)
	w.ResponseWriter.WriteHeader(code)
}
func (w mwSlow) SetReadDeadline(d time.Time) error {
	w.deadlines.Add(1)
	return http.NewResponseController(w.ResponseWriter).SetReadDeadline(d)
}

// What is too large, or waits for leave to be sent, is not read at all.
func TestRefusalLeavesTheBodyAlone(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{})
	for name, tt := range map[string]struct {
		length int64
		expect string
		read   bool
	}{
		"small":    {100, "", true},
		"limit":    {drainBytes, "", true},
		"large":    {drainBytes + 1, "", false},
		"expected": {100, "100-Continue", false},
	} {
		body := &mwBody{left: tt.length}
		r := httptest.NewRequest("POST", "/", body)
		r.ContentLength = tt.length
		r.Header.Set(HeaderDeadline, "1")
		r.Header.Set("Expect", tt.expect)
		w := new(mwWriter)
		m.Handler(http.NotFoundHandler()).ServeHTTP(w, r)
		if got := body.reads > 0; got != tt.read || tt.read && body.left > 0 {
			t.Errorf("%s: read: got %v, %d bytes left; want %v", name, got, body.left, tt.read)
		}
		if got, want := w.h.Get("Connection") == "close", !tt.read; got != want {
			t.Errorf("%s: closes the connection: got %v, want %v", name, got, want)
		}
	}
}

// mwBody counts the reads of it.
type mwBody struct {
	left  int64
	reads int
}

func (b *mwBody) Read(p []byte) (int, error) {
	b.reads++
	n := min(int64(len(p)), b.left)
	b.left -= n
	if b.left == 0 {
		return int(n), io.EOF
	}
	return int(n), nil
}

// A writer without read deadlines, as a recorder, and a body that never ends.
func TestRefusalWithoutReadDeadline(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{})
	pr, pw := io.Pipe()
	defer pw.Close()
	r := httptest.NewRequest("POST", "/", pr)
	r.Header.Set(HeaderDeadline, "1")
	rec := httptest.NewRecorder()
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.Handler(http.NotFoundHandler()).ServeHTTP(rec, r)
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatal("the refusal waits for a body that no deadline can cut off")
	}
	mwCheckExpired(t, rec.Result())
	if got := rec.Header().Get("Connection"); got != "close" {
		t.Errorf("Connection: got %q, want close", got)
	}
}

// The 504 is written from a clean header map, both of them, in the form that
// the client accepts.
func TestS7_RefusalIsCleanAndReadable(t *testing.T) {
	dirty := func(h http.Header) {
		h.Set("Content-Encoding", "gzip")
		h.Set("Content-Length", "1")
		h.Set("Etag", `"x"`)
		h.Set("Set-Cookie", "a=b")
		h.Set("Cache-Control", "max-age=60")
		h.Set("Trailer", "X-T")
		h.Set(HeaderShouldRetry, "true")
	}
	m := mwNew(t, MiddlewareConfig{})
	h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		dirty(w.Header())
		<-r.Context().Done()
	}))
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		dirty(w.Header())
		h.ServeHTTP(w, r)
	})
	mwEachProtocol(t, func(t *testing.T, major int) {
		srv, client := mwServe(t, major, outer)
		for _, in := range []time.Duration{-1500 * time.Millisecond, 20 * time.Millisecond} {
			for accept, want := range map[string]string{
				"":    "text/plain; charset=utf-8",
				"*/*": "text/plain; charset=utf-8",
				"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": "text/plain; charset=utf-8",
				"application/json;q=0.0":                    "text/plain; charset=utf-8",
				"text/plain, application/Problem+JSON;q=.5": "application/problem+json",
				"application/json":                          "application/problem+json",
			} {
				sent := mwIn(in)
				resp, body := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, sent, "Accept", accept)
				mwCheckExpired(t, resp)
				for _, name := range []string{"Content-Encoding", "Etag", "Set-Cookie"} {
					if got := resp.Header.Get(name); got != "" {
						t.Errorf("%s: got %q, want none", name, got)
					}
				}
				if got := resp.Header.Get("Content-Type"); got != want {
					t.Errorf("Accept %q: got %s, want %s", accept, got, want)
				}
				if want != "application/problem+json" {
					if !strings.HasPrefix(body, "deadline exceeded") {
						t.Errorf("body: got %q", body)
					}
					continue
				}
				var p struct {
					Type, Title, Detail string
					Status              int
					Deadline            int64 `json:"deadline_ms"`
					Now                 int64 `json:"now_ms"`
					Late                int64 `json:"late_by_ms"`
				}
				if err := json.Unmarshal([]byte(body), &p); err != nil {
					t.Fatalf("body %q: %v", body, err)
				}
				if p.Status != 504 || p.Title == "" || strconv.FormatInt(p.Deadline, 10) != sent || p.Now-p.Deadline != p.Late || in < 0 && p.Late < 1500 {
					t.Errorf("body: got %+v, want deadline_ms %s and now_ms - deadline_ms = late_by_ms", p, sent)
				}
			}
		}
		// HEAD: the same header, and no body.
		get, body := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, "1", "Accept", "application/json")
		head, none := mwDo(t, client, "HEAD", srv.URL, nil, HeaderDeadline, "1", "Accept", "application/json")
		mwCheckExpired(t, head)
		if none != "" || head.ContentLength != int64(len(body)) || get.ContentLength != head.ContentLength {
			t.Errorf("HEAD: got length %d and body %q, want length %d and none", head.ContentLength, none, len(body))
		}
	})
}

// mwOffers lists what w can do.
func mwOffers(w http.ResponseWriter) []string {
	var s []string
	add := func(ok bool, name string) {
		if ok {
			s = append(s, name)
		}
	}
	_, ok := w.(http.Flusher)
	add(ok, "Flusher")
	_, ok = w.(interface{ FlushError() error })
	add(ok, "FlushError")
	_, ok = w.(http.Hijacker)
	add(ok, "Hijacker")
	_, ok = w.(io.ReaderFrom)
	add(ok, "ReaderFrom")
	_, ok = w.(io.StringWriter)
	add(ok, "StringWriter")
	_, ok = w.(http.Pusher)
	add(ok, "Pusher")
	//lint:ignore SA1019 deprecated, and still asked for by handlers
	_, ok = w.(http.CloseNotifier)
	add(ok, "CloseNotifier")
	_, ok = w.(interface{ SetReadDeadline(time.Time) error })
	add(ok, "SetReadDeadline")
	_, ok = w.(interface{ EnableFullDuplex() error })
	add(ok, "EnableFullDuplex")
	return s
}

// O-38: each works exactly as without the middleware, and what the plain writer
// does not offer is not offered.
func TestO38_WriterDoesWhatThePlainOneDoes(t *testing.T) {
	// A case returns what the client and the handler have seen: the same with
	// and without the middleware.
	type exchange struct {
		name    string
		handler func(w http.ResponseWriter, r *http.Request) string
	}
	for _, tt := range []exchange{
		{"offers", func(w http.ResponseWriter, _ *http.Request) string { return strings.Join(mwOffers(w), " ") }},
		{"Flush sends the header as set", func(w http.ResponseWriter, _ *http.Request) string {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			w.WriteHeader(404) // too late
			io.WriteString(w, "x")
			return ""
		}},
		{"status before Flush", func(w http.ResponseWriter, _ *http.Request) string {
			w.WriteHeader(202)
			return fmt.Sprint(http.NewResponseController(w).Flush())
		}},
		{"SetReadDeadline", func(w http.ResponseWriter, r *http.Request) string {
			rc := http.NewResponseController(w)
			err := rc.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			_, rerr := io.ReadAll(r.Body) // never ends
			return fmt.Sprintln(err, rerr != nil)
		}},
		{"SetWriteDeadline", func(w http.ResponseWriter, r *http.Request) string {
			return fmt.Sprint(http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)))
		}},
		{"EnableFullDuplex", func(w http.ResponseWriter, r *http.Request) string {
			err := http.NewResponseController(w).EnableFullDuplex()
			return fmt.Sprint(err)
		}},
		{"Push", func(w http.ResponseWriter, _ *http.Request) string {
			p, ok := w.(http.Pusher)
			if !ok {
				return "not offered"
			}
			return fmt.Sprint(p.Push("/x", nil))
		}},
		{"ReadFrom", func(w http.ResponseWriter, _ *http.Request) string {
			w.Header().Set("Content-Length", "2000")
			n, err := io.Copy(w, io.LimitReader(strings.NewReader(strings.Repeat("x", 4000)), 2000))
			return fmt.Sprintln(n, err)
		}},
		{"WriteString", func(w http.ResponseWriter, _ *http.Request) string {
			n, err := io.WriteString(w, "<html>")
			return fmt.Sprintln(n, err)
		}},
		{"103 then 404", func(w http.ResponseWriter, _ *http.Request) string {
			w.Header().Set("Link", "</x>")
			w.WriteHeader(103)
			w.Header().Del("Link")
			w.WriteHeader(404)
			return ""
		}},
		{"trailers", func(w http.ResponseWriter, _ *http.Request) string {
			w.Header().Set("Trailer", "X-Declared")
			io.WriteString(w, "body")
			w.Header().Set("X-Declared", "1")
			w.Header().Set(http.TrailerPrefix+"X-Undeclared", "2")
			return ""
		}},
		{"nothing", func(http.ResponseWriter, *http.Request) string { return "" }},
		{"ErrAbortHandler", func(w http.ResponseWriter, _ *http.Request) string { panic(http.ErrAbortHandler) }},
		{"ErrAbortHandler later", func(w http.ResponseWriter, _ *http.Request) string {
			w.Header().Set("Content-Length", "100")
			w.Write([]byte("part"))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}},
		{"panic", func(w http.ResponseWriter, _ *http.Request) string { panic("boom") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mwEachProtocol(t, func(t *testing.T, major int) {
				see := func(wrap func(http.Handler) http.Handler) string {
					handled := make(chan string, 1)
					srv, client := mwServe(t, major, wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						s := "panic"
						defer func() { handled <- s }()
						s = tt.handler(w, r)
					})))
					pr, pw := io.Pipe()
					defer pw.Close()
					go pw.Write([]byte("half"))
					var seen strings.Builder
					ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
						Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
							fmt.Fprintln(&seen, code, h)
							return nil
						},
					})
					var body io.Reader
					if tt.name == "SetReadDeadline" {
						body = pr
					}
					req, _ := http.NewRequestWithContext(ctx, "POST", srv.URL, body)
					req.Header.Set(HeaderDeadline, mwIn(time.Minute))
					resp, err := client.Do(req)
					if err != nil {
						// The text holds the port, and on HTTP/2 a stream number.
						fmt.Fprintf(&seen, "error\n")
					} else {
						resp.Header.Del("Date")
						b, err := io.ReadAll(resp.Body)
						resp.Body.Close()
						fmt.Fprintln(&seen, resp.Proto, resp.Status, resp.Header, string(b), err, resp.Trailer, resp.ContentLength)
					}
					fmt.Fprint(&seen, <-handled)
					return seen.String()
				}
				plain := see(func(h http.Handler) http.Handler { return h })
				got := see(mwNew(t, MiddlewareConfig{}).Handler)
				if got != plain {
					t.Errorf("got\n%s\nwithout the middleware\n%s", got, plain)
				}
			})
		})
	}
}

// O-38: events arrive one by one, and a stream honours a deadline that the
// client chose to send.
func TestO38_EventStream(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{Hook: events.hook})
		next := make(chan string)
		srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			for {
				select {
				case s := <-next:
					io.WriteString(w, s+"\n")
					http.NewResponseController(w).Flush()
				case <-r.Context().Done():
					return
				}
			}
		})))
		req, _ := http.NewRequestWithContext(t.Context(), "GET", srv.URL, nil)
		req.Header.Set(HeaderDeadline, mwIn(500*time.Millisecond))
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("got %s, %q", resp.Status, resp.Header)
		}
		br := bufio.NewReader(resp.Body)
		for i := range 3 {
			want := fmt.Sprintf("data: %d\n", i)
			next <- strings.TrimSpace(want)
			if got, err := br.ReadString('\n'); got != want {
				t.Fatalf("event: got %q, %v; want %q", got, err, want)
			}
		}
		if _, err := br.ReadString('\n'); err != io.EOF {
			t.Errorf("end: got %v, want EOF at the deadline", err)
		}
		// The answer stands, and the request ran out of time.
		events.await(t, "arrived, expired, served 200")
	})
}

type mwFlushErrorWriter struct{ *httptest.ResponseRecorder }

var errMWFlush = errors.New("flush failed")

func (mwFlushErrorWriter) FlushError() error { return errMWFlush }

// O-38: the error of a Flush comes from below, every time.
func TestO38_FlushError(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{})
	m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for range 3 {
			if err := http.NewResponseController(w).Flush(); err != errMWFlush {
				t.Errorf("Flush: got %v, want %v", err, errMWFlush)
			}
		}
	})).ServeHTTP(mwFlushErrorWriter{httptest.NewRecorder()}, httptest.NewRequest("GET", "/", nil))
}

// O-38: a recorder offers less, and less is offered.
func TestO38_InterfaceSet(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{})
	for _, w := range []http.ResponseWriter{
		httptest.NewRecorder(), mwFlushErrorWriter{httptest.NewRecorder()}, struct{ http.ResponseWriter }{httptest.NewRecorder()}, new(mwWriter),
	} {
		m.Handler(http.HandlerFunc(func(wrapped http.ResponseWriter, _ *http.Request) {
			if got, want := mwOffers(wrapped), mwOffers(w); !slices.Equal(got, want) {
				t.Errorf("%T: got %v, want %v", w, got, want)
			}
			if got := wrapped.(interface{ Unwrap() http.ResponseWriter }).Unwrap(); got != w {
				t.Errorf("Unwrap: got %v, want the writer below: more than one layer", got)
			}
		})).ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	}
}

// O-38: behind a writer that hides what the connection can do, as loggers have
// it, http.ResponseController still finds it, and what it does is an answer.
func TestO38_HiddenByALayerOutside(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		events := new(mwEvents)
		h := mwNew(t, MiddlewareConfig{Hook: events.hook, Timeout: 50 * time.Millisecond}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, name := range []string{"Flusher", "Hijacker", "ReaderFrom"} {
				if slices.Contains(mwOffers(w), name) {
					t.Errorf("offers %s", name)
				}
			}
			rc := http.NewResponseController(w)
			if r.URL.Path == "/hijack" {
				conn, rw, err := rc.Hijack()
				if err != nil {
					t.Errorf("Hijack: %v", err)
					return
				}
				defer conn.Close()
				rw.WriteString("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nmine")
				rw.Flush()
			} else {
				w.Header().Set("Content-Type", "text/event-stream")
				if err := rc.Flush(); err != nil {
					t.Errorf("Flush: %v", err)
				}
			}
			<-r.Context().Done()
		}))
		srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.ServeHTTP(hsHides{w}, r) }))
		resp, body := mwDo(t, client, "POST", srv.URL, strings.NewReader("x"))
		if resp.StatusCode != 200 || body != "" || resp.Header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("got %d %q %v, want an empty stream", resp.StatusCode, body, resp.Header)
		}
		events.await(t, "arrived, expired, served 200")
		if major == 2 {
			return
		}
		if _, body = mwDo(t, client, "POST", srv.URL+"/hijack", strings.NewReader("x")); body != "mine" {
			t.Errorf("got %q", body)
		}
		events.await(t, "arrived, expired, served 200, arrived, served 0")
	})
	// Who looks for a layer by unwrapping finds it, unless HardStop stands
	// before it.
	rec := hsHides{httptest.NewRecorder()}
	(mwNew(t, MiddlewareConfig{})).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for {
			u, ok := w.(interface{ Unwrap() http.ResponseWriter })
			if !ok {
				t.Error("the layer outside is not to be found")
				return
			}
			if w = u.Unwrap(); w == rec {
				return
			}
		}
	})).ServeHTTP(rec, mwRequest())
}

// O-38: an upgraded connection outlives the deadline, which was for the
// handshake, and so do the calls made for it afterwards.
func TestO38_UpgradeOutlivesTheDeadline(t *testing.T) {
	const left = 200 * time.Millisecond
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{Hook: events.hook})
	var before, after *deadline
	var errAfter error
	srv, _ := mwServe(t, 1, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := arrivalFrom(r.Context())
		before = a.adopted()
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		after = a.adopted()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n")
		rw.Flush()
		time.Sleep(2 * left)
		errAfter = r.Context().Err()
		rw.WriteString("late\n")
		rw.Flush()
	})))
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: echo\r\nX-Request-Deadline: %s\r\n\r\n", mwIn(left))
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("got %v, %v; want 101", resp, err)
	}
	if line, err := br.ReadString('\n'); line != "late\n" {
		t.Errorf("after the deadline: got %q, %v; want a line", line, err)
	}
	events.await(t, "arrived, served 0") // and not out of time
	if before == nil || after != nil || errAfter != nil {
		t.Errorf("adopted before: %v, after: %v, context's error: %v; want a deadline, none, none", before, after, errAfter)
	}

	// Too late on arrival: the handshake is refused as anything else.
	_, resp = mwRaw(t, srv.Listener.Addr().String(), "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\nX-Request-Deadline: 1\r\n\r\n")
	mwCheckExpired(t, resp)
}

// A reverse proxy hijacks through the middleware.
func TestO38_UpgradeThroughReverseProxy(t *testing.T) {
	backend, _ := mwServe(t, 1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n")
		rw.Flush()
		line, _ := rw.ReadString('\n')
		rw.WriteString(line)
		rw.Flush()
	}))
	target, _ := url.Parse(backend.URL)
	m := mwNew(t, MiddlewareConfig{})
	srv, _ := mwServe(t, 1, m.Handler(httputil.NewSingleHostReverseProxy(target)))
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\nX-Request-Deadline: %s\r\n\r\n", mwIn(200*time.Millisecond))
	br := bufio.NewReader(conn)
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != 101 {
		t.Fatalf("got %v, %v; want 101", resp, err)
	}
	time.Sleep(300 * time.Millisecond)
	io.WriteString(conn, "hello\n")
	if line, err := br.ReadString('\n'); line != "hello\n" {
		t.Errorf("after the deadline: got %q, %v", line, err)
	}
}

// What asks to switch protocols, and what does not.
func TestUpgradeRequests(t *testing.T) {
	for _, tt := range []struct {
		method string
		major  int
		pairs  []string
		armed  bool
	}{
		{"GET", 1, nil, true},
		{"GET", 1, []string{"Connection", "Upgrade", "Upgrade", "websocket"}, false},
		{"GET", 1, []string{"Connection", "keep-alive", "Connection", "foo,upgrade", "Upgrade", "h2c, websocket"}, false},
		{"GET", 1, []string{"Upgrade", "websocket"}, true},                                    // not for this hop
		{"GET", 1, []string{"Connection", "Upgrade"}, true},                                   // to what?
		{"GET", 1, []string{"Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c"}, true}, // curl, Java
		{"GET", 2, []string{"Connection", "Upgrade", "Upgrade", "websocket"}, true},           // means nothing there
		{"CONNECT", 1, nil, false}, // a tunnel
		{"CONNECT", 2, nil, false}, // a tunnel, or WebSocket (RFC 8441)
		{"POST", 1, []string{"Connection", "Upgrade", "Upgrade", "h2c", "Upgrade", "TLS/1.0"}, false}, // one is enough
	} {
		r := httptest.NewRequest(tt.method, "http://example.com/", nil)
		r.ProtoMajor, r.ProtoMinor = tt.major, 2-tt.major
		r.Header.Set(HeaderDeadline, mwIn(time.Minute))
		for i := 0; i < len(tt.pairs); i += 2 {
			r.Header.Add(tt.pairs[i], tt.pairs[i+1])
		}
		req, cancel, err := mwNew(t, MiddlewareConfig{}).Adopt(r)
		defer cancel()
		if err != nil {
			t.Fatal(err)
		}
		if _, armed := req.Context().Deadline(); armed != tt.armed {
			t.Errorf("%s HTTP/%d %q: deadline in the context: got %v, want %v", tt.method, tt.major, tt.pairs, armed, tt.armed)
		}
		if arrivalFrom(req.Context()).adopted() == nil {
			t.Errorf("%s %q: the handshake's calls have no deadline", tt.method, tt.pairs)
		}
	}
}

// For a tunnel the handshake is over when the answer begins.
func TestConnectIsOverWhenAnswered(t *testing.T) {
	for name, answer := range map[string]func(http.ResponseWriter){
		"WriteHeader": func(w http.ResponseWriter) { w.WriteHeader(200) },
		"Write":       func(w http.ResponseWriter) { w.Write(nil) },
		"Flush":       func(w http.ResponseWriter) { w.(http.Flusher).Flush() },
	} {
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{Hook: events.hook})
		r := httptest.NewRequest("CONNECT", "http://example.com/", nil)
		r.ProtoMajor, r.ProtoMinor = 2, 0
		r.Header.Set(HeaderDeadline, mwIn(60*time.Millisecond))
		m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			a := arrivalFrom(r.Context())
			w.WriteHeader(103)
			if a.over.Load() || a.adopted() == nil {
				t.Errorf("%s: over before the answer", name)
			}
			answer(w)
			if !a.over.Load() {
				t.Errorf("%s: not over after the answer", name)
			}
			time.Sleep(80 * time.Millisecond)
		})).ServeHTTP(httptest.NewRecorder(), r)
		events.await(t, "arrived, served 200")
	}
	// Never answered: it ran out of time in the handshake.
	m := mwNew(t, MiddlewareConfig{})
	r := httptest.NewRequest("CONNECT", "http://example.com/", nil)
	r.Header.Set(HeaderDeadline, mwIn(10*time.Millisecond))
	rec := httptest.NewRecorder()
	m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(20 * time.Millisecond) })).ServeHTTP(rec, r)
	mwCheckExpired(t, rec.Result())
}

// O-39 (a) to (d): a deadline is reported as one, and nothing else is.
func TestO39_DeadlineIsReportedAsOne(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		run := func(t *testing.T, left time.Duration, h http.HandlerFunc) (*http.Response, string, *mwEvents) {
			t.Helper()
			events := new(mwEvents)
			srv, client := mwServe(t, major, mwNew(t, MiddlewareConfig{Hook: events.hook}).Handler(h))
			resp, body := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, mwIn(left))
			return resp, body, events
		}
		t.Run("a: called after the deadline", func(t *testing.T) {
			resp, _, events := run(t, -time.Second, func(http.ResponseWriter, *http.Request) { t.Error("handler ran") })
			mwCheckExpired(t, resp)
			events.await(t, "arrived, expired, served 504")
			if e := events.get(EventExpired); e.Reason != ReasonExpired || e.Remaining > -time.Second || e.Took != 0 {
				t.Errorf("event: got %+v", e)
			}
		})
		t.Run("b: returns without an answer", func(t *testing.T) {
			resp, _, events := run(t, 100*time.Millisecond, func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(103) // is not one
				<-r.Context().Done()
				if err := r.Context().Err(); err != context.DeadlineExceeded {
					t.Errorf("context: got %v", err)
				}
			})
			mwCheckExpired(t, resp)
			events.await(t, "arrived, expired, served 504")
			if e := events.get(EventExpired); e.Took <= 0 || e.Remaining > 0 {
				t.Errorf("event: got %+v", e)
			}
		})
		t.Run("b: copies nothing, and returns", func(t *testing.T) {
			resp, _, _ := run(t, 100*time.Millisecond, func(w http.ResponseWriter, r *http.Request) {
				<-r.Context().Done()
				io.Copy(w, io.LimitReader(strings.NewReader(""), 1)) // ReadFrom on HTTP/1
			})
			mwCheckExpired(t, resp)
		})
		t.Run("c: answers itself", func(t *testing.T) {
			for name, answer := range map[string]func(http.ResponseWriter){
				"WriteHeader": func(w http.ResponseWriter) { w.WriteHeader(500) },
				"Write":       func(w http.ResponseWriter) { w.Write([]byte("x")) },
				"Write none":  func(w http.ResponseWriter) { w.Write(nil) },
				"WriteString": func(w http.ResponseWriter) { io.WriteString(w, "x") },
				"ReadFrom":    func(w http.ResponseWriter) { io.Copy(w, io.LimitReader(strings.NewReader("x"), 1)) },
				"Flush":       func(w http.ResponseWriter) { w.(http.Flusher).Flush() },
				"FlushError":  func(w http.ResponseWriter) { http.NewResponseController(w).Flush() },
			} {
				want := 200
				if name == "WriteHeader" {
					want = 500
				}
				resp, body, events := run(t, 100*time.Millisecond, func(w http.ResponseWriter, r *http.Request) {
					<-r.Context().Done()
					answer(w)
				})
				if resp.StatusCode != want || resp.Header.Get(HeaderDeadlineExpired) != "" || len(body) > 1 {
					t.Errorf("%s: got %d %q %v, want %d untouched", name, resp.StatusCode, body, resp.Header, want)
				}
				events.await(t, fmt.Sprintf("arrived, expired, served %d", want))
			}
		})
		t.Run("in time", func(t *testing.T) {
			resp, _, events := run(t, time.Minute, func(http.ResponseWriter, *http.Request) {})
			if resp.StatusCode != 200 {
				t.Errorf("got %d, want 200", resp.StatusCode)
			}
			events.await(t, "arrived, served 200")
		})
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("d: left by the client, returns late: %v", late), func(t *testing.T) {
				const left = 300 * time.Millisecond
				events := new(mwEvents)
				m := mwNew(t, MiddlewareConfig{Hook: events.hook})
				entered := make(chan struct{})
				var cause error
				var wrote atomic.Int32
				h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					close(entered)
					<-r.Context().Done()
					cause = context.Cause(r.Context())
					if late {
						time.Sleep(left)
					}
				}))
				srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					h.ServeHTTP(mwCounting{w, &wrote}, r)
				}))
				ctx, cancel := context.WithCancel(t.Context())
				go func() { <-entered; cancel() }()
				req, _ := http.NewRequestWithContext(ctx, "GET", srv.URL, nil)
				req.Header.Set(HeaderDeadline, mwIn(left))
				if resp, err := client.Do(req); err == nil {
					t.Fatalf("got %s, want an error", resp.Status)
				}
				events.await(t, "arrived, served 0")
				if cause != context.Canceled || wrote.Load() != 0 {
					t.Errorf("cause: %v, writes: %d; want %v, 0", cause, wrote.Load(), context.Canceled)
				}
			})
		}
	})
}

// O-39: a reverse proxy whose error handler keeps quiet about the deadline does
// not turn it into a broken gateway.
func TestO39_ReverseProxy(t *testing.T) {
	backend, _ := mwServe(t, 1, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	target, _ := url.Parse(backend.URL)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, err error) {
		if !errors.Is(err, context.DeadlineExceeded) {
			w.WriteHeader(http.StatusBadGateway)
		}
	}
	mwEachProtocol(t, func(t *testing.T, major int) {
		srv, client := mwServe(t, major, mwNew(t, MiddlewareConfig{}).Handler(proxy))
		resp, _ := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, mwIn(100*time.Millisecond))
		mwCheckExpired(t, resp)
	})
}

// mwCounting counts what is written.
type mwCounting struct {
	http.ResponseWriter
	n *atomic.Int32
}

func (w mwCounting) WriteHeader(code int)        { w.n.Add(1); w.ResponseWriter.WriteHeader(code) }
func (w mwCounting) Write(b []byte) (int, error) { w.n.Add(1); return w.ResponseWriter.Write(b) }

// Panics pass, with their value, and are counted; so is Goexit.
func TestPanicsPass(t *testing.T) {
	for name, tt := range map[string]struct {
		end    func(http.ResponseWriter)
		status int
		want   any
	}{
		"abort":    {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, 0, http.ErrAbortHandler},
		"panic":    {func(http.ResponseWriter) { panic("boom") }, 0, "boom"},
		"answered": {func(w http.ResponseWriter) { w.WriteHeader(404); panic("boom") }, 404, "boom"},
		"low":      {func(w http.ResponseWriter) { w.WriteHeader(42) }, 0, "invalid WriteHeader code 42"},
		"high":     {func(w http.ResponseWriter) { w.WriteHeader(1000) }, 0, "invalid WriteHeader code 1000"},
		"Goexit":   {func(http.ResponseWriter) { runtime.Goexit() }, 0, nil},
	} {
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{Hook: events.hook})
		var ctx context.Context
		done := make(chan any)
		go func() {
			defer func() { done <- recover() }()
			m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				ctx = r.Context()
				tt.end(w)
			})).ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderDeadline, mwIn(time.Minute)))
		}()
		if got := <-done; fmt.Sprint(got) != fmt.Sprint(tt.want) {
			t.Errorf("%s: recovered %v, want %v", name, got, tt.want)
		}
		if got, want := events.String(), fmt.Sprintf("arrived, served %d", tt.status); got != want {
			t.Errorf("%s: events: got %q, want %q", name, got, want)
		}
		if ctx.Err() == nil {
			t.Errorf("%s: the context and its timer live on", name)
		}
	}
}

func mwRequest(pairs ...string) *http.Request {
	r := httptest.NewRequest("GET", "/", nil)
	for i := 0; i < len(pairs); i += 2 {
		r.Header.Add(pairs[i], pairs[i+1])
	}
	return r
}

// O-32: clocks that differ. What the handler gets never exceeds the maximum,
// and with the companion a broken clock is worked around.
func TestO32_SkewedClocks(t *testing.T) {
	const left = 5 * time.Second
	for _, tt := range []struct {
		skew      time.Duration // this clock minus the caller's
		tolerance time.Duration
		companion bool
		want      time.Duration // 0: refused
	}{
		{-time.Hour, 0, false, time.Hour}, // the maximum
		{-2 * time.Second, 0, false, 7 * time.Second},
		{2 * time.Second, 0, false, 3 * time.Second},
		{6 * time.Second, 0, false, 0},
		{6 * time.Second, 10 * time.Second, false, 0}, // tolerance does nothing alone
		{time.Hour, 0, false, 0},

		{-time.Hour, 0, true, left},
		{-2 * time.Second, 0, true, left},
		{2 * time.Second, 0, true, 3 * time.Second},
		{2 * time.Second, 3 * time.Second, true, left},
		{6 * time.Second, 0, true, 0},
		{6 * time.Second, 2 * time.Second, true, time.Second},
		{time.Hour, 0, true, left},
	} {
		m := mwNew(t, MiddlewareConfig{SkewTolerance: tt.tolerance})
		m.wall = func(now time.Time) time.Time { return now.Add(tt.skew) }
		sent := time.Now().Add(left).UnixMilli()
		r := mwRequest(HeaderDeadline, strconv.FormatInt(sent, 10))
		if tt.companion {
			r.Header.Set(HeaderTimeout, "5000")
		}
		req, cancel, err := m.Adopt(r)
		defer cancel()
		if tt.want == 0 {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%+v: got %v, want it refused", tt, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%+v: got %v", tt, err)
			continue
		}
		d, ok := req.Context().Deadline()
		if got := time.Until(d); !ok || got > tt.want+time.Millisecond || got < tt.want-time.Second {
			t.Errorf("%+v: got %v left, want %v", tt, got, tt.want)
		}
		// The number stays the caller's, whatever the clock here shows, unless it
		// lay beyond the maximum.
		if got := arrivalFrom(req.Context()).adopted().ms; got != sent && tt.skew != -time.Hour {
			t.Errorf("%+v: got %d, want the number sent, %d", tt, got, sent)
		}
		// It carries a monotonic reading: a step of the clock moves nothing.
		if !strings.Contains(d.String(), "m=") {
			t.Errorf("%+v: %v has no monotonic reading", tt, d)
		}
	}
}

// At the edge there is no other clock than this host's, and the number is made
// by it.
func TestO32_EdgeClock(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{Timeout: 5 * time.Second})
	m.wall = func(now time.Time) time.Time { return now.Add(time.Hour) }
	req, cancel, err := m.Adopt(mwRequest())
	defer cancel()
	if err != nil {
		t.Fatal(err)
	}
	got := time.Until(time.UnixMilli(arrivalFrom(req.Context()).adopted().ms)) - time.Hour
	if got > 5*time.Second || got < 4*time.Second {
		t.Errorf("got %v left by this host's clock, want 5 s", got)
	}
}

// A clock that is stepped while a request is served moves nothing; only what is
// said of the clock follows it.
func TestO32_ClockStep(t *testing.T) {
	var step atomic.Int64
	m := mwNew(t, MiddlewareConfig{})
	m.wall = func(now time.Time) time.Time { return now.Add(time.Duration(step.Load())) }
	rec := httptest.NewRecorder()
	start := time.Now()
	m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		step.Store(int64(-time.Hour))
		<-r.Context().Done()
	})).ServeHTTP(rec, mwRequest(HeaderDeadline, mwIn(50*time.Millisecond), "Accept", "application/json"))
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("took %v, want 50 ms", took)
	}
	mwCheckExpired(t, rec.Result())
	var p struct {
		Now  int64 `json:"now_ms"`
		Late int64 `json:"late_by_ms"`
	}
	if err := json.Unmarshal(rec.Body.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	if off := time.Until(time.UnixMilli(p.Now)); off > -50*time.Minute || p.Late > 2000 {
		t.Errorf("got %+v, want now an hour ago and a few ms late", p)
	}
}

// O-33: one policy for unusable values, and never less protection than without
// the header.
func TestO33_UnusableHeader(t *testing.T) {
	for _, value := range []string{
		"", " ", "12 34", "soon", "-5000", "+5000", "5.0", "99999999999999999999", "9223372036854775808", "1,2,3,4,5", "\xff", "１２３", strings.Repeat("9", 100_000),
	} {
		show := value[:min(len(value), 30)]
		for _, timeout := range []time.Duration{0, time.Second} {
			events := new(mwEvents)
			m := mwNew(t, MiddlewareConfig{Timeout: timeout, Hook: events.hook})
			req, cancel, err := m.Adopt(mwRequest(HeaderDeadline, value))
			defer cancel()
			d, ok := req.Context().Deadline()
			if err != nil || ok != (timeout > 0) || ok && time.Until(d) > timeout {
				t.Errorf("%q, Timeout %v: got deadline %v %v, error %v", show, timeout, ok, time.Until(d), err)
			}

			events = new(mwEvents)
			m = mwNew(t, MiddlewareConfig{Timeout: timeout, Hook: events.hook, RejectInvalid: true})
			req, cancel, err = m.Adopt(mwRequest(HeaderDeadline, value))
			defer cancel()
			var e *Error
			if !errors.As(err, &e) || e.Reason != ReasonInvalid || errors.Is(err, context.DeadlineExceeded) || e.Timeout() {
				t.Errorf("%q: got %v, want %s", show, err, ReasonInvalid)
			}
			if req == nil || cancel == nil {
				t.Errorf("%q: got no request or no cancel function", show)
			}
			if got := events.get(EventArrived); got.Reason != ReasonInvalid || got.Err == nil {
				t.Errorf("%q: event: got %+v, want the reason", show, got)
			}

			rec := httptest.NewRecorder()
			outer := rec.Header()
			outer.Set("Etag", "x")
			m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Errorf("%q: handler ran", show) })).
				ServeHTTP(rec, mwRequest(HeaderDeadline, value, "Accept", "application/json"))
			resp := rec.Result()
			if resp.StatusCode != 400 || resp.Header.Get(HeaderDeadlineExpired) != "" || resp.Header.Get(HeaderShouldRetry) != "false" ||
				resp.Header.Get("Cache-Control") != "no-store" || resp.Header.Get("Etag") != "" {
				t.Errorf("%q: got %d %v", show, resp.StatusCode, resp.Header)
			}
			var p struct{ Detail string }
			if err := json.Unmarshal(rec.Body.Bytes(), &p); err != nil || !strings.Contains(p.Detail, HeaderDeadline) {
				t.Errorf("%q: body %q, %v", show, rec.Body, err)
			}
			if len(value) > 3 && strings.Contains(rec.Body.String(), value) {
				t.Errorf("%q: the value is shown back", show)
			}
			events.await(t, "arrived, arrived, served 400")
		}
	}
	// A usable one among others counts.
	m := mwNew(t, MiddlewareConfig{RejectInvalid: true})
	if _, cancel, err := m.Adopt(mwRequest(HeaderDeadline, "soon", HeaderDeadline, mwIn(time.Second))); err != nil {
		t.Error(err)
	} else {
		cancel()
	}
}

// O-36: whatever an outsider sends, nothing panics and only the closed sets
// come out.
func TestO36_OutsidersChooseNothing(t *testing.T) {
	events := new(mwEvents)
	h := mwNew(t, MiddlewareConfig{Service: "s", Hook: events.hook}).Handler(http.NotFoundHandler())
	for i := range 300 {
		r := httptest.NewRequest("GET", "/"+strconv.Itoa(i), nil)
		r.Method = "M" + strconv.Itoa(i)
		r.Host = "\xff" + strconv.Itoa(i)
		r.Header[HeaderDeadline] = []string{strings.Repeat("9", i%25), "x"}
		r.Header[HeaderTimeout] = []string{strconv.Itoa(-i)}
		r.Header[HeaderRetryCount] = []string{strings.Repeat("9", i%25)}
		r.Header[HeaderIdempotencyKey] = []string{`"` + strings.Repeat(`\`, i)}
		r.Header["Accept"] = []string{";q=;,,application/json;q=x;q"}
		r.Header["Connection"], r.Header["Upgrade"] = []string{",upgrade"}, []string{","}
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	events.mu.Lock()
	defer events.mu.Unlock()
	for _, e := range events.list {
		if e.Service != "s" || e.Reason != "" && e.Reason != ReasonExpired || e.Attempt > 1+maxRetryCount {
			t.Fatalf("got %+v", e)
		}
	}
}

// P5, S21: the tightest bound wins, and nothing extends.
func TestP5_AdoptNeverExtends(t *testing.T) {
	type want struct {
		left  time.Duration // of the context; 0: no deadline
		calls time.Duration // of the calls; 0: nothing adopted
	}
	for name, tt := range map[string]struct {
		config MiddlewareConfig
		header time.Duration // 0: none
		own    time.Duration // the context's; 0: none
		want   want
	}{
		"nothing":             {want: want{}},
		"header":              {header: 5 * time.Second, want: want{5 * time.Second, 5 * time.Second}},
		"shorter context":     {header: 5 * time.Second, own: time.Second, want: want{time.Second, time.Second}},
		"longer context":      {header: 5 * time.Second, own: 9 * time.Second, want: want{5 * time.Second, 5 * time.Second}},
		"context alone":       {own: 2 * time.Second, want: want{2 * time.Second, 0}},
		"edge":                {config: MiddlewareConfig{Timeout: 3 * time.Second}, want: want{3 * time.Second, 3 * time.Second}},
		"edge, long context":  {config: MiddlewareConfig{Timeout: 3 * time.Second}, own: time.Minute, want: want{3 * time.Second, 3 * time.Second}},
		"edge, short context": {config: MiddlewareConfig{Timeout: 3 * time.Second}, own: time.Second, want: want{time.Second, time.Second}},
		"header beats edge":   {config: MiddlewareConfig{Timeout: 3 * time.Second}, header: 9 * time.Second, want: want{9 * time.Second, 9 * time.Second}},
		"maximum":             {config: MiddlewareConfig{MaxTimeout: 4 * time.Second}, header: time.Minute, want: want{4 * time.Second, 4 * time.Second}},
		"default maximum":     {header: 1000 * time.Hour, want: want{time.Hour, time.Hour}},
		"centuries":           {own: 290 * 365 * 24 * time.Hour, want: want{290 * 365 * 24 * time.Hour, 0}},
		"TimeoutFor": {config: MiddlewareConfig{Timeout: time.Second, TimeoutFor: func(*http.Request) time.Duration { return 2 * time.Second }},
			want: want{2 * time.Second, 2 * time.Second}},
		"TimeoutFor negative": {config: MiddlewareConfig{Timeout: time.Second, TimeoutFor: func(*http.Request) time.Duration { return -1 }}},
		"TimeoutFor zero":     {config: MiddlewareConfig{Timeout: time.Second, TimeoutFor: func(*http.Request) time.Duration { return 0 }}},
		"TimeoutFor too long": {config: MiddlewareConfig{MaxTimeout: 4 * time.Second, TimeoutFor: func(*http.Request) time.Duration { return 1 << 62 }},
			want: want{4 * time.Second, 4 * time.Second}},
		"TimeoutFor, header": {config: MiddlewareConfig{TimeoutFor: func(*http.Request) time.Duration { return -1 }}, header: 5 * time.Second,
			want: want{5 * time.Second, 5 * time.Second}},
		"distrusted": {config: MiddlewareConfig{Timeout: 2 * time.Second, TrustHeader: func(*http.Request) bool { return false }}, header: time.Second,
			want: want{2 * time.Second, 2 * time.Second}},
		"trusted":     {config: MiddlewareConfig{TrustHeader: func(*http.Request) bool { return true }}, header: time.Second, want: want{time.Second, time.Second}},
		"ReportOnly":  {config: MiddlewareConfig{Timeout: time.Second, ReportOnly: true}, header: time.Second},
		"ReportOnly+": {config: MiddlewareConfig{ReportOnly: true}, header: time.Second, own: 2 * time.Second, want: want{2 * time.Second, 0}},
		"Exempt":      {config: MiddlewareConfig{Exempt: func(*http.Request) bool { return true }}, header: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			near := func(what string, got, want time.Duration) {
				t.Helper()
				if got > want || got < want-800*time.Millisecond {
					t.Errorf("%s: got %v left, want %v", what, got, want)
				}
			}
			for _, wallOnly := range []bool{false, true} {
				r := mwRequest()
				if tt.header != 0 {
					r.Header.Set(HeaderDeadline, mwIn(tt.header))
				}
				if tt.own != 0 {
					own := time.Now().Add(tt.own)
					if wallOnly {
						own = own.Round(0)
					}
					ctx, cancel := context.WithDeadline(r.Context(), own)
					defer cancel()
					r = r.WithContext(ctx)
				}
				req, cancel, err := mwNew(t, tt.config).Adopt(r)
				defer cancel()
				if err != nil {
					t.Fatal(err)
				}
				d, ok := req.Context().Deadline()
				if ok != (tt.want.left != 0) {
					t.Fatalf("context has a deadline: got %v, want %v", ok, !ok)
				}
				if ok {
					near("context", time.Until(d), tt.want.left)
				}
				a := arrivalFrom(req.Context()).adopted()
				if (a != nil) != (tt.want.calls != 0) {
					t.Fatalf("adopted: got %v, want %v", a, tt.want.calls)
				}
				// One timer is enough where the context's own comes first.
				if _, bare := req.Context().(*exchange); ok && tt.own != 0 && bare != (tt.own == tt.want.left) {
					t.Errorf("the context is ours alone: got %v, want %v", bare, !bare)
				}
				if a != nil {
					near("calls", time.Until(a.e), tt.want.calls)
					// With no skew, what would be sent for the whole of it is
					// never above the clock's reading.
					if wire := time.UnixMilli(a.onWire(a.e)); wire.After(a.e) {
						t.Errorf("on the wire: %v, after the deadline %v", wire, a.e)
					}
					if tt.header != 0 && tt.config.TrustHeader == nil {
						if sent, _ := strconv.ParseInt(r.Header.Get(HeaderDeadline), 10, 64); a.ms > sent {
							t.Errorf("on the wire: %d, above %d", a.ms, sent)
						}
					}
				}
			}
		})
	}
}

// Expired: an *Error that is a deadline's, and a request and cancel function
// all the same.
func TestAdoptExpired(t *testing.T) {
	past, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	for name, r := range map[string]*http.Request{
		"header":  mwRequest(HeaderDeadline, mwIn(-time.Second)),
		"zero":    mwRequest(HeaderDeadline, "0"),
		"context": mwRequest().WithContext(past),
		"both":    mwRequest(HeaderDeadline, mwIn(time.Second)).WithContext(past),
	} {
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{Hook: events.hook})
		req, cancel, err := m.Adopt(r)
		var e *Error
		if !errors.As(err, &e) || e.Reason != ReasonExpired || !e.Timeout() || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v", name, err)
		}
		if req == nil || cancel == nil {
			t.Fatalf("%s: got no request or no cancel function", name)
		}
		// Who serves it in spite of the error starts nothing that lasts.
		if req.Context().Err() != context.DeadlineExceeded {
			t.Errorf("%s: context: got %v", name, req.Context().Err())
		}
		cancel()
		if got, want := events.String(), "arrived, expired"; got != want {
			t.Errorf("%s: events: got %q, want %q", name, got, want)
		}
	}
}

// Exempt requests are passed on as they are, and nobody hears of them.
func TestExempt(t *testing.T) {
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{Hook: events.hook, Exempt: func(r *http.Request) bool { return r.URL.Path == "/" }})
	r := mwRequest(HeaderDeadline, "1")
	if req, _, err := m.Adopt(r); req != r || err != nil {
		t.Errorf("Adopt: got %p, %v; want %p, nil", req, err, r)
	}
	rec := httptest.NewRecorder()
	m.Handler(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req != r || w != rec {
			t.Errorf("got %p, %v; want them as they came", req, w)
		}
	})).ServeHTTP(rec, r)
	if got := events.String(); got != "" {
		t.Errorf("events: got %q, want none", got)
	}
}

// ReportOnly reports everything and does nothing.
func TestReportOnly(t *testing.T) {
	for name, tt := range map[string]struct {
		left time.Duration
		h    http.HandlerFunc
		want string
		code int
	}{
		"late": {-time.Second, func(http.ResponseWriter, *http.Request) {}, "arrived, expired, served 200", 200},
		"late, once": {20 * time.Millisecond, func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(30 * time.Millisecond)
			if err := r.Context().Err(); err != nil {
				t.Errorf("context: got %v, want nil", err)
			}
		}, "arrived, expired, served 200", 200},
		"not marked": {time.Minute, func(w http.ResponseWriter, r *http.Request) {
			arrivalFrom(r.Context()).note.fail("x")
			w.WriteHeader(503)
		}, "arrived, served 503", 503},
	} {
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{ReportOnly: true, RejectInvalid: true, Hook: events.hook})
		rec := httptest.NewRecorder()
		m.Handler(tt.h).ServeHTTP(rec, mwRequest(HeaderDeadline, mwIn(tt.left)))
		if rec.Code != tt.code || len(rec.Header()) != 0 {
			t.Errorf("%s: got %d %v, want %d untouched", name, rec.Code, rec.Header(), tt.code)
		}
		if got := events.String(); got != tt.want {
			t.Errorf("%s: events: got %q, want %q", name, got, tt.want)
		}
	}
	m := mwNew(t, MiddlewareConfig{ReportOnly: true, RejectInvalid: true})
	req, cancel, err := m.Adopt(mwRequest(HeaderDeadline, "soon", HeaderIdempotencyKey, "k"))
	defer cancel()
	if err != nil {
		t.Errorf("unusable header: got %v, want nil", err)
	}
	if key, ok := IdempotencyKey(req.Context()); !ok || key != "k" {
		t.Errorf("key: got %q, %v; want k", key, ok)
	}
}

// A middleware inside another shortens, and neither extends what the outer one
// adopted nor trusts what it distrusts.
func TestP5_Nested(t *testing.T) {
	skewed := mwNew(t, MiddlewareConfig{Timeout: 10 * time.Second})
	skewed.wall = func(now time.Time) time.Time { return now.Add(-time.Minute) }
	sent := mwIn(10*time.Second - time.Minute)
	sentMS, _ := strconv.ParseInt(sent, 10, 64)

	adopt := func(r *http.Request, ms ...*Middleware) *deadline {
		t.Helper()
		for _, m := range ms {
			req, cancel, err := m.Adopt(r)
			t.Cleanup(cancel)
			if err != nil {
				t.Fatal(err)
			}
			r = req
		}
		return arrivalFrom(r.Context()).adopted()
	}
	header := mwRequest(HeaderDeadline, sent)
	noTrust := func(*http.Request) bool { return false }
	for name, tt := range map[string]struct {
		inner *Middleware
		left  time.Duration
	}{
		"plain":              {mwNew(t, MiddlewareConfig{TrustHeader: noTrust}), 10 * time.Second},
		"longer":             {mwNew(t, MiddlewareConfig{TrustHeader: noTrust, Timeout: time.Minute}), 10 * time.Second},
		"shorter":            {mwNew(t, MiddlewareConfig{TrustHeader: noTrust, Timeout: time.Second}), time.Second},
		"watching":           {mwNew(t, MiddlewareConfig{ReportOnly: true, Timeout: time.Second}), 10 * time.Second},
		"the same once more": {skewed, 10 * time.Second},
	} {
		d := adopt(header, skewed, tt.inner)
		if d == nil {
			t.Errorf("%s: nothing adopted", name)
			continue
		}
		if left := time.Until(d.e); left > tt.left || left < tt.left-800*time.Millisecond {
			t.Errorf("%s: got %v left, want %v", name, left, tt.left)
		}
		// In the caller's clock, a minute behind.
		if got := d.onWire(d.e); got > sentMS || got < sentMS-(10*time.Second-tt.left).Milliseconds()-800 {
			t.Errorf("%s: on the wire: got %d, want %d less what is shorter", name, got, sentMS)
		}
	}
	if d := adopt(header, mwNew(t, MiddlewareConfig{TrustHeader: noTrust}), mwNew(t, MiddlewareConfig{})); d != nil {
		t.Errorf("the inner one trusts what the outer one does not: %v", d)
	}
}

// S28: retries in one layer. The mark is on answers that say a gateway's calls
// failed, when they did so for good.
func TestS28_FailedCallsMarkTheAnswer(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		for _, tt := range []struct {
			name string
			h    func(http.ResponseWriter, *note)
			want string
		}{
			{"502", func(w http.ResponseWriter, n *note) { n.fail("x"); w.WriteHeader(502) }, "false"},
			{"503", func(w http.ResponseWriter, n *note) { n.fail("x"); http.Error(w, "x", 503) }, "false"},
			{"504", func(w http.ResponseWriter, n *note) { n.fail("x"); w.WriteHeader(504) }, "false"},
			{"replaced", func(w http.ResponseWriter, n *note) {
				n.fail("x")
				w.Header()[HeaderShouldRetry] = []string{"true", "maybe"}
				w.WriteHeader(504)
			}, "false"},
			{"after 103", func(w http.ResponseWriter, n *note) { w.WriteHeader(103); n.fail("x"); w.WriteHeader(503) }, "false"},
			{"500", func(w http.ResponseWriter, n *note) { n.fail("x"); w.WriteHeader(500) }, ""},
			{"200", func(w http.ResponseWriter, n *note) { n.fail("x"); io.WriteString(w, "x") }, ""},
			{"no call failed", func(w http.ResponseWriter, n *note) { w.WriteHeader(503) }, ""},
			{"success since", func(w http.ResponseWriter, n *note) { n.fail("x"); n.succeed("x"); w.WriteHeader(503) }, ""},
			{"another's success", func(w http.ResponseWriter, n *note) { n.fail("x"); n.succeed("y"); w.WriteHeader(503) }, "false"},
		} {
			m := mwNew(t, MiddlewareConfig{})
			srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				tt.h(w, &arrivalFrom(r.Context()).note)
			})))
			resp, _ := mwDo(t, client, "GET", srv.URL, nil)
			if got := strings.Join(resp.Header.Values(HeaderShouldRetry), ","); got != tt.want {
				t.Errorf("%s: X-Should-Retry: got %q, want %q", tt.name, got, tt.want)
			}
			// It is a deadline's answer only when it is ours.
			if got := resp.Header.Get(HeaderDeadlineExpired); got != "" {
				t.Errorf("%s: X-Deadline-Expired: got %q, want none", tt.name, got)
			}
		}
	})
}

// A reverse proxy flushes from a timer of its own; run with -race.
func TestReverseProxyFlushInterval(t *testing.T) {
	backend, _ := mwServe(t, 1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for range 20 {
			io.WriteString(w, "part ")
			w.(http.Flusher).Flush()
			time.Sleep(2 * time.Millisecond)
		}
	}))
	target, _ := url.Parse(backend.URL)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = time.Millisecond
	mwEachProtocol(t, func(t *testing.T, major int) {
		events := new(mwEvents)
		srv, client := mwServe(t, major, mwNew(t, MiddlewareConfig{Hook: events.hook}).Handler(proxy))
		_, body := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, mwIn(time.Minute))
		if want := strings.Repeat("part ", 20); body != want {
			t.Errorf("got %q, want %q", body, want)
		}
		events.await(t, "arrived, served 200")
	})
}

// S24: the server sees the retry rate that clients hide.
func TestS24_RetryCount(t *testing.T) {
	for value, want := range map[string]int{
		"": 1, "0": 1, "1": 2, " 2 ": 3, "007": 8, "-1": 1, "+1": 1, "x": 1, "1, 2": 1, "99999": 1 + maxRetryCount, "99999999999999999999": 1,
	} {
		events := new(mwEvents)
		m := mwNew(t, MiddlewareConfig{Hook: events.hook})
		_, cancel, _ := m.Adopt(mwRequest(HeaderRetryCount, value))
		cancel()
		if got := events.get(EventArrived).Attempt; got != want {
			t.Errorf("%q: got attempt %d, want %d", value, got, want)
		}
	}
}

func TestEventFields(t *testing.T) {
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{Service: "orders", Hook: events.hook})
	sent := time.Now().Add(time.Minute).UnixMilli()
	m.Handler(http.NotFoundHandler()).ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderDeadline, strconv.FormatInt(sent, 10)))
	a, s := events.get(EventArrived), events.get(EventServed)
	if a.Service != "orders" || a.DeadlineMS != sent || a.Remaining <= 0 || a.Remaining > time.Minute || a.Attempt != 1 || a.Reason != "" {
		t.Errorf("arrived: got %+v", a)
	}
	if s.Service != "orders" || s.DeadlineMS != sent || s.Status != 404 || s.Took <= 0 || s.Reason != "" {
		t.Errorf("served: got %+v", s)
	}
	// The hook's context has what the handler's has.
	var key string
	m = mwNew(t, MiddlewareConfig{Hook: func(ctx context.Context, _ Event) { key, _ = IdempotencyKey(ctx) }})
	_, cancel, _ := m.Adopt(mwRequest(HeaderIdempotencyKey, "k"))
	defer cancel()
	if key != "k" {
		t.Errorf("key in the hook: got %q, want k", key)
	}
}

// IdempotencyKey: one line, bare or quoted, of visible ASCII.
func TestIdempotencyKeyOfARequest(t *testing.T) {
	const key, x = HeaderIdempotencyKey, "X-Idempotency-Key"
	for _, tt := range []struct {
		pairs []string
		want  string
	}{
		{nil, ""},
		{[]string{key, "abc"}, "abc"},
		{[]string{key, `"abc"`}, "abc"},
		{[]string{x, ` "abc" `}, "abc"},
		{[]string{x, "abc"}, "abc"},
		{[]string{key, `"a\"b\\c"`}, `a"b\c`},
		{[]string{key, `a"b`}, `a"b`},
		{[]string{key, "abc", key, "abc"}, ""},
		{[]string{key, "abc", x, "abc"}, ""},
		{[]string{key, ""}, ""},
		{[]string{key, `""`}, ""},
		{[]string{key, `"`}, ""},
		{[]string{key, `"abc`}, ""},
		{[]string{key, `"abc";p=1`}, ""},
		{[]string{key, `"a"b"`}, ""},
		{[]string{key, `"a\b"`}, ""},
		{[]string{key, `"abc\"`}, ""},
		{[]string{key, "a b"}, ""},
		{[]string{key, "a\tb"}, ""},
		{[]string{key, "ä"}, ""},
		{[]string{key, strings.Repeat("k", 255)}, strings.Repeat("k", 255)},
		{[]string{key, `"` + strings.Repeat("k", 255) + `"`}, strings.Repeat("k", 255)},
		{[]string{key, strings.Repeat("k", 256)}, ""},
	} {
		req, cancel, err := mwNew(t, MiddlewareConfig{}).Adopt(mwRequest(tt.pairs...))
		if err != nil {
			t.Fatal(err)
		}
		got, ok := IdempotencyKey(req.Context())
		cancel()
		if got != tt.want || ok != (tt.want != "") {
			t.Errorf("%q: got %q, %v; want %q", tt.pairs, got, ok, tt.want)
		}
	}
	if _, ok := IdempotencyKey(context.Background()); ok {
		t.Error("a key without a middleware")
	}
}

// TrustHeader: the arrival says that a copied header means nothing.
func TestTrustHeader(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{RejectInvalid: true, TrustHeader: func(r *http.Request) bool { return r.Host == "inside" }})
	for host, distrust := range map[string]bool{"inside": false, "outside": true} {
		r := mwRequest()
		r.Host = host
		if distrust {
			r.Header.Set(HeaderDeadline, "not even looked at")
		}
		req, cancel, err := m.Adopt(r)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if got := arrivalFrom(req.Context()).distrust; got != distrust {
			t.Errorf("%s: distrust: got %v, want %v", host, got, distrust)
		}
	}
}

// P7: what net/http and layers outside find in their own request is there.
func TestP7_RequestSeenFromOutside(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /items/{id}", func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(0); err != nil {
			t.Error(err)
		}
	})
	r := httptest.NewRequest("POST", "/items/1", strings.NewReader("--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\nx\r\n--b--\r\n"))
	r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
	header := r.Header.Clone()
	mwNew(t, MiddlewareConfig{Timeout: time.Second}).Handler(mux).ServeHTTP(httptest.NewRecorder(), r)
	if r.MultipartForm == nil {
		t.Fatal("nobody will remove the form's files")
	}
	r.MultipartForm.RemoveAll()
	if r.Pattern != "POST /items/{id}" {
		t.Errorf("pattern: got %q", r.Pattern)
	}
	if !reflect.DeepEqual(r.Header, header) {
		t.Errorf("header: got %v, want %v", r.Header, header)
	}
}

// P7: also when the handler panics. An HTTP/2 server removes the files then.
func TestP7_PanicKeepsWhatIsSeenFromOutside(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /items/{id}", func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(0); err != nil {
			t.Error(err)
		}
		panic(http.ErrAbortHandler)
	})
	r := httptest.NewRequest("POST", "/items/1", strings.NewReader("--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"f\"\r\n\r\nx\r\n--b--\r\n"))
	r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
	func() {
		defer func() { recover() }()
		mwNew(t, MiddlewareConfig{Timeout: time.Second}).Handler(mux).ServeHTTP(httptest.NewRecorder(), r)
	}()
	if r.MultipartForm == nil {
		t.Fatal("nobody will remove the form's files")
	}
	r.MultipartForm.RemoveAll()
	if r.Pattern != "POST /items/{id}" {
		t.Errorf("pattern: got %q", r.Pattern)
	}
}

// One Middleware, many handlers and goroutines; run with -race.
func TestMiddlewareConcurrentUse(t *testing.T) {
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{Hook: events.hook})
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			want := 200 + i
			rec := httptest.NewRecorder()
			m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				runtime.Gosched()
				w.WriteHeader(want)
				io.WriteString(w, strconv.Itoa(want))
				http.NewResponseController(w).Flush()
			})).ServeHTTP(rec, mwRequest(HeaderDeadline, mwIn(time.Minute)))
			if rec.Code != want || rec.Body.String() != strconv.Itoa(want) {
				t.Errorf("got %d %q, want %d", rec.Code, rec.Body, want)
			}
		})
	}
	wg.Wait()
}

// mwWriter does nothing, and offers what net/http's HTTP/1 writer does.
type mwWriter struct{ h http.Header }

func (w *mwWriter) Header() http.Header {
	if w.h == nil {
		w.h = http.Header{}
	}
	return w.h
}
func (w *mwWriter) WriteHeader(int)                     {}
func (w *mwWriter) Write(b []byte) (int, error)         { return len(b), nil }
func (w *mwWriter) WriteString(s string) (int, error)   { return len(s), nil }
func (w *mwWriter) ReadFrom(r io.Reader) (int64, error) { return io.Copy(io.Discard, r) }
func (w *mwWriter) Flush()                              {}
func (w *mwWriter) FlushError() error                   { return nil }
func (w *mwWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return nil, nil, http.ErrNotSupported
}
func (w *mwWriter) CloseNotify() <-chan bool         { return nil }
func (w *mwWriter) SetReadDeadline(time.Time) error  { return nil }
func (w *mwWriter) SetWriteDeadline(time.Time) error { return nil }
func (w *mwWriter) EnableFullDuplex() error          { return nil }

// A Hijack that fails has taken nothing over.
func TestHijackFails(t *testing.T) {
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{Hook: events.hook})
	m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, _, err := w.(http.Hijacker).Hijack(); err != http.ErrNotSupported {
			t.Errorf("got %v", err)
		}
		if arrivalFrom(r.Context()).adopted() == nil {
			t.Error("the deadline is gone")
		}
		w.WriteHeader(404)
	})).ServeHTTP(new(mwWriter), mwRequest(HeaderDeadline, mwIn(time.Minute)))
	events.await(t, "arrived, served 404")
}

// P9: what one request costs.
func TestP9_MiddlewareAllocations(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{})
	next := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) })
	h := m.Handler(next)
	r, w := mwRequest(HeaderDeadline, mwIn(time.Minute), HeaderTimeout, "60000"), new(mwWriter)
	// A server's request has a context that can be cancelled.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	r = r.WithContext(ctx)
	if got := testing.AllocsPerRun(200, func() { h.ServeHTTP(w, r) }); got > 26 {
		t.Errorf("got %v allocations for a request with a deadline, want at most 26", got)
	} else {
		t.Logf("%v allocations", got)
	}
}

func BenchmarkMiddleware(b *testing.B) {
	next := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) })
	m := mwNew(b, MiddlewareConfig{})
	for _, bb := range []struct {
		name string
		h    http.Handler
		r    *http.Request
	}{
		{"plain", next, mwRequest()},
		{"no deadline", m.Handler(next), mwRequest()},
		{"deadline", m.Handler(next), mwRequest(HeaderDeadline, mwIn(time.Hour))},
		{"expired", m.Handler(next), mwRequest(HeaderDeadline, "1")},
	} {
		b.Run(bb.name, func(b *testing.B) {
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			r, w := bb.r.WithContext(ctx), new(mwWriter)
			b.ReportAllocs()
			for b.Loop() {
				bb.h.ServeHTTP(w, r)
			}
		})
	}
}

// A handler leaves its body to a goroutine of its own, which is inside Read, waiting
// for a client that has sent half, when the handler returns out of time. The 504
// still goes out, without waiting for the client; and the goroutine is let go.
func TestOutOfTimeWhileAnotherGoroutineReads(t *testing.T) {
	for _, hardStop := range []bool{false, true} {
		mwEachProtocol(t, func(t *testing.T, major int) {
			read := make(chan error, 1)
			h := mwNew(t, MiddlewareConfig{HardStop: hardStop, Timeout: 100 * time.Millisecond}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				go func() {
					_, err := io.Copy(io.Discard, r.Body)
					read <- err
				}()
				<-r.Context().Done()
			}))
			srv, client := mwServe(t, major, h)
			for _, length := range []int64{-1, 100, drainBytes + 1, 1 << 20} {
				pr, pw := io.Pipe()
				go pw.Write([]byte("half"))
				req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, pr)
				req.ContentLength = length
				start := time.Now()
				resp, err := client.Do(req)
				if err != nil {
					t.Fatalf("length %d: %v", length, err)
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				mwCheckExpired(t, resp)
				took := time.Since(start)
				t.Logf("HardStop %v, HTTP/%d, length %d: answered after %v", hardStop, major, length, took)
				if took > 100*time.Millisecond+lingerTime+3*time.Second {
					t.Errorf("HardStop %v, length %d: answered after %v", hardStop, length, took)
				}
				select {
				case err := <-read:
					if err == nil {
						t.Errorf("HardStop %v, length %d: half a body was read to its end", hardStop, length)
					}
				case <-time.After(5 * time.Second):
					t.Fatalf("HardStop %v, length %d: the Read goes on", hardStop, length)
				}
				pw.Close()
			}
		})
	}
}
