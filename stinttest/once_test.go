package stinttest

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stinthttp/stint"
)

const (
	unkeyed = "a POST without a key "
	keyed   = "a POST with a key "
)

func losses(format string, names ...string) (want []string) {
	for _, n := range names {
		want = append(want, strings.ReplaceAll(format, "%", "("+n+")"))
	}
	return want
}

func TestExecutedOnce(t *testing.T) {
	t.Parallel()
	type client func(base http.RoundTripper) Client
	stintWith := func(c stint.Config) client {
		return func(base http.RoundTripper) Client {
			c.Base, c.Backoff = base, stint.Backoff{Base: time.Millisecond, Max: time.Millisecond}
			return &http.Client{Transport: newTransport(t, c)}
		}
	}
	for _, tt := range []struct {
		name    string
		client  client
		once    Once
		want    []string // in memory
		sockets []string // as well, over sockets
	}{
		{name: "net/http alone", client: func(base http.RoundTripper) Client { return &http.Client{Transport: base} }},
		{name: "net/http alone, and once at most", client: func(base http.RoundTripper) Client { return &http.Client{Transport: base} },
			once:    Once{Attempts: 1},
			sockets: losses(keyed+"%: arrived 2 times, want at most 1", "reset")},
		{name: "stint", client: stintWith(stint.Config{})},
		{name: "stint, attempts cut off", client: stintWith(stint.Config{AttemptTimeout: 400 * time.Millisecond, MaxAttempts: 2}), once: Once{Attempts: 2}},
		{name: "stint, no keys of its own", client: stintWith(stint.Config{Keys: stint.KeysOff})},
		{name: "stint, relying on the service", client: stintWith(stint.Config{Keys: stint.KeysHonoured, Budget: generous}), once: Once{Dedupes: true}},
		{name: "stint, relying on a service that does not", client: stintWith(stint.Config{Keys: stint.KeysHonoured, Budget: generous}),
			want: losses(unkeyed+"%: arrived 3 times, want at most 1", "reset", "answer 502", "answer 504")},
		{name: "stint, more attempts than allowed", client: stintWith(stint.Config{MaxAttempts: 4, Budget: generous}),
			want: losses(keyed+"%: arrived 4 times, want at most 3", "reset", "answer 502", "answer 504")},
		{name: "a loop", client: func(base http.RoundTripper) Client { return loop{base: base, attempts: 3, rewind: true} },
			want:    losses(unkeyed+"%: arrived 3 times, want at most 1", "reset", "answer 502", "answer 504"),
			sockets: losses(keyed+"%: arrived 4 times, want at most 3", "reset")},
	} {
		for _, sockets := range []bool{false, true} {
			name, want := tt.name+", in memory", tt.want
			if sockets {
				name, want = tt.name+", over sockets", append(want[:len(want):len(want)], tt.sockets...)
			}
			t.Run(name, func(t *testing.T) {
				if sockets {
					t.Parallel()
					base := newClient(t, &http.Transport{}).Transport
					wantReports(t, reports(func(tb TB) { ExecutedOnce(tb, tt.client(base), tt.once) }), want...)
					return
				}
				synctest.Test(t, func(t *testing.T) {
					once := tt.once
					once.Peer = NewPeer()
					once.Timeout = 10 * time.Second
					wantReports(t, reports(func(tb TB) { ExecutedOnce(tb, tt.client(once.Peer), once) }), want...)
				})
			})
		}
	}
}

// onceInMemory runs the check in virtual time.
func onceInMemory(t *testing.T, client func(p *Peer) Client) (got []string) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPeer()
		c := client(p)
		got = reports(func(tb TB) { ExecutedOnce(tb, c, Once{Peer: p}) })
	})
	return got
}

// What arrives again has to be the same again.
func TestExecutedOnce_SameKeyAndBody(t *testing.T) {
	lost := []string{"reset", "answer 502", "answer 504"}
	got := onceInMemory(t, func(p *Peer) Client { return loop{base: p, attempts: 2} })
	wantReports(t, got, slices.Concat(
		losses(unkeyed+"%: arrived 2 times", lost...),
		losses(unkeyed+"%: arrival 2 has 0 bytes of body, not the 33", lost...),
		losses(keyed+"%: arrival 2 has 0 bytes of body, not the 33", lost...),
	)...)

	// A new key each time makes a new order each time.
	n := 0
	got = onceInMemory(t, func(p *Peer) Client {
		return loop{attempts: 2, rewind: true, base: roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Header.Get(stint.HeaderIdempotencyKey) != "" {
				n++
				r.Header.Set(stint.HeaderIdempotencyKey, fmt.Sprint("key", n))
			}
			return p.RoundTrip(r)
		})}
	})
	var want []string
	for i, name := range []string{"reset", "reset within the answer", "answer 502", "answer 504", "no answer"} {
		again := i != 1 && i != 4 // the loop does not look into bodies, nor beyond the deadline
		want = append(want, losses(keyed+"%: arrival 1 has the key", name)...)
		if again {
			want = append(want, losses(keyed+"%: arrival 2 has the key", name)...)
			want = append(want, losses(unkeyed+"%: arrived 2 times", name)...)
		}
	}
	wantReports(t, got, want...)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestExecutedOnce_NothingToSee(t *testing.T) {
	got := onceInMemory(t, func(p *Peer) Client {
		return clientFunc(func(r *http.Request) (*http.Response, error) {
			if r.Method == "POST" {
				return nil, errors.New("not today")
			}
			return p.RoundTrip(r)
		})
	})
	if len(got) != 10 || !strings.HasSuffix(got[0], "did not arrive") {
		t.Errorf("reports %q", got)
	}
	got = onceInMemory(t, func(*Peer) Client {
		return clientFunc(func(*http.Request) (*http.Response, error) { return nil, errors.New("not at all") })
	})
	wantReports(t, got, "the peer cannot be reached: not at all")
}

// generous lets every retry through, so that a check sees them all.
var generous = stint.BudgetConfig{Ratio: 1, MinPerSecond: 1000}
