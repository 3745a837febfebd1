package stint

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestBackoffConfig(t *testing.T) {
	def := Backoff{}.withDefaults()
	if def != (Backoff{50 * time.Millisecond, 2 * time.Second, 10 * time.Second}) {
		t.Errorf("defaults: %+v", def)
	}
	if got := (Backoff{Base: 5 * time.Second}).withDefaults().Max; got != 5*time.Second {
		t.Errorf("Max beside a Base of 5 s = %v, want 5 s", got)
	}
	set := Backoff{1, 2, 3}
	if got := set.withDefaults(); got != set {
		t.Errorf("withDefaults changed what was set: %+v", got)
	}
	const base, longest, hint = "Config.Backoff.Base", "Config.Backoff.Max", "Config.Backoff.MaxRetryAfter"
	for _, tt := range []struct {
		name string
		b    Backoff
		want []string // fields
	}{
		{"zero", Backoff{}, nil},
		{"defaults", def, nil},
		{"long base, no max", Backoff{Base: time.Hour}, nil},
		{"equal", Backoff{Base: 1, Max: 1}, nil},
		{"largest", Backoff{math.MaxInt64, math.MaxInt64, math.MaxInt64}, nil},
		{"max below base", Backoff{Base: 2, Max: 1}, []string{longest}},
		{"max below the default base", Backoff{Max: 49 * time.Millisecond}, []string{longest}},
		{"negative base", Backoff{Base: -1}, []string{base}},
		{"negative max", Backoff{Max: -1}, []string{longest}},
		{"negative hint", Backoff{MaxRetryAfter: -1}, []string{hint}},
		{"everything", Backoff{-1, -2, math.MinInt64}, []string{base, longest, hint}},
	} {
		var errs configErrors
		tt.b.check(&errs)
		if got := badFields(t, errs); !slices.Equal(got, tt.want) {
			t.Errorf("%s: bad fields %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestBackoffDelay(t *testing.T) {
	const ms = time.Millisecond
	def := Backoff{}.withDefaults()
	for _, tt := range []struct {
		b    Backoff
		n    int
		want time.Duration // the longest
	}{
		{def, -1, 50 * ms}, {def, 0, 50 * ms}, {def, 1, 50 * ms}, {def, 2, 100 * ms}, {def, 3, 200 * ms},
		{def, 6, 1600 * ms}, {def, 7, 2000 * ms}, {def, 37, 2000 * ms}, {def, 64, 2000 * ms}, {def, 65, 2000 * ms}, {def, 10000, 2000 * ms},
		{def, math.MaxInt, 2000 * ms}, {def, math.MinInt, 50 * ms},
		{Backoff{Base: 3, Max: 13}, 3, 12}, {Backoff{Base: 3, Max: 13}, 4, 13}, {Backoff{Base: 3, Max: 12}, 3, 12},
		{Backoff{Base: 1, Max: math.MaxInt64}, 63, 1 << 62}, {Backoff{Base: 1, Max: math.MaxInt64}, 64, math.MaxInt64},
		{Backoff{Base: math.MaxInt64, Max: math.MaxInt64}, 2, math.MaxInt64},
		{Backoff{}, 5, 0},
	} {
		if got := tt.b.delay(tt.n, 0); got != 0 {
			t.Errorf("%+v: delay(%d, 0) = %v, want 0", tt.b, tt.n, got)
		}
		if got, want := tt.b.delay(tt.n, 0.5), tt.want/2; (got - want).Abs() > 1+want>>50 {
			t.Errorf("%+v: delay(%d, 0.5) = %v, want %v", tt.b, tt.n, got, want)
		}
		// float64 has 53 bits: at the top of the range the last are lost.
		if got := tt.b.delay(tt.n, math.Nextafter(1, 0)); got > tt.want || got < tt.want-tt.want>>50 {
			t.Errorf("%+v: delay(%d, almost 1) = %v, want %v", tt.b, tt.n, got, tt.want)
		}
	}
}

// TestO20_BackoffNeverOverflows: any retry, any setting, any jitter.
func TestO20_BackoffNeverOverflows(t *testing.T) {
	sizes := []time.Duration{0, 1, 9, time.Millisecond, time.Hour, math.MaxInt64/2 + 1, math.MaxInt64 - 1, math.MaxInt64}
	jitters := []float64{0, math.SmallestNonzeroFloat64, 0.1, 0.5, 0.9, math.Nextafter(1, 0)}
	for _, base := range sizes {
		for _, longest := range sizes {
			raw := Backoff{Base: base, Max: longest}
			for _, b := range []Backoff{raw, raw.withDefaults()} {
				for n := 0; n <= 10000; n++ {
					before := time.Duration(0)
					for _, j := range jitters {
						d := b.delay(n, j)
						if d < before || d > b.Max {
							t.Fatalf("%+v: delay(%d, %v) = %v, want %v to %v", b, n, j, d, before, b.Max)
						}
						before = d
					}
					if n > 100 && n < 9900 {
						n += 97
					}
				}
			}
		}
	}
}

// TestO20_BackoffHasFullJitter: all of the range is used, evenly, down to a
// range of a nanosecond.
func TestO20_BackoffHasFullJitter(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	const draws = 20000
	for _, tt := range []struct {
		b     Backoff
		n     int
		limit time.Duration
	}{
		{Backoff{Base: 1, Max: 1}, 10000, 1},
		{Backoff{Base: 9, Max: 9}, 10000, 9},
		{Backoff{Base: 1, Max: math.MaxInt64}, 4, 8},
		{Backoff{}.withDefaults(), 1, 50 * time.Millisecond},
		{Backoff{}.withDefaults(), 10000, 2 * time.Second},
		{Backoff{Base: math.MaxInt64, Max: math.MaxInt64}, 36, math.MaxInt64},
	} {
		values := make(map[time.Duration]int)
		sum := 0.0
		for range draws {
			d := tt.b.delay(tt.n, rnd.Float64())
			values[d]++
			sum += float64(d)
		}
		if mean, want := sum/draws, float64(tt.limit)/2; math.Abs(mean-want) > want*0.03 {
			t.Errorf("%+v: mean of retry %d = %v, want about %v", tt.b, tt.n, mean, want)
		}
		if tt.limit < 10 {
			for d := range tt.limit + 1 {
				if want := draws / float64(tt.limit+1); math.Abs(float64(values[d])-want) > want/5 {
					t.Errorf("%+v: retry %d waits %v %d times of %d, want about %v", tt.b, tt.n, d, values[d], draws, want)
				}
			}
		} else if len(values) < draws*9/10 {
			t.Errorf("%+v: %d different waits of %d", tt.b, len(values), draws)
		}
	}
}

// forever is a hint that does not fit a Duration: longer than anybody allows.
const forever = math.MaxInt64

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 5, 28, 20, 26, 40, 500_000_000, time.UTC)
	imf := func(d time.Duration) string { return now.Add(d).Truncate(time.Second).Format(http.TimeFormat) }
	in := func(layout string, d time.Duration) string {
		return now.Add(d).Truncate(time.Second).Format(layout)
	}
	const s, ms = time.Second, time.Millisecond
	for _, tt := range []struct {
		name  string
		after []string
		ms    []string
		date  string
		want  time.Duration // -1: none
	}{
		{name: "none", want: -1},
		{name: "empty list", after: []string{}, want: -1},

		{name: "O-17 an hour", after: []string{"3600"}, want: 3600 * s},
		{name: "seconds", after: []string{"2"}, want: 2 * s},
		{name: "zero", after: []string{"0"}, want: 0},
		{name: "leading zeros", after: []string{"0002"}, want: 2 * s},
		{name: "blanks around", after: []string{" \t2 "}, want: 2 * s},

		// Dates are in whole seconds, and now is in the middle of one.
		{name: "O-18 IMF-fixdate 2 s ahead", after: []string{imf(2 * s)}, want: 1500 * ms},
		{name: "O-18 RFC 850", after: []string{in("Monday, 02-Jan-06 15:04:05 GMT", 2*s)}, want: 1500 * ms},
		{name: "O-18 asctime", after: []string{in(time.ANSIC, 2*s)}, want: 1500 * ms},
		{name: "O-18 an hour ago", after: []string{imf(-time.Hour)}, want: -1},
		{name: "O-18 this second", after: []string{imf(0)}, want: -1},
		{name: "O-18 IMF-fixdate, other zone", after: []string{strings.Replace(imf(2*s), "GMT", "CET", 1)}, want: -1},
		{name: "O-18 numeric zone", after: []string{in(time.RFC1123Z, 2*s)}, want: -1},
		{name: "O-18 RFC 3339", after: []string{in(time.RFC3339, 2*s)}, want: -1},
		{name: "O-18 garbage", after: []string{"soon"}, want: -1},
		{name: "O-18 empty", after: []string{""}, want: -1},
		{name: "O-18 blank", after: []string{" "}, want: -1},
		{name: "O-18 negative", after: []string{"-5"}, want: -1},
		{name: "plus sign", after: []string{"+5"}, want: -1},
		{name: "O-18 fraction", after: []string{"1.5"}, want: -1},
		{name: "unit", after: []string{"5s"}, want: -1},
		{name: "exponent", after: []string{"1e3"}, want: -1},
		{name: "hexadecimal", after: []string{"0x10"}, want: -1},
		{name: "underscore", after: []string{"1_0"}, want: -1},
		{name: "comma list", after: []string{"1, 2"}, want: -1},
		{name: "digits that are not ASCII", after: []string{"\u0662"}, want: -1},
		{name: "not UTF-8", after: []string{"\xff"}, want: -1},
		{name: "O-18 two lines", after: []string{"2", "5"}, want: 5 * s},
		{name: "O-18 two lines, the other way", after: []string{"5", "2"}, want: 5 * s},
		{name: "O-18 two lines, one unusable", after: []string{"-5", "2"}, want: 2 * s},
		{name: "O-18 two lines, seconds and date", after: []string{"1", imf(3 * s)}, want: 2500 * ms},
		{name: "O-18 two lines, one past", after: []string{imf(-time.Hour), "2"}, want: 2 * s},
		{name: "O-18 Date lags a minute", after: []string{imf(2*s - time.Minute)}, date: imf(-time.Minute), want: 2 * s},
		{name: "O-18 Date leads by a minute", after: []string{imf(2*s + time.Minute)}, date: imf(time.Minute), want: 2 * s},
		{name: "date equal to Date", after: []string{imf(0)}, date: imf(0), want: 0},
		{name: "date before Date", after: []string{imf(2 * s)}, date: imf(time.Minute), want: -1},
		{name: "Date in another form", after: []string{imf(2 * s)}, date: in(time.ANSIC, 0), want: 2 * s},
		{name: "Date is garbage", after: []string{imf(2 * s)}, date: "yesterday", want: 1500 * ms},
		{name: "Date does not matter to seconds", after: []string{"2"}, date: imf(-time.Hour), want: 2 * s},

		{name: "O-19 just too many seconds", after: []string{"9223372037"}, want: forever},
		{name: "O-19 most seconds that fit", after: []string{"9223372036"}, want: 9223372036 * s},
		{name: "O-19 wraps to 0.3 s", after: []string{"18446744074"}, want: forever},
		{name: "O-19 20 digits", after: []string{"99999999999999999999"}, want: forever},
		{name: "O-19 100000 digits", after: []string{strings.Repeat("9", 100000)}, want: forever},
		{name: "O-19 100000 zeros", after: []string{strings.Repeat("0", 100000) + "2"}, want: 2 * s},
		{name: "O-19 the year 9999", after: []string{"Fri, 31 Dec 9999 23:59:59 GMT"}, want: forever},
		{name: "O-19 the year 9999 from year 0", after: []string{"Fri, 31 Dec 9999 23:59:59 GMT"}, date: "Sat, 01 Jan 0000 00:00:00 GMT", want: forever},
		{name: "the year 0", after: []string{"Sat, 01 Jan 0000 00:00:00 GMT"}, want: -1},
		{name: "O-19 beside a small one", after: []string{"1", "18446744074"}, want: forever},

		{name: "milliseconds", ms: []string{"250"}, want: 250 * ms},
		{name: "milliseconds, zero", ms: []string{"0"}, want: 0},
		{name: "milliseconds, fraction", ms: []string{"1.5"}, want: 1500 * time.Microsecond},
		{name: "milliseconds, leading zeros of a fraction", ms: []string{"0.05"}, want: 50 * time.Microsecond},
		{name: "milliseconds, long fraction", ms: []string{"1.0000019999"}, want: ms + 1},
		{name: "milliseconds, no fraction", ms: []string{"1."}, want: -1},
		{name: "milliseconds, nothing but fraction", ms: []string{".5"}, want: -1},
		{name: "milliseconds, point", ms: []string{"."}, want: -1},
		{name: "milliseconds, two points", ms: []string{"1.2.3"}, want: -1},
		{name: "milliseconds, comma", ms: []string{"1,5"}, want: -1},
		{name: "milliseconds, negative", ms: []string{"-1"}, want: -1},
		{name: "milliseconds, negative fraction", ms: []string{"1.-5"}, want: -1},
		{name: "milliseconds, NaN", ms: []string{"NaN"}, want: -1},
		{name: "milliseconds, date", ms: []string{imf(2 * s)}, want: -1},
		{name: "milliseconds, most that fit", ms: []string{"9223372036854.999999"}, want: 9223372036854 * ms},
		{name: "milliseconds, O-19", ms: []string{"9223372036855"}, want: forever},
		{name: "milliseconds, O-19 with fraction", ms: []string{"99999999999999999999.9"}, want: forever},
		{name: "both, seconds longer", after: []string{"1"}, ms: []string{"250"}, want: s},
		{name: "both, milliseconds longer", after: []string{"1"}, ms: []string{"1250"}, want: 1250 * ms},
		{name: "both, one unusable", after: []string{"1.5"}, ms: []string{"250"}, want: 250 * ms},
	} {
		h := make(http.Header)
		if tt.after != nil {
			h["Retry-After"] = tt.after
		}
		for _, v := range tt.ms {
			h.Add("retry-after-ms", v)
		}
		if tt.date != "" {
			h.Set("Date", tt.date)
		}
		got, ok := retryAfter(h, now)
		if ok != (tt.want >= 0) || got != max(0, tt.want) {
			t.Errorf("%s: retryAfter = %v, %v; want %v", tt.name, got, ok, tt.want)
		}
	}
}

// TestO18_RetryAfterZones: of the three forms only RFC 850's can name a zone to
// http.ParseTime. One that it does not know counts as GMT there: a wait that is
// off, never one that is negative.
func TestO18_RetryAfterZones(t *testing.T) {
	now := time.Date(2026, 5, 28, 20, 26, 40, 0, time.UTC)
	for v, want := range map[string]time.Duration{
		"Thursday, 28-May-26 20:26:42 GMT": 2 * time.Second,
		"Thursday, 28-May-26 20:26:42 UTC": 2 * time.Second,
		"Thursday, 28-May-26 20:26:42 XQZ": 2 * time.Second,
		"Thursday, 28-May-26 20:26:38 XQZ": -1,
		"Thursday, 28-May-26 20:26:42":     -1,
	} {
		got, ok := retryAfter(http.Header{"Retry-After": {v}}, now)
		if ok != (want >= 0) || got != max(0, want) {
			t.Errorf("%s: retryAfter = %v, %v; want %v", v, got, ok, want)
		}
	}
}

// TestO21_RetryAfterUsesTheWallClock: a date is the one hint that has to be
// compared with a wall clock, and with its reading on arrival.
func TestO21_RetryAfterUsesTheWallClock(t *testing.T) {
	now := time.Now()
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		stepped := steppedWall(t, now, step)
		h := http.Header{"Retry-After": {stepped.Add(2500 * time.Millisecond).UTC().Format(http.TimeFormat)}}
		if got, ok := retryAfter(h, stepped); !ok || got < 1500*time.Millisecond || got > 2500*time.Millisecond {
			t.Errorf("wall clock stepped by %v: %v, %v; want about 2 s", step, got, ok)
		}
	}
}

var (
	retryAfterDigits = regexp.MustCompile(`^[ \t]*[0-9]+[ \t]*$`)
	retryAfterMS     = regexp.MustCompile(`^[ \t]*[0-9]+(\.[0-9]+)?[ \t]*$`)
)

func FuzzRetryAfter(f *testing.F) {
	for _, v := range []string{"", "0", "2", "-5", "1.5", "9223372037", "18446744074", "99999999999999999999", "soon", " 3\t", "1\n2",
		"Thu, 28 May 2026 20:26:42 GMT", "Thursday, 28-May-26 20:26:42 PST", "Thu May 28 20:26:42 2026", "Fri, 31 Dec 9999 23:59:59 GMT"} {
		f.Add(v, "", "", int64(1780000000))
		f.Add(v, "1.5", "Thu, 28 May 2026 20:25:42 GMT", int64(1780000000))
		f.Add("", v, v, int64(1780000000))
	}
	f.Fuzz(func(t *testing.T, after, ms, date string, now int64) {
		h := http.Header{"Retry-After": strings.Split(after, "\n"), "Retry-After-Ms": strings.Split(ms, "\n"), "Date": {date}}
		got, ok := retryAfter(h, time.Unix(now%(1<<40), 0))
		if got < 0 || !ok && got != 0 {
			t.Fatalf("retryAfter = %v, %v", got, ok)
		}
		allowed := false // something is in the grammar
		must := false    // and asks for a wait whatever the clocks say
		for _, v := range h["Retry-After"] {
			_, err := http.ParseTime(strings.Trim(v, " \t"))
			must = must || retryAfterDigits.MatchString(v)
			allowed = allowed || must || err == nil
		}
		for _, v := range h["Retry-After-Ms"] {
			must = must || retryAfterMS.MatchString(v)
			allowed = allowed || must
		}
		if ok && !allowed || must && !ok {
			t.Fatalf("%q: retryAfter = %v, %v", h, got, ok)
		}
		// Lines can only lengthen the wait.
		for name, lines := range h {
			if name == "Date" {
				continue
			}
			for _, v := range lines {
				one := http.Header{name: {v}, "Date": h["Date"]}
				if d, ok := retryAfter(one, time.Unix(now%(1<<40), 0)); ok && d > got {
					t.Fatalf("%q asks for %v, all of %q for %v", one, d, h, got)
				}
			}
		}
	})
}

func BenchmarkRetryAfter(b *testing.B) {
	now := time.Date(2026, 5, 28, 20, 26, 40, 0, time.UTC)
	for _, v := range []string{"", "2", now.Format(http.TimeFormat), "soon"} {
		b.Run(fmt.Sprintf("%q", v), func(b *testing.B) {
			h := http.Header{"Date": {now.Format(http.TimeFormat)}}
			if v != "" {
				h.Set("Retry-After", v)
			}
			b.ReportAllocs()
			for b.Loop() {
				retryAfter(h, now)
			}
		})
	}
}
