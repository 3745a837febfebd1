package main

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// A table is one of those that the README shows, in Markdown. The first cell of
// each row names it.
type table struct {
	name string // between the markers in the README files
	head []string
	rows [][]string
}

func (t *table) add(cells ...string) {
	if len(cells) != len(t.head) {
		panic(fmt.Sprintf("%s: %d cells below a head of %d", t.name, len(cells), len(t.head)))
	}
	t.rows = append(t.rows, cells)
}

func (t *table) write(w io.Writer) {
	line := func(cells []string) { fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | ")) }
	line(t.head)
	line(strings.Split(strings.Repeat("---,", len(t.head)-1)+"---", ","))
	for _, r := range t.rows {
		line(r)
	}
}

func (t *table) String() string {
	var b strings.Builder
	t.write(&b)
	return b.String()
}

// Tables stand in README files between <!-- bench: name --> and <!-- /bench -->.
const (
	tableBegin = "<!-- bench: %s -->\n"
	tableEnd   = "<!-- /bench -->"
)

// place puts text where a README file shows the table of that name, if it does.
func place(readme, name, text string) string {
	begin := fmt.Sprintf(tableBegin, name)
	before, rest, ok := strings.Cut(readme, begin)
	if !ok {
		return readme
	}
	_, after, ok := strings.Cut(rest, tableEnd)
	if !ok {
		return readme
	}
	return before + begin + text + tableEnd + after
}

// rewrite replaces all the tables that a README file shows.
func rewrite(file, machine string, tables []*table) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	readme := place(string(text), "machine", machine+"\n")
	for _, t := range tables {
		readme = place(readme, t.name, t.String())
	}
	return os.WriteFile(file, []byte(readme), 0o644)
}
