package stint

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/google/uuid"
)

// HeaderIdempotencyKey names the operation that a request asks for; it is the
// same on all attempts of one request.
const HeaderIdempotencyKey = "Idempotency-Key"

// headerXIdempotencyKey is the other spelling that callers use. net/http treats
// both alike.
const headerXIdempotencyKey = "X-Idempotency-Key"

// A KeyPolicy says whether stint makes idempotency keys, and what one that it
// made permits. A key that the caller set is the caller's promise and always
// permits repeating the request; one that a reverse proxy copied from the request
// it serves is as one that stint made. The zero value is KeysAuto in a Config and
// inherits in an Override.
type KeyPolicy int

const (
	// KeysAuto gives POST and PATCH a key. The key names the operation and does
	// not permit repeating it: a server that ignores it would execute twice. So
	// the request is retried only where the peer cannot have begun: nothing was
	// written, 421, 425, X-Should-Retry: true; or where this very answer echoes
	// the key, which is how a server says that it dedupes.
	KeysAuto KeyPolicy = iota + 1
	// KeysHonoured is KeysAuto for peers that dedupe: the key permits all that
	// is retried for idempotent methods.
	KeysHonoured
	// KeysOff makes no keys.
	KeysOff
)

func (p KeyPolicy) valid() bool { return p >= 0 && p <= KeysOff }

// redacted stands for a key in messages: whoever has a key may be able to fetch
// the answer that is stored under it.
func redacted(key string) string {
	if key == "" {
		return ""
	}
	return "(not shown)"
}

// A requestKey is what one request has for an idempotency key.
type requestKey struct {
	value    string // as sent; "" for none
	injected bool   // we made it, now or on the hop before
	override bool   // it came from Override.IdempotencyKey
	promise  bool   // the caller's: repeating the request is allowed
	copied   bool   // a proxy's copy of what arrived: nobody here knows whose promise it is, if any
}

// chooseKey decides on the key of a request, which is made for the arrival served
// if that is not nil. keyed says whether the header has one. It does
// not change the request.
func chooseKey(req *http.Request, keyed bool, served *arrival, override string, policy KeyPolicy, foreign bool) requestKey {
	if override != "" && !safeHop(req) {
		return requestKey{value: override, override: true, promise: true}
	}
	if keyed {
		value, _ := callersKey(req.Header)
		// A copied key may have been made by the transport of whoever called the
		// proxy, which promises nothing. RequestURI is only set on requests that
		// a server has received, and httputil.ReverseProxy leaves it in place.
		if req.RequestURI != "" || served != nil && served.key != "" && served.key == value {
			return requestKey{value: value, copied: true}
		}
		return requestKey{value: value, promise: true}
	}
	if policy == KeysOff || foreign || (req.Method != http.MethodPost && req.Method != http.MethodPatch) {
		return requestKey{}
	}
	if value := previousKey(req); value != "" {
		return requestKey{value: value, injected: true}
	}
	return requestKey{value: uuid.NewString(), injected: true}
}

// safeHop reports whether req is the GET or HEAD that follows a redirect: the
// operation that the key names is done.
func safeHop(req *http.Request) bool {
	return req.Response != nil && (req.Method == http.MethodGet || req.Method == http.MethodHead || req.Method == "")
}

// previousKey returns the key that we made for the hop before a 307 or 308. It
// stands in the request that we sent, not in the caller's.
func previousKey(req *http.Request) string {
	if req.Response == nil || req.Response.Request == nil {
		return ""
	}
	prev := req.Response.Request
	if prev.URL == nil || prev.Method != req.Method || !sameHost(prev.URL, req.URL) {
		return ""
	}
	if lines := prev.Header[unreplayed(HeaderIdempotencyKey)]; len(lines) == 1 {
		return lines[0]
	}
	return ""
}

// sameHost compares as net/http does when it decides which headers to copy to a
// redirect: without the port.
func sameHost(a, b *url.URL) bool { return strings.EqualFold(a.Hostname(), b.Hostname()) }

// leftFirstHost reports whether req is a redirect's hop to another host than
// the one that the caller named.
func leftFirstHost(req *http.Request) bool {
	first := req
	for range 100 { // http.Client stops after 10; a loop in hand-made requests must end too
		if first.Response == nil || first.Response.Request == nil {
			break
		}
		first = first.Response.Request
	}
	return first != req && (first.URL == nil || !sameHost(first.URL, req.URL))
}

// callersKey looks for a key in any spelling. An entry with no lines is the
// caller's way to say "idempotent, send nothing".
func callersKey(h http.Header) (value string, found bool) {
	var from, name string
	for k, lines := range h {
		n := keyHeader(k)
		if n == "" {
			continue
		}
		found = true
		if len(lines) == 0 {
			continue
		}
		// As collapse does it, so that the outcome does not depend on the order of
		// a map, and says what is sent.
		if from == "" || n == name && preferred(k, from, n) || n != name && n == HeaderIdempotencyKey {
			from, name, value = k, n, lines[0]
		}
	}
	return value, found
}

// preferred reports whether of two spellings of a header's name k counts, and not
// other: the canonical one, else the first in order.
func preferred(k, other, name string) bool { return k == name || other != name && k < other }

// keyHeader returns the canonical spelling of a header that carries a key, "" for
// all others.
func keyHeader(k string) string {
	name := ""
	switch len(k) {
	case len(HeaderIdempotencyKey):
		name = HeaderIdempotencyKey
	case len(headerXIdempotencyKey):
		name = headerXIdempotencyKey
	}
	if name == "" || !strings.EqualFold(k, name) {
		return ""
	}
	return name
}

// unreplayed returns the spelling of a header under which net/http sends it and
// does not act on it. [http.Transport] resends a POST whose kept-alive
// connection dies if the map has a canonical Idempotency-Key or
// X-Idempotency-Key, even an empty one, and nobody counts that attempt.
func unreplayed(name string) string {
	if name == HeaderIdempotencyKey {
		return "idempotency-key" // without an allocation
	}
	return strings.ToLower(name)
}

// replaces reports whether the key takes the place of those in the caller's
// header.
func (k *requestKey) replaces() bool { return k.injected || k.override }

// apply sets the key in the header of an attempt, a copy of the caller's, where
// add adds a line. std says that the base is an *http.Transport; other bases may
// look a caller's key up and get it as the caller wrote it.
func (k *requestKey) apply(h http.Header, add func(name, value string), std bool) {
	switch {
	case k.replaces():
		add(unreplayed(HeaderIdempotencyKey), k.value)
	case k.promise, k.copied:
		collapse(h, HeaderIdempotencyKey, std)
		collapse(h, headerXIdempotencyKey, std)
	}
}

// collapse leaves one entry of the header name, or none if all are empty: of
// two spellings, both would be sent, and on HTTP/2 in random order.
func collapse(h http.Header, name string, rename bool) {
	var kept string
	var lines []string
	for k, v := range h {
		if len(k) != len(name) || !strings.EqualFold(k, name) {
			continue
		}
		if len(v) > 0 && (lines == nil || preferred(k, kept, name)) {
			kept, lines = k, v
		}
		delete(h, k)
	}
	if lines == nil {
		return
	}
	if rename {
		kept = unreplayed(name)
	}
	h[kept] = lines
}

// permits reports whether the request may be repeated although the peer may
// have executed it.
func (k requestKey) permits(policy KeyPolicy, resp *http.Response) bool {
	switch {
	case k.promise:
		return true
	case !k.injected && !k.copied:
		return false
	case policy == KeysHonoured:
		return true
	}
	return resp != nil && k.value != "" && resp.Header.Get(HeaderIdempotencyKey) == k.value
}

// idempotent reports whether a method is idempotent by its definition (RFC 9110
// section 9.2.2).
func idempotent(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return false
}

// replayable reports whether the body can be sent again.
func replayable(req *http.Request) bool { return !hasBody(req) || req.GetBody != nil }

func hasBody(req *http.Request) bool { return req.Body != nil && req.Body != http.NoBody }
