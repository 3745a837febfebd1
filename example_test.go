package stint_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/stinthttp/stint"
)

// A peer is a base transport that answers by itself, so that the examples need
// no network.
type peer func(*http.Request) (*http.Response, error)

func (p peer) RoundTrip(r *http.Request) (*http.Response, error) { return p(r) }

// answers returns a peer that gives these statuses in turn, the last one for
// ever.
func answers(statuses ...int) peer {
	return func(r *http.Request) (*http.Response, error) {
		status := statuses[0]
		if len(statuses) > 1 {
			statuses = statuses[1:]
		}
		return &http.Response{
			StatusCode: status, Status: fmt.Sprint(status, " ", http.StatusText(status)),
			Header: make(http.Header), Body: http.NoBody, Request: r,
		}, nil
	}
}

// handledBy returns a peer that is a handler.
func handledBy(h http.Handler) peer {
	return func(r *http.Request) (*http.Response, error) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if r.Body != nil {
			r.Body.Close() // as every RoundTripper does
		}
		resp := w.Result()
		resp.Request = r
		return resp, nil
	}
}

// quick makes retries wait for next to nothing, for examples.
var quick = stint.Backoff{Base: time.Microsecond, Max: time.Microsecond}

// Both halves: the edge gives a request two seconds, and the ledger behind it
// is told how much of them is left.
func Example() {
	// The service behind.
	ledgerHalf, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "ledger"})
	if err != nil {
		fmt.Println(err)
		return
	}
	ledger := ledgerHalf.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		deadline, ok := r.Context().Deadline()
		left := time.Until(deadline)
		fmt.Fprintln(w, "the ledger has a deadline:", ok, "within 2 s:", left > time.Second && left < 2*time.Second)
	}))

	// The edge, which calls it.
	transport, err := stint.NewTransport(stint.Config{Base: handledBy(ledger)})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	edgeHalf, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "edge", Timeout: 2 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	edge := edgeHalf.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := http.NewRequestWithContext(r.Context(), "GET", "http://ledger/", nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		resp, err := client.Do(req)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			http.Error(w, err.Error(), http.StatusGatewayTimeout)
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadGateway)
		default:
			defer resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
			io.Copy(w, resp.Body)
		}
	}))

	w := httptest.NewRecorder()
	edge.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	fmt.Print(w.Body)
	// Output: the ledger has a deadline: true within 2 s: true
}

func ExampleNewTransport() {
	transport, err := stint.NewTransport(stint.Config{
		Base:    answers(503, 200), // yours: an *http.Transport, or nothing
		Timeout: 2 * time.Second,
		Backoff: quick,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}

	resp, err := client.Get("http://ledger/")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status)
	// Output: 200 OK
}

// Wrong: this expects a POST to be retried. The key that stint makes names the
// operation, but who says that the peer looks at it? So the 503 comes back as
// it is, and the Outcome says why.
//
// Right, where the peer does dedupe: the caller's own key is a promise that the
// request may be repeated under it.
func ExampleTransport() {
	transport, err := stint.NewTransport(stint.Config{Base: answers(503), Backoff: quick})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}

	post := func(o stint.Override) {
		var outcome stint.Outcome
		o.Outcome = &outcome
		ctx := stint.WithOverride(context.Background(), o)
		req, err := http.NewRequestWithContext(ctx, "POST", "http://payments/charges", strings.NewReader("amount=1"))
		if err != nil {
			fmt.Println(err)
			return
		}
		resp, err := client.Do(req)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer resp.Body.Close()
		fmt.Printf("%d, attempts: %d, reason: %s\n", resp.StatusCode, outcome.Attempts, outcome.Reason)
	}
	post(stint.Override{})
	post(stint.Override{IdempotencyKey: "order-17", MaxAttempts: 2})
	// Output:
	// 503, attempts: 1, reason: not_idempotent
	// 503, attempts: 2, reason: attempts
}

func ExampleNewMiddleware() {
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "orders", Timeout: 2 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := middleware.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "served")
	}))

	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	fmt.Println(w.Code, w.Body)

	late := httptest.NewRequest("GET", "/", nil)
	late.Header.Set(stint.HeaderDeadline, "1") // a millisecond into 1970
	w = httptest.NewRecorder()
	handler.ServeHTTP(w, late)
	fmt.Println(w.Code, w.Header().Get(stint.HeaderDeadlineExpired), w.Header().Get(stint.HeaderShouldRetry))
	// Output:
	// 200 served
	// 504 1 false
}

// Adopt is for routers that are not made of http.Handlers, and for tests.
func ExampleMiddleware_Adopt() {
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, deadline := range []time.Time{time.Now().Add(time.Minute), time.Now().Add(-time.Minute)} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set(stint.HeaderDeadline, fmt.Sprint(deadline.UnixMilli()))

		r, cancel, err := middleware.Adopt(r)
		var refused *stint.Error
		if errors.As(err, &refused) {
			fmt.Println("refuse it:", refused.Reason)
		} else {
			_, ok := r.Context().Deadline()
			fmt.Println("serve it, with a deadline:", ok)
		}
		cancel()
	}
	// Output:
	// serve it, with a deadline: true
	// refuse it: expired
}

// An Override is for the requests of one context. A zero field keeps what an
// outer Override, or the Config, says.
func ExampleWithOverride() {
	base := func(r *http.Request) (*http.Response, error) {
		fmt.Println("attempt with key", r.Header["idempotency-key"])
		return answers(503)(r)
	}
	transport, err := stint.NewTransport(stint.Config{Base: peer(base), Backoff: quick})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := stint.WithOverride(context.Background(), stint.Override{IdempotencyKey: "order-17"})
	ctx = stint.WithOverride(ctx, stint.Override{MaxAttempts: 2})

	req, err := http.NewRequestWithContext(ctx, "POST", "http://payments/charges", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()
	// Output:
	// attempt with key [order-17]
	// attempt with key [order-17]
}

// A handler starts work that goes on when its request is over.
// context.WithoutCancel is not enough: calls made with it still carry the
// deadline that was adopted. Detach leaves that behind too.
func ExampleDetach() {
	transport, err := stint.NewTransport(stint.Config{Base: peer(func(r *http.Request) (*http.Response, error) {
		fmt.Println("the peer is told a deadline:", r.Header.Get(stint.HeaderDeadline) != "")
		return answers(200)(r)
	})})
	if err != nil {
		fmt.Println(err)
		return
	}
	call := func(ctx context.Context) {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://audit/", nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		if resp, err := transport.RoundTrip(req); err == nil {
			resp.Body.Close()
		}
	}
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{Timeout: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := middleware.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		call(context.WithoutCancel(r.Context()))
		call(stint.Detach(r.Context()))
	}))
	handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
	// Output:
	// the peer is told a deadline: true
	// the peer is told a deadline: false
}

// One hook writes the steps of both halves to log/slog. A warning is a request
// that failed: one that was refused a retry, one whose time ran out here, one
// that came with an unusable header, and one whose error is never retried, such
// as a certificate's. A caller that has left is none.
func ExampleConfig_hook() {
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		Level: slog.LevelInfo,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // it would differ each time the example runs
			}
			return a
		},
	}))
	hook := func(ctx context.Context, e stint.Event) {
		level := slog.LevelDebug
		switch e.Kind {
		case stint.EventRetry:
			level = slog.LevelInfo
		case stint.EventRefused:
			if e.Reason != stint.ReasonCanceled {
				level = slog.LevelWarn
			}
		case stint.EventDone:
			if e.Err != nil && e.Reason == "" {
				level = slog.LevelWarn
			}
		case stint.EventExpired:
			level = slog.LevelWarn
		case stint.EventArrived:
			if e.Reason != "" {
				level = slog.LevelWarn
			}
		}
		logger.LogAttrs(ctx, level, string(e.Kind),
			slog.String("name", cmp.Or(e.Peer, e.Service)), slog.Int("attempt", e.Attempt),
			slog.String("reason", string(e.Reason)), slog.Int("status", e.Status), slog.Any("err", e.Err))
	}

	transport, err := stint.NewTransport(stint.Config{Base: answers(503), MaxAttempts: 2, Backoff: quick, Hook: hook})
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := (&http.Client{Transport: transport}).Get("http://ledger/")
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()

	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "orders", Hook: hook})
	if err != nil {
		fmt.Println(err)
		return
	}
	late := httptest.NewRequest("GET", "/", nil)
	late.Header.Set(stint.HeaderDeadline, "1") // a millisecond into 1970
	middleware.Handler(http.NotFoundHandler()).ServeHTTP(httptest.NewRecorder(), late)
	// Output:
	// level=INFO msg=retry name=ledger:80 attempt=1 reason="" status=503 err=<nil>
	// level=WARN msg=refused name=ledger:80 attempt=2 reason=attempts status=503 err=<nil>
	// level=WARN msg=expired name=orders attempt=0 reason=expired status=0 err=<nil>
}

// A test of a service against a peer that fails. MinPerSecond makes retries
// quick: by default the second one in a row would wait a second for its turn.
func Example_testing() {
	ledger := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(stint.HeaderRetryCount) == "" { // every first attempt
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer ledger.Close()
	transport, err := stint.NewTransport(stint.Config{Budget: stint.BudgetConfig{MinPerSecond: 100}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer transport.CloseIdleConnections()

	var outcome stint.Outcome
	ctx := stint.WithOverride(context.Background(), stint.Override{Outcome: &outcome})
	req, err := http.NewRequestWithContext(ctx, "GET", ledger.URL, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Printf("%s, attempts: %d, reason: %q\n", resp.Status, outcome.Attempts, outcome.Reason)
	// Output: 200 OK, attempts: 2, reason: ""
}

// All that is wrong is reported at once, and nothing is silently corrected. The
// error prints all of it, and errors.As gives the first.
func ExampleConfig_invalid() {
	_, err := stint.NewTransport(stint.Config{
		MaxAttempts: -1,
		Budget:      stint.BudgetConfig{Ratio: 1.5},
		Backoff:     stint.Backoff{Base: -time.Second},
	})
	fmt.Println(err)

	var first *stint.ConfigError
	if errors.As(err, &first) {
		fmt.Println(first.Field, "is", first.Value)
	}
	// Output:
	// stint: Config.MaxAttempts = -1: must be at least 1, or 0 for the default
	// stint: Config.Budget.Ratio = 1.5: must be in (0, 1], 0 for the default, or negative for the floor alone
	// stint: Config.Backoff.Base = -1s: must not be negative; 0 is the default
	// Config.MaxAttempts is -1
}

// What stint ended is an *Error, and what the deadline ended is
// context.DeadlineExceeded, through the *url.Error of http.Client too.
func ExampleError() {
	transport, err := stint.NewTransport(stint.Config{Base: peer(func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done() // a peer that does not answer
		return nil, r.Context().Err()
	})})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", "http://ledger/", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = (&http.Client{Transport: transport}).Do(req)

	fmt.Println("deadline:", errors.Is(err, context.DeadlineExceeded))
	var timeout interface{ Timeout() bool }
	fmt.Println("timeout:", errors.As(err, &timeout) && timeout.Timeout())
	var ended *stint.Error
	if errors.As(err, &ended) {
		fmt.Printf("%s, attempts: %d, reason: %s\n", ended.Peer, ended.Attempts, ended.Reason)
	}
	// Output:
	// deadline: true
	// timeout: true
	// ledger:80, attempts: 1, reason: deadline
}

// One peer with two hosts behind it, one of which is down: the retry goes to the
// other, and so do the requests after it.
func ExampleNewHosts() {
	hosts, err := stint.NewHosts("ledger", "10.0.0.1:8080", "10.0.0.2:8080")
	if err != nil {
		fmt.Println(err)
		return
	}
	failed := 0
	transport, err := stint.NewTransport(stint.Config{
		Elsewhere: hosts.Pick,
		Backoff:   quick,
		Base: peer(func(r *http.Request) (*http.Response, error) {
			if r.URL.Host == "10.0.0.1:8080" {
				failed++
				return answers(http.StatusServiceUnavailable)(r)
			}
			return answers(http.StatusOK)(r)
		}),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	ok := 0
	for range 100 {
		resp, err := client.Get("http://ledger/balance")
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			ok++
		}
	}
	fmt.Println(ok, "of 100 succeed, attempts at the bad host:", failed)

	// Output:
	// 100 of 100 succeed, attempts at the bad host: 1
}

// Operations whose retries are used up go to a file, and from there to the peer
// once it is back, under the key that they were first sent with.
func ExampleConfig_usedUp() {
	type parked struct{ Method, URL, Key, ContentType, Body string }
	file, err := os.CreateTemp("", "parked")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.Remove(file.Name())
	defer file.Close()

	down := true
	executed := make(map[string]string) // by key: the peer dedupes
	ledger := handledBy(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if down {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		body, _ := io.ReadAll(r.Body)
		// r.Header.Get would do on a real connection.
		executed[r.Header[strings.ToLower(stint.HeaderIdempotencyKey)][0]] = string(body)
	}))
	queue := json.NewEncoder(file)
	transport, err := stint.NewTransport(stint.Config{
		Base: ledger, Backoff: quick, Keys: stint.KeysHonoured, MaxAttempts: 2,
		UsedUp: func(_ context.Context, u stint.UsedUp) { // with a lock, where many call
			if !u.Repeatable || u.Method == http.MethodGet {
				return
			}
			p := parked{Method: u.Method, URL: u.URL.String(), Key: u.Key, ContentType: u.Header.Get("Content-Type")}
			if u.Body != nil {
				r, err := u.Body()
				if err != nil {
					return
				}
				defer r.Close()
				text, err := io.ReadAll(r)
				if err != nil {
					return
				}
				p.Body = string(text)
			}
			if err := queue.Encode(p); err != nil {
				fmt.Println(err)
			}
			fmt.Println("parked:", u.Method, u.URL, "because of", u.Reason, "after", u.Attempts, "attempts")
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	if resp, err := client.Post("http://ledger/book", "text/plain", strings.NewReader("10 EUR")); err == nil {
		resp.Body.Close()
	}

	// Later, the ledger is back.
	down = false
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		fmt.Println(err)
		return
	}
	for list := json.NewDecoder(file); ; {
		var p parked
		if err := list.Decode(&p); err != nil {
			break // io.EOF
		}
		ctx := stint.WithOverride(context.Background(), stint.Override{IdempotencyKey: p.Key})
		req, err := http.NewRequestWithContext(ctx, p.Method, p.URL, strings.NewReader(p.Body))
		if err != nil {
			fmt.Println(err)
			return
		}
		req.Header.Set("Content-Type", p.ContentType)
		resp, err := client.Do(req)
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		fmt.Println("replayed:", resp.StatusCode, "executed under the same key:", executed[p.Key])
	}

	// Output:
	// parked: POST http://ledger/book because of attempts after 2 attempts
	// replayed: 200 executed under the same key: 10 EUR
}

// A handler that can do one thing at a time. One request waits for it; the next
// is told at once that nothing was done for it.
func ExampleMiddlewareConfig_limit() {
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{
		Limit: stint.LimitConfig{MaxConcurrent: 1, MaxQueue: -1}, // nobody waits
	})
	if err != nil {
		log.Fatal(err)
	}
	begun, finish := make(chan bool), make(chan bool)
	handler := middleware.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begun <- true
		<-finish
		fmt.Fprint(w, "a balance")
	}))

	first := httptest.NewRecorder()
	done := make(chan bool)
	go func() {
		handler.ServeHTTP(first, httptest.NewRequest("GET", "/", nil))
		close(done)
	}()
	<-begun
	second := httptest.NewRecorder()
	handler.ServeHTTP(second, httptest.NewRequest("GET", "/", nil))
	fmt.Println(second.Code, "Retry-After:", second.Header().Get("Retry-After"), "X-Should-Retry:", second.Header().Get("X-Should-Retry"))

	finish <- true
	<-done
	fmt.Println(first.Code, first.Body)
	// Output:
	// 503 Retry-After: 1 X-Should-Retry: true
	// 200 a balance
}

// Requests that say that they are retries are held to a share of the others: to
// none here, as no request has ended well, and no floor is set.
func ExampleMiddlewareConfig_retryBudget() {
	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{
		RetryBudget: &stint.BudgetConfig{MinPerSecond: -1},
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := middleware.Handler(http.NotFoundHandler())
	for _, count := range []string{"", "1"} {
		r := httptest.NewRequest("GET", "/", nil)
		if count != "" {
			r.Header.Set(stint.HeaderRetryCount, count)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Printf("%d %q\n", w.Code, w.Header().Get("X-Should-Retry"))
	}
	// Output:
	// 404 ""
	// 503 "false"
}
