package replay

import (
	"fmt"
	"net/http"
	"strconv"
)

// A refusal is an answer of ours in place of the handler's.
type refusal struct {
	outcome Outcome
	status  int
	retry   bool // later, with the same key; nothing has run for this request
	detail  string
}

var (
	missingKey   = refusal{OutcomeInvalid, http.StatusBadRequest, false, "the header Idempotency-Key is required"}
	invalidKey   = refusal{OutcomeInvalid, http.StatusBadRequest, false, "the header Idempotency-Key must be one line with a key of 1 to 255 visible ASCII characters, bare or quoted"}
	brokenBody   = refusal{OutcomeInvalid, http.StatusBadRequest, false, "the request's body could not be read"}
	tooLargeBody = refusal{OutcomeInvalid, http.StatusRequestEntityTooLarge, false, "the request's body is too large"}
	noScope      = refusal{OutcomeNoScope, http.StatusInternalServerError, false, "it could not be found out whom the key belongs to"}
	storeError   = refusal{OutcomeStoreError, http.StatusServiceUnavailable, true, "the store of idempotency keys does not answer; nothing was done"}
	conflict     = refusal{OutcomeConflict, http.StatusConflict, true, "a request with this key is being served"}
	mismatch     = refusal{OutcomeMismatch, http.StatusUnprocessableEntity, false, "this key belongs to another request"}
	notKept      = refusal{OutcomeNotKept, http.StatusConflict, false, "the request with this key was served, and its answer was not kept"}
	refused      = refusal{OutcomeRefused, http.StatusConflict, false, "what became of the request with this key is unknown; it is not repeated"}
)

// refuse sends our own answer. original, if not nil, is the tombstone that is
// the reason.
func (x *exchange) refuse(how *refusal, original *answer) {
	x.outcome = how.outcome
	leaveBody(x.w, x.r, &x.body)
	x.writeRefusal(how, original)
}

func (x *exchange) writeRefusal(how *refusal, original *answer) {
	x.status = how.status
	b := fmt.Appendf(nil, `{"type":"about:blank","title":%q,"status":%d,"reason":%q,"detail":%q`,
		http.StatusText(how.status), how.status, how.outcome, how.detail)
	if original != nil && original.status != 0 {
		b = fmt.Appendf(b, `,"original_status":%d`, original.status)
	}
	b = append(b, "}\n"...)

	// What layers outside have set for the handler's answer would make this one
	// wrong or unreadable; what they say of the connection, or of who may read
	// the answer, holds.
	h := x.w.Header()
	for _, name := range [...]string{"Content-Encoding", "Content-Range", "Etag", "Last-Modified", "Trailer"} {
		h.Del(name)
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Length", strconv.Itoa(len(b)))
	h.Set("X-Should-Retry", strconv.FormatBool(how.retry))
	h.Del("Retry-After")
	if how.retry {
		// As soon as allowed: when the other request will end nobody knows.
		h.Set("Retry-After", "1")
	}
	x.w.WriteHeader(how.status)
	x.w.Write(b) // an error means that the client has gone
}

// replay sends a stored answer.
func (x *exchange) replay(a *answer) {
	x.outcome = OutcomeReplayed
	leaveBody(x.w, x.r, &x.body)
	x.writeStored(a, true)
}

// writeStored sends a. replayed says that it is that of another request.
func (x *exchange) writeStored(a *answer, replayed bool) {
	x.status = a.status
	h := x.w.Header()
	apply(h, a.header)
	if a.length {
		h.Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	if echo := x.echo(); echo != "" {
		h.Set("Idempotency-Key", echo)
	}
	if replayed {
		h.Set("Idempotent-Replayed", "true")
		if a.status >= 500 {
			// Sent again, it would be the same again.
			h.Set("X-Should-Retry", "false")
		}
	}
	x.w.WriteHeader(a.status)
	if len(a.body) > 0 {
		x.w.Write(a.body) // an error means that the client has gone
	}
	apply(h, a.trailers)
}
