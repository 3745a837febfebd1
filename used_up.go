package stint

import (
	"io"
	"net/http"
	"net/url"
)

// A UsedUp is an operation that failed and gets no further retry, handed to
// Config.UsedUp: what is needed to park it somewhere and to try again later.
type UsedUp struct {
	Method string
	URL    *url.URL    // the caller's: read only, and not to be kept
	Header http.Header // the same; without the key where stint made it

	// Key is the idempotency key that was sent, "" for none. Sent again under it, a
	// peer that dedupes executes the operation once.
	Key string
	// Body returns the body once more. nil: there is none, or it cannot be had
	// again. Call it before returning, and close what it returns.
	Body func() (io.ReadCloser, error)
	// Repeatable reports whether the operation may be sent again although the peer
	// may have executed it, or cannot have begun it, and its body can be had. Where
	// it is false, parking it loses the body or risks a second execution.
	Repeatable bool

	Peer     string
	Reason   Reason // why there is no further retry; see Config.UsedUp
	Attempts int
	Status   int   // of the last answer; 0: none
	Err      error // what RoundTrip returns; nil: the answer
}

// park hands the request to Config.UsedUp, if that is where it belongs.
func (c *call) park(r *result, reason Reason) {
	if c.t.cfg.UsedUp == nil || reason == "" || reason == ReasonCanceled {
		return
	}
	u := UsedUp{
		Method: c.req.Method, URL: c.req.URL, Header: c.req.Header, Key: c.key.value,
		Repeatable: c.repeatable || c.attempts == 0 || r.verdict == unbegun || c.key.permits(c.opts.Keys, r.resp),
		Peer:       c.peer.name, Reason: reason, Attempts: c.attempts, Status: r.status(), Err: r.err,
	}
	if u.Method == "" {
		u.Method = http.MethodGet
	}
	if hasBody(c.req) {
		// Not while the base may be reading from what GetBody's body reads from.
		if c.req.GetBody != nil && c.quiet(r) {
			u.Body = c.req.GetBody
		}
		u.Repeatable = u.Repeatable && u.Body != nil
	}
	c.t.cfg.UsedUp(c.ctx, u)
}

// quiet reports whether the base has done with the request's bodies. An answer that
// goes to the caller may need the upload to go on, so that is not ended for it.
func (c *call) quiet(r *result) bool {
	if r.resp != nil {
		return c.last.bodies().finished(true) && c.other.bodies().finished(true)
	}
	return c.settle()
}
