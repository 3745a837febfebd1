package stint

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"strings"
)

// HeaderShouldRetry, on a response, overrides what its status says. "false":
// sending this again is useless or harmful, at any layer. "true", on a status
// of 400 or more: the server did no work for it.
const HeaderShouldRetry = "X-Should-Retry"

// A verdict is what an attempt's result means for a retry.
type verdict int

const (
	done     verdict = iota // an answer that is no failure
	terminal                // a failure that repeating cannot mend
	unbegun                 // the peer cannot have begun: any method may be repeated
	failed                  // a failure, and the peer may have executed the request
)

// classifyResponse judges an answer. transient is the set of statuses that are
// worth a retry; foreign says that the peer is outside the fleet, where
// X-Should-Retry: true is advice and not the fleet's promise.
func classifyResponse(resp *http.Response, transient func(int) bool, foreign bool) verdict {
	switch {
	case toldToRetry(resp):
		if foreign {
			return failed
		}
		return unbegun
	case !transient(resp.StatusCode):
		return done
	case resp.StatusCode == http.StatusMisdirectedRequest, resp.StatusCode == http.StatusTooEarly:
		return unbegun // both are refusals to process (RFC 9110 section 15.5.20, RFC 8470 section 5.2)
	default:
		return failed
	}
}

// transientStatus is the default set. 500 is not in it: most of what answers
// 500 does so again.
func transientStatus(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusMisdirectedRequest, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// toldNotTo reports whether the answer forbids sending the request again. We
// write one name and obey those of others that mean the same.
func toldNotTo(h http.Header) bool {
	for _, name := range []string{HeaderShouldRetry, "Stripe-Should-Retry"} {
		for _, v := range h[name] {
			if strings.EqualFold(strings.TrimSpace(v), "false") {
				return true
			}
		}
	}
	for _, name := range []string{"X-Envoy-Overloaded", "X-Envoy-Ratelimited", "Finagle-Http-Nonretryable-Nack"} {
		if len(h[name]) > 0 {
			return true
		}
	}
	return false
}

// toldToRetry reports whether the server says that it did no work. On a success
// that makes no sense and does not count. "false" beside it wins.
func toldToRetry(resp *http.Response) bool {
	if resp.StatusCode < 400 || toldNotTo(resp.Header) {
		return false
	}
	for _, v := range resp.Header[HeaderShouldRetry] {
		if strings.EqualFold(strings.TrimSpace(v), "true") {
			return true
		}
	}
	return false
}

// classifyError judges an error of the base. unsent is what httptrace saw, and
// not what the error says: nothing of the request was written.
//
// Errors of a kind we do not know are failures like a lost connection. Whether
// the caller's deadline or cancellation is behind one is not asked here: the
// base's own timeouts satisfy errors.Is(err, context.DeadlineExceeded) as well,
// so only the caller's context can tell.
func classifyError(err error, unsent bool) verdict {
	switch {
	case certificateError(err), requestError(err):
		return terminal
	case unsent, refusedStream(err):
		return unbegun
	default:
		return failed
	}
}

// certificateError reports whether the peer's certificate, or its lack of TLS,
// is the cause. The next attempt would meet the same.
func certificateError(err error) bool {
	var (
		verification *tls.CertificateVerificationError
		authority    x509.UnknownAuthorityError
		hostname     x509.HostnameError
		invalid      x509.CertificateInvalidError
		roots        x509.SystemRootsError
		record       tls.RecordHeaderError
	)
	return errors.As(err, &verification) || errors.As(err, &authority) || errors.As(err, &hostname) ||
		errors.As(err, &invalid) || errors.As(err, &roots) || errors.As(err, &record) ||
		errors.Is(err, http.ErrSchemeMismatch)
}

// untypedRequestErrors are the beginnings of net/http's errors about the
// request itself, for which it has no types. A test provokes each.
var untypedRequestErrors = []string{
	"http: nil Request.URL",
	"http: no Host in request URL",
	"http: invalid Host header",
	"http: ContentLength=",
	"http: Request.ContentLength=",
	"net/http: invalid header ",
	"net/http: invalid trailer ",
	"net/http: invalid method ",
	"net/http: can't write control character in Request.URL",
	"unsupported protocol scheme",
}

// requestError reports whether the request is malformed, so that it never left
// or never can.
func requestError(err error) bool {
	if errors.Is(err, http.ErrSkipAltProtocol) {
		return true
	}
	for next := errors.Unwrap(err); next != nil; next = errors.Unwrap(err) {
		err = next
	}
	text := err.Error()
	for _, begin := range untypedRequestErrors {
		if strings.HasPrefix(text, begin) {
			return true
		}
	}
	return false
}

// streamError has the shape of the HTTP/2 stream error inside net/http, which
// fills any struct of its shape by its As method.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (e streamError) Error() string { return "http2: stream error" }

// refusedStream reports whether an HTTP/2 peer says by protocol that it did not
// process the request (RFC 9113 section 8.7).
func refusedStream(err error) bool {
	const codeRefusedStream = 0x7
	var e streamError
	return errors.As(err, &e) && e.Code == codeRefusedStream
}
