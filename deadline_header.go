package stint

import (
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Header names on the wire, in canonical form.
const (
	// HeaderDeadline carries the absolute deadline: Unix milliseconds in ASCII
	// digits, rounded down. The edge sets it; every hop sends on less than it
	// got.
	HeaderDeadline = "X-Request-Deadline"
	// HeaderTimeout is its companion: whole milliseconds left when this attempt
	// was sent, by the sender's monotonic clock. It tells a clock that is wrong
	// from a request that is late.
	HeaderTimeout = "X-Request-Timeout-Ms"
	// HeaderDeadlineExpired is "1" on a 504 that means the deadline, not a
	// broken gateway.
	HeaderDeadlineExpired = "X-Deadline-Expired"
)

// Limits of what is read from the wire.
const (
	maxMembers = 4  // values over all lines of one header
	maxDigits  = 19 // of MaxInt64
	// maxCompanion bounds the companion before it becomes a duration, in
	// milliseconds: ten years, far above any limit.
	maxCompanion = int64(10 * 365 * 24 * time.Hour / time.Millisecond)
	grossSkew    = 60 * time.Second // beyond it one of the two clocks is broken (userver uses the same)
	// proxiedMax bounds a deadline taken from the headers of an outgoing
	// request, where no middleware has clamped it.
	proxiedMax = DefaultMaxTimeout
)

// A headerState says what a request's deadline header is. Each request is in
// exactly one; the values are those of the metric label "state".
type headerState string

const (
	stateAbsent   headerState = "absent"
	statePresent  headerState = "present"
	stateMultiple headerState = "multiple" // usable: the earliest of up to four counts
	// stateUnitSuspect is a usable value that looks like Unix seconds,
	// microseconds or nanoseconds: other products use the header's name so.
	stateUnitSuspect headerState = "unit_suspect"
	// stateBadCompanion is a usable deadline beside an unusable companion,
	// which is ignored.
	stateBadCompanion headerState = "bad_companion"

	stateEmpty     headerState = "empty"
	stateSign      headerState = "sign"      // "+" or "-" in front
	stateSyntax    headerState = "syntax"    // anything else that is not a digit
	stateOverflow  headerState = "overflow"  // above MaxInt64, or more than 19 digits
	stateTooMany   headerState = "too_many"  // more than four values
	stateUntrusted headerState = "untrusted" // TrustHeader said no; not looked at
)

// headerStates lists every state, for children of counters that exist from the
// start.
var headerStates = []headerState{
	stateAbsent, statePresent, stateMultiple, stateUnitSuspect, stateBadCompanion,
	stateEmpty, stateSign, stateSyntax, stateOverflow, stateTooMany, stateUntrusted,
}

// usable reports whether the header gave a deadline.
func (s headerState) usable() bool {
	switch s {
	case statePresent, stateMultiple, stateUnitSuspect, stateBadCompanion:
		return true
	}
	return false
}

// invalid reports whether a header was there and was unusable.
func (s headerState) invalid() bool {
	return !s.usable() && s != stateAbsent && s != stateUntrusted
}

// A deadline is one that was adopted from a caller, or set at the edge.
//
// The number stays in the clock of whoever set it first: it is lowered by
// differences of our monotonic clock and never compared with our wall clock.
// So it falls from hop to hop however wrong the clocks in between are.
type deadline struct {
	ms int64     // as the origin counts: Unix milliseconds by its clock
	e0 time.Time // the instant that ms stands for, by our monotonic clock
	e  time.Time // the instant in force: e0, or sooner where the context ends sooner
}

// onWire returns the number to send for an outgoing limit at x: lower than d.ms
// by what lies between, rounded so that it never promises more, and never above
// d.ms, wherever x lies.
func (d *deadline) onWire(x time.Time) int64 {
	return max(0, d.ms-max(0, ceilMillis(d.e0.Sub(x))))
}

// readDeadline reads the deadline header and its companion. now is the arrival
// by the monotonic clock, wall the wall clock's reading at the same moment. No
// deadline lies further away than limit. The result is nil where the header
// gives none; gross reports that the companion shows one of the clocks to be
// broken.
//
// The absolute value charges transit and queueing, the companion survives a
// clock that is off; the earlier of the two counts. tolerance lets the absolute
// value pass by that much when the companion says there is time, and does
// nothing alone: every request would overrun its caller by it.
func readDeadline(h *scannedHeader, now, wall time.Time, limit, tolerance time.Duration) (d *deadline, state headerState, gross bool) {
	ms, n, state := parseMillis(h.lines(HeaderDeadline))
	if !state.usable() {
		return nil, state, false
	}
	// Before the clamp, which would hide what the number was.
	if n == 1 && unitSuspect(ms, wall.UnixMilli()) {
		state = stateUnitSuspect
	}
	// Sub saturates at 292 years, so MaxInt64 milliseconds do not wrap.
	until := time.UnixMilli(ms).Sub(wall)
	left, _, companion := parseMillis(h.lines(HeaderTimeout))
	switch {
	case companion.usable():
		relative := time.Duration(min(left, maxCompanion)) * time.Millisecond
		if skew := relative - until; skew > grossSkew || skew < -grossSkew {
			// The number is some other clock's, and stays: lowered to this host's
			// idea of the limit, it would be long past to the next host if it is
			// ours that is broken. But not by more than a day, which no clock is
			// off by: then it is in another unit.
			until, gross = relative, true
			ms = min(ms, wallMillis(now.Add(limit+24*time.Hour), now, wall))
		} else {
			until = min(until+tolerance, relative)
			ms = max(0, ms-ceilMillis(max(0, until-limit))) // by what the limit takes away
		}
	default:
		if companion != stateAbsent && state == statePresent {
			state = stateBadCompanion
		}
		ms = min(ms, wallMillis(now.Add(limit), now, wall))
	}
	// Converted once, and with a monotonic reading: the instant does not move
	// when the clock is stepped, and no context derived from it can come to end
	// after its parent.
	d = &deadline{ms: ms, e0: now.Add(min(until, limit))}
	d.e = d.e0
	return d, state, gross
}

// A scannedHeader is the header of a request after one pass over it. Most have
// little of what we look for, and none in odd spelling, and walking the map once
// more for each name costs as much as a budget's decision.
type scannedHeader struct {
	http.Header
	fleet bool // has one that fleetHeader knows
	key   bool // has one that keyHeader knows
	odd   bool // one of them is not spelled canonically
}

func scanHeader(h http.Header) scannedHeader {
	s := scannedHeader{Header: h}
	for k := range h {
		name := fleetHeader(k)
		if name != "" {
			s.fleet = true
		} else if name = keyHeader(k); name != "" {
			s.key = true
		} else {
			continue
		}
		s.odd = s.odd || k != name
	}
	return s
}

// lines is headerLines for a name that fleetHeader or keyHeader knows.
func (s *scannedHeader) lines(name string) []string {
	if !s.odd {
		return s.Header[name]
	}
	return headerLines(s.Header, name)
}

// fleetHeader returns the canonical spelling of a header that only we set, and
// that a request from outside, or a proxy's copy of one, must not bring along. It
// is "" for all others.
func fleetHeader(k string) string {
	name := ""
	switch len(k) {
	case len(HeaderDeadline):
		name = HeaderDeadline
	case len(HeaderTimeout):
		name = HeaderTimeout
	case len(HeaderRetryCount):
		name = HeaderRetryCount
	case len(HeaderDebugEcho):
		name = HeaderDebugEcho
	}
	if name == "" || !strings.EqualFold(k, name) {
		return ""
	}
	return name
}

// headerLines returns the lines of a header whose name is given in canonical
// form. Other spellings can stand in the map of a request that did not come
// through net/http's server; their lines follow in no particular order.
func headerLines(h http.Header, name string) []string {
	lines := h[name]
	for k, v := range h {
		if len(k) == len(name) && k != name && strings.EqualFold(k, name) {
			// Never append to lines: its backing array is the caller's.
			lines = slices.Concat(lines, v)
		}
	}
	return lines
}

// parseMillis returns the smallest usable of at most four members over all
// lines, and how many members there were. Nothing of an unusable value is ever
// kept or shown: it is the caller's choice of bytes.
func parseMillis(lines []string) (ms int64, members int, state headerState) {
	switch {
	case len(lines) == 0:
		return 0, 0, stateAbsent
	case len(lines) == 1 && strings.IndexByte(lines[0], ',') < 0: // as a rule
		ms, state = parseMember(strings.Trim(lines[0], " \t"))
		return ms, 1, state
	}
	for _, line := range lines {
		members += 1 + strings.Count(line, ",")
		if members > maxMembers {
			return 0, members, stateTooMany
		}
	}
	state = stateEmpty
	found := false
	for _, line := range lines {
		for member := range strings.SplitSeq(line, ",") {
			v, s := parseMember(strings.Trim(member, " \t"))
			switch {
			case s == statePresent && (!found || v < ms):
				ms, found = v, true
			case s != statePresent && state == stateEmpty:
				state = s // the first member that is neither usable nor empty names the reason
			}
		}
	}
	switch {
	case !found:
		return 0, members, state
	case members > 1:
		return ms, members, stateMultiple
	default:
		return ms, members, statePresent
	}
}

// parseMember accepts 1 to 19 ASCII digits up to MaxInt64 and nothing else.
// strconv alone would accept a sign.
func parseMember(s string) (int64, headerState) {
	switch {
	case s == "":
		return 0, stateEmpty
	case s[0] == '-' || s[0] == '+':
		return 0, stateSign
	}
	for i := range min(len(s), maxDigits+1) {
		if s[i] < '0' || s[i] > '9' {
			return 0, stateSyntax
		}
	}
	if len(s) > maxDigits {
		return 0, stateOverflow
	}
	v, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		return 0, stateOverflow
	}
	return int64(v), statePresent
}

// unitSuspect reports whether ms, read as Unix seconds, microseconds or
// nanoseconds, lies within a day of now, and read as milliseconds does not.
func unitSuspect(ms, wallMS int64) bool {
	const day = 24 * 60 * 60 * 1000
	near := func(v int64) bool { return v > wallMS-day && v < wallMS+day }
	if near(ms) {
		return false
	}
	return ms <= math.MaxInt64/1000 && near(ms*1000) || near(ms/1000) || near(ms/1e6)
}

// wallMillis returns t as Unix milliseconds, rounded down.
func wallMillis(t, now, wall time.Time) int64 {
	return wall.Add(t.Sub(now)).UnixMilli()
}

// ceilMillis returns d in whole milliseconds, rounded up.
func ceilMillis(d time.Duration) int64 {
	ms := d.Milliseconds()
	if d > time.Duration(ms)*time.Millisecond {
		ms++
	}
	return ms
}
