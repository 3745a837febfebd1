package stint

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// everything switches on what is off by default, each as it is meant to be used.
func everything(c *Config) {
	c.Throttle = true
	c.Hedge = HedgeConfig{Quantile: 0.95}
	c.CountResends = true
	if c.RetryError == nil {
		c.RetryError = func(error) bool { return true }
	}
	c.Elsewhere = func(*http.Request, string) func(bool) { return func(bool) {} }
	c.UsedUp = func(_ context.Context, u UsedUp) {
		if u.Body != nil {
			if r, err := u.Body(); err == nil {
				r.Close()
			}
		}
	}
	if c.Hook == nil {
		c.Hook = func(context.Context, Event) {}
	}
}

// TestP1_EverythingOn: the ceiling holds with all features at once.
func TestP1_EverythingOn(t *testing.T) {
	for i, tl := range namedFaults {
		if raceEnabled && i%3 > 0 {
			continue
		}
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var c Config
				everything(&c)
				log := storm(t, tl, c, 100, tl.length()+5*time.Second, 0, 1)
				wantUnderCeiling(t, tl, log, ceiling)
				n, _ := peak(log.sent)
				t.Logf("peak %d, %d retries and hedges", n, len(log.retries))
			})
		})
	}
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) {
			tl := randomTimeline(4000+seed, 90*time.Second)
			var c Config
			everything(&c)
			log := storm(t, tl, c, 100, 90*time.Second, tl.timeout, seed)
			wantUnderCeiling(t, tl, log, ceiling)
		})
	}
}

// TestP2_EverythingOn: and so does the amplification of three hops.
func TestP2_EverythingOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const from, to = 30 * time.Second, 90 * time.Second
		outage := &timeline{name: "bottom down", phases: []phase{{lasts: from}, {lasts: to - from, fault: failing}}}
		var c Config
		everything(&c)
		c.Hedge = HedgeConfig{} // in one layer, as the README says: what waits below for a retry looks slow above
		log := chain{config: c}.run(t, outage, 100, to+55*time.Second)
		each := float64(between(log.sent, from, to)) / 6000
		t.Logf("%.3f attempts at the bottom per user request", each)
		wantUnderCeiling(t, outage, log, ceiling)
		if each > 1.05 {
			t.Errorf("%.3f attempts at the bottom per user request, want at most 1.05", each)
		}
		// Three throttles in a row let go one after the other, each within a window.
		if share, _ := log.succeeded(to+35*time.Second, to+55*time.Second); share != 1 {
			t.Errorf("after the outage %.3f of the requests succeed, want all", share)
		}
	})
}

// TestP3_EverythingOn: the queue recovers as it does with Throttle alone.
func TestP3_EverythingOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const from, to = 30 * time.Second, 35 * time.Second
		c := Config{}
		everything(&c)
		log := storm(t, &fifo{perSecond: 110, stallFrom: from, stallTo: to}, c, 100, to+75*time.Second, time.Second, 1)
		took := log.recovered(to) - to
		t.Logf("recovered %v after the stall", took)
		if took > 25*time.Second {
			t.Errorf("recovered %v after the stall, want within 25 s", took)
		}
	})
}

// TestP4_EverythingOn: a peer that slows down gets neither retries nor hedges.
func TestP4_EverythingOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const slow, end = 60 * time.Second, 120 * time.Second
		usual := phase{lasts: slow, fault: partly, share: 0.1, takes: 200 * time.Millisecond}
		late := phase{lasts: end - slow, fault: partly, share: 0.1, takes: 2 * time.Second}
		c := Config{}
		everything(&c)
		log := storm(t, &timeline{name: "slow", phases: []phase{usual, late}}, c, 20, end, 3*time.Second, 1)
		if n := between(log.retries, slow+30*time.Second, end); n != 0 {
			t.Errorf("%d retries or hedges while the peer is slow, want none", n)
		}
		if n := between(log.retries, 20*time.Second, slow); n == 0 {
			t.Error("no retries while the peer is fast: then this shows nothing")
		}
	})
}

// TestP7_EverythingOnExitPaths walks every way out of RoundTrip again, with
// everything on: bodies, answers, contexts, errors and counts are as without (P6
// to P8).
func TestP7_EverythingOnExitPaths(t *testing.T) {
	for _, p := range exitPaths() {
		t.Run(p.name, func(t *testing.T) {
			for i, v := range exitVariants() {
				if p.only != nil && !p.only(v) || (raceEnabled || testing.Short()) && i%4 > 0 {
					continue
				}
				t.Run(v.String(), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						p.runWith(t, v, false, func(c *Config) {
							everything(c)
							c.CountResends = false // as the rows expect
							// Armed in each run, and never due: what hedges do has tests of its own.
							c.Hedge = HedgeConfig{Delay: 10 * time.Minute}
						})
					})
				})
			}
		})
	}
}
