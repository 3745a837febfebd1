package stint

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const browserAccept = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"

func debugGet(t testing.TB, h http.Handler, method, accept string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(method, "/debug/stint", nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// debugJSON returns the state as a program would read it.
func debugJSON(t testing.TB, h http.Handler) (s debugState) {
	t.Helper()
	w := debugGet(t, h, "GET", "")
	dec := json.NewDecoder(w.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s); err != nil || w.Code != 200 {
		t.Fatalf("status %d, %v", w.Code, err)
	}
	return s
}

// debugText returns the page as it is read: its text, one line for each element
// that is a line on the page. It fails where the page is not well-formed or has
// anything but text in it.
func debugText(t testing.TB, h http.Handler) (text string, elements map[string]int) {
	t.Helper()
	w := debugGet(t, h, "GET", browserAccept)
	if got := w.Header().Get("Content-Type"); got != "text/html; charset=utf-8" || w.Code != 200 {
		t.Fatalf("status %d, Content-Type %q", w.Code, got)
	}
	elements = make(map[string]int)
	var b strings.Builder
	dec := xml.NewDecoder(w.Body)
	dec.Entity = xml.HTMLEntity
	style := 0
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("the page does not parse: %v", err)
		}
		switch x := token.(type) {
		case xml.StartElement:
			elements[x.Name.Local]++
			if x.Name.Local == "style" {
				style++
			}
			for _, a := range x.Attr {
				switch name := strings.ToLower(a.Name.Local); {
				case strings.HasPrefix(name, "on"), name == "src", name == "href", name == "action":
					t.Errorf("<%s %s=%q>", x.Name.Local, a.Name.Local, a.Value)
				}
			}
		case xml.EndElement:
			switch x.Name.Local {
			case "style":
				style--
			case "title", "div", "tr", "p", "h1", "h2", "h3", "summary", "caption":
				b.WriteString("\n")
			case "dt", "dd", "td", "th", "span":
				b.WriteString(" ")
			}
		case xml.CharData:
			if style == 0 {
				b.WriteString(strings.ReplaceAll(string(x), "\n", " "))
			}
		}
	}
	for _, name := range []string{"script", "img", "link", "iframe", "form", "a"} {
		if elements[name] > 0 {
			t.Errorf("the page has a <%s>", name)
		}
	}
	var lines []string
	for line := range strings.Lines(b.String()) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			lines = append(lines, line)
		}
	}
	return "\n" + strings.Join(lines, "\n") + "\n", elements
}

func debugContains(t testing.TB, text string, lines ...string) {
	t.Helper()
	for _, want := range lines {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in%s", want, text)
		}
	}
}

// TestDebug_Fault looks at a service whose peer is down, in virtual time: every
// number is known.
func TestDebug_Fault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		metrics := newTestMetrics(t)
		var down atomic.Bool
		base := baseFunc(func(r *http.Request) (*http.Response, error) {
			time.Sleep(20 * time.Millisecond)
			if down.Load() {
				return answer(503, "down"), nil
			}
			return answer(200, "up"), nil
		})
		tr := newTestTransport(t, Config{Base: base, Metrics: metrics, Budget: BudgetConfig{MaxWait: -1}})
		tr.jitter = func() float64 { return 0 }
		mw, err := NewMiddleware(MiddlewareConfig{Service: "orders", Metrics: metrics, Timeout: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		service := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			resp, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", "http://ledger.test/", nil))
			if err != nil {
				return
			}
			resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
		}))
		send := func(header ...string) {
			r := httptest.NewRequest("GET", "/", nil)
			for i := 0; i < len(header); i += 2 {
				r.Header.Set(header[i], header[i+1])
			}
			service.ServeHTTP(httptest.NewRecorder(), r)
		}
		h := DebugHandler(tr, mw)
		if s := debugJSON(t, h); len(s.Peers) != 0 || s.Server.Service != "orders" || s.Server.LastMinute.HeaderPresentRatio != 1 {
			t.Errorf("before any request: %+v", s)
		}
		text, _ := debugText(t, h)
		debugContains(t, text, "\nstint: orders\n", "\nNone yet.\n")

		every := time.NewTicker(100 * time.Millisecond)
		defer every.Stop()
		for range 120 { // 12 s of health
			<-every.C
			send(HeaderDeadline, mwIn(time.Second))
		}
		s := debugJSON(t, h)
		p := s.Peers[0]
		if p.Peer != "ledger.test:80" || p.Budget.Taken != 0 || p.Budget.Limit != 10 || p.Budget.Balance != 10 ||
			p.Budget.Requests != 100 || p.Budget.Successes != 100 || p.Budget.Spent || p.Refusals != 0 {
			t.Errorf("healthy: %+v", p)
		}
		text, _ = debugText(t, h)
		debugContains(t, text, "\nledger.test:80 0 %\n", "\nNothing refused.\n", "\nbalance 10\n", "\nnext turn free\n")

		down.Store(true)
		for range 80 { // 8 s of outage
			<-every.C
			send()
		}
		send(HeaderDeadline, "1")                       // too late
		send(HeaderDeadline, mwIn(10*time.Millisecond)) // too late while it runs
		time.Sleep(2 * time.Second)

		s = debugJSON(t, h)
		if s.V != 1 || s.NowMS != time.Now().UnixMilli() || s.PeersKnown != 1 || s.PeersLeftOut != 0 {
			t.Errorf("v %d, now %d, peers %d and %d", s.V, s.NowMS, s.PeersKnown, s.PeersLeftOut)
		}
		p = s.Peers[0]
		if b := p.Budget; !b.Spent || b.Utilisation != 1 || b.Balance != 0 || b.Limit != 3 || b.Taken < 3 ||
			b.Ratio != 0.1 || b.WindowMS != 10_000 || b.Successes > 10 || b.Requests < 80 || b.Requests > 100 {
			t.Errorf("budget: %+v", b)
		}
		if l := p.Latency; len(l) != 1 || l[0].P50MS < 20 || l[0].P50MS > 21.3 || l[0].P99MS < l[0].P50MS || l[0].Samples < 100 ||
			l[0].Attempts < 200 || l[0].CutOff != 0 {
			t.Errorf("latency: %+v", l)
		}
		retries := uint64(counter(t, metrics, "stint_client_retries_total"))
		if m := p.LastMinute; m == nil || m.Requests != 201 || m.Retries != retries || retries == 0 || m.Attempts != m.Requests+retries ||
			m.Amplification < 1 || m.Amplification > 1.1 {
			t.Errorf("last minute: %+v, %d retries", m, retries)
		}
		if p.Inflight != 0 || p.Held != 0 || p.IdleMS < 2000 || p.IdleMS > 2100 {
			t.Errorf("in flight %d, held %d, idle %v", p.Inflight, p.Held, p.IdleMS)
		}
		if got, want := p.Refusals, uint64(counter(t, metrics, "stint_refused_total", "peer", "ledger.test:80")); got != want || len(p.Refused) != ringSize {
			t.Errorf("%d refusals, of which %d are shown; the metrics say %d", got, len(p.Refused), want)
		}
		for i, r := range p.Refused {
			want := ReasonBudget
			if i == 0 {
				want = ReasonDeadline // the request with 10 ms
			}
			if r.Reason != want || r.Attempt < 1 || r.AtMS > s.NowMS-2000 || r.AtMS < s.NowMS-4000 || r.RemainingMS == nil {
				t.Errorf("refusal %d: %+v", i, r)
			} else if i > 0 && (r.AtMS > p.Refused[i-1].AtMS || *r.RemainingMS < 900 || r.NeedMS != 0) {
				t.Errorf("refusal %d: %+v, remaining %v ms, after %+v", i, r, *r.RemainingMS, p.Refused[i-1])
			}
		}
		x := s.Server
		if x.LastMinute.Requests != 202 || x.LastMinute.HeaderPresentRatio != 0.6 || x.Expired != 2 || x.ExpiredOnArrival != 1 || x.ReportOnly {
			t.Errorf("server: %+v, last minute %+v", x, x.LastMinute)
		}
		// 122 brought a deadline: 120 of a second, one of 10 ms, and one too late.
		if l := x.Remaining; l.Samples != 122 || l.P50MS < 940 || l.P50MS > 1000 || l.P1MS > 10 || l.P1MS < 9 {
			t.Errorf("time left on arrival: %+v", l)
		}
		if e := x.RecentExpired; len(e) != 2 || e[0].OnArrival || e[0].TookMS != 20 || e[0].LateMS != 10 ||
			!e[1].OnArrival || e[1].TookMS != 0 || e[1].LateMS < 9e11 || e[1].AtMS < s.NowMS-2100 || e[1].AtMS > s.NowMS-2000 {
			t.Errorf("recent expired: %+v", e)
		}

		text, elements := debugText(t, h)
		debugContains(t, text,
			"\nin the last minute 202\n", "\nwith a deadline header 60 %\n", "\ntime left on arrival, p50 973 ms\n", "\nand the shortest 1 % 10.0 ms\n", "\ntoo late on arrival 1\n", "\nout of time while served 1\n",
			"\nthe last 2 that ran out of time\n",
			"\nledger.test:80 100 % budget spent refused (deadline) 2.0 s ago\n",
			"\nbalance 0\n", fmt.Sprintf("\nattempts %d\n", p.LastMinute.Attempts),
			fmt.Sprintf("\nThe last 16 of %d refused: no (further) attempt was made\n", p.Refusals),
			" budget the window's retries are spent 1 ", " deadline time ran out 1 -10 ms\n", " on arrival 0 ms 10957 d\n",
		)
		if elements["tr"] != 1+2+1+16 {
			t.Errorf("%d rows", elements["tr"])
		}
	})
}

// The JSON is for programs: its names are a promise.
func TestDebug_JSONNames(t *testing.T) {
	remaining := 1.5
	text, err := json.Marshal(debugState{
		V: 1, Peers: []debugPeer{{
			Latency: []debugLatency{{}}, LastMinute: new(debugPeerMinute), IdleMS: 1,
			Refused: []debugRefusal{{RemainingMS: &remaining, NeedMS: 1}},
		}},
		Server: &debugServer{LastMinute: new(debugServerMinute), RecentExpired: []debugExpiry{{}}},
	})
	const want = `{"v":1,"now_ms":0,"peers_known":0,"peers_left_out":0,"peers":[{"peer":"",` +
		`"budget":{"limit":0,"taken":0,"balance":0,"utilisation":0,"spent":false,"next_turn_ms":0,"requests":0,"successes":0,"ratio":0,"window_ms":0},` +
		`"latency":[{"class":"","p50_ms":0,"p99_ms":0,"samples":0,"attempts":0,"cut_off":0}],` +
		`"last_minute":{"requests":0,"attempts":0,"retries":0,"amplification":0},"inflight":0,"held":0,"idle_ms":1,"refusals":0,` +
		`"refused":[{"at_ms":0,"reason":"","attempt":0,"remaining_ms":1.5,"need_ms":1}]}],` +
		`"server":{"service":"","report_only":false,"last_minute":{"requests":0,"header_present_ratio":0},"remaining":{"p50_ms":0,"p1_ms":0,"samples":0},"expired":0,"expired_on_arrival":0,` +
		`"recent_expired":[{"at_ms":0,"on_arrival":false,"took_ms":0,"late_ms":0}]}}`
	if err != nil || string(text) != want {
		t.Errorf("%v, got\n%s\nwant\n%s", err, text, want)
	}
}

// A refusal for the deadline says what it was weighed against.
func TestDebug_Need(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := baseFunc(func(r *http.Request) (*http.Response, error) {
			time.Sleep(100 * time.Millisecond)
			if r.URL.Path == "/stall" && r.Header.Get(HeaderRetryCount) != "" {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			if r.URL.Path != "/" {
				return answer(503, ""), nil
			}
			return answer(200, ""), nil
		})
		tr := newTestTransport(t, Config{Base: base, Backoff: Backoff{Base: 40 * time.Millisecond}})
		tr.jitter = func() float64 { return 0.5 }
		h := DebugHandler(tr, nil)
		send := func(path string, left time.Duration) debugRefusal {
			ctx, cancel := context.WithTimeout(t.Context(), left)
			defer cancel()
			if resp, err := tr.RoundTrip(newRequest(t, ctx, "GET", "http://peer.test"+path, nil)); err == nil {
				resp.Body.Close()
			}
			if p := debugJSON(t, h).Peers[0]; len(p.Refused) > 0 {
				return p.Refused[0]
			}
			return debugRefusal{}
		}
		for range DefaultMinSamples {
			send("/", time.Second)
		}
		// 20 ms of backoff and a bucket's edge above 100 ms.
		if r := send("/down", 210*time.Millisecond); r.Reason != ReasonDeadline || r.Attempt != 1 || *r.RemainingMS != 110 || r.NeedMS < 120 || r.NeedMS > 127 {
			t.Errorf("a retry that could not end in time: %+v", r)
		}
		if r := send("/", 3*time.Millisecond); r.Reason != ReasonDeadline || r.Attempt != 0 || *r.RemainingMS != 3 || r.NeedMS != 4 {
			t.Errorf("a request that could not begin: %+v", r)
		}
		// Time ran out during the attempt: nothing was weighed.
		if r := send("/down", 101*time.Millisecond); r.Reason != ReasonDeadline || r.Attempt != 1 || *r.RemainingMS != 1 || r.NeedMS != 0 {
			t.Errorf("an attempt that took all the time: %+v", r)
		}
		// Nor where a retry before it had been.
		if r := send("/stall", 300*time.Millisecond); r.Reason != ReasonDeadline || r.Attempt != 2 || r.NeedMS != 0 {
			t.Errorf("a retry that took all the time: %+v", r)
		}
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "POST", "http://peer.test/down", strings.NewReader("x")))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if r := debugJSON(t, h).Peers[0].Refused[0]; r.Reason != ReasonNotIdempotent || r.RemainingMS != nil || r.NeedMS != 0 {
			t.Errorf("without a deadline: %+v", r)
		}
		text, _ := debugText(t, h)
		debugContains(t, text, " not_idempotent repeating it might execute it twice 1 no limit\n", " deadline time ran out 2 ", " deadline 1 1.0 ms\n",
			" deadline no attempt could end in time 0 3.0 ms 4.0 ms\n", " deadline 1 110 ms 12")
	})
}

// Peers in trouble come first: a full budget, then refusals that cost no budget,
// as long as they are recent, then names.
func TestDebug_Sorted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := baseFunc(func(r *http.Request) (*http.Response, error) {
			if strings.HasPrefix(r.URL.Host, "ok") {
				return answer(200, ""), nil
			}
			if strings.HasPrefix(r.URL.Host, "told") {
				return answer(503, "", HeaderShouldRetry, "false"), nil
			}
			return answer(503, ""), nil
		})
		tr := newTestTransport(t, Config{Base: base, MaxAttempts: 2, Peer: func(r *http.Request) string { return r.URL.Host }})
		tr.jitter = func() float64 { return 0 }
		send := func(hosts ...string) {
			for _, host := range hosts {
				resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://"+host+"/", nil))
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
			}
		}
		names := func() string {
			var list []string
			for _, p := range debugJSON(t, DebugHandler(tr, nil)).Peers {
				list = append(list, p.Peer)
			}
			return strings.Join(list, " ")
		}
		send("ok-c", "ok-a", "told-b", "told-a", "ok-b", "z1", "z2", "z2", "z2")
		if got, want := names(), "z2 z1 told-a told-b ok-a ok-b ok-c"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		text, elements := debugText(t, DebugHandler(tr, nil))
		at := -1
		for name := range strings.FieldsSeq(names()) {
			i := strings.Index(text, "\n"+name+" ")
			if i <= at {
				t.Errorf("%s is not where it belongs in%s", name, text)
			}
			at = i
		}
		if elements["details"] != 7 {
			t.Errorf("%d peers on the page", elements["details"])
		}
		// The page opens those in trouble.
		if page := debugGet(t, DebugHandler(tr, nil), "GET", browserAccept).Body.String(); strings.Count(page, `class="peer" open`) != 4 {
			t.Errorf("%d peers are open, want the four in trouble", strings.Count(page, `class="peer" open`))
		}

		time.Sleep(debugRecent)
		send("ok-c")
		if got, want := names(), "ok-a ok-b ok-c told-a told-b z1 z2"; got != want {
			t.Errorf("a minute later: got %s, want %s", got, want)
		}
	})
}

// However many peers there are and however long the names: the answer is bounded,
// nothing is lost without a word, and those in trouble are shown.
func TestDebug_Bounded(t *testing.T) {
	const known = 5000
	tr := newTestTransport(t, Config{MaxPeers: known - 1, Metrics: newTestMetrics(t)})
	now := time.Now()
	var last *peer
	for i := range known { // the last one finds the table full
		name := fmt.Sprintf("%s-%04d", strings.Repeat("é", 200), i)
		last = tr.peers.enter(name, now)
		for c := range maxClasses + 1 {
			last.latency.get(fmt.Sprint(strings.Repeat("/class", 100), c))
		}
		for range ringSize + 1 {
			last.refusals.add(refusal{at: now.Sub(tr.peers.origin), reason: ReasonNotReplayable, attempts: 1, bounded: true, remaining: time.Hour, need: time.Hour})
		}
		if i%2 == 0 {
			tr.peers.leave(last, now)
		}
	}
	if last != tr.peers.other {
		t.Fatal("the last peer has a place of its own")
	}
	last.budget.take(now, time.Time{})
	h := DebugHandler(tr, nil)
	s := debugJSON(t, h)
	if s.PeersKnown != known || len(s.Peers) != debugPeers || s.PeersLeftOut != known-debugPeers {
		t.Errorf("%d peers are known, %d are shown and %d left out", s.PeersKnown, len(s.Peers), s.PeersLeftOut)
	}
	if p := s.Peers[0]; p.Peer != overflowPeer || p.Budget.Taken != 1 {
		t.Errorf("the one peer in trouble is not the first: %+v", p)
	}
	for _, p := range s.Peers[1:] {
		if len(p.Peer) > maxLabelBytes || len(p.Refused) != ringSize || len(p.Latency) != maxClasses || len(p.Latency[1].Class) > maxLabelBytes {
			t.Fatalf("%+v", p)
		}
		if p.LastMinute != nil && p.Peer != labelValue(p.Peer) {
			t.Errorf("%s has the numbers of %s", p.Peer, otherLabel)
		}
	}
	text, elements := debugText(t, h)
	debugContains(t, text, "\n4,800 more of 5,000 peers are left out, with less trouble than these.\n")
	if strings.Contains(text, strings.Repeat("é", debugNameRunes+1)) {
		t.Error("a long name is not cut")
	}
	if elements["details"] != debugPeers || strings.Count(debugGet(t, h, "GET", browserAccept).Body.String(), " open=") != debugUnfolded {
		t.Errorf("%d peers on the page", elements["details"])
	}
	for _, accept := range []string{"", browserAccept} {
		if n := debugGet(t, h, "GET", accept).Body.Len(); n > 2<<20 {
			t.Errorf("Accept %q: %d bytes", accept, n)
		}
	}
}

// Numbers of the last minute belong to a label. Peers that share one have none of
// their own.
func TestDebug_SharedLabels(t *testing.T) {
	metrics := newTestMetrics(t)
	tr := newTestTransport(t, Config{Metrics: metrics, Base: answers(status(200)), Peer: func(r *http.Request) string { return r.URL.Host }})
	for i := range maxPeerLabels + 1 {
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", fmt.Sprintf("http://%03d/", i), nil))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	h := DebugHandler(tr, nil)
	s := debugJSON(t, h)
	if p := s.Peers[0]; p.LastMinute == nil || p.LastMinute.Requests != 1 || p.LastMinute.Amplification != 1 {
		t.Errorf("a peer with a label: %+v", p)
	}
	if p := s.Peers[maxPeerLabels]; p.LastMinute != nil || p.Latency[0].Samples != 1 {
		t.Errorf("a peer without: %+v", p)
	}

	// And without metrics there are none at all.
	mw := mwNew(t, MiddlewareConfig{Service: "a"})
	if s := debugJSON(t, DebugHandler(newTestTransport(t, Config{}), mw)); s.Server.LastMinute != nil || s.Peers == nil {
		t.Errorf("%+v", s.Server)
	}
	for i := range maxServiceLabels {
		metrics.service(fmt.Sprint(i))
	}
	mw = mwNew(t, MiddlewareConfig{Service: "late", Metrics: metrics})
	if s := debugJSON(t, DebugHandler(nil, mw)); s.Server.LastMinute != nil || s.Server.Service != "late" {
		t.Errorf("%+v", s.Server)
	}
}

func TestDebug_HostileNames(t *testing.T) {
	hostile := []string{
		`"><script>alert(1)</script>`, `</style><img src=x onerror=alert(1)>`, `'onmouseover='alert(1)`,
		"{{.Budget}}", "javascript:alert(1)", "a\x00b\x1b[31m", "\xff\xfe", "gnp.\u202etxt.exe", "two\nlines", "",
		strings.Repeat("<", maxPeerName), strings.Repeat("&amp;", 40),
	}
	metrics := newTestMetrics(t)
	for _, name := range hostile {
		tr := newTestTransport(t, Config{
			Metrics: metrics, Base: answers(status(503)), MaxAttempts: 1, Peer: func(*http.Request) string { return name },
			Admission: AdmissionConfig{Class: func(*http.Request) string { return name }},
		})
		var service string
		if len(name) <= maxServiceLen && name == strings.ToValidUTF8(name, "") {
			service = name
		}
		mw := mwNew(t, MiddlewareConfig{Service: service, Metrics: metrics})
		resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		h := DebugHandler(tr, mw)
		text, elements := debugText(t, h) // fails at whatever is not text
		want := debugName(name)
		if name == "" {
			want = "(no name)"
		}
		debugContains(t, text, "\n"+strings.Join(strings.Fields(showName(want)), " ")+" 0 %")
		if elements["details"] != 1 {
			t.Errorf("%q: %d elements", name, elements["details"])
		}
		if i := strings.IndexFunc(text, func(r rune) bool { return r != '\n' && (r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u202e') }); i >= 0 {
			t.Errorf("%q: the page has %q", name, text[i:i+1])
		}
		page := debugGet(t, h, "GET", browserAccept).Body.String()
		if strings.Contains(page, "<script") || strings.Contains(page, "<img") || name != "" && strings.Count(page, "<bdi>") < 2 {
			t.Errorf("%q is not shown as a name:\n%s", name, page)
		}
		if p := debugJSON(t, h).Peers[0]; p.Peer != debugName(name) || p.LastMinute == nil || p.Latency[0].Class != p.Peer {
			t.Errorf("%q: JSON has %+v", name, p)
		}
	}
}

// Requests, and the errors of the base, are full of what must not be shown.
func TestDebug_NothingSecret(t *testing.T) {
	const secret = "s3cr3t"
	var status atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Answer", secret)
		w.WriteHeader(int(status.Load()))
		io.WriteString(w, secret)
	}))
	defer srv.Close()
	metrics := newTestMetrics(t)
	real := newTestTransport(t, Config{})
	defer real.CloseIdleConnections()
	tr := newTestTransport(t, Config{Metrics: metrics, Budget: BudgetConfig{MaxWait: -1}, Backoff: Backoff{Base: time.Nanosecond}, Base: baseFunc(func(r *http.Request) (*http.Response, error) {
		resp, err := real.base.RoundTrip(r)
		if err == nil && status.Load() == 599 {
			resp.Body.Close()
			return nil, errors.New("no route to " + r.URL.String() + " with " + r.Header.Get(HeaderIdempotencyKey))
		}
		return resp, err
	})})
	mw := mwNew(t, MiddlewareConfig{Service: "orders", Metrics: metrics, RejectInvalid: true})
	service := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, method := range []string{"GET", "POST"} {
			ctx := WithOverride(r.Context(), Override{IdempotencyKey: secret + "-key"})
			req := newRequest(t, ctx, method, strings.Replace(srv.URL, "://", "://"+secret+":"+secret+"@", 1)+"/"+secret+"?token="+secret+"#"+secret, strings.NewReader(secret))
			req.Header.Set("Authorization", "Bearer "+secret)
			if resp, err := tr.RoundTrip(req); err == nil {
				resp.Body.Close()
			}
		}
	}))
	for _, code := range []int32{200, 503, 599} {
		status.Store(code)
		for _, deadline := range []string{"", "1", secret, mwIn(time.Second)} {
			r := httptest.NewRequest("POST", "/"+secret+"?token="+secret, strings.NewReader(secret))
			r.Header.Set(HeaderIdempotencyKey, secret)
			r.Header.Set("Cookie", secret)
			if deadline != "" {
				r.Header.Set(HeaderDeadline, deadline)
			}
			service.ServeHTTP(httptest.NewRecorder(), r)
		}
	}
	h := DebugHandler(tr, mw)
	s := debugJSON(t, h)
	if len(s.Peers) != 1 || len(s.Peers[0].Refused) < 6 || s.Server.Expired != 3 {
		t.Fatalf("nothing happened: %+v", s)
	}
	for _, accept := range []string{"", browserAccept} {
		for _, method := range []string{"GET", "HEAD", "POST"} {
			r := httptest.NewRequest(method, "/debug/"+secret+"?token="+secret, strings.NewReader(secret))
			r.Header.Set("Accept", accept)
			r.Header.Set("Authorization", secret)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if all := fmt.Sprint(w.Result().Header, w.Body); strings.Contains(all, secret) || strings.Contains(all, "no route") {
				t.Errorf("%s, Accept %q:\n%s", method, accept, all)
			}
		}
	}
}

func TestDebug_Methods(t *testing.T) {
	srv := httptest.NewServer(DebugHandler(newTestTransport(t, Config{}), mwNew(t, MiddlewareConfig{Service: "orders"})))
	defer srv.Close()
	for _, method := range []string{"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "QUERY", "get"} {
		for accept, contentType := range map[string]string{"*/*": "application/json", "text/html": "text/html; charset=utf-8"} {
			resp, body := mwDo(t, srv.Client(), method, srv.URL, nil, "Accept", accept)
			h := resp.Header
			if h.Get("Cache-Control") != "no-store" || h.Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("%s: %v", method, h)
			}
			if method != "GET" && method != "HEAD" {
				if resp.StatusCode != 405 || h.Get("Allow") != "GET, HEAD" || strings.Contains(body, "orders") {
					t.Errorf("%s: %d, %v, %s", method, resp.StatusCode, h, body)
				}
				continue
			}
			const csp = "default-src 'none'; style-src 'unsafe-inline'; "
			if resp.StatusCode != 200 || h.Get("Content-Type") != contentType || h.Get("Vary") != "Accept" || !strings.HasPrefix(h.Get("Content-Security-Policy"), csp) {
				t.Errorf("%s: %d, %v", method, resp.StatusCode, h)
			}
			if want := method == "GET"; want != strings.Contains(body, "orders") || !want && body != "" || resp.ContentLength < 100 {
				t.Errorf("%s: Content-Length %d, body %q", method, resp.ContentLength, body)
			}
		}
	}
	// Not only net/http keeps the body of an answer to HEAD from being sent.
	w := debugGet(t, DebugHandler(newTestTransport(t, Config{}), nil), "HEAD", "")
	if w.Body.Len() != 0 || w.Header().Get("Content-Length") == "0" {
		t.Errorf("HEAD: %d bytes, %v", w.Body.Len(), w.Header())
	}
}

func TestDebug_Accept(t *testing.T) {
	for _, tt := range []struct {
		accept []string
		html   bool
	}{
		{nil, false},
		{[]string{""}, false},
		{[]string{"*/*"}, false},
		{[]string{browserAccept}, true},
		{[]string{"text/html"}, true},
		{[]string{"TEXT/HTML;level=1"}, true},
		{[]string{"text/*"}, true},
		{[]string{"application/json"}, false},
		{[]string{"application/json, text/html"}, false}, // no preference
		{[]string{"text/html, application/json;q=0.9"}, true},
		{[]string{"text/html;q=0.5, application/json"}, false},
		{[]string{"text/html ; q=0.5, */*;q=0.1"}, true},
		{[]string{"text/html;q=0, */*;q=0.1"}, false},
		{[]string{"text/html;q=0.2, text/*;q=1, application/*;q=0.5"}, false}, // the precise one counts
		{[]string{"text/html, application/json;q=0"}, true},
		{[]string{"application/json;q=0.1", "text/html"}, true}, // two lines
		{[]string{"text/html;q=NaN, application/json"}, false},
		{[]string{"text/html;q=2, application/json"}, false},
		{[]string{"text/plain"}, false},
		{[]string{"text/htmlx, x/text/html, ;q=1,,"}, false},
	} {
		if got := prefersHTML(http.Header{"Accept": tt.accept}); got != tt.html {
			t.Errorf("%q: HTML %v, want %v", tt.accept, got, tt.html)
		}
	}
}

// Requests go on while somebody reads the page slowly.
func TestDebug_NothingHeld(t *testing.T) {
	tr := newTestTransport(t, Config{Base: answers(status(503)), Budget: BudgetConfig{MaxWait: -1}, Peer: func(r *http.Request) string { return r.URL.Host }})
	mw := mwNew(t, MiddlewareConfig{})
	use := func() {
		for _, host := range []string{"a", fmt.Sprint(rand.Uint32())} { // one that is known and a new one
			resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://"+host+"/", nil))
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		}
		mw.Handler(http.NotFoundHandler()).ServeHTTP(httptest.NewRecorder(), mwRequest(HeaderDeadline, "1"))
	}
	use()
	r := httptest.NewRequest("GET", "/", nil)
	w := &stuckWriter{ResponseRecorder: httptest.NewRecorder(), writing: make(chan struct{}), goOn: make(chan struct{})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		DebugHandler(tr, mw).ServeHTTP(w, r)
	}()
	<-w.writing
	used := make(chan struct{})
	go func() {
		defer close(used)
		use()
	}()
	select {
	case <-used:
	case <-time.After(10 * time.Second):
		t.Error("a reader of the page holds up requests")
	}
	close(w.goOn)
	<-served
	<-used
}

type stuckWriter struct {
	*httptest.ResponseRecorder
	writing, goOn chan struct{}
}

func (w *stuckWriter) Write(b []byte) (int, error) {
	close(w.writing)
	<-w.goOn
	return w.ResponseRecorder.Write(b)
}

// Peers come, fail, are evicted and share the overflow while many look.
func TestDebug_ConcurrentUse(t *testing.T) {
	metrics := newTestMetrics(t)
	tr := newTestTransport(t, Config{
		Base: answers(status(200), status(503)), Metrics: metrics, MaxPeers: 4, MaxAttempts: 2,
		Budget: BudgetConfig{Window: time.Second, MaxWait: -1}, Backoff: Backoff{Base: time.Nanosecond},
		Peer:      func(r *http.Request) string { return r.URL.Host },
		Admission: AdmissionConfig{Class: func(r *http.Request) string { return r.URL.Path }},
	})
	mw := mwNew(t, MiddlewareConfig{Service: "orders", Metrics: metrics})
	service := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := rand.IntN(10)
		if resp, err := tr.RoundTrip(newRequest(t, r.Context(), "GET", fmt.Sprintf("http://peer-%d/%d", n, n), nil)); err == nil {
			resp.Body.Close()
		}
	}))
	h := DebugHandler(tr, mw)
	stop := time.Now().Add(1500 * time.Millisecond)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for time.Now().Before(stop) {
				r := mwRequest(HeaderDeadline, mwIn(time.Duration(i-1)*time.Second))
				service.ServeHTTP(httptest.NewRecorder(), r)
			}
		})
	}
	for i := range 2 {
		all.Go(func() {
			for time.Now().Before(stop) {
				if i == 0 {
					debugText(t, h)
					continue
				}
				s := debugJSON(t, h)
				if s.PeersKnown > 5 || s.Server.ExpiredOnArrival > s.Server.Expired {
					t.Errorf("%d peers, %+v", s.PeersKnown, s.Server)
				}
				for _, p := range s.Peers {
					if p.Inflight < 0 || p.Budget.Balance < 0 || p.Budget.Utilisation > 1 || len(p.Refused) > ringSize || p.Refusals < uint64(len(p.Refused)) {
						t.Errorf("%+v", p)
					}
				}
			}
		})
	}
	all.Wait()
}

func TestDebug_Misuse(t *testing.T) {
	for name, f := range map[string]func(){
		"nothing":         func() { DebugHandler(nil, nil) },
		"zero Transport":  func() { DebugHandler(new(Transport), nil) },
		"zero Middleware": func() { DebugHandler(nil, new(Middleware)) },
	} {
		func() {
			defer func() {
				if s, ok := recover().(string); !ok || !strings.HasPrefix(s, "stint: ") {
					t.Errorf("%s: panic %v", name, s)
				}
			}()
			f()
		}()
	}
	s := debugJSON(t, DebugHandler(nil, mwNew(t, MiddlewareConfig{Service: "orders", ReportOnly: true})))
	if s.Peers != nil || s.Server == nil || !s.Server.ReportOnly {
		t.Errorf("without a Transport: %+v", s)
	}
	text, _ := debugText(t, DebugHandler(nil, mwNew(t, MiddlewareConfig{Service: "orders", ReportOnly: true})))
	debugContains(t, text, "ReportOnly")
	if strings.Contains(text, "Peers called") {
		t.Errorf("peers of nothing in%s", text)
	}
	if s := debugJSON(t, DebugHandler(newTestTransport(t, Config{}), nil)); s.Peers == nil || s.Server != nil {
		t.Errorf("without a Middleware: %+v", s)
	}
}

// Nothing ends up in the ServeMux that everybody shares.
func TestDebug_NotRegistered(t *testing.T) {
	DebugHandler(newTestTransport(t, Config{}), nil)
	for _, path := range []string{"/", "/debug/stint", "/debug/"} {
		if _, pattern := http.DefaultServeMux.Handler(httptest.NewRequest("GET", path, nil)); pattern != "" {
			t.Errorf("%s has the handler of %s", path, pattern)
		}
	}
}

func TestDebug_ReasonsAreExplained(t *testing.T) {
	for _, r := range clientReasons {
		if debugReasons[r] == "" {
			t.Errorf("%s is not explained", r)
		}
	}
	if len(debugReasons) != len(clientReasons) {
		t.Error("reasons are explained that do not occur")
	}
}

func TestRing(t *testing.T) {
	var r ring[int]
	if _, ok := r.newest(); ok || r.kept != nil {
		t.Error("the zero ring is not empty")
	}
	var all []int
	for n := range 3*ringSize + 2 {
		list, total := r.latest()
		want := slices.Clone(all[max(0, len(all)-ringSize):])
		slices.Reverse(want)
		if !slices.Equal(list, want) || total != uint64(n) {
			t.Fatalf("got %v of %d, want %v of %d", list, total, want, n)
		}
		if v, ok := r.newest(); n > 0 && (!ok || v != want[0]) {
			t.Fatalf("newest: got %d, want %d", v, want[0])
		}
		r.add(n)
		all = append(all, n)
	}
	if got := testing.AllocsPerRun(100, func() { r.add(1) }); got != 0 {
		t.Errorf("%v allocations to add to a ring", got)
	}
}

// What the page says of a budget is what the budget does.
func TestBudget_State(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	spent := 0
	for range 200 {
		c := BudgetConfig{Ratio: rng.Float64(), MinPerSecond: rng.Float64() - 0.3, MaxWait: time.Hour}.withDefaults()
		origin := time.Now()
		b, now := newBudget(c, origin), origin
		for range 100 {
			now = now.Add(rand.N(300 * time.Millisecond))
			switch rng.IntN(3) {
			case 0:
				b.request(now)
				b.success(now)
			case 1:
				b.take(now, time.Time{})
			}
			s := b.state(now)
			if s != b.state(now) {
				t.Fatal("looking changes it")
			}
			if s.used != b.utilisation(now) {
				t.Fatalf("utilisation %v, want %v", s.used, b.utilisation(now))
			}
			if got := b.ask(now, 0, time.Time{}); s.spent != (got == ReasonBudget) {
				t.Fatalf("spent %v, and the answer is %q: %+v", s.spent, got, s)
			}
			if s.spent {
				spent++
			} else if float64(s.taken)+1 > s.limit+0.01 {
				t.Fatalf("not spent: %+v", s)
			} else if rng.IntN(4) == 0 {
				if wait, refused := b.take(now, time.Time{}); wait != s.turn || refused != "" {
					t.Fatalf("the turn is in %v, and taking it waits for %v (%s)", s.turn, wait, refused)
				}
				if got := b.state(now); got.taken != s.taken+1 {
					t.Fatalf("%d are taken after %d", got.taken, s.taken)
				}
			}
		}
	}
	if spent == 0 {
		t.Error("no budget was spent")
	}
}

// Looking does not push out the quantile that admission has in its cache.
func TestDebug_LeavesTheCache(t *testing.T) {
	tr := newTestTransport(t, Config{Base: answers(status(200))})
	resp, err := tr.RoundTrip(newRequest(t, t.Context(), "GET", "http://peer.test/", nil))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	p, _ := tr.peers.byName.Load("peer.test:80")
	h := p.(*peer).latency.get("")
	h.quantile(time.Now(), 0.99)
	before := h.cached.seq.Load()
	if l := debugJSON(t, DebugHandler(tr, nil)).Peers[0].Latency; len(l) != 1 || l[0].Samples != 1 || h.cached.seq.Load() != before {
		t.Errorf("%+v, cache at %d, before at %d", l, h.cached.seq.Load(), before)
	}
}

func TestClasses_List(t *testing.T) {
	c := newClasses(time.Second, time.Now())
	if list := c.list(); len(list) != 0 {
		t.Errorf("%v", list)
	}
	var want []class
	for _, name := range []string{"", "a", "b", "c", "d", "e", "f"} {
		want = append(want, class{name, c.get(name)})
	}
	want = append(want, class{overflowPeer, c.get("g")})
	c.get("h")
	if got := c.list(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// atLeast is the lower edge of the bucket whose upper edge a quantile is.
func TestDebug_AtLeast(t *testing.T) {
	for b := range histBuckets - 1 {
		low := atLeast(histUpper(b))
		if b == 0 && low != 0 || b > 0 && (histBucket(low) != b || histBucket(low-1) != b-1) {
			t.Fatalf("bucket %d begins at %v", b, low)
		}
	}
	if low := atLeast(histUpper(histBuckets - 1)); low < 1000*time.Second || low > 1<<histMaxExp {
		t.Errorf("the last bucket begins at %v", low)
	}
	if low := atLeast(0); low != 0 {
		t.Errorf("without samples: %v", low)
	}
}

func TestDebug_Show(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0 ms", 0.07: "0.07 ms", 4.25: "4.2 ms", 21.3: "21 ms", 999.4: "999 ms", 999.6: "1.0 s", 1500: "1.5 s", 61_000: "61 s",
		150_000: "2.5 min", 3_600_000: "60 min", 9_000_000: "2.5 h", 47 * 3.6e6: "47 h", 48 * 3.6e6: "2.0 d", -3.5: "-3.5 ms", -2000: "-2.0 s",
	} {
		if got := showMillis(v); got != want {
			t.Errorf("%v: got %q, want %q", v, got, want)
		}
	}
	for v, want := range map[float64]string{3.25: "3.2 ms", 999.4: "999 ms", 999.6: "1,000 ms", 1055: "1,055 ms", -1055: "-1,055 ms", 10_000: "10 s"} {
		if got := showExact(v); got != want {
			t.Errorf("%v: got %q, want %q", v, got, want)
		}
	}
	for v, want := range map[float64]string{0: "0 %", 0.29: "29 %", 0.57: "57 %", 0.99999: "99 %", 1: "100 %"} {
		if got := showShare(v); got != want {
			t.Errorf("%v: got %q, want %q", v, got, want)
		}
	}
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := showCount(n); got != want || showCount(uint64(n)) != want || showCount(int64(n)) != want || showCount(int32(n)) != want {
			t.Errorf("%d: got %q, want %q", n, got, want)
		}
	}
	for age, want := range map[int64]string{-5: "just now", 99: "just now", 100: "0.1 s ago", 999: "0.9 s ago", 1000: "1.0 s ago", 60_000: "60 s ago"} {
		if got := showAgo(1e12, 1e12-age); got != want {
			t.Errorf("%d: got %q, want %q", age, got, want)
		}
	}
}

func BenchmarkDebug(b *testing.B) {
	tr := newTestTransport(b, Config{Metrics: newTestMetrics(b)})
	now := time.Now()
	for i := range DefaultMaxPeers {
		p := tr.peers.enter(fmt.Sprintf("peer-%d.test:80", i), now)
		p.latency.get("").record(now, time.Millisecond)
		p.refusals.add(refusal{reason: ReasonBudget})
		tr.peers.leave(p, now)
	}
	h := DebugHandler(tr, nil)
	for name, accept := range map[string]string{"JSON": "", "HTML": browserAccept} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				debugGet(b, h, "GET", accept)
			}
		})
	}
}
