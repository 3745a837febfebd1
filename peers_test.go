package stint

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func testPeers(t *testing.T, maxPeers int) *peers {
	t.Helper()
	tr, err := NewTransport(Config{MaxPeers: maxPeers})
	if err != nil {
		t.Fatal(err)
	}
	return newPeers(&tr.cfg, budgetOrigin)
}

func TestPeerName(t *testing.T) {
	for _, test := range []struct{ url, want string }{
		{"http://example.test/", "example.test:80"},
		{"http://Example.TEST/path?query", "example.test:80"},
		{"http://example.test:80", "example.test:80"},
		{"http://example.test:/", "example.test:80"},
		{"http://user:secret@example.test/", "example.test:80"},
		{"HTTP://example.test/", "example.test:80"},
		{"https://example.test/", "example.test:443"},
		{"https://example.test:443/", "example.test:443"},
		{"https://EXAMPLE.test:", "example.test:443"},
		{"http://example.test:443/", "example.test:443"},
		{"http://example.test:8080/", "example.test:8080"},
		{"http://192.0.2.1/", "192.0.2.1:80"},
		{"http://[2001:DB8::1]/", "[2001:db8::1]:80"},
		{"https://[2001:db8::1]:8443/", "[2001:db8::1]:8443"},
	} {
		u, err := url.Parse(test.url)
		if err != nil {
			t.Fatal(err)
		}
		if got := peerName(&http.Request{URL: u}); got != test.want {
			t.Errorf("%s: %q, want %q", test.url, got, test.want)
		}
	}
}

// TestO25_PeersDoNotShare: what one peer's failures have spent is missing at no
// other. Ports are different peers, spellings are not.
func TestO25_PeersDoNotShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		fails := map[string]int{} // how many attempts of a URL fail
		tr := stormTransport(t, Config{}, peerFunc(func(req *http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			status := http.StatusOK
			if u := req.URL.String(); fails[u] > 0 {
				fails[u]--
				status = http.StatusServiceUnavailable
			}
			return stormAnswer(req, status), nil
		}), 1)
		send := func(url string, failures int) (attempts int) {
			mu.Lock()
			fails[url] = failures
			mu.Unlock()
			var o Outcome
			req, err := http.NewRequestWithContext(WithOverride(context.Background(), Override{Outcome: &o}), http.MethodGet, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			return o.Attempts
		}
		for range 1000 {
			send("http://a.test/", 3)
		}
		if n := send("http://a.test/", 1); n != 1 {
			t.Errorf("the peer that has spent its budget: %d attempts, want one", n)
		}
		for _, url := range []string{"http://a.test:80/", "http://A.TEST/", "http://a.Test:80/x", "http://u:p@a.test/"} {
			if n := send(url, 1); n != 1 {
				t.Errorf("%s is another spelling: %d attempts, want one", url, n)
			}
		}
		for _, url := range []string{"http://b.test/", "http://a.test:8080/", "https://a.test/", "http://a.test.:80/"} {
			if n := send(url, 1); n != 2 {
				t.Errorf("%s is another peer: %d attempts, want a retry", url, n)
			}
		}
	})
}

type peerFunc func(*http.Request) (*http.Response, error)

func (f peerFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func (t *peers) enterAt(name string, at time.Duration) *peer {
	return t.enter(name, t.origin.Add(at))
}

func (t *peers) leaveAt(p *peer, at time.Duration) { t.leave(p, t.origin.Add(at)) }

// size counts the table, which has to agree with its counter.
func (t *peers) size() (n int) {
	t.byName.Range(func(any, any) bool { n++; return true })
	t.mu.Lock()
	defer t.mu.Unlock()
	if n != t.n {
		return -1
	}
	return n
}

// TestPeers_Bounded: at most MaxPeers are kept apart. Those beyond share one,
// until somebody has been idle for a window.
func TestPeers_Bounded(t *testing.T) {
	table := testPeers(t, 3)
	var kept []*peer
	for _, name := range []string{"a", "b", "c"} {
		kept = append(kept, table.enterAt(name, 0))
	}
	over := table.enterAt("d", 0)
	if over == kept[0] || over == kept[1] || over == kept[2] || over.name != overflowPeer {
		t.Fatalf("the fourth is %q, want the overflow peer", over.name)
	}
	if again := table.enterAt("e", 0); again != over {
		t.Error("the fifth does not share with the fourth")
	}
	if again := table.enterAt("a", 0); again != kept[0] {
		t.Error("a known peer is not found any more")
	}
	table.leaveAt(kept[0], time.Second)

	// In flight: not a candidate, however long.
	if p := table.enterAt("f", time.Hour); p != over {
		t.Error("a peer with requests in flight has given way")
	}
	table.leaveAt(kept[1], 2*time.Hour)
	// Idle, but for less than a window: its spent retries still count.
	if p := table.enterAt("g", 2*time.Hour+testMemory-1); p != over {
		t.Error("a peer that was idle for less than a window has given way")
	}
	at := 2*time.Hour + testMemory
	p := table.enterAt("g", at)
	if p == over || p == kept[1] || p.name != "g" {
		t.Errorf("got %q, want a peer of its own in the place of the idle one", p.name)
	}
	if n := table.size(); n != 3 {
		t.Errorf("%d peers in the table, want 3", n)
	}
	if p := table.enterAt("b", at); p != over {
		t.Errorf("the evicted one comes back as %q, want the overflow peer: the table is full", p.name)
	}
	if a := table.enterAt("a", at); a != kept[0] {
		t.Error("the peer in flight was lost")
	}
}

// TestPeers_EvictedIsNotReused: somebody who has looked a peer up and not yet
// entered it must notice that it has gone.
func TestPeers_EvictedIsNotReused(t *testing.T) {
	table := testPeers(t, 1)
	old := table.enterAt("a", 0)
	table.leaveAt(old, 0)
	table.leaveAt(table.enterAt("b", time.Minute), time.Minute)
	if old.enter() {
		t.Error("an evicted peer can be entered")
	}
	if old.enter() {
		t.Error("an evicted peer can be entered at the second try")
	}
	if p := table.enterAt("a", 2*time.Minute); p == old || p.name != "a" {
		t.Errorf("got %q, want a new peer of the old name", p.name)
	}
}

// TestPeers_LongNames: no host has a name of 600 bytes. Who makes one up
// gets no memory for it.
func TestPeers_LongNames(t *testing.T) {
	table := testPeers(t, 10)
	if p := table.enterAt(strings.Repeat("x", maxPeerName+1), 0); p.name != overflowPeer || table.size() != 0 {
		t.Errorf("got %q and %d peers, want the overflow peer alone", p.name, table.size())
	}
	if p := table.enterAt(strings.Repeat("x", maxPeerName), 0); p.name == overflowPeer {
		t.Error("the longest name allowed is not kept")
	}
	// A name cut out of something long must not keep that in memory.
	long := strings.Repeat("y", 1<<20)
	var before, after runtime.MemStats
	for i := range 5 {
		long := fmt.Sprint(i, long)
		table.enterAt(long[:5], 0)
	}
	runtime.GC() // what we hold ourselves is garbage by now
	runtime.ReadMemStats(&before)
	runtime.KeepAlive(table)
	table = nil
	runtime.GC()
	runtime.ReadMemStats(&after)
	if freed := int64(before.HeapAlloc) - int64(after.HeapAlloc); freed > 2<<20 {
		t.Errorf("the table held %d bytes for 6 short names", freed)
	}
}

// TestPeers_RandomHosts: 50,000 invented hosts, all failing. They get neither
// memory nor more retries than the floors of MaxPeers peers and the one that
// they share.
func TestPeers_RandomHosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const maxPeers, hosts = 100, 50000
		m, err := NewMetrics(MetricsConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var sent, retries atomic.Int64
		tr := stormTransport(t, Config{MaxPeers: maxPeers, Metrics: m}, peerFunc(func(req *http.Request) (*http.Response, error) {
			sent.Add(1)
			if req.Header[HeaderRetryCount] != nil {
				retries.Add(1)
			}
			return stormAnswer(req, http.StatusServiceUnavailable), nil
		}), 1)
		runtime.GC()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		// All within the first 9 s, so that nobody has been idle for a window.
		evenly(100, 5*time.Second, func(n int) {
			for i := range hosts / 500 {
				req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://host-%d-%d.test/", n, i), nil)
				if err != nil {
					t.Error(err)
					return
				}
				var o Outcome
				req = req.WithContext(WithOverride(req.Context(), Override{Outcome: &o}))
				if resp, err := tr.RoundTrip(req); err != nil {
					t.Error(err)
				} else {
					resp.Body.Close()
				}
			}
		})
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(tr)
		if n := tr.peers.size(); n != maxPeers {
			t.Errorf("%d peers, want %d", n, maxPeers)
		}
		if first := sent.Load() - retries.Load(); first != hosts {
			t.Errorf("%d first attempts, want %d", first, hosts)
		}
		if n := retries.Load(); n > 3*(maxPeers+1) || n < maxPeers {
			t.Errorf("%d retries, want at most the floors of %d peers and the shared one", n, maxPeers)
		}
		// A peer with a histogram and its series is some 25 KB; 50,000 of them
		// would be a gigabyte.
		if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 16<<20 {
			t.Errorf("%d MB more in use", grown>>20)
		}
		if n := len(stormScrape(t, m)); n > 200*40 {
			t.Errorf("%d series", n)
		}
	})
}

// testMemory is the default budget's memory: the window and the open slot.
const testMemory = DefaultBudgetWindow * 11 / 10

// TestPeers_FloodIsCheap: a flood of new names at a full table must not walk
// the table for each.
func TestPeers_FloodIsCheap(t *testing.T) {
	table := testPeers(t, 1000)
	for i := range 1000 {
		table.leaveAt(table.enterAt(fmt.Sprint(i), time.Second), time.Second)
	}
	const walked = time.Second + testMemory - 1 // a moment before anybody has been idle for long enough
	table.leaveAt(table.enterAt("first", walked), walked)
	if table.oldest != time.Second {
		t.Fatalf("the table holds the oldest to be of %v, want 1 s", table.oldest)
	}
	// What the table knows of its oldest is what saves the walk: raise it, and
	// nobody is evicted although all are idle.
	table.oldest = time.Hour
	if p := table.enterAt("second", time.Hour); p.name != overflowPeer {
		t.Error("the table was walked although nobody can be idle")
	}
	table.oldest = time.Second
	if p := table.enterAt("second", time.Hour); p.name != "second" {
		t.Error("the table was not walked although all are idle")
	}
	if n := table.size(); n != 1 {
		t.Errorf("%d peers left, want the newcomer alone", n)
	}
}

// TestPeers_ConcurrentUse has goroutines come and go over more names than there
// is room for, while time flies.
func TestPeers_ConcurrentUse(t *testing.T) {
	const maxPeers = 8
	m, err := NewMetrics(MetricsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := NewTransport(Config{MaxPeers: maxPeers, Metrics: m})
	if err != nil {
		t.Fatal(err)
	}
	table := newPeers(&tr.cfg, budgetOrigin)
	var clock atomic.Int64
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for i := range 3000 {
				at := time.Duration(clock.Add(int64(200 * time.Millisecond)))
				name := fmt.Sprint((i*7 + g*13) % (2 * maxPeers))
				p := table.enterAt(name, at)
				if n := p.inflight.Load(); n <= 0 {
					t.Errorf("entered a peer with %d in flight", n)
				}
				if p.name != name && p.name != overflowPeer {
					t.Errorf("asked for %q, got %q", name, p.name)
				}
				p.budget.request(budgetOrigin.Add(at))
				p.latency.get("")
				if i%3 == 0 {
					runtime.Gosched()
				}
				if n := p.inflight.Load(); n <= 0 {
					t.Errorf("evicted with a request in flight (%d)", n)
				}
				table.leaveAt(p, at)
			}
		})
	}
	wg.Wait()
	if n := table.size(); n < 1 || n > maxPeers {
		t.Errorf("%d peers at the end, want 1 to %d", n, maxPeers)
	}
	table.byName.Range(func(_, v any) bool {
		if n := v.(*peer).inflight.Load(); n != 0 {
			t.Errorf("%d in flight at the end", n)
		}
		return true
	})
	if table.other != nil && table.other.inflight.Load() != 0 {
		t.Errorf("%d in flight at the shared peer at the end", table.other.inflight.Load())
	}
}
