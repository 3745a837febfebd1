package stint_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/constant"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stinthttp/stint"
)

// What README.md and the package comment say is held against the code here:
// their programs compile, their tables are complete, their commands run.

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A block is one fenced block of the README.
type block struct {
	line   int
	lang   string // behind the fence
	marker string // of the HTML comment right above, without its delimiters; "" for none
	text   string
}

// blocks returns the fenced blocks. One in a list item is indented.
func blocks(text string) (list []block) {
	var open *block
	var indent, above string
	for i, line := range strings.Split(text, "\n") {
		body := strings.TrimLeft(line, " ")
		lang, fence := strings.CutPrefix(body, "```")
		switch {
		case open != nil && fence:
			list = append(list, *open)
			open = nil
		case open != nil:
			open.text += strings.TrimPrefix(line, indent) + "\n"
		case fence:
			open = &block{line: i + 1, lang: lang, marker: above}
			indent = line[:len(line)-len(body)]
		}
		if open == nil {
			above = ""
			if m, ok := strings.CutPrefix(body, "<!--"); ok {
				above = strings.TrimSpace(strings.TrimSuffix(m, "-->"))
			}
		}
	}
	return list
}

// A table of the README: its cells without the header, the heading it stands
// under, and the first word of the header row.
type table struct {
	heading, first string
	rows           [][]string
}

func tables(text string) (list []table) {
	var heading string
	var open *table
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if h, ok := strings.CutPrefix(line, "#"); ok {
			heading = strings.TrimLeft(h, "# ")
		}
		if !strings.HasPrefix(line, "|") {
			open = nil
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case open == nil:
			list = append(list, table{heading: heading, first: cells[0]})
			open = &list[len(list)-1]
		case strings.HasPrefix(cells[0], "---"):
		default:
			open.rows = append(open.rows, cells)
		}
	}
	return list
}

// findTable returns the table whose first header cell is first, under the
// heading, or under any if that is empty.
func findTable(t *testing.T, heading, first string) table {
	t.Helper()
	for _, x := range tables(readme(t)) {
		if x.first == first && (heading == "" || x.heading == heading) {
			return x
		}
	}
	t.Fatalf("README.md has no table %q under %q", first, heading)
	return table{}
}

// named returns the words in backticks of a table's first column.
func (x table) named() (names []string) {
	for _, row := range x.rows {
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[0], -1) {
			names = append(names, m[1])
		}
	}
	return names
}

func equalSets(t *testing.T, what string, got, want []string) {
	t.Helper()
	got, want = slices.Clone(got), slices.Clone(want)
	slices.Sort(got)
	slices.Sort(want)
	if got = slices.Compact(got); !slices.Equal(got, want) {
		t.Errorf("%s: README.md has\n%q, the code has\n%q", what, got, want)
	}
}

func TestReadmeDefaults(t *testing.T) {
	defaults := map[string]string{ // as the column "zero means" begins
		"Config.MaxAttempts":          strconv.Itoa(stint.DefaultMaxAttempts),
		"Config.Reserve":              words(stint.DefaultReserve),
		"Config.MaxPeers":             "1,000",
		"BudgetConfig.Ratio":          fmt.Sprint(stint.DefaultBudgetRatio),
		"BudgetConfig.Window":         words(stint.DefaultBudgetWindow),
		"BudgetConfig.MinPerSecond":   fmt.Sprint(stint.DefaultBudgetMinPerSecond),
		"BudgetConfig.PeakFactor":     fmt.Sprint(stint.DefaultBudgetPeakFactor),
		"BudgetConfig.MaxWait":        words(stint.DefaultBudgetMaxWait),
		"Backoff.Base":                words(stint.DefaultBackoffBase),
		"Backoff.Max":                 words(stint.DefaultBackoffMax),
		"Backoff.MaxRetryAfter":       words(stint.DefaultMaxRetryAfter),
		"AdmissionConfig.Quantile":    fmt.Sprint(stint.DefaultQuantile),
		"AdmissionConfig.MinSamples":  strconv.Itoa(stint.DefaultMinSamples),
		"AdmissionConfig.Window":      words(stint.DefaultAdmissionWindow),
		"MiddlewareConfig.MaxTimeout": words(stint.DefaultMaxTimeout),
		"LimitConfig.MaxWait":         words(stint.DefaultLimitMaxWait),
	}
	if stint.DefaultMaxPeers != 1000 {
		t.Errorf("DefaultMaxPeers = %d, README.md says 1,000", stint.DefaultMaxPeers)
	}
	for _, v := range []any{
		stint.Config{}, stint.BudgetConfig{}, stint.Backoff{}, stint.AdmissionConfig{},
		stint.Override{}, stint.MiddlewareConfig{}, stint.MetricsConfig{}, stint.LimitConfig{},
	} {
		typ := reflect.TypeOf(v)
		x := findTable(t, typ.Name(), "field")
		var want []string
		for i := range typ.NumField() {
			want = append(want, typ.Field(i).Name)
		}
		if got := x.named(); !slices.Equal(got, want) {
			t.Errorf("%s: README.md has the fields\n%q, the code has\n%q", typ.Name(), got, want)
			continue
		}
		for i, row := range x.rows {
			if len(row) != 3 || row[1] == "" || row[2] == "" {
				t.Errorf("%s.%s: %q, want a field, what zero means and a meaning", typ.Name(), want[i], row)
			} else if d := defaults[typ.Name()+"."+want[i]]; d != "" && row[1] != d && !strings.HasPrefix(row[1], d+",") {
				t.Errorf("%s.%s: README.md says zero means %q, the code says %s", typ.Name(), want[i], row[1], d)
			}
		}
	}
}

// words writes a duration as the README does.
func words(d time.Duration) string {
	switch {
	case d%time.Hour == 0:
		return fmt.Sprint(int(d/time.Hour), " h")
	case d%time.Second == 0:
		return fmt.Sprint(int(d/time.Second), " s")
	default:
		return fmt.Sprint(int(d/time.Millisecond), " ms")
	}
}

// exported returns the exported string constants of the package whose names
// begin with prefix, by name.
func exported(t *testing.T, prefix string) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, f := range parsed(t, false) {
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				s := s.(*ast.ValueSpec)
				for i, name := range s.Names {
					if !strings.HasPrefix(name.Name, prefix) || i >= len(s.Values) {
						continue
					}
					if lit, ok := s.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
						found[name.Name] = constant.StringVal(constant.MakeFromLiteral(lit.Value, lit.Kind, 0))
					}
				}
			}
		}
	}
	if len(found) == 0 {
		t.Fatalf("no constants %s…", prefix)
	}
	return found
}

// parsed returns the Go files of this directory, those of the tests or the
// others.
func parsed(t *testing.T, tests bool) (files []*ast.File) {
	t.Helper()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") != tests {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

func TestReadmeReasonsHeadersEvents(t *testing.T) {
	var reasons []string
	for _, v := range exported(t, "Reason") {
		reasons = append(reasons, v)
	}
	equalSets(t, "reasons", findTable(t, "Errors and outcomes", "reason").named(), reasons)

	want := []string{"Retry-After", "retry-after-ms"} // read, and of others' making
	for _, v := range exported(t, "Header") {
		want = append(want, v)
	}
	equalSets(t, "headers", findTable(t, "Headers", "header").named(), want)

	text := readme(t)
	for name := range exported(t, "Event") {
		if !strings.Contains(text, "`"+name+"`") {
			t.Errorf("README.md does not mention %s", name)
		}
	}
}

func TestReadmeMetrics(t *testing.T) {
	golden, err := os.ReadFile("testdata/metrics.golden")
	if err != nil {
		t.Fatal(err)
	}
	labels := make(map[string]map[string]bool) // by metric
	types := make(map[string]string)
	for line := range strings.Lines(string(golden)) {
		if words := strings.Fields(line); words[0] == "#" {
			if words[1] == "TYPE" {
				types[words[2]] = words[3]
				labels[words[2]] = make(map[string]bool)
			}
			continue
		}
		name, rest, _ := strings.Cut(line, "{")
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if base, ok := strings.CutSuffix(name, suffix); ok && types[base] == "histogram" {
				name = base
			}
		}
		for _, m := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(rest, -1) {
			if m[1] != "le" {
				labels[name][m[1]] = true
			}
		}
	}
	x := findTable(t, "Metrics", "metric")
	var want []string
	for name := range types {
		want = append(want, name)
	}
	equalSets(t, "metrics", x.named(), want)
	for i, name := range x.named() {
		if got := x.rows[i][1]; got != types[name] {
			t.Errorf("%s: README.md says %s, the golden text %s", name, got, types[name])
		}
		var have []string
		for l := range labels[name] {
			have = append(have, l)
		}
		equalSets(t, "labels of "+name, strings.Split(x.rows[i][2], ", "), have)
	}

	values := func(label string) (list []string) {
		for _, m := range regexp.MustCompile(label+`="(\w+)"`).FindAllStringSubmatch(string(golden), -1) {
			list = append(list, m[1])
		}
		slices.Sort(list)
		return slices.Compact(list)
	}
	equalSets(t, "states", findTable(t, "Headers", "state").named(), values("state"))
	equalSets(t, "outcomes", findTable(t, "Metrics", "outcome").named(), values("outcome"))

	// Each name in a query exists.
	for _, m := range regexp.MustCompile(`\b(stint|retry_\w+|deadline|http_client|http_server)_\w+`).FindAllString(readme(t), -1) {
		if strings.HasPrefix(m, "stint_replay_") {
			continue // package replay has a test of its own
		}
		if types[m] == "" && m != "deadline_headers" && m != "deadline_ms" { // of a file, and of a probe
			t.Errorf("README.md mentions %s, which is no metric", m)
		}
	}
}

// Every TestP…_ in the README stands for at least one test.
func TestReadmeTestNames(t *testing.T) {
	var names []string
	for _, f := range parsed(t, true) {
		for _, d := range f.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && strings.HasPrefix(f.Name.Name, "Test") {
				names = append(names, f.Name.Name)
			}
		}
	}
	found := regexp.MustCompile(`-run (Test\w+)`).FindAllStringSubmatch(readme(t), -1)
	if len(found) < 9 {
		t.Errorf("README.md names %d tests, want one for each guarantee", len(found))
	}
	for _, m := range found {
		if slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, m[1]) }) {
			continue
		}
		t.Errorf("README.md names %s, and there is no such test", m[1])
	}
}

// Every go command of the README names a directory that exists, and flags that
// its program has.
func TestReadmeCommands(t *testing.T) {
	n := 0
	for _, m := range regexp.MustCompile(`(?:cd (\S+) && )?\bgo (run|test) ([^\n`+"`"+`|]+)`).FindAllStringSubmatch(readme(t), -1) {
		n++
		if m[1] == "stint" {
			m[1] = "" // the clone itself
		}
		words := strings.Fields(m[3])
		i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, ".") })
		if i < 0 {
			t.Errorf("%s: no directory", m[0])
			continue
		}
		dir := filepath.Join(m[1], strings.TrimSuffix(words[i], "..."))
		if s, err := os.Stat(dir); err != nil || !s.IsDir() {
			t.Errorf("%s: no directory %s", m[0], dir)
			continue
		}
		if m[2] == "test" {
			continue
		}
		source, err := os.ReadFile(filepath.Join(dir, "main.go"))
		if err != nil {
			t.Error(err)
		}
		for _, w := range words[i+1:] {
			if name, ok := strings.CutPrefix(w, "-"); ok && !bytes.Contains(source, []byte(strconv.Quote(name)+",")) {
				t.Errorf("%s: %s has no flag -%s", m[0], dir, name)
			}
		}
	}
	if n < 5 {
		t.Errorf("%d commands found", n)
	}
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)\)`).FindAllStringSubmatch(readme(t), -1) {
		if _, err := os.Stat(m[1]); err != nil {
			t.Errorf("README.md links to %s: %v", m[1], err)
		}
	}
	anchors := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(readme(t), -1) {
		anchors[strings.ReplaceAll(strings.ToLower(m[1]), " ", "-")] = true
	}
	for _, m := range regexp.MustCompile(`\]\(#([^)]+)\)`).FindAllStringSubmatch(readme(t), -1) {
		if !anchors[m[1]] {
			t.Errorf("README.md links to #%s, and there is no such heading", m[1])
		}
	}
}

// What the fragments of README.md and doc.go may use without declaring it. A
// fragment names what it wants in the comment above it: <!-- snippet: mux -->.
var given = map[string]string{
	"mux":     "mux *http.ServeMux",
	"ctx":     "ctx context.Context",
	"r":       "r *http.Request",
	"client":  "client *http.Client",
	"orderID": "orderID string",
	"body":    "body io.Reader",
	"t":       "t *testing.T",
	"target":  "target *url.URL",

	"transport":  "transport *stint.Transport",
	"middleware": "middleware *stint.Middleware",
}

const givenFuncs = `
func use(resp *http.Response, err error) error { return err }

func answer(w http.ResponseWriter, resp *http.Response, err error) {}
`

// packages are what a fragment can use by name.
var packages = map[string]string{
	"bytes": "bytes", "context": "context", "errors": "errors", "fmt": "fmt", "io": "io", "log": "log",
	"http": "net/http", "strings": "strings", "time": "time", "stint": "github.com/stinthttp/stint",
	"prometheus": "github.com/prometheus/client_golang/prometheus",
	"replay":     "github.com/stinthttp/stint/replay",
	"httptest":   "net/http/httptest", "httputil": "net/http/httputil", "testing": "testing", "url": "net/url",
}

// wrap makes a file of a fragment, in which it is the body of a function.
// Variables that the fragment only declares count as used.
func wrap(fragment string, wants []string) (string, error) {
	var params []string
	for _, w := range wants {
		p, ok := given[w]
		if !ok {
			return "", fmt.Errorf("nothing is given by the name %q", w)
		}
		params = append(params, p)
	}
	head := "func fragment(" + strings.Join(params, ", ") + ") error {\n"
	file, err := parser.ParseFile(token.NewFileSet(), "", "package snippet\n"+head+fragment+"\n}\n", 0)
	if err != nil {
		return "", err
	}
	imports := map[string]bool{"io": true, "net/http": true}
	ast.Inspect(file, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok && packages[x.Name] != "" && !slices.Contains(wants, x.Name) {
				imports[packages[x.Name]] = true
			}
		}
		return true
	})
	for _, p := range params {
		if pkg, _, ok := strings.Cut(strings.TrimLeft(p[strings.Index(p, " ")+1:], "*"), "."); ok {
			imports[packages[pkg]] = true
		}
	}
	body := file.Decls[0].(*ast.FuncDecl).Body.List
	var uses strings.Builder
	for _, s := range body {
		if a, ok := s.(*ast.AssignStmt); ok && a.Tok == token.DEFINE {
			for _, l := range a.Lhs {
				if id := l.(*ast.Ident); id.Name != "_" {
					fmt.Fprintf(&uses, "\t_ = %s\n", id.Name)
				}
			}
		}
	}
	ends := ""
	if last := body[len(body)-1]; !terminates(last) {
		ends = uses.String() + "\treturn nil\n"
	}
	var b strings.Builder
	b.WriteString("package snippet\n\nimport (\n")
	for path := range imports {
		fmt.Fprintf(&b, "\t%q\n", path)
	}
	b.WriteString(")\n\nvar _ io.Reader\n" + givenFuncs + "\n" + head + fragment + ends + "}\n")
	return b.String(), nil
}

func terminates(s ast.Stmt) bool {
	switch s := s.(type) {
	case *ast.ReturnStmt:
		return true
	case *ast.ForStmt:
		return s.Cond == nil
	}
	return false
}

// TestReadmeGoCompiles builds every Go block of README.md and of the package
// comment. They go into directories that exist for the compiler alone, in this
// module, so that they see its dependencies and need no network.
func TestReadmeGoCompiles(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the compiler")
	}
	goTool := toolOrSkip(t, "go")
	sources := make(map[string]string) // by where they come from
	for _, b := range blocks(readme(t)) {
		if b.lang != "go" {
			continue
		}
		where := fmt.Sprintf("README.md:%d", b.line)
		if strings.HasPrefix(b.text, "package ") {
			sources[where] = b.text
			continue
		}
		wants, ok := strings.CutPrefix(b.marker, "snippet:")
		if !ok {
			t.Errorf("%s: no <!-- snippet: … --> above the block", where)
			continue
		}
		source, err := wrap(b.text, strings.Fields(wants))
		if err != nil {
			t.Errorf("%s: %v", where, err)
			continue
		}
		sources[where] = source
	}
	for _, f := range parsed(t, false) {
		if f.Doc == nil {
			continue
		}
		for i, c := range new(comment.Parser).Parse(f.Doc.Text()).Content {
			code, ok := c.(*comment.Code)
			if !ok {
				continue
			}
			where := fmt.Sprintf("package comment, part %d", i)
			source, err := wrap(code.Text, nil)
			if err != nil {
				t.Errorf("%s: %v", where, err)
				continue
			}
			sources[where] = source
		}
	}
	if len(sources) < 10 {
		t.Errorf("%d Go blocks found", len(sources))
	}

	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	// Of several packages at once the compiler's results are thrown away.
	args := []string{"build", "-overlay", filepath.Join(tmp, "overlay.json")}
	dirs := make(map[string]string)
	for where, source := range sources {
		n := strconv.Itoa(len(dirs))
		file := filepath.Join(tmp, n+".go")
		if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
			t.Fatal(err)
		}
		dir := "snippet" + n
		dirs[dir] = where
		overlay.Replace[filepath.Join(root, dir, "main.go")] = file
		args = append(args, "./"+dir)
	}
	text, err := json.Marshal(overlay)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tmp, "overlay.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), goTool, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s\n%v", err, out, dirs)
	}
}

func toolOrSkip(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not here", name)
	}
	return path
}

// TestReadmeCurl runs the curl lines of the README against the programs that it
// starts before, and compares what it shows of their output.
func TestReadmeCurl(t *testing.T) {
	if testing.Short() {
		t.Skip("starts the examples")
	}
	goTool, _, shell := toolOrSkip(t, "go"), toolOrSkip(t, "curl"), toolOrSkip(t, "sh")
	programs := map[string]struct{ args []string }{
		"storm":      {[]string{"-fault", "none", "-serve"}},
		"quickstart": {},
	}
	const documented = "127.0.0.1:8080"
	seen := 0
	list := blocks(readme(t))
	for name, p := range programs {
		t.Run(name, func(t *testing.T) {
			binary := filepath.Join(t.TempDir(), name)
			if out, err := exec.CommandContext(t.Context(), goTool, "build", "-o", binary, "./examples/"+name).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			addr := serve(t, binary, p.args...)
			for i, b := range list {
				// The marker names the program, and what the lines need besides curl.
				words := strings.Fields(b.marker)
				if len(words) < 2 || words[0] != "curl:" || words[1] != name {
					continue
				}
				if missing := slices.DeleteFunc(words[2:], onPath); len(missing) > 0 {
					t.Logf("README.md:%d: not run, %q is not here", b.line, missing)
					continue
				}
				if i+1 == len(list) || list[i+1].lang != "" {
					t.Fatalf("README.md:%d: no output below the commands", b.line)
				}
				var got bytes.Buffer
				for command := range strings.Lines(b.text) {
					if !strings.HasPrefix(command, "curl ") || !strings.Contains(command, documented) {
						t.Errorf("README.md:%d: not a curl line for %s: %s", b.line, documented, command)
						continue
					}
					seen++
					cmd := exec.CommandContext(t.Context(), shell, "-c", strings.ReplaceAll(command, documented, addr))
					cmd.Env = append(os.Environ(), "no_proxy=*")
					cmd.Stdout = &got
					if err := cmd.Run(); err != nil {
						t.Errorf("%s: %v", command, err)
					}
				}
				output := "\n"
				for line := range strings.Lines(plain(got.String())) {
					output += strings.TrimSpace(line) + "\n"
				}
				for want := range strings.Lines(plain(list[i+1].text)) {
					// A lone … stands for lines that are left out, one at a line's end
					// for the rest of it.
					want = strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(want), "…"))
					if want == "" {
						continue
					}
					_, rest, ok := strings.Cut(output, "\n"+want)
					if !ok {
						t.Errorf("README.md:%d: no line %q from here on in\n%s", b.line, want, output)
						continue
					}
					output = rest
				}
			}
		})
	}
	if seen < 7 {
		t.Errorf("%d curl lines found", seen)
	}
}

func onPath(name string) bool {
	_, err := exec.LookPath(name)
	return err == nil
}

// plain takes out what differs from run to run: dates, how late a request was, and
// how much time it had; and the indentation of JSON.
func plain(s string) string {
	s = regexp.MustCompile(`(?m)^[ \t]+`).ReplaceAllString(s, "")
	s = regexp.MustCompile(`(?m)^Date: .*$`).ReplaceAllString(s, "Date:")
	s = regexp.MustCompile(`("remaining_ms": )\d+`).ReplaceAllString(s, "$1…")
	return regexp.MustCompile(`\d{10,}`).ReplaceAllString(s, "…")
}

// serve starts a program that listens where -addr says, and returns the address
// when it does.
func serve(t *testing.T, binary string, args ...string) string {
	t.Helper()
	// The port is free when we look, and another process may be quicker.
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()

		ctx, cancel := context.WithCancel(context.Background())
		cmd := exec.CommandContext(ctx, binary, append(args, "-addr", addr)...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			cancel()
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		up := false
		for until := time.Now().Add(10 * time.Second); !up && time.Now().Before(until); {
			select {
			case err := <-ended:
				t.Logf("%v\n%s", err, &out)
				ended <- err
				until = time.Time{}
			case <-time.After(20 * time.Millisecond):
				up = answersHTTP(addr)
			}
		}
		if up {
			t.Cleanup(func() { cancel(); <-ended })
			return addr
		}
		cancel()
		<-ended
	}
	t.Fatal("the program does not serve")
	return ""
}

// answersHTTP reports whether somebody speaks HTTP at addr. By hand, so that no
// connection is left over.
func answersHTTP(addr string) bool {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * time.Second))
	fmt.Fprintf(conn, "GET /metrics HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", addr)
	line, err := bufio.NewReader(conn).ReadString('\n')
	return err == nil && strings.HasPrefix(line, "HTTP/1.1 200")
}

// The first screen has both halves and both commands.
func TestReadmeFirstScreen(t *testing.T) {
	head := strings.Join(strings.SplitN(readme(t), "\n", 46)[:45], "\n")
	for _, want := range []string{"NewTransport", "NewMiddleware", "go run ./examples/storm", "go test ./..."} {
		if !strings.Contains(head, want) {
			t.Errorf("the first screen of README.md lacks %q", want)
		}
	}
}

// A blip of the price table: from 15 s on, so long, so much of all attempts
// fails.
type blip struct {
	lasts time.Duration
	share float64
	runs  int
}

// A policy sends one request.
type policy func(*http.Request) (*http.Response, error)

// retrying is a policy of plain retries.
func retrying(base http.RoundTripper, attempts int, shortest, longest time.Duration, random func() float64) policy {
	return func(r *http.Request) (*http.Response, error) {
		for n := 1; ; n++ {
			resp, err := base.RoundTrip(r)
			if err != nil || resp.StatusCode < 500 || n >= attempts {
				return resp, err
			}
			time.Sleep(time.Duration(random() * float64(min(longest, shortest<<(n-1)))))
		}
	}
}

// ride sends 100 requests a second through the blip, taken in turn by clients
// that make their policies from the same base, and returns the share of the
// blip's requests that failed and the most attempts in any second.
func ride(t *testing.T, b blip, clients int, seed uint64, make func(base http.RoundTripper, random func() float64) policy) (failed float64, most int) {
	synctest.Test(t, func(t *testing.T) {
		const health = 15 * time.Second
		var mu sync.Mutex
		rng := rand.New(rand.NewPCG(seed, 1))
		random := func() float64 {
			mu.Lock()
			defer mu.Unlock()
			return rng.Float64()
		}
		start := time.Now()
		var at []time.Duration
		base := peer(func(r *http.Request) (*http.Response, error) {
			now := time.Since(start)
			ill := now >= health && now < health+b.lasts && random() < b.share
			mu.Lock()
			at = append(at, now)
			mu.Unlock()
			if ill {
				time.Sleep(5 * time.Millisecond)
				return answers(503)(r)
			}
			time.Sleep(20 * time.Millisecond)
			return answers(200)(r)
		})
		var policies []policy
		for range clients {
			policies = append(policies, make(base, random))
		}
		var users sync.WaitGroup
		asked, refused := 0, 0
		for i := 0; ; i++ {
			due := time.Duration(i) * 10 * time.Millisecond
			if due >= health+b.lasts+2*time.Second {
				break
			}
			time.Sleep(due - time.Since(start))
			users.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, "GET", "http://peer.test/", nil)
				if err != nil {
					t.Error(err)
					return
				}
				resp, err := policies[i%clients](req)
				if err == nil {
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				if due < health || due >= health+b.lasts {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				asked++
				if err != nil || resp.StatusCode != http.StatusOK {
					refused++
				}
			})
		}
		users.Wait()
		first := 0
		for i := range at {
			for at[i]-at[first] >= time.Second {
				first++
			}
			most = max(most, i-first+1)
		}
		failed = float64(refused) / float64(asked)
	})
	return failed, most
}

// TestPriceOfStrictness measures the tables of the README's section of that
// name.
func TestPriceOfStrictness(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	t.Parallel()
	with := func(c stint.Config) func(http.RoundTripper, func() float64) policy {
		return func(base http.RoundTripper, _ func() float64) policy {
			c.Base = base
			transport, err := stint.NewTransport(c)
			if err != nil {
				t.Fatal(err)
			}
			return transport.RoundTrip
		}
	}
	policies := map[string]func(http.RoundTripper, func() float64) policy{
		"no retries": func(base http.RoundTripper, _ func() float64) policy { return base.RoundTrip },
		"3 attempts, backoff as by default, no budget": func(base http.RoundTripper, random func() float64) policy {
			return retrying(base, 3, stint.DefaultBackoffBase, stint.DefaultBackoffMax, random)
		},
		"4 attempts, backoff 100 ms to 1 s, no budget": func(base http.RoundTripper, random func() float64) policy {
			return retrying(base, 4, 100*time.Millisecond, time.Second, random)
		},
		"stint":                 with(stint.Config{}),
		"stint, `MaxWait` 5 s":  with(stint.Config{Budget: stint.BudgetConfig{MaxWait: 5 * time.Second}}),
		"stint, `PeakFactor` 3": with(stint.Config{Budget: stint.BudgetConfig{PeakFactor: 3}}),
	}
	columns := []blip{ // the first gives the peak
		{20 * time.Second, 1, 1},
		{300 * time.Millisecond, 1, 6},
		{time.Second, 1, 3},
		{15 * time.Second, 0.05, 1},
		{15 * time.Second, 0.5, 1},
	}
	number := func(cell string) float64 {
		n, err := strconv.ParseFloat(strings.TrimSuffix(strings.ReplaceAll(cell, ",", ""), " %"), 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	x := findTable(t, "The price of strictness", "policy")
	if len(x.rows) != len(policies) {
		t.Errorf("%d rows, want %d", len(x.rows), len(policies))
	}
	for _, row := range x.rows {
		make, ok := policies[row[0]]
		if !ok {
			t.Errorf("no policy %q", row[0])
			continue
		}
		measured := []string{row[0]}
		for i, b := range columns {
			var failed float64
			most := 0
			for run := range b.runs {
				f, n := ride(t, b, 1, uint64(run), make)
				failed += 100 * f / float64(b.runs)
				most = max(most, n)
			}
			got, want, off := failed, number(row[1+i]), 9.0
			if i == 0 {
				got, off = float64(most), 0
				if strings.Contains(row[0], "no budget") {
					off = 20 // by chance
				}
			}
			measured = append(measured, fmt.Sprintf("%.0f", got))
			if got > want+off || got < want-off {
				t.Errorf("%s, column %d: README.md says %v, measured %.1f", row[0], i+2, row[1+i], got)
			}
			if strings.HasPrefix(row[0], "stint") && !strings.Contains(row[0], "PeakFactor") && most > 110 {
				t.Errorf("%s, column %d: %d attempts in a second", row[0], i+2, most)
			}
		}
		t.Log(measured)
	}

	for _, row := range findTable(t, "The price of strictness", "clients").rows {
		clients := int(number(strings.Fields(row[0])[0]))
		_, most := ride(t, blip{30 * time.Second, 1, 1}, clients, 1, with(stint.Config{}))
		if want := int(number(row[1])); most > want || most < want-2 {
			t.Errorf("%d clients: README.md says %d attempts in a second, measured %d", clients, want, most)
		}
	}
}
