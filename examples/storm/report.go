package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed storm.html.tmpl
var pageText string

var page = template.Must(template.New("storm.html").Parse(pageText))

// A report sets two runs side by side.
type report struct {
	c              config
	plain, stinted summary
}

func newReport(c config, plain, stinted summary) *report {
	return &report{c: c, plain: plain, stinted: stinted}
}

// A row of the table: what, and its value in each run.
type row struct {
	Name, Plain, Stint string
	Sub                bool // belongs to the row above that has no values
}

func (r *report) rows() []row {
	both := func(name string, value func(s summary) string) row {
		return row{Name: name, Plain: value(r.plain), Stint: value(r.stinted)}
	}
	rows := []row{{Name: "attempts per user request, in the fault"}}
	for tier, name := range tiers {
		sub := both("at "+name, func(s summary) string { return fmt.Sprintf("%.2f", s.amplification[tier]) })
		sub.Sub = true
		rows = append(rows, sub)
	}
	if r.c.serverSide() {
		rows = append(rows, both("refused in front of the database's handler", func(s summary) string { return thousands(s.refused) }))
	}
	if r.c.hedge {
		rows = append(rows,
			both("95 % of user requests, in the fault, within", func(s summary) string { return millis(s.p95) }),
			both("99 % of them", func(s summary) string { return millis(s.p99) }))
	}
	return append(rows,
		both("most requests at the database in a second", func(s summary) string { return thousands(s.peak) }),
		both("most marked retries in a second", func(s summary) string {
			if s.name == unguardedName {
				return "not marked"
			}
			return thousands(s.retryPeak)
		}),
		both("user requests", func(s summary) string { return thousands(s.requests) }),
		both("of these failed", func(s summary) string { return thousands(s.failed) }),
		both("time to recover after the fault", r.recovery),
	)
}

func (r *report) recovery(s summary) string {
	if s.recovery < 0 {
		return "not within " + seconds(r.c.after)
	}
	if s.recovery < 50*time.Millisecond {
		return "at once"
	}
	return fmt.Sprintf("%.1f s", s.recovery.Seconds())
}

// recoveries is recovery of both runs, as part of a sentence.
func (r *report) recoveries() string {
	plain, stinted := r.recovery(r.plain), r.recovery(r.stinted)
	if plain == stinted {
		return plain + " in both runs"
	}
	return fmt.Sprintf("%s %s, %s %s", r.plain.name, plain, r.stinted.name, stinted)
}

// table is for the terminal.
func (r *report) table() string {
	rows := append([]row{{Plain: r.plain.name, Stint: r.stinted.name}}, r.rows()...)
	var width [3]int
	for i := range rows {
		if rows[i].Sub {
			rows[i].Name = "  " + rows[i].Name
		}
		for col, cell := range []string{rows[i].Name, rows[i].Plain, rows[i].Stint} {
			width[col] = max(width[col], len(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		line := fmt.Sprintf("%-*s  %*s  %*s", width[0], row.Name, width[1], row.Plain, width[2], row.Stint)
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	return b.String()
}

// A check is one promise, and what became of it.
type check struct {
	verdict string
	text    string
}

const (
	kept    = "ok"
	broken  = "FAIL"
	unclear = "BUSY" // the machine was too slow for the question
)

// plainLeast is how many attempts per user request the unguarded chain shows
// at least in an outage: 27, less what a moderately busy machine may lose.
const plainLeast = 25

// busyFrom is how late a user may come before the machine counts as too busy
// for a storm. Where 27-fold traffic is more than it can carry, attempts run
// into their timeouts and there are fewer of them.
const busyFrom = 100 * time.Millisecond

func (r *report) late() time.Duration { return max(r.plain.late, r.stinted.late) }

func (r *report) checks() []check {
	var checks []check
	add := func(ok bool, format string, a ...any) {
		c := check{kept, fmt.Sprintf(format, a...)}
		if !ok {
			c.verdict = broken
		}
		checks = append(checks, c)
	}
	// One retry in ten requests, but one a second where that is more.
	perSecond := max(1, int(math.Ceil(float64(r.c.rps)/10)))
	if r.c.fault == faultOutage {
		plain, stinted := r.plain.amplification[bottom], r.stinted.amplification[bottom]
		most := 1 + float64(perSecond)/float64(r.c.rps)
		if !r.c.bothStint() {
			add(plain >= plainLeast, "unguarded: %.2f attempts at the database per user request in the outage (expected 27, at least %d)", plain, plainLeast)
			if checks[0].verdict == broken && r.late() > busyFrom {
				checks[0].verdict = unclear // this one is no promise of ours
			}
		}
		add(stinted <= most, r.stinted.name+": %.2f attempts at the database per user request in the outage (at most %.2f)", stinted, most)
	}
	// One more than the budget, for two that travelled at different speed.
	add(r.stinted.retryPeak <= perSecond+1, r.stinted.name+": %d marked retries at the database in any second (at most %d)", r.stinted.retryPeak, perSecond+1)
	return checks
}

// printChecks writes a line for each check and returns an error if one failed.
func (r *report) printChecks(out io.Writer) error {
	failed := 0
	for _, c := range r.checks() {
		fmt.Fprintf(out, "%-4s  %s\n", c.verdict, c.text)
		if c.verdict == broken {
			failed++
		}
	}
	if r.late() > busyFrom {
		fmt.Fprintf(out, "note  this machine was busy with other things: users came up to %v late; a lower -rps may help\n", r.late().Round(time.Millisecond))
	}
	if failed > 0 {
		return fmt.Errorf("checks failed: %d", failed)
	}
	return nil
}

// writeHTML writes the page. It is one file that loads nothing.
func (r *report) writeHTML(path string) error {
	var b bytes.Buffer
	if err := page.Execute(&b, r.page()); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

type pageData struct {
	Fault        faultKind
	FaultText    string
	RPS          int
	Hold         string
	Plain, Stint string // names of the runs
	PlainTimes   string // attempts at the database per user request
	StintTimes   string
	Recoveries   string
	How          string // what the runs differ in
	Charts       []figure
	Rows         []row
}

// A figure is one chart, drawn twice: text that is readable on a phone is not
// a smaller picture but a picture with fewer words in it.
type figure struct {
	ID, Title, Note string
	Wide, Narrow    chart
}

func (r *report) page() pageData {
	draw := func(id, title, unit, note string, peaks bool, values func(summary) []int) figure {
		lay := func(f format) chart {
			return drawChart(f, r.c, unit, peaks, []series{
				{Name: r.stinted.name, Short: strings.TrimPrefix(r.stinted.name, "with "), Class: "stint", values: values(r.stinted)},
				// On top: a dashed line hides nothing of a solid one.
				{Name: r.plain.name, Short: strings.TrimPrefix(r.plain.name, "with "), Class: "plain", values: values(r.plain)},
			})
		}
		return figure{ID: id, Title: title, Note: note, Wide: lay(wide), Narrow: lay(narrow)}
	}
	how := "Unguarded, each service makes up to three attempts; with stint, retries have a budget, a deadline and one layer."
	gets := "Requests that arrive at the database in each second, first attempts and retries."
	if r.c.bothStint() {
		how = "Both runs are with stint."
	}
	if r.c.throttle {
		how += " With Throttle, first attempts are held back as well while most of them fail."
	}
	if r.c.hedge {
		how += " With Hedge, the ledger sends a second attempt where the first runs longer than 95 % do."
	}
	if r.c.serverSide() {
		if r.c.clients > 1 {
			how += fmt.Sprintf(" The ledger is %d callers of the database, each with a budget of its own; with a cap, the database holds the retries of all to one.", r.c.clients)
		}
		if r.c.limit {
			how += " With Limit, the database takes in ten requests at once, ten wait, and what could not end in time is refused."
		}
		gets = "Requests that the database's handler gets in each second, first attempts and retries. What its middleware refuses is not in it."
	}
	charts := []figure{
		draw("attempts", "What the database gets", "requests/s",
			gets,
			true, func(s summary) []int { return s.attempts }),
		draw("successes", "What users get", "successes/s",
			"User requests answered 200 in each second.",
			false, func(s summary) []int { return s.successes }),
	}
	if r.c.hedge {
		charts = append(charts, draw("waits", "How long users wait", "ms",
			"The time in which 99 % of the requests of each second are answered.",
			false, func(s summary) []int { return s.waits }))
	}
	return pageData{
		Fault: r.c.fault, FaultText: faultTexts[r.c.fault], RPS: r.c.rps, Hold: seconds(r.c.hold),
		Plain: r.plain.name, Stint: r.stinted.name,
		PlainTimes: fmt.Sprintf("%.2f", r.plain.amplification[bottom]),
		StintTimes: fmt.Sprintf("%.2f", r.stinted.amplification[bottom]),
		Recoveries: r.recoveries(),
		How:        how,
		Charts:     charts,
		Rows:       r.rows(),
	}
}

// A format is the size of a drawing, in CSS pixels, and of its margins.
type format struct {
	class                    string
	width, height            float64
	left, right, top, bottom float64
	short                    bool // names
	xStep                    int  // seconds between labels
}

var (
	wide   = format{class: "wide", width: 800, height: 324, left: 52, right: 92, top: 36, bottom: 42, xStep: 1}
	narrow = format{class: "narrow", width: 360, height: 276, left: 44, right: 78, top: 36, bottom: 42, short: true, xStep: 5}
)

type series struct {
	Name, Short, Class string
	Path               string // of the line
	Label              text   // at its end
	Peak               *text  // at its highest place
	values             []int
}

type text struct {
	X, Y float64
	Text string
}

// A chart is everything that the page's template needs to draw one.
type chart struct {
	Class                    string
	Width, Height            float64
	Left, Right, Top, Bottom float64 // edges of the plot
	FaultX, FaultWidth       float64
	FaultHeight              float64
	FaultLabel, Unit         text
	XTitle                   text
	XTicks, YTicks           []text
	Series                   []series // in drawing order
}

// drawChart lays out lines over seconds. Each second's count is a level, not a
// point: that is what was counted.
func drawChart(f format, c config, unit string, peaks bool, lines []series) chart {
	ch := chart{
		Class: f.class, Width: f.width, Height: f.height, Unit: text{Y: 12, Text: unit},
		Left: f.left, Right: f.width - f.right, Top: f.top, Bottom: f.height - f.bottom,
	}
	highest, length := 1, 1
	for _, s := range lines {
		highest = max(highest, slices.Max(append([]int{0}, s.values...)))
		length = max(length, len(s.values))
	}
	step := niceStep(float64(highest) * 1.08 / 4)
	top := step * math.Ceil(float64(highest)*1.08/step)
	x := func(t float64) float64 { return round(ch.Left + (ch.Right-ch.Left)*t/float64(length)) }
	y := func(v float64) float64 { return round(ch.Bottom - (ch.Bottom-ch.Top)*v/top) }

	for v := 0.0; v <= top; v += step {
		ch.YTicks = append(ch.YTicks, text{X: ch.Left - 8, Y: y(v), Text: thousands(int(v))})
	}
	xStep := max(f.xStep, int(niceStep(float64(length)/16)))
	for t := 0; t <= length; t += xStep {
		ch.XTicks = append(ch.XTicks, text{X: x(float64(t)), Y: ch.Bottom + 17, Text: strconv.Itoa(t)})
	}
	ch.XTitle = text{X: round((ch.Left + ch.Right) / 2), Y: f.height - 6, Text: "seconds"}

	from := min(c.warm.Seconds(), float64(length))
	to := min((c.warm + c.hold).Seconds(), float64(length))
	ch.FaultX, ch.FaultWidth, ch.FaultHeight = x(from), round(x(to)-x(from)), ch.Bottom-ch.Top
	ch.FaultLabel = text{X: x((from + to) / 2), Y: ch.Top - 8, Text: string(c.fault)}

	for i := range lines {
		s := &lines[i]
		var path strings.Builder
		for t, v := range s.values {
			if t == 0 {
				fmt.Fprintf(&path, "M%g %g", x(0), y(float64(v)))
			} else {
				fmt.Fprintf(&path, "V%g", y(float64(v)))
			}
			fmt.Fprintf(&path, "H%g", x(float64(t+1)))
		}
		s.Path = path.String()
		name := s.Name
		if f.short {
			name = s.Short
		}
		last := 0
		if len(s.values) > 0 {
			last = s.values[len(s.values)-1]
		}
		s.Label = text{X: ch.Right + 6, Y: y(float64(last)), Text: name}
		if peaks && len(s.values) > 0 {
			s.Peak = peak(s.values, int(from), int(math.Ceil(to)), x, y)
			if in := s.Peak.X - ch.FaultX; in > 0 && in < ch.FaultWidth && ch.FaultWidth > 2*peakRoom {
				s.Peak.X = max(ch.FaultX+peakRoom, min(ch.FaultX+ch.FaultWidth-peakRoom, s.Peak.X))
			}
		}
	}
	separate(lines, ch.Top, ch.Bottom-8) // clear of the axis's numbers
	ch.Series = lines
	return ch
}

// peakRoom is half the width of a peak's text, and a little.
const peakRoom = 30

// peak writes the highest value above the middle of its second, of several the
// first in the fault, which lasts from second from to second to.
func peak(values []int, from, to int, x, y func(float64) float64) *text {
	v := slices.Max(values)
	t := slices.Index(values, v)
	if i := slices.Index(values[min(from, len(values)):min(to, len(values))], v); i >= 0 {
		t = from + i
	}
	return &text{X: x(float64(t) + 0.5), Y: y(float64(v)) - 7, Text: thousands(v) + "/s"}
}

// separate moves the labels at the lines' ends apart where they would overlap.
func separate(lines []series, top, bottom float64) {
	const apart = 16
	a, b := &lines[0].Label, &lines[1].Label
	if a.Y > b.Y {
		a, b = b, a
	}
	if gap := b.Y - a.Y; gap < apart {
		a.Y -= (apart - gap) / 2
		b.Y = a.Y + apart
	}
	if over := b.Y - bottom; over > 0 {
		a.Y -= over
		b.Y -= over
	}
	if under := top - a.Y; under > 0 {
		a.Y += under
		b.Y += under
	}
}

// niceStep returns the smallest of 1, 2, 5, 10, 20, … that is not below v.
func niceStep(v float64) float64 {
	for scale := 1.0; ; scale *= 10 {
		for _, m := range []float64{1, 2, 5} {
			if m*scale >= v {
				return m * scale
			}
		}
	}
}

func round(v float64) float64 { return math.Round(v*10) / 10 }

// thousands writes n with commas.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func millis(d time.Duration) string { return thousands(int(d.Milliseconds())) + " ms" }

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + " s" }
