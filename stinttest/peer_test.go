package stinttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// forms are the ways to reach a peer.
var forms = []struct {
	name  string
	reach func(t *testing.T, p *Peer) *http.Client
}{
	{"memory", func(_ *testing.T, p *Peer) *http.Client { return &http.Client{Transport: p} }},
	{"HTTP1", func(t *testing.T, p *Peer) *http.Client {
		p.URL = serve(t, p)
		return newClient(t, &http.Transport{})
	}},
	{"HTTP2", func(t *testing.T, p *Peer) *http.Client {
		p.URL = serve(t, p)
		transport := &http.Transport{Protocols: new(http.Protocols)}
		transport.Protocols.SetUnencryptedHTTP2(true)
		return newClient(t, transport)
	}},
	{"TLS", func(t *testing.T, p *Peer) *http.Client {
		s := httptest.NewTLSServer(p)
		t.Cleanup(s.Close)
		p.URL = s.URL
		return s.Client()
	}},
}

func newClient(t *testing.T, transport *http.Transport) *http.Client {
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func newRequest(t testing.TB, ctx context.Context, method, url, body string) *http.Request {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, r)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// Every step does the same in memory and over sockets.
func TestSteps(t *testing.T) {
	t.Parallel()
	const never = time.Minute
	for _, tt := range []struct {
		name    string
		step    Step
		method  string
		status  int // 0: no answer
		header  string
		body    string
		readErr bool
		atLeast time.Duration
		timeout time.Duration
	}{
		{name: "zero", step: Step{}, status: 200, body: "OK\n"},
		{name: "OK", step: OK().Body("hello").Header("X-A", "b"), status: 200, header: "b", body: "hello"},
		{name: "empty", step: OK().Body(""), status: 200},
		{name: "Fail", step: Fail(503, "X-A", "1"), status: 503, header: "1", body: "Service Unavailable\n"},
		{name: "HEAD", step: Fail(503), method: "HEAD", status: 503},
		{name: "no content", step: Fail(204).Body("ignored"), status: 204},
		{name: "Slow", step: Slow(60 * time.Millisecond), status: 200, body: "OK\n", atLeast: 60 * time.Millisecond},
		{name: "late failure", step: Fail(500).After(60 * time.Millisecond).Body("x"), status: 500, body: "x", atLeast: 60 * time.Millisecond},
		{name: "too slow", step: Slow(never), timeout: time.Second},
		{name: "Stall", step: Stall(), timeout: time.Second},
		{name: "Reset", step: Reset()},
		{name: "Half", step: Half().Body("0123456789"), status: 200, body: "01234", readErr: true},
		{name: "Half of nothing", step: Half().Body("1"), status: 200, readErr: true},
		{name: "Trickle", step: Trickle(30 * time.Millisecond).Body("abc"), status: 200, body: "abc", atLeast: 90 * time.Millisecond},
		{name: "endless Trickle", step: Trickle(never).Body("abc"), status: 200, readErr: true, timeout: time.Second},
	} {
		for _, form := range forms {
			t.Run(tt.name+"/"+form.name, func(t *testing.T) {
				t.Parallel()
				p := NewPeer(tt.step)
				client := form.reach(t, p)
				ctx, cancel := context.WithCancel(t.Context())
				if tt.timeout > 0 {
					ctx, cancel = context.WithTimeout(t.Context(), tt.timeout)
				}
				defer cancel()
				method := tt.method
				if method == "" {
					method = "POST"
				}
				sent := ""
				if method == "POST" {
					sent = "body"
				}
				start := time.Now()
				resp, err := client.Do(newRequest(t, ctx, method, p.url(), sent))
				if tt.status == 0 {
					if err == nil {
						resp.Body.Close()
						t.Fatalf("answer %d", resp.StatusCode)
					}
					if got := errors.Is(err, context.DeadlineExceeded); got != (tt.timeout > 0) {
						t.Errorf("error %v", err)
					}
				} else {
					if err != nil {
						t.Fatal(err)
					}
					body, err := io.ReadAll(resp.Body)
					resp.Body.Close()
					if (err != nil) != tt.readErr || string(body) != tt.body {
						t.Errorf("body %q, %v", body, err)
					}
					if resp.StatusCode != tt.status || resp.Header.Get("X-A") != tt.header {
						t.Errorf("answer %d, header %v", resp.StatusCode, resp.Header)
					}
				}
				if took := time.Since(start); took < tt.atLeast {
					t.Errorf("took %v", took)
				}
				a := p.Arrivals()
				if len(a) != 1 || a[0].Method != method || string(a[0].Body) != sent || a[0].BodyErr != nil {
					t.Errorf("arrivals %+v", a)
				}
			})
		}
	}
}

// A reset has the same type in memory and over TCP.
func TestResetIsTyped(t *testing.T) {
	for _, form := range forms[:2] {
		p := NewPeer(Reset())
		_, err := form.reach(t, p).Get(p.url())
		var op *net.OpError
		if !errors.Is(err, syscall.ECONNRESET) || !errors.As(err, &op) || op.Timeout() {
			t.Errorf("%s: %v", form.name, err)
		}
	}
}

func TestScriptTakesTheNextStepAndKeepsTheLast(t *testing.T) {
	p := NewPeer(Fail(500).Times(2), Fail(501), Fail(502).Times(3), Fail(503))
	client := &http.Client{Transport: p}
	for i, want := range []int{500, 500, 501, 502, 502, 502, 503, 503, 503} {
		if got, _ := do(client, newRequest(t, t.Context(), "GET", p.url(), "")); got != want {
			t.Errorf("arrival %d: %d, want %d", i, got, want)
		}
	}
	p.Use(Fail(599))
	if got, _ := do(client, newRequest(t, t.Context(), "GET", p.url(), "")); got != 599 {
		t.Errorf("after Use: %d", got)
	}
	if got := p.Count(); got != 10 || len(p.Arrivals()) != 10 {
		t.Errorf("%d arrivals", got)
	}
}

func TestScriptIsCopied(t *testing.T) {
	script := []Step{OK()}
	p := NewPeer(script...)
	script[0] = Fail(500)
	if got, _ := do(&http.Client{Transport: p}, newRequest(t, t.Context(), "GET", p.url(), "")); got != 200 {
		t.Errorf("answer %d", got)
	}
	// Three appends leave room for a fourth, which two copies could share.
	base := OK().Header("A", "1").Header("B", "2").Header("C", "3")
	one := base.Header("D", "one")
	base.Header("D", "two")
	if got := one.answer("GET").header.Get("D"); got != "one" {
		t.Errorf("one copy has changed another: %q", got)
	}
}

// A limit of the server's own makes no answer of a stall.
func TestStallDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for _, form := range forms[1:3] {
		peer := NewPeer(Stall())
		client := form.reach(t, NewPeer())
		url := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), 50*time.Millisecond)
			defer cancel()
			peer.ServeHTTP(w, r.WithContext(ctx))
		}))
		if status, err := do(client, newRequest(t, t.Context(), "GET", url, "")); err == nil {
			t.Errorf("%s: answer %d", form.name, status)
		}
	}
}

func TestZeroPeer(t *testing.T) {
	var p Peer
	for range 2 {
		if got, err := do(&http.Client{Transport: &p}, newRequest(t, t.Context(), "GET", "http://any.test/", "")); got != 200 {
			t.Errorf("%d, %v", got, err)
		}
	}
}

func TestFlapAlternates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(1617 * time.Millisecond) // out of step with the clock
		p := NewPeer(Flap(time.Second, Fail(503)))
		client := &http.Client{Transport: p}
		var got []int
		for range 10 {
			status, _ := do(client, newRequest(t, t.Context(), "GET", p.url(), ""))
			got = append(got, status)
			time.Sleep(400 * time.Millisecond)
		}
		if want := "[200 200 200 503 503 200 200 200 503 503]"; fmt.Sprint(got) != want {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestPartialIsSeeded(t *testing.T) {
	draw := func(fraction float64, seed uint64) (s string) {
		p := NewPeer(Partial(fraction, seed, Fail(503)))
		for range 2000 {
			status, _ := do(&http.Client{Transport: p}, newRequest(t, t.Context(), "GET", p.url(), ""))
			s += fmt.Sprint(status / 100)
		}
		return s
	}
	a := draw(0.3, 7)
	if a != draw(0.3, 7) {
		t.Error("the same seed, and other draws")
	}
	if a == draw(0.3, 8) {
		t.Error("another seed, and the same draws")
	}
	if n := strings.Count(a, "5"); n < 500 || n > 700 {
		t.Errorf("%d of 2000 failed, want about 600", n)
	}
	// Neither runs nor alternation: of the pairs, 0.3² = 180 are two failures.
	if n := strings.Count(a, "55"); n < 80 || n > 260 {
		t.Errorf("%d pairs of failures", n)
	}
	if n := strings.Count(draw(0, 7), "5"); n != 0 {
		t.Errorf("fraction 0: %d failed", n)
	}
	if n := strings.Count(draw(1, 7), "5"); n != 2000 {
		t.Errorf("fraction 1: %d failed", n)
	}
}

func TestStepsThatMakeNoSensePanic(t *testing.T) {
	odd := strings.Fields("Retry-After") // not a literal: linters count those
	for name, f := range map[string]func(){
		"status":   func() { Fail(99) },
		"1xx":      func() { Fail(103) },
		"value":    func() { Fail(503, odd...) },
		"period":   func() { Flap(0, Reset()) },
		"fraction": func() { Partial(1.1, 0, Reset()) },
		"NaN":      func() { Partial(0/zero, 0, Reset()) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

var zero float64

func TestArrivalIsAsOnAServer(t *testing.T) {
	for _, form := range forms {
		t.Run(form.name, func(t *testing.T) {
			p := NewPeer()
			client := form.reach(t, p)
			req := newRequest(t, t.Context(), "POST", strings.TrimSuffix(p.url(), "/")+"/a%20b?c=d", "payload")
			req.Header["x-lower"] = []string{"1", "2"}
			req.Header["X-Empty"] = nil
			before := time.Now()
			if _, err := do(client, req); err != nil {
				t.Fatal(err)
			}
			req.Header["x-lower"][0] = "changed"
			a := p.Arrivals()[0]
			if a.URI != "/a%20b?c=d" || a.Host != req.URL.Host || string(a.Body) != "payload" || a.At.Before(before) || a.At.After(time.Now()) {
				t.Errorf("%+v", a)
			}
			if got := fmt.Sprint(a.Header["X-Lower"]); got != "[1 2]" {
				t.Errorf("header %v", a.Header)
			}
			if _, ok := a.Header["X-Empty"]; ok {
				t.Errorf("a header without a value has arrived")
			}
		})
	}
}

// In memory the request's body is closed exactly once, however the call ends,
// and its reader is called back when the context ends.
func TestRoundTripClosesTheBody(t *testing.T) {
	for _, tt := range []struct {
		name   string
		step   Step
		body   func() io.Reader
		before bool // the context has ended before
		want   error
	}{
		{name: "OK", step: OK()},
		{name: "Reset", step: Reset(), want: syscall.ECONNRESET},
		{name: "Stall", step: Stall(), want: errGone},
		{name: "Slow", step: Slow(time.Hour), want: errGone},
		{name: "ended before", step: OK(), before: true, want: errGone},
		{name: "body that does not end", step: OK(), body: func() io.Reader { r, _ := io.Pipe(); return r }, want: errGone},
		{name: "body that fails", step: OK(), body: func() io.Reader { return failing{} }, want: errBody},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				if tt.before {
					cancel(errGone)
				} else {
					time.AfterFunc(time.Minute, func() { cancel(errGone) })
				}
				var r io.Reader = strings.NewReader("body")
				if tt.body != nil {
					r = tt.body()
				}
				body := &countedBody{Reader: r}
				req := newRequest(t, ctx, "POST", "http://peer.test/", "")
				req.Body = body
				p := NewPeer(tt.step)
				resp, err := p.RoundTrip(req)
				if !errors.Is(err, tt.want) || (resp == nil) == (err == nil) {
					t.Errorf("%v, %v", resp, err)
				}
				if got := body.closes.Load(); got != 1 {
					t.Errorf("body closed %d times", got)
				}
				if got := p.Count(); (got == 0) != tt.before {
					t.Errorf("%d arrivals", p.Count())
				}
				if resp != nil {
					resp.Body.Close()
				}
			})
		})
	}
}

var (
	errGone = errors.New("gone")
	errBody = errors.New("no more body")
)

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errBody }

// A countedBody can be called back from Read by Close, like that of a pipe.
type countedBody struct {
	io.Reader
	closes atomic.Int32
}

func (b *countedBody) Close() error {
	b.closes.Add(1)
	if c, ok := b.Reader.(io.Closer); ok {
		c.Close()
	}
	return nil
}

// The body of an answer in memory ends with the context and by Close, also when
// somebody is inside Read.
func TestAnswerBodyEnds(t *testing.T) {
	for _, byClose := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			resp, err := NewPeer(Trickle(time.Hour)).RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", ""))
			if err != nil {
				t.Fatal(err)
			}
			want := context.Canceled
			if byClose {
				want = errClosedBody
			}
			time.AfterFunc(time.Minute, func() {
				if byClose {
					resp.Body.Close()
				} else {
					cancel()
				}
			})
			start := time.Now()
			if _, err := io.ReadAll(resp.Body); err != want || time.Since(start) != time.Minute {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			if _, err := resp.Body.Read(make([]byte, 1)); err != want {
				t.Errorf("again: %v", err)
			}
			resp.Body.Close()
			cancel()
		})
	}
}

func TestPeerIsSafeForConcurrentUse(t *testing.T) {
	for _, form := range forms[:3] {
		p := NewPeer(OK().Times(10), Partial(0.5, 1, Fail(503)), Half())
		client := form.reach(t, p)
		const n = 40
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				do(client, newRequest(t, t.Context(), "POST", p.url(), "body"))
				p.Arrivals()
				if i%10 == 0 {
					p.Use(OK(), Fail(500))
				}
			})
		}
		wg.Wait()
		if got := p.Count(); got != n {
			t.Errorf("%s: %d arrivals", form.name, got)
		}
		for i, a := range p.Arrivals() {
			if string(a.Body) != "body" {
				t.Errorf("%s: arrival %d: %q", form.name, i, a.Body)
			}
		}
	}
}

// Cleanup drops what is still being served.
func TestStartPeerEnds(t *testing.T) {
	t.Parallel()
	left := make(chan error, 1)
	start := time.Now()
	got := reports(func(tb TB) {
		p := StartPeer(tb, Stall())
		go func() {
			_, err := http.Post(p.URL, "text/plain", strings.NewReader("x"))
			left <- err
		}()
		for p.Count() == 0 {
			time.Sleep(time.Millisecond)
		}
	})
	wantReports(t, got)
	if err := <-left; err == nil || time.Since(start) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}
