package stint

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// hsLeft is the deadline of most requests here: long enough to reach the handler
// on a busy machine.
const hsLeft = 150 * time.Millisecond

// hsSlack is what a busy machine may add.
const hsSlack = 2 * time.Second

// hsCounts tells what a Metrics has counted: requests out of time, and answers.
func hsCounts(t *testing.T, m *Metrics, service string) (exceeded, answered float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	got, _ := gather(t, reg)
	return testutil.ToFloat64(m.exceeded.WithLabelValues(sideServer, "", service)), got.sum("http_server_requests_total{")
}

// A hsLog is a server's ErrorLog.
type hsLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *hsLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *hsLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// hsAwait waits until f is true.
func hsAwait(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

// hsGoroutines counts the goroutines that are inside the middleware.
func hsGoroutines() (n int) {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	for stack := range strings.SplitSeq(string(buf), "\n\n") {
		if strings.Contains(stack, "stint.(*guard).run") || strings.Contains(stack, "stint.(*Middleware).serve(") {
			n++
		}
	}
	return n
}

// What holds of the middleware holds with HardStop.
func TestHardStop_IsTheMiddleware(t *testing.T) {
	mwHardStop = true
	log.SetOutput(io.Discard) // stacks of handlers that are called without a server
	defer func() { mwHardStop = false; log.SetOutput(os.Stderr) }()
	for name, f := range map[string]func(*testing.T){
		"P5_ExpiredIsRefusedBeforeWork":      TestP5_ExpiredIsRefusedBeforeWork,
		"P7_RefusalKeepsTheConnection":       TestP7_RefusalKeepsTheConnection,
		"S7_RefusalIsCleanAndReadable":       TestS7_RefusalIsCleanAndReadable,
		"O38_WriterDoesWhatThePlainOneDoes":  TestO38_WriterDoesWhatThePlainOneDoes,
		"O38_EventStream":                    TestO38_EventStream,
		"O38_FlushError":                     TestO38_FlushError,
		"O38_HiddenByALayerOutside":          TestO38_HiddenByALayerOutside,
		"O38_UpgradeOutlivesTheDeadline":     TestO38_UpgradeOutlivesTheDeadline,
		"O38_UpgradeThroughReverseProxy":     TestO38_UpgradeThroughReverseProxy,
		"ConnectIsOverWhenAnswered":          TestConnectIsOverWhenAnswered,
		"O39_ReverseProxy":                   TestO39_ReverseProxy,
		"PanicsPass":                         TestPanicsPass,
		"O32_ClockStep":                      TestO32_ClockStep,
		"O33_UnusableHeader":                 TestO33_UnusableHeader,
		"Exempt":                             TestExempt,
		"ReportOnly":                         TestReportOnly,
		"S28_FailedCallsMarkTheAnswer":       TestS28_FailedCallsMarkTheAnswer,
		"ReverseProxyFlushInterval":          TestReverseProxyFlushInterval,
		"EventFields":                        TestEventFields,
		"P7_RequestSeenFromOutside":          TestP7_RequestSeenFromOutside,
		"P7_PanicKeepsWhatIsSeenFromOutside": TestP7_PanicKeepsWhatIsSeenFromOutside,
		"MiddlewareConcurrentUse":            TestMiddlewareConcurrentUse,
		"HijackFails":                        TestHijackFails,
	} {
		t.Run(name, f)
	}
}

// The 504 comes at the deadline while the handler runs, and is inline's 504.
func TestHardStop_AnswersWhileTheHandlerRuns(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		free, freed := make(chan struct{}), make(chan struct{})
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Etag", "x")
			w.WriteHeader(103)
			if strings.HasPrefix(r.URL.Path, "/inline") {
				<-r.Context().Done()
				return
			}
			<-free
			defer close(freed)
			if err := r.Context().Err(); err != context.DeadlineExceeded {
				t.Errorf("context: got %v", err)
			}
			w.Header().Set("Etag", "y") // must not be seen, nor race
			rc := http.NewResponseController(w)
			w.WriteHeader(200)
			var p http.Pusher
			if major == 2 {
				p = w.(http.Pusher)
			}
			for name, f := range map[string]func() error{
				"Write":            func() error { _, err := w.Write([]byte("late")); return err },
				"WriteString":      func() error { _, err := io.WriteString(w, "late"); return err },
				"ReadFrom":         func() error { _, err := io.Copy(w, io.LimitReader(strings.NewReader("late"), 4)); return err },
				"Flush":            rc.Flush,
				"Hijack":           func() error { _, _, err := rc.Hijack(); return err },
				"SetReadDeadline":  func() error { return rc.SetReadDeadline(time.Now()) },
				"SetWriteDeadline": func() error { return rc.SetWriteDeadline(time.Now()) },
				"EnableFullDuplex": rc.EnableFullDuplex,
				"Push": func() error {
					if p == nil {
						return http.ErrHandlerTimeout
					}
					return p.Push("/x", nil)
				},
				"Body.Read": func() error { _, err := r.Body.Read(make([]byte, 1)); return err },
				"unwrapped": func() error {
					_, err := w.(interface{ Unwrap() http.ResponseWriter }).Unwrap().Write([]byte("late"))
					return err
				},
			} {
				if err := f(); err != http.ErrHandlerTimeout {
					t.Errorf("%s: got %v, want http.ErrHandlerTimeout", name, err)
				}
			}
			w.(http.Flusher).Flush()
			if err := r.Body.Close(); err != nil {
				t.Errorf("Body.Close: %v", err)
			}
			select {
			//lint:ignore SA1019 deprecated, and still asked for by handlers
			case <-w.(http.CloseNotifier).CloseNotify():
			default:
				t.Error("CloseNotify tells of no end")
			}
		})
		metrics, err := NewMetrics(MetricsConfig{})
		if err != nil {
			t.Fatal(err)
		}
		events := new(mwEvents)
		mux := http.NewServeMux()
		mux.Handle("/inline/", mwNew(t, MiddlewareConfig{Timeout: hsLeft}).Handler(h))
		mux.Handle("/hard/", mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft, Metrics: metrics, Service: "s", Hook: events.hook}).Handler(h))
		srv, client := mwServe(t, major, mux)

		see := func(path string) string {
			t.Helper()
			start := time.Now()
			resp, body := mwDo(t, client, "POST", srv.URL+path, strings.NewReader("some body"))
			if took := time.Since(start); took < hsLeft-10*time.Millisecond || took > hsLeft+hsSlack {
				t.Errorf("%s: answered after %v, want %v", path, took, hsLeft)
			}
			mwCheckExpired(t, resp)
			resp.Header.Del("Date")
			resp.Header.Del("Content-Length") // by how many milliseconds it is late has one digit, or two
			by := strings.Fields(body)
			return fmt.Sprint(resp.Proto, resp.Status, resp.Header, by[:len(by)-2], resp.ContentLength > 0, resp.Trailer)
		}
		inline, hard := see("/inline/"), see("/hard/")
		if hard != inline {
			t.Errorf("got\n%s\ninline\n%s", hard, inline)
		}
		events.await(t, "arrived, expired, served 504")
		if e := events.get(EventServed); e.Reason != ReasonExpired {
			t.Errorf("served: got %+v", e)
		}
		close(free)
		<-freed
		events.await(t, "arrived, expired, served 504")
		if x, a := hsCounts(t, metrics, "s"); x != 1 || a != 1 {
			t.Errorf("counted %v out of time and %v answers, want one each", x, a)
		}
		hsAwait(t, "the handler's goroutine ends", func() bool { return hsGoroutines() == 0 })
	})
}

// An answer that has begun is broken off, a moment after the deadline, so that
// nobody takes it for complete.
func TestHardStop_BreaksOff(t *testing.T) {
	half := func() io.Reader {
		pr, pw := io.Pipe()
		go pw.Write([]byte("half"))
		t.Cleanup(func() { pw.Close() })
		return pr
	}
	mwEachProtocol(t, func(t *testing.T, major int) {
		for name, body := range map[string]func() io.Reader{
			"no body":            func() io.Reader { return nil },
			"unread":             func() io.Reader { return strings.NewReader("some body") },
			"half sent":          half,
			"half sent and read": half,
		} {
			t.Run(name, func(t *testing.T) {
				free := make(chan struct{})
				events := new(mwEvents)
				m := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft, Hook: events.hook})
				srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if strings.HasPrefix(name, "half sent") {
						http.NewResponseController(w).EnableFullDuplex()
					}
					io.WriteString(w, "part")
					w.(http.Flusher).Flush()
					if name == "half sent and read" {
						io.Copy(io.Discard, r.Body) // is interrupted
					}
					<-free
				})))
				defer close(free)
				start := time.Now()
				req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, body())
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				got, err := io.ReadAll(resp.Body)
				if took := time.Since(start); took < hsLeft-10*time.Millisecond || took > hsLeft+stopGrace+hsSlack {
					t.Errorf("broken off after %v, want %v", took, hsLeft)
				}
				if string(got) != "part" || err == nil {
					t.Errorf("got %q, %v; want part of an answer and an error", got, err)
				}
				events.await(t, "arrived, expired, served 200")
			})
		}
	})
}

// A handler that heeds its context, and has begun to answer, ends it in its own
// way.
func TestHardStop_LeavesAMomentToEnd(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		m := mwNew(t, MiddlewareConfig{HardStop: true})
		srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-T")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			io.WriteString(w, "bye")
			w.Header().Set("X-T", "1")
		})))
		for range 5 {
			resp, body := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, mwIn(30*time.Millisecond))
			if resp.StatusCode == 504 {
				continue // a machine that took 30 ms to get there
			}
			if body != "bye" || resp.Trailer.Get("X-T") != "1" {
				t.Errorf("got %q, %v; want bye and a trailer", body, resp.Trailer)
			}
		}
	})
}

// A Write that the client does not take holds nobody beyond the deadline.
func TestHardStop_BlockedWrite(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		for _, how := range []string{"Write", "ReadFrom", "Flush"} {
			returned, ended := make(chan time.Time, 1), make(chan error, 1)
			h := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				var err error
				defer func() { ended <- err }()
				for err == nil {
					switch chunk := make([]byte, 8<<20); how {
					case "Write":
						_, err = w.Write(chunk)
					case "ReadFrom":
						_, err = io.Copy(w, io.LimitReader(bytes.NewReader(chunk), 8<<20))
					case "Flush":
						if _, err = w.Write(chunk[:1000]); err == nil {
							err = http.NewResponseController(w).Flush()
						}
					}
				}
			}))
			srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer func() { returned <- time.Now() }()
				h.ServeHTTP(w, r)
			}))
			start := time.Now()
			req, _ := http.NewRequestWithContext(t.Context(), "GET", srv.URL, nil)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			// Not read meanwhile.
			select {
			case end := <-returned:
				if took := end.Sub(start); took > hsLeft+3*stopGrace+hsSlack {
					t.Errorf("%s: let go after %v", how, took)
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("%s: a Write holds the server's goroutine", how)
			}
			if err := <-ended; err == nil {
				t.Errorf("%s: the Write has no error", how)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Errorf("%s: the answer ends as if complete", how)
			}
			resp.Body.Close()
		}
	})
}

// Before it sends a header, net/http/1 reads what is left of the body: a Write
// can wait for the client to send, and no write deadline ends that.
func TestHardStop_WriteThatWaitsForTheBody(t *testing.T) {
	returned := make(chan struct{}, 1)
	h := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write(make([]byte, 100_000))
		time.Sleep(2 * hsLeft)
	}))
	srv, _ := mwServe(t, 1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() { returned <- struct{}{} }()
		h.ServeHTTP(w, r)
	}))
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
	select {
	case <-returned:
	case <-time.After(3 * time.Second):
		t.Error("a Write that waits for the client holds the server's goroutine")
	}
	if b, err := io.ReadAll(conn); err != nil && !strings.Contains(err.Error(), "reset") || len(b) >= 100_000 {
		t.Errorf("got %d bytes, %v; want the connection closed early", len(b), err)
	}
}

// A handler that interrupts a Write of its own does so while that Write holds
// the guard's lock.
func TestHardStop_HandlerInterruptsItsWrite(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		ended := make(chan struct{})
		srv, client := mwServe(t, major, mwNew(t, MiddlewareConfig{HardStop: true, Timeout: time.Minute}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			defer close(ended)
			time.AfterFunc(50*time.Millisecond, func() { http.NewResponseController(w).SetWriteDeadline(time.Now().Add(-1)) })
			for range 100 {
				if _, err := w.Write(make([]byte, 1<<20)); err != nil {
					return
				}
			}
			t.Error("written in full")
		})))
		resp, err := client.Get(srv.URL)
		if err == nil {
			defer resp.Body.Close()
		}
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			t.Error("the deadline that is to end a Write waits for it")
		}
	})
}

// hsStuck is a writer whose Write comes back when it is interrupted.
type hsStuck struct {
	*httptest.ResponseRecorder
	free chan struct{}
	once sync.Once
}

func (w *hsStuck) Write(b []byte) (int, error)      { <-w.free; return len(b), nil }
func (w *hsStuck) SetReadDeadline(time.Time) error  { return nil }
func (w *hsStuck) SetWriteDeadline(time.Time) error { w.once.Do(func() { close(w.free) }); return nil }

// A connection that was interrupted is not kept, even if the handler ends at
// that moment, as if in time.
func TestHardStop_InterruptedIsNotKept(t *testing.T) {
	h := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: 10 * time.Millisecond}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte("x"))
	}))
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			defer func() {
				if v := recover(); v != http.ErrAbortHandler {
					t.Errorf("recovered %v, want http.ErrAbortHandler", v)
				}
			}()
			h.ServeHTTP(&hsStuck{ResponseRecorder: httptest.NewRecorder(), free: make(chan struct{})}, mwRequest())
		})
	}
	wg.Wait()
}

// ReadFrom does not hold the lock while its source keeps it waiting.
func TestHardStop_SlowSource(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		pr, pw := io.Pipe()
		ended := make(chan error, 1)
		srv, client := mwServe(t, major, mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, err := io.Copy(w, struct{ io.Reader }{pr}) // ReadFrom, on HTTP/1
			ended <- err
		})))
		resp, _ := mwDo(t, client, "GET", srv.URL, nil)
		mwCheckExpired(t, resp)
		pw.Write([]byte("late"))
		pw.Close()
		if err := <-ended; err != http.ErrHandlerTimeout {
			t.Errorf("got %v, want http.ErrHandlerTimeout", err)
		}
	})
}

// A handler that waits for a body that does not come is no reason to wait with
// the 504, nor to lose the server's goroutine to it.
func TestHardStop_BlockedBodyRead(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		read, returned := make(chan error, 2), make(chan struct{}, 1)
		h := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, err := io.Copy(io.Discard, r.Body)
			read <- err
			_, err = r.Body.Read(make([]byte, 1)) // and again, as some do
			read <- err
		}))
		srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(w, r)
			returned <- struct{}{}
		}))
		for _, length := range []int64{-1, 100, drainBytes + 1} {
			pr, pw := io.Pipe()
			go pw.Write([]byte("half"))
			req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, pr)
			req.ContentLength = length
			start := time.Now()
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			mwCheckExpired(t, resp)
			if took := time.Since(start); took > hsLeft+400*time.Millisecond {
				t.Errorf("length %d: answered after %v, want %v: waited for the body", length, took, hsLeft)
			}
			if resp.Close != (major == 1) {
				t.Errorf("length %d: connection closed: got %v", length, resp.Close)
			}
			<-returned
			for _, what := range []string{"the Read under way", "the next"} {
				select {
				case err := <-read:
					if err == nil {
						t.Errorf("length %d: %s: got nil, want an error", length, what)
					}
				case <-time.After(5 * time.Second):
					t.Fatalf("length %d: the Read goes on", length)
				}
			}
			pw.Close()
		}
	})
	// A client that neither sends the rest nor leaves: the server lets go.
	gone := make(chan struct{}, 1)
	srv := httptest.NewUnstartedServer(mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		time.Sleep(2 * hsLeft)
	})))
	srv.Config.ErrorLog = quiet
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			gone <- struct{}{}
		}
	}
	srv.Start()
	defer srv.Close()
	for _, length := range []int{100, 200_000} {
		_, resp := mwRaw(t, srv.Listener.Addr().String(), fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nhalf", length))
		mwCheckExpired(t, resp)
		select {
		case <-gone:
		case <-time.After(lingerTime + 3*time.Second):
			t.Errorf("length %d: the connection is held for a body that does not come", length)
		}
	}
}

// A request without a body gets no read deadline, which would cancel every
// later request of its connection (golang/go#70834).
func TestHardStop_KeepsTheConnection(t *testing.T) {
	var conns atomic.Int32
	free := make(chan struct{})
	srv := httptest.NewUnstartedServer(mwNew(t, MiddlewareConfig{HardStop: true}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/read":
			io.Copy(io.Discard, r.Body)
			<-free
		case "/late":
			<-free
		default:
			time.Sleep(drainTime + 15*time.Millisecond)
			if r.Context().Err() != nil {
				w.WriteHeader(500)
			}
		}
	})))
	srv.Config.ErrorLog = quiet
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	defer srv.Close()
	defer close(free)
	for i, tt := range []struct {
		method, path, body string
	}{{"GET", "/late", ""}, {"POST", "/late", "body"}, {"POST", "/read", "body"}} {
		for try := 0; ; try++ {
			before := conns.Load()
			resp, _ := mwDo(t, srv.Client(), tt.method, srv.URL+tt.path, strings.NewReader(tt.body), HeaderDeadline, mwIn(50*time.Millisecond))
			mwCheckExpired(t, resp)
			for range 2 {
				if resp, _ := mwDo(t, srv.Client(), "GET", srv.URL, nil); resp.StatusCode != 200 {
					t.Errorf("%d: next request: got %d, want 200: its context was cancelled", i, resp.StatusCode)
				}
			}
			if n := conns.Load(); try == 5 {
				t.Fatalf("%d: %d new connections, want none", i, n-before)
			} else if n == before || n == 1 {
				break
			}
			// A machine too busy to read four bytes in 10 ms gives a connection up.
		}
	}
}

// Whatever happens at the deadline, the client gets either answer, whole, and
// each request is counted once. Run with -race.
func TestHardStop_Stress(t *testing.T) {
	n := 2000
	if testing.Short() {
		n = 300
	}
	mwEachProtocol(t, func(t *testing.T, major int) {
		metrics, err := NewMetrics(MetricsConfig{})
		if err != nil {
			t.Fatal(err)
		}
		const work = 8 * time.Millisecond
		var running atomic.Int32
		m := mwNew(t, MiddlewareConfig{HardStop: true, Metrics: metrics, Service: "s"})
		h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			running.Add(1)
			defer running.Add(-1)
			end := time.Now().Add(work)
			switch r.URL.Path {
			case "/header":
				for i := 0; time.Now().Before(end); i++ {
					w.Header().Set("X-A", fmt.Sprint(i))
					w.Header()["X-B"] = append(w.Header()["X-B"][:0], fmt.Sprint(i))
					time.Sleep(50 * time.Microsecond)
				}
				w.WriteHeader(201)
				w.Header()["X-B"][0] = "trailing"
			case "/flush":
				time.Sleep(work - time.Millisecond)
				for range 20 {
					io.WriteString(w, "x")
					http.NewResponseController(w).Flush()
					time.Sleep(100 * time.Microsecond)
				}
			case "/read":
				go w.(http.Flusher).Flush() // as a reverse proxy's timer
				buf := make([]byte, 100)
				for time.Now().Before(end) {
					r.Body.Read(buf)
					time.Sleep(50 * time.Microsecond)
				}
				io.Copy(w, io.LimitReader(strings.NewReader("read"), 4))
			case "/panic":
				time.Sleep(work)
				panic(http.ErrAbortHandler)
			default:
				time.Sleep(work)
				io.WriteString(w, strings.Repeat("x", 5000))
			}
		}))
		srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer func() {
				for range w.Header() { // a layer outside that looks
				}
			}()
			h.ServeHTTP(w, r)
		}))
		paths := []string{"/header", "/flush", "/read", "/panic", "/write"}
		var wg sync.WaitGroup
		var sent, expired, broken atomic.Int32
		for range 20 {
			wg.Go(func() {
				for sent.Add(1) <= int32(n) {
					path := paths[rand.IntN(len(paths))]
					left := work - 4*time.Millisecond + rand.N(10*time.Millisecond)
					var body io.Reader
					if path == "/read" {
						body = io.MultiReader(bytes.NewReader(make([]byte, 3000)))
					}
					req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL+path, body)
					req.Header.Set(HeaderDeadline, mwIn(left+time.Millisecond))
					resp, err := client.Do(req)
					if err != nil {
						broken.Add(1)
						continue
					}
					b, err := io.ReadAll(resp.Body)
					resp.Body.Close()
					switch {
					case resp.StatusCode == 504:
						expired.Add(1)
						if err != nil || resp.Header.Get(HeaderDeadlineExpired) != "1" || resp.Header.Get("X-A") != "" || !strings.HasPrefix(string(b), "deadline exceeded") {
							t.Errorf("%s: 504: got %q, %v, %v", path, b, resp.Header, err)
						}
					case err != nil:
						broken.Add(1)
					case resp.Header.Get(HeaderDeadlineExpired) != "":
						t.Errorf("%s: got %d marked as expired", path, resp.StatusCode)
					case path == "/write" && len(b) != 5000 || path == "/flush" && len(b) != 20:
						t.Errorf("%s: got %d bytes as if complete", path, len(b))
					}
				}
			})
		}
		wg.Wait()
		hsAwait(t, "all handlers end", func() bool { return running.Load() == 0 && hsGoroutines() == 0 })
		answered := 0.0
		hsAwait(t, "every request is counted", func() bool {
			_, answered = hsCounts(t, metrics, "s")
			return int(answered) >= n
		})
		// net/http sends some again, if their connection is closed.
		t.Logf("%d requests: %d expired, %d broken off or aborted, %v counted", n, expired.Load(), broken.Load(), answered)
		if expired.Load() == 0 || int(expired.Load()) == n {
			t.Error("nothing happened around the deadline")
		}
	})
}

// The panic of a handler in time comes out where it would, with its value. The
// stack, which does not, is in the server's log.
func TestHardStop_PanicInTime(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		boom := &struct{ s string }{"boom"}
		values := make(chan any, 1)
		h := mwNew(t, MiddlewareConfig{HardStop: true}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/abort":
				panic(http.ErrAbortHandler)
			case "/nil":
				panic(nil)
			}
			w.Header().Set("X-Set", "1")
			hsPanics(boom)
		}))
		logged := new(hsLog)
		srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer func() {
				v := recover()
				values <- v
				if r.URL.Path == "/" {
					w.WriteHeader(500) // as layers do that recover
					return
				}
				panic(v)
			}()
			h.ServeHTTP(w, r)
		}))
		srv.Config.ErrorLog.SetOutput(logged)
		resp, _ := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, mwIn(time.Minute))
		if v := <-values; v != boom {
			t.Errorf("recovered %v, want the value itself", v)
		}
		if resp.StatusCode != 500 || resp.Header.Get("X-Set") != "1" {
			t.Errorf("got %d %v, want the header that the handler has set", resp.StatusCode, resp.Header)
		}
		if s := logged.String(); !strings.Contains(s, "hsPanics") {
			t.Errorf("the log does not say where: %q", s)
		}
		logged.b.Reset()
		for path, want := range map[string]any{"/abort": http.ErrAbortHandler, "/nil": new(runtime.PanicNilError)} {
			req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL+path, nil)
			req.Header.Set(HeaderDeadline, mwIn(time.Minute))
			if resp, err := client.Do(req); err == nil {
				t.Errorf("%s: got %s", path, resp.Status)
			}
			if v := <-values; fmt.Sprint(v) != fmt.Sprint(want) {
				t.Errorf("%s: recovered %v, want %v", path, v, want)
			}
			if s := logged.String(); path == "/abort" && strings.Contains(s, "stint") && strings.Contains(s, "abort") {
				t.Errorf("an abort is logged: %s", s)
			}
		}
	})
}

func hsPanics(v any) { panic(v) }

// A handler that panics when it is too late does not end the process, and does
// not go unnoticed.
func TestHardStop_PanicTooLate(t *testing.T) {
	boom := errors.New("boom")
	for _, hooked := range []string{"", "hook", "panicking hook", "abort", "Goexit"} {
		t.Run(hooked, func(t *testing.T) {
			free := make(chan struct{})
			events := new(mwEvents)
			c := MiddlewareConfig{HardStop: true, Timeout: hsLeft, Service: "s"}
			if hooked != "" {
				c.Hook = func(ctx context.Context, e Event) {
					events.hook(ctx, e)
					if hooked == "panicking hook" && e.Kind == EventPanicked {
						panic("hook")
					}
				}
			}
			logged := new(hsLog)
			srv, client := mwServe(t, 1, mwNew(t, c).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				<-free
				switch hooked {
				case "abort":
					panic(http.ErrAbortHandler)
				case "Goexit":
					runtime.Goexit()
				}
				hsPanics(boom)
			})))
			srv.Config.ErrorLog.SetOutput(logged)
			resp, _ := mwDo(t, client, "GET", srv.URL, nil)
			mwCheckExpired(t, resp)
			close(free)
			hsAwait(t, "the handler's goroutine ends", func() bool { return hsGoroutines() == 0 })
			switch hooked {
			case "":
				if s := logged.String(); !strings.Contains(s, "boom") || !strings.Contains(s, "hsPanics") {
					t.Errorf("log: got %q", s)
				}
				return
			case "abort", "Goexit":
				events.await(t, "arrived, expired, served 504")
			default:
				events.await(t, "arrived, expired, served 504, panicked")
				e := events.get(EventPanicked)
				if e.Service != "s" || e.Took < hsLeft/2 || e.DeadlineMS == 0 || e.Remaining >= 0 || !errors.Is(e.Err, boom) || !strings.Contains(e.Err.Error(), "hsPanics") {
					t.Errorf("event: got %+v", e)
				}
			}
			if s := logged.String(); strings.Contains(s, "panic of a hook") != (hooked == "panicking hook") || hooked != "panicking hook" && s != "" {
				t.Errorf("log: got %q", s)
			}
		})
	}
}

// A handler that ends its goroutine hangs nothing.
func TestHardStop_Goexit(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		events := new(mwEvents)
		srv, client := mwServe(t, major, mwNew(t, MiddlewareConfig{HardStop: true, Hook: events.hook}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			runtime.Goexit()
		})))
		req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, nil)
		req.Header.Set(HeaderDeadline, mwIn(time.Minute))
		if resp, err := client.Do(req); err == nil {
			t.Errorf("got %s, want a broken connection", resp.Status)
		}
		events.await(t, "arrived, served 0")
	})
}

// The files of a form that is parsed too late are removed all the same.
func TestHardStop_RemovesTheFilesOfAForm(t *testing.T) {
	var form bytes.Buffer
	mw := multipart.NewWriter(&form)
	part, _ := mw.CreateFormFile("f", "f")
	part.Write(make([]byte, 1000))
	mw.Close()

	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	free, freed := make(chan struct{}), make(chan struct{})
	srv, client := mwServe(t, 1, mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		defer close(freed)
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		<-free
		if files, _ := os.ReadDir(dir); len(files) == 0 {
			t.Error("no file: the test shows nothing")
		}
	})))
	resp, _ := mwDo(t, client, "POST", srv.URL, &form, "Content-Type", mw.FormDataContentType())
	mwCheckExpired(t, resp)
	close(free)
	<-freed
	hsAwait(t, "the files are removed", func() bool {
		files, _ := os.ReadDir(dir)
		return len(files) == 0
	})
}

// The client leaves: the handler is waited for, but not beyond the deadline.
func TestHardStop_ClientLeaves(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		for name, tt := range map[string]struct {
			late   bool // the handler ends after the deadline
			begun  bool // it has answered when the client leaves
			events string
		}{
			"in time": {false, false, "arrived, served 0"},
			"late":    {true, false, "arrived, served 0"},
			"begun":   {true, true, "arrived, served 200"},
		} {
			events, free, entered := new(mwEvents), make(chan struct{}), make(chan struct{})
			metrics, err := NewMetrics(MetricsConfig{})
			if err != nil {
				t.Fatal(err)
			}
			left := 10 * time.Second
			if tt.late {
				left = 3 * hsLeft
			}
			var wrote atomic.Int32
			h := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: left, Hook: events.hook, Metrics: metrics, Service: "s"}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if tt.begun {
					w.(http.Flusher).Flush()
				}
				close(entered)
				<-r.Context().Done()
				<-free
			}))
			srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				h.ServeHTTP(struct {
					mwCounting
					http.Flusher
				}{mwCounting{w, &wrote}, w.(http.Flusher)}, r)
			}))
			ctx, cancel := context.WithCancel(t.Context())
			start := time.Now()
			req, _ := http.NewRequestWithContext(ctx, "GET", srv.URL, nil)
			go func() { <-entered; time.Sleep(10 * time.Millisecond); cancel() }()
			if resp, err := client.Do(req); err == nil {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			if !tt.late {
				time.Sleep(20 * time.Millisecond)
				close(free)
			}
			events.await(t, tt.events)
			if took := time.Since(start); !tt.late && took > left-time.Second || tt.late && took < left-20*time.Millisecond {
				t.Errorf("%s: ended after %v of %v", name, took, left)
			}
			if tt.late {
				close(free)
			}
			if x, a := hsCounts(t, metrics, "s"); x != 0 || a != 1 {
				t.Errorf("%s: counted %v out of time and %v answers, want 0 and 1", name, x, a)
			}
			if !tt.begun && (wrote.Load() != 0 || testutil.ToFloat64(metrics.served.WithLabelValues("s", "499")) != 1) {
				t.Errorf("%s: %d writes, or not counted as left by the client", name, wrote.Load())
			}
			hsAwait(t, "the handler's goroutine ends", func() bool { return hsGoroutines() == 0 })
		}
	})
	// Only its half of the connection: it still reads.
	srv, _ := mwServe(t, 1, mwNew(t, MiddlewareConfig{HardStop: true}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		time.Sleep(20 * time.Millisecond)
		io.WriteString(w, "answer")
	})))
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nX-Request-Deadline: %s\r\n\r\n", mwIn(4*time.Second))
	conn.(*net.TCPConn).CloseWrite()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != "answer" {
		t.Errorf("got %q, %v", b, err)
	}
}

// A connection that the handler has taken over is its own, with or without an
// upgrade, and has no deadline of ours.
func TestHardStop_Hijack(t *testing.T) {
	events := new(mwEvents)
	srv, _ := mwServe(t, 1, mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft, Hook: events.hook}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		if _, err := w.Write(nil); err != http.ErrHijacked {
			t.Errorf("Write: got %v, want http.ErrHijacked", err)
		}
		time.Sleep(hsLeft + 3*stopGrace)
		if got := events.String(); got != "arrived" {
			t.Errorf("events: got %q while the handler has the connection", got)
		}
		line, err := rw.ReadString('\n')
		if err != nil {
			t.Errorf("Read: %v", err)
		}
		fmt.Fprintf(rw, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(line), line)
		rw.Flush()
	})))
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() {
		time.Sleep(hsLeft + 4*stopGrace)
		io.WriteString(conn, "mine\n")
	}()
	if resp := mwSend(t, conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"); resp.StatusCode != 200 || resp.ContentLength != 5 {
		t.Errorf("got %v", resp)
	}
	events.await(t, "arrived, served 200")
}

// ReportOnly observes, whatever else is set, and without a deadline there is
// nothing to stop at: the handler runs where it always did.
func TestHardStop_RunsInlineWhereItCan(t *testing.T) {
	for name, tt := range map[string]struct {
		config MiddlewareConfig
		r      *http.Request
	}{
		"ReportOnly":  {MiddlewareConfig{HardStop: true, ReportOnly: true}, mwRequest(HeaderDeadline, mwIn(20*time.Millisecond))},
		"no deadline": {MiddlewareConfig{HardStop: true}, mwRequest()},
		"no HardStop": {MiddlewareConfig{}, mwRequest(HeaderDeadline, mwIn(time.Minute))},
		"upgrade":     {MiddlewareConfig{HardStop: true}, mwRequest(HeaderDeadline, mwIn(time.Minute), "Connection", "Upgrade", "Upgrade", "x")},
	} {
		rec := httptest.NewRecorder()
		mwNew(t, tt.config).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(40 * time.Millisecond)
			stack := make([]byte, 16<<10)
			if s := string(stack[:runtime.Stack(stack, false)]); !strings.Contains(s, "TestHardStop_RunsInlineWhereItCan(") {
				t.Errorf("%s: on another goroutine:\n%s", name, s)
			}
			w.WriteHeader(201)
		})).ServeHTTP(rec, tt.r)
		if rec.Code != 201 {
			t.Errorf("%s: got %d, want 201", name, rec.Code)
		}
	}
}

// hsHides is a writer as loggers have it: it hides all but Unwrap.
type hsHides struct{ w http.ResponseWriter }

func (w hsHides) Header() http.Header         { return w.w.Header() }
func (w hsHides) Write(b []byte) (int, error) { return w.w.Write(b) }
func (w hsHides) WriteHeader(code int)        { w.w.WriteHeader(code) }
func (w hsHides) Unwrap() http.ResponseWriter { return w.w }

// What http.ResponseController finds below a writer that hides it is found, and
// guarded: nothing gets past the guard.
func TestHardStop_NothingGetsPast(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		for _, begun := range []bool{false, true} {
			free, freed := make(chan struct{}), make(chan struct{})
			h := mwNew(t, MiddlewareConfig{HardStop: true, Timeout: hsLeft}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer close(freed)
				if got := mwOffers(w); slices.Contains(got, "Flusher") || slices.Contains(got, "Hijacker") || slices.Contains(got, "ReaderFrom") {
					t.Errorf("offers %v", got)
				}
				rc := http.NewResponseController(w)
				if err := rc.SetReadDeadline(time.Time{}); err != nil {
					t.Errorf("SetReadDeadline: %v", err)
				}
				if begun {
					w.Header().Set("X-Set", "1")
					if err := rc.Flush(); err != nil {
						t.Errorf("Flush: %v", err)
					}
				}
				<-free
				// Whoever goes down as far as it goes.
				for n := 0; ; n++ {
					for name, f := range map[string]func() error{
						"Flush":           http.NewResponseController(w).Flush,
						"SetReadDeadline": func() error { return http.NewResponseController(w).SetReadDeadline(time.Now()) },
						"Hijack":          func() error { _, _, err := http.NewResponseController(w).Hijack(); return err },
					} {
						if err := f(); err != http.ErrHandlerTimeout {
							t.Errorf("%d down: %s: got %v, want http.ErrHandlerTimeout", n, name, err)
						}
					}
					u, ok := w.(interface{ Unwrap() http.ResponseWriter })
					if !ok {
						break
					}
					w = u.Unwrap()
				}
			}))
			srv, client := mwServe(t, major, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.ServeHTTP(hsHides{w}, r) }))
			req, _ := http.NewRequestWithContext(t.Context(), "GET", srv.URL, nil)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if !begun {
				mwCheckExpired(t, resp)
			} else if err == nil || resp.Header.Get("X-Set") != "1" {
				t.Errorf("got %v %v, %v; want the header as set and a broken answer", resp.Status, resp.Header, err)
			}
			close(free)
			<-freed
		}
	})
}

// Of 32 kinds of writer, each is offered for what it is.
func TestHardStop_InterfaceSet(t *testing.T) {
	named := []string{"Flusher", "Hijacker", "ReaderFrom", "Pusher", "CloseNotifier"}
	m := mwNew(t, MiddlewareConfig{HardStop: true})
	check := func(w http.ResponseWriter) {
		t.Helper()
		m.Handler(http.HandlerFunc(func(wrapped http.ResponseWriter, _ *http.Request) {
			only := func(w http.ResponseWriter) []string {
				return slices.DeleteFunc(mwOffers(w), func(s string) bool { return !slices.Contains(named, s) })
			}
			if got, want := only(wrapped), only(w); !slices.Equal(got, want) {
				t.Errorf("%T: got %v, want %v", w, got, want)
			}
		})).ServeHTTP(w, mwRequest(HeaderDeadline, mwIn(time.Minute)))
	}
	for n := range 32 {
		g := &guard{x: new(exchange), w: httptest.NewRecorder(), header: http.Header{}}
		w := shape(n, guarded{g}, g)
		got := slices.DeleteFunc(mwOffers(w), func(s string) bool { return !slices.Contains(named, s) })
		for i, name := range named {
			if slices.Contains(got, name) != (n>>i&1 == 1) {
				t.Errorf("%05b: got %v", n, got)
			}
		}
		check(w)
	}
	check(httptest.NewRecorder())
	check(struct{ http.ResponseWriter }{httptest.NewRecorder()})

	// What a plain writer does not have is said to be unsupported.
	m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		rc := http.NewResponseController(w)
		_, _, hijack := rc.Hijack()
		for name, err := range map[string]error{
			"Flush": rc.Flush(), "SetReadDeadline": rc.SetReadDeadline(time.Now()), "SetWriteDeadline": rc.SetWriteDeadline(time.Now()),
			"EnableFullDuplex": rc.EnableFullDuplex(), "Hijack": hijack,
			"Push": w.(interface{ Unwrap() http.ResponseWriter }).Unwrap().(http.Pusher).Push("/", nil),
		} {
			if !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("%s: got %v, want http.ErrNotSupported", name, err)
			}
		}
		w.WriteHeader(404) // none of this was an answer
	})).ServeHTTP(struct{ http.ResponseWriter }{httptest.NewRecorder()}, mwRequest(HeaderDeadline, mwIn(time.Minute)))
}

// What layers outside have set is there for the handler to see and to change.
func TestHardStop_HeaderMap(t *testing.T) {
	rec := httptest.NewRecorder()
	rec.Header().Set("X-Outer", "1")
	rec.Header().Set("X-Gone", "1")
	mwNew(t, MiddlewareConfig{HardStop: true}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		if h.Get("X-Outer") != "1" {
			t.Errorf("got %v", h)
		}
		h.Del("X-Gone")
		h["Date"] = nil
		h["X-Two"] = []string{"a", "b"}
		w.WriteHeader(200)
		h["X-Two"][0] = "c"
		h.Set("X-Late", "1")
	})).ServeHTTP(rec, mwRequest(HeaderDeadline, mwIn(time.Minute)))
	// What is sent is not the late handler's to change.
	cut, free, freed := httptest.NewRecorder(), make(chan struct{}), make(chan struct{})
	func() {
		defer func() { recover() }()
		mwNew(t, MiddlewareConfig{HardStop: true, Timeout: 20 * time.Millisecond}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			defer close(freed)
			w.Header()["X-Two"] = []string{"a", "b"}
			w.WriteHeader(200)
			<-free
			w.Header()["X-Two"][0] = "c"
			w.Header().Set("X-Late", "1")
		})).ServeHTTP(cut, mwRequest())
	}()
	close(free)
	<-freed
	if got := fmt.Sprint(cut.Header()); got != "map[X-Two:[a b]]" {
		t.Errorf("changed by a late handler: %s", got)
	}
	// The mark is where the handler would find it, see writeHeader.
	marked := httptest.NewRecorder()
	mwNew(t, MiddlewareConfig{HardStop: true}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrivalFrom(r.Context()).note.fail("x")
		w.WriteHeader(503)
	})).ServeHTTP(marked, mwRequest(HeaderDeadline, mwIn(time.Minute)))
	if got := marked.Header().Get(HeaderShouldRetry); got != "false" {
		t.Errorf("afterwards: X-Should-Retry: got %q, want false", got)
	}
	if got, want := fmt.Sprint(rec.Result().Header), "map[X-Outer:[1] X-Two:[a b]]"; strings.Replace(got, "Date:[] ", "", 1) != want {
		t.Errorf("sent %s, want %s", got, want)
	}
	if got := rec.Header(); got.Get("X-Late") != "1" || got["X-Two"][0] != "c" {
		t.Errorf("afterwards: got %v, want what the handler has set", got)
	}
	if v, ok := rec.Header()["Date"]; !ok || v != nil {
		t.Error("the mark that keeps net/http from adding a Date is lost")
	}
}

func BenchmarkHardStop(b *testing.B) {
	next := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		w.Write([]byte("hello"))
	})
	for _, bb := range []struct {
		name string
		h    http.Handler
	}{
		{"plain", next},
		{"inline", mwNew(b, MiddlewareConfig{}).Handler(next)},
		{"hard stop", mwNew(b, MiddlewareConfig{HardStop: true}).Handler(next)},
		{"TimeoutHandler", http.TimeoutHandler(next, time.Minute, "")},
		{"inline+TimeoutHandler", mwNew(b, MiddlewareConfig{}).Handler(http.TimeoutHandler(next, time.Minute, ""))},
	} {
		b.Run(bb.name, func(b *testing.B) {
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			r, w := mwRequest(HeaderDeadline, mwIn(time.Hour)).WithContext(ctx), new(mwWriter)
			b.ReportAllocs()
			for b.Loop() {
				clear(w.h)
				bb.h.ServeHTTP(w, r)
			}
		})
	}
}
