package interop_test

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/sony/gobreaker/v2"
	"github.com/stinthttp/stint"
)

// A breakerBase is a gobreaker around a base. A status of 500 or more counts as a
// failure, and is an answer all the same.
type breakerBase struct {
	breaker *gobreaker.CircuitBreaker[*http.Response]
	base    http.RoundTripper
}

// errAnswered tells the breaker of a failure that came with an answer.
var errAnswered = errors.New("a status of 500 or more")

func (b breakerBase) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.breaker.Execute(func() (*http.Response, error) {
		resp, err := b.base.RoundTrip(r)
		if err == nil && resp.StatusCode >= 500 {
			err = errAnswered
		}
		return resp, err
	})
	switch {
	case err == errAnswered:
		return resp, nil
	case isOpen(err) && r.Body != nil:
		r.Body.Close() // a RoundTripper always does, and nobody else was asked
	}
	return resp, err
}

func isOpen(err error) bool {
	return errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests)
}

// A circuit breaker around the base: it opens after five failures in a row, and
// from then on requests end at once, without a retry.
func Example_breaker() {
	down := roundTrip(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusServiceUnavailable, Header: make(http.Header), Body: http.NoBody, Request: r}, nil
	})
	breaker := gobreaker.NewCircuitBreaker[*http.Response](gobreaker.Settings{
		Timeout:     time.Minute,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= 5 },
	})
	transport, err := stint.NewTransport(stint.Config{
		Base:       breakerBase{breaker, down},
		RetryError: func(err error) bool { return !isOpen(err) },
		Budget:     stint.BudgetConfig{MinPerSecond: 100}, // so that the example does not wait
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	for range 3 {
		var outcome stint.Outcome
		req, err := http.NewRequest(http.MethodGet, "http://ledger/balance", nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		resp, err := client.Do(req.WithContext(stint.WithOverride(req.Context(), stint.Override{Outcome: &outcome})))
		if err != nil {
			fmt.Println(outcome.Attempts, "attempts:", errors.Unwrap(err))
			continue
		}
		resp.Body.Close()
		fmt.Println(outcome.Attempts, "attempts:", resp.StatusCode)
	}

	// Output:
	// 3 attempts: 503
	// 3 attempts: circuit breaker is open
	// 1 attempts: circuit breaker is open
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
