package main

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// Both README files show tables with the rows and columns that the command
// prints, and of ours the number of allocations that the guard allows.
func TestReadmeTables(t *testing.T) {
	r := run{
		effort: effort{rounds: 1, slice: 200 * time.Microsecond},
		wall:   effort{rounds: 1, slice: 5 * time.Millisecond},
		micro:  "10x",
	}
	if err := r.all(); err != nil {
		t.Fatal(err)
	}
	for key := range allowed {
		if _, ok := r.guard.measured[key]; !ok {
			t.Errorf("allowed has %q, which is not measured", key)
		}
	}
	shown := make(map[string]bool)
	for _, file := range []string{"README.md", "../README.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range strings.Split(string(text), "<!-- bench: ")[1:] {
			name, rest, _ := strings.Cut(part, " -->\n")
			body, _, ok := strings.Cut(rest, tableEnd)
			if !ok {
				t.Errorf("%s: no %s behind table %s", file, tableEnd, name)
			}
			if name == "machine" {
				if !strings.HasPrefix(body, "go1.") {
					t.Errorf("%s: the machine is %q", file, body)
				}
				continue
			}
			i := slices.IndexFunc(r.tables, func(t *table) bool { return t.name == name })
			if i < 0 {
				t.Errorf("%s shows a table %s, which the command does not print", file, name)
				continue
			}
			shown[name] = true
			for _, err := range differs(r.tables[i], body) {
				t.Errorf("%s, table %s: %s", file, name, err)
			}
		}
	}
	for _, table := range r.tables {
		if !shown[table.name] {
			t.Errorf("no README shows the table %s", table.name)
		}
	}
}

// differs says where the table in a README has other rows or columns.
func differs(t *table, body string) (errs []string) {
	var rows [][]string
	for line := range strings.Lines(body) {
		cells := strings.Split(strings.Trim(line, "|\n"), " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, cells)
	}
	if len(rows) < 2 {
		return []string{"it is empty"}
	}
	if !slices.Equal(rows[0], t.head) {
		errs = append(errs, fmt.Sprintf("the head is %q and has to be %q", rows[0], t.head))
	}
	name := func(r []string) string { return r[0] }
	var have, want []string
	for _, r := range rows[2:] {
		have = append(have, name(r))
		limit, ok := allowed[t.name+"/"+r[0]]
		if column := slices.Index(t.head, "allocations"); ok && column > 0 && r[column] != strconv.Itoa(limit) {
			errs = append(errs, fmt.Sprintf("%s: %s allocations are shown, %d are allowed", r[0], r[column], limit))
		}
	}
	for _, r := range t.rows {
		want = append(want, name(r))
	}
	if !slices.Equal(have, want) {
		errs = append(errs, fmt.Sprintf("the rows are\n%s\nand have to be\n%s", strings.Join(have, "\n"), strings.Join(want, "\n")))
	}
	return errs
}

func TestDiffers(t *testing.T) {
	tbl := &table{name: "get", head: []string{"GET", "allocations"}}
	tbl.add("bare", "6")
	tbl.add("stint", "9")
	good := strings.Replace(tbl.String(), "stint | 9", "stint | "+strconv.Itoa(allowed["get/stint"]), 1)
	if errs := differs(tbl, good); len(errs) > 0 {
		t.Error(errs)
	}
	for _, bad := range []string{
		"",
		strings.Replace(good, "| GET", "| PUT", 1),
		strings.Replace(good, "| bare | 6 |\n", "", 1),
		strings.Replace(good, "| stint", "| stunt", 1),
		strings.Replace(good, "stint | ", "stint | 9", 1),
	} {
		if errs := differs(tbl, bad); len(errs) == 0 {
			t.Errorf("nothing is wrong with\n%s", bad)
		}
	}
}

func TestGuard(t *testing.T) {
	g := guard{measured: make(map[string]int)}
	limit := allowed["get/stint"]
	g.check("get", "stint", limit)
	g.check("get", "rehttp", 1000) // not ours
	if len(g.exceeded) > 0 {
		t.Error(g.exceeded)
	}
	if g.check("get", "stint", limit+1); len(g.exceeded) != 1 {
		t.Errorf("%d are exceeded, want 1", len(g.exceeded))
	}
}

// What the rows claim to measure is what happens.
func TestSubjects(t *testing.T) {
	count := func(base http.RoundTripper) (http.RoundTripper, *int) {
		n := new(int)
		return roundTripper(func(r *http.Request) (*http.Response, error) { *n++; return base.RoundTrip(r) }), n
	}
	l := inProcess(http.MethodGet, edgeContext, 1)
	t.Run("retry", func(t *testing.T) {
		wraps := map[string]func(http.RoundTripper) http.RoundTripper{
			nameStint: func(base http.RoundTripper) http.RoundTripper { return generous(base, nil) },
		}
		for _, name := range []string{nameRetryable, nameRetry, nameBudget, nameRehttp} {
			wraps[name] = wrapOf(name)
		}
		for name, wrap := range wraps {
			base, n := count(failingOnce())
			rt := wrap(base)
			for range 1000 {
				resp, err := rt.RoundTrip(l.request())
				if err != nil || resp.StatusCode != http.StatusOK {
					t.Fatalf("%s: %v", name, err)
				}
			}
			if *n != 2000 {
				t.Errorf("%s: %d attempts for 1000 requests, want 2000", name, *n)
			}
		}
	})
	t.Run("refusal", func(t *testing.T) {
		late := inProcess(http.MethodGet, late{edgeContext}, 1)
		for _, tt := range []struct {
			name string
			wrap func(http.RoundTripper) http.RoundTripper
			load load
			want int
		}{
			{"stint, exhausted", func(b http.RoundTripper) http.RoundTripper {
				return newStint(stint.Config{Base: b, Budget: stint.BudgetConfig{MinPerSecond: -1}})
			}, l, 100},
			{"failsafe-go, exhausted", newSpent, l, 100},
			{"stint, too late", everything, late, 0},
		} {
			base, n := count(down())
			tt.load.send(tt.wrap(base), 100)
			if *n != tt.want {
				t.Errorf("%s: %d attempts for 100 requests, want %d", tt.name, *n, tt.want)
			}
		}
	})
	t.Run("goroutines", func(t *testing.T) {
		seen := make(chan struct{}, 100)
		l := inProcess(http.MethodPost, edgeContext, 8)
		l.through("", roundTripper(func(r *http.Request) (*http.Response, error) {
			seen <- struct{}{}
			return answer(r, http.StatusOK), nil
		})).run(21)
		if len(seen) != 21 {
			t.Errorf("%d requests, want 21", len(seen))
		}
	})
	t.Run("in flight", func(t *testing.T) {
		base, release := crowded()
		rt := everything(base)
		crowd(rt, 100)
		if resp, err := rt.RoundTrip(l.request()); err != nil || resp.StatusCode != http.StatusOK {
			t.Error(err)
		}
		release()
	})
}

// A subject that costs twice as much as another is seen to.
func TestMeasure(t *testing.T) {
	work := func(times int) func(int) {
		return func(n int) {
			for range n * times {
				spin()
			}
		}
	}
	costs := measure(effort{rounds: 9, slice: time.Millisecond},
		subject{"base", work(1)}, subject{"2", work(2)}, subject{"5", work(5)})
	if got := ratio(find(costs, "5").added(), find(costs, "2").added()); got < 2 || got > 8 {
		t.Errorf("4 times the work is %.1f times the cost", got)
	}
}

var spun int

func spin() {
	for i := range 1000 {
		spun += i ^ spun>>1
	}
}

func TestQuantile(t *testing.T) {
	for _, tt := range []struct{ q, want float64 }{{0, 1}, {0.5, 2.5}, {0.99, 3.97}, {1, 4}} {
		if got := quantile([]float64{4, 1, 3, 2}, tt.q); got-tt.want > 1e-9 || tt.want-got > 1e-9 {
			t.Errorf("quantile %v is %v, want %v", tt.q, got, tt.want)
		}
	}
}

func TestPlace(t *testing.T) {
	readme := "a\n<!-- bench: get -->\nold\n<!-- /bench -->\nb\n<!-- bench: post -->\nkept\n<!-- /bench -->\n"
	want := strings.Replace(readme, "old", "new", 1)
	if got := place(readme, "get", "new\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := place(readme, "paths", "new\n"); got != readme {
		t.Errorf("a table that is not shown was put in:\n%s", got)
	}
}
