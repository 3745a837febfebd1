package ops

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

// A set holds label names.
type set map[string]bool

func setOf(names ...string) set {
	s := set{}
	for _, n := range names {
		s[n] = true
	}
	return s
}

func (s set) with(names ...string) set {
	s = maps.Clone(s)
	for _, n := range names {
		s[n] = true
	}
	return s
}

func (s set) without(names ...string) set {
	s = maps.Clone(s)
	for _, n := range names {
		delete(s, n)
	}
	return s
}

func (s set) String() string { return fmt.Sprint(slices.Sorted(maps.Keys(s))) }

// A catalogue says which series there are, and with which labels.
type catalogue struct {
	labels map[string]set            // by name of the series, "_bucket" and the like included
	values map[string]map[string]set // of labels whose values are a closed set; by family, then label
}

// closed are the labels whose values the library chooses.
var closed = []string{"side", "outcome", "reason", "state", "op"}

// golden reads the text that the library's own test holds against its metrics.
// Prometheus adds job and instance when it scrapes.
func golden(t *testing.T) catalogue {
	t.Helper()
	text := read(t, "../testdata/metrics.golden") + read(t, "../replay/testdata/metrics.golden")
	c := catalogue{map[string]set{"up": setOf("job", "instance")}, map[string]map[string]set{}}
	label := regexp.MustCompile(`(\w+)="([^"]*)"`)
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(line, "{")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		if c.labels[name] == nil {
			c.labels[name] = setOf("job", "instance")
			c.values[name] = map[string]set{}
		}
		for _, m := range label.FindAllStringSubmatch(rest, -1) {
			c.labels[name][m[1]] = true
			if c.values[name][m[1]] == nil {
				c.values[name][m[1]] = set{}
			}
			c.values[name][m[1]][m[2]] = true
		}
	}
	if len(c.labels) < 20 {
		t.Fatalf("the golden file has %d names", len(c.labels))
	}
	return c
}

// family is the name without what a histogram's series add to it.
func family(series string) string {
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if f, ok := strings.CutSuffix(series, suffix); ok {
			return f
		}
	}
	return series
}

// families returns the metrics of the golden file.
func (c catalogue) families() set {
	fs := set{}
	for name := range c.values {
		fs[family(name)] = true
	}
	return fs
}

var promql = parser.NewParser(parser.Options{})

// parse returns the expression, with Grafana's variables filled in, and the
// labels of its result.
func (c catalogue) parse(expr string) (parser.Expr, set, error) {
	expr = regexp.MustCompile(`\$__(rate_interval|interval|range)\b`).ReplaceAllString(expr, "5m")
	e, err := promql.ParseExpr(expr)
	if err != nil {
		return nil, nil, err
	}
	s, err := c.infer(e)
	return e, s, err
}

// infer returns the labels that the result of e can have, or why e can never
// have a result: a name or label that does not exist, or two sides whose labels
// never match.
func (c catalogue) infer(e parser.Expr) (set, error) {
	switch e := e.(type) {
	case *parser.NumberLiteral, *parser.StringLiteral:
		return set{}, nil
	case *parser.ParenExpr:
		return c.infer(e.Expr)
	case *parser.UnaryExpr:
		return c.infer(e.Expr)
	case *parser.MatrixSelector:
		return c.infer(e.VectorSelector)
	case *parser.VectorSelector:
		return c.selector(e)
	case *parser.Call:
		s := set{}
		for _, arg := range e.Args {
			a, err := c.infer(arg)
			if err != nil {
				return nil, err
			}
			for n := range a {
				s[n] = true
			}
		}
		switch e.Func.Name {
		case "rate", "increase", "round":
			return s, nil
		case "histogram_quantile":
			if !s["le"] {
				return nil, fmt.Errorf("histogram_quantile of %v: the label le is gone", s)
			}
			return s.without("le"), nil
		}
		return nil, fmt.Errorf("the check does not know the function %s", e.Func.Name)
	case *parser.AggregateExpr:
		s, err := c.infer(e.Expr)
		if err != nil {
			return nil, err
		}
		for _, n := range e.Grouping {
			if !s[n] {
				return nil, fmt.Errorf("%v by %s: there is only %v in %s", e.Op, n, s, e.Expr)
			}
		}
		if e.Without {
			return s.without(e.Grouping...), nil
		}
		return setOf(e.Grouping...), nil
	case *parser.BinaryExpr:
		l, errL := c.infer(e.LHS)
		r, errR := c.infer(e.RHS)
		if err := errors.Join(errL, errR); err != nil {
			return nil, err
		}
		if e.LHS.Type() == parser.ValueTypeScalar {
			return r, nil
		}
		if e.RHS.Type() == parser.ValueTypeScalar {
			return l, nil
		}
		m := e.VectorMatching
		if m.On {
			for _, n := range m.MatchingLabels {
				if !l[n] || !r[n] {
					return nil, fmt.Errorf("on %s: one side of %s does not have it", n, e)
				}
			}
		} else if a, b := l.without(m.MatchingLabels...), r.without(m.MatchingLabels...); !maps.Equal(a, b) {
			return nil, fmt.Errorf("%v and %v never match: %s", a, b, e)
		}
		switch {
		case e.Op.IsSetOperator(), m.Card == parser.CardManyToOne:
			return l.with(m.Include...), nil
		case m.Card == parser.CardOneToMany:
			return r.with(m.Include...), nil
		case m.On:
			return setOf(m.MatchingLabels...), nil
		}
		return l.without(m.MatchingLabels...), nil
	}
	return nil, fmt.Errorf("the check does not know %T: %s", e, e)
}

func (c catalogue) selector(e *parser.VectorSelector) (set, error) {
	s, ok := c.labels[e.Name]
	if !ok {
		return nil, fmt.Errorf("there is no series %q", e.Name)
	}
	for _, m := range e.LabelMatchers {
		if m.Name == "__name__" {
			continue
		}
		if !s[m.Name] {
			return nil, fmt.Errorf("%s has no label %q, only %v", e.Name, m.Name, s)
		}
		values := c.values[e.Name][m.Name]
		if values == nil || !slices.Contains(closed, m.Name) {
			continue
		}
		// Each alternative by itself: a misspelt one hides behind the others.
		alternatives := []string{m.Value}
		if m.Type == labels.MatchRegexp || m.Type == labels.MatchNotRegexp {
			alternatives = strings.Split(m.Value, "|")
		}
		for _, a := range alternatives {
			if !values[a] {
				return nil, fmt.Errorf("%s never has %s=%q, only %v", e.Name, m.Name, a, values)
			}
		}
	}
	return s, nil
}

// metricsIn returns the families that the expression reads.
func metricsIn(e parser.Expr) set {
	s := set{}
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		if v, ok := n.(*parser.VectorSelector); ok {
			s[family(v.Name)] = true
		}
		return nil
	})
	return s
}

// A rule is one of rules.yml.
type rule struct {
	Record, Alert, Expr string
	For                 string
	Labels, Annotations map[string]string
}

func parseRules(t *testing.T, text string) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	dec := yaml.NewDecoder(strings.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&file); err != nil {
		t.Fatal(err)
	}
	if len(file.Groups) != 1 { // rules of one group are evaluated in their order
		t.Fatalf("%d groups: alerts may see the records of the last evaluation", len(file.Groups))
	}
	return file.Groups[0].Rules
}

// record adds the recorded series to the catalogue, in their order.
func (c catalogue) record(t *testing.T, rules []rule) {
	t.Helper()
	for _, r := range rules {
		_, s, err := c.parse(r.Expr)
		if err != nil {
			t.Errorf("%s%s: %v", r.Record, r.Alert, err)
			continue
		}
		if r.Record == "" {
			continue
		}
		// level:metric:operations, and the level is the labels.
		level := strings.Split(strings.Split(r.Record, ":")[0], "_")
		if !maps.Equal(setOf(level...), s) {
			t.Errorf("%s: the labels are %v", r.Record, s)
		}
		c.labels[r.Record] = s
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestNames(t *testing.T) {
	if have := golden(t).families(); !maps.Equal(have, setOf(names...)) {
		t.Errorf("the library exports\n%v\nand Render knows\n%v", have, setOf(names...))
	}
}

func TestRules(t *testing.T) {
	c := golden(t)
	rules := parseRules(t, read(t, "rules.yml"))
	c.record(t, rules)
	runbook := read(t, "runbook.md")
	tests := read(t, "rules_test.yml")

	alerts := set{}
	for _, r := range rules {
		if r.Alert == "" {
			continue
		}
		alerts[r.Alert] = true
		_, s, err := c.parse(r.Expr)
		if err != nil {
			continue // said already
		}
		if !slices.Contains([]string{"warning", "critical"}, r.Labels["severity"]) || len(r.Labels) != 1 {
			t.Errorf("%s: labels %v", r.Alert, r.Labels)
		}
		if r.For == "" {
			t.Errorf("%s fires at once", r.Alert)
		}
		anchor := strings.ToLower(r.Alert)
		if got, want := r.Annotations["runbook_url"], Runbook+"#"+anchor; got != want {
			t.Errorf("%s: runbook_url %s, want %s", r.Alert, got, want)
		}
		if strings.Count(runbook, "\n## "+r.Alert+"\n") != 1 {
			t.Errorf("%s: the runbook has no heading of that name, which is the anchor", r.Alert)
		}
		if !strings.Contains(tests, "- alertname: "+r.Alert+"\n") {
			t.Errorf("%s: rules_test.yml does not test it", r.Alert)
		}
		for name, a := range r.Annotations {
			for _, m := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(a, -1) {
				if !s[m[1]] {
					t.Errorf("%s: %s uses the label %s, and there is only %v", r.Alert, name, m[1], s)
				}
			}
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^## ([A-Z]\w+)$`).FindAllStringSubmatch(runbook, -1) {
		if !alerts[m[1]] {
			t.Errorf("the runbook has an entry for %s, which is no alert", m[1])
		}
	}
	// None on the number of retries.
	for _, r := range rules {
		if r.Alert != "" && strings.Contains(r.Expr, "stint_client_retries_total") {
			t.Errorf("%s is on the raw number of retries", r.Alert)
		}
	}
}

// A chart is one query of the dashboard.
type chart struct {
	panel, legend, expr string
	heat                bool
}

// charts reads the committed dashboard as Grafana does: as JSON.
func charts(t *testing.T) (cs []chart) {
	t.Helper()
	var d struct {
		Panels []struct {
			Type, Title string
			Targets     []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, "dashboard.json")), &d); err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			cs = append(cs, chart{p.Title, q.LegendFormat, q.Expr, p.Type == "heatmap"})
		}
	}
	return cs
}

func TestDashboardExpressions(t *testing.T) {
	c := golden(t)
	charted, seen := set{}, map[string]string{}
	for _, q := range charts(t) {
		e, s, err := c.parse(q.expr)
		if err != nil {
			t.Errorf("%s: %v\n%s", q.panel, err, q.expr)
			continue
		}
		for f := range metricsIn(e) {
			charted[f] = true
		}
		if other, ok := seen[q.expr]; ok {
			t.Errorf("%s and %s show the same", q.panel, other)
		}
		seen[q.expr] = q.panel
		// A legend without one of the labels gives two curves one name.
		used := set{}
		for _, m := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(q.legend, -1) {
			used[m[1]] = true
		}
		if !maps.Equal(used, s) {
			t.Errorf("%s: the legend names %v, the curves have %v", q.panel, used, s)
		}
	}
	if all := c.families(); !maps.Equal(charted, all) {
		t.Errorf("charted are\n%v\nand exported\n%v", charted, all)
	}
	for _, m := range regexp.MustCompile(`label_values\(((?:[^()])+), (\w+)\)`).FindAllStringSubmatch(read(t, "dashboard.json"), -1) {
		selector := strings.ReplaceAll(m[1], `\"`, `"`)
		selectors := []string{selector}
		if strings.HasPrefix(selector, "{__name__=~") {
			selectors = strings.Split(strings.Split(selector, `"`)[1], "|")
		}
		for _, selector := range selectors {
			if _, s, err := c.parse(selector); err != nil || !s[m[2]] {
				t.Errorf("%s: %v, labels %v", m[0], err, s)
			}
		}
	}
}

// TestTexts looks at what the runbook and the README tell people to type.
func TestTexts(t *testing.T) {
	for path, least := range map[string]int{"runbook.md": 8, "../README.md": 2} {
		c := golden(t)
		c.record(t, parseRules(t, read(t, "rules.yml")))
		text := read(t, path)
		found := 0
		for _, m := range regexp.MustCompile("(?m)^```(?:promql)?\n((?:[^`])+)^```$").FindAllStringSubmatch(text, -1) {
			if !regexp.MustCompile(`^(promql|(sum|max|min|topk|histogram_quantile|rate|stint_\w+|ALERTS)\b)`).MatchString(m[1]) {
				continue
			}
			found++
			if _, _, err := c.parse(m[1]); err != nil {
				t.Errorf("%s: %v\n%s", path, err, m[1])
			}
		}
		if found < least {
			t.Errorf("%s: %d expressions found, want at least %d", path, found, least)
		}
		for _, name := range regexp.MustCompile(`\b(stint|retry|deadline|http)_\w+(_total|_seconds|_ratio|_factor|_utilisation|_success|_bucket|_count|_sum)\b`).FindAllString(text, -1) {
			if !c.families()[family(name)] {
				t.Errorf("%s: there is no metric %s", path, name)
			}
		}
	}
}

// TestCheckCanFail gives the check what it is there for.
func TestCheckCanFail(t *testing.T) {
	c := golden(t)
	for expr, want := range map[string]string{
		`rate(http_client_request_total[5m])`:                                                                     "no series",
		`stint_attempts_per_success`:                                                                              "no series",
		`http_client_requests_total{service="a"}`:                                                                 "no label",
		`sum by (service) (http_client_requests_total)`:                                                           "by service",
		`stint_refused_total{reason="tired"}`:                                                                     "never has",
		`stint_deadline_headers_total{state=~"present|gone"}`:                                                     "never has",
		`sum by (peer) (http_client_requests_total) / sum by (service) (http_server_requests_total)`:              "never match",
		`sum by (peer) (http_client_requests_total) / on (service) sum by (service) (http_server_requests_total)`: "does not have it",
		`histogram_quantile(0.5, sum by (service) (rate(stint_deadline_late_seconds_bucket[5m])))`:                "le is gone",
		`sum(`: "parse error",
	} {
		if _, _, err := c.parse(expr); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", expr, err, want)
		}
	}
}

func TestRender(t *testing.T) {
	c := golden(t)
	renamed := catalogue{map[string]set{"up": c.labels["up"]}, map[string]map[string]set{}}
	for name, s := range c.labels {
		if name != "up" {
			renamed.labels["shop_"+name], renamed.values["shop_"+name] = s, c.values[name]
		}
	}
	text := Render(read(t, "rules.yml"), Options{
		Namespace: "shop", Edge: `edge|gate\.way`, Runbook: "https://example.com/runbook",
		Window: "30s", For: "5s", Offset: "20s",
	})
	rules := parseRules(t, text)
	renamed.record(t, rules)
	for _, r := range rules {
		if r.Alert != "" && (r.For != "5s" || !strings.HasPrefix(r.Annotations["runbook_url"], "https://example.com/runbook#")) {
			t.Errorf("%+v", r)
		}
		if strings.Contains(r.Expr, `"edge"`) || strings.Contains(r.Expr, "5m") || strings.Contains(r.Expr, " 1d") {
			t.Errorf("not rendered: %s", r.Expr)
		}
	}
	if !strings.Contains(text, `service!~"edge|gate\\.way"`) {
		t.Error("the edges are not there")
	}

	dash := Render(read(t, "dashboard.json"), Options{Namespace: "shop", Edge: "gate"})
	if !json.Valid([]byte(dash)) {
		t.Fatal("not JSON any more")
	}
	for _, name := range names {
		if regexp.MustCompile(`[^_]\b` + name).MatchString(dash) {
			t.Errorf("%s is left in the dashboard", name)
		}
	}
	if !strings.Contains(dash, `"query": "gate"`) {
		t.Error("the variable edge is not rendered")
	}
	if plain := read(t, "rules.yml"); Render(plain, Options{}) != plain {
		t.Error("no options, and a change")
	}
}
