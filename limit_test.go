package stint

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// idle checks that nobody has a slot or waits for one.
func (l *limiter) idle(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inside != 0 || l.queues[0].Len() != 0 || l.queues[1].Len() != 0 {
		t.Errorf("%d have a slot, %d and %d wait, want none", l.inside, l.queues[0].Len(), l.queues[1].Len())
	}
}

// A limitCall is one request of a test, in a bubble.
type limitCall struct {
	w    *httptest.ResponseRecorder
	took time.Duration
	done chan bool
}

// call sends a request in the background; pairs are header fields.
func limitDo(ctx context.Context, h http.Handler, pairs ...string) *limitCall {
	c := &limitCall{w: httptest.NewRecorder(), done: make(chan bool)}
	start := time.Now()
	go func() {
		defer close(c.done)
		defer func() { recover() }()
		h.ServeHTTP(c.w, mwRequest(pairs...).WithContext(ctx))
		c.took = time.Since(start)
	}()
	synctest.Wait()
	return c
}

func (c *limitCall) check(t *testing.T, what string, status int, took time.Duration) {
	t.Helper()
	<-c.done
	if c.w.Code != status || c.took != took {
		t.Errorf("%s: %d after %v, want %d after %v", what, c.w.Code, c.took, status, took)
	}
}

// sleeping is a handler that takes so long.
func sleeping(d *time.Duration) http.Handler {
	return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(*d) })
}

// learnt lets a handler be seen 30 times, after which what it takes is known.
func learnt(t *testing.T, h http.Handler) {
	t.Helper()
	for range 30 {
		<-limitDo(t.Context(), h).done
	}
}

// TestS34_LimitBounds: so many at once, so many wait, in the order in which they
// came; the rest is refused at once.
func TestS34_LimitBounds(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		config LimitConfig
		begun  []time.Duration // of five requests at once, those that are served
	}{
		{"default queue", LimitConfig{MaxConcurrent: 1}, []time.Duration{100, 200}},
		{"longer queue", LimitConfig{MaxConcurrent: 1, MaxQueue: 2}, []time.Duration{100, 200, 300}},
		{"no queue", LimitConfig{MaxConcurrent: 2, MaxQueue: -1}, []time.Duration{100, 100}},
		{"two at once", LimitConfig{MaxConcurrent: 2}, []time.Duration{100, 100, 200, 200}},
		{"no limit", LimitConfig{}, []time.Duration{100, 100, 100, 100, 100}},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := 100 * time.Millisecond
			metrics, events := mustMetrics(t, MetricsConfig{}), new(mwEvents)
			m, err := NewMiddleware(MiddlewareConfig{Service: "s", Limit: test.config, Metrics: metrics, Hook: events.hook})
			if err != nil {
				t.Fatal(err)
			}
			h := m.Handler(sleeping(&d))
			var calls []*limitCall
			for range 5 {
				calls = append(calls, limitDo(t.Context(), h))
			}
			for i, c := range calls {
				what := fmt.Sprint(test.name, ", request ", i)
				if i < len(test.begun) {
					c.check(t, what, 200, test.begun[i]*time.Millisecond)
					continue
				}
				c.check(t, what, 503, 0)
				checkShed(t, c.w.Result(), c.w.Body.String(), "true")
			}
			refused := 5 - len(test.begun)
			s, _ := scrape(t, metrics)
			s.check(t, `stint_refused_total{reason="limit",service="s"}`, float64(refused))
			s.check(t, `stint_refused_total{reason="queue",service="s"}`, 0)
			if got := strings.Count(events.String(), "shed"); got != refused {
				t.Errorf("%s: %d events, want %d: %v", test.name, got, refused, events)
			}
			if e := events.get(EventShed); refused > 0 && (e.Reason != ReasonLimit || e.Service != "s") {
				t.Errorf("%s: %+v", test.name, e)
			}
			if m.limit != nil {
				m.limit.idle(t)
			}
		})
	}
}

// TestS34_LimitLooksAtTheTime: what cannot end in time is refused at once, before
// it waits. While nobody is served, it is tried.
func TestS34_LimitLooksAtTheTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := 100 * time.Millisecond
		metrics, events := mustMetrics(t, MetricsConfig{}), new(mwEvents)
		m, err := NewMiddleware(MiddlewareConfig{Service: "s", Metrics: metrics, Hook: events.hook, Limit: LimitConfig{MaxConcurrent: 2, MaxQueue: 10}})
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handler(sleeping(&d))
		within := func(d time.Duration) *limitCall { return limitDo(t.Context(), h, HeaderDeadline, mwIn(d)) }

		// As long as nothing is known, everything is tried.
		within(50*time.Millisecond).check(t, "unknown", 504, 100*time.Millisecond)
		learnt(t, h)
		within(50*time.Millisecond).check(t, "tried", 504, 100*time.Millisecond)

		a := limitDo(t.Context(), h)
		within(50*time.Millisecond).check(t, "too little for the handler", 503, 0)
		b := within(150 * time.Millisecond)
		within(140*time.Millisecond).check(t, "too little for the queue", 503, 0)
		e := events.list[len(events.list)-2]
		if e.Kind != EventShed || e.Reason != ReasonQueue || e.Wait < 150*time.Millisecond || e.Wait > 160*time.Millisecond || e.Took != 0 || e.Remaining != 140*time.Millisecond {
			t.Errorf("got %+v", e)
		}
		c := within(210 * time.Millisecond)
		within(190*time.Millisecond).check(t, "one more in front", 503, 0)
		unhurried := limitDo(t.Context(), h)
		a.check(t, "the first", 200, 100*time.Millisecond)
		b.check(t, "the second", 200, 100*time.Millisecond)
		c.check(t, "from the queue", 200, 200*time.Millisecond)
		unhurried.check(t, "without a deadline", 200, 200*time.Millisecond)
		s, _ := scrape(t, metrics)
		s.check(t, `stint_refused_total{reason="queue",service="s"}`, 3)
		s.check(t, `stint_refused_total{reason="limit",service="s"}`, 0)
		s.check(t, `stint_refused_total{reason="expired",service="s"}`, 0)
		m.limit.idle(t)
	})
}

// TestS34_LimitDrops those from the queue who have no use for a slot any more.
func TestS34_LimitDrops(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := 10 * time.Millisecond
		metrics, events := mustMetrics(t, MetricsConfig{}), new(mwEvents)
		m, err := NewMiddleware(MiddlewareConfig{Service: "s", Metrics: metrics, Hook: events.hook, Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: 10}})
		if err != nil {
			t.Fatal(err)
		}
		ran := 0
		h := m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { ran++; time.Sleep(d) }))
		counts := func(reason string) float64 {
			s, _ := scrape(t, metrics)
			return s[fmt.Sprintf("stint_refused_total{reason=%q,service=\"s\"}", reason)]
		}
		// Nothing is known yet: the deadline alone counts.
		d = 5 * time.Second
		first := limitDo(t.Context(), h)
		late := limitDo(t.Context(), h, HeaderDeadline, mwIn(500*time.Millisecond))
		late.check(t, "its deadline passes", 504, 500*time.Millisecond)
		if late.w.Header().Get(HeaderDeadlineExpired) != "1" || late.w.Header().Get(HeaderShouldRetry) != "false" {
			t.Errorf("header %v", late.w.Header())
		}
		if e := events.get(EventExpired); e.Took != 500*time.Millisecond || counts("expired") != 1 {
			t.Errorf("%+v, counted %v", e, counts("expired"))
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(300*time.Millisecond, cancel)
		left := limitDo(ctx, h)
		<-left.done
		if left.took != 300*time.Millisecond {
			t.Errorf("a client that leaves after 300 ms is let go after %v", left.took)
		}
		if e := events.list[len(events.list)-1]; e.Kind != EventServed || e.Reason != ReasonCanceled || e.Status != 0 {
			t.Errorf("got %+v", e)
		}
		outer, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		limitDo(outer, h).check(t, "a layer's deadline passes", 504, 200*time.Millisecond)
		limitDo(t.Context(), h).check(t, "it waits for MaxWait", 503, time.Second)
		if counts("queue") != 1 || counts("expired") != 2 {
			t.Errorf("queue %v, expired %v", counts("queue"), counts("expired"))
		}
		m.limit.mu.Lock()
		if n := m.limit.queues[0].Len(); n != 0 || m.limit.inside != 1 {
			t.Errorf("%d wait, %d have a slot", n, m.limit.inside)
		}
		m.limit.mu.Unlock()
		<-first.done
		if ran != 1 {
			t.Errorf("the handler ran %d times, want once: what was dropped is not begun", ran)
		}

		// The handler turns out to be slower than expected. From when too little
		// time is left for it, there is no use in waiting.
		d = 10 * time.Millisecond
		learnt(t, h)
		d = time.Second
		ran = 0
		first = limitDo(t.Context(), h)
		limitDo(t.Context(), h, HeaderDeadline, mwIn(100*time.Millisecond)).check(t, "too little is left", 503, 100*time.Millisecond-m.limit.usual(time.Now()))
		<-first.done
		if ran != 1 {
			t.Errorf("the handler ran %d times, want once", ran)
		}
		m.limit.idle(t)
	})
}

// TestS34_LimitMaxWait: who would have to wait for longer is refused at once.
func TestS34_LimitMaxWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := 100 * time.Millisecond
		m, err := NewMiddleware(MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: 10, MaxWait: 250 * time.Millisecond}})
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handler(sleeping(&d))
		learnt(t, h)
		a, b, c, e := limitDo(t.Context(), h), limitDo(t.Context(), h), limitDo(t.Context(), h), limitDo(t.Context(), h)
		e.check(t, "the fourth", 503, 0)
		a.check(t, "the first", 200, 100*time.Millisecond)
		b.check(t, "the second", 200, 200*time.Millisecond)
		c.check(t, "the third", 200, 300*time.Millisecond)
	})
}

// TestS34_LimitCutOff: a handler that was cut off would have taken longer than it
// took, whoever cut it off.
func TestS34_LimitCutOff(t *testing.T) {
	t.Parallel()
	for _, deadline := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m, err := NewMiddleware(MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 1}})
			if err != nil {
				t.Fatal(err)
			}
			h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
			for range 10 {
				ctx, cancel := context.WithCancel(t.Context())
				if deadline {
					<-limitDo(ctx, h, HeaderDeadline, mwIn(50*time.Millisecond)).done
				} else {
					time.AfterFunc(50*time.Millisecond, cancel)
					<-limitDo(ctx, h).done
				}
				cancel()
			}
			time.Sleep(time.Second)
			if got := m.limit.usual(time.Now()); got < 100*time.Millisecond || got > 107*time.Millisecond {
				t.Errorf("a handler that is cut off after 50 ms, deadline %v, is taken to take %v, want 100 ms", deadline, got)
			}
		})
	}
}

// TestS34_LimitLooksAgain at the time when a slot is free: the handler may have
// become slower in the meantime.
func TestS34_LimitLooksAgain(t *testing.T) {
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	for _, slower := range []bool{false, true} {
		l := newLimiter(LimitConfig{MaxConcurrent: 1, MaxQueue: 5}, false, start)
		if w, refused, _ := l.ask(at(0), time.Time{}, false); w != nil || refused != "" {
			t.Fatalf("the first: %v %q", w, refused)
		}
		hurried, _, _ := l.ask(at(0), at(500*time.Millisecond), false)
		patient, _, _ := l.ask(at(0), time.Time{}, false)
		if slower {
			for range 10 {
				l.took.record(at(200*time.Millisecond), 400*time.Millisecond)
			}
		}
		l.leave(at(200*time.Millisecond), -1)
		verdict := func(w *waiter) Reason {
			select {
			case v := <-w.verdict:
				return v
			default:
				return "waits"
			}
		}
		want := [2]Reason{"", "waits"}
		if slower {
			want = [2]Reason{ReasonQueue, ""}
		}
		if got := [2]Reason{verdict(hurried), verdict(patient)}; got != want {
			t.Errorf("slower %v: verdicts %q, want %q", slower, got, want)
		}
	}
}

// TestS34_LimitComesBack: a handler that was too slow for everybody is found out
// to be fast again, though what is known of it says no.
func TestS34_LimitComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const slow, fast, lasts = 20 * time.Second, 50 * time.Second, 80 * time.Second
		tl := &timeline{name: "slow", phases: []phase{{lasts: slow}, {lasts: fast - slow, takes: 2 * time.Second}}}
		log := fleet{
			clients: 1, rate: 100, lasts: lasts, handler: tl, limit: time.Second,
			client: Config{MaxAttempts: 1}, server: MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 20}},
		}.run(t, 1)
		if share, _ := log.succeeded(0, slow); share != 1 {
			t.Errorf("%.3f succeed before, want all", share)
		}
		begun := between(log.sent, slow+15*time.Second, fast)
		t.Logf("%d of %d requests a second are tried while it is slow; recovered %v after", begun/15, 100, log.recovered(fast)-fast)
		// A tenth of 20, each of which is cut off after a second.
		if begun > 15*3 || begun < 15 {
			t.Errorf("%d are begun in 15 s, want those that are tried, about 2 a second", begun)
		}
		if at := log.recovered(fast); at > fast+12*time.Second {
			t.Errorf("recovered %v after it was fast again, want within the window", at-fast)
		}
	})
}

// TestS34_LimitRetriesLast: retries wait behind first attempts, and give way.
func TestS34_LimitRetriesLast(t *testing.T) {
	t.Parallel()
	for _, last := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			d := 100 * time.Millisecond
			m, err := NewMiddleware(MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: 3, RetriesLast: last}})
			if err != nil {
				t.Fatal(err)
			}
			h := m.Handler(sleeping(&d))
			first := func() *limitCall { return limitDo(t.Context(), h) }
			retry := func() *limitCall { return limitDo(t.Context(), h, HeaderRetryCount, "1") }
			busy, r1, r2, f1, f2, r3, f3, f4 := first(), retry(), retry(), first(), first(), retry(), first(), first()
			const ms = time.Millisecond
			busy.check(t, "busy", 200, 100*ms)
			if last {
				f1.check(t, "f1", 200, 200*ms)
				f2.check(t, "f2", 200, 300*ms) // in the place of r2
				f3.check(t, "f3", 200, 400*ms) // in the place of r1
				for _, c := range []*limitCall{r1, r2, r3, f4} {
					c.check(t, "gives way", 503, 0)
				}
				checkShed(t, r1.w.Result(), r1.w.Body.String(), "true")
			} else {
				r1.check(t, "r1", 200, 200*ms)
				r2.check(t, "r2", 200, 300*ms)
				f1.check(t, "f1", 200, 400*ms)
				for _, c := range []*limitCall{f2, r3, f3, f4} {
					c.check(t, "comes later", 503, 0)
				}
			}
			m.limit.idle(t)

			// A retry that waits is served once no first attempt does.
			busy, r1, f1 = first(), retry(), first()
			busy.check(t, "busy", 200, 100*ms)
			if last {
				f1.check(t, "f1", 200, 200*ms)
				r1.check(t, "r1", 200, 300*ms)
			} else {
				r1.check(t, "r1", 200, 200*ms)
				f1.check(t, "f1", 200, 300*ms)
			}
			m.limit.idle(t)
		})
	}
}

// TestS34_LimitReportOnly counts what would be refused, and serves it at once.
func TestS34_LimitReportOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := 100 * time.Millisecond
		metrics, events := mustMetrics(t, MetricsConfig{}), new(mwEvents)
		m, err := NewMiddleware(MiddlewareConfig{Service: "s", Metrics: metrics, Hook: events.hook, ReportOnly: true, Limit: LimitConfig{MaxConcurrent: 2}})
		if err != nil {
			t.Fatal(err)
		}
		h := m.Handler(sleeping(&d))
		learnt(t, h)
		var calls []*limitCall
		for range 5 { // two are served, two would wait
			calls = append(calls, limitDo(t.Context(), h))
		}
		calls = append(calls, limitDo(t.Context(), h, HeaderDeadline, mwIn(150*time.Millisecond)), limitDo(t.Context(), h, HeaderDeadline, "1"))
		for i, c := range calls {
			c.check(t, fmt.Sprint("request ", i), 200, 100*time.Millisecond)
			if len(c.w.Header()) != 0 {
				t.Errorf("request %d: %v", i, c.w.Header())
			}
		}
		s, _ := scrape(t, metrics)
		s.check(t, `stint_refused_total{reason="limit",service="s"}`, 1)
		s.check(t, `stint_refused_total{reason="queue",service="s"}`, 1)
		if got := strings.Count(events.String(), "shed"); got != 2 {
			t.Errorf("%d events, want 2: %v", got, events)
		}
		m.limit.idle(t)
	})
}

// TestS34_LimitIsGivenBack however a handler ends.
func TestS34_LimitIsGivenBack(t *testing.T) {
	hijack := func(then func()) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			conn, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
			rw.Flush()
			then()
		})
	}
	for _, hard := range []bool{false, true} {
		for name, next := range map[string]http.Handler{
			"returns":            http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
			"panics":             http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("mine") }),
			"aborts":             http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }),
			"ends its goroutine": http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runtime.Goexit() }),
			"hijacks":            hijack(func() {}),
			"hijacks, panics":    hijack(func() { panic("mine") }),
		} {
			t.Run(fmt.Sprint(name, " ", hard), func(t *testing.T) {
				m := mwNew(t, MiddlewareConfig{HardStop: hard, Timeout: time.Minute, Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: -1}})
				srv, client := mwServe(t, 1, m.Handler(next))
				for range 3 { // the second would be refused
					req, _ := http.NewRequestWithContext(t.Context(), "POST", srv.URL, strings.NewReader("body"))
					if resp, err := client.Do(req); err == nil {
						resp.Body.Close()
						if resp.StatusCode == http.StatusServiceUnavailable {
							t.Errorf("got %s", resp.Status)
						}
					}
					awaitIdle(t, m.limit)
				}
			})
		}
	}
	// An upgraded connection does not hold its slot.
	t.Run("upgraded", func(t *testing.T) {
		held := make(chan bool)
		m := mwNew(t, MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: -1}})
		srv, _ := mwServe(t, 1, m.Handler(hijack(func() { <-held })))
		const upgrade = "GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
		for range 3 {
			if _, resp := mwRaw(t, srv.Listener.Addr().String(), upgrade); resp.StatusCode != 101 {
				t.Errorf("got %s", resp.Status)
			}
		}
		close(held)
		awaitIdle(t, m.limit)
		took := m.limit.took // uncached
		if _, samples := took.compute(took.number(took.elapsed(time.Now())), 0.5); samples != 0 {
			t.Errorf("%d handshakes are taken for requests", samples)
		}
	})
	// Nor does a tunnel, once it has been answered.
	t.Run("connected", func(t *testing.T) {
		inside := -1
		m := mwNew(t, MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: -1}})
		h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusOK)
			inside = m.limit.inside
		}))
		r := mwRequest()
		r.Method = http.MethodConnect
		h.ServeHTTP(httptest.NewRecorder(), r)
		if inside != 0 {
			t.Errorf("%d have a slot while the tunnel is up, want none", inside)
		}
		m.limit.idle(t)
	})
}

func awaitIdle(t *testing.T, l *limiter) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		l.mu.Lock()
		inside := l.inside
		l.mu.Unlock()
		if inside == 0 {
			break
		}
	}
	l.idle(t)
}

// TestS34_LimitHardStop: a handler that is cut off goes on to hold its slot. That
// bounds how many of them there are.
func TestS34_LimitHardStop(t *testing.T) {
	release := make(chan bool)
	var running atomic.Int32
	m := mwNew(t, MiddlewareConfig{HardStop: true, Limit: LimitConfig{MaxConcurrent: 2, MaxQueue: -1}})
	srv, client := mwServe(t, 1, m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		running.Add(1)
		<-release
	})))
	for i := range 5 {
		resp, body := mwDo(t, client, "GET", srv.URL, nil, HeaderDeadline, mwIn(50*time.Millisecond))
		if i < 2 {
			mwCheckExpired(t, resp)
		} else {
			checkShed(t, resp, body, "true")
		}
	}
	if n := running.Load(); n != 2 {
		t.Errorf("%d handlers run, want 2", n)
	}
	close(release)
	awaitIdle(t, m.limit)
	if resp, _ := mwDo(t, client, "GET", srv.URL, nil); resp.StatusCode != 200 {
		t.Errorf("afterwards: %s", resp.Status)
	}
}

// TestS34_LimitRefusalOverSockets: answers before the body has been read arrive,
// on both protocols, and what is exempt passes.
func TestS34_LimitRefusalOverSockets(t *testing.T) {
	mwEachProtocol(t, func(t *testing.T, major int) {
		release, begun := make(chan bool), make(chan bool, 10)
		m := mwNew(t, MiddlewareConfig{
			Exempt: func(r *http.Request) bool { return r.URL.Path == "/health" },
			Limit:  LimitConfig{MaxConcurrent: 1, MaxQueue: -1, Exempt: func(r *http.Request) bool { return r.URL.Path == "/events" }},
		})
		srv, client := mwServe(t, major, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/" {
				return
			}
			begun <- true
			<-release
		})))
		var wg sync.WaitGroup
		wg.Go(func() { mwDo(t, client, "GET", srv.URL, nil) })
		<-begun
		for _, body := range []string{"", "short", strings.Repeat("x", 1<<20)} {
			start := time.Now()
			resp, text := mwDo(t, client, "POST", srv.URL, strings.NewReader(body))
			checkShed(t, resp, text, "true")
			if took := time.Since(start); took > 3*time.Second {
				t.Errorf("%d bytes: refused after %v", len(body), took)
			}
		}
		for _, path := range []string{"/health", "/events"} {
			if resp, _ := mwDo(t, client, "GET", srv.URL+path, nil); resp.StatusCode != 200 {
				t.Errorf("%s: %s", path, resp.Status)
			}
		}
		close(release)
		wg.Wait()
		awaitIdle(t, m.limit)
	})
}

// TestS34_LimitUnderRace has many come, wait, leave and be served at once. No
// more than allowed are inside, and no slot is lost.
func TestS34_LimitUnderRace(t *testing.T) {
	const most, most2 = 4, 8
	var inside, worst, ran atomic.Int32
	m := mwNew(t, MiddlewareConfig{Limit: LimitConfig{MaxConcurrent: most, MaxQueue: most2, RetriesLast: true, MaxWait: 5 * time.Millisecond}})
	h := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		n := inside.Add(1)
		defer inside.Add(-1)
		for {
			w := worst.Load()
			if n <= w || worst.CompareAndSwap(w, n) {
				break
			}
		}
		ran.Add(1)
		if r.Header.Get("Panic") != "" {
			panic(http.ErrAbortHandler)
		}
		time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
	}))
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 100 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(3000))*time.Microsecond)
				r := mwRequest().WithContext(ctx)
				if rand.IntN(2) == 0 {
					r.Header.Set(HeaderRetryCount, "1")
				}
				if rand.IntN(4) == 0 {
					r.Header.Set("Panic", "1")
				}
				func() {
					defer func() { recover() }()
					h.ServeHTTP(httptest.NewRecorder(), r)
				}()
				cancel()
			}
		})
	}
	wg.Wait()
	m.limit.idle(t)
	t.Logf("%d ran, up to %d at once", ran.Load(), worst.Load())
	if worst.Load() > most || ran.Load() < 100 {
		t.Errorf("%d ran, up to %d at once, want at most %d", ran.Load(), worst.Load(), most)
	}
}

// TestS34_LimitHookPanics: a hook that panics does not take a slot along.
func TestS34_LimitHookPanics(t *testing.T) {
	m := mwNew(t, MiddlewareConfig{ReportOnly: true, Limit: LimitConfig{MaxConcurrent: 1, MaxQueue: -1}, Hook: func(_ context.Context, e Event) {
		if e.Kind == EventShed {
			panic("mine")
		}
	}})
	var h http.Handler
	depth := 0
	h = m.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if depth++; depth < 3 {
			defer func() { recover() }()
			h.ServeHTTP(httptest.NewRecorder(), mwRequest())
		}
	}))
	h.ServeHTTP(httptest.NewRecorder(), mwRequest())
	m.limit.idle(t)
}

func TestLimitConfig(t *testing.T) {
	for _, test := range []struct {
		config LimitConfig
		want   string // the field that is wrong
	}{
		{LimitConfig{}, ""},
		{LimitConfig{MaxConcurrent: 1, MaxQueue: -5, MaxWait: time.Hour}, ""},
		{LimitConfig{MaxConcurrent: -1}, "MaxConcurrent"},
		{LimitConfig{MaxConcurrent: 1e6 + 1}, "MaxConcurrent"},
		{LimitConfig{MaxConcurrent: 1, MaxQueue: 1e6 + 1}, "MaxQueue"},
		{LimitConfig{MaxConcurrent: 1, MaxWait: -1}, "MaxWait"},
		{LimitConfig{MaxConcurrent: 1, MaxWait: time.Hour + 1}, "MaxWait"},
		{LimitConfig{MaxQueue: 1}, "MaxConcurrent"},
		{LimitConfig{RetriesLast: true}, "MaxConcurrent"},
		{LimitConfig{Exempt: func(*http.Request) bool { return true }}, "MaxConcurrent"},
	} {
		_, err := NewMiddleware(MiddlewareConfig{Limit: test.config})
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.HasPrefix(err.Error(), "stint: MiddlewareConfig.Limit."+test.want+" = ")) {
			t.Errorf("%+v: got %v, want %q", test.config, err, test.want)
		}
	}
}
