package stint

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// A headerLine is one line of a header in testdata/deadline_headers.json.
type headerLine string

func (l *headerLine) UnmarshalJSON(b []byte) error {
	var s string
	if json.Unmarshal(b, &s) == nil {
		*l = headerLine(s)
		return nil
	}
	var v struct {
		Hex    string
		Repeat string
		Count  int
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	raw, err := hex.DecodeString(v.Hex)
	*l = headerLine(string(raw) + strings.Repeat(v.Repeat, v.Count))
	return err
}

// A deadlineRow is one row of testdata/deadline_headers.json.
type deadlineRow struct {
	Row         int
	Name        string
	HandledBy   string `json:"handled_by"`
	Raw         string
	Names       []string
	Deadline    []headerLine
	Timeout     []headerLine
	NowMS       int64 `json:"now_ms"`
	MaxMS       int64 `json:"max_ms"`
	ToleranceMS int64 `json:"tolerance_ms"`

	State       headerState
	Usable      bool
	Number      int64
	EffectiveMS int64 `json:"effective_ms"`
	Expired     bool
	Gross       bool `json:"gross_skew"`
	Default     int  `json:"http_status_default"`
	Reject      int  `json:"http_status_reject_invalid"`

	ReserveMS         int64 `json:"reserve_ms"`
	Outgoing          *struct{ Deadline, Timeout string }
	OutgoingHeaderSet string `json:"outgoing_header_set"`
	Note              string
}

func readDeadlineRows(t *testing.T) []deadlineRow {
	t.Helper()
	b, err := os.ReadFile("testdata/deadline_headers.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Comment []string
		Rows    []deadlineRow
	}
	dec := json.NewDecoder(strings.NewReader(string(b)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&table); err != nil {
		t.Fatal(err)
	}
	seen := make(map[int]bool)
	for _, r := range table.Rows {
		seen[r.Row] = true
	}
	for n := 1; n <= 32; n++ {
		if !seen[n] {
			t.Errorf("row %d is missing", n)
		}
	}
	return table.Rows
}

func (r *deadlineRow) header() http.Header {
	h := make(http.Header)
	for i, l := range r.Deadline {
		name := HeaderDeadline
		if r.Names != nil {
			name = r.Names[i]
		}
		h[name] = append(h[name], string(l))
	}
	for _, l := range r.Timeout {
		h[HeaderTimeout] = append(h[HeaderTimeout], string(l))
	}
	return h
}

// check reads h as a server with the row's clock and compares everything that
// the row promises.
func (r *deadlineRow) check(t *testing.T, h http.Header) {
	t.Helper()
	now, wall := time.Now(), time.UnixMilli(r.NowMS)
	limit := time.Duration(r.MaxMS) * time.Millisecond
	d, state, gross := readDeadline(scanned(h), now, wall, limit, time.Duration(r.ToleranceMS)*time.Millisecond)
	if state != r.State {
		t.Errorf("state = %s, want %s", state, r.State)
	}
	if gross != r.Gross {
		t.Errorf("gross = %v, want %v", gross, r.Gross)
	}
	if state.usable() != r.Usable || (d != nil) != r.Usable {
		t.Fatalf("state.usable() = %v, deadline %v; want usable: %v", state.usable(), d, r.Usable)
	}
	if want := !r.Usable && r.State != stateAbsent; state.invalid() != want {
		t.Errorf("state.invalid() = %v, want %v", state.invalid(), want)
	}
	status, reject := http.StatusOK, http.StatusOK
	switch {
	case d != nil && !d.e.After(now):
		status, reject = http.StatusGatewayTimeout, http.StatusGatewayTimeout
	case state.invalid():
		reject = http.StatusBadRequest
	}
	if status != r.Default || reject != r.Reject {
		t.Errorf("status %d, %d where unusable values are refused; want %d, %d", status, reject, r.Default, r.Reject)
	}
	if d == nil {
		return
	}
	if d.ms != r.Number {
		t.Errorf("number = %d, want %d", d.ms, r.Number)
	}
	if got, want := d.e.Sub(now), time.Duration(r.EffectiveMS-r.NowMS)*time.Millisecond; got != want {
		t.Errorf("deadline in force %v after arrival, want %v", got, want)
	}
	if got := !d.e.After(now); got != r.Expired {
		t.Errorf("expired = %v, want %v", got, r.Expired)
	}
	if !d.e0.Equal(d.e) {
		t.Errorf("e0 %v differs from e %v with no context involved", d.e0, d.e)
	}
	if r.ReserveMS == 0 {
		return
	}
	x := d.e.Add(-time.Duration(r.ReserveMS) * time.Millisecond)
	if left := x.Sub(now).Milliseconds(); r.Outgoing == nil {
		if left >= 1 {
			t.Errorf("%d ms left to send on, want less than 1", left)
		}
	} else if got := strconv.FormatInt(d.onWire(x), 10); got != r.Outgoing.Deadline || strconv.FormatInt(left, 10) != r.Outgoing.Timeout {
		t.Errorf("sent on: %s and %d, want %s and %s", got, left, r.Outgoing.Deadline, r.Outgoing.Timeout)
	} else if r.OutgoingHeaderSet != "" && len(got) == len(r.OutgoingHeaderSet) && got >= r.OutgoingHeaderSet {
		t.Errorf("sent on: %s, want less than the %s that was asked for", got, r.OutgoingHeaderSet)
	}
}

// TestP5_O33_DeadlineHeaderTable: one policy for each value, and none of them
// gives a handler more time than it was granted.
func TestP5_O33_DeadlineHeaderTable(t *testing.T) {
	for _, r := range readDeadlineRows(t) {
		if r.HandledBy == "net/http" {
			continue // the next test
		}
		t.Run(fmt.Sprintf("%d/%s", r.Row, r.Name), func(t *testing.T) { r.check(t, r.header()) })
	}
}

// TestO33_DeadlineHeaderTableOverTheWire sends each row to a real server byte
// for byte, so that the table says what net/http hands on and not what we
// imagine.
func TestO33_DeadlineHeaderTableOverTheWire(t *testing.T) {
	headers := make(chan http.Header, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		headers <- r.Header
	}))
	defer srv.Close()
	for _, r := range readDeadlineRows(t) {
		t.Run(fmt.Sprintf("%d/%s", r.Row, r.Name), func(t *testing.T) {
			var req strings.Builder
			req.WriteString("GET / HTTP/1.1\r\nHost: stint.test\r\nConnection: close\r\n")
			switch {
			case r.Raw != "":
				req.WriteString(r.Raw + "\r\n")
			default:
				for i, l := range r.Deadline {
					name := HeaderDeadline
					if r.Names != nil {
						name = r.Names[i]
					}
					req.WriteString(name + ": " + string(l) + "\r\n")
				}
			}
			for _, l := range r.Timeout {
				req.WriteString(HeaderTimeout + ": " + string(l) + "\r\n")
			}
			req.WriteString("\r\n")
			conn, err := net.Dial("tcp", srv.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.WriteString(conn, req.String()); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if r.HandledBy == "net/http" {
				if resp.StatusCode != r.Default || r.Default != r.Reject {
					t.Errorf("net/http answers %d, want %d", resp.StatusCode, r.Default)
				}
				select {
				case h := <-headers:
					t.Errorf("the handler saw %q", h)
				default:
				}
				return
			}
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("status %d, want 200", resp.StatusCode)
			}
			r.check(t, <-headers)
		})
	}
}

func TestDeadlineHeaderLines(t *testing.T) {
	for _, tt := range []struct {
		name string
		h    http.Header
		want []string // sorted
	}{
		{"nil map", nil, nil},
		{"nil value", http.Header{HeaderDeadline: nil}, nil},
		{"empty list", http.Header{HeaderDeadline: {}}, nil},
		{"canonical", http.Header{HeaderDeadline: {"1"}}, []string{"1"}},
		{"other case", http.Header{"x-request-deadline": {"1"}}, []string{"1"}},
		{"three spellings", http.Header{HeaderDeadline: {"1"}, "x-request-deadline": {"2"}, "X-REQUEST-DEADLINE": {"3"}}, []string{"1", "2", "3"}},
		{"another of the same length", http.Header{"X-Request-Deadlinf": {"1"}}, nil},
	} {
		got := slices.Clone(headerLines(tt.h, HeaderDeadline))
		slices.Sort(got)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	// A list with room at its end: appending to it would write into memory of
	// the caller's.
	backing := []string{"1", "untouched"}
	h := http.Header{HeaderDeadline: backing[:1], "x-request-deadline": {"2"}}
	headerLines(h, HeaderDeadline)
	if backing[1] != "untouched" {
		t.Errorf("headerLines wrote %q into the caller's array", backing[1])
	}
}

// usableMember is the grammar of a member, written down a second time.
var usableMember = regexp.MustCompile(`^[0-9]{1,19}$`)

// smallestUsable reads header lines in another way than parseMillis does.
func smallestUsable(lines []string) (ms int64, ok bool) {
	if len(lines) == 0 {
		return 0, false
	}
	members := strings.Split(strings.Join(lines, ","), ",")
	if len(members) > 4 {
		return 0, false
	}
	ms = math.MaxInt64
	for _, m := range members {
		m = strings.TrimFunc(m, func(r rune) bool { return r == ' ' || r == '\t' })
		if v, err := strconv.ParseInt(m, 10, 64); usableMember.MatchString(m) && err == nil {
			ms, ok = min(ms, v), true
		}
	}
	return ms, ok
}

func FuzzParseDeadline(f *testing.F) {
	const now = 1779999990000
	f.Add("1780000000000", "", int64(now), int64(3600000), int64(0), int64(3e6))
	f.Add("1780000000000", "10000", int64(now), int64(3600000), int64(250), int64(3e6))
	f.Add("1780000000000, 1\n2", "5\n6", int64(now), int64(3600000), int64(0), int64(1))
	f.Add("9223372036854775807", "9223372036854775807", int64(now), int64(1), int64(0), int64(1e9))
	f.Add("9223372036854775808", "-1", int64(0), int64(3600000), int64(1), int64(1e6))
	f.Add("+1\n-1\n\n1e3", "\n\n\n\n\n", int64(now), int64(3600000), int64(0), int64(1e6))
	f.Add("\xff\u0661", "\xff", int64(now), int64(3600000), int64(0), int64(1e6))
	f.Add("1779999995", "0", int64(now), int64(3600000), int64(0), int64(1e6))
	f.Fuzz(func(t *testing.T, deadlines, timeouts string, nowMS, limitMS, toleranceMS, reserve int64) {
		within := func(v, lo, hi int64) int64 { return lo + int64(uint64(v-lo)%uint64(hi-lo+1)) }
		nowMS = within(nowMS, 0, 1<<42)
		limit := time.Duration(within(limitMS, 1, 24*60*60*1000)) * time.Millisecond
		tolerance := time.Duration(within(toleranceMS, 0, 10000)) * time.Millisecond
		keep := time.Duration(within(reserve, 1, 1e9))

		h := http.Header{HeaderDeadline: strings.Split(deadlines, "\n")}
		if timeouts != "" {
			h[HeaderTimeout] = strings.Split(timeouts, "\n")
		}
		want, wantOK := smallestUsable(h[HeaderDeadline])
		left, leftOK := smallestUsable(h[HeaderTimeout])

		now, wall := time.Now(), time.UnixMilli(nowMS)
		d, state, gross := readDeadline(scanned(h), now, wall, limit, tolerance)
		if state.usable() != wantOK || (d != nil) != wantOK {
			t.Fatalf("usable = %v, deadline %v; want %v", state.usable(), d, wantOK)
		}
		if !slices.Contains(headerStates, state) {
			t.Fatalf("state %q is not in headerStates", state)
		}
		if d == nil {
			if gross {
				t.Fatal("gross skew without a deadline")
			}
			return
		}
		// The number never rises, and never lies further away than the limit; by
		// a clock that the companion shows to be off, a minute or a day more.
		latest := nowMS + limit.Milliseconds()
		switch {
		case gross:
			latest += (24 * time.Hour).Milliseconds()
		case leftOK:
			latest += grossSkew.Milliseconds()
		}
		if d.ms > min(want, latest) || d.ms < min(want, latest)-(grossSkew+tolerance).Milliseconds() {
			t.Fatalf("number = %d, want the lesser of %d and %d", d.ms, want, latest)
		}
		if d.e.After(now.Add(limit)) {
			t.Fatalf("deadline %v after arrival, the limit is %v", d.e.Sub(now), limit)
		}
		absolute := now.Add(time.Duration(d.ms-nowMS) * time.Millisecond)
		if leftOK {
			left = min(left, limit.Milliseconds())
			if after := d.e.Sub(now); after > time.Duration(left)*time.Millisecond {
				t.Fatalf("deadline %v after arrival, the companion says %d ms", after, left)
			}
		} else if gross || !d.e.Equal(absolute) {
			t.Fatalf("without companion: deadline off by %v, gross %v", d.e.Sub(absolute), gross)
		}
		if !gross && d.e.After(absolute.Add(tolerance)) {
			t.Fatalf("deadline passes the absolute one by %v, tolerance %v", d.e.Sub(absolute), tolerance)
		}

		// Sent on, and read back.
		for _, keep := range []time.Duration{keep, keep + time.Second, limit} {
			out := d.onWire(d.e.Add(-keep))
			if out < 0 || out >= want && out != 0 {
				t.Fatalf("sent on: %d after %d arrived, reserve %v", out, want, keep)
			}
			back, members, s := parseMillis([]string{strconv.FormatInt(out, 10)})
			if back != out || members != 1 || s != statePresent {
				t.Fatalf("%d reads back as %d, %d members, %s", out, back, members, s)
			}
		}
		if out := d.onWire(d.e0); out != max(0, d.ms) {
			t.Fatalf("onWire(e0) = %d, want %d", out, d.ms)
		}
		if out := d.onWire(d.e0.Add(keep)); out > max(0, d.ms) {
			t.Fatalf("onWire beyond e0 = %d, want at most %d", out, d.ms)
		}
	})
}

// TestP5_DeadlineFallsAlongRandomChains sends deadlines along chains of hosts
// whose clocks are wrong, each with its own tolerance and limits, and some of
// which lose the companion.
func TestP5_DeadlineFallsAlongRandomChains(t *testing.T) {
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, seed))
	upTo := func(d time.Duration) time.Duration { return time.Duration(rnd.Int64N(int64(d) + 1)) }
	origin := time.Now()
	hops, expired, grosses := 0, 0, 0
	for chain := range 20000 {
		now := origin.Add(upTo(time.Hour))
		// skew makes a host's clock from the true time.
		skew := func() time.Time {
			scale := []time.Duration{0, 10 * time.Millisecond, time.Second, 2 * time.Minute, 48 * time.Hour}[rnd.IntN(5)]
			return now.Round(0).Add(upTo(2*scale) - scale)
		}
		// The edge.
		x := now.Add(time.Millisecond + upTo(5*time.Second))
		header := wallMillis(x, now, skew())
		companion := x.Sub(now).Milliseconds()
		for hop := range 8 {
			now = now.Add(upTo(20 * time.Millisecond)) // on the wire and in queues
			h := http.Header{HeaderDeadline: {strconv.FormatInt(header, 10)}}
			if rnd.IntN(4) > 0 {
				h[HeaderTimeout] = []string{strconv.FormatInt(companion, 10)}
			}
			limit := []time.Duration{time.Second, time.Minute, time.Hour}[rnd.IntN(3)]
			tolerance := upTo(300*time.Millisecond) * time.Duration(rnd.IntN(2))
			d, state, gross := readDeadline(scanned(h), now, skew(), limit, tolerance)
			if d == nil {
				t.Fatalf("chain %d hop %d: %q is %s", chain, hop, h, state)
			}
			if gross {
				grosses++
			}
			if d.e.After(now.Add(limit)) {
				t.Fatalf("chain %d hop %d: deadline %v away, limit %v", chain, hop, d.e.Sub(now), limit)
			}
			if h[HeaderTimeout] != nil && d.e.After(now.Add(time.Duration(companion)*time.Millisecond)) {
				t.Fatalf("chain %d hop %d: deadline %v away, companion %d ms", chain, hop, d.e.Sub(now), companion)
			}
			if !d.e.After(now) {
				expired++
				break // 504
			}
			now = now.Add(upTo(d.e.Sub(now) / 4)) // the handler works
			limitOut := d.e
			if rnd.IntN(3) == 0 { // and sets a limit of its own, sooner or not
				if own := now.Add(upTo(5 * time.Second)); own.Before(limitOut) {
					limitOut = own
				}
			}
			// Any reserve above 0 must do, also one below the header's unit.
			x = limitOut.Add(-(1 + upTo([]time.Duration{0, time.Millisecond, 10 * time.Millisecond}[rnd.IntN(3)])))
			companion = x.Sub(now).Milliseconds()
			if companion < 1 {
				break // fails locally
			}
			next := d.onWire(x)
			if next >= header && next != 0 {
				t.Fatalf("chain %d hop %d: %d sent on after %d arrived", chain, hop, next, header)
			}
			if shorter := d.e0.Sub(x); d.ms-next < shorter.Milliseconds() && next != 0 {
				t.Fatalf("chain %d hop %d: header fell by %d ms, the limit by %v", chain, hop, d.ms-next, shorter)
			}
			header = next
			hops++
		}
	}
	if hops < 20000 || expired < 1000 || grosses < 1000 {
		t.Errorf("%d hops, %d expired, %d broken clocks: the chains do not show what they should", hops, expired, grosses)
	}
}

// steppedWall returns t as time.Now would have read it had the wall clock been
// stepped by d: only the wall part of the reading moves. Package time offers no
// way to this, so it is done on the layout of time.Time, and checked.
func steppedWall(t *testing.T, reading time.Time, d time.Duration) time.Time {
	t.Helper()
	stepped := reading
	wall := (*uint64)(unsafe.Pointer(&stepped)) // 1 bit, 33 bits of seconds, 30 of nanoseconds
	*wall += uint64(d/time.Second) << 30
	if stepped.Sub(reading) != 0 || stepped.Round(0).Sub(reading.Round(0)) != d {
		t.Skip("package time has another layout than this test knows")
	}
	return stepped
}

func hasMonotonic(t time.Time) bool { return t != t.Round(0) }

// TestO21_DeadlineDoesNotMoveWithTheWallClock: a deadline is converted once, on
// arrival. What the wall clock does afterwards moves neither the instant, nor
// what derives from it, nor the number that is sent on.
func TestO21_DeadlineDoesNotMoveWithTheWallClock(t *testing.T) {
	now := time.Now()
	wall := now.Round(0).Truncate(time.Millisecond)
	ms := wall.UnixMilli() + 10000
	for _, h := range []http.Header{
		{HeaderDeadline: {strconv.FormatInt(ms, 10)}},
		{HeaderDeadline: {strconv.FormatInt(ms, 10)}, HeaderTimeout: {"10000"}},
		{HeaderDeadline: {strconv.FormatInt(ms-3600*1000, 10)}, HeaderTimeout: {"10000"}}, // a broken clock
		{HeaderDeadline: {strconv.FormatInt(math.MaxInt64, 10)}, HeaderTimeout: {"10000"}},
	} {
		d, _, _ := readDeadline(scanned(h), now, wall, time.Hour, 0)
		if !hasMonotonic(d.e0) || !hasMonotonic(d.e) {
			t.Errorf("%v: the deadline has no monotonic reading", h)
		}
		for _, step := range []time.Duration{0, time.Hour, -time.Hour} {
			later := steppedWall(t, now.Add(2*time.Second), step)
			if left := d.e.Sub(later); left != 8*time.Second {
				t.Errorf("%v, wall clock stepped by %v: %v left, want 8 s", h, step, left)
			}
			// A shorter limit, taken from the stepped clock, as a handler would.
			own := later.Add(3 * time.Second)
			if !own.Before(d.e) {
				t.Errorf("%v, wall clock stepped by %v: a limit 5 s sooner is not before the deadline", h, step)
			}
			if got := d.onWire(own); got != d.ms-5000 {
				t.Errorf("%v, wall clock stepped by %v: sent on %d, want %d", h, step, got, d.ms-5000)
			}
			if got := d.onWire(later.Add(20 * time.Second)); got != d.ms {
				t.Errorf("%v, wall clock stepped by %v: sent on %d for a limit after the deadline, want %d", h, step, got, d.ms)
			}
		}
	}
	// A zone is not a time: the offset of summer time changes nothing.
	zone := time.FixedZone("summer", 2*60*60)
	d, _, _ := readDeadline(scanned(http.Header{HeaderDeadline: {strconv.FormatInt(ms, 10)}}), now.In(zone), wall.In(zone), time.Hour, 0)
	if got := d.e.Sub(now); got != 10*time.Second {
		t.Errorf("in another zone: %v left, want 10 s", got)
	}
}

func TestDeadlineRounding(t *testing.T) {
	for _, tt := range []struct {
		d    time.Duration
		want int64
	}{
		{0, 0}, {1, 1}, {999999, 1}, {1000000, 1}, {1000001, 2},
		{-1, 0}, {-1000000, -1}, {-1000001, -1}, {-1999999, -1},
		{math.MaxInt64, 9223372036855}, {math.MinInt64, -9223372036854},
	} {
		if got := ceilMillis(tt.d); got != tt.want {
			t.Errorf("ceilMillis(%d) = %d, want %d", tt.d, got, tt.want)
		}
	}
	now := time.Now()
	for _, tt := range []struct {
		wall time.Time
		want int64
	}{
		{time.Unix(100, 999999), 100000},
		{time.Unix(100, 1000000), 100001},
		{time.Unix(-1, 999999999), -1}, // before 1970 rounds down as well
	} {
		if got := wallMillis(now, now, tt.wall); got != tt.want {
			t.Errorf("wallMillis at %v = %d, want %d", tt.wall, got, tt.want)
		}
	}
	// A deadline never lies after the number it came from.
	wall := time.Unix(100, 999999)
	d, _, _ := readDeadline(scanned(http.Header{HeaderDeadline: {"100001"}}), now, wall, time.Hour, 0)
	if got := d.e0.Sub(now); got != 1 {
		t.Errorf("the deadline lies %v after now, want 1ns", got)
	}
}

func TestDeadlineUnitSuspect(t *testing.T) {
	const now, day = 1779999990000, 24 * 60 * 60 * 1000
	for _, tt := range []struct {
		ms   int64
		want bool
	}{
		{now, false},
		{now + day - 1, false},
		{now/1000 + 5, true},
		{now/1000 - day/1000 + 1, true},
		{now/1000 - day/1000 - 1, false},
		{now * 1000, true},
		{(now + day) * 1000, false},
		{now * 1000000, true},
		{0, false},
		{30, false},
		{math.MaxInt64, false},
	} {
		if got := unitSuspect(tt.ms, now); got != tt.want {
			t.Errorf("unitSuspect(%d) = %v, want %v", tt.ms, got, tt.want)
		}
	}
	// A host that believes it is 1970: all units look alike there.
	if unitSuspect(5000, 1000) {
		t.Error("unitSuspect(5000) at 1 s = true, want false: it is right as milliseconds")
	}
}

func BenchmarkReadDeadline(b *testing.B) {
	now := time.Now()
	h := http.Header{
		"Accept": {"*/*"}, "Accept-Encoding": {"gzip"}, "User-Agent": {"Go-http-client/1.1"}, "Traceparent": {"00-0-0-00"},
		HeaderDeadline: {strconv.FormatInt(now.UnixMilli()+10000, 10)}, HeaderTimeout: {"10000"},
	}
	b.ReportAllocs()
	for b.Loop() {
		if d, _, _ := readDeadline(scanned(h), now, now, time.Hour, 0); d == nil {
			b.Fatal("no deadline")
		}
	}
}

func scanned(h http.Header) *scannedHeader {
	s := scanHeader(h)
	return &s
}
