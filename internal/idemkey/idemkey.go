// Package idemkey reads the value of an Idempotency-Key header.
package idemkey

import "strings"

// MaxLen is the longest key accepted, in bytes. Stripe and the servers that
// follow it draw the line there.
const MaxLen = 255

// Valid reports whether s can be sent as a key: 1 to 255 visible ASCII
// characters.
func Valid(s string) bool {
	if s == "" || len(s) > MaxLen {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// Parse returns the key that one line of the header holds. The draft standard
// writes it as a quoted string (RFC 8941, section 3.3.3), most clients as a bare
// word: both are the same key.
func Parse(line string) (key string, ok bool) {
	key = strings.Trim(line, " \t")
	if strings.HasPrefix(key, `"`) {
		if key, ok = unquote(key); !ok {
			return "", false
		}
	}
	if !Valid(key) {
		return "", false
	}
	return key, true
}

// unquote undoes the quoting of an RFC 8941 string, in which a backslash stands
// before a quote or another backslash and nothing else.
func unquote(s string) (string, bool) {
	if len(s) < 2 || s[len(s)-1] != '"' {
		return "", false
	}
	s = s[1 : len(s)-1]
	if !strings.ContainsAny(s, `"\`) {
		return s, true
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return "", false
		case s[i] == '\\':
			i++
			if i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", false
			}
		}
		b = append(b, s[i])
	}
	return string(b), true
}
