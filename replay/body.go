package replay

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// prefixBytes is how much of a request's body is read before the key is claimed.
const prefixBytes = 64 << 10

// A body is the request's body as the handler reads it: what has been read
// already, then the rest. It remembers whether it broke off.
type body struct {
	prefix []byte
	rest   io.ReadCloser // nil: there is no body
	ended  bool          // the rest is at its end
	broken atomic.Bool   // reading ended in an error; a handler may read on another goroutine
}

// readPrefix reads the beginning of the body of r. length is that of all of it,
// -1 where it is not known.
func (b *body) readPrefix(r *http.Request) (length int64, err error) {
	if r.Body == nil || r.Body == http.NoBody {
		b.ended = true
		return 0, nil
	}
	b.rest = r.Body
	size := int64(512)
	if r.ContentLength > 0 {
		size = min(r.ContentLength+1, prefixBytes) // one more, to see the end
	}
	b.prefix = make([]byte, 0, size)
	for len(b.prefix) < prefixBytes {
		if len(b.prefix) == cap(b.prefix) {
			b.prefix = append(b.prefix, 0)[:len(b.prefix)]
		}
		n, err := b.rest.Read(b.prefix[len(b.prefix):min(cap(b.prefix), prefixBytes)])
		b.prefix = b.prefix[:len(b.prefix)+n]
		if err == io.EOF {
			b.ended = true
			return int64(len(b.prefix)), nil
		}
		if err != nil {
			return 0, err
		}
	}
	return r.ContentLength, nil
}

func (b *body) Read(p []byte) (int, error) {
	if len(b.prefix) > 0 {
		n := copy(p, b.prefix)
		b.prefix = b.prefix[n:]
		if len(b.prefix) == 0 && b.ended {
			return n, io.EOF
		}
		return n, nil
	}
	if b.ended {
		return 0, io.EOF
	}
	n, err := b.rest.Read(p)
	if err != nil && err != io.EOF && !errors.Is(err, http.ErrBodyReadAfterClose) {
		b.broken.Store(true)
	}
	return n, err
}

func (b *body) Close() error { return b.rest.Close() }

const (
	drainTime  = 10 * time.Millisecond
	lingerTime = 500 * time.Millisecond
)

// leaveBody prepares for an answer that comes before the request's body has
// been read to its end. On HTTP/1, net/http reads up to 256 KiB of it before it
// sends a header, and waits for them as long as the client likes. A body that is
// as good as here is read, and the connection kept; any other costs the
// connection. See the middleware of package stint, which does the same.
func leaveBody(w http.ResponseWriter, r *http.Request, b *body) {
	if r.ProtoMajor != 1 || r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 || b.ended {
		return
	}
	rc := http.NewResponseController(w)
	limit := time.Now().Add(drainTime)
	// To read would be to ask for the body where the client waits for leave to
	// send it; nor does it help where much is to come.
	if r.Header.Get("Expect") == "" && r.ContentLength <= prefixBytes && rc.SetReadDeadline(limit) == nil {
		_, err := io.CopyN(io.Discard, r.Body, prefixBytes+1)
		if err == io.EOF && rc.SetReadDeadline(time.Time{}) == nil && time.Now().Before(limit) {
			return
		}
	}
	w.Header().Set("Connection", "close")
	rc.SetReadDeadline(time.Now().Add(lingerTime))
}
