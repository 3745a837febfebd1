package replay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
)

func newMiddleware(t *testing.T, c replay.Config) *replay.Middleware {
	t.Helper()
	if c.Store == nil {
		c.Store = replay.NewMemory(replay.MemoryConfig{})
	}
	if c.Scope == nil {
		c.Scope = replay.SingleTenant
	}
	m, err := replay.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func keyed(body, key string) *http.Request {
	r := httptest.NewRequest("POST", "/", strings.NewReader(body))
	r.Header.Set("Idempotency-Key", key)
	return r
}

func call(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestReplayConfigErrors(t *testing.T) {
	for field, c := range map[string]replay.Config{
		"Store":        {Scope: replay.SingleTenant},
		"Scope":        {},
		"Service":      {Service: "\xff"},
		"Methods":      {Methods: []string{"PUT", "GET"}},
		"TTL":          {TTL: time.Millisecond},
		"Lease":        {Lease: time.Millisecond},
		"MaxWait":      {MaxWait: 2 * time.Hour},
		"MaxAnswer":    {MaxAnswer: -1},
		"StoreTimeout": {StoreTimeout: -1},
	} {
		if field != "Store" {
			c.Store = replay.NewMemory(replay.MemoryConfig{})
		}
		if field != "Scope" {
			c.Scope = replay.SingleTenant
		}
		_, err := replay.New(c)
		var e *stint.ConfigError
		if !errors.As(err, &e) || e.Field != "replay.Config."+field {
			t.Errorf("%s: got error %v", field, err)
		}
	}
	if _, err := replay.New(replay.Config{
		Store: replay.NewMemory(replay.MemoryConfig{}), Scope: replay.SingleTenant, Methods: []string{"post"},
	}); err == nil {
		t.Error("a method in lower case was taken, which never comes")
	}
	if w := call(new(replay.Middleware).Handler(http.NotFoundHandler()), keyed("", "k")); w.Code != 500 || !strings.Contains(w.Body.String(), "replay.New") {
		t.Errorf("the zero Middleware answers %d %q", w.Code, w.Body)
	}
}

// 32 duplicates of a slow request, in a bubble: all get the answer the moment it
// is there, none polls for it.
func TestReplayWaitersAreWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newMiddleware(t, replay.Config{MaxWait: time.Minute}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(30*time.Second + time.Millisecond)
			w.WriteHeader(201)
		}))
		start := time.Now()
		var ok atomic.Int64
		for range 33 {
			go func() {
				if w := call(h, keyed("", "k")); w.Code == 201 && time.Since(start) == 30*time.Second+time.Millisecond {
					ok.Add(1)
				}
			}()
		}
		time.Sleep(time.Hour)
		if ok.Load() != 33 {
			t.Errorf("%d of 33 had the answer when it was there", ok.Load())
		}
	})
}

// Where the run is in another process, waiters poll, and see the end of a lease.
func TestReplayWaitersPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := replay.NewMemory(replay.MemoryConfig{})
		slow := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(10 * time.Second)
			w.WriteHeader(201)
		})
		a := newMiddleware(t, replay.Config{Store: store}).Handler(slow)
		b := newMiddleware(t, replay.Config{Store: store, MaxWait: time.Minute}).Handler(slow)
		start := time.Now()
		go call(a, keyed("", "k"))
		synctest.Wait()
		w := call(b, keyed("", "k"))
		if took := time.Since(start); w.Code != 201 || took < 10*time.Second || took > 10*time.Second+400*time.Millisecond {
			t.Errorf("got %d after %v, want 201 within a poll of the 10 s", w.Code, took)
		}
	})
}

func TestReplayMaxWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newMiddleware(t, replay.Config{MaxWait: time.Minute, MaxWaiters: 2}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			time.Sleep(10 * time.Second)
		}))
		var ok, conflicts atomic.Int64
		for range 10 {
			go func() {
				start := time.Now()
				switch w := call(h, keyed("", "k")); {
				case w.Code == 200:
					ok.Add(1)
				case w.Code == 409 && time.Since(start) == 0:
					conflicts.Add(1)
				}
			}()
		}
		time.Sleep(time.Hour)
		if ok.Load() != 3 || conflicts.Load() != 7 {
			t.Errorf("%d answers and %d conflicts, want 3 and 7", ok.Load(), conflicts.Load())
		}
	})
}

// A handler that takes hours holds its key by renewing it.
func TestReplayLeaseIsRenewedForHours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newMiddleware(t, replay.Config{MaxWait: -1}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(3 * time.Hour) }))
		go call(h, keyed("", "k"))
		for range 100 {
			time.Sleep(time.Minute)
			if w := call(h, keyed("", "k")); w.Code != 409 {
				t.Fatalf("got %d, want 409", w.Code)
			}
		}
		time.Sleep(3 * time.Hour)
		if w := call(h, keyed("", "k")); w.Code != 200 || w.Header().Get("Idempotent-Replayed") == "" {
			t.Errorf("got %d, want the answer", w.Code)
		}
	})
}

// What a handler is told of its own mistakes is what net/http tells it.
func TestReplayWriteErrors(t *testing.T) {
	var length, none error
	h := newMiddleware(t, replay.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/none" {
			w.WriteHeader(204)
			_, none = io.WriteString(w, "x")
			return
		}
		w.Header().Set("Content-Length", "2")
		io.WriteString(w, "ab")
		_, length = w.Write([]byte("c"))
	}))
	if w := call(h, keyed("", "a")); w.Body.String() != "ab" || !errors.Is(length, http.ErrContentLength) {
		t.Errorf("got %q, %v", w.Body, length)
	}
	w := call(h, keyed("", "a"))
	if w.Body.String() != "ab" || w.Header().Get("Content-Length") != "2" {
		t.Errorf("replayed: got %q, %v", w.Body, w.Header())
	}
	r := keyed("", "a")
	r.URL.Path = "/none"
	if call(h, r); !errors.Is(none, http.ErrBodyNotAllowed) {
		t.Errorf("got error %v, want ErrBodyNotAllowed", none)
	}
	defer func() {
		if recover() == nil {
			t.Error("an invalid status does not panic")
		}
	}()
	call(newMiddleware(t, replay.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(99) })), keyed("", "a"))
}

// A replay of a failure says that it will stay one.
func TestReplayOfAFailureIsNotRetried(t *testing.T) {
	h := newMiddleware(t, replay.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
	first, second := call(h, keyed("", "k")), call(h, keyed("", "k"))
	if a, b := first.Header().Get("X-Should-Retry"), second.Header().Get("X-Should-Retry"); a != "" || b != "false" {
		t.Errorf("X-Should-Retry: %q, then %q, want none, then false", a, b)
	}
}

// hiding is a layer that has no methods of its own but leads to those below.
type hiding struct{ http.ResponseWriter }

func (h hiding) Unwrap() http.ResponseWriter { return h.ResponseWriter }

// Of a writer that is neither of net/http's.
func TestReplayWriterOfAnotherShape(t *testing.T) {
	h := newMiddleware(t, replay.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if got := offers(w); strings.Join(got, " ") != "Flusher StringWriter" {
			t.Errorf("offers %q, want what is below: Flusher and StringWriter", got)
		}
	}))
	call(h, keyed("", "k"))
}

// A layer that hides that the writer below it flushes does not let a handler
// get past what is held back.
func TestReplayFlushBelowALayer(t *testing.T) {
	h := newMiddleware(t, replay.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(201)
		io.WriteString(w, "x")
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Errorf("Flush: %v", err)
		}
		if got := offers(w); strings.Join(got, " ") != "Flusher" {
			t.Errorf("offers %q, want what is below: Flusher", got)
		}
	}))
	w := httptest.NewRecorder()
	h.ServeHTTP(hiding{w}, keyed("", "k"))
	if w.Code != 201 || w.Body.String() != "x" || !w.Flushed {
		t.Errorf("got %d %q, flushed: %v", w.Code, w.Body, w.Flushed)
	}
}

// Without a middleware in between, layers outside see what the mux and the
// handler put into their request.
func TestReplayHandsTheRequestBack(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /things/{id}", func(_ http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
	})
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, _ := form.CreateFormFile("file", "name")
	part.Write(make([]byte, 100_000))
	form.Close()
	r := httptest.NewRequest("POST", "/things/7", &body)
	r.Header.Set("Content-Type", form.FormDataContentType())
	r.Header.Set("Idempotency-Key", "k")
	call(newMiddleware(t, replay.Config{}).Handler(mux), r)
	if r.Pattern != "POST /things/{id}" {
		t.Errorf("pattern %q", r.Pattern)
	}
	if r.MultipartForm == nil {
		t.Error("the form is lost, and with it what clears its files away")
	} else {
		r.MultipartForm.RemoveAll()
	}
}

func TestReplayFingerprint(t *testing.T) {
	var seen string
	h := newMiddleware(t, replay.Config{Fingerprint: func(_ *http.Request, body []byte) []byte {
		seen = string(body)
		return bytes.ToLower(body)
	}}).Handler(http.NotFoundHandler())
	call(h, keyed("Body", "k"))
	if w := call(h, keyed("bODY", "k")); w.Code != 404 || seen != "bODY" {
		t.Errorf("got %d for %q, want the answer", w.Code, seen)
	}
	if w := call(h, keyed("else", "k")); w.Code != 422 {
		t.Errorf("got %d, want 422", w.Code)
	}
}

// An answer for which the store has no room is not kept, and its operation does
// not run again.
func TestReplayNoRoomForTheAnswer(t *testing.T) {
	runs := 0
	h := newMiddleware(t, replay.Config{Store: replay.NewMemory(replay.MemoryConfig{MaxBytes: 64 << 10})}).Handler(
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			runs++
			w.Write(make([]byte, 100_000))
		}))
	if w := call(h, keyed("", "k")); w.Code != 200 || w.Body.Len() != 100_000 {
		t.Errorf("got %d, %d bytes", w.Code, w.Body.Len())
	}
	if w := call(h, keyed("", "k")); w.Code != 409 || runs != 1 || !strings.Contains(w.Body.String(), `"reason":"not_kept"`) {
		t.Errorf("got %d %s after %d runs, want 409 not_kept after 1", w.Code, w.Body, runs)
	}
}

// A run that ends after another one has taken its key over, and while that one
// still runs, has no answer to give.
func TestReplayLostToARunThatStillRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &unrenewed{Store: replay.NewMemory(replay.MemoryConfig{})}
		var outcomes []replay.Outcome
		metrics, err := replay.NewMetrics(replay.MetricsConfig{})
		if err != nil {
			t.Fatal(err)
		}
		a := newMiddleware(t, replay.Config{Store: store, Metrics: metrics, Lease: time.Second, MaxWait: -1, Hook: func(_ context.Context, e replay.Event) {
			outcomes = append(outcomes, e.Outcome)
		}}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(10*time.Second + 50*time.Millisecond) // between two of the 113 renewals
			w.Header().Set("X-Mine", "1")
			io.WriteString(w, "of the first run")
		}))
		b := newMiddleware(t, replay.Config{Store: store, Lease: time.Minute}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(20 * time.Second)
			io.WriteString(w, "of the second run")
		}))
		go func() {
			time.Sleep(5 * time.Second)
			if w := call(b, keyed("", "k")); w.Body.String() != "of the second run" {
				t.Errorf("the second run: got %d %q", w.Code, w.Body)
			}
		}()
		w := call(a, keyed("", "k"))
		if w.Code != 409 || w.Header().Get("X-Should-Retry") != "true" || w.Header().Get("X-Mine") != "" {
			t.Errorf("the first run: got %d %q %v, want 409 to try again", w.Code, w.Body, w.Header())
		}
		time.Sleep(time.Minute)
		if w := call(a, keyed("", "k")); w.Body.String() != "of the second run" {
			t.Errorf("later: got %d %q", w.Code, w.Body)
		}
		if len(outcomes) != 2 || outcomes[0] != replay.OutcomeLost || outcomes[1] != replay.OutcomeReplayed {
			t.Errorf("outcomes %q, want lost and replayed", outcomes)
		}
		// The renewals have failed; that the key was lost is no failure.
		want := "# HELP stint_replay_store_errors_total Calls of the store that failed.\n# TYPE stint_replay_store_errors_total counter\n"
		for _, op := range []string{"begin 0", "finish 0", "release 0", "renew 113"} {
			name, n, _ := strings.Cut(op, " ")
			want += "stint_replay_store_errors_total{op=\"" + name + "\",service=\"\"} " + n + "\n"
		}
		if err := testutil.CollectAndCompare(metrics, strings.NewReader(want), "stint_replay_store_errors_total"); err != nil {
			t.Error(err)
		}
	})
}

// unrenewed is a store that cannot renew.
type unrenewed struct{ replay.Store }

func (unrenewed) Renew(context.Context, [32]byte, int64, time.Duration) error {
	return errors.New("unreachable")
}

func TestReplayWithoutARun(t *testing.T) {
	ctx := context.Background()
	replay.Forget(ctx)
	if _, ok := replay.Fence(ctx); ok {
		t.Error("a fence from nowhere")
	}
}

// The pair with stint's transport: a duplicate gets 409, waits as it is told to,
// and then has the answer.
func TestReplayE3_ConflictThenAnswer(t *testing.T) {
	var n atomic.Int64
	started := make(chan struct{})
	h := newMiddleware(t, replay.Config{Store: shared{replay.NewMemory(replay.MemoryConfig{})}, MaxWait: -1}).Handler(
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			n.Add(1)
			close(started)
			time.Sleep(300 * time.Millisecond)
			w.WriteHeader(201)
			io.WriteString(w, "done")
		}))
	s := server(t, h)
	c := client(t, stint.Config{})
	ctx := stint.WithOverride(t.Context(), stint.Override{IdempotencyKey: "order-7"})
	send := func() (int, string) {
		req, _ := http.NewRequestWithContext(ctx, "POST", s.URL, strings.NewReader("x"))
		resp, err := c.Do(req)
		if err != nil {
			t.Error(err)
			return 0, ""
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	first := make(chan int)
	go func() {
		status, _ := send()
		first <- status
	}()
	<-started
	if status, body := send(); status != 201 || body != "done" {
		t.Errorf("the duplicate got %d %q, want 201", status, body)
	}
	if status := <-first; status != 201 || n.Load() != 1 {
		t.Errorf("got %d after %d runs, want 201 after 1", status, n.Load())
	}
}

// offers lists the optional interfaces of a writer that handlers ask for.
func offers(w http.ResponseWriter) (list []string) {
	check := func(name string, ok bool) {
		if ok {
			list = append(list, name)
		}
	}
	_, ok := w.(http.Flusher)
	check("Flusher", ok)
	_, ok = w.(interface{ FlushError() error })
	check("FlushError", ok)
	_, ok = w.(http.Hijacker)
	check("Hijacker", ok)
	_, ok = w.(io.ReaderFrom)
	check("ReaderFrom", ok)
	_, ok = w.(io.StringWriter)
	check("StringWriter", ok)
	_, ok = w.(http.Pusher)
	check("Pusher", ok)
	_, ok = w.(http.CloseNotifier)
	check("CloseNotifier", ok)
	_, ok = w.(interface{ SetReadDeadline(time.Time) error })
	check("SetReadDeadline", ok)
	_, ok = w.(interface{ EnableFullDuplex() error })
	check("EnableFullDuplex", ok)
	return list
}

// On both protocols, alone and inside stint's middleware, the handler's writer is
// like the one below, and the answer and its replay arrive.
func TestReplayWriterOffersWhatTheOneBelowDoes(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		for _, inside := range []bool{false, true} {
			var below, above []string
			h := newMiddleware(t, replay.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				above = offers(w)
				rc := http.NewResponseController(w)
				if err := errors.Join(rc.SetReadDeadline(time.Now().Add(time.Minute)), rc.SetWriteDeadline(time.Now().Add(time.Minute))); err != nil {
					t.Error(err)
				}
				n, err := io.Copy(w, strings.NewReader("copied "))
				if n != 7 || err != nil {
					t.Errorf("copied %d, %v", n, err)
				}
				io.WriteString(w, "and written")
			}))
			var outer http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				below = offers(w)
				h.ServeHTTP(w, r)
			})
			if inside {
				m, err := stint.NewMiddleware(stint.MiddlewareConfig{})
				if err != nil {
					t.Fatal(err)
				}
				outer = m.Handler(outer)
			}
			s := httptest.NewUnstartedServer(outer)
			s.EnableHTTP2 = h2
			s.StartTLS()
			for _, replayed := range []string{"", "true"} {
				req, _ := http.NewRequest("POST", s.URL, strings.NewReader("x"))
				req.Header.Set("Idempotency-Key", "k")
				resp, err := s.Client().Do(req)
				if err != nil {
					t.Fatal(err)
				}
				b, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if string(b) != "copied and written" || resp.Header.Get("Idempotent-Replayed") != replayed || (resp.ProtoMajor == 2) != h2 {
					t.Errorf("%s: got %q, %v", resp.Proto, b, resp.Header)
				}
			}
			s.Close()
			if strings.Join(above, " ") != strings.Join(below, " ") {
				t.Errorf("HTTP/2 %v, inside stint's middleware %v: offered are\n%q, below\n%q", h2, inside, above, below)
			}
		}
	}
}
