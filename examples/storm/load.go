package main

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	inFlightMax = 5000            // user requests; one more counts as failed and is not sent
	userTimeout = 4 * time.Second // longer than a hop can take without stint: three attempts of a second each
)

// A load is an open-loop generator: users come when they come and do not wait
// for each other's answers. A loop that waits would slow down with the chain
// and hide the storm.
type load struct {
	url    string
	rps    int
	record *record     // may be nil
	cohort atomic.Bool // users that come now belong to the cohort
}

// run sends requests until length has passed, or until ctx ends where length
// is 0, and returns when all of them are answered.
func (l *load) run(ctx context.Context, length time.Duration) {
	client := &http.Client{
		Transport: pooledTransport(),
		Timeout:   userTimeout,
	}
	defer client.CloseIdleConnections()
	var users sync.WaitGroup
	defer users.Wait()
	free := make(chan struct{}, inFlightMax)

	start := time.Now()
	if l.record != nil {
		start = l.record.start
	}
	interval := time.Second / time.Duration(l.rps)
	for i := 0; ; i++ {
		// Counted from the start: a late wake-up is made up for, so that the
		// rate is right over every stretch that is longer than the delay.
		due := time.Duration(i) * interval
		if length > 0 && due >= length {
			return
		}
		if !pause(ctx, due-time.Since(start)) {
			return
		}
		sent := time.Since(start)
		l.record.fellBehind(sent - due)
		u := user{sent: sent, cohort: l.cohort.Load()}
		select {
		case free <- struct{}{}:
		default:
			l.record.answered(u)
			continue
		}
		users.Go(func() {
			defer func() { <-free }()
			u.ok = l.ask(ctx, client, u.cohort)
			u.took = time.Since(start) - u.sent
			l.record.answered(u)
		})
	}
}

// ask sends one user's request, once, and reports whether it was served.
func (l *load) ask(ctx context.Context, client *http.Client, cohort bool) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, l.url, nil)
	if err != nil {
		return false
	}
	if cohort {
		req.Header.Set(cohortHeader, "1")
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return false
	}
	return resp.StatusCode == http.StatusOK
}
