// Package stintotel shows what stint does in OpenTelemetry traces: which attempts
// a request took, how much time each hop was given, and why no further attempt
// was made.
//
// # Order
//
// On the client otelhttp goes inside stint, and [Transport] inside otelhttp:
//
//	base := otelhttp.NewTransport(stintotel.Transport(http.DefaultTransport.(*http.Transport).Clone()))
//	transport, err := stint.NewTransport(stint.Config{Base: base, Hook: stintotel.Hook})
//
// Then each attempt has a client span of its own, as the semantic conventions
// ask for, the attempts of one request lie side by side under the span of the
// caller, and each server span hangs under the attempt that caused it. A request
// without a caller's span makes each attempt a trace of its own: start a span, or
// let otelhttp do so at the edge.
//
// On the server otelhttp goes outside:
//
//	handler := otelhttp.NewHandler(middleware.Handler(mux), "orders")
//
// with stint.MiddlewareConfig{Hook: stintotel.Hook}. The answers that the
// middleware makes by itself, a 504 for a request that came too late, are then on
// the server span like any other.
//
// otelhttp outside stint on the client works too, for fewer spans: all attempts
// are one span, with the attributes of the last and an event for each retry. Put
// [Transport] directly into stint.Config.Base then.
//
// To stint a wrapped base is not net/http's own. net/http may then resend by
// itself a POST to which its caller gave an idempotency key, when a kept-alive
// connection turns out to be dead: permitted by the key, but not in the budget
// and not a span. stint.Config.CountResends counts it.
//
// # What is set
//
// On the span of an attempt, by Transport:
//
//	request.deadline_ms        the deadline that the peer was told, Unix milliseconds
//	stint.remaining_ms         what was left until then
//	http.request.resend_count  1, 2 … on retries
//
// On the span of a request being served, by Hook:
//
//	request.deadline_ms        the deadline in force
//	stint.remaining_ms         what was left on arrival, negative if it came too late
//	stint.retry_count          1, 2 … where the caller says that it is a retry
//
// As events, by Hook: on the server span "stint.expired" and "stint.refused", on
// the caller's span "stint.retry" and "stint.refused", each with its reason.
// Neither holds a URL, a key or the text of an error.
package stintotel

import (
	"context"
	"net/http"
	"strconv"

	"github.com/stinthttp/stint"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// The keys of attributes.
const (
	DeadlineKey    = attribute.Key("request.deadline_ms")
	RemainingKey   = attribute.Key("stint.remaining_ms")
	RetryCountKey  = attribute.Key("stint.retry_count")
	ResendCountKey = attribute.Key("http.request.resend_count")

	PeerKey    = attribute.Key("stint.peer")    // events: whom the call was for
	ReasonKey  = attribute.Key("stint.reason")  // events: a stint.Reason
	AttemptKey = attribute.Key("stint.attempt") // events: how many had been sent
	WaitKey    = attribute.Key("stint.wait_ms") // stint.retry: backoff and Retry-After
	StatusKey  = attribute.Key("stint.status")  // events: of the last answer, if there was one
	TookKey    = attribute.Key("stint.took_ms") // stint.expired: since the arrival
)

// The names of events.
const (
	EventRetry   = "stint.retry"
	EventRefused = "stint.refused"
	EventExpired = "stint.expired"
)

// Hook writes the steps of a request to the span in ctx, for stint.Config.Hook
// and stint.MiddlewareConfig.Hook. Where there is no span that is recorded it
// does nothing.
func Hook(ctx context.Context, e stint.Event) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	switch e.Kind {
	case stint.EventArrived:
		if e.DeadlineMS != 0 {
			span.SetAttributes(DeadlineKey.Int64(e.DeadlineMS), RemainingKey.Int64(e.Remaining.Milliseconds()))
		}
		if e.Attempt > 1 {
			span.SetAttributes(RetryCountKey.Int(e.Attempt - 1))
		}
		if e.Reason != "" {
			event(span, EventRefused, ReasonKey.String(string(e.Reason)))
		}
	case stint.EventExpired:
		event(span, EventExpired,
			ReasonKey.String(string(e.Reason)), RemainingKey.Int64(e.Remaining.Milliseconds()), TookKey.Int64(e.Took.Milliseconds()))
	case stint.EventShed:
		event(span, EventRefused,
			ReasonKey.String(string(e.Reason)), RemainingKey.Int64(e.Remaining.Milliseconds()), TookKey.Int64(e.Took.Milliseconds()))
	// The rest is about a call that the owner of the span makes. The span's own
	// deadline is another one, so the call's goes into the event.
	case stint.EventRetry:
		event(span, EventRetry, append(ofCall(e), WaitKey.Int64(e.Wait.Milliseconds()))...)
	case stint.EventRefused:
		event(span, EventRefused, append(ofCall(e), ReasonKey.String(string(e.Reason)))...)
	}
}

func event(span trace.Span, name string, attributes ...attribute.KeyValue) {
	span.AddEvent(name, trace.WithAttributes(attributes...))
}

// ofCall returns what the client side's events have in common.
func ofCall(e stint.Event) []attribute.KeyValue {
	as := make([]attribute.KeyValue, 0, 6) // one more by the caller
	as = append(as, PeerKey.String(e.Peer), AttemptKey.Int(e.Attempt))
	if e.DeadlineMS != 0 {
		as = append(as, DeadlineKey.Int64(e.DeadlineMS), RemainingKey.Int64(e.Remaining.Milliseconds()))
	}
	if e.Status != 0 {
		as = append(as, StatusKey.Int(e.Status))
	}
	return as
}

// Transport returns a RoundTripper that describes attempts of a stint.Transport
// on the span in their context. Requests go to base as they are. nil is
// http.DefaultTransport.
func Transport(base http.RoundTripper) http.RoundTripper {
	if base == nil {
		base = http.DefaultTransport
	}
	return annotator{base}
}

// onAttempt are the headers of an attempt that say what its span should.
var onAttempt = [...]struct {
	header string
	key    attribute.Key
}{
	{stint.HeaderDeadline, DeadlineKey},
	{stint.HeaderTimeout, RemainingKey},
	{stint.HeaderRetryCount, ResendCountKey},
}

type annotator struct{ base http.RoundTripper }

func (a annotator) RoundTrip(req *http.Request) (*http.Response, error) {
	if span := trace.SpanFromContext(req.Context()); span.IsRecording() {
		as := make([]attribute.KeyValue, 0, len(onAttempt))
		for _, a := range onAttempt {
			// stint sets them, one line each; what somebody else sets and cannot
			// be read is not ours to report.
			if v, err := strconv.ParseInt(req.Header.Get(a.header), 10, 64); err == nil {
				as = append(as, a.key.Int64(v))
			}
		}
		span.SetAttributes(as...)
	}
	return a.base.RoundTrip(req)
}

// CloseIdleConnections closes the idle connections of the base, if it can.
func (a annotator) CloseIdleConnections() {
	if base, ok := a.base.(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}
