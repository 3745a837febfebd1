package idemkey

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	long := strings.Repeat("k", MaxLen)
	for _, c := range []struct {
		line, want string
		ok         bool
	}{
		{"abc", "abc", true},
		{`"abc"`, "abc", true},
		{" \tabc ", "abc", true},
		{` "abc" `, "abc", true},
		{`"a\"b\\c"`, `a"b\c`, true},
		{`a"b`, `a"b`, true}, // bare, and visible ASCII
		{`a\`, `a\`, true},
		{long, long, true},
		{`"` + long + `"`, long, true},
		{"", "", false},
		{" ", "", false},
		{`"`, "", false},
		{`""`, "", false},
		{`"abc`, "", false},
		{`"a"b"`, "", false},
		{`"a\"`, "", false},
		{`"a\b"`, "", false},
		{`"a b"`, "", false},
		{"a b", "", false},
		{"a,b\x00", "", false},
		{"a\x7f", "", false},
		{"é", "", false},
		{long + "k", "", false},
		{`"abc";x=1`, "", false},
	} {
		if got, ok := Parse(c.line); got != c.want || ok != c.ok {
			t.Errorf("%q: got %q, %v, want %q, %v", c.line, got, ok, c.want, c.ok)
		}
	}
}

// Whatever comes on the wire: what is taken for a key is one, and is the same
// key when it is sent again, bare or quoted.
func FuzzParse(f *testing.F) {
	for _, line := range []string{
		"9b2a2a0e-8f1e-4f0e-9d6c-1f1b7d2a3c4d", `"9b2a2a0e-8f1e-4f0e-9d6c-1f1b7d2a3c4d"`, `"a\"b\\c"`, `"`, `""`, `"a\`, "a b", "\x00", "é",
		strings.Repeat("k", MaxLen), strings.Repeat("k", MaxLen+1), `"` + strings.Repeat(`\"`, MaxLen) + `"`, ` "a" `, `"a"b"`,
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		key, ok := Parse(line)
		if !ok {
			if key != "" {
				t.Fatalf("%q: not ok, and a key %q", line, key)
			}
			return
		}
		if !Valid(key) {
			t.Fatalf("%q: %q is no key", line, key)
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		if again, ok := Parse(quoted); !ok || again != key {
			t.Fatalf("%q: quoted %q: got %q, %v, want %q", line, quoted, again, ok, key)
		}
		if key[0] != '"' {
			if again, ok := Parse(key); !ok || again != key {
				t.Fatalf("%q: bare: got %q, %v, want %q", line, again, ok, key)
			}
		}
	})
}
