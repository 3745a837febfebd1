package stint

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// An Error says that stint, not the base transport or the server, ended a
// request. Errors that only the base decided are returned untouched, and a
// response that exists is returned instead of any error.
//
// [errors.Is] and [errors.As] reach the cause: the context's error, the last
// failure of the base, or both.
type Error struct {
	Peer     string // the budget's key; empty on the server side
	Attempts int    // how many were sent
	Reason   Reason
	Err      error // never nil
}

// Error returns one line that says who refused, for which peer and why.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("stint: ")
	if e.Peer != "" {
		// Quoted where it has to be: the name can come from a URL that an
		// outsider chose.
		if p := strconv.Quote(e.Peer); p[1:len(p)-1] == e.Peer {
			b.WriteString(e.Peer)
		} else {
			b.WriteString(p)
		}
		b.WriteString(": ")
	}
	b.WriteString(string(e.Reason))
	if e.Peer != "" {
		fmt.Fprintf(&b, " after %d attempt", e.Attempts)
		if e.Attempts != 1 {
			b.WriteByte('s')
		}
	}
	if e.Err != nil {
		b.WriteString(": ")
		b.WriteString(e.Err.Error())
	}
	return b.String()
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// Timeout reports whether time ran out: the deadline, or AttemptTimeout.
// [net/url.Error] asks by type assertion, so the method is needed here and not
// only on Err.
func (e *Error) Timeout() bool {
	if e.Reason == ReasonDeadline || e.Reason == ReasonExpired {
		return true
	}
	if e.Reason == ReasonCanceled {
		return false // the last failure beside it may have been one
	}
	var t interface{ Timeout() bool }
	return errors.As(e.Err, &t) && t.Timeout()
}

// Is reports whether target is [context.DeadlineExceeded] and the deadline is
// what ended the request. [errors.Is] finds it in Err as well where AttemptTimeout
// ended the last attempt, whatever the Reason why there was no other, except
// ReasonCanceled.
func (e *Error) Is(target error) bool {
	return target == context.DeadlineExceeded && (e.Reason == ReasonDeadline || e.Reason == ReasonExpired)
}

// A ConfigError is one field of a configuration that cannot be used.
// Constructors join one for each bad field.
type ConfigError struct {
	Field  string // as written in Go: "Config.Budget.Ratio"
	Value  any
	Reason string // completes "Field = Value: "
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("stint: %s = %v: %s", e.Field, e.Value, e.Reason)
}

// configErrors collects the bad fields of one configuration.
type configErrors []error

func (c *configErrors) check(ok bool, field string, value any, reason string) {
	if !ok {
		*c = append(*c, &ConfigError{Field: field, Value: value, Reason: reason})
	}
}

func (c configErrors) join() error { return errors.Join(c...) }

func (c configErrors) first() error {
	if len(c) == 0 {
		return nil
	}
	return c[0]
}

// A timeoutCause is why a derived context ended. net/http returns the cause of a
// context in place of its error on HTTP/1, so the cause itself has to say that it
// is a timeout; plain causes lose that.
type timeoutCause string

const (
	causeDeadline       timeoutCause = "stint: request deadline exceeded"
	causeAttemptTimeout timeoutCause = "stint: attempt timeout exceeded"
)

func (c timeoutCause) Error() string        { return string(c) }
func (c timeoutCause) Timeout() bool        { return true }
func (c timeoutCause) Temporary() bool      { return true }
func (c timeoutCause) Is(target error) bool { return target == context.DeadlineExceeded }

// A both is two errors in one line. errors.Join would print two, and has no
// Timeout method.
type both struct{ why, last error }

func (b *both) Error() string   { return b.why.Error() + " (last failure: " + b.last.Error() + ")" }
func (b *both) Unwrap() []error { return []error{b.why, b.last} }

// join says why a request ended, and how its last attempt had failed.
func join(why, last error) error {
	switch {
	case last == nil:
		return why
	case errors.Is(last, why):
		return last
	}
	return &both{why, last}
}

// canceled is join where the caller left: an attempt that timed out before must not
// make it look as if the time had run out.
func canceled(why, last error) error {
	var t interface{ Timeout() bool }
	if errors.Is(last, context.DeadlineExceeded) || errors.As(last, &t) && t.Timeout() {
		last = errors.New(last.Error())
	}
	return join(why, last)
}

// A statusError stands for an answer that was thrown away, as the last failure
// of a request that then ended with an error.
type statusError int

func (s statusError) Error() string { return "answer " + strconv.Itoa(int(s)) }

// A cutError is the failure of an attempt that AttemptTimeout ended. The base
// may report that as context.Canceled, which it is for the attempt and not for
// the caller.
type cutError struct{ base error }

func (c *cutError) Error() string {
	if c.base == nil || c.base == causeAttemptTimeout {
		return string(causeAttemptTimeout)
	}
	return string(causeAttemptTimeout) + ": " + c.base.Error()
}

func (c *cutError) Timeout() bool        { return true }
func (c *cutError) Is(target error) bool { return target == context.DeadlineExceeded }

func (c *cutError) Unwrap() error {
	if errors.Is(c.base, context.Canceled) {
		return nil
	}
	return c.base
}
