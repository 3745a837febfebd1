package replay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/http"
	"slices"
	"strings"
)

// An answer is what a record that is done holds: an answer, or a tombstone,
// which says why there is none and keeps the operation from running again.
type answer struct {
	kind     answerKind
	fence    int64 // of the run
	status   int   // of a tombstone: as it was delivered; 0: unknown
	length   bool  // the handler had set a Content-Length
	header   []headerOp
	trailers []headerOp
	body     []byte
}

type answerKind byte

const (
	kindAnswer  answerKind = 1
	kindNotKept answerKind = 2 // delivered, and too large to keep, or taken over by a hijack
	kindUnknown answerKind = 3 // nobody knows what became of the run
)

// A headerOp is what the handler did to one header: the difference to what
// layers outside had set, who set theirs on the replay again.
type headerOp struct {
	op     byte
	name   string
	values []string
}

const (
	opSet    byte = 1
	opAdd    byte = 2 // values after those from outside
	opDelete byte = 3
)

// encoding is the first byte. A server that does not know it does not guess.
const encoding byte = 1

var errEncoding = errors.New("replay: a stored answer cannot be read; it is damaged, or of a newer version of this package")

func (a *answer) encode() []byte {
	n := 32 + len(a.body)
	for _, ops := range [][]headerOp{a.header, a.trailers} {
		for _, o := range ops {
			n += 8 + len(o.name)
			for _, v := range o.values {
				n += 4 + len(v)
			}
		}
	}
	b := make([]byte, 0, n)
	b = append(b, encoding, byte(a.kind))
	b = binary.BigEndian.AppendUint64(b, uint64(a.fence))
	b = binary.BigEndian.AppendUint16(b, uint16(a.status))
	if a.length {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	text := func(s string) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	for _, ops := range [][]headerOp{a.header, a.trailers} {
		b = binary.AppendUvarint(b, uint64(len(ops)))
		for _, o := range ops {
			b = append(b, o.op)
			text(o.name)
			b = binary.AppendUvarint(b, uint64(len(o.values)))
			for _, v := range o.values {
				text(v)
			}
		}
	}
	return append(b, a.body...)
}

// decode undoes encode. The body is a part of b.
func decode(b []byte) (*answer, error) {
	d := decoder{b: b, ok: true}
	if d.byte() != encoding {
		return nil, errEncoding
	}
	a := &answer{kind: answerKind(d.byte()), fence: int64(d.fixed(8)), status: int(d.fixed(2)), length: d.byte() == 1}
	a.header = d.ops()
	a.trailers = d.ops()
	a.body = d.b
	known := a.kind == kindAnswer && a.status >= 200 && a.status <= 999 || a.kind == kindNotKept || a.kind == kindUnknown
	if !d.ok || !known {
		return nil, errEncoding
	}
	return a, nil
}

type decoder struct {
	b  []byte
	ok bool // false: what is returned means nothing
}

func (d *decoder) take(n uint64) []byte {
	if !d.ok || n > uint64(len(d.b)) {
		d.ok, d.b = false, nil
		return nil
	}
	t := d.b[:n]
	d.b = d.b[n:]
	return t
}

func (d *decoder) byte() byte {
	if t := d.take(1); d.ok {
		return t[0]
	}
	return 0
}

func (d *decoder) fixed(n uint64) (v uint64) {
	for _, c := range d.take(n) {
		v = v<<8 | uint64(c)
	}
	return v
}

// count returns a number of things of which each takes a byte at least, so that
// a damaged one cannot ask for more memory than there are bytes.
func (d *decoder) count() uint64 {
	n, size := binary.Uvarint(d.b)
	if size <= 0 || n > uint64(len(d.b)) {
		d.ok, d.b = false, nil
		return 0
	}
	d.b = d.b[size:]
	return n
}

func (d *decoder) text() string { return string(d.take(d.count())) }

func (d *decoder) ops() []headerOp {
	n := d.count()
	var ops []headerOp
	for i := uint64(0); i < n && d.ok; i++ {
		o := headerOp{op: d.byte(), name: d.text()}
		if o.op < opSet || o.op > opDelete {
			d.ok = false
		}
		values := d.count()
		for j := uint64(0); j < values && d.ok; j++ {
			o.values = append(o.values, d.text())
		}
		ops = append(ops, o)
	}
	return ops
}

// apply does to h what the handler did.
func apply(h http.Header, ops []headerOp) {
	for _, o := range ops {
		switch o.op {
		case opSet:
			h[o.name] = o.values
		case opAdd:
			h[o.name] = append(h[o.name][:len(h[o.name]):len(h[o.name])], o.values...)
		case opDelete:
			delete(h, o.name)
		}
	}
}

// difference returns what the handler did to the header: before is what layers
// outside had set, after what there was when the answer began. What belongs to
// one answer or one connection is left out.
func difference(before, after http.Header) []headerOp {
	var ops []headerOp
	named := after["Connection"]
	for name, values := range after {
		if !kept(name, named) {
			continue
		}
		outer, had := before[name]
		switch {
		case had && slices.Equal(outer, values):
		case had && len(outer) > 0 && len(values) > len(outer) && slices.Equal(outer, values[:len(outer)]):
			ops = append(ops, headerOp{opAdd, name, values[len(outer):]})
		default:
			ops = append(ops, headerOp{opSet, name, values})
		}
	}
	for name := range before {
		if _, still := after[name]; !still && kept(name, named) {
			ops = append(ops, headerOp{op: opDelete, name: name})
		}
	}
	return ops
}

// trailersOf returns the trailers of an answer: those that its header declared,
// and those that http.TrailerPrefix marks.
func trailersOf(header, final http.Header) []headerOp {
	var ops []headerOp
	declared := header["Trailer"]
	for name, values := range final {
		if strings.HasPrefix(name, http.TrailerPrefix) || len(declared) > 0 && hasMember(declared, name) {
			ops = append(ops, headerOp{opSet, name, values})
		}
	}
	return ops
}

// kept reports whether a header is stored. connection has the lines of the
// Connection header.
func kept(name string, connection []string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "Te", "Transfer-Encoding", "Upgrade", // of a connection
		"Date", "Content-Length", "Retry-After", "Alt-Svc", "Server-Timing", // of a moment
		"Set-Cookie",                             // of a client: a replay may go to another one
		"Idempotency-Key", "Idempotent-Replayed", // ours to say, each time
		"X-Deadline-Expired", "X-Debug-Deadline", // of a request
		"Traceparent", "Tracestate", "Traceresponse", "B3", // of a trace
		"X-Request-Id", "X-Correlation-Id", "X-Amzn-Trace-Id", //
		"X-Trace-Id", "Uber-Trace-Id", "X-Cloud-Trace-Context":
		return false
	}
	for _, prefix := range [...]string{http.TrailerPrefix, "Ratelimit", "X-Ratelimit-", "X-Rate-Limit-", "X-B3-"} {
		if strings.HasPrefix(name, prefix) {
			return false
		}
	}
	return len(connection) == 0 || !hasMember(connection, name)
}

// hasMember reports whether a list-valued header has a member, in any letter
// case.
func hasMember(lines []string, want string) bool {
	for _, line := range lines {
		for member := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.Trim(member, " \t"), want) {
				return true
			}
		}
	}
	return false
}

// same reports whether a says what a run has answered.
func (a *answer) same(status int, body []byte) bool {
	return a.kind == kindAnswer && a.status == status && bytes.Equal(a.body, body)
}
