package stint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// manyHosts is a base with hosts behind it, each of them a faulty peer.
type manyHosts struct {
	start time.Time
	hosts map[string]faulty

	mu   sync.Mutex // guards what follows
	sent map[string]int
	log  stormLog
}

func newManyHosts(hosts map[string]faulty) *manyHosts {
	return &manyHosts{start: time.Now(), hosts: hosts, sent: make(map[string]int)}
}

func (m *manyHosts) RoundTrip(r *http.Request) (*http.Response, error) {
	host := m.hosts[r.URL.Host]
	if host == nil {
		return nil, errors.New("no such host: " + r.URL.Host)
	}
	m.mu.Lock()
	m.sent[r.URL.Host]++
	at := time.Since(m.start)
	m.log.sent = append(m.log.sent, at)
	reply := host.reply(at, rand.Float64())
	m.mu.Unlock()
	if err := stormSleep(r.Context(), reply.at-at); err != nil {
		return nil, err
	}
	if reply.kind == replyOK {
		return stormAnswer(r, http.StatusOK), nil
	}
	return stormAnswer(r, http.StatusServiceUnavailable), nil
}

func hostNames(n int) (names []string) {
	for i := range n {
		names = append(names, "10.0.0."+strconv.Itoa(i+1)+":8080")
	}
	return names
}

// byRetriesAlone goes to a random host, and elsewhere on a retry.
func byRetriesAlone(names []string) func(*http.Request, string) func(bool) {
	return func(out *http.Request, failed string) func(bool) {
		out.URL.Host = names[rand.IntN(len(names))]
		for out.URL.Host == failed {
			out.URL.Host = names[rand.IntN(len(names))]
		}
		return nil
	}
}

// TestS33_OneBadHost: of some hosts behind a peer one fails all that it gets.
func TestS33_OneBadHost(t *testing.T) {
	const lasts = 100 * time.Second
	down := &timeline{name: "down", phases: []phase{{lasts: time.Hour, fault: failing}}}
	hangs := &timeline{name: "hangs", phases: []phase{{lasts: time.Hour, fault: silent}}}
	up := &timeline{name: "up", phases: []phase{{lasts: time.Hour}}}
	for _, test := range []struct {
		hosts  int
		bad    faulty
		picker bool
		config Config
		least  float64 // share of the requests that succeed
		most   float64 // attempts for each
	}{
		{hosts: 20, bad: down, least: 0.99, most: 1.06},
		{hosts: 20, bad: down, picker: true, least: 0.99, most: 1.06},
		{hosts: 5, bad: down, least: 0.85, most: 1.11},
		{hosts: 5, bad: down, picker: true, least: 0.99, most: 1.01},
		{hosts: 5, bad: hangs, picker: true, config: Config{AttemptTimeout: time.Second}, least: 0.99, most: 1.02},
		{hosts: 2, bad: down, picker: true, least: 0.99, most: 1.01},
		// A promise of nobody: a POST is not retried, and steered all the same.
		{hosts: 5, bad: down, picker: true, config: Config{MaxAttempts: 1}, least: 0.99, most: 1},
	} {
		name := fmt.Sprintf("one of %d %v", test.hosts, test.bad.(*timeline).name)
		if test.picker {
			name += ", picker"
		}
		if test.config.MaxAttempts == 1 {
			name += ", no retries"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				names := hostNames(test.hosts)
				all := make(map[string]faulty)
				for _, n := range names {
					all[n] = up
				}
				all[names[0]] = test.bad
				base := newManyHosts(all)
				m := newTestMetrics(t)
				c := test.config
				c.Metrics = m
				c.Elsewhere = byRetriesAlone(names)
				if test.picker {
					hosts, err := NewHosts("peer.test", names...)
					if err != nil {
						t.Fatal(err)
					}
					c.Elsewhere = hosts.Pick
				}
				tr := stormTransport(t, c, base, 1)
				var ok, total atomic.Int64
				evenly(100, lasts, func(int) {
					total.Add(1)
					resp, err := tr.RoundTrip(newRequest(t, context.Background(), "GET", "http://peer.test/", nil))
					if err == nil && resp.StatusCode == http.StatusOK {
						ok.Add(1)
					}
				})
				share := float64(ok.Load()) / float64(total.Load())
				each := float64(len(base.log.sent)) / float64(total.Load())
				t.Logf("%.4f succeed, %.3f attempts each, %d of them to the bad host", share, each, base.sent[names[0]])
				if share < test.least {
					t.Errorf("%.4f of the requests succeed, want %v", share, test.least)
				}
				if each > test.most {
					t.Errorf("%.3f attempts each, want at most %v", each, test.most)
				}
				wantUnderCeiling(t, &timeline{name: name}, &base.log, ceiling)
				// One peer, whatever the host.
				if got := counter(t, m, "http_client_requests_total", "peer", "peer.test:80"); int(got) != len(base.log.sent) {
					t.Errorf("%v attempts count for the peer, want all %d", got, len(base.log.sent))
				}
			})
		})
	}
}

// TestS33_HostComesBack: by and by, and then for good.
func TestS33_HostComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		names := hostNames(4)
		tl := &timeline{name: "back after a minute", phases: []phase{{lasts: time.Minute, fault: failing}}}
		up := &timeline{name: "up"}
		base := newManyHosts(map[string]faulty{names[0]: tl, names[1]: up, names[2]: up, names[3]: up})
		hosts, err := NewHosts("peer.test", names...)
		if err != nil {
			t.Fatal(err)
		}
		tr := stormTransport(t, Config{Elsewhere: hosts.Pick}, base, 1)
		run := func(lasts time.Duration) (bad, all int) {
			base.mu.Lock()
			before, sent := base.sent[names[0]], len(base.log.sent)
			base.mu.Unlock()
			evenly(100, lasts, func(int) {
				tr.RoundTrip(newRequest(t, context.Background(), "GET", "http://peer.test/", nil))
			})
			return base.sent[names[0]] - before, len(base.log.sent) - sent
		}
		bad, _ := run(time.Minute)
		t.Logf("%d attempts to the bad host in its bad minute", bad)
		if bad < 4 || bad > 20 {
			t.Errorf("%d attempts to the bad host in a minute, want one now and then", bad)
		}
		run(maxHostPause + time.Second)
		if bad, all := run(20 * time.Second); bad < all/4-all/20 || bad > all/4+all/20 {
			t.Errorf("%d of %d attempts go to the host that has recovered, want about a quarter", bad, all)
		}
	})
}

// TestS33_AllHostsFailing: nobody gets more than twice the share, and there is
// always a host to try.
func TestS33_AllHostsFailing(t *testing.T) {
	for _, share := range []float64{0.05, 0.5, 1} {
		t.Run(fmt.Sprint(share), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				names := hostNames(5)
				all := make(map[string]faulty)
				for _, n := range names {
					all[n] = &timeline{phases: []phase{{lasts: time.Hour, fault: partly, share: share}}}
				}
				base := newManyHosts(all)
				hosts, err := NewHosts("peer.test", names...)
				if err != nil {
					t.Fatal(err)
				}
				tr := stormTransport(t, Config{Elsewhere: hosts.Pick}, base, 1)
				evenly(100, time.Minute, func(int) {
					tr.RoundTrip(newRequest(t, context.Background(), "GET", "http://peer.test/", nil))
				})
				for host, n := range base.sent {
					if most := 2 * len(base.log.sent) / len(names); n > most {
						t.Errorf("%s got %d of %d attempts, want at most %d", host, n, len(base.log.sent), most)
					}
				}
			})
		})
	}
}

// TestHosts is the picker itself, in passed time.
func TestHosts(t *testing.T) {
	first := func(int) int { return 0 }
	last := func(n int) int { return n - 1 }
	h, err := NewHosts("peer.test", "a", "b", "c")
	if err != nil {
		t.Fatal(err)
	}
	if i := h.choose(0, "a", first); i != 1 {
		t.Errorf("after a failed: %d, want b", i)
	}
	if i := h.choose(0, "elsewhere", last); i != 2 {
		t.Errorf("after a host that is not in the list: %d, want c", i)
	}
	h.learn(0, 0, false)
	h.learn(time.Millisecond, 0, false) // under way when it was left out: not a second one
	if i := h.choose(hostPause-1, "", first); i != 1 {
		t.Errorf("a is chosen before its pause is over")
	}
	if i := h.choose(hostPause, "", first); i != 0 {
		t.Errorf("a is not tried after its pause")
	}
	if i := h.choose(hostPause, "", first); i != 1 {
		t.Errorf("a second one goes to a before the first is back")
	}
	h.learn(hostPause+10*time.Millisecond, 0, false)
	if i := h.choose(2*hostPause+time.Second, "", first); i != 1 {
		t.Errorf("the second pause is not twice as long")
	}
	if i := h.choose(3*hostPause+10*time.Millisecond, "", first); i != 0 {
		t.Errorf("a is not tried after its second pause")
	}
	// Nobody reports: another trial after the pause.
	if i := h.choose(5*hostPause+20*time.Millisecond, "", first); i != 0 {
		t.Errorf("a is lost, as nobody reported")
	}
	h.learn(5*hostPause+30*time.Millisecond, 0, true)
	if i := h.choose(5*hostPause+30*time.Millisecond, "", first); i != 0 {
		t.Errorf("a is not back after it succeeded")
	}
	// Two of three: everybody is in.
	h.learn(time.Minute, 0, false)
	h.learn(time.Minute, 1, false)
	if i := h.choose(time.Minute, "c", first); i != 0 {
		t.Errorf("with most of the list out: %d, want any", i)
	}
	for fails, want := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 6: maxHostPause, 1e9: maxHostPause} {
		if got := pause(fails); got != want {
			t.Errorf("pause(%d) = %v, want %v", fails, got, want)
		}
	}
	one, err := NewHosts("peer.test", "only")
	if err != nil {
		t.Fatal(err)
	}
	one.learn(0, 0, false)
	if i := one.choose(0, "only", first); i != 0 {
		t.Error("the only host is not chosen")
	}
	out := newRequest(t, t.Context(), "GET", "http://other.test/", nil)
	if done := one.Pick(out, ""); done != nil || out.URL.Host != "other.test" {
		t.Errorf("a request to another name went to %s", out.URL.Host)
	}
}

func TestNewHostsSaysWhatIsWrong(t *testing.T) {
	_, err := NewHosts("http://a", "ok:80", "", "a/b", "ok:80", "user@host", ":80", "a:x")
	want := []string{"NewHosts.name", "hosts[1]", "hosts[2]", "hosts[3]", "hosts[4]", "hosts[5]", "hosts[6]"}
	for _, field := range want {
		if err == nil || !strings.Contains(err.Error(), field+" =") {
			t.Errorf("%v\ndoes not name %s", err, field)
		}
	}
	if n := strings.Count(fmt.Sprint(err), "\n") + 1; n != len(want) {
		t.Errorf("%d complaints, want %d: %v", n, len(want), err)
	}
	if _, err := NewHosts("a"); err == nil || !strings.Contains(err.Error(), "must not be empty") {
		t.Errorf("no hosts: %v", err)
	}
	if _, err := NewHosts("a", "[::1]:80", "b", "127.0.0.1:1"); err != nil {
		t.Error(err)
	}
}

// TestS33_ElsewhereIsTheAttemptsOwn: the caller's request stays as it was, its
// name is what the peer is called, and what the answer and a redirect see.
func TestS33_ElsewhereIsTheAttemptsOwn(t *testing.T) {
	type asked struct{ host, header, failed string }
	var got []asked
	var ended []bool
	n := 0
	base := baseFunc(func(r *http.Request) (*http.Response, error) {
		n++
		switch n {
		case 1:
			return stormAnswer(r, http.StatusServiceUnavailable), nil
		case 2:
			resp := stormAnswer(r, http.StatusTemporaryRedirect)
			resp.Header.Set("Location", "/next")
			return resp, nil
		}
		if r.Header.Get(HeaderDeadline) == "" {
			t.Error("the redirect's hop counts as foreign")
		}
		return stormAnswer(r, http.StatusOK), nil
	})
	var hosts []string
	tr := stormTransport(t, Config{
		Timeout: time.Minute,
		Backoff: Backoff{Base: time.Nanosecond, Max: time.Nanosecond},
		Elsewhere: func(out *http.Request, failed string) func(bool) {
			got = append(got, asked{out.URL.Host, out.Host, failed})
			out.URL.Host = "h" + strconv.Itoa(len(got))
			out.URL.Path = "/moved"
			return func(ok bool) { ended = append(ended, ok) }
		},
		Hook: func(_ context.Context, e Event) {
			if e.Kind == EventAttemptDone {
				hosts = append(hosts, e.Host)
			}
		},
	}, base, 1)
	req := newRequest(t, t.Context(), "PUT", "http://peer.test/path", strings.NewReader("body"))
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if want := []asked{{"peer.test", "peer.test", ""}, {"peer.test", "peer.test", "h1"}, {"peer.test", "", ""}}; len(got) != 3 || got[0] != want[0] || got[1] != want[1] || got[2].failed != "" {
		t.Errorf("asked %+v, want %+v", got, want)
	}
	if fmt.Sprint(ended) != "[false true true]" {
		t.Errorf("the attempts ended %v", ended)
	}
	if fmt.Sprint(hosts) != "[h1 h2 h3]" {
		t.Errorf("the events have the hosts %v", hosts)
	}
	if req.URL.String() != "http://peer.test/path" || req.Host != "peer.test" {
		t.Errorf("the caller's request is now for %s, %s", req.URL, req.Host)
	}
	if resp.Request.URL.String() != "http://peer.test/next" {
		t.Errorf("the answer is to %s", resp.Request.URL)
	}
}

// TestS33_NoReportWithoutAFault: a caller that leaves says nothing about a host.
func TestS33_NoReportWithoutAFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended []bool
		tr := stormTransport(t, Config{Elsewhere: func(*http.Request, string) func(bool) {
			return func(ok bool) { ended = append(ended, ok) }
		}}, hang, 1)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if _, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil)); err == nil {
			t.Error("no error")
		}
		if len(ended) != 0 {
			t.Errorf("reported %v after the caller left", ended)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test/", nil)); err == nil {
			t.Error("no error")
		}
		if fmt.Sprint(ended) != "[false]" {
			t.Errorf("reported %v after the deadline", ended)
		}
	})
}

// TestS33_ElsewhereTakesTheURLAway: whatever the function does, RoundTrip ends
// with an error of the base.
func TestS33_ElsewhereTakesTheURLAway(t *testing.T) {
	tr := newTestTransport(t, Config{Elsewhere: func(out *http.Request, _ string) func(bool) {
		out.URL = nil
		return nil
	}})
	closed := 0
	req := newRequest(t, t.Context(), "PUT", "http://peer.test/", nil)
	req.Body = closeFunc{strings.NewReader("x"), func() { closed++ }}
	if _, err := tr.RoundTrip(req); err == nil || closed != 1 {
		t.Errorf("%v, body closed %d times", err, closed)
	}
}

// TestS33_FreshConn: one name, two hosts, and the connection decides which, as
// behind the address of a Kubernetes Service. A retry on the connection that the
// failure came over meets the same host.
func TestS33_FreshConn(t *testing.T) {
	serve := func(status int) *httptest.Server {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.WriteHeader(status)
		}))
		t.Cleanup(s.Close)
		return s
	}
	bad, good := serve(http.StatusServiceUnavailable), serve(http.StatusOK)
	for _, fresh := range []bool{false, true} {
		dials := 0
		var mu sync.Mutex
		base := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			mu.Lock()
			dials++
			to := good
			if dials == 1 {
				to = bad // and it is kept alive
			}
			mu.Unlock()
			return new(net.Dialer).DialContext(ctx, network, to.Listener.Addr().String())
		}}
		defer base.CloseIdleConnections()
		tr := newTestTransport(t, Config{
			Base: base, FreshConn: fresh, MaxAttempts: 2,
			Budget: BudgetConfig{MinPerSecond: 1000}, Backoff: Backoff{Base: time.Millisecond},
		})
		want := 503
		if fresh {
			want = 200
		}
		for i := range 5 {
			resp, err := tr.RoundTrip(newRequest(t, t.Context(), "PUT", "http://service.test/", strings.NewReader("body")))
			if err != nil {
				t.Fatal(err)
			}
			readAll(t, resp)
			if resp.StatusCode != want {
				t.Errorf("FreshConn %v, request %d: %d, want %d", fresh, i, resp.StatusCode, want)
			}
		}
		if fresh && dials != 6 || !fresh && dials != 1 {
			t.Errorf("FreshConn %v: %d connections for five requests and their retries", fresh, dials)
		}
	}
	if _, err := NewTransport(Config{Base: hang, FreshConn: true}); err == nil || !strings.Contains(err.Error(), "Config.FreshConn") {
		t.Errorf("FreshConn with a base that is not an *http.Transport: %v", err)
	}
	if _, err := NewTransport(Config{FreshConn: true}); err != nil {
		t.Errorf("FreshConn without a base: %v", err)
	}
}
