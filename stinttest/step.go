package stinttest

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"
)

// A Step is what a [Peer] does with an arrival. It is a value: the methods
// return a changed copy, and one Step may be used by many peers. The zero Step
// is [OK].
//
// Every step but Stall answers; every step reads the request's body first, so a
// request that got an answer, or a reset, has been received whole.
type Step struct {
	kind   kind
	status int           // 0: 200
	header []string      // names and values in turn
	body   *string       // nil: the status in words
	after  time.Duration // until anything is done
	every  time.Duration // between the bytes of a trickle
	times  int           // 0: 1

	// Of steps that choose between OK and a fault.
	fault    *Step
	period   time.Duration
	fraction float64
	seed     uint64
}

type kind int

const (
	kindAnswer kind = iota
	kindHalf
	kindTrickle
	kindStall
	kindReset
	kindFlap
	kindPartial
)

// OK answers 200.
func OK() Step { return Step{} }

// Fail answers with a status, which may be any from 200 to 599, and with header
// fields given as names and values in turn:
//
//	stinttest.Fail(503, "Retry-After", "1")
//
// It panics if a status or a value is missing.
func Fail(status int, header ...string) Step {
	if status < 200 || status > 599 {
		panic(fmt.Sprintf("stinttest: Fail: status %d", status))
	}
	return Step{status: status}.Header(header...)
}

// Slow answers 200 after d; it is OK().After(d).
func Slow(d time.Duration) Step { return OK().After(d) }

// Stall does not answer. It ends when the client gives up: its request's
// context, its connection or its stream. Closing an [net/http/httptest.Server]
// waits for clients that have not.
func Stall() Step { return Step{kind: kindStall} }

// Reset drops the connection instead of answering: on HTTP/1.1 with a TCP reset,
// on HTTP/2 the stream alone. In memory it is the error that a reset is over
// TCP, a [*net.OpError] for which errors.Is(err, syscall.ECONNRESET).
func Reset() Step { return Step{kind: kindReset} }

// Half announces a whole answer with status 200, sends the header and half of
// the body, and drops the connection.
func Half() Step { return Step{kind: kindHalf} }

// Trickle sends the header of an answer with status 200 at once and then its
// body byte by byte, each after another d.
func Trickle(d time.Duration) Step { return Step{kind: kindTrickle, every: d} }

// Flap is [OK] for one period, fault for the next, and so on, beginning with the
// first arrival that meets the step. It panics if period is not positive.
func Flap(period time.Duration, fault Step) Step {
	if period <= 0 {
		panic(fmt.Sprintf("stinttest: Flap: period %v", period))
	}
	return Step{kind: kindFlap, period: period, fault: &fault}
}

// Partial does fault to this fraction of its arrivals, drawn at random, and is
// [OK] to the others. The same seed makes the same draws in the order of
// arrival. It panics if fraction is not in [0, 1].
func Partial(fraction float64, seed uint64, fault Step) Step {
	if !(fraction >= 0 && fraction <= 1) {
		panic(fmt.Sprintf("stinttest: Partial: fraction %v", fraction))
	}
	return Step{kind: kindPartial, fraction: fraction, seed: seed, fault: &fault}
}

// Times makes a step last for n arrivals instead of one. The last step of a
// script lasts for ever all the same.
func (s Step) Times(n int) Step {
	s.times = n
	return s
}

// After makes a step begin d after the request's body has been read. Of Flap and
// Partial, the fault is to be given it.
func (s Step) After(d time.Duration) Step {
	s.after = d
	return s
}

// Body gives the answer a body. By default it is the status in words. Answers
// of Flap and Partial are not changed.
func (s Step) Body(body string) Step {
	s.body = &body
	return s
}

// Header adds header fields to the answer, given as names and values in turn.
// It panics if a value is missing. Answers of Flap and Partial are not changed.
func (s Step) Header(nameValue ...string) Step {
	if len(nameValue)%2 != 0 {
		panic(fmt.Sprintf("stinttest: Header: no value for %q", nameValue[len(nameValue)-1]))
	}
	s.header = append(s.header[:len(s.header):len(s.header)], nameValue...)
	return s
}

// harmless reports whether a step is OK, if perhaps with another body.
func (s Step) harmless() bool {
	return s.kind == kindAnswer && (s.status == 0 || s.status == http.StatusOK) && s.after <= 0
}

// choose returns what becomes of the arrival number n, from 0, of a step, so
// long after the first one. It has no state, so that a Step can be shared.
func (s Step) choose(n int, passed time.Duration) Step {
	switch s.kind {
	case kindFlap:
		if passed/s.period%2 == 0 {
			return OK()
		}
	case kindPartial:
		if rand.New(rand.NewPCG(s.seed, uint64(n))).Float64() >= s.fraction {
			return OK()
		}
	default:
		return s
	}
	return s.fault.choose(n, passed)
}

// An answer is what a step says, the same in memory and on a socket.
type answer struct {
	status int
	header http.Header
	body   string
	cut    int           // send only so many bytes of the body; len(body): all
	every  time.Duration // between bytes; 0: at once
}

func (s Step) answer(method string) answer {
	a := answer{status: s.status, header: make(http.Header), every: s.every}
	if a.status == 0 {
		a.status = http.StatusOK
	}
	for i := 0; i < len(s.header); i += 2 {
		a.header.Add(s.header[i], s.header[i+1])
	}
	if bodyAllowed(a.status) {
		a.body = http.StatusText(a.status) + "\n"
		if s.body != nil {
			a.body = *s.body
		}
		a.header.Set("Content-Length", fmt.Sprint(len(a.body)))
		if a.header.Get("Content-Type") == "" {
			a.header.Set("Content-Type", "text/plain; charset=utf-8")
		}
	}
	if method == http.MethodHead {
		a.body = ""
	}
	a.cut = len(a.body)
	if s.kind == kindHalf {
		a.cut /= 2
	}
	return a
}

// bodyAllowed reports whether an answer with this status has a body (RFC 9110,
// section 6.4.1). Those of HEAD have none either, but may say how long it would
// be.
func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}
