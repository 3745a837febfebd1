package stint

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Defaults of Backoff.
const (
	DefaultBackoffBase   = 50 * time.Millisecond
	DefaultBackoffMax    = 2 * time.Second
	DefaultMaxRetryAfter = 10 * time.Second
)

// Backoff sets how long a retry waits. The wait before retry n, counted from 1,
// is drawn evenly from 0 to the lesser of Max and Base·2ⁿ⁻¹: "full jitter",
// which of the variants in "Exponential Backoff And Jitter" (AWS Architecture
// Blog) spreads callers that failed together best. A wait that the peer asks
// for is added to it.
type Backoff struct {
	// Base is the longest wait before the first retry. 0: DefaultBackoffBase,
	// 50 ms. Negative is invalid.
	Base time.Duration
	// Max is the longest wait before any retry, at least Base. 0:
	// DefaultBackoffMax, 2 s, or Base where that is longer. Negative is
	// invalid.
	Max time.Duration
	// MaxRetryAfter is the longest wait that a peer may ask for by Retry-After
	// or retry-after-ms. A response that asks for more goes back to the caller
	// at once. 0: DefaultMaxRetryAfter, 10 s. Negative is invalid.
	MaxRetryAfter time.Duration
}

func (b Backoff) withDefaults() Backoff {
	if b.Base == 0 {
		b.Base = DefaultBackoffBase
	}
	if b.Max == 0 {
		b.Max = max(DefaultBackoffMax, b.Base)
	}
	if b.MaxRetryAfter == 0 {
		b.MaxRetryAfter = DefaultMaxRetryAfter
	}
	return b
}

// check reports the fields that cannot be used. Zero stands for the default, so
// it makes no difference whether withDefaults was called before.
func (b Backoff) check(errs *configErrors) {
	const negative = "must not be negative; 0 is the default"
	errs.check(b.Base >= 0, "Config.Backoff.Base", b.Base, negative)
	errs.check(b.Max >= 0, "Config.Backoff.Max", b.Max, negative)
	errs.check(b.MaxRetryAfter >= 0, "Config.Backoff.MaxRetryAfter", b.MaxRetryAfter, negative)
	if d := b.withDefaults(); d.Max >= 0 {
		errs.check(d.Max >= d.Base, "Config.Backoff.Max", d.Max, "must be at least Base, which is "+d.Base.String())
	}
}

// delay returns the wait before retry n, counted from 1; jitter is in [0, 1).
func (b Backoff) delay(n int, jitter float64) time.Duration {
	// Doubling is asked about before it is done: Base·2ⁿ⁻¹ overflows after some
	// 35 retries. A shift by more than 63 is fine in Go, a negative one panics.
	limit, doublings := b.Max, max(n, 1)-1
	if b.Base <= b.Max>>doublings {
		limit = b.Base << doublings
	}
	// Every whole number of nanoseconds from 0 to limit, both included, is as
	// likely as the next: so a limit of 1 ns still jitters. float64 can round
	// limit up, hence min; the product is below 2^63.
	return min(limit, time.Duration(jitter*(float64(limit)+1)))
}

// retryAfter returns the wait that a response asks for; ok is false where it asks for none that is usable.
// now is the wall clock's reading when the response arrived.
//
// It reads Retry-After (RFC 9110 section 10.2.3), in seconds or as a date, and
// retry-after-ms, which the OpenAI and Azure SDKs read. The longest usable
// of all lines counts: waiting too long costs time, the opposite costs a
// retry. What is negative, past or not in the grammar asks for nothing. A wait
// beyond what a Duration holds is the longest Duration: more than anybody
// allows, where a wrapped number would be an immediate retry.
func retryAfter(h http.Header, now time.Time) (hint time.Duration, ok bool) {
	for _, v := range h["Retry-After"] {
		d, usable := parseRetryAfter(trimOWS(v), h, now)
		if usable {
			hint, ok = max(hint, d), true
		}
	}
	for _, v := range h["Retry-After-Ms"] {
		d, usable := parseRetryAfterMS(trimOWS(v))
		if usable {
			hint, ok = max(hint, d), true
		}
	}
	return hint, ok
}

// trimOWS removes optional whitespace, RFC 9110 section 5.6.3. net/http has
// done so already; other bases may not.
func trimOWS(s string) string { return strings.Trim(s, " \t") }

func parseRetryAfter(v string, h http.Header, now time.Time) (time.Duration, bool) {
	if allDigits(v) {
		return digitsTimes(v, time.Second), true
	}
	at, err := http.ParseTime(v)
	if err != nil {
		return 0, false
	}
	// The peer's date against the peer's clock: ours may be minutes off.
	if date, err := http.ParseTime(trimOWS(h.Get("Date"))); err == nil {
		now = date
	}
	// Sub does not wrap: the year 9999 is 292 years away.
	d := at.Sub(now)
	return max(d, 0), d >= 0
}

// parseRetryAfterMS accepts milliseconds in digits with an optional fraction.
func parseRetryAfterMS(v string) (time.Duration, bool) {
	whole, fraction, point := strings.Cut(v, ".")
	if !allDigits(whole) || point && !allDigits(fraction) {
		return 0, false
	}
	d := digitsTimes(whole, time.Millisecond)
	if point && d < math.MaxInt64-time.Millisecond {
		// Six digits are the nanoseconds of a millisecond. What lies below one
		// is not worth a digit more.
		d += digitsTimes((fraction + "000000")[:6], time.Nanosecond)
	}
	return d, true
}

// allDigits reports whether s is one or more ASCII digits.
func allDigits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

// digitsTimes returns the number in s, which is all digits, times unit, or the
// longest Duration where that is too much.
func digitsTimes(s string, unit time.Duration) time.Duration {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n > int64(math.MaxInt64/unit) {
		return math.MaxInt64
	}
	return time.Duration(n) * unit
}
