package stint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// exitLeft is the deadline of requests that are to outlive theirs, and exitOver
// what those outlive it by.
const (
	exitLeft = 120 * time.Millisecond
	exitOver = 80 * time.Millisecond
)

// States of the request's body.
const (
	exitNoBody   = "no body"
	exitUnread   = "unread"
	exitHalfRead = "half read"
	exitRead     = "read"
	exitHalfSent = "half sent" // and unread
)

// An exitCall is one request that goes through the table.
type exitCall struct {
	hard bool
	// stay is closed when the client has what it gets. Inline, a handler that
	// waited for that would wait for itself: there, it is exitOver after the
	// deadline.
	stay    chan struct{}
	begun   chan struct{} // closed when the handler has been entered and has read
	left    chan struct{} // closed when the client has left
	missed  bool          // what was to come before the deadline did not
	bodyErr error         // of the handler's reading
	lateErr error         // of a Write after the deadline
	lateIn  error         // and of a Read
}

// overstay waits until it is too late.
func (c *exitCall) overstay(r *http.Request) {
	<-r.Context().Done()
	if c.hard {
		<-c.stay
		return
	}
	time.Sleep(exitOver)
}

// What the client and the counters see of an exit.
type exitSeen struct {
	status   int    // 0: a broken connection instead of an answer
	body     string // "" for 504 and 400: ours
	whole    bool   // the body ended as it should
	code     string // of the metric
	exceeded int
	events   string
}

func middlewareExitAnswer(status int, body string, whole bool) exitSeen {
	return exitSeen{status, body, whole, fmt.Sprint(status), 0, fmt.Sprintf("arrived, served %d", status)}
}

func (s exitSeen) late() exitSeen {
	s.exceeded = 1
	s.events = strings.Replace(s.events, "arrived, ", "arrived, expired, ", 1)
	return s
}

func (s exitSeen) andThen(event string) exitSeen {
	s.events += ", " + event
	return s
}

var (
	exitBroken = exitSeen{0, "", false, "500", 0, "arrived, served 0"}
	exitGone   = exitSeen{0, "", false, "499", 0, "arrived, served 0"}
	exit504    = middlewareExitAnswer(504, "", true).late()
)

type exitCase struct {
	name     string
	left     time.Duration // until the deadline, from arrival; 0: a minute
	header   string        // instead
	leaves   string        // when the client does: "before" or "after" the header
	notRun   bool          // the handler
	majors   []int
	bodies   []string
	handler  func(c *exitCall, w http.ResponseWriter, r *http.Request)
	inline   exitSeen
	hard     *exitSeen // nil: as inline
	hardLate bool      // with HardStop the client has its answer while the handler runs
}

func exitCases() []exitCase {
	hard := func(s exitSeen) *exitSeen { return &s }
	part := func(c *exitCall, w http.ResponseWriter) {
		_, err := io.WriteString(w, "part")
		w.(http.Flusher).Flush()
		c.missed = err != nil
	}
	hijack := func(c *exitCall, w http.ResponseWriter, hold func()) {
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			c.missed = true
			return
		}
		defer conn.Close()
		hold()
		rw.WriteString("HTTP/1.1 203 Mine\r\nConnection: close\r\nContent-Length: 4\r\n\r\nmine")
		rw.Flush()
	}
	complete := []string{exitNoBody, exitUnread, exitHalfRead, exitRead}
	all := append([]string{exitHalfSent}, complete...)
	// Until the body has been read, HTTP/1 does not see the client leave.
	seenLeaving := []string{exitNoBody, exitRead}

	return []exitCase{
		{name: "returns", bodies: complete, inline: middlewareExitAnswer(200, "", true),
			handler: func(*exitCall, http.ResponseWriter, *http.Request) {}},
		{name: "answers", bodies: complete, inline: middlewareExitAnswer(404, "none", true),
			handler: func(_ *exitCall, w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(404)
				io.WriteString(w, "none")
			}},
		{name: "streams", bodies: complete, inline: middlewareExitAnswer(200, "data: 0\ndata: 1\ndata: 2\n", true),
			handler: func(_ *exitCall, w http.ResponseWriter, _ *http.Request) {
				for i := range 3 {
					fmt.Fprintf(w, "data: %d\n", i)
					w.(http.Flusher).Flush()
					time.Sleep(time.Millisecond)
				}
			}},
		{name: "returns at the deadline", left: exitLeft, bodies: all, inline: exit504,
			handler: func(_ *exitCall, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		{name: "streams until the deadline", left: exitLeft, bodies: complete, inline: middlewareExitAnswer(200, "part", true).late(),
			handler: func(c *exitCall, w http.ResponseWriter, r *http.Request) { part(c, w); <-r.Context().Done() }},

		{name: "panics", bodies: complete, inline: exitBroken,
			handler: func(*exitCall, http.ResponseWriter, *http.Request) { panic("boom") }},
		{name: "panics after part of an answer", bodies: complete, inline: middlewareExitAnswer(200, "part", false),
			handler: func(c *exitCall, w http.ResponseWriter, _ *http.Request) { part(c, w); panic("boom") }},
		{name: "aborts", bodies: complete, inline: exitBroken,
			handler: func(*exitCall, http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{name: "aborts after part of an answer", bodies: complete, inline: middlewareExitAnswer(200, "part", false),
			handler: func(c *exitCall, w http.ResponseWriter, _ *http.Request) { part(c, w); panic(http.ErrAbortHandler) }},
		{name: "Goexit", bodies: complete, inline: exitBroken,
			handler: func(*exitCall, http.ResponseWriter, *http.Request) { runtime.Goexit() }},
		{name: "Goexit after part of an answer", bodies: complete, inline: middlewareExitAnswer(200, "part", false),
			handler: func(c *exitCall, w http.ResponseWriter, _ *http.Request) { part(c, w); runtime.Goexit() }},

		{name: "hijacks", majors: []int{1}, bodies: complete,
			inline:  exitSeen{203, "mine", true, "hijacked", 0, "arrived, served 0"},
			handler: func(c *exitCall, w http.ResponseWriter, _ *http.Request) { hijack(c, w, func() {}) }},
		{name: "hijacks and outlives the deadline", left: exitLeft, majors: []int{1}, bodies: []string{exitNoBody, exitRead},
			inline: exitSeen{203, "mine", true, "hijacked", 0, "arrived, served 0"},
			handler: func(c *exitCall, w http.ResponseWriter, r *http.Request) {
				hijack(c, w, func() { <-r.Context().Done(); time.Sleep(exitOver) })
			}},

		{name: "outlives the deadline", left: exitLeft, bodies: all, inline: exit504, hardLate: true,
			handler: func(c *exitCall, _ http.ResponseWriter, r *http.Request) { c.overstay(r) }},
		{name: "outlives the deadline and answers", left: exitLeft, bodies: complete,
			inline: middlewareExitAnswer(201, "late", true).late(), hard: hard(exit504), hardLate: true,
			handler: func(c *exitCall, w http.ResponseWriter, r *http.Request) {
				c.overstay(r)
				w.Header().Set("X-Late", "1")
				w.WriteHeader(201)
				_, c.lateErr = io.WriteString(w, "late")
			}},
		{name: "outlives the deadline with part of an answer", left: exitLeft, bodies: complete,
			inline: middlewareExitAnswer(200, "partlate", true).late(), hard: hard(middlewareExitAnswer(200, "part", false).late()), hardLate: true,
			handler: func(c *exitCall, w http.ResponseWriter, r *http.Request) {
				part(c, w)
				c.overstay(r)
				_, c.lateErr = w.Write([]byte("late"))
			}},
		{name: "outlives the deadline and panics", left: exitLeft, bodies: complete,
			inline: exitBroken.late(), hard: hard(exit504.andThen("panicked")), hardLate: true,
			handler: func(c *exitCall, _ http.ResponseWriter, r *http.Request) { c.overstay(r); panic("boom") }},
		{name: "outlives the deadline and aborts", left: exitLeft, bodies: complete,
			inline: exitBroken.late(), hard: hard(exit504), hardLate: true,
			handler: func(c *exitCall, _ http.ResponseWriter, r *http.Request) { c.overstay(r); panic(http.ErrAbortHandler) }},
		{name: "outlives the deadline and exits", left: exitLeft, bodies: complete,
			inline: exitBroken.late(), hard: hard(exit504), hardLate: true,
			handler: func(c *exitCall, _ http.ResponseWriter, r *http.Request) { c.overstay(r); runtime.Goexit() }},

		{name: "client leaves", leaves: "before", bodies: seenLeaving, inline: exitGone,
			handler: func(_ *exitCall, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		{name: "client leaves, deadline passes", left: exitLeft, leaves: "before", bodies: seenLeaving, inline: exitGone,
			handler: func(c *exitCall, _ http.ResponseWriter, r *http.Request) {
				<-r.Context().Done()
				time.Sleep(exitLeft + exitOver)
			}},
		{name: "client leaves amid the answer", leaves: "after", bodies: seenLeaving, inline: middlewareExitAnswer(200, "part", false),
			handler: func(c *exitCall, w http.ResponseWriter, r *http.Request) { part(c, w); <-r.Context().Done() }},
		{name: "client leaves, the handler panics", leaves: "before", bodies: seenLeaving, inline: exitBroken,
			handler: func(_ *exitCall, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done(); panic("boom") }},

		{name: "too late on arrival", header: "1", bodies: all, notRun: true, inline: exit504},
		{name: "unusable header", header: "soon", bodies: all, notRun: true, inline: middlewareExitAnswer(400, "", true)},
	}
}

// Every way out of the middleware, by what becomes of the client's request, its
// body and its connection, and of the counters. Real sockets.
func TestP7_P8_MiddlewareExitPaths(t *testing.T) {
	var wg sync.WaitGroup
	busy := make(chan struct{}, 8)
	cells := 0
	for _, hard := range []bool{false, true} {
		for _, tt := range exitCases() {
			for _, major := range []int{1, 2} {
				if tt.majors != nil && !slices.Contains(tt.majors, major) {
					continue
				}
				for _, body := range tt.bodies {
					cells++
					name := fmt.Sprintf("%s, body %s, HTTP/%d, hard stop %v", tt.name, body, major, hard)
					busy <- struct{}{}
					wg.Go(func() {
						defer func() { <-busy }()
						for try := 1; ; try++ {
							again, errs := middlewareExit(t, tt, hard, major, body)
							if again && try < 6 {
								continue
							}
							if again {
								errs = append(errs, "in six tries, something was late or a connection was not kept")
							}
							for _, err := range errs {
								t.Errorf("%s: %s", name, err)
							}
							return
						}
					})
				}
			}
		}
	}
	wg.Wait()
	t.Logf("%d exits", cells)
	hsAwait(t, "no goroutine is left", func() bool { return hsGoroutines() == 0 })
}

// exitServe is mwServe without a test that owns the server.
func exitServe(major int, h http.Handler) (*httptest.Server, *http.Client) {
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = quiet
	if major == 2 {
		srv.EnableHTTP2 = true
		srv.StartTLS()
	} else {
		srv.Start()
	}
	return srv, srv.Client()
}

// middlewareExit sends one request through the middleware and one after it over the
// same client. again: the machine was too busy to tell anything.
func middlewareExit(t *testing.T, tt exitCase, hard bool, major int, body string) (again bool, errs []string) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Sprintf(format, args...)) }
	want := tt.inline
	if hard && tt.hard != nil {
		want = *tt.hard
	}
	metrics, err := NewMetrics(MetricsConfig{})
	if err != nil {
		t.Error(err)
		return
	}
	events := new(mwEvents)
	m := mwNew(t, MiddlewareConfig{
		HardStop: hard, Timeout: tt.left, RejectInvalid: true, Service: "s", Metrics: metrics, Hook: events.hook,
		Exempt: func(r *http.Request) bool { return r.Method == "GET" },
	})

	content := bytes.Repeat([]byte("0123456789"), 100)
	c := &exitCall{hard: hard, stay: make(chan struct{}), begun: make(chan struct{}), left: make(chan struct{})}
	var ctx context.Context
	ended, returned := make(chan struct{}), make(chan struct{})
	h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "GET" { // before and after
			if r.URL.Path == "/after" {
				time.Sleep(drainTime + 5*time.Millisecond)
				if r.Context().Err() != nil {
					w.WriteHeader(500)
				}
			}
			return
		}
		defer close(ended)
		ctx = r.Context()
		var got []byte
		switch body {
		case exitHalfRead:
			got = make([]byte, len(content)/2)
			_, c.bodyErr = io.ReadFull(r.Body, got)
		case exitRead:
			got, c.bodyErr = io.ReadAll(r.Body)
		}
		if !bytes.HasPrefix(content, got) || body == exitRead && len(got) != len(content) {
			c.bodyErr = fmt.Errorf("read %d bytes of %d, or others", len(got), len(content))
		}
		close(c.begun)
		defer func() {
			if tt.left != 0 && body != exitNoBody && body != exitHalfSent {
				_, c.lateIn = r.Body.Read(make([]byte, 1))
			}
		}()
		tt.handler(c, w, r)
	}))
	srv, client := exitServe(major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != "GET" {
			defer close(returned)
		}
		h.ServeHTTP(w, r)
	}))
	defer srv.Close()
	// A connection that is there already: what follows is about time.
	if resp, err := client.Get(srv.URL); err != nil {
		fail("before: %v", err)
		return
	} else {
		resp.Body.Close()
	}

	rctx, leave := context.WithCancel(t.Context())
	defer leave()
	reqBody, sendRest := io.Reader(nil), func() {}
	switch body {
	case exitNoBody:
	case exitHalfSent:
		pr, pw := io.Pipe()
		go pw.Write(content[:500])
		reqBody, sendRest = pr, func() { pw.Close() }
	default:
		reqBody = bytes.NewReader(content)
	}
	defer sendRest()
	req, _ := http.NewRequestWithContext(rctx, "POST", srv.URL, reqBody)
	if body == exitHalfSent {
		req.ContentLength = int64(len(content))
	}
	start := time.Now()
	switch {
	case tt.header != "":
		req.Header.Set(HeaderDeadline, tt.header)
	case tt.left == 0:
		req.Header.Set(HeaderDeadline, mwIn(time.Minute))
	}
	if tt.leaves == "before" {
		go func() {
			select {
			case <-c.begun:
				time.Sleep(5 * time.Millisecond)
				leave()
			case <-returned:
			}
		}()
	}

	var seen exitSeen
	var header http.Header
	resp, err := client.Do(req)
	if err == nil {
		seen.status, header = resp.StatusCode, resp.Header
		if tt.leaves == "after" {
			b := make([]byte, 4)
			io.ReadFull(resp.Body, b)
			seen.body = string(b)
			leave()
		} else {
			b, err := io.ReadAll(resp.Body)
			seen.body, seen.whole = string(b), err == nil
		}
		resp.Body.Close()
	}
	took := time.Since(start)
	if tt.hardLate && hard {
		select {
		case <-ended:
			fail("the handler has ended before the client had its answer")
		default:
		}
	}
	close(c.stay)
	for what, done := range map[string]chan struct{}{"the server's goroutine": returned, "the handler": ended} {
		if tt.notRun && what == "the handler" {
			continue
		}
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			fail("%s does not end", what)
			return false, errs
		}
	}
	select {
	case <-c.begun:
		if tt.notRun {
			fail("the handler ran")
		}
	default:
		if !tt.notRun {
			fail("the handler did not run")
		}
	}
	if c.missed || tt.leaves != "" && ctx.Err() != context.Canceled {
		return true, nil
	}

	if tt.left != 0 && tt.leaves == "" && took < tt.left-20*time.Millisecond {
		fail("answered after %v, before the deadline", took)
	}
	ours := want.status == 504 || want.status == 400
	if ours {
		if (header.Get(HeaderDeadlineExpired) == "1") != (want.status == 504) || header.Get(HeaderShouldRetry) != "false" || header.Get("X-Late") != "" {
			fail("header of our own answer: %v", header)
		}
		seen.body = ""
	} else if header.Get(HeaderDeadlineExpired) != "" {
		fail("the handler's answer is marked as ours")
	}
	if seen.status != want.status || seen.body != want.body || seen.whole != want.whole {
		fail("client: got %d %q, whole: %v, %v; want %d %q, whole: %v", seen.status, seen.body, seen.whole, err, want.status, want.body, want.whole)
	}

	// The body, as the handler has found it.
	if c.bodyErr != nil {
		fail("body: %v", c.bodyErr)
	}
	if hard && tt.hardLate {
		if c.lateErr != nil && c.lateErr != http.ErrHandlerTimeout {
			fail("write after the deadline: got %v", c.lateErr)
		}
		if body != exitNoBody && body != exitHalfSent && c.lateIn != http.ErrHandlerTimeout {
			fail("read after the deadline: got %v, want http.ErrHandlerTimeout", c.lateIn)
		}
	} else if c.lateErr != nil {
		fail("write after the deadline: got %v, want nil", c.lateErr)
	}
	if ctx != nil && ctx.Err() == nil {
		fail("the context lives on")
	}
	if tt.left != 0 && tt.leaves == "" && !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		fail("context: got %v", ctx.Err())
	}

	// The connection, and the next request on it.
	sendRest()
	reused := false
	trace := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
	next, _ := http.NewRequestWithContext(trace, "GET", srv.URL+"/after", nil)
	if resp, err := client.Do(next); err != nil {
		fail("next request: %v", err)
	} else {
		if resp.StatusCode != 200 {
			fail("next request: got %d, want 200: its context was cancelled", resp.StatusCode)
		}
		resp.Body.Close()
	}
	switch kept := major == 2 || want.whole && body != exitHalfSent && !strings.HasPrefix(tt.name, "hijacks"); {
	case kept && !reused && major == 1 && len(errs) == 0:
		return true, nil // not even the little that was there could be read in 10 ms
	case kept != reused:
		fail("connection kept: got %v, want %v", reused, kept)
	}

	// Counted once, told once; and not again by a handler that ended later.
	for end := time.Now().Add(3 * time.Second); events.String() != want.events && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if got := events.String(); got != want.events {
		fail("events: got %q, want %q", got, want.events)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(metrics)
	counted, _ := gather(t, reg)
	if n := counted.sum("http_server_requests_total{"); n != 1 {
		fail("%v answers counted, want 1", n)
	}
	if n := counted[fmt.Sprintf(`http_server_requests_total{code=%q,service="s"}`, want.code)]; n != 1 {
		fail("not counted as %s: %v", want.code, counted.with("http_server_requests_total"))
	}
	if n := counted.sum("deadline_exceeded_total{"); int(n) != want.exceeded {
		fail("%v counted as out of time, want %d", n, want.exceeded)
	}
	return false, errs
}
