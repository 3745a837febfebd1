package replay

import (
	"crypto/sha256"
	"encoding/binary"
	"net/http"
	"sync"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/internal/idemkey"
)

// headerXIdempotencyKey is the other spelling that clients use.
const headerXIdempotencyKey = "X-Idempotency-Key"

// keyOf returns the key of a request. found says that there is a line of the
// header, ok that the key can be used: of two lines neither is believed, they
// could be of two operations.
func keyOf(h http.Header) (key string, found, ok bool) {
	lines, others := h[stint.HeaderIdempotencyKey], h[headerXIdempotencyKey]
	switch {
	case len(lines)+len(others) == 0:
		return "", false, false
	case len(lines)+len(others) > 1:
		return "", true, false
	case len(lines) == 0:
		lines = others
	}
	key, ok = idemkey.Parse(lines[0])
	return key, true, ok
}

// A digest collects what a hash is made of. Every part has its length in front,
// so that nothing can be moved from one part to the next.
type digest struct{ b []byte }

var digests = sync.Pool{New: func() any { return &digest{b: make([]byte, 0, 1024)} }}

func newDigest() *digest {
	d := digests.Get().(*digest)
	d.b = d.b[:0]
	return d
}

func (d *digest) number(n int64) { d.b = binary.BigEndian.AppendUint64(d.b, uint64(n)) }

func (d *digest) text(s string) {
	d.number(int64(len(s)))
	d.b = append(d.b, s...)
}

func (d *digest) lines(lines []string) {
	d.number(int64(len(lines)))
	for _, l := range lines {
		d.text(l)
	}
}

func (d *digest) bytes(b []byte) {
	d.number(int64(len(b)))
	d.b = append(d.b, b...)
}

func (d *digest) sum() [32]byte {
	sum := sha256.Sum256(d.b)
	if cap(d.b) <= 4<<10 { // a pool of large buffers would be a leak
		digests.Put(d)
	}
	return sum
}

// storeKey is the key of the record: what two requests must have in common to
// be the same operation. The path is the one on the wire; the pattern of a mux
// is not known outside of it.
func storeKey(scope string, r *http.Request, key string) [32]byte {
	d := newDigest()
	d.text(scope)
	d.text(r.Method)
	d.text(r.URL.EscapedPath())
	d.text(key)
	return d.sum()
}

// fingerprint is what the same operation must have in common besides. length is
// that of the body, -1 where it is not known.
func fingerprint(r *http.Request, prefix []byte, length int64) [32]byte {
	d := newDigest()
	d.text(r.URL.RawQuery)
	d.lines(r.Header["Content-Type"])
	d.lines(r.Header["Content-Digest"])
	d.number(length)
	d.bytes(prefix)
	return d.sum()
}
