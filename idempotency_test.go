package stint

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stinthttp/stint/internal/idemkey"
)

// An arrival as the wire had it: the names of headers as they were spelled.
type wireRequest struct {
	line   string
	header []string
	body   string
}

func (w wireRequest) lines(name string) (values []string) {
	for _, h := range w.header {
		if k, v, _ := strings.Cut(h, ": "); strings.EqualFold(k, name) {
			values = append(values, v)
		}
	}
	return values
}

// A losingServer answers the first request of a connection and reads the second,
// whole, and closes the connection without an answer: what a peer does that dies
// after it did the work, and what net/http takes for a kept-alive connection that
// was already dead.
type losingServer struct {
	url string
	mu  sync.Mutex
	got []wireRequest // but for the first of each connection
}

func startLosingServer(t *testing.T) *losingServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &losingServer{url: "http://" + l.Addr().String()}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { s.serve(conn) })
		}
	})
	return s
}

func (s *losingServer) serve(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	r := bufio.NewReader(conn)
	for n := 0; ; n++ {
		req, err := readWireRequest(r)
		if err != nil {
			return
		}
		if n == 0 && strings.Contains(req.line, "/warm") {
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			continue
		}
		s.mu.Lock()
		s.got = append(s.got, req)
		lose := len(s.got) == 1
		s.mu.Unlock()
		if lose {
			return
		}
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	}
}

func readWireRequest(r *bufio.Reader) (wireRequest, error) {
	var w wireRequest
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return w, err
		}
		line = strings.TrimRight(line, "\r\n")
		if line == "" {
			break
		}
		if w.line == "" {
			w.line = line
		} else {
			w.header = append(w.header, line)
		}
	}
	if length := w.lines("Content-Length"); len(length) == 1 {
		var n int
		fmt.Sscan(length[0], &n)
		body := make([]byte, n)
		_, err := io.ReadFull(r, body)
		w.body = string(body)
		return w, err
	}
	return w, nil
}

func (s *losingServer) arrivals() []wireRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.got)
}

// P6 and O-22, over real sockets: what a peer that reads a request and is then
// lost sees of it. net/http by itself sends a keyed POST twice.
func TestP6_ExecutedOnceUnlessSafe(t *testing.T) {
	for _, tt := range []struct {
		name     string
		method   string
		body     string
		config   Config
		header   http.Header
		override Override
		arrivals int
		attempts int
		key      string // "": any, and the same on all; "-": none
	}{
		{name: "POST", method: "POST", body: "charge", arrivals: 1, attempts: 1},
		{name: "POST without a body", method: "POST", arrivals: 1, attempts: 1},
		{name: "PATCH", method: "PATCH", body: "charge", arrivals: 1, attempts: 1},
		{name: "POST, no keys", method: "POST", body: "charge", config: Config{Keys: KeysOff}, arrivals: 1, attempts: 1, key: "-"},
		{name: "POST, foreign", method: "POST", body: "charge", config: foreign, arrivals: 1, attempts: 1, key: "-"},
		{name: "POST, keys honoured", method: "POST", body: "charge", config: Config{Keys: KeysHonoured}, arrivals: 2, attempts: 2},
		{name: "POST, keys honoured by override", method: "POST", body: "charge", override: Override{Keys: KeysHonoured}, arrivals: 2, attempts: 2},
		{name: "POST, caller's key", method: "POST", body: "charge", header: http.Header{"Idempotency-Key": {"k"}}, arrivals: 2, attempts: 2, key: "k"},
		{name: "POST without a body, caller's key", method: "POST", header: http.Header{"Idempotency-Key": {"k"}}, arrivals: 2, attempts: 2, key: "k"},
		{name: "caller's key, odd spelling", method: "POST", body: "charge", header: http.Header{"IDEMPOTENCY-KEY": {"k"}}, arrivals: 2, attempts: 2, key: "k"},
		{name: "caller's key, two spellings", method: "POST", body: "charge", header: http.Header{"idempotency-key": {"x"}, "Idempotency-Key": {"k"}}, arrivals: 2, attempts: 2, key: "k"},
		{name: "caller's key by override", method: "POST", body: "charge", override: Override{IdempotencyKey: "k"}, arrivals: 2, attempts: 2, key: "k"},
		{name: "caller's promise without a key", method: "POST", body: "charge", header: http.Header{"Idempotency-Key": {}}, arrivals: 2, attempts: 2, key: "-"},
		{name: "caller's key, one attempt", method: "POST", body: "charge", header: http.Header{"Idempotency-Key": {"k"}}, config: Config{MaxAttempts: 1}, arrivals: 1, attempts: 1, key: "k"},
		{name: "keys honoured, one attempt", method: "POST", body: "charge", config: Config{Keys: KeysHonoured, MaxAttempts: 1}, arrivals: 1, attempts: 1},
		{name: "PUT", method: "PUT", body: "set", arrivals: 2, attempts: 2, key: "-"},
		{name: "DELETE", method: "DELETE", arrivals: 2, attempts: 2, key: "-"},
		// net/http's own rescue of a GET stays, or requests would fail that it saves.
		{name: "GET", method: "GET", arrivals: 2, attempts: 1, key: "-"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := startLosingServer(t)
			tt.config.Metrics = newTestMetrics(t)
			tt.config.CountResends = true
			tr := newTestTransport(t, tt.config)
			defer tr.CloseIdleConnections()
			warm, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", s.url+"/warm", nil))
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, warm)

			var o Outcome
			tt.override.Outcome = &o
			var body io.Reader
			if tt.body != "" {
				body = strings.NewReader(tt.body)
			}
			req := newRequest(t, WithOverride(t.Context(), tt.override), tt.method, s.url+"/charge", body)
			maps.Copy(req.Header, tt.header)
			before := req.Header.Clone()
			resp, err := tr.RoundTrip(req)
			if err == nil {
				readAll(t, resp)
			}
			got := s.arrivals()
			if len(got) != tt.arrivals || o.Attempts != tt.attempts {
				t.Errorf("%d arrivals in %d attempts, want %d in %d (%v)", len(got), o.Attempts, tt.arrivals, tt.attempts, err)
			}
			if (err == nil) != (tt.arrivals == 2) {
				t.Errorf("error %v", err)
			}
			for i, a := range got {
				keys := a.lines("Idempotency-Key")
				switch {
				case tt.key == "-":
					if len(keys) != 0 {
						t.Errorf("arrival %d has the keys %q", i+1, keys)
					}
				case len(keys) != 1 || tt.key != "" && keys[0] != tt.key || keys[0] != o.Key || keys[0] == "":
					t.Errorf("arrival %d has the keys %q, want %q, outcome %q", i+1, keys, tt.key, o.Key)
				}
				if a.body != tt.body || i > 0 && a.line != got[0].line {
					t.Errorf("arrival %d: %+v", i+1, a)
				}
				if want := tt.attempts > 1 && i > 0; (len(a.lines(HeaderRetryCount)) == 1) != want {
					t.Errorf("arrival %d: %s %v", i+1, HeaderRetryCount, a.lines(HeaderRetryCount))
				}
			}
			if !maps.EqualFunc(req.Header, before, slices.Equal) {
				t.Errorf("the caller's header is now %v", req.Header)
			}
			resends := float64(tt.arrivals - tt.attempts)
			if got := counter(t, tt.config.Metrics, "stint_transparent_resends_total"); got != resends {
				t.Errorf("%v resends counted, want %v", got, resends)
			}
		})
	}
}

// What was never written may be sent again, whatever the method: connection
// refused, no such host.
func TestP6_UnsentIsRetried(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }))
	defer s.Close()
	for _, refusal := range []error{
		&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED},
		&net.DNSError{Err: "no such host", Name: "peer.test", IsNotFound: true},
	} {
		var dials atomic.Int32
		base := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			if dials.Add(1) == 1 {
				return nil, refusal
			}
			return (&net.Dialer{}).DialContext(ctx, network, s.Listener.Addr().String())
		}}
		tr := newTestTransport(t, Config{Base: base})
		var o Outcome
		resp, err := tr.RoundTrip(newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "POST", "http://peer.test/", strings.NewReader("hello")))
		if err != nil || o.Attempts != 2 {
			t.Errorf("%v: %v, %+v", refusal, err, o)
			continue
		}
		if got := readAll(t, resp); got != "hello" {
			t.Errorf("%v: read %q", refusal, got)
		}
		base.CloseIdleConnections()
	}
	// A base that only says so proves nothing: it may have tried twice.
	for _, refusal := range []error{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}} {
		var o Outcome
		tr := newTestTransport(t, Config{Base: answers(failure(refusal), status(200))})
		_, err := tr.RoundTrip(newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "POST", "http://peer.test/", strings.NewReader("hello")))
		if err != refusal || o.Attempts != 1 || o.Reason != ReasonNotIdempotent {
			t.Errorf("%v, %+v", err, o)
		}
	}
}

// An attempt that was cut off with a connection in hand may have been written by
// a goroutine that still runs.
func TestP6_CutOffMayHaveBeenWritten(t *testing.T) {
	var arrivals atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrivals.Add(1)
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	client := startServer(t, s, false)
	var o Outcome
	tr := newTestTransport(t, Config{Base: client.Transport, AttemptTimeout: 20 * time.Millisecond})
	_, err := tr.RoundTrip(newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "POST", s.URL, strings.NewReader("x")))
	if err == nil || arrivals.Load() != 1 || o.Attempts != 1 || o.Reason != ReasonNotIdempotent {
		t.Errorf("%v, %+v, %d arrivals", err, o, arrivals.Load())
	}
}

// An answer that echoes our exact key says that its server dedupes.
func TestKeyEchoPermits(t *testing.T) {
	for _, tt := range []struct {
		echo string
		want int
	}{{"", 1}, {"another", 1}, {"same", 2}} {
		n := 0
		var keys []string
		tr := newTestTransport(t, Config{RetryStatus: func(s int) bool { return s == 500 }, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			n++
			keys = append(keys, r.Header["idempotency-key"]...)
			if n > 1 {
				return answer(200, ""), nil
			}
			resp := answer(500, "")
			switch tt.echo {
			case "same":
				resp.Header.Set(HeaderIdempotencyKey, keys[0])
			case "another":
				resp.Header.Set(HeaderIdempotencyKey, "another")
			}
			return resp, nil
		})})
		if _, err := tr.RoundTrip(newRequest(t, t.Context(), "POST", "http://peer.test/", nil)); err != nil || n != tt.want {
			t.Errorf("echo %q: %d attempts, %v", tt.echo, n, err)
		}
		if len(keys) != tt.want || keys[0] != keys[len(keys)-1] {
			t.Errorf("keys %v", keys)
		}
	}
}

// Another base than net/http's may look a caller's key up, and finds it as the
// caller wrote it.
func TestOtherBasesSeeTheCallersKey(t *testing.T) {
	for _, name := range []string{"Idempotency-Key", "idempotency-KEY", "X-Idempotency-Key"} {
		tr := newTestTransport(t, Config{Base: baseFunc(func(r *http.Request) (*http.Response, error) {
			if got := r.Header[name]; !slices.Equal(got, []string{"k"}) {
				t.Errorf("%s: %v", name, r.Header)
			}
			return answer(200, ""), nil
		})})
		req := newRequest(t, t.Context(), "POST", "http://peer.test/", nil)
		req.Header[name] = []string{"k"}
		if _, err := tr.RoundTrip(req); err != nil {
			t.Error(err)
		}
	}
}

// Redirects: the key that we made follows a 307 or 308 to the same host and no
// further, and the deadline neither.
func TestRedirects(t *testing.T) {
	type hop struct{ method, key, deadline, host string }
	var mu sync.Mutex
	var hops []hop
	record := func(r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		hops = append(hops, hop{r.Method, r.Header.Get(HeaderIdempotencyKey), r.Header.Get(HeaderDeadline), r.Host})
	}
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { record(r) }))
	defer other.Close()
	elsewhere := strings.Replace(other.URL, "127.0.0.1", "localhost", 1)
	mux := http.NewServeMux()
	mux.HandleFunc("/{code}/{where}", func(w http.ResponseWriter, r *http.Request) {
		record(r)
		var code int
		fmt.Sscan(r.PathValue("code"), &code)
		if r.PathValue("where") == "away" {
			http.Redirect(w, r, elsewhere, code)
		} else {
			http.Redirect(w, r, "/end", code)
		}
	})
	mux.HandleFunc("/end", func(w http.ResponseWriter, r *http.Request) { record(r) })
	s := httptest.NewServer(mux)
	defer s.Close()
	belongs := func(r *http.Request) bool { return false }
	for _, tt := range []struct {
		path             string
		foreign          func(*http.Request) bool
		sameKey, sendsTo bool // the second hop has the same key; has the deadline
	}{
		{"/307/here", nil, true, true},
		{"/308/here", nil, true, true},
		{"/303/here", nil, false, true},
		{"/302/here", nil, false, true},
		{"/307/away", nil, false, false},
		{"/307/away", belongs, false, true},
		{"/303/away", nil, false, false},
	} {
		hops = nil
		tr := newTestTransport(t, Config{Foreign: tt.foreign, Timeout: time.Minute})
		resp, err := (&http.Client{Transport: tr}).Post(s.URL+tt.path, "text/plain", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
		tr.CloseIdleConnections()
		if len(hops) != 2 {
			t.Fatalf("%s: %v", tt.path, hops)
		}
		first, second := hops[0], hops[1]
		if first.key == "" || first.deadline == "" {
			t.Errorf("%s: first hop %+v", tt.path, first)
		}
		if (second.key == first.key) != tt.sameKey || second.method == "GET" && second.key != "" {
			t.Errorf("%s: keys %q, then %q", tt.path, first.key, second.key)
		}
		if (second.deadline != "") != tt.sendsTo {
			t.Errorf("%s: deadline %q at the second hop", tt.path, second.deadline)
		}
		if strings.HasPrefix(second.host, "localhost") && tt.foreign == nil && second.key != "" {
			t.Errorf("%s: our key %q reached another host", tt.path, second.key)
		}
	}
}

// A reverse proxy's copy of the caller's key is the caller's, and net/http does
// not resend on it.
func TestReverseProxyIsNotResent(t *testing.T) {
	s := startLosingServer(t)
	target, _ := url.Parse(s.url)
	tr := newTestTransport(t, Config{MaxAttempts: 1})
	proxy := &httputil.ReverseProxy{Transport: tr, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
		w.WriteHeader(502)
	}}
	front := httptest.NewServer(proxy)
	defer front.Close()
	defer tr.CloseIdleConnections()
	for _, path := range []string{"/warm", "/charge"} {
		req := newRequest(t, t.Context(), "POST", front.URL+path, nil)
		req.Header.Set(HeaderIdempotencyKey, "k")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, resp)
	}
	if got := s.arrivals(); len(got) != 1 || !slices.Equal(got[0].lines(HeaderIdempotencyKey), []string{"k"}) {
		t.Errorf("%+v", got)
	}
}

// O-01: an empty POST keeps its length, on every attempt and both protocols.
func TestO01_EmptyBodiesKeepTheirLength(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		for _, method := range []string{"POST", "PUT"} {
			for name, body := range map[string]func() io.Reader{
				"nil":    func() io.Reader { return nil },
				"NoBody": func() io.Reader { return http.NoBody },
				"empty":  func() io.Reader { return strings.NewReader("") },
			} {
				var n atomic.Int32
				s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.ContentLength != 0 || len(r.TransferEncoding) > 0 || r.Header.Get("Content-Type") != "text/plain" {
						t.Errorf("h2=%v %s %s: length %d, encoding %v, type %q", h2, method, name, r.ContentLength, r.TransferEncoding, r.Header.Get("Content-Type"))
					}
					if !h2 && r.Header.Get("Content-Length") != "0" {
						t.Errorf("%s %s: Content-Length %q", method, name, r.Header.Get("Content-Length"))
					}
					if n.Add(1) == 1 {
						w.WriteHeader(503)
					}
				}))
				client := startServer(t, s, h2)
				tr := newTestTransport(t, Config{Base: client.Transport, Keys: KeysHonoured})
				var o Outcome
				req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), method, s.URL, body())
				req.Header.Set("Content-Type", "text/plain")
				resp, err := tr.RoundTrip(req)
				if err != nil || resp.StatusCode != 200 || o.Attempts != 2 {
					t.Errorf("h2=%v %s %s: %v, %+v", h2, method, name, err, o)
					continue
				}
				readAll(t, resp)
			}
		}
	}
}

// O-02 and O-03: each attempt gets a whole body of its own, and each is closed.
func TestO02_EveryAttemptHasAWholeBody(t *testing.T) {
	const size = 1 << 20
	whole := strings.Repeat("x", size)
	for _, tt := range []struct {
		name string
		read int64 // by the first two attempts
		err  error // or a 503
	}{
		{"half, then lost", size / 2, io.ErrUnexpectedEOF},
		{"nothing, then no connection", 0, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}},
		{"all, then a 503", size, nil},
		{"half, then a 503", size / 2, nil},
	} {
		for _, perAttempt := range []time.Duration{0, time.Minute} {
			t.Run(fmt.Sprint(tt.name, perAttempt), func(t *testing.T) {
				var bodies []*trackedBody
				fresh := func() (io.ReadCloser, error) {
					b := &trackedBody{Reader: strings.NewReader(whole)}
					bodies = append(bodies, b)
					return b, nil
				}
				n := 0
				tr := newTestTransport(t, Config{AttemptTimeout: perAttempt, Backoff: Backoff{Base: 1, Max: 1}, Budget: BudgetConfig{MinPerSecond: 1e4}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
					defer r.Body.Close()
					if r.ContentLength != size {
						t.Errorf("length %d", r.ContentLength)
					}
					for i, b := range bodies[:len(bodies)-1] {
						if b.closes.Load() != 1 {
							t.Errorf("attempt %d begins, body %d was closed %d times", n+1, i+1, b.closes.Load())
						}
					}
					if n++; n < 3 {
						io.CopyN(io.Discard, r.Body, tt.read)
						if tt.err != nil {
							return nil, tt.err
						}
						return answer(503, ""), nil
					}
					b, err := io.ReadAll(r.Body)
					if string(b) != whole || err != nil {
						t.Errorf("read %d bytes, %v", len(b), err)
					}
					return answer(200, ""), nil
				})})
				req := newRequest(t, t.Context(), "PUT", "http://peer.test/", nil)
				req.Body, _ = fresh()
				req.GetBody, req.ContentLength = fresh, size
				resp, err := tr.RoundTrip(req)
				if err != nil || resp.StatusCode != 200 || len(bodies) != 3 {
					t.Fatalf("%v, %d bodies", err, len(bodies))
				}
				for i, b := range bodies {
					if b.closes.Load() != 1 {
						t.Errorf("body %d was closed %d times", i+1, b.closes.Load())
					}
				}
			})
		}
	}
}

// A base that is still inside Read of a body when its answer has come: the next
// attempt waits for it a moment, and is not made if it does not come back.
func TestBodiesNeverHaveTwoReaders(t *testing.T) {
	for _, back := range []bool{true, false} {
		t.Run(fmt.Sprint("comes back: ", back), func(t *testing.T) {
			release, begun := make(chan struct{}), make(chan struct{})
			begin := sync.OnceFunc(func() { close(begun) })
			var reading sync.WaitGroup
			n := 0
			var o Outcome
			tr := newTestTransport(t, Config{Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
				if n++; n == 1 {
					reading.Go(func() {
						io.Copy(io.Discard, r.Body)
						r.Body.Close()
					})
					<-begun
					return answer(503, "early"), nil
				}
				if b, err := io.ReadAll(r.Body); string(b) != "second" || err != nil {
					t.Errorf("read %q, %v", b, err)
				}
				return answer(200, ""), nil
			})})
			req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "PUT", "http://peer.test/", nil)
			first := &trackedBody{Reader: readFunc(func([]byte) (int, error) {
				begin()
				if back {
					time.Sleep(bodyPatience / 5)
					return 1, nil
				}
				<-release
				return 0, io.EOF
			})}
			req.Body, req.ContentLength = first, -1
			req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("second")), nil }
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			if back && (resp.StatusCode != 200 || o.Attempts != 2) || !back && (resp.StatusCode != 503 || o.Reason != ReasonNotReplayable) {
				t.Errorf("%v, %+v", resp.StatusCode, o)
			}
			if got := readAll(t, resp); !back && got != "early" {
				t.Errorf("read %q", got)
			}
			close(release)
			reading.Wait()
			if first.closes.Load() != 1 {
				t.Errorf("the first body was closed %d times", first.closes.Load())
			}
		})
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// The caller's own body that fails is not the peer's failure.
func TestCallersBodyFails(t *testing.T) {
	broken := errors.New("disk on fire")
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }))
	defer s.Close()
	var o Outcome
	tr := newTestTransport(t, Config{})
	defer tr.CloseIdleConnections()
	req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), "PUT", s.URL, nil)
	fail := func() (io.ReadCloser, error) {
		return io.NopCloser(readFunc(func([]byte) (int, error) { return 0, broken })), nil
	}
	req.Body, _ = fail()
	req.GetBody, req.ContentLength = fail, 5
	_, err := tr.RoundTrip(req)
	if !errors.Is(err, broken) || o.Attempts != 1 || o.Reason != "" {
		t.Errorf("%v, %+v", err, o)
	}
}

// O-23: all attempts of one request have the same key and body, whatever causes
// the retry.
func TestO23_SameKeyAndBodyOnEveryRetryPath(t *testing.T) {
	causes := map[string]func(*http.Request) (*http.Response, error){
		"lost":    func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF },
		"timeout": hang,
	}
	for _, code := range []int{429, 502, 503, 504} {
		causes[fmt.Sprint(code)] = func(*http.Request) (*http.Response, error) { return answer(code, ""), nil }
	}
	for cause, first := range causes {
		for _, tt := range []struct {
			name, method string
			keys         KeyPolicy
			header       http.Header
		}{
			{"caller's key", "POST", KeysAuto, http.Header{"Idempotency-Key": {"k"}}},
			{"honoured", "POST", KeysHonoured, nil},
			{"PUT", "PUT", KeysAuto, nil},
		} {
			synctest.Test(t, func(t *testing.T) {
				var seen []string
				tr := newTestTransport(t, Config{AttemptTimeout: 20 * time.Millisecond, Keys: tt.keys, Backoff: Backoff{Base: 1, Max: 1}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
					b, _ := io.ReadAll(r.Body)
					r.Body.Close()
					value, _ := callersKey(r.Header)
					seen = append(seen, value+" "+string(b))
					if len(seen)%2 == 1 {
						return first(r)
					}
					return answer(200, ""), nil
				})})
				for range 2 {
					req := newRequest(t, t.Context(), tt.method, "http://peer.test/", strings.NewReader("body"))
					maps.Copy(req.Header, tt.header)
					if resp, err := tr.RoundTrip(req); err != nil || resp.StatusCode != 200 {
						t.Errorf("%s, %s: %v", cause, tt.name, err)
					}
				}
				if len(seen) != 4 || seen[0] != seen[1] || seen[2] != seen[3] || !strings.HasSuffix(seen[0], " body") {
					t.Errorf("%s, %s: %q", cause, tt.name, seen)
				}
				if tt.keys == KeysHonoured && (seen[0] == seen[2] || seen[0] == " body") {
					t.Errorf("%s: two requests had the key and body %q", cause, seen[0])
				}
			})
		}
	}
}

// A key in any form and spelling, one or two of them: what goes out is one of each
// name, the one that Outcome shows, in a spelling that net/http does not act on, and
// the same each time; the caller's header stays as it was. What comes in is a key or
// nothing, and a key survives being quoted.
func FuzzIdempotencyKey(f *testing.F) {
	f.Add("order-1", uint16(0), "", uint16(0), false)
	f.Add(`"order \"1\\"`, uint16(0xffff), "order-2", uint16(1), true)
	f.Add("\x00\n\x80", uint16(0x5555), "order-2", uint16(0x5555), false)
	f.Add(strings.Repeat("k", idemkey.MaxLen+1), uint16(7), " k ", uint16(3), true)
	f.Fuzz(func(t *testing.T, one string, upperOne uint16, two string, upperTwo uint16, other bool) {
		name := HeaderIdempotencyKey
		if other {
			name = headerXIdempotencyKey
		}
		in := http.Header{"Accept": {"a"}, spelled(HeaderIdempotencyKey, upperOne): {one}}
		in[spelled(name, upperTwo)] = []string{two}
		before := in.Clone()
		req := &http.Request{Method: "POST", URL: &url.URL{Host: "peer.test"}, Header: in}
		scan := scanHeader(in)
		if !scan.key {
			t.Fatalf("no key in %q", in)
		}
		for _, std := range []bool{true, false} {
			var first http.Header
			for range 4 { // the order of a map is another each time
				key := chooseKey(req, scan.key, nil, "", KeysAuto, false)
				if !key.promise || key.value != one && key.value != two {
					t.Fatalf("%q became %+v", in, key)
				}
				out := in.Clone()
				key.apply(out, out.Set, std)
				if first == nil {
					first = out
				}
				var sent []string
				for k, lines := range out {
					if n := keyHeader(k); n == HeaderIdempotencyKey || n != "" && !hasKeyName(in) {
						sent = append(sent, lines...)
					}
					if std && keyHeader(k) == k {
						t.Fatalf("net/http would act on %q", k)
					}
				}
				if !reflect.DeepEqual(out, first) || !slices.Equal(sent, []string{key.value}) {
					t.Fatalf("%q: %q and %q are sent, Outcome shows %q", in, first, out, key.value)
				}
			}
		}
		if !reflect.DeepEqual(in, before) {
			t.Fatalf("%q became %q", before, in)
		}

		if got := keyOfRequest(scanned(in)); got != "" && (!idemkey.Valid(got) || len(in) > 2) {
			t.Fatalf("%q is taken from %q", got, in)
		}
		if idemkey.Valid(one) && one[0] != '"' {
			quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(one) + `"`
			for _, form := range []string{one, quoted, " " + quoted + "\t"} {
				if got := keyOfRequest(scanned(http.Header{spelled(name, upperTwo): {form}})); got != one {
					t.Fatalf("%q is taken from %q", got, form)
				}
			}
		}
	})
}

// spelled returns the name with those letters in upper case whose bit is set.
func spelled(name string, upper uint16) string {
	b := []byte(strings.ToLower(name))
	for i := range b {
		if upper>>(i%16)&1 == 1 {
			b[i] = strings.ToUpper(string(b[i]))[0]
		}
	}
	return string(b)
}

func hasKeyName(h http.Header) bool {
	for k := range h {
		if keyHeader(k) == HeaderIdempotencyKey {
			return true
		}
	}
	return false
}
