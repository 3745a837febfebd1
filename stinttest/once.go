package stinttest

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/stinthttp/stint"
)

// A Once says what [ExecutedOnce] does and allows. Every field's zero value is
// the default that its comment names.
type Once struct {
	// Peer is what the client talks to: by its URL, or in memory, as the base of
	// the client. Its script is replaced. nil: one of the check's own, on a
	// loopback address.
	Peer *Peer

	// Attempts is how often a POST may arrive whose caller has given it a key. 0:
	// 3.
	Attempts int

	// Dedupes says that the service executes one key once, and that the client
	// relies on it: arrivals under the same Idempotency-Key count as one, also
	// where the client itself has made the key.
	Dedupes bool

	// Timeout is the deadline of each request. 0: 1 s.
	Timeout time.Duration
}

const (
	oncePayload = `{"order": 17, "amount": "120.00"}`
	onceKey     = "stinttest-5e2c5a1d"
)

// ExecutedOnce sends POST requests through a client to a peer that receives them
// whole and then loses them: by a reset, by a reset in the middle of the answer,
// by an answer 502 or 504, as a proxy gives it, and by saying nothing until the
// deadline. It fails if
//
//   - one without an idempotency key arrived more than once: to the service, each
//     arrival is an order of its own
//   - one with the caller's key arrived more than Attempts times, whoever sent
//     it: net/http sends such requests again on its own
//   - arrivals of the same request differ in their key or their body
//   - one did not arrive at all
//
// Before each of them a GET is answered, so that the request finds a kept-alive
// connection; on a fresh one net/http does not send anything again.
//
// A request that must not be repeated is lost for the caller, and the client has
// to say so; that it does is not checked here.
func ExecutedOnce(t TB, client Client, o Once) {
	t.Helper()
	if o.Attempts <= 0 {
		o.Attempts = 3
	}
	if o.Timeout <= 0 {
		o.Timeout = time.Second
	}
	peer := o.Peer
	if peer == nil {
		if peer = StartPeer(t); peer.URL == "" {
			return
		}
	}
	defer peer.Use(OK())
	for _, loss := range []struct {
		name string
		step Step
	}{
		{"reset", Reset()},
		{"reset within the answer", Half()},
		{"answer 502", Fail(http.StatusBadGateway)},
		{"answer 504", Fail(http.StatusGatewayTimeout)},
		{"no answer", Stall()},
	} {
		for _, key := range []string{"", onceKey} {
			arrivals, err := o.lose(client, peer, loss.step, key)
			if err != nil {
				t.Fatalf("stinttest: the peer cannot be reached: %v", err)
				return
			}
			o.judge(t, loss.name, key, arrivals)
		}
	}
}

// lose sends one request that will be lost, and returns how it arrived. An error
// means that a peer which is well could not be reached.
func (o Once) lose(client Client, peer *Peer, loss Step, key string) ([]Arrival, error) {
	peer.Use(OK())
	ctx, cancel := context.WithTimeout(context.Background(), max(o.Timeout, patience))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, peer.url(), nil)
	if err != nil {
		return nil, err
	}
	if _, err := do(client, req); err != nil {
		return nil, err
	}

	before := peer.Count()
	peer.Use(loss)
	ctx, cancel = context.WithTimeout(context.Background(), o.Timeout)
	defer cancel()
	// From a strings.Reader, which net/http can rewind: that it could be sent
	// again must not be why it is.
	req, err = http.NewRequestWithContext(ctx, http.MethodPost, peer.url(), strings.NewReader(oncePayload))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set(stint.HeaderIdempotencyKey, key)
	}
	do(client, req) // it is lost: what the client makes of that is its own affair
	return peer.Arrivals()[before:], nil
}

func (o Once) judge(t TB, loss, key string, arrivals []Arrival) {
	t.Helper()
	what, allowed := "a POST without a key", 1
	if key != "" {
		what, allowed = "a POST with a key", o.Attempts
	}
	count := len(arrivals)
	if key == "" && o.Dedupes {
		count = operations(arrivals)
	}
	switch {
	case count == 0:
		t.Errorf("stinttest: %s (%s): did not arrive", what, loss)
	case count > allowed:
		t.Errorf("stinttest: %s (%s): arrived %d times, want at most %d", what, loss, count, allowed)
	}
	for i, a := range arrivals {
		if got := a.Header.Get(stint.HeaderIdempotencyKey); key != "" && got != key {
			t.Errorf("stinttest: %s (%s): arrival %d has the key %q, want %q", what, loss, i+1, got, key)
		}
		// A body that broke off is no order; nor is it the client's choice of
		// bytes.
		if a.BodyErr == nil && string(a.Body) != oncePayload {
			t.Errorf("stinttest: %s (%s): arrival %d has %d bytes of body, not the %d that were sent", what, loss, i+1, len(a.Body), len(oncePayload))
		}
	}
}

// operations counts arrivals as a service does that executes each key once.
func operations(arrivals []Arrival) (n int) {
	keys := make(map[string]bool)
	for _, a := range arrivals {
		switch key := a.Header.Get(stint.HeaderIdempotencyKey); {
		case key == "":
			n++
		case !keys[key]:
			keys[key] = true
			n++
		}
	}
	return n
}
