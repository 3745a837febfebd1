package replay

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// section returns the tables of the README's section on this package by the
// first cell of their header, each with the cells of its rows.
func section(t *testing.T) map[string][][]string {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	tables := make(map[string][][]string)
	heading, table := "", ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if h, ok := strings.CutPrefix(line, "#"); ok {
			heading = strings.TrimLeft(h, "# ")
		}
		if !strings.HasPrefix(line, "|") {
			table = ""
			continue
		}
		cells := strings.Split(strings.Trim(line, "| "), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case table == "":
			table = heading + ": " + cells[0]
		case !strings.HasPrefix(cells[0], "---"):
			tables[table] = append(tables[table], cells)
		}
	}
	return tables
}

func first(rows [][]string) (names []string) {
	for _, r := range rows {
		names = append(names, strings.Trim(r[0], "`"))
	}
	return names
}

func TestReadmeReplayTables(t *testing.T) {
	tables := section(t)
	for heading, v := range map[string]any{"replay.Config": Config{}, "replay.MemoryConfig": MemoryConfig{}} {
		var want []string
		for i := range reflect.TypeOf(v).NumField() {
			want = append(want, reflect.TypeOf(v).Field(i).Name)
		}
		if got := first(tables[heading+": field"]); !slices.Equal(got, want) {
			t.Errorf("%s: README.md has the fields\n%q, the code has\n%q", heading, got, want)
		}
	}

	var want []string
	for _, o := range outcomes {
		want = append(want, string(o))
	}
	if got := first(tables["replay.Metrics: outcome of replay"]); !slices.Equal(got, want) {
		t.Errorf("README.md has the outcomes\n%q, the code has\n%q", got, want)
	}

	golden, err := os.ReadFile("testdata/metrics.golden")
	if err != nil {
		t.Fatal(err)
	}
	labels := make(map[string]string)
	for line := range strings.Lines(string(golden)) {
		if m := regexp.MustCompile(`^(\w+?)(?:_bucket|_sum|_count)?\{(.*)\}`).FindStringSubmatch(line); m != nil {
			var names []string
			for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(m[2], -1) {
				if l[1] != "le" {
					names = append(names, l[1])
				}
			}
			slices.Sort(names)
			labels[m[1]] = strings.Join(names, ",")
		}
	}
	rows := tables["replay.Metrics: metric of replay"]
	if len(rows) != len(labels) {
		t.Errorf("README.md has %d metrics, the code has %d", len(rows), len(labels))
	}
	for _, r := range rows {
		have := strings.Split(r[2], ", ")
		slices.Sort(have)
		if name := strings.Trim(r[0], "`"); labels[name] != strings.Join(have, ",") {
			t.Errorf("%s: README.md has the labels %q, the code has %q", name, have, labels[name])
		}
	}
}
