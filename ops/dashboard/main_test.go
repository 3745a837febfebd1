package main

//lint:file-ignore SA1019 as in main.go

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"go.yaml.in/yaml/v3"
)

func committed(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile("../dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestCommitted(t *testing.T) {
	text, err := build()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, committed(t)) {
		t.Error("dashboard.json is not what the code makes: run go generate in ops/")
	}
}

// strict decodes as Grafana's own types do, and returns what they do not have.
// Targets are looked at only with the plugins registered and the data source
// named in each. The decoded panels are lost (it takes its own empty error for a
// failure), so for the value there is decode.
func strict(text []byte) (problem string) {
	plugins.RegisterDefaultPlugins()
	var d dashboard.Dashboard
	// The error is not nil where all is well, but empty.
	if err := d.UnmarshalJSONStrict(text); err != nil {
		return err.Error()
	}
	return ""
}

func decode(t *testing.T) (d dashboard.Dashboard) {
	t.Helper()
	plugins.RegisterDefaultPlugins()
	if err := json.Unmarshal(committed(t), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestStrict(t *testing.T) {
	if problem := strict(committed(t)); problem != "" {
		t.Fatal(problem)
	}
	d := decode(t)
	if err := d.Validate(); err != nil && err.Error() != "" {
		t.Error(err)
	}
	var again bytes.Buffer
	enc := json.NewEncoder(&again)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(d); err != nil || !bytes.Equal(again.Bytes(), committed(t)) {
		t.Errorf("decoding loses something (%v)", err)
	}
	// What the decoder is there for: a field of the dashboard, of a panel, of a
	// query, and a type.
	for _, change := range [][2]string{
		{`"refresh":`, `"refreshed":`},
		{`"fillOpacity":`, `"fillOpaque":`},
		{`"legendFormat":`, `"legendformat_":`},
		{`"schemaVersion": 42`, `"schemaVersion": "42"`},
	} {
		text := bytes.Replace(committed(t), []byte(change[0]), []byte(change[1]), 1)
		if bytes.Equal(text, committed(t)) {
			t.Fatalf("%s is not in the dashboard", change[0])
		}
		if problem := strict(text); problem == "" {
			t.Errorf("%s passes", change[1])
		}
	}
}

// TestLayout asserts what the decoder does not look at.
func TestLayout(t *testing.T) {
	d := decode(t)
	var taken [1000][24]string
	ids := map[uint32]bool{}
	titles := map[string]bool{}
	place := func(title string, id *uint32, at *dashboard.GridPos) {
		if id == nil || ids[*id] {
			t.Errorf("%s: no id, or another panel's", title)
			return
		}
		ids[*id] = true
		if titles[title] {
			t.Errorf("two panels are called %s", title)
		}
		titles[title] = true
		if at.X+at.W > 24 {
			t.Fatalf("%s ends at column %d of 24", title, at.X+at.W)
		}
		for y := at.Y; y < at.Y+at.H; y++ {
			for x := at.X; x < at.X+at.W; x++ {
				if taken[y][x] != "" {
					t.Fatalf("%s lies on %s", title, taken[y][x])
				}
				taken[y][x] = title
			}
		}
	}
	panels := 0
	for _, p := range d.Panels {
		if p.RowPanel != nil {
			place(*p.RowPanel.Title, &p.RowPanel.Id, p.RowPanel.GridPos)
			continue
		}
		panels++
		title := *p.Panel.Title
		place(title, p.Panel.Id, p.Panel.GridPos)
		if !slices.Contains([]string{"timeseries", "heatmap"}, p.Panel.Type) {
			t.Errorf("%s: there is no panel type %s", title, p.Panel.Type)
		}
		if p.Panel.Description == nil || !strings.HasSuffix(*p.Panel.Description, ".") {
			t.Errorf("%s has no description", title)
		}
		if p.Panel.Type == "timeseries" && !slices.Contains([]string{share, perSecond, seconds, times}, *p.Panel.FieldConfig.Defaults.Unit) {
			t.Errorf("%s: there is no unit %s", title, *p.Panel.FieldConfig.Defaults.Unit)
		}
		if len(p.Panel.Targets) == 0 {
			t.Errorf("%s asks nothing", title)
		}
	}
	if panels < 12 {
		t.Errorf("%d panels", panels)
	}
	// Every row is full: no gap in which a panel seems to be missing.
	for y, line := range taken {
		if line[0] != "" && line[23] == "" {
			t.Errorf("line %d ends early, behind %s", y, line[0])
		}
	}
	for _, want := range []string{"datasource", "job", "peer", "service", "edge"} {
		if !slices.ContainsFunc(d.Templating.List, func(v dashboard.VariableModel) bool { return v.Name == want }) {
			t.Errorf("there is no variable %s", want)
		}
	}
}

// TestLimits holds the lines in the panels against the rules.
func TestLimits(t *testing.T) {
	text, err := os.ReadFile("../rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	exprs := map[string]string{}
	for _, r := range file.Groups[0].Rules {
		exprs[r.Alert] = r.Expr
	}
	limits := map[string]struct{ alert, limit string }{
		"Retry budget in use":           {"RetryBudgetUtilisationHigh", "> 0.8"},
		"Requests that run out of time": {"DeadlineExceededHigh", "> 0.01"},
		"Requests with a deadline":      {"DeadlineHeaderMissing", "< 0.95"},
		"Attempts per request":          {"RetryAmplificationHigh", "> 1.3"},
	}
	lines := 0
	for _, r := range rows {
		for _, p := range r.panels {
			if p.limit == 0 {
				continue
			}
			lines++
			l, ok := limits[p.title]
			if !ok {
				t.Errorf("%s has a line and no alert", p.title)
				continue
			}
			want := "> "
			if p.below {
				want = "< "
			}
			number, err := json.Marshal(p.limit)
			if err != nil {
				t.Fatal(err)
			}
			if want += string(number); want != l.limit || !strings.Contains(exprs[l.alert], want) {
				t.Errorf("%s has a line at %s, and %s is %s", p.title, want, l.alert, exprs[l.alert])
			}
		}
	}
	if lines != len(limits) {
		t.Errorf("%d panels have a line, want %d", lines, len(limits))
	}
}
