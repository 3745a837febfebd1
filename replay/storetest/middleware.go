package storetest

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
)

// RunMiddleware runs the middleware of package replay over a store, in front of
// real servers on loopback, each case as a subtest. names, if any, are the
// beginnings of the names of those to run: "S01". open is as for [Run]. The
// store must have room for a few hundred records and take answers of 2 MiB.
func RunMiddleware(t *testing.T, open func(t *testing.T) replay.Store, names ...string) {
	ran := 0
	for _, c := range middlewareCases {
		wanted := len(names) == 0
		for _, n := range names {
			wanted = wanted || strings.HasPrefix(c.name, n)
		}
		if !wanted {
			continue
		}
		ran++
		t.Run(c.name, func(t *testing.T) {
			f := &fixture{T: t, store: &faultyStore{Store: open(t)}}
			c.run(f)
		})
	}
	if ran == 0 {
		t.Fatalf("no case is named %q", names)
	}
}

var middlewareCases = []struct {
	name string
	run  func(*fixture)
}{
	{"S01_SameAnswer", s01},
	{"S02_InParallel", s02},
	{"S03_ConflictBeforeTheDeadline", s03},
	{"S04_Mismatch", s04},
	{"S05_SeparateRecords", s05},
	{"S06_BareAndQuoted", s06},
	{"S07_UnusableKeys", s07},
	{"S08_PassedThrough", s08},
	{"S09_FinalAndNotDone", s09},
	{"S10_PanicsAndGoexit", s10},
	{"S11_SilentAtTheDeadline", s11},
	{"S12_HardStop", s12},
	{"S13_ClientLeaves", s13},
	{"S14_TooLargeToKeep", s14},
	{"S15_Streams", s15},
	{"S15_Trailers", s15trailers},
	{"S16_Upgrades", s16},
	{"S17_HeadersNotKept", s17},
	{"S18_HeadersFromOutside", s18},
	{"S19_RequestBodies", s19},
	{"S20_StoreDown", s20},
	{"S21_OutlivesTheLease", s21},
	{"S22_ProcessKilled", s22},
	{"S25_RecordGoneAtTheEnd", s25},
	{"S26_FinishedByTheHandler", s26},
	{"E01_AnswerCutAfterTheEffect", e01},
}

// fixture is one case.
type fixture struct {
	*testing.T
	store *faultyStore
	lets  []func() // see stuck

	mu     sync.Mutex
	events []replay.Event // guarded by mu
}

// A faultyStore fails where it is told to.
type faultyStore struct {
	replay.Store
	calls                                    atomic.Int64
	failBegin, failRenew, failFinish, vanish atomic.Bool
	dead                                     atomic.Bool // nothing but Begin arrives
}

var errDown = errors.New("storetest: the store is down")

func (s *faultyStore) Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (replay.Claim, error) {
	s.calls.Add(1)
	if s.failBegin.Load() {
		return replay.Claim{}, errDown
	}
	return s.Store.Begin(ctx, key, print, lease, ttl)
}

func (s *faultyStore) Renew(ctx context.Context, key [32]byte, fence int64, lease time.Duration) error {
	if s.failRenew.Load() || s.dead.Load() {
		return errDown
	}
	return s.Store.Renew(ctx, key, fence, lease)
}

func (s *faultyStore) Finish(ctx context.Context, key [32]byte, fence int64, answer []byte, ttl time.Duration) error {
	if s.failFinish.Load() || s.dead.Load() {
		return errDown
	}
	if s.vanish.Swap(false) {
		if err := s.Release(ctx, key, fence); err != nil {
			return err
		}
	}
	return s.Store.Finish(ctx, key, fence, answer, ttl)
}

func (s *faultyStore) Release(ctx context.Context, key [32]byte, fence int64) error {
	if s.dead.Load() {
		return errDown
	}
	return s.Store.Release(ctx, key, fence)
}

// middleware returns one over the case's store, whose tenant is in the header
// X-Tenant.
func (f *fixture) middleware(change func(*replay.Config)) *replay.Middleware {
	f.Helper()
	c := replay.Config{
		Store: f.store,
		Scope: func(r *http.Request) (string, error) { return "tenant " + r.Header.Get("X-Tenant"), nil },
		// Servers of tests are slow at times, and no case is about this.
		StoreTimeout: 10 * time.Second,
		Hook: func(_ context.Context, e replay.Event) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.events = append(f.events, e)
		},
	}
	if change != nil {
		change(&c)
	}
	m, err := replay.New(c)
	if err != nil {
		f.Fatal(err)
	}
	return m
}

// outcomes returns what the events so far say, in order.
func (f *fixture) outcomes() []replay.Outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []replay.Outcome
	for _, e := range f.events {
		all = append(all, e.Outcome)
	}
	return all
}

func (f *fixture) wantOutcomes(want ...replay.Outcome) {
	f.Helper()
	// An event comes after its answer.
	for end := time.Now().Add(10 * time.Second); len(f.outcomes()) < len(want) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if got := f.outcomes(); !reflect.DeepEqual(got, want) {
		f.Errorf("outcomes %q, want %q", got, want)
	}
}

func (f *fixture) serve(h http.Handler) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // handlers panic on purpose
	s.Start()
	f.Cleanup(func() {
		for _, let := range f.lets { // or Close would wait for them, where a case has failed
			let()
		}
		s.Close()
	})
	return s
}

// A got is an answer as the client has it.
type got struct {
	status int
	header http.Header
	body   string
	err    error // of the exchange, or of reading the body
}

func newKey() string {
	var b [12]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func send(s *httptest.Server, method, path, key, body string, header ...string) got {
	req, err := http.NewRequest(method, s.URL+path, strings.NewReader(body))
	if err != nil {
		return got{err: err}
	}
	return do(s, req, key, header...)
}

func do(s *httptest.Server, req *http.Request, key string, header ...string) got {
	if key != "" {
		// Under a name by which net/http does not send it again by itself.
		req.Header["idempotency-key"] = []string{key}
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := s.Client().Do(req)
	if err != nil {
		return got{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return got{resp.StatusCode, resp.Header, string(b), err}
}

func (f *fixture) want(g got, status int, body string) {
	f.Helper()
	if g.err != nil {
		f.Fatalf("got error %v", g.err)
	}
	if g.status != status {
		f.Fatalf("got %d %q, want %d", g.status, g.body, status)
	}
	if body != "*" && g.body != body {
		f.Fatalf("got body %q, want %q", g.body, body)
	}
}

func (f *fixture) replayed(g got, want bool) {
	f.Helper()
	if is := g.header.Get("Idempotent-Replayed") == "true"; is != want {
		f.Fatalf("replayed: %v, want %v (status %d, body %q)", is, want, g.status, g.body)
	}
}

// retryable expects an answer after which the same request may be sent again.
func (f *fixture) retryable(g got, want bool) {
	f.Helper()
	if v := g.header.Get("X-Should-Retry"); v != fmt.Sprint(want) {
		f.Fatalf("X-Should-Retry: %q, want %v", v, want)
	}
	if v := g.header.Get("Retry-After"); (v != "") != want || v == "0" {
		f.Fatalf("Retry-After: %q, want some: %v", v, want)
	}
	if v := g.header.Get("Content-Type"); v != "application/problem+json" {
		f.Fatalf("Content-Type: %q, want application/problem+json", v)
	}
}

// counting returns a handler that numbers its runs and answers 201 with the number.
func counting(n *atomic.Int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Location", "/things/1")
		w.Header()["X-Two"] = []string{"a", "b"}
		w.WriteHeader(201)
		fmt.Fprintf(w, "run %d", n.Add(1))
	})
}

func (f *fixture) runs(n *atomic.Int64, want int64) {
	f.Helper()
	if got := n.Load(); got != want {
		f.Fatalf("the handler ran %d times, want %d", got, want)
	}
}

func s01(f *fixture) {
	var n atomic.Int64
	s := f.serve(f.middleware(nil).Handler(counting(&n)))
	key := newKey()
	first := send(s, "POST", "/", key, "body")
	f.want(first, 201, "run 1")
	f.replayed(first, false)
	for range 2 {
		second := send(s, "POST", "/", key, "body")
		f.want(second, 201, "run 1")
		f.replayed(second, true)
		for _, h := range []http.Header{first.header, second.header} {
			h.Del("Date")
			h.Del("Idempotent-Replayed")
		}
		if !reflect.DeepEqual(first.header, second.header) {
			f.Fatalf("header %v, want that of the first answer %v", second.header, first.header)
		}
		if echo := second.header.Get("Idempotency-Key"); (echo == key) != f.store.Shared() {
			f.Fatalf("echo %q of a store whose Shared is %v", echo, f.store.Shared())
		}
	}
	f.runs(&n, 1)
	f.wantOutcomes(replay.OutcomeExecuted, replay.OutcomeReplayed, replay.OutcomeReplayed)
}

func s02(f *fixture) {
	var n atomic.Int64
	m := f.middleware(func(c *replay.Config) { c.MaxWait = time.Minute })
	s := f.serve(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(100 * time.Millisecond)
		counting(&n).ServeHTTP(w, r)
	})))
	key := newKey()
	answers := make([]got, 32)
	race(len(answers), func(i int) { answers[i] = send(s, "POST", "/", key, "body") })
	fresh := 0
	for _, g := range answers {
		f.want(g, 201, "run 1")
		if g.header.Get("Idempotent-Replayed") == "" {
			fresh++
		}
	}
	if fresh != 1 {
		f.Errorf("%d answers are not marked as replayed, want 1", fresh)
	}
	f.runs(&n, 1)

	// Without waiting: one answer, and for the others a 409.
	n.Store(0)
	s = f.serve(f.middleware(func(c *replay.Config) { c.MaxWait = -1 }).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(100 * time.Millisecond)
		counting(&n).ServeHTTP(w, r)
	})))
	key = newKey()
	race(len(answers), func(i int) { answers[i] = send(s, "POST", "/", key, "body") })
	ok := 0
	for _, g := range answers {
		if g.status == 201 {
			ok++
			continue
		}
		f.want(g, 409, "*")
		f.retryable(g, true)
	}
	if ok == 0 {
		f.Error("nobody got the answer")
	}
	f.runs(&n, 1)
}

// stuck returns a handler that waits until it is let go, and functions to wait
// for it to be there and to let it go.
func (f *fixture) stuck(h http.Handler) (handler http.Handler, there, let func()) {
	in, out := make(chan struct{}, 100), make(chan struct{})
	var once sync.Once
	let = func() { once.Do(func() { close(out) }) }
	f.lets = append(f.lets, let)
	handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in <- struct{}{}
		<-out
		h.ServeHTTP(w, r)
	})
	return handler, func() { <-in }, let
}

func s03(f *fixture) {
	var n atomic.Int64
	h, there, let := f.stuck(counting(&n))
	m := f.middleware(func(c *replay.Config) { c.MaxWait = time.Hour }).Handler(h)
	var late atomic.Bool
	s := f.serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Hurry") != "" {
			ctx, cancel := context.WithTimeout(r.Context(), 400*time.Millisecond)
			defer cancel()
			r = r.WithContext(ctx)
			defer func() { late.Store(ctx.Err() != nil) }()
		}
		m.ServeHTTP(w, r)
	}))
	key := newKey()
	first := make(chan got)
	go func() { first <- send(s, "POST", "/", key, "body") }()
	there()
	g := send(s, "POST", "/", key, "body", "X-Hurry", "1")
	f.want(g, 409, "*")
	f.retryable(g, true)
	if late.Load() {
		f.Error("the 409 came after the deadline")
	}
	let()
	f.want(<-first, 201, "run 1")
	f.runs(&n, 1)
}

func s04(f *fixture) {
	var n atomic.Int64
	h, there, let := f.stuck(counting(&n))
	s := f.serve(f.middleware(nil).Handler(h))
	key := newKey()
	first := make(chan got)
	go func() { first <- send(s, "POST", "/", key, "body", "Content-Type", "text/plain") }()
	there()
	others := func() {
		for _, g := range []got{
			send(s, "POST", "/", key, "ydob", "Content-Type", "text/plain"),
			send(s, "POST", "/", key, "body, and more", "Content-Type", "text/plain"),
			send(s, "POST", "/", key, "", "Content-Type", "text/plain"),
			send(s, "POST", "/?a=b", key, "body", "Content-Type", "text/plain"),
			send(s, "POST", "/", key, "body", "Content-Type", "text/html"),
			send(s, "POST", "/", key, "body", "Content-Type", "text/plain", "Content-Digest", "x"),
		} {
			f.want(g, 422, "*")
			f.retryable(g, false)
		}
	}
	others()
	let()
	f.want(<-first, 201, "run 1")
	others()
	f.want(send(s, "POST", "/", key, "body", "Content-Type", "text/plain"), 201, "run 1")
	f.runs(&n, 1)
}

func s05(f *fixture) {
	var n atomic.Int64
	s := f.serve(f.middleware(nil).Handler(counting(&n)))
	key := newKey()
	f.want(send(s, "POST", "/a", key, "body", "X-Tenant", "1"), 201, "run 1")
	f.want(send(s, "POST", "/a", key, "body", "X-Tenant", "2"), 201, "run 2")
	f.want(send(s, "POST", "/b", key, "body", "X-Tenant", "1"), 201, "run 3")
	f.want(send(s, "POST", "/%61", key, "body", "X-Tenant", "1"), 201, "run 4")
	f.want(send(s, "PATCH", "/a", key, "body", "X-Tenant", "1"), 201, "run 5")
	f.want(send(s, "POST", "/a", key, "body", "X-Tenant", "1"), 201, "run 1")
	f.want(send(s, "POST", "/a", key, "body", "X-Tenant", "2"), 201, "run 2")

	// Whose key it is has to be known.
	broken := errors.New("no database")
	for _, scope := range []func(*http.Request) (string, error){
		func(*http.Request) (string, error) { return "x", broken },
		func(*http.Request) (string, error) { return "", nil },
	} {
		s := f.serve(f.middleware(func(c *replay.Config) { c.Scope = scope }).Handler(counting(&n)))
		f.want(send(s, "POST", "/a", key, "body"), 500, "*")
	}
	f.runs(&n, 5)
}

func s06(f *fixture) {
	var n atomic.Int64
	s := f.serve(f.middleware(nil).Handler(counting(&n)))
	key := newKey() + `\"`
	f.want(send(s, "POST", "/", `"`+strings.ReplaceAll(strings.ReplaceAll(key, `\`, `\\`), `"`, `\"`)+`"`, "body"), 201, "run 1")
	f.want(send(s, "POST", "/", key, "body"), 201, "run 1")
	f.want(send(s, "POST", "/", "", "body", "X-Idempotency-Key", key), 201, "run 1")
	f.runs(&n, 1)
}

func s07(f *fixture) {
	var n atomic.Int64
	h := f.middleware(nil).Handler(counting(&n))
	before := f.store.calls.Load()
	for _, header := range []http.Header{
		{"Idempotency-Key": {""}},
		{"Idempotency-Key": {" "}},
		{"Idempotency-Key": {strings.Repeat("k", 256)}},
		{"Idempotency-Key": {"a\x01b"}},
		{"Idempotency-Key": {"a b"}},
		{"Idempotency-Key": {"ä"}},
		{"Idempotency-Key": {"a", "a"}},
		{"Idempotency-Key": {"a"}, "X-Idempotency-Key": {"a"}},
		{"Idempotency-Key": {`"a`}},
		{"Idempotency-Key": {`"a"b"`}},
		{"Idempotency-Key": {`"a\"`}},
		{"Idempotency-Key": {`""`}},
	} {
		r := httptest.NewRequest("POST", "/", strings.NewReader("body"))
		r.Header = header
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != 400 || w.Header().Get("X-Should-Retry") != "false" {
			f.Errorf("%q: got %d, want 400 and X-Should-Retry: false", header, w.Code)
		}
	}
	f.runs(&n, 0)
	if got := f.store.calls.Load(); got != before {
		f.Errorf("%d calls of the store, want none", got-before)
	}
	// On a connection that goes on after it, whether or not the body was read.
	s := f.serve(h)
	f.want(send(s, "POST", "/", "a b", "body"), 400, "*")
	f.want(send(s, "POST", "/", "a b", strings.Repeat("x", 1<<20)), 400, "*")
	// And where the client is slow to send it.
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		f.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a b\r\nContent-Length: 1000\r\n\r\nbeginning")
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, " 400 ") {
		f.Errorf("got %q, %v, want 400 before the body is there", line, err)
	}
	f.want(send(s, "POST", "/", newKey(), "body"), 201, "run 1")
	f.want(send(s, "POST", "/", strings.Repeat("k", 231)+newKey(), "body"), 201, "run 2") // 255 bytes
}

func s08(f *fixture) {
	var n atomic.Int64
	h := f.middleware(nil).Handler(counting(&n))
	s := f.serve(h)
	f.want(send(s, "POST", "/", "", "body"), 201, "run 1")
	f.want(send(s, "POST", "/", "", "body"), 201, "run 2")
	key := newKey()
	f.want(send(s, "GET", "/", key, ""), 201, "run 3")
	f.want(send(s, "GET", "/", key, ""), 201, "run 4")
	f.want(send(s, "PUT", "/", key, "body"), 201, "run 5")
	if n := f.store.calls.Load(); n != 0 {
		f.Errorf("%d calls of the store, want none", n)
	}
	f.wantOutcomes()

	s = f.serve(f.middleware(func(c *replay.Config) { c.Required, c.Methods = true, []string{"PUT"} }).Handler(counting(&n)))
	f.want(send(s, "PUT", "/", "", "body"), 400, "*")
	f.want(send(s, "POST", "/", "", "body"), 201, "run 6")
	f.want(send(s, "PUT", "/", key, "body"), 201, "run 7")
	f.want(send(s, "PUT", "/", key, "body"), 201, "run 7")
}

func s09(f *fixture) {
	for _, c := range []struct {
		name   string
		final  bool
		answer http.HandlerFunc
	}{
		{"500", true, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }},
		{"404", true, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }},
		{"400", true, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400) }},
		{"303", true, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Should-Retry", "true") // counts for errors alone
			w.WriteHeader(299)
		}},
		{"204", true, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }},
		{"nothing", true, func(http.ResponseWriter, *http.Request) {}},
		{"503", false, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }},
		{"429", false, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }},
		{"408", false, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(408) }},
		{"425", false, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(425) }},
		{"502", false, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) }},
		{"504", false, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(504) }},
		{"marked", false, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Should-Retry", "True")
			w.WriteHeader(500)
		}},
		{"marked both ways", true, func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["X-Should-Retry"] = []string{"true", "false"}
			w.WriteHeader(500)
		}},
		{"forgotten", false, func(_ http.ResponseWriter, r *http.Request) { replay.Forget(r.Context()) }},
		{"cut short", false, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "10")
			io.WriteString(w, "123")
		}},
	} {
		var n atomic.Int64
		s := f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n.Add(1)
			c.answer(w, r)
		})))
		key := newKey()
		first, second := send(s, "POST", "/", key, "body"), send(s, "POST", "/", key, "body")
		if first.status != second.status || first.body != second.body {
			f.Errorf("%s: got %d, then %d", c.name, first.status, second.status)
		}
		want := int64(2)
		if c.final {
			want = 1
		}
		if n.Load() != want {
			f.Errorf("%s: the handler ran %d times, want %d", c.name, n.Load(), want)
		}
	}
}

// alone calls h on a goroutine of its own and returns how it has ended.
func alone(h http.Handler, w http.ResponseWriter, r *http.Request) (panicked any, returned bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { panicked = recover() }()
		h.ServeHTTP(w, r)
		returned = true
	}()
	<-done
	return panicked, returned
}

func s10(f *fixture) {
	for _, refuse := range []bool{false, true} {
		for name, end := range map[string]func(){
			"panic":           func() { panic("on purpose") },
			"ErrAbortHandler": func() { panic(http.ErrAbortHandler) },
			"Goexit":          runtime.Goexit,
		} {
			var n atomic.Int64
			h := f.middleware(func(c *replay.Config) { c.RefuseUnknown = refuse }).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if n.Add(1) == 1 {
					io.WriteString(w, "half an ans")
					end()
				}
			}))
			key := newKey()
			request := func() *http.Request {
				r := httptest.NewRequest("POST", "/", strings.NewReader("body"))
				r.Header.Set("Idempotency-Key", key)
				return r
			}
			panicked, returned := alone(h, httptest.NewRecorder(), request())
			switch want := map[string]any{"panic": "on purpose", "ErrAbortHandler": http.ErrAbortHandler}[name]; {
			case returned:
				f.Errorf("%s: the middleware returned", name)
			case panicked != want:
				f.Errorf("%s: panicked with %v, want %v", name, panicked, want)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, request())
			wantCode, wantRuns := 200, int64(2)
			if refuse {
				wantCode, wantRuns = 409, 1
			}
			if w.Code != wantCode || n.Load() != wantRuns {
				f.Errorf("%s, RefuseUnknown %v: got %d after %d runs, want %d after %d", name, refuse, w.Code, n.Load(), wantCode, wantRuns)
			}
			if refuse && w.Header().Get("X-Should-Retry") != "false" {
				f.Errorf("%s: the 409 may be retried", name)
			}
		}
	}
}

// outer returns the middleware of package stint with a deadline.
func (f *fixture) outer(timeout time.Duration, hardStop bool) *stint.Middleware {
	m, err := stint.NewMiddleware(stint.MiddlewareConfig{Timeout: timeout, HardStop: hardStop})
	if err != nil {
		f.Fatal(err)
	}
	return m
}

func s11(f *fixture) {
	for _, refuse := range []bool{false, true} {
		var n atomic.Int64
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1) == 1 {
				<-r.Context().Done()
				return
			}
			w.WriteHeader(201)
		})
		m := f.middleware(func(c *replay.Config) { c.RefuseUnknown = refuse })
		s := f.serve(f.outer(300*time.Millisecond, false).Handler(m.Handler(h)))
		key := newKey()
		f.want(send(s, "POST", "/", key, "body"), 504, "*")
		if refuse {
			g := send(s, "POST", "/", key, "body")
			f.want(g, 409, "*")
			f.retryable(g, false)
			f.runs(&n, 1)
		} else {
			f.want(send(s, "POST", "/", key, "body"), 201, "")
			f.runs(&n, 2)
		}
	}
}

func s12(f *fixture) {
	var n atomic.Int64
	h, there, let := f.stuck(counting(&n))
	m := f.middleware(func(c *replay.Config) { c.MaxWait = -1 })
	s := f.serve(f.outer(300*time.Millisecond, true).Handler(m.Handler(h)))
	key := newKey()
	first := send(s, "POST", "/", key, "body")
	there()
	f.want(first, 504, "*")
	f.want(send(s, "POST", "/", key, "body"), 409, "*")
	let()
	f.wantOutcomes(replay.OutcomeConflict, replay.OutcomeExecuted)
	g := send(s, "POST", "/", key, "body")
	f.want(g, 201, "run 1")
	f.replayed(g, true)
	f.runs(&n, 1)
}

func s13(f *fixture) {
	for _, detach := range []bool{false, true} {
		var n atomic.Int64
		left := make(chan struct{})
		var ended atomic.Bool
		m := f.middleware(func(c *replay.Config) { c.Detach = detach })
		s := f.serve(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.Load() == 0 {
				close(left)
				if detach {
					time.Sleep(100 * time.Millisecond)
				} else {
					<-r.Context().Done()
				}
				ended.Store(r.Context().Err() != nil)
			}
			counting(&n).ServeHTTP(w, r)
		})))
		key := newKey()
		ctx, cancel := context.WithCancel(f.Context())
		go func() {
			<-left
			cancel()
		}()
		req, _ := http.NewRequestWithContext(ctx, "POST", s.URL, strings.NewReader("body"))
		if g := do(s, req, key); !errors.Is(g.err, context.Canceled) {
			f.Fatalf("got %d, %v, want context.Canceled", g.status, g.err)
		}
		g := send(s, "POST", "/", key, "body")
		f.want(g, 201, "run 1")
		f.replayed(g, true)
		f.runs(&n, 1)
		if ended.Load() == detach {
			f.Errorf("Detach %v: the handler's context has ended: %v", detach, ended.Load())
		}
	}
}

func s14(f *fixture) {
	const limit = replay.DefaultMaxAnswer
	for _, size := range []int{limit, limit + 1, 2*limit + 1} {
		var n atomic.Int64
		body := make([]byte, size)
		rand.Read(body)
		s := f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			n.Add(1)
			w.Header().Set("X-Size", fmt.Sprint(size))
			w.WriteHeader(201)
			for b := body; len(b) > 0; b = b[min(len(b), 10_000):] {
				w.Write(b[:min(len(b), 10_000)])
			}
		})))
		key := newKey()
		first := send(s, "POST", "/", key, "body")
		f.want(first, 201, string(body))
		if first.header.Get("X-Size") == "" {
			f.Error("the header is lost")
		}
		second := send(s, "POST", "/", key, "body")
		if size <= limit {
			f.want(second, 201, string(body))
			f.replayed(second, true)
		} else {
			f.want(second, 409, "*")
			f.retryable(second, false)
			if !strings.Contains(second.body, `"reason":"not_kept"`) || !strings.Contains(second.body, `"original_status":201`) {
				f.Errorf("got %s, want reason and status of the answer that was not kept", second.body)
			}
		}
		f.runs(&n, 1)
	}
}

func s15(f *fixture) {
	var n atomic.Int64
	seen := make(chan struct{})
	s := f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n.Add(1)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n")
		if err := http.NewResponseController(w).Flush(); err != nil {
			f.Errorf("Flush: %v", err)
		}
		select {
		case <-seen: // the client has it
		case <-time.After(10 * time.Second):
			f.Error("the event does not arrive while the handler runs")
		}
		io.WriteString(w, "data: 2\n\n")
		w.(http.Flusher).Flush()
	})))
	key := newKey()
	req, _ := http.NewRequest("POST", s.URL, strings.NewReader("body"))
	req.Header["idempotency-key"] = []string{key}
	resp, err := s.Client().Do(req)
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || line != "data: 1\n" {
		f.Fatalf("got %q, %v", line, err)
	}
	close(seen)
	io.Copy(io.Discard, resp.Body)
	g := send(s, "POST", "/", key, "body")
	f.want(g, 200, "data: 1\n\ndata: 2\n\n")
	f.replayed(g, true)
	if ct := g.header.Get("Content-Type"); ct != "text/event-stream" {
		f.Errorf("Content-Type: %q", ct)
	}
	f.runs(&n, 1)
}

// Trailers are a part of the answer as well.
func s15trailers(f *fixture) {
	s := f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		io.WriteString(w, strings.Repeat("x", 10_000))
		w.Header().Set("X-Sum", "declared")
		w.Header().Set(http.TrailerPrefix+"X-More", "and not")
	})))
	key := newKey()
	for range 2 {
		req, _ := http.NewRequest("POST", s.URL, strings.NewReader("body"))
		req.Header["idempotency-key"] = []string{key}
		resp, err := s.Client().Do(req)
		if err != nil {
			f.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if a, b := resp.Trailer.Get("X-Sum"), resp.Trailer.Get("X-More"); a != "declared" || b != "and not" || resp.Header.Get("X-Sum") != "" {
			f.Errorf("replayed %q: trailers %v, header %v", resp.Header.Get("Idempotent-Replayed"), resp.Trailer, resp.Header)
		}
	}
}

func s16(f *fixture) {
	var n atomic.Int64
	h := f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.Add(1)
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			f.Errorf("Hijack: %v", err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nhello")
		rw.Flush()
	}))
	s := f.serve(h)
	shake := func(method, key string, upgrade string) string {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			f.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		fmt.Fprintf(conn, "%s / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: %s\r\n%s\r\n", method, key, upgrade)
		b, _ := io.ReadAll(conn)
		return string(b)
	}
	for _, method := range []string{"GET", "POST"} {
		key := newKey()
		for range 2 {
			if got := shake(method, key, "Connection: upgrade\r\nUpgrade: websocket\r\n"); !strings.HasSuffix(got, "hello") {
				f.Fatalf("%s: got %q", method, got)
			}
		}
	}
	if n := f.store.calls.Load(); n != 0 {
		f.Errorf("%d calls of the store, want none", n)
	}
	f.runs(&n, 4)

	// Not asked for: a record that the answer was not kept.
	key := newKey()
	if got := shake("POST", key, ""); !strings.HasSuffix(got, "hello") {
		f.Fatalf("got %q", got)
	}
	f.wantOutcomes(replay.OutcomeTombstone)
	if got := shake("POST", key, "Connection: close\r\n"); !strings.Contains(got, " 409 ") {
		f.Fatalf("got %q, want 409", got)
	}
	// An offer of h2c, which clients make with everything, does not get round.
	if got := shake("POST", key, "Connection: upgrade, close\r\nUpgrade: h2c\r\n"); !strings.Contains(got, " 409 ") {
		f.Fatalf("got %q, want 409", got)
	}
	f.runs(&n, 5)
}

func s17(f *fixture) {
	const old = "Mon, 02 Jan 2006 15:04:05 GMT"
	s := f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Date", old)
		h.Set("Set-Cookie", "session=1")
		h.Set("Traceparent", "00-1-1-01")
		h.Set("X-Request-Id", "7")
		h.Set("X-Ratelimit-Remaining", "7")
		h.Set("Retry-After", "7")
		h.Set("Connection", "X-A")
		h.Set("X-A", "a")
		h.Set("X-B", "b")
		io.WriteString(w, "x")
		h.Set("X-Late", "not seen: the answer has begun")
	})))
	key := newKey()
	first, second := send(s, "POST", "/", key, "body"), send(s, "POST", "/", key, "body")
	f.want(first, 200, "x")
	f.want(second, 200, "x")
	f.replayed(second, true)
	for _, name := range []string{"Set-Cookie", "Traceparent", "X-Request-Id", "X-Ratelimit-Remaining", "Retry-After", "X-A"} {
		if first.header.Get(name) == "" || second.header.Get(name) != "" {
			f.Errorf("%s: %q, then %q, want it the first time alone", name, first.header.Get(name), second.header.Get(name))
		}
	}
	if second.header.Get("X-B") != "b" {
		f.Error("X-B is lost")
	}
	if d := second.header.Get("Date"); d == old || d == "" {
		f.Errorf("Date: %q, want a fresh one", d)
	}
	for _, g := range []got{first, second} {
		if g.header.Get("X-Late") != "" {
			f.Error("a header that was set after the answer began was sent")
		}
	}
}

func s18(f *fixture) {
	m := f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Vary", "Accept")
		w.Header().Set("X-Both", "inner")
		w.Header().Del("X-Gone")
		io.WriteString(w, "x")
	}))
	s := f.serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		w.Header().Set("Vary", "Origin")
		w.Header().Set("X-Both", "outer")
		w.Header().Set("X-Gone", "outer")
		m.ServeHTTP(w, r)
	}))
	key := newKey()
	for _, origin := range []string{"https://a.example", "https://b.example"} {
		g := send(s, "POST", "/", key, "body", "Origin", origin)
		f.want(g, 200, "x")
		for name, want := range map[string][]string{
			"Access-Control-Allow-Origin": {origin},
			"Vary":                        {"Origin", "Accept"},
			"X-Both":                      {"inner"},
			"X-Gone":                      nil,
		} {
			if got := g.header[name]; !reflect.DeepEqual(got, want) {
				f.Errorf("%s: %s: %q, want %q", origin, name, got, want)
			}
		}
	}
}

func s19(f *fixture) {
	// A large body: the handler reads all of it, and this many bytes are not
	// there at any one time.
	const size = 10 << 20
	var n, broken atomic.Int64
	h := f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.Add(1)
		got, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			broken.Add(1)
			http.Error(w, "cannot read", 400)
			return
		}
		fmt.Fprint(w, got)
	}))
	s := f.serve(h)
	key := newKey()
	big := strings.Repeat("0123456789abcdef", size/16)
	f.want(send(s, "POST", "/", key, big), 200, fmt.Sprint(size))
	f.want(send(s, "POST", "/", key, big), 200, fmt.Sprint(size))
	f.want(send(s, "POST", "/", key, big[1:]), 422, "*")
	f.want(send(s, "POST", "/", key, big+"x"), 422, "*") // the same beginning
	f.runs(&n, 1)
	for _, length := range []int{0, 1, 64<<10 - 1, 64 << 10, 64<<10 + 1} {
		f.want(send(s, "POST", "/", newKey(), big[:length]), 200, fmt.Sprint(length))
		// Of unknown length.
		req, _ := http.NewRequest("POST", s.URL, io.MultiReader(strings.NewReader(big[:length])))
		f.want(do(s, req, newKey()), 200, fmt.Sprint(length))
	}

	// Cut off.
	cut := func(key string, sent int) {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			f.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\nIdempotency-Key: %s\r\n\r\n%s", size, key, big[:sent])
		conn.(*net.TCPConn).CloseWrite()
		io.Copy(io.Discard, conn)
	}
	n.Store(0)
	before := f.store.calls.Load()
	cut(newKey(), 1000)
	f.runs(&n, 0)
	if got := f.store.calls.Load(); got != before {
		f.Errorf("%d calls of the store, want none", got-before)
	}
	key = newKey()
	cut(key, 1<<20)
	f.want(send(s, "POST", "/", key, big), 200, fmt.Sprint(size))
	f.runs(&n, 2)
	if broken.Load() != 1 {
		f.Errorf("the handler saw %d errors, want 1", broken.Load())
	}

	// A limit from outside.
	limited := f.serve(http.MaxBytesHandler(h, 1000))
	f.want(send(limited, "POST", "/", newKey(), big[:2000]), 413, "*")

	// A form that the handler parses, with a file on disk, is cleared away.
	f.want(send(f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.FormValue("a"))
	}))), "POST", "/", newKey(), "a=b", "Content-Type", "application/x-www-form-urlencoded"), 200, "b")
}

func s20(f *fixture) {
	var n atomic.Int64
	closed, open := f.middleware(nil).Handler(counting(&n)), f.middleware(func(c *replay.Config) { c.FailOpen = true }).Handler(counting(&n))
	s, o := f.serve(closed), f.serve(open)
	key := newKey()

	f.store.failBegin.Store(true)
	g := send(s, "POST", "/", key, "body")
	f.want(g, 503, "*")
	f.retryable(g, true)
	f.runs(&n, 0)
	g = send(o, "POST", "/", key, strings.Repeat("x", 100_000))
	f.want(g, 201, "run 1")
	if g.header.Get("Idempotency-Key") != "" {
		f.Error("announced, and not protected")
	}
	f.wantOutcomes(replay.OutcomeStoreError, replay.OutcomeUnprotected)
	f.store.failBegin.Store(false)

	f.store.failFinish.Store(true)
	g = send(s, "POST", "/", key, "body")
	f.want(g, 201, "run 2")
	if g.header.Get("Idempotency-Key") != "" {
		f.Error("announced, and not stored")
	}
	f.wantOutcomes(replay.OutcomeStoreError, replay.OutcomeUnprotected, replay.OutcomeUnsaved)
}

func s21(f *fixture) {
	// The handler outlives the lease, which is renewed.
	var n atomic.Int64
	lease := func(c *replay.Config) { c.Lease, c.MaxWait = 500*time.Millisecond, time.Minute }
	s := f.serve(f.middleware(lease).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(1500 * time.Millisecond)
		counting(&n).ServeHTTP(w, r)
	})))
	key := newKey()
	first := make(chan got)
	go func() { first <- send(s, "POST", "/", key, "body") }()
	f.want(send(s, "POST", "/", key, "body"), 201, "run 1")
	f.want(<-first, 201, "run 1")
	f.runs(&n, 1)

	// The renewals fail: another server takes over, and the answer of the first
	// run, which ends later, is nobody's.
	var fences [3]atomic.Int64
	var runs atomic.Int64
	taken := make(chan struct{})
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		run := runs.Add(1)
		fence, _ := replay.Fence(r.Context())
		fences[run].Store(fence)
		if run == 1 {
			<-taken
		}
		fmt.Fprintf(w, "run %d", run)
	})
	f.store.failRenew.Store(true)
	s1, s2 := f.serve(f.middleware(lease).Handler(h)), f.serve(f.middleware(lease).Handler(h))
	key = newKey()
	go func() { first <- send(s1, "POST", "/", key, "body") }()
	for fences[1].Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	f.want(send(s2, "POST", "/", key, "body"), 200, "run 2")
	close(taken)
	f.want(<-first, 200, "run 2") // the one answer
	f.want(send(s1, "POST", "/", key, "body"), 200, "run 2")
	// An event comes after its answer.
	for end := time.Now().Add(10 * time.Second); !slices.Contains(f.outcomes(), replay.OutcomeLost); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			f.Fatalf("outcomes %q, want one that is lost", f.outcomes())
		}
	}
	if a, b := fences[1].Load(), fences[2].Load(); a <= 0 || b <= a {
		f.Errorf("fences %d, then %d, want them to grow", a, b)
	}

	// Renewals work, and the key is gone: the handler is told.
	f.store.failRenew.Store(false)
	told := make(chan error, 1)
	s1 = f.serve(f.middleware(lease).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		run, _ := replay.Running(r.Context())
		if err := f.store.Store.Release(context.Background(), run.Key, run.Fence); err != nil {
			f.Errorf("Release: %v", err)
		}
		select {
		case <-r.Context().Done():
			told <- context.Cause(r.Context())
		case <-time.After(20 * time.Second):
			told <- errors.New("nothing")
		}
	})))
	send(s1, "POST", "/", newKey(), "body")
	if err := <-told; !errors.Is(err, replay.ErrLost) {
		f.Errorf("the handler was told %v, want ErrLost", err)
	}
}

func s22(f *fixture) {
	for _, refuse := range []bool{false, true} {
		var n atomic.Int64
		dying := &faultyStore{Store: f.store.Store}
		dying.dead.Store(true) // nothing of what the process does after Begin arrives
		killed := f.serve(f.middleware(func(c *replay.Config) { c.Store, c.Lease = dying, 2*time.Second }).Handler(
			http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })))
		alive := f.serve(f.middleware(func(c *replay.Config) { c.MaxWait, c.RefuseUnknown = -1, refuse }).Handler(counting(&n)))
		key := newKey()
		before := time.Now()
		if g := send(killed, "POST", "/", key, "body"); g.err == nil {
			f.Fatalf("got %d, want a broken connection", g.status)
		}
		if g := send(alive, "POST", "/", key, "body"); time.Since(before) < time.Second {
			f.want(g, 409, "*")
			f.retryable(g, true)
		}
		time.Sleep(time.Until(before.Add(2500 * time.Millisecond)))
		g := send(alive, "POST", "/", key, "body")
		if refuse {
			f.want(g, 409, "*")
			f.retryable(g, false)
			f.runs(&n, 0)
			f.want(send(alive, "POST", "/", key, "body"), 409, "*")
			continue
		}
		f.want(g, 201, "run 1")
		f.mu.Lock()
		taken := 0
		for _, e := range f.events {
			if e.Taken {
				taken++
			}
		}
		f.mu.Unlock()
		if taken != 1 {
			f.Errorf("%d events say that a key was taken over, want 1", taken)
		}
	}
}

func s25(f *fixture) {
	var n atomic.Int64
	s := f.serve(f.middleware(nil).Handler(counting(&n)))
	key := newKey()
	f.store.vanish.Store(true)
	f.want(send(s, "POST", "/", key, "body"), 201, "run 1")
	g := send(s, "POST", "/", key, "body")
	f.want(g, 201, "run 1")
	f.replayed(g, true)
	f.runs(&n, 1)
}

// The handler has its answer stored itself, as it can in a transaction: what was
// stored is what is sent, and what was not is stored as usual.
func s26(f *fixture) {
	for _, c := range []struct {
		name      string
		committed bool
		write     func(w http.ResponseWriter)
		want      string
	}{
		{"committed", true, func(w http.ResponseWriter) { io.WriteString(w, "stored") }, "stored"},
		{"committed, and something else written", true, func(w http.ResponseWriter) { io.WriteString(w, "something else") }, "stored"},
		{"committed, and 503", true, func(w http.ResponseWriter) { w.WriteHeader(503) }, "stored"},
		{"committed, and 502", true, func(w http.ResponseWriter) { w.WriteHeader(502) }, "stored"},
		{"rolled back", false, func(w http.ResponseWriter) { io.WriteString(w, "written") }, "written"},
	} {
		var n atomic.Int64
		s := f.serve(f.middleware(nil).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n.Add(1)
			run, ok := replay.Running(r.Context())
			if !ok {
				f.Error("no run")
				return
			}
			answer := run.Encode(200, http.Header{"X-From": {"transaction"}}, []byte("stored"))
			if c.committed {
				if err := f.store.Finish(r.Context(), run.Key, run.Fence, answer, run.TTL); err != nil {
					f.Errorf("Finish: %v", err)
				}
			}
			c.write(w)
		})))
		key := newKey()
		first, second := send(s, "POST", "/", key, "body"), send(s, "POST", "/", key, "body")
		if first.status != 200 || first.body != c.want || second.status != 200 || second.body != c.want {
			f.Errorf("%s: got %d %q, then %d %q, want %q", c.name, first.status, first.body, second.status, second.body, c.want)
		}
		f.replayed(first, false)
		f.replayed(second, true)
		f.runs(&n, 1)
	}

	// Under an old fence: refused, the handler is to roll back.
	err := f.store.Finish(f.Context(), random32(), 1, []byte("x"), time.Minute)
	if !errors.Is(err, replay.ErrLost) {
		f.Errorf("got error %v, want ErrLost", err)
	}
}
