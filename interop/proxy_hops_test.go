package interop

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// Over both proxies, on HTTP/1.1 and on HTTP/2: what the transport sends is what
// the middleware gets, value by value, and the next hop gets less.
func TestProxyPassesDeadlineAndKey(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		var atA, atB recorder
		var p *proxy
		inner := newTransport(t, stint.Config{})
		mw := newMiddleware(t, stint.MiddlewareConfig{Service: "a"})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got := atA.record(r)
			req, _ := http.NewRequestWithContext(r.Context(), r.Method, p.url+"/b/", strings.NewReader(got.body))
			resp, err := inner.RoundTrip(req)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadGateway)
				return
			}
			defer resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
			io.Copy(w, resp.Body)
		})))
		mwB := newMiddleware(t, stint.MiddlewareConfig{Service: "b"})
		b := startBackend(t, mwB.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, atB.record(r).body)
		})))
		p = startProxy(t, name, a.addr, b.addr)

		for _, h2 := range []bool{false, true} {
			var sent recorder
			base, _ := p.h2Base(t)
			url := p.url
			if h2 {
				url = p.tlsURL
			}
			// A layer below the transport sees what it sends.
			tr := newTransport(t, stint.Config{Base: roundTripFunc(func(r *http.Request) (*http.Response, error) {
				sent.add(arrival{header: canonical(r.Header)})
				return base.RoundTrip(r)
			})})
			for _, tt := range []struct {
				method, path, body, key string
			}{
				{"GET", "/a/", "", ""},
				{"POST", "/a/", "charge", ""}, // a key that we make
				{"POST", "/a/", "charge", "order-1"},
				{"PUT", "/buffered/", strings.Repeat("x", 1<<20), ""},
			} {
				ctx := withTimeout(t, patience)
				req := newRequest(t, ctx, tt.method, url+tt.path, strings.NewReader(tt.body))
				resp, text, o, err := roundTrip(t, tr, req, stint.Override{IdempotencyKey: tt.key})
				if err != nil || resp.StatusCode != 200 || text != tt.body || o.Attempts != 1 {
					t.Fatalf("%s %s: %v, %v, %d bytes, %+v", tt.method, tt.path, err, resp, len(text), o)
				}
				if h2 != (resp.ProtoMajor == 2) {
					t.Errorf("spoke %s", resp.Proto)
				}
				out, first, second := sent.take(), atA.take(), atB.take()
				if len(out) != 1 || len(first) != 1 || len(second) != 1 {
					t.Fatalf("%s: sent %d, %d and %d arrivals", tt.method, len(out), len(first), len(second))
				}
				for _, h := range []string{stint.HeaderDeadline, stint.HeaderTimeout, stint.HeaderIdempotencyKey, stint.HeaderRetryCount} {
					if got, want := first[0].header[h], out[0].header[h]; strings.Join(got, "|") != strings.Join(want, "|") {
						t.Errorf("%s: %s arrived as %q, sent as %q", tt.method, h, got, want)
					}
				}
				if key := out[0].header.Get(stint.HeaderIdempotencyKey); (key != "") != (tt.method == "POST") || tt.key != "" && key != tt.key {
					t.Errorf("%s: sent the key %q", tt.method, key)
				}
				if first[0].left <= 0 || first[0].left > patience {
					t.Errorf("%s: the handler had %v", tt.method, first[0].left)
				}
				// The second hop: less, but not by much.
				d1, d2 := millis(first[0].header, stint.HeaderDeadline), millis(second[0].header, stint.HeaderDeadline)
				if d1 <= 0 || d2 >= d1 || d2 < d1-20 {
					t.Errorf("%s: the first hop got %d, the second %d", tt.method, d1, d2)
				}
				t1, t2 := millis(first[0].header, stint.HeaderTimeout), millis(second[0].header, stint.HeaderTimeout)
				if t1 <= 0 || t2 >= t1 {
					t.Errorf("%s: the first hop got the companion %d, the second %d", tt.method, t1, t2)
				}
				if second[0].body != tt.body {
					t.Errorf("%s: the second hop got %d bytes", tt.method, len(second[0].body))
				}
			}
		}
	})
}

type roundTripFunc func(*http.Request) (*http.Response, error)

func (f roundTripFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// canonical returns the header as a server of net/http shows it.
func canonical(h http.Header) http.Header {
	out := make(http.Header)
	for k, lines := range h {
		k = http.CanonicalHeaderKey(k)
		out[k] = append(out[k], lines...)
	}
	return out
}

// S7 behind a proxy: the 504 for an expired request passes through, marked, in
// well under the time that the body would take, whether that was never read,
// comes slowly or never comes.
func TestProxyPassesThe504(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		var ran atomic.Int32
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { ran.Add(1) })))
		p := startProxy(t, name, a.addr, a.addr)
		for _, tt := range []struct {
			name, head string
			path       string
			body       int // bytes that are sent
		}{
			{"GET", "GET %s HTTP/1.1\r\n", "/a/", 0},
			{"HEAD", "HEAD %s HTTP/1.1\r\n", "/a/", 0},
			{"whole small body", "POST %s HTTP/1.1\r\nContent-Length: 1000\r\n", "/a/", 1000},
			{"whole body of 1 MiB", "POST %s HTTP/1.1\r\nContent-Length: 1048576\r\n", "/a/", 1 << 20},
			{"nothing of a body", "POST %s HTTP/1.1\r\nContent-Length: 1000\r\n", "/a/", 0},
			{"half of a body", "POST %s HTTP/1.1\r\nContent-Length: 1000\r\n", "/a/", 500},
			{"half of 1 MiB", "POST %s HTTP/1.1\r\nContent-Length: 1048576\r\n", "/a/", 1 << 19},
			{"half a chunk", "POST %s HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", "/a/", 500},
			{"half a chunk, asked for", "POST %s HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n", "/a/", 500},
			{"whole small body, buffered", "POST %s HTTP/1.1\r\nContent-Length: 1000\r\n", "/buffered/", 1000},
			{"whole body of 1 MiB, buffered", "POST %s HTTP/1.1\r\nContent-Length: 1048576\r\n", "/buffered/", 1 << 20},
		} {
			t.Run(tt.name, func(t *testing.T) {
				conn, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(patience))
				body := strings.Repeat("x", tt.body)
				if strings.Contains(tt.head, "chunked") {
					body = "3e8\r\n" + body
				}
				head := fmt.Sprintf(tt.head, tt.path)
				written := make(chan struct{})
				start := time.Now()
				go func() {
					defer close(written)
					io.WriteString(conn, head+"Host: a\r\nX-Request-Deadline: 1000\r\n\r\n"+body)
				}()
				req, _ := http.NewRequest(strings.Fields(tt.head)[0], "http://a/", nil)
				r := bufio.NewReader(conn)
				resp, err := http.ReadResponse(r, req)
				if err == nil && resp.StatusCode == 100 {
					resp, err = http.ReadResponse(r, req)
				}
				took := time.Since(start)
				if err != nil {
					t.Fatalf("after %v: %v", took, err)
				}
				if resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" || resp.Header.Get(stint.HeaderShouldRetry) != "false" {
					t.Errorf("after %v: %s, %v", took, resp.Status, resp.Header)
				}
				if text, err := io.ReadAll(resp.Body); err != nil || req.Method != "HEAD" && !strings.Contains(string(text), "deadline exceeded") {
					t.Errorf("body %q, %v", text, err)
				}
				t.Logf("answered after %v", took)
				if took > 2*time.Second {
					t.Errorf("answered after %v", took)
				}
				conn.Close()
				<-written
			})
		}
		// HTTP/2, where the stream ends and the connection stays.
		base, dialer := p.h2Base(t)
		for range 3 {
			body, w := io.Pipe()
			go io.WriteString(w, "half")
			start := time.Now()
			req := newRequest(t, withTimeout(t, patience), "POST", p.tlsURL+"/a/", body)
			req.Header.Set(stint.HeaderDeadline, "1000")
			resp, text, _, err := roundTrip(t, base, req, stint.Override{})
			took := time.Since(start)
			if err != nil || resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" || !strings.Contains(text, "deadline exceeded") || took > 2*time.Second {
				t.Errorf("half of a body over HTTP/2: after %v: %v, %v, %q", took, err, resp, text)
			}
			body.Close()
			w.Close()
		}
		if got := dialer.count(); got != 1 {
			t.Errorf("%d HTTP/2 connections, want 1", got)
		}
		if n := ran.Load(); n != 0 {
			t.Errorf("the handler ran %d times", n)
		}
	})
}

// A handler that lets the deadline pass, with the body that it did not read: the
// transport behind the proxy gets the 504 within its reserve, and knows it for
// the deadline's.
func TestProxyPassesThe504ToTheTransport(t *testing.T) {
	t.Parallel() // it waits
	eachProxy(t, func(t *testing.T, name string) {
		var arrivals atomic.Int32
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			arrivals.Add(1)
			<-r.Context().Done()
		})))
		p := startProxy(t, name, a.addr, a.addr)
		base, _ := p.h2Base(t)
		tr := newTransport(t, eager(stint.Config{Base: base, Timeout: 3300 * time.Millisecond, Reserve: 3 * time.Second}))
		for _, url := range []string{p.url, p.tlsURL} {
			for _, body := range []string{"", "small", strings.Repeat("x", 1<<20)} {
				arrivals.Store(0)
				start := time.Now()
				req := newRequest(t, t.Context(), "PUT", url+"/a/", strings.NewReader(body))
				resp, _, o, err := roundTrip(t, tr, req, stint.Override{})
				took := time.Since(start)
				if err != nil {
					t.Fatalf("%d bytes: after %v: %v", len(body), took, err)
				}
				if resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" || o.Reason != stint.ReasonDeadline || o.Attempts != 1 || arrivals.Load() != 1 {
					t.Errorf("%d bytes: after %v: %s, %+v, %d arrivals", len(body), took, resp.Status, o, arrivals.Load())
				}
			}
		}
	})
}

// Requests that succeed, that are retried, and that are refused as expired leave
// the connections on both sides of the proxy in use.
func TestProxyKeepsConnections(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		var n atomic.Int32
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1)%2 == 0 {
				http.Error(w, "try again", http.StatusServiceUnavailable)
				return
			}
			echo(w, r)
		})))
		p := startProxy(t, name, a.addr, a.addr)
		for _, h2 := range []bool{false, true} {
			base, dialer := p.h2Base(t)
			url := p.url
			if h2 {
				url = p.tlsURL
			}
			tr := newTransport(t, eager(stint.Config{Base: base, Timeout: patience}))
			before := a.connections()
			attempts := 0
			for i := range 50 {
				if i%5 == 4 {
					// Expired: past the transport, which would not send it. Without
					// a body, which costs the connection if it comes slowly.
					req := newRequest(t, t.Context(), "GET", url+"/a/", nil)
					req.Header.Set(stint.HeaderDeadline, "1000")
					resp, _, _, err := roundTrip(t, base, req, stint.Override{})
					if err != nil || resp.StatusCode != 504 {
						t.Fatalf("%v, %v", err, resp)
					}
					continue
				}
				req := newRequest(t, t.Context(), "PUT", url+"/a/", strings.NewReader("set"))
				resp, text, o, err := roundTrip(t, tr, req, stint.Override{})
				if err != nil || resp.StatusCode != 200 || text != "set" {
					t.Fatalf("%v, %v, %q", err, resp, text)
				}
				attempts += o.Attempts
			}
			if attempts < 60 {
				t.Errorf("%d attempts for 40 requests: nothing was retried", attempts)
			}
			if got := dialer.count(); got != 1 {
				t.Errorf("HTTP/2 %v: %d connections to the proxy, want 1", h2, got)
			}
			if got := a.connections() - before; got > 1 {
				t.Errorf("HTTP/2 %v: %d connections to the backend, want 1", h2, got)
			}
		}
	})
}

// An upgrade through the proxy lives on after the deadline, which was for the
// handshake, with a handler that heeds its context.
func TestProxyPassesUpgrades(t *testing.T) {
	t.Parallel() // it waits
	eachProxy(t, func(t *testing.T, name string) {
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if millis(r.Header, stint.HeaderDeadline) <= 0 || r.Header.Get("Upgrade") != "echo" {
				http.Error(w, "no upgrade", http.StatusBadRequest)
				return
			}
			conn, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			defer context.AfterFunc(r.Context(), func() { conn.Close() })()
			conn.SetDeadline(time.Now().Add(patience))
			io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			io.Copy(conn, rw)
		})))
		p := startProxy(t, name, a.addr, a.addr)
		const timeout = 2 * time.Second
		tr := newTransport(t, stint.Config{Timeout: timeout})
		start := time.Now()
		req := newRequest(t, t.Context(), "GET", p.url+"/a/", nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		conn, ok := resp.Body.(io.ReadWriteCloser)
		if resp.StatusCode != 101 || !ok {
			t.Fatalf("%s, writable %v", resp.Status, ok)
		}
		exchange := func(text string) {
			t.Helper()
			if _, err := io.WriteString(conn, text); err != nil {
				t.Fatalf("after %v: %v", time.Since(start), err)
			}
			got := make([]byte, len(text))
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != text {
				t.Fatalf("after %v: %q, %v", time.Since(start), got, err)
			}
		}
		exchange("hello")
		time.Sleep(time.Until(start.Add(timeout + 100*time.Millisecond)))
		exchange("still here")

		// An upgrade that comes too late is a 504 like any other request.
		req.Header.Set(stint.HeaderDeadline, "1000")
		resp, _, _, err = roundTrip(t, http.DefaultTransport, req, stint.Override{})
		if err != nil || resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" {
			t.Errorf("expired: %v, %v", err, resp)
		}
	})
}

// Server-sent events arrive one by one: the server sends the next only when the
// last has been seen. The deadline that the client chose ends the stream.
func TestProxyPassesEventStreams(t *testing.T) {
	t.Parallel() // it waits
	eachProxy(t, func(t *testing.T, name string) {
		seen := make(chan struct{}, 1)
		ended := make(chan error, 1)
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range 5 {
				fmt.Fprintf(w, "data: %d\n\n", i)
				w.(http.Flusher).Flush()
				select {
				case <-seen:
				case <-r.Context().Done():
					ended <- fmt.Errorf("event %d: %w", i, r.Context().Err())
					return
				}
			}
			<-r.Context().Done()
			ended <- r.Context().Err()
		})))
		p := startProxy(t, name, a.addr, a.addr)
		for _, h2 := range []bool{false, true} {
			base, _ := p.h2Base(t)
			url := p.url
			if h2 {
				url = p.tlsURL
			}
			tr := newTransport(t, stint.Config{Base: base, Timeout: 3 * time.Second, Reserve: time.Second})
			resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", url+"/a/", nil))
			if err != nil {
				t.Fatal(err)
			}
			r := bufio.NewReader(resp.Body)
			for i := range 5 {
				line, err := r.ReadString('\n')
				if err != nil || line != fmt.Sprintf("data: %d\n", i) {
					t.Fatalf("HTTP/2 %v: event %d: %q, %v", h2, i, line, err)
				}
				r.ReadString('\n')
				seen <- struct{}{}
			}
			// The server ends it at the deadline that it was told, a reserve
			// before ours: the end of the stream is clean.
			if rest, err := io.ReadAll(r); err != nil || len(rest) != 0 {
				t.Errorf("HTTP/2 %v: the end: %q, %v", h2, rest, err)
			}
			resp.Body.Close()
			if err := <-ended; err != context.DeadlineExceeded {
				t.Errorf("HTTP/2 %v: the stream ended with %v", h2, err)
			}
		}
	})
}

// A proxy that compresses: transparent to who does not ask, and gzip to who does;
// retried answers and refusals stay readable.
func TestProxyCompresses(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		text := strings.Repeat("compress me ", 10_000)
		var n atomic.Int32
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			if n.Add(1)%2 == 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
			io.WriteString(w, text)
		})))
		p := startProxy(t, name, a.addr, a.addr)
		for _, h2 := range []bool{false, true} {
			base, _ := p.h2Base(t)
			url := p.url
			if h2 {
				url = p.tlsURL
			}
			tr := newTransport(t, eager(stint.Config{Base: base, Timeout: patience}))
			req := newRequest(t, t.Context(), "GET", url+"/a/", nil)
			resp, got, o, err := roundTrip(t, tr, req, stint.Override{})
			if err != nil || resp.StatusCode != 200 || got != text || !resp.Uncompressed || o.Attempts != 2 {
				t.Errorf("HTTP/2 %v: %v, %v, %d bytes, %+v", h2, err, resp, len(got), o)
			}

			req = newRequest(t, t.Context(), "GET", url+"/a/", nil)
			req.Header.Set("Accept-Encoding", "gzip")
			resp, got, o, err = roundTrip(t, tr, req, stint.Override{})
			if err != nil || resp.Header.Get("Content-Encoding") != "gzip" || o.Attempts != 2 || len(got) > len(text)/10 {
				t.Fatalf("HTTP/2 %v: %v, %v, %d bytes, %+v", h2, err, resp, len(got), o)
			}
			z, err := gzip.NewReader(strings.NewReader(got))
			if err != nil {
				t.Fatal(err)
			}
			if plain, err := io.ReadAll(z); err != nil || string(plain) != text {
				t.Errorf("HTTP/2 %v: %d bytes, %v", h2, len(plain), err)
			}

			// The answer that remains when there is no retry, whole.
			n.Store(0)
			req = newRequest(t, t.Context(), "GET", url+"/a/", nil)
			resp, got, _, err = roundTrip(t, tr, req, stint.Override{MaxAttempts: 1})
			if err != nil || resp.StatusCode != 503 || got != text {
				t.Errorf("HTTP/2 %v: %v, %v, %d bytes", h2, err, resp, len(got))
			}
			n.Store(0)

			req = newRequest(t, t.Context(), "GET", url+"/a/", nil)
			req.Header.Set(stint.HeaderDeadline, "1000")
			resp, got, _, err = roundTrip(t, base, req, stint.Override{})
			if err != nil || resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" || !strings.Contains(got, "deadline exceeded") {
				t.Errorf("HTTP/2 %v: %v, %v, %q", h2, err, resp, got)
			}
		}
	})
}

// HTTP/2 to the proxy: requests in parallel share a connection, and refusals of
// some do not end it for the others.
func TestProxyHTTP2InParallel(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(echo)))
		p := startProxy(t, name, a.addr, a.addr)
		base, dialer := p.h2Base(t)
		tr := newTransport(t, eager(stint.Config{Base: base, Timeout: patience}))
		// The first alone: in parallel, each would dial.
		if _, _, _, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", p.tlsURL+"/a/", nil), stint.Override{}); err != nil {
			t.Fatal(err)
		}
		body := strings.Repeat("0123456789abcdef", 4096)
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() {
				if i%3 == 0 {
					req := newRequest(t, t.Context(), "POST", p.tlsURL+"/a/", strings.NewReader(body))
					req.Header.Set(stint.HeaderDeadline, "1000")
					resp, _, _, err := roundTrip(t, base, req, stint.Override{})
					if err != nil || resp.StatusCode != 504 {
						t.Errorf("expired: %v, %v", err, resp)
					}
					return
				}
				req := newRequest(t, t.Context(), "POST", p.tlsURL+"/a/", strings.NewReader(body))
				resp, text, o, err := roundTrip(t, tr, req, stint.Override{})
				if err != nil || resp.StatusCode != 200 || text != body || resp.ProtoMajor != 2 {
					t.Errorf("%v, %v, %d bytes, %+v", err, resp, len(text), o)
				}
			})
		}
		wg.Wait()
		if got := dialer.count(); got != 1 {
			t.Errorf("%d connections, want 1", got)
		}
	})
}
