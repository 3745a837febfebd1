package stinttest

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/stinthttp/stint"
)

// outlive is by how much a hop's context may end after its caller's before that
// counts: a deadline that travels as a duration is longer by the way it went.
const outlive = 50 * time.Millisecond

// user is the hop that stands for the check itself where it sends the requests.
const user = "the user"

// DeadlineNeverRises checks what rec has seen: no service was given more time
// than the one that called it. A caller's deadline is the one in the header that
// it received, or that of its context where there was none. It fails if
//
//   - a service received a later deadline than its caller, which is what a fresh
//     timeout on context.Background does in the caller
//   - a service received none, or an unusable one, although its caller had one
//   - a service's context ends later than its caller's by more than 50 ms: it
//     received the deadline and has not adopted it
//   - no call was seen of which the caller had a deadline
//   - user requests overlapped and [Recorder.ID] is not set
//
// The numbers in the header are compared with each other and never with a clock,
// so clocks of services may differ. Each failure is reported once for the two
// services concerned, with the largest difference, to about two digits.
//
// It is to be called when all requests have been served.
func DeadlineNeverRises(t TB, rec *Recorder) {
	t.Helper()
	if rec.overlaps() {
		t.Fatalf("stinttest: user requests overlap, so that calls cannot be told apart: send one at a time, or set Recorder.ID")
		return
	}
	var found rises
	pairs := 0
	for _, hops := range rec.Requests() {
		for _, h := range hops {
			if h.Caller >= 0 && found.compare(hops[h.Caller], h) {
				pairs++
			}
		}
	}
	if pairs == 0 {
		t.Errorf("stinttest: no call was seen whose caller had a deadline: nothing is proven")
	}
	for _, r := range found {
		if r.by > 0 {
			t.Errorf("stinttest: %s (%v later)", r.what, roughly(r.by))
		} else {
			t.Errorf("stinttest: %s", r.what)
		}
	}
}

// DeadlineNeverRisesAt sends GET requests with deadlines of 3 s, 1 s and 250 ms
// to a URL, one after another, and then checks what rec has seen of them and of
// what came before, as [DeadlineNeverRises] does. It counts as a hop itself, so
// that a proxy in front of the first recorded service is checked as well. What
// is answered does not matter.
//
// The shortest deadline matters most: a fresh timeout of a second passes for a
// falling deadline where the user gave three.
func DeadlineNeverRisesAt(t TB, rec *Recorder, url string) {
	t.Helper()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	for _, timeout := range []time.Duration{3 * time.Second, time.Second, 250 * time.Millisecond} {
		if err := visit(rec, transport, url, timeout); err != nil {
			t.Fatalf("stinttest: %v", err)
			return
		}
	}
	DeadlineNeverRises(t, rec)
}

// DeadlineNeverRisesThrough is [DeadlineNeverRisesAt] for a handler, the first
// of the chain, which it serves on a loopback address until the TB's Cleanup.
func DeadlineNeverRisesThrough(t TB, rec *Recorder, first http.Handler) {
	t.Helper()
	if url := serve(t, first); url != "" {
		DeadlineNeverRisesAt(t, rec, url)
	}
}

// visit sends one request with a deadline and waits until it has been served.
// The error says that it could not be, or that it does not end.
func visit(rec *Recorder, transport http.RoundTripper, url string, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	// Longer than the deadline, which is for the services to keep: if we left
	// first, the last of them could still be at work when the next request goes
	// out.
	ctx, cancel := context.WithTimeout(context.Background(), timeout+30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set(stint.HeaderDeadline, strconv.FormatInt(deadline.UnixMilli(), 10))
	noted, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	leave := rec.enter(user, req.WithContext(noted))
	before := rec.count()
	_, err = do(&http.Client{Transport: transport}, req)
	leave()
	if err != nil && rec.count() == before {
		return err
	}
	return settle(rec) // without an answer there is still something to look at
}

// settle waits for services that go on when their caller has left: what they
// call is part of the same user request.
func settle(rec *Recorder) error {
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		name := rec.serving()
		switch {
		case name == "":
			return nil
		case time.Since(start) > patience:
			return fmt.Errorf("%s has not returned %v after its user request had been answered", name, patience)
		}
	}
}

// A rise is what is wrong between two services, however often.
type rise struct {
	what string
	by   time.Duration // the most of it; 0: has no size
}

type rises []rise

func (r *rises) add(by time.Duration, format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	i := slices.IndexFunc(*r, func(known rise) bool { return known.what == what })
	if i < 0 {
		*r = append(*r, rise{what, by})
	} else {
		(*r)[i].by = max((*r)[i].by, by)
	}
}

// compare notes what is wrong with what h received from its caller. It reports
// whether there was anything to compare.
func (r *rises) compare(caller, h Hop) bool {
	limit, has := caller.Deadline()
	if !has && caller.Bounded {
		// Set at the caller itself. To the millisecond above: here a clock is
		// read twice.
		limit, has = caller.At.Add(caller.Remaining).UnixMilli()+1, true
	}
	if !has {
		return false
	}
	switch ms, ok := h.Deadline(); {
	case ok && ms > limit:
		r.add(time.Duration(min(ms-limit, int64(1e12)))*time.Millisecond, "%s received a later deadline than %s, which calls it", h.Name, caller.Name)
	case ok:
		if over := h.At.Add(h.Remaining).Sub(caller.At.Add(caller.Remaining)); h.Bounded && caller.Bounded && over > outlive {
			r.add(over, "the context of %s ends later than that of %s, which calls it", h.Name, caller.Name)
		}
	case len(h.Header) > 0:
		r.add(0, "%s received an unusable deadline from %s, which has a deadline", h.Name, caller.Name)
	default:
		r.add(0, "%s received no deadline from %s, which has one", h.Name, caller.Name)
	}
	return true
}

// roughly rounds to about two digits: what is measured in real time is never the
// same twice, and the rest would be noise.
func roughly(d time.Duration) time.Duration {
	for _, unit := range []time.Duration{time.Minute, time.Second, 100 * time.Millisecond, 10 * time.Millisecond} {
		if d >= 10*unit {
			return d.Round(unit)
		}
	}
	return max(d.Round(time.Millisecond), time.Millisecond)
}
