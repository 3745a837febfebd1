package stint

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestS35_UsedUp: which ends are handed over, and with what.
func TestS35_UsedUp(t *testing.T) {
	lost := errors.New("connection lost")
	status := func(code int, header ...string) baseFunc {
		return func(r *http.Request) (*http.Response, error) {
			if r.Body != nil {
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			resp := stormAnswer(r, code)
			for i := 0; i < len(header); i += 2 {
				resp.Header.Set(header[i], header[i+1])
			}
			return resp, nil
		}
	}
	fails := baseFunc(func(r *http.Request) (*http.Response, error) {
		closeBody(r)
		return nil, lost
	})
	for _, test := range []struct {
		name       string
		method     string
		body       func() io.Reader
		base       baseFunc
		config     Config
		opts       Override
		cancel     bool
		want       Reason // "": not called
		attempts   int
		repeatable bool
		noBody     bool // Body is nil
	}{
		{name: "200", method: "GET", base: status(200)},
		{name: "400", method: "POST", base: status(400)},
		{name: "500", method: "GET", base: status(500)},
		{name: "GET", method: "GET", base: status(503), want: ReasonAttempts, attempts: 3, repeatable: true, noBody: true},
		{name: "lost", method: "PUT", base: fails, want: ReasonAttempts, attempts: 3, repeatable: true},
		{name: "POST without a promise", method: "POST", base: status(503), want: ReasonNotIdempotent, attempts: 1},
		{name: "POST without a promise, nothing done", method: "POST", base: status(503, HeaderShouldRetry, "true"), want: ReasonAttempts, attempts: 3, repeatable: true},
		{name: "POST, keys honoured", method: "POST", base: status(503), config: Config{Keys: KeysHonoured}, want: ReasonAttempts, attempts: 3, repeatable: true},
		{name: "POST, override", method: "POST", base: fails, opts: Override{IdempotencyKey: "order-1"}, want: ReasonAttempts, attempts: 3, repeatable: true},
		{name: "stream", method: "PUT", body: func() io.Reader { return io.MultiReader(strings.NewReader("body")) }, base: status(503), want: ReasonNotReplayable, attempts: 1, noBody: true},
		{name: "one attempt", method: "PUT", base: status(503), opts: Override{MaxAttempts: 1}, want: ReasonAttempts, attempts: 1, repeatable: true},
		{name: "told not to", method: "PUT", base: status(503, HeaderShouldRetry, "false"), want: ReasonToldNotTo, attempts: 1, repeatable: true},
		{name: "Retry-After", method: "PUT", base: status(503, "Retry-After", "3600"), want: ReasonRetryAfter, attempts: 1, repeatable: true},
		{name: "budget", method: "PUT", base: status(503), config: Config{Budget: BudgetConfig{Ratio: -1, MinPerSecond: -1}}, want: ReasonBudget, attempts: 1, repeatable: true},
		{name: "no time", method: "POST", base: status(200), config: Config{Timeout: 3 * time.Millisecond}, want: ReasonDeadline, attempts: 0, repeatable: true},
		{name: "deadline, may be executed", method: "POST", base: func(r *http.Request) (*http.Response, error) {
			closeBody(r)
			<-r.Context().Done()
			return nil, r.Context().Err()
		}, config: Config{Timeout: time.Second}, want: ReasonDeadline, attempts: 1},
		{name: "the base still reads", method: "PUT", base: func(r *http.Request) (*http.Response, error) {
			return stormAnswer(r, 503), nil // and never closes the body
		}, opts: Override{MaxAttempts: 1}, want: ReasonAttempts, attempts: 1, noBody: true},
		{name: "the caller leaves", method: "PUT", base: hang, cancel: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []UsedUp
				c := test.config
				if c.Budget == (BudgetConfig{}) {
					c.Budget.MinPerSecond = 100
				}
				c.UsedUp = func(_ context.Context, u UsedUp) {
					got = append(got, u)
					if u.Body != nil {
						r, err := u.Body()
						if err != nil {
							t.Error(err)
							return
						}
						defer r.Close()
						if text, _ := io.ReadAll(r); string(text) != "body" {
							t.Errorf("the body is %q", text)
						}
					}
				}
				var o Outcome
				test.opts.Outcome = &o
				ctx, cancel := context.WithCancel(WithOverride(t.Context(), test.opts))
				defer cancel()
				if test.cancel {
					time.AfterFunc(time.Second, cancel)
				}
				var body io.Reader = strings.NewReader("body")
				if test.method == "GET" {
					body = nil
				}
				if test.body != nil {
					body = test.body()
				}
				req := newRequest(t, ctx, test.method, "http://peer.test/path?q", body)
				req.Header.Set("Content-Type", "text/plain")
				resp, err := stormTransport(t, c, test.base, 1).RoundTrip(req)
				if test.want == "" {
					if len(got) != 0 {
						t.Errorf("called with %+v", got)
					}
					return
				}
				if len(got) != 1 {
					t.Fatalf("called %d times (%v)", len(got), err)
				}
				u := got[0]
				code := 0
				if resp != nil {
					code = resp.StatusCode
				}
				if u.Method != test.method || u.URL.String() != "http://peer.test/path?q" || u.Header.Get("Content-Type") != "text/plain" || u.Peer != "peer.test:80" || u.Key != o.Key || u.Status != code || u.Err != err {
					t.Errorf("got %+v, with %v and outcome %+v", u, err, o)
				}
				if u.Reason != test.want || u.Attempts != test.attempts || u.Repeatable != test.repeatable || (u.Body == nil) != test.noBody {
					t.Errorf("reason %q, %d attempts, repeatable %v, body %v; want %+v", u.Reason, u.Attempts, u.Repeatable, u.Body != nil, test)
				}
			})
		})
	}
}
