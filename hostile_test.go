package stint

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
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

// 1: base that ignores its context and answers after AttemptTimeout
func TestHostile_CutWithResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, MaxAttempts: 1, Base: baseFunc(func(*http.Request) (*http.Response, error) {
			time.Sleep(time.Second)
			return answer(200, "late"), nil
		})})
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		t.Log(resp, err)
	})
}

func TestHostile_CutWithResponseLegacy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, MaxAttempts: 1, Base: baseFunc(func(*http.Request) (*http.Response, error) {
			time.Sleep(time.Second)
			return answer(200, "late"), nil
		})})
		req := newRequest(t, t.Context(), "GET", "http://peer.test/", nil)
		c := make(chan struct{})
		close(c)
		req.Cancel = c
		resp, err := tr.RoundTrip(req)
		t.Log(resp, err)
		if resp == nil && err == nil {
			t.Error("neither")
		}
	})
}

func TestHostile_CutWithResponseBodyFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, MaxAttempts: 2, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			io.ReadAll(r.Body)
			r.Body.Close()
			time.Sleep(time.Second)
			return answer(200, "late"), nil
		})})
		req := newRequest(t, t.Context(), "PUT", "http://peer.test/", nil)
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(hostileErr{}), nil }
		req.Body = io.NopCloser(hostileErr{})
		resp, err := tr.RoundTrip(req)
		t.Log(resp, err)
		if resp == nil && err == nil {
			t.Error("neither")
		}
	})
}

type hostileErr struct{}

func (hostileErr) Read([]byte) (int, error) { return 0, errors.New("body failed") }

// 2: companion below 1 / attempt after sendBy because of drain+seal
type hostileTrickle struct {
	closed chan struct{}
	once   sync.Once
}

func (z *hostileTrickle) Read(p []byte) (int, error) { <-z.closed; return 0, errors.New("closed") }
func (z *hostileTrickle) Close() error               { z.once.Do(func() { close(z.closed) }); return nil }

func TestHostile_NegativeCompanion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		n := 0
		tr := newTestTransport(t, Config{MaxAttempts: 2, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			n++
			d, _ := r.Context().Deadline()
			t.Logf("attempt %d at %v, left %v, companion %q err %v", n, time.Since(start), time.Until(d), r.Header[HeaderTimeout], r.Context().Err())
			if ms, err := strconv.Atoi(r.Header[HeaderTimeout][0]); err != nil || ms < 1 {
				t.Errorf("companion %q", r.Header[HeaderTimeout])
			}
			if n == 2 {
				return answer(200, ""), nil
			}
			time.Sleep(85 * time.Millisecond)
			resp := answer(503, "")
			resp.ContentLength = -1
			resp.Body = &hostileTrickle{closed: make(chan struct{})}
			return resp, nil
		})})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
		t.Log(resp, err)
	})
}

// 3: overflow of hint + backoff
func TestHostile_RetryAfterOverflow(t *testing.T) {
	for _, maxRA := range []time.Duration{math.MaxInt64, math.MaxInt64 - 1} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			tr := newTestTransport(t, Config{Backoff: Backoff{MaxRetryAfter: maxRA}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				n++
				return answer(503, "x", "Retry-After", "99999999999"), nil
			})})
			tr.jitter = func() float64 { return 0.5 }
			start := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil))
			t.Log(n, resp, err, time.Since(start))
			if n != 1 {
				t.Errorf("%d attempts in %v although the peer said to wait for ever", n, time.Since(start))
			}
		})
	}
}

// 4: GetBody that rewinds a shared file, early chunked 503 while upload goes on.
func TestHostile_SharedSourceTruncated(t *testing.T) {
	const size = 8 << 20
	var got atomic.Int64
	var n atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 1 {
			http.NewResponseController(w).EnableFullDuplex()
			w.WriteHeader(503)
			w.(http.Flusher).Flush()
			buf := make([]byte, 4096)
			for {
				if _, err := r.Body.Read(buf); err != nil {
					return
				}
				time.Sleep(100 * time.Microsecond)
			}
		}
		b, err := io.ReadAll(r.Body)
		t.Logf("second: %d bytes, %v", len(b), err)
		got.Store(int64(len(b)))
	}))
	defer srv.Close()
	name := t.TempDir() + "/f"
	os.WriteFile(name, bytes.Repeat([]byte("0123456789abcdef"), size/16), 0o600)
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tr := newTestTransport(t, Config{Backoff: Backoff{Base: 1, Max: 1}})
	tr.peers.enter(strings.TrimPrefix(srv.URL, "http://"), time.Now()).budget.take(time.Now(), time.Time{}) // next turn 1.05 s away
	req := newRequest(t, t.Context(), "PUT", srv.URL, io.NopCloser(f))
	req.ContentLength = -1
	req.GetBody = func() (io.ReadCloser, error) {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, err
		}
		return io.NopCloser(f), nil
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	t.Log(resp.StatusCode)
	if resp.StatusCode == 200 && got.Load() != size {
		t.Errorf("the peer answered 200 to %d of %d bytes", got.Load(), size)
	}
	tr.CloseIdleConnections()
}

// 5: Detach + cloned request
func TestHostile_DetachClone(t *testing.T) {
	for _, trust := range []bool{true, false} {
		m, _ := NewMiddleware(MiddlewareConfig{TrustHeader: func(*http.Request) bool { return trust }})
		r := httptest.NewRequest("GET", "http://x.test/", nil)
		r.Header.Set(HeaderDeadline, fmt.Sprint(time.Now().Add(50*time.Millisecond).UnixMilli()))
		tr := newTestTransport(t, Config{Timeout: time.Minute, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			d, ok := r.Context().Deadline()
			t.Log(time.Until(d), ok, r.Header[HeaderDeadline], time.Now().UnixMilli())
			if time.Until(d) < time.Second {
				t.Error("bound by the deadline it was detached from")
			}
			return answer(200, ""), nil
		})})
		m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			out := r.Clone(Detach(r.Context()))
			out.RequestURI = ""
			resp, err := tr.RoundTrip(out)
			t.Log(resp, err)
		})).ServeHTTP(httptest.NewRecorder(), r)
	}
}

// 6: Cancel after attempt timeout reports Timeout
func TestHostile_CancelIsNotATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, Backoff: Backoff{Base: time.Second}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, context.Cause(r.Context())
		})})
		tr.jitter = func() float64 { return 0.9 }
		time.AfterFunc(20*time.Millisecond, cancel)
		_, err := (&http.Client{Transport: tr}).Do(newRequest(t, ctx, "GET", "http://peer.test/", nil))
		t.Log(err, errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), os.IsTimeout(err))
		if te := err.(interface{ Timeout() bool }); te.Timeout() {
			t.Error("Timeout() is true for a caller that cancelled")
		}
	})
}

// 7: keptBody exposes bytes.Reader
func TestHostile_KeptBodyByteReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pr, pw := io.Pipe()
		go pw.Write([]byte("half"))
		tr := newTestTransport(t, Config{Budget: BudgetConfig{MaxWait: -1}, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(*http.Request) (*http.Response, error) {
			resp := answer(503, "")
			resp.ContentLength = 8
			resp.Body = pr
			return resp, nil
		})})
		p := tr.peers.enter("peer.test:80", time.Now())
		time.AfterFunc(bodyPatience/2, func() { p.budget.take(time.Now(), time.Time{}) })
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		if err != nil {
			t.Fatal(err)
		}
		if br, ok := resp.Body.(io.ByteReader); ok {
			for range 4 {
				br.ReadByte()
			}
			if _, err := br.ReadByte(); err == io.EOF {
				t.Errorf("a body of 4 of 8 bytes ends with %v", err)
			}
		}
	})
}

// 8: keptBody concurrent close
func TestHostile_KeptBodyRace(t *testing.T) {
	tr := newTestTransport(t, Config{MaxAttempts: 3, Budget: BudgetConfig{MaxWait: -1}, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(*http.Request) (*http.Response, error) {
		return answer(503, "some"), nil
	})})
	// second attempt is refused (turn): the answer was kept?
	resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%T", resp.Body)
	p := tr.peers.enter("peer.test:80", time.Now())
	_ = p
}

// real net/http: answers at the attempt timeout
func TestHostile_CutRealServer(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(4800 * time.Microsecond)
	}))
	defer srv.Close()
	tr := newTestTransport(t, Config{AttemptTimeout: 5 * time.Millisecond, MaxAttempts: 1})
	var wg sync.WaitGroup
	var panics, neither, cut, ok atomic.Int32
	for range 8 {
		wg.Go(func() {
			for range 1500 {
				func() {
					defer func() {
						if recover() != nil {
							panics.Add(1)
						}
					}()
					resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", srv.URL, nil))
					switch {
					case resp == nil && err == nil:
						neither.Add(1)
					case err != nil:
						cut.Add(1)
					default:
						ok.Add(1)
						resp.Body.Close()
					}
				}()
			}
		})
	}
	wg.Wait()
	t.Log("panics", panics.Load(), "neither", neither.Load(), "cut", cut.Load(), "ok", ok.Load())
	if panics.Load() > 0 {
		t.Error("panics over net/http")
	}
	tr.CloseIdleConnections()
}

func TestHostile_OverflowReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{Backoff: Backoff{MaxRetryAfter: math.MaxInt64}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			return answer(503, "x", "Retry-After", "99999999999"), nil
		})})
		tr.jitter = func() float64 { return 0.5 }
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, _, o := roundTrip(t, tr, ctx)
		if o.Reason != ReasonDeadline && o.Reason != ReasonRetryAfter {
			t.Errorf("reason %q", o.Reason)
		}
	})
}

// PUT with the caller's key: net/http resends it
func TestHostile_KeyedPutArrivals(t *testing.T) {
	for _, method := range []string{"PUT", "POST", "DELETE"} {
		var n atomic.Int32
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.ReadAll(r.Body)
			if r.URL.Path == "/warm" {
				return
			}
			n.Add(1)
			c, _, _ := http.NewResponseController(w).Hijack()
			c.Close()
		}))
		tr := newTestTransport(t, Config{MaxAttempts: 1})
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", srv.URL+"/warm", nil))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		req := newRequest(t, t.Context(), method, srv.URL+"/x", strings.NewReader("body"))
		req.Header.Set("Idempotency-Key", "k1")
		_, err = tr.RoundTrip(req)
		t.Log(method, n.Load(), err)
		if n.Load() > 1 {
			t.Errorf("%s: %d arrivals with MaxAttempts 1", method, n.Load())
		}
		srv.Close()
		tr.CloseIdleConnections()
	}
}

// drain closes a gzip body while it is being read
func TestHostile_GzipDrainRace(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		var n atomic.Int32
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1)%2 == 0 {
				return
			}
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(503)
			g := gzip.NewWriter(w)
			for range 100 {
				if _, err := io.WriteString(g, fmt.Sprint(time.Now().UnixNano())); err != nil {
					return
				}
				g.Flush()
				w.(http.Flusher).Flush()
				select {
				case <-r.Context().Done():
					return
				case <-time.After(time.Millisecond):
				}
			}
		}))
		srv.EnableHTTP2 = h2
		srv.StartTLS()
		base := srv.Client().Transport.(*http.Transport)
		tr := newTestTransport(t, Config{Base: base, MaxAttempts: 2, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1000}})
		for range 50 {
			resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", srv.URL, nil))
			if err != nil {
				t.Fatal(err)
			}
			io.ReadAll(resp.Body)
			resp.Body.Close()
		}
		tr.CloseIdleConnections()
		srv.Close()
	}
}

// kept body: Close beside Read
func TestHostile_KeptRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTestTransport(t, Config{Budget: BudgetConfig{MaxWait: -1}, Backoff: Backoff{Base: time.Millisecond}, Base: baseFunc(func(*http.Request) (*http.Response, error) {
			return answer(503, "some"), nil
		})})
		tr.jitter = func() float64 { return 0.999 }
		p := tr.peers.enter("peer.test:80", time.Now())
		time.AfterFunc(100*time.Microsecond, func() { p.budget.take(time.Now(), time.Time{}) })
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%T", resp.Body)
		done := make(chan struct{})
		go func() { resp.Body.Close(); close(done) }()
		io.ReadAll(resp.Body)
		<-done
	})
}

// ReportOnly in front of a proxy
func TestHostile_ReportOnlyProxy(t *testing.T) {
	m, _ := NewMiddleware(MiddlewareConfig{ReportOnly: true})
	tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		_, ok := r.Context().Deadline()
		t.Log(ok, r.Header)
		if ok {
			t.Error("ReportOnly, and the call that the handler makes has a deadline")
		}
		return answer(200, ""), nil
	})})
	u, _ := url.Parse("http://peer.test/")
	r := httptest.NewRequest("GET", "http://x.test/", nil)
	r.Header.Set(HeaderDeadline, fmt.Sprint(time.Now().Add(50*time.Millisecond).UnixMilli()))
	rp := &httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(u) }, Transport: tr}
	m.Handler(rp).ServeHTTP(httptest.NewRecorder(), r)
}

// a hook (or RetryStatus, GetBody) that panics with an answer in hand
func TestHostile_HookPanicLeaks(t *testing.T) {
	for _, kind := range []EventKind{EventAttemptDone, EventRetry, EventRefused, EventDone} {
		var closed atomic.Int32
		tr := newTestTransport(t, Config{MaxAttempts: 2, Backoff: Backoff{Base: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			resp := answer(503, "")
			resp.ContentLength = -1
			resp.Body = closeFunc{strings.NewReader("xxxx"), func() { closed.Add(1) }}
			return resp, nil
		}), Hook: func(_ context.Context, e Event) {
			if e.Kind == kind {
				panic("hook")
			}
		}})
		func() {
			defer func() { t.Log(recover()) }()
			tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		}()
		if closed.Load() == 0 {
			t.Errorf("%s: answer never closed", kind)
		}
	}
}

// a body whose Close blocks (HTTP/2 with a stalled writer): turns bunch up
type hostileBlock struct{ gate chan struct{} }

func (z hostileBlock) Read([]byte) (int, error) { <-z.gate; return 0, io.EOF }
func (z hostileBlock) Close() error             { <-z.gate; return nil }

func TestHostile_BlockedCloseBunches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		var mu sync.Mutex
		var retries []time.Duration
		start := time.Now()
		var bad atomic.Bool
		tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			if r.Header.Get(HeaderRetryCount) != "" {
				mu.Lock()
				retries = append(retries, time.Since(start))
				mu.Unlock()
				return answer(200, ""), nil
			}
			r.Header.Set(HeaderRetryCount, "")
			if bad.Load() {
				resp := answer(503, "")
				resp.ContentLength = -1
				resp.Body = hostileBlock{gate}
				return resp, nil
			}
			return answer(200, ""), nil
		})})
		evenly(100, 15*time.Second, func(int) {
			if time.Since(start) > 12*time.Second {
				bad.Store(true)
			}
			ctx := WithOverride(t.Context(), Override{})
			req := newRequest(t, ctx, "GET", "http://peer.test/", nil)
			req.Header.Set("A", "b")
			if time.Since(start) > 14900*time.Millisecond {
				select {
				case <-gate:
				default:
					close(gate)
				}
			}
			resp, err := tr.RoundTrip(req)
			if err == nil {
				_ = resp
			}
		})
		most := 0
		for i := range retries {
			n := 0
			for _, r := range retries[i:] {
				if r < retries[i]+time.Second {
					n++
				}
			}
			most = max(most, n)
		}
		t.Log("most retries in a second", most)
		if most > 11 {
			t.Error("P1 broken")
		}
	})
}

var _ = net.Dial

type hostileFlushing struct {
	ctx context.Context
	rc  *http.ResponseController
}

func (z hostileFlushing) Read([]byte) (int, error) {
	z.rc.Flush() // let the client have the header while we wait for data
	<-z.ctx.Done()
	return 0, z.ctx.Err()
}

func TestHostile_FlushInsideReadFrom(t *testing.T) {
	met := newTestMetrics(t)
	m, _ := NewMiddleware(MiddlewareConfig{Timeout: 100 * time.Millisecond, Metrics: met})
	srv := httptest.NewServer(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(w, hostileFlushing{r.Context(), http.NewResponseController(w)})
	})))
	defer srv.Close()
	resp, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	t.Logf("%d %v %q %v", resp.StatusCode, resp.Header, b, err)
	if len(b) > 0 {
		t.Errorf("answer %d, to which the middleware has added %q", resp.StatusCode, b)
	}
	if n := counter(t, met, "http_server_requests_total", "code", "504"); n > 0 {
		t.Error("counted as 504")
	}
}

func TestHostile_MaxBytesReader(t *testing.T) {
	m, _ := NewMiddleware(MiddlewareConfig{})
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 10))
		http.Error(w, fmt.Sprint(err), 413)
	})
	for _, h := range []http.Handler{h, m.Handler(h)} {
		srv := httptest.NewServer(h)
		resp, err := http.Post(srv.URL, "text/plain", strings.NewReader(strings.Repeat("x", 1000)))
		if err != nil {
			t.Fatal(err)
		}
		t.Log(resp.Status, resp.Header, resp.Close)
		resp.Body.Close()
		srv.Close()
	}
}

// upgrades through ReverseProxy, transport with all timeouts, with and without middleware
func TestHostile_UpgradeAll(t *testing.T) {
	back := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, rw, _ := http.NewResponseController(w).Hijack()
		defer c.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		rw.Flush()
		io.Copy(c, rw)
	}))
	defer back.Close()
	u, _ := url.Parse(back.URL)
	tr := newTestTransport(t, Config{Timeout: 200 * time.Millisecond, AttemptTimeout: 100 * time.Millisecond, CountResends: true})
	rp := &httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(u) }, Transport: tr}
	m, _ := NewMiddleware(MiddlewareConfig{Timeout: 150 * time.Millisecond})
	for _, h := range []http.Handler{rp, m.Handler(rp), m.Handler(m.Handler(rp)), http.StripPrefix("/a", m.Handler(rp))} {
		srv := httptest.NewServer(h)
		c, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		br := bufio.NewReader(c)
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != 101 {
			t.Fatal(resp, err)
		}
		for range 4 {
			time.Sleep(100 * time.Millisecond)
			fmt.Fprint(c, "ping\n")
			c.SetReadDeadline(time.Now().Add(time.Second))
			s, err := br.ReadString('\n')
			if s != "ping\n" || err != nil {
				t.Errorf("%q %v", s, err)
			}
		}
		c.Close()
		srv.Close()
	}
	tr.CloseIdleConnections()
}

// bidirectional stream over HTTP/2
func TestHostile_Bidi(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		buf := make([]byte, 100)
		for {
			n, err := r.Body.Read(buf)
			w.Write(buf[:n])
			w.(http.Flusher).Flush()
			if err != nil {
				w.Header().Set(http.TrailerPrefix+"X-End", "yes")
				return
			}
		}
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	base := srv.Client().Transport.(*http.Transport)
	tr := newTestTransport(t, Config{Base: base, Timeout: 10 * time.Second, AttemptTimeout: 100 * time.Millisecond})
	pr, pw := io.Pipe()
	req := newRequest(t, t.Context(), "PUT", srv.URL, pr)
	req.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("no") }
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		time.Sleep(50 * time.Millisecond)
		fmt.Fprintf(pw, "m%d", i)
		buf := make([]byte, 2)
		io.ReadFull(resp.Body, buf)
		if string(buf) != fmt.Sprintf("m%d", i) {
			t.Errorf("%q", buf)
		}
	}
	pw.Close()
	b, err := io.ReadAll(resp.Body)
	if len(b) > 0 || err != nil || resp.Trailer.Get("X-End") != "yes" {
		t.Error(b, err, resp.Trailer)
	}
	resp.Body.Close()
	resp.Body.Close()
	tr.CloseIdleConnections()
}

func TestHostile_OddPeers(t *testing.T) {
	tr := newTestTransport(t, Config{MaxPeers: 1, Metrics: newTestMetrics(t), Peer: func(r *http.Request) string { return r.URL.Host }, Backoff: Backoff{Base: 1}, Base: answers(status(503))})
	for _, u := range []string{"http:///x", "http://a/", "http://[::1]/", "http://[fe80::1%25eth0]:1/", "http://" + strings.Repeat("h", 1000) + "/", "mailto:x"} {
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", u, nil))
		if (resp == nil) == (err == nil) {
			t.Error(resp, err)
		}
	}
}

func TestHostile_TimeoutHandler(t *testing.T) {
	m, _ := NewMiddleware(MiddlewareConfig{Timeout: 20 * time.Millisecond, Metrics: newTestMetrics(t)})
	tr := newTestTransport(t, Config{Backoff: Backoff{Base: 1}, Base: answers(status(503))})
	var wg sync.WaitGroup
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		wg.Go(func() { // outlives the request and uses its context
			time.Sleep(5 * time.Millisecond)
			req, _ := http.NewRequestWithContext(context.WithoutCancel(r.Context()), "GET", "http://peer.test/", nil)
			if resp, err := tr.RoundTrip(req); err == nil {
				resp.Body.Close()
			}
		})
		if r.URL.Query().Get("w") != "" {
			<-r.Context().Done()
		} else {
			w.WriteHeader(503)
		}
	})
	mux := http.NewServeMux()
	mux.Handle("/a/{x}", http.TimeoutHandler(m.Handler(h), 20*time.Millisecond, "late"))
	mux.Handle("/b/", m.Handler(http.TimeoutHandler(m.Handler(h), 20*time.Millisecond, "late")))
	mux.Handle("/c/", m.Handler(m.Handler(h)))
	srv := httptest.NewServer(m.Handler(mux))
	var cw sync.WaitGroup
	for i := range 8 {
		cw.Go(func() {
			for j := range 40 {
				resp, err := http.Post(fmt.Sprintf("%s/%c/x?w=%s", srv.URL, "abc"[j%3], []string{"", "1"}[(i+j)%2]), "", strings.NewReader("body"))
				if err != nil {
					t.Error(err)
					continue
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	cw.Wait()
	wg.Wait()
	srv.Close()
}

// the same source behind every GetBody, in memory
func TestHostile_SharedReaderRace(t *testing.T) {
	var n atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 1 {
			http.NewResponseController(w).EnableFullDuplex()
			w.WriteHeader(503)
			w.(http.Flusher).Flush()
		}
		io.Copy(io.Discard, r.Body)
	}))
	defer srv.Close()
	src := bytes.NewReader(make([]byte, 64<<20))
	tr := newTestTransport(t, Config{Backoff: Backoff{Base: 1, Max: 1}})
	req := newRequest(t, t.Context(), "PUT", srv.URL, io.NopCloser(src))
	req.GetBody = func() (io.ReadCloser, error) { src.Seek(0, io.SeekStart); return io.NopCloser(src), nil }
	resp, err := tr.RoundTrip(req)
	t.Log(resp, err)
	if err == nil {
		resp.Body.Close()
	}
	tr.CloseIdleConnections()
}

// real HTTP/2 stall: the client's writes block
type hostileStall struct {
	net.Conn
	stalled *atomic.Bool
}

func (z hostileStall) Write(p []byte) (int, error) {
	for z.stalled.Load() {
		time.Sleep(time.Millisecond)
	}
	return z.Conn.Write(p)
}

func TestHostile_H2StallBunches(t *testing.T) {
	var bad, stalled atomic.Bool
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if bad.Load() && r.Header.Get(HeaderRetryCount) == "" {
			time.Sleep(200 * time.Millisecond)
			w.WriteHeader(503)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	base := srv.Client().Transport.(*http.Transport).Clone()
	base.DialContext = func(ctx context.Context, n, a string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, n, a)
		return hostileStall{c, &stalled}, err
	}
	_ = tls.Config{}
	var mu sync.Mutex
	var retries []time.Time
	tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		if r.Header.Get(HeaderRetryCount) != "" {
			mu.Lock()
			retries = append(retries, time.Now())
			mu.Unlock()
		}
		return base.RoundTrip(r)
	})})
	get := func() {
		resp, err := tr.RoundTrip(newRequest(t, context.Background(), "GET", srv.URL, nil))
		if err == nil {
			resp.Body.Close()
		}
	}
	p := tr.peers.enter(strings.TrimPrefix(srv.URL, "https://"), time.Now())
	get()
	for range 3000 { // credit: 300 a window, 30/s
		p.budget.request(time.Now())
		p.budget.success(time.Now())
	}
	time.Sleep(1100 * time.Millisecond)
	bad.Store(true)
	var wg sync.WaitGroup
	for range 60 {
		wg.Go(get)
	}
	time.Sleep(150 * time.Millisecond)
	stalled.Store(true)
	time.Sleep(2500 * time.Millisecond)
	mu.Lock()
	t.Log("retries during the stall", len(retries))
	mu.Unlock()
	stalled.Store(false)
	wg.Wait()
	most := 0
	for i := range retries {
		n := 0
		for _, r := range retries {
			if !r.Before(retries[i]) && r.Sub(retries[i]) < time.Second {
				n++
			}
		}
		most = max(most, n)
	}
	t.Log("retries", len(retries), "most in a second", most)
	if most > 30 {
		t.Error("P1: 30 allowed")
	}
	base.CloseIdleConnections()
}

func TestHostile_FanOutPattern(t *testing.T) {
	m, _ := NewMiddleware(MiddlewareConfig{})
	h := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _ = r.Pattern }))
	for _, h := range []http.Handler{h, m.Handler(h)} {
		r := httptest.NewRequest("GET", "http://x/", nil)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { h.ServeHTTP(httptest.NewRecorder(), r) })
		}
		wg.Wait()
	}
}

func TestHostile_CanceledThenLate(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	cancel()
	time.Sleep(15 * time.Millisecond)
	tr := newTestTransport(t, Config{})
	_, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://127.0.0.1:1/", nil))
	if !errors.Is(err, ctx.Err()) {
		t.Errorf("%v is not %v", err, ctx.Err())
	}
}

func TestHostile_OutcomeOnError(t *testing.T) {
	o := Outcome{Attempts: 7, Reason: ReasonBudget}
	tr := newTestTransport(t, Config{})
	req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o, MaxAttempts: -1}), "GET", "http://127.0.0.1:1/", nil)
	_, err := tr.RoundTrip(req)
	t.Log(err, o)
	if o != (Outcome{}) {
		t.Error("stale outcome")
	}
}

// eviction beside a request that comes and goes
func TestHostile_EvictABA(t *testing.T) {
	var lost atomic.Int32
	for range 3000 {
		cfg := Config{MaxPeers: 1}.withDefaults()
		origin := time.Now()
		ps := newPeers(&cfg, origin)
		p := ps.enter("a", origin)
		ps.leave(p, origin)
		later := origin.Add(time.Hour)
		var wg sync.WaitGroup
		wg.Go(func() {
			q := ps.enter("a", later)
			q.budget.take(later, time.Time{})
			ps.leave(q, later)
			if q2 := ps.enter("a", later); q2 != q {
				lost.Add(1)
			}
		})
		wg.Go(func() { ps.enter("b", later) })
		wg.Wait()
	}
	t.Log("peers evicted within an instant of their use:", lost.Load())
}

type hostileBody struct {
	r      io.Reader
	delay  time.Duration
	closes *atomic.Int32
	closed chan struct{}
	failAt int
	n      int
}

func (z *hostileBody) Read(p []byte) (int, error) {
	if z.delay > 0 {
		tm := time.NewTimer(z.delay)
		defer tm.Stop()
		select {
		case <-tm.C:
		case <-z.closed:
			return 0, errors.New("closed")
		}
	}
	if z.failAt > 0 && z.n >= z.failAt {
		return 0, errors.New("body failed")
	}
	if len(p) > 3 {
		p = p[:3]
	}
	n, err := z.r.Read(p)
	z.n += n
	return n, err
}
func (z *hostileBody) Close() error {
	if z.closes.Add(1) == 1 {
		close(z.closed)
	}
	return nil
}

var hostileStat sync.Map

func hostileCount(k string) {
	v, _ := hostileStat.LoadOrStore(k, new(atomic.Int64))
	v.(*atomic.Int64).Add(1)
}

func TestHostile_Fuzz(t *testing.T) {
	t.Cleanup(func() {
		hostileStat.Range(func(k, v any) bool { t.Log(k, v.(*atomic.Int64).Load()); return true })
	})
	var seed uint64
	for seed = 1; seed <= 60000; seed++ {
		hostileRun(t, seed)
		if t.Failed() && false {
			t.Logf("seed %d", seed)
			return
		}
	}
}

func hostileRun(t *testing.T, seed uint64) {
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		pick := func(n int) int { return rnd.IntN(n) }
		var mu sync.Mutex
		var respBodies, reqBodies []*hostileBody
		var late int
		cfg := Config{
			Timeout:        []time.Duration{0, 0, 100 * time.Millisecond, time.Second, 3 * time.Millisecond, 5 * time.Millisecond}[pick(6)],
			AttemptTimeout: []time.Duration{0, 0, 20 * time.Millisecond, time.Millisecond}[pick(4)],
			MaxAttempts:    1 + pick(4),
			Backoff:        Backoff{Base: 30 * time.Millisecond},
			Budget:         BudgetConfig{MaxWait: []time.Duration{0, -1, 100 * time.Millisecond}[pick(3)], MinPerSecond: []float64{0, 100}[pick(2)]},
			Keys:           KeyPolicy(pick(4)),
		}
		if pick(5) == 0 {
			cfg.RetryStatus = func(s int) bool { return s == 200 || s == 101 || s == 404 }
		}
		n := 0
		type att struct {
			ctx context.Context
			at  time.Time
		}
		var atts []att
		base := baseFunc(func(r *http.Request) (*http.Response, error) {
			mu.Lock()
			n++
			atts = append(atts, att{r.Context(), time.Now()})
			act, d := pick(9), time.Duration(pick(40))*time.Millisecond
			readAll, lateClose := pick(2) == 0, pick(3) == 0
			code := []int{200, 503, 503, 503, 429, 404, 504, 101}[pick(8)]
			cl := []int64{-1, 0, 5, 9, 20000}[pick(5)]
			bd := []time.Duration{0, 0, 15 * time.Millisecond, 200 * time.Millisecond}[pick(4)]
			obey := pick(3) > 0
			mu.Unlock()
			if dl, ok := r.Context().Deadline(); ok && !time.Now().Before(dl) {
				late++
			}
			if v := r.Header[HeaderTimeout]; len(v) > 0 {
				if ms, err := strconv.Atoi(v[0]); err != nil || ms < 1 {
					t.Errorf("companion %q", v)
				}
			}
			if r.Body != nil {
				b := r.Body
				if lateClose && act != 8 {
					go func() { io.Copy(io.Discard, b); time.Sleep(7 * time.Millisecond); b.Close() }()
				} else {
					if readAll {
						io.Copy(io.Discard, b)
					}
					b.Close()
				}
			}
			if obey {
				tm := time.NewTimer(d)
				defer tm.Stop()
				select {
				case <-tm.C:
				case <-r.Context().Done():
					if pick(2) == 0 {
						return nil, context.Cause(r.Context())
					}
					return nil, r.Context().Err()
				}
			} else {
				time.Sleep(d)
			}
			switch act {
			case 0, 1:
				return nil, errors.New("reset")
			case 2:
				return nil, nil
			}
			resp := answer(code, "")
			resp.ContentLength = cl
			zb := &hostileBody{r: strings.NewReader("answer"), delay: bd, closes: new(atomic.Int32), closed: make(chan struct{})}
			mu.Lock()
			respBodies = append(respBodies, zb)
			mu.Unlock()
			resp.Body = zb
			if pick(6) == 0 {
				resp.Header.Set("Retry-After", fmt.Sprint(pick(3)))
			}
			if pick(6) == 0 {
				resp.Header.Set(HeaderShouldRetry, []string{"true", "false"}[pick(2)])
			}
			if pick(8) == 0 {
				resp.Header.Set(HeaderDeadlineExpired, "1")
			}
			if act == 3 {
				return resp, errors.New("both")
			}
			return resp, nil
		})
		cfg.Base = base
		tr := newTestTransport(t, cfg)
		p := tr.peers.enter("peer.test:80", time.Now())
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if pick(3) == 0 {
			time.AfterFunc(time.Duration(pick(100))*time.Millisecond, cancel)
		}
		if pick(2) == 0 {
			var c2 context.CancelFunc
			ctx, c2 = context.WithTimeout(ctx, time.Duration(pick(300))*time.Millisecond)
			defer c2()
		}
		var o Outcome
		ctx = WithOverride(ctx, Override{Outcome: &o})
		newBody := func() io.ReadCloser {
			zb := &hostileBody{r: strings.NewReader("request body"), closes: new(atomic.Int32), closed: make(chan struct{})}
			if pick(5) == 0 {
				zb.delay = 10 * time.Millisecond
			}
			if pick(8) == 0 {
				zb.failAt = 3
			}
			mu.Lock()
			reqBodies = append(reqBodies, zb)
			mu.Unlock()
			return zb
		}
		req := newRequest(t, ctx, []string{"GET", "PUT", "POST"}[pick(3)], "http://peer.test/", nil)
		if pick(2) == 0 {
			req.Body = newBody()
			req.ContentLength = 12
			if pick(4) > 0 {
				req.GetBody = func() (io.ReadCloser, error) {
					if pick(6) == 0 {
						return nil, errors.New("GetBody")
					}
					return newBody(), nil
				}
			}
		}
		if pick(4) == 0 {
			c := make(chan struct{})
			req.Cancel = c
			time.AfterFunc(time.Duration(pick(100))*time.Millisecond, func() { close(c) })
		}
		resp, err := tr.RoundTrip(req)
		if (resp == nil) == (err == nil) {
			t.Errorf("response %v error %v", resp, err)
		}
		if o.Attempts != n || n > cfg.MaxAttempts {
			t.Errorf("%d attempts, outcome %+v", n, o)
		}
		if late > 0 && n > 1 {
			t.Errorf("an attempt after the deadline")
		}
		hostileCount(fmt.Sprintf("attempts %d", n))
		hostileCount("reason " + string(o.Reason))
		hostileCount(fmt.Sprintf("err %T", err))
		var te *Error
		if errors.As(err, &te) {
			if te.Reason == ReasonCanceled && te.Timeout() || te.Reason == ReasonDeadline && !(te.Timeout() && errors.Is(err, context.DeadlineExceeded)) {
				t.Errorf("%v: Timeout %v", err, te.Timeout())
			}
			if te.Reason == "" {
				t.Errorf("%v: no reason", err)
			}
		}
		if resp != nil {
			io.ReadAll(resp.Body)
			resp.Body.Close()
			resp.Body.Close()
		}
		time.Sleep(time.Second) // late closers
		synctest.Wait()
		for i, b := range respBodies {
			if c := b.closes.Load(); c == 0 || c > 1 && i < len(respBodies)-1 {
				t.Errorf("answer %d of %d closed %d times", i, len(respBodies), c)
			}
		}
		for i, b := range reqBodies {
			if c := b.closes.Load(); c != 1 && !(c > 1 && cfg.MaxAttempts == 1) {
				t.Errorf("request body %d of %d closed %d times (GetBody %v)", i, len(reqBodies), c, req.GetBody != nil)
			}
		}
		if h := p.held.Load(); h != 0 {
			t.Errorf("%d held", h)
		}
		if h := p.inflight.Load(); h != 1 {
			t.Errorf("%d in flight", h)
		}
		for i, a := range atts {
			if a.ctx != ctx && (cfg.AttemptTimeout > 0) && a.ctx.Err() == nil {
				t.Errorf("attempt %d's context is alive", i)
			}
		}
	})
}

// client with jar and redirects over retries: held?
func TestHostile_RedirectJar(t *testing.T) {
	var n atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if string(b) != "body" {
			t.Errorf("%s: body %q", r.URL, b)
		}
		if n.Add(1)%2 == 1 {
			w.WriteHeader(503)
			return
		}
		if r.URL.Path == "/" {
			http.SetCookie(w, &http.Cookie{Name: "c", Value: "1"})
			http.Redirect(w, r, "/next", 307)
			return
		}
		if c, _ := r.Cookie("c"); c == nil {
			t.Error("no cookie")
		}
		io.WriteString(w, "fine")
	}))
	defer srv.Close()
	jar, _ := cookiejar.New(nil)
	tr := newTestTransport(t, Config{Timeout: 20 * time.Second, AttemptTimeout: time.Second, Keys: KeysHonoured, Backoff: Backoff{Base: 1}})
	resp, err := (&http.Client{Transport: tr, Jar: jar, Timeout: 30 * time.Second}).Post(srv.URL, "text/plain", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	if s := readAll(t, resp); s != "fine" || resp.Request.URL.Path != "/next" {
		t.Error(s, resp.Request.URL)
	}
	tr.CloseIdleConnections()
}

// an error of ours is an *Error
func TestHostile_RawCause(t *testing.T) {
	tr := newTestTransport(t, Config{AttemptTimeout: 10 * time.Millisecond, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
		<-r.Context().Done()
		return nil, context.Cause(r.Context())
	})})
	req := newRequest(t, t.Context(), "PUT", "http://peer.test/", io.NopCloser(hostileErr{}))
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(hostileErr{}), nil }
	_, err := tr.RoundTrip(req)
	var e *Error
	if !errors.As(err, &e) {
		t.Errorf("%T %v", err, err)
	}
}
