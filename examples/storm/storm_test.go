package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// TestStorm makes both runs over real sockets, short and light. What the budget
// promises is proven in virtual time elsewhere: the bounds here are wide, so
// that a busy machine does not make them fail.
func TestStorm(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seven seconds")
	}
	path := filepath.Join(t.TempDir(), "storm.html")
	var out bytes.Buffer
	c := config{
		headroom: 2.5,
		fault:    faultOutage, rps: 50, out: path,
		warm: time.Second, hold: 1300 * time.Millisecond, after: time.Second,
	}
	plain, err := storm(t.Context(), c, "unguarded", unguarded{}, &out)
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGuarded()
	if err != nil {
		t.Fatal(err)
	}
	stinted, err := storm(t.Context(), c, "with stint", g, &out)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s%s", &out, newReport(c, plain, stinted).table())

	r := newReport(c, plain, stinted)
	// What must not be exceeded is not, however busy the machine is.
	if got := plain.amplification[bottom]; got > 27 {
		t.Errorf("unguarded: %.2f attempts at the database per user request, want 27", got)
	}
	if got := stinted.amplification[bottom]; got > 1.3 {
		t.Errorf("with stint: %.2f attempts at the database per user request, want about 1.1", got)
	}
	for _, s := range []summary{plain, stinted} {
		if want := 165; s.requests != want {
			t.Errorf("%s: %d user requests, want %d", s.name, s.requests, want)
		}
	}
	if lines := strings.Count(out.String(), "/s   database"); lines != 6 {
		t.Errorf("%d progress lines, want one for each of 2 × 3 whole seconds", lines)
	}
	if r.late() > busyFrom {
		t.Logf("not looking further: the machine is busy, users came up to %v late", r.late())
	} else {
		if got := plain.amplification[bottom]; got < 20 {
			t.Errorf("unguarded: %.2f attempts at the database per user request, want 27", got)
		}
		if got := stinted.amplification[bottom]; got < 1 {
			t.Errorf("with stint: %.2f attempts at the database per user request, want at least the first", got)
		}
		if stinted.retries == 0 {
			t.Error("with stint: no retry reached the database")
		}
		for _, s := range []summary{plain, stinted} {
			if s.failed < 25 || s.failed > s.requests-25 {
				t.Errorf("%s: %d of %d user requests failed, want those of the fault", s.name, s.failed, s.requests)
			}
		}
	}

	if err := r.writeHTML(path); err != nil {
		t.Fatal(err)
	}
	checkPage(t, path)
}

// TestStormServerSide compares what the database does for itself, over real
// sockets, short and light: with a hundred callers in an outage, and with a limit
// in a stall. The exact figures are proven in virtual time elsewhere.
func TestStormServerSide(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seven seconds")
	}
	for _, test := range []struct {
		args  string
		check func(t *testing.T, without, with summary)
	}{
		{"-clients 100", func(t *testing.T, without, with summary) {
			if got := with.amplification[bottom]; got > 1.3 {
				t.Errorf("%.2f attempts get to the database's handler per user request, want about 1.1", got)
			}
			if without.amplification[bottom] < 1.5 || with.refused < 10 {
				t.Errorf("without a cap %.2f attempts per user request, want nearly 2; with it %d refused", without.amplification[bottom], with.refused)
			}
		}},
		{"-limit -fault stall", func(t *testing.T, without, with summary) {
			// In the stall 65 requests pile up, or ten and what is tried.
			if with.refused < 10 || with.amplification[bottom] > 0.8 || without.amplification[bottom] < 0.95 {
				t.Errorf("%d refused; of each request of the stall %.2f get to the database's handler, without a limit %.2f",
					with.refused, with.amplification[bottom], without.amplification[bottom])
			}
		}},
	} {
		t.Run(test.args, func(t *testing.T) {
			t.Parallel()
			c, err := parse(strings.Fields(test.args))
			if err != nil {
				t.Fatal(err)
			}
			c.rps, c.warm, c.hold, c.after = 50, time.Second, 1300*time.Millisecond, time.Second
			names, guards, err := c.guards()
			if err != nil {
				t.Fatal(err)
			}
			var runs [2]summary
			for i := range runs {
				if runs[i], err = storm(t.Context(), c, names[i], guards[i], io.Discard); err != nil {
					t.Fatal(err)
				}
			}
			r := newReport(c, runs[0], runs[1])
			t.Logf("\n%s", r.table())
			if without := runs[0]; without.refused > 5 {
				t.Errorf("%s: %d refused, want next to none", without.name, without.refused)
			}
			if r.late() > busyFrom {
				t.Logf("not looking further: the machine is busy, users came up to %v late", r.late())
			} else {
				test.check(t, runs[0], runs[1])
			}
			path := filepath.Join(t.TempDir(), "storm.html")
			if err := r.writeHTML(path); err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range append(names[:], "refused in front of the database") {
				if !strings.Contains(string(text), want) {
					t.Errorf("the page does not say %q", want)
				}
			}
		})
	}
}

// checkPage looks at what every page must have.
func checkPage(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	dec := xml.NewDecoder(bytes.NewReader(text))
	dec.Entity = xml.HTMLEntity
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("the page does not parse: %v", err)
		}
		if e, ok := token.(xml.StartElement); ok {
			count[e.Name.Local]++
			for _, a := range e.Attr {
				if a.Name.Local == "src" || a.Name.Local == "href" {
					t.Errorf("<%s %s=%q>: the page must stand alone", e.Name.Local, a.Name.Local, a.Value)
				}
			}
		}
	}
	if count["script"] != 0 {
		t.Error("the page has a script")
	}
	// Two charts in two sizes, and three keys in the legend of each.
	if got, want := count["svg"], 2*2+2*3; got != want {
		t.Errorf("%d svg elements, want %d", got, want)
	}
	for _, want := range []string{"requests/s", "successes/s", "seconds", "outage", "unguarded", "with stint", "prefers-color-scheme: dark"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	for _, bad := range []string{"ZgotmplZ", "NaN", "Inf", "%!"} {
		if strings.Contains(string(text), bad) {
			t.Errorf("the page has a %s", bad)
		}
	}
}

func TestTable(t *testing.T) {
	plain := summary{name: "unguarded", requests: 1500, failed: 471, peak: 2730, recovery: -1, amplification: [...]float64{1, 3, 9, 27}}
	stinted := summary{name: "with stint", requests: 1500, failed: 499, peak: 106, retries: 12, retryPeak: 5, recovery: 1240 * time.Millisecond, amplification: [...]float64{1, 1, 1, 1.04}}
	c := config{fault: faultOutage, rps: 100, warm: 4 * time.Second, hold: 5 * time.Second, after: 6 * time.Second}
	const want = `
                                                unguarded  with stint
attempts per user request, in the fault
  at edge                                            1.00        1.00
  at orders                                          3.00        1.00
  at ledger                                          9.00        1.00
  at database                                       27.00        1.04
most requests at the database in a second           2,730         106
most marked retries in a second                not marked           5
user requests                                       1,500       1,500
of these failed                                       471         499
time to recover after the fault            not within 6 s       1.2 s
`
	r := newReport(c, plain, stinted)
	if got := "\n" + r.table(); got != want {
		t.Errorf("got:%s\nwant:%s", got, want)
	}
	if err := r.printChecks(io.Discard); err != nil {
		t.Errorf("good runs: %v", err)
	}

	for name, spoil := range map[string]func(plain, stinted *summary){
		"no storm":         func(plain, _ *summary) { plain.amplification[bottom] = 9 },
		"amplified":        func(_, stinted *summary) { stinted.amplification[bottom] = 1.11 },
		"burst of retries": func(_, stinted *summary) { stinted.retryPeak = 12 },
	} {
		p, s := plain, stinted
		spoil(&p, &s)
		var out bytes.Buffer
		if err := newReport(c, p, s).printChecks(&out); err == nil || strings.Count(out.String(), "FAIL") != 1 {
			t.Errorf("%s: error %v and\n%swant one failure", name, err, &out)
		}
	}
}

// A machine that cannot carry the storm says nothing about the library.
func TestBusy(t *testing.T) {
	plain := summary{name: "unguarded", amplification: [...]float64{1, 3, 8, 15}, late: 300 * time.Millisecond}
	stinted := summary{name: "with stint", amplification: [...]float64{1, 1, 1, 1.04}, retryPeak: 4}
	r := newReport(config{fault: faultOutage, rps: 100}, plain, stinted)
	var out bytes.Buffer
	if err := r.printChecks(&out); err != nil || !strings.Contains(out.String(), "BUSY") {
		t.Errorf("error %v and\n%s", err, &out)
	}
	r.stinted.amplification[bottom] = 1.5
	if err := r.printChecks(io.Discard); err == nil {
		t.Error("a busy machine excuses amplification by stint")
	}
}

func TestMostWithin(t *testing.T) {
	at := func(ms ...int) (ts []time.Duration) {
		for _, m := range ms {
			ts = append(ts, time.Duration(m)*time.Millisecond)
		}
		return ts
	}
	for _, test := range []struct {
		at   []time.Duration
		want int
	}{
		{nil, 0},
		{at(5), 1},
		{at(0, 1000), 1}, // half-open
		{at(999, 0), 2},  // in any order
		{at(0, 900, 1800, 1850, 1899, 2700), 4},
	} {
		if got := mostWithin(test.at, time.Second); got != test.want {
			t.Errorf("mostWithin(%v) = %d, want %d", test.at, got, test.want)
		}
	}
}

func TestRecovery(t *testing.T) {
	const mended = 5 * time.Second
	// users at 10/s from 0 to 9 s; from mended on, those that failed says are not served.
	users := func(failed func(after time.Duration) bool) (us []user) {
		for sent := time.Duration(0); sent < 9*time.Second; sent += 100 * time.Millisecond {
			us = append(us, user{sent: sent, ok: sent < 2*time.Second || sent >= mended && !failed(sent-mended)})
		}
		slices.Reverse(us) // answers come in any order
		return us
	}
	for _, test := range []struct {
		name   string
		failed func(time.Duration) bool
		want   time.Duration
	}{
		{"at once", func(time.Duration) bool { return false }, 0},
		{"after a while", func(d time.Duration) bool { return d < 1500*time.Millisecond }, 1500 * time.Millisecond},
		{"with a relapse", func(d time.Duration) bool { return d < time.Second || d == 1700*time.Millisecond }, 1800 * time.Millisecond},
		{"half", func(d time.Duration) bool { return d/(100*time.Millisecond)%2 == 0 }, -1},
		{"never", func(time.Duration) bool { return true }, -1},
	} {
		if got := recovery(users(test.failed), mended); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, bad := range []string{
		"-fault fire", "-fault none", "-headroom 1", "-headroom NaN", "-rps 0", "-rps 501", "-clients 0", "-clients 501", "-hold 0s", "-after 2m", "-addr :8080", "-addr 192.0.2.1:80", "-addr nonsense", "now",
	} {
		_, err := parse(strings.Fields(bad))
		if !errors.As(err, new(usageError)) {
			t.Errorf("%s: error %v, want a usage error", bad, err)
		}
	}
	if _, err := parse(strings.Fields("-fault stall -rps 50 -serve -addr localhost:0")); err != nil {
		t.Error(err)
	}
}

// TestInterrupted is Ctrl-C in the middle of a run.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	c := config{headroom: 2.5, fault: faultOutage, rps: 10, warm: time.Minute, hold: time.Minute, after: time.Minute}
	if _, err := storm(ctx, c, "unguarded", unguarded{}, io.Discard); err == nil {
		t.Error("an interrupted run has a result")
	}
}

// TestThrottle compares stint with itself: the database gets less of the outage.
func TestThrottle(t *testing.T) {
	if testing.Short() {
		t.Skip("takes ten seconds")
	}
	c := config{
		headroom: 2.5, throttle: true,
		fault: faultOutage, rps: 50, out: filepath.Join(t.TempDir(), "storm.html"),
		warm: time.Second, hold: 3 * time.Second, after: time.Second,
	}
	names, guards, err := c.guards()
	if err != nil {
		t.Fatal(err)
	}
	plain, err := storm(t.Context(), c, names[0], guards[0], io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	throttled, err := storm(t.Context(), c, names[1], guards[1], io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	r := newReport(c, plain, throttled)
	t.Logf("\n%s", r.table())
	if plain.name != "with stint" || throttled.name != "with Throttle" {
		t.Errorf("the runs are %q and %q", plain.name, throttled.name)
	}
	if p, s := plain.amplification[bottom], throttled.amplification[bottom]; s >= p || s > 0.9 {
		t.Errorf("%.2f attempts at the database per user request with Throttle, %.2f without, want fewer", s, p)
	}
	var out bytes.Buffer
	if err := r.printChecks(&out); err != nil || strings.Contains(out.String(), "unguarded") {
		t.Errorf("%v\n%s", err, &out)
	}
	if err := r.writeHTML(c.out); err != nil {
		t.Fatal(err)
	}
	html, err := os.ReadFile(c.out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"with stint", "with Throttle", "held back as well"} {
		if !strings.Contains(string(html), want) {
			t.Errorf("no %q on the page", want)
		}
	}
	if strings.Contains(string(html), "nguarded") {
		t.Error("the page speaks of a chain that did not run")
	}
}

// S23 in real time: where a few answers are late, a hedge in the ledger takes the
// wait from the users, for few attempts more.
func TestHedge(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	c := config{fault: faultTail, rps: 200, warm: 3 * time.Second, hold: 3 * time.Second, after: time.Second, headroom: 2.5, clients: 1, hedge: true}
	names, guards, err := c.guards()
	if err != nil {
		t.Fatal(err)
	}
	plain, err := storm(t.Context(), c, names[0], guards[0], io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	hedged, err := storm(t.Context(), c, names[1], guards[1], io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	r := newReport(c, plain, hedged)
	t.Log("\n" + r.table())
	if plain.name != "with stint" || hedged.name != "with Hedge" {
		t.Errorf("the runs are %q and %q", plain.name, hedged.name)
	}
	if r.late() > busyFrom {
		t.Skipf("the machine is busy: users came up to %v late", r.late())
	}
	// By how much the tail is cut depends on how busy the machine is: a hedge that
	// comes for no reason takes the budget of one that is needed.
	registry := prometheus.NewRegistry()
	registry.MustRegister(guards[1].(guarded).metrics)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	won := 0.0
	for _, f := range families {
		if f.GetName() == "stint_hedge_wins_total" {
			for _, m := range f.GetMetric() {
				won += m.GetCounter().GetValue()
			}
		}
	}
	if plain.p99 < tailDelay || won == 0 {
		t.Errorf("99 %% of the users are answered within %v, and with hedges within %v; %.0f hedges won", plain.p99, hedged.p99, won)
	}
	if got := hedged.amplification[bottom]; got > 1.11 {
		t.Errorf("%.2f attempts at the database per user request", got)
	}
	html := filepath.Join(t.TempDir(), "storm.html")
	if err := r.writeHTML(html); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(html)
	if err != nil || !strings.Contains(string(text), "How long users wait") || !strings.Contains(string(text), "99 % of them") {
		t.Errorf("the page lacks the chart or the row: %v", err)
	}
}
