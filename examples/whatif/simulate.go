package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

const (
	warm  = 30 * time.Second // all is well
	after = 90 * time.Second // watched behind the fault
)

// A fault is what the peer does from warm on, for as long as it lasts.
type fault struct {
	text  string
	lasts time.Duration
	// answer returns how long an attempt takes that is sent at that time, counted
	// from the beginning of the fault and negative before, and whether it ends well.
	// Calls come in the order of sent; draw is uniform in [0, 1).
	answer func(sent time.Duration, draw float64) (takes time.Duration, ok bool)
}

const usual = 20 * time.Millisecond

// steady is a fault that does not depend on what was sent before.
func steady(text string, lasts time.Duration, broken func(sent time.Duration, draw float64) (time.Duration, bool)) func(int) fault {
	return func(int) fault {
		return fault{text, lasts, func(sent time.Duration, draw float64) (time.Duration, bool) {
			if sent < 0 || sent >= lasts {
				return usual, true
			}
			return broken(sent, draw)
		}}
	}
}

var faults = map[string]func(rps int) fault{
	"outage": steady("the peer answers 503 for 30 s", 30*time.Second, func(time.Duration, float64) (time.Duration, bool) {
		return 5 * time.Millisecond, false
	}),
	"blip": steady("the peer answers 503 for 0.3 s", 300*time.Millisecond, func(time.Duration, float64) (time.Duration, bool) {
		return 5 * time.Millisecond, false
	}),
	"partial": steady("the peer answers 503 to one in twenty for 30 s", 30*time.Second, func(_ time.Duration, draw float64) (time.Duration, bool) {
		return 5 * time.Millisecond, draw >= 0.05
	}),
	"flap": steady("the peer answers 503 every other second for 30 s", 30*time.Second, func(sent time.Duration, _ float64) (time.Duration, bool) {
		return 5 * time.Millisecond, sent/time.Second%2 == 1
	}),
	"slow": steady("the peer takes 2 s for 30 s, where it took 20 ms", 30*time.Second, func(time.Duration, float64) (time.Duration, bool) {
		return 2 * time.Second, true
	}),
	"tail": steady("3 of 100 answers take 0.4 s for 30 s", 30*time.Second, func(_ time.Duration, draw float64) (time.Duration, bool) {
		if draw < 0.03 {
			return 400 * time.Millisecond, true
		}
		return usual, true
	}),
	// A queue that works on in order, also for those who have given up.
	"stall": func(rps int) fault {
		const lasts = 5 * time.Second
		each := time.Duration(float64(time.Second) / (1.1 * float64(rps)))
		var free time.Duration
		return fault{"the peer, a queue that takes a tenth more than that, stands still for 5 s", lasts, func(sent time.Duration, _ float64) (time.Duration, bool) {
			if sent < 0 {
				free = sent // it keeps up, as long as less comes than it can take
			}
			begins := max(free, sent)
			if begins >= 0 && begins < lasts {
				begins = lasts
			}
			free = begins + each
			return free - sent, true
		}}
	},
}

func faultNames() string {
	var names []string
	for n := range faults {
		names = append(names, n)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// A peer is the base of all instances' transports.
type peer struct {
	fault fault
	start time.Time

	mu    sync.Mutex // guards what follows
	draws *rand.Rand
	sent  []time.Duration // since start, in order
}

func (p *peer) RoundTrip(r *http.Request) (*http.Response, error) {
	p.mu.Lock()
	at := time.Since(p.start)
	p.sent = append(p.sent, at)
	takes, ok := p.fault.answer(at-warm, p.draws.Float64())
	p.mu.Unlock()
	timer := time.NewTimer(takes)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	status := http.StatusOK
	if !ok {
		status = http.StatusServiceUnavailable
	}
	return &http.Response{StatusCode: status, Header: make(http.Header), Body: http.NoBody, Request: r}, nil
}

// A request is how one ended.
type request struct {
	start    time.Duration
	ok       bool
	attempts int
	throttle bool
}

type result struct {
	peak                       int
	longRun                    float64 // attempts a second
	failed, throttled, rescued int
	recovered                  time.Duration // after the fault; MaxInt64: not
}

// simulate is to run in a synctest bubble.
func simulate(t *testing.T, c config) (r result) {
	p := &peer{fault: faults[c.fault](c.rps), start: time.Now(), draws: rand.New(rand.NewPCG(c.seed, 1))}
	c.stint.Base = p
	transports := make([]*stint.Transport, c.instances)
	for i := range transports {
		tr, err := stint.NewTransport(c.stint)
		if err != nil {
			t.Fatal(err)
		}
		transports[i] = tr
	}
	lasts := warm + p.fault.lasts + after
	requests := make([]request, int(lasts.Seconds()*float64(c.rps)))
	var wg sync.WaitGroup
	for n := range requests {
		at := time.Duration(n) * time.Second / time.Duration(c.rps)
		time.Sleep(at - time.Since(p.start))
		wg.Go(func() { requests[n] = send(transports[n%c.instances], p.start, c.timeout) })
	}
	wg.Wait()

	ends := warm + p.fault.lasts
	for i, j := 0, 0; i < len(p.sent); i++ {
		for p.sent[i]-p.sent[j] >= time.Second {
			j++
		}
		r.peak = max(r.peak, i-j+1)
	}
	rate := func(from, to time.Duration) float64 {
		n := 0
		for _, at := range p.sent {
			if at >= from && at < to {
				n++
			}
		}
		return float64(n) / (to - from).Seconds()
	}
	r.longRun = rate(max(warm, ends-10*time.Second), ends)
	last := time.Duration(-1) // the last failure behind the fault
	for _, q := range requests {
		if q.start < warm {
			continue
		}
		switch {
		case q.ok && q.attempts > 1:
			r.rescued++
		case !q.ok:
			r.failed++
			if q.throttle {
				r.throttled++
			}
			if q.start >= ends {
				last = q.start
			}
		}
	}
	switch {
	case last < 0:
	case last > lasts-10*time.Second:
		r.recovered = math.MaxInt64
	default:
		r.recovered = (last - ends).Truncate(time.Second) + time.Second
	}
	return r
}

func send(tr *stint.Transport, start time.Time, timeout time.Duration) request {
	var o stint.Outcome
	ctx, cancel := context.WithTimeout(stint.WithOverride(context.Background(), stint.Override{Outcome: &o}), timeout)
	defer cancel()
	q := request{start: time.Since(start)}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://peer.test/", nil)
	if err != nil {
		panic(fmt.Sprint("whatif: ", err)) // the URL is a constant
	}
	resp, err := tr.RoundTrip(req)
	if err == nil {
		resp.Body.Close()
		q.ok = resp.StatusCode == http.StatusOK
	}
	var e *stint.Error
	q.throttle = errors.As(err, &e) && e.Reason == stint.ReasonThrottle
	q.attempts = o.Attempts
	return q
}
