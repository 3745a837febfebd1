// Package stint keeps the retries of services that call each other over HTTP
// within a budget, and passes the deadline of a request on from service to
// service.
//
// It has two halves. Each is useful alone; together they make a chain of
// services that does not multiply its own trouble. A [Transport] is an
// [http.RoundTripper] for the client's side: it sends the caller's deadline and
// an idempotency key, and retries what is safe to retry, as far as a budget for
// each peer and the deadline allow. A [Middleware] is the server's side: it
// adopts the caller's deadline, and answers 504 before any work for a request
// that is already too late.
//
//	transport, err := stint.NewTransport(stint.Config{})
//	if err != nil {
//		log.Fatal(err)
//	}
//	middleware, err := stint.NewMiddleware(stint.MiddlewareConfig{Timeout: 2 * time.Second})
//	if err != nil {
//		log.Fatal(err)
//	}
//	client := &http.Client{Transport: transport}
//	http.Handle("/", middleware.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
//		req, _ := http.NewRequestWithContext(r.Context(), "GET", "http://ledger/", nil)
//		resp, err := client.Do(req) // within the 2 s, or what the caller has left of its own
//		answer(w, resp, err)
//	})))
//
// # What always holds
//
//   - 100 evenly spread requests a second never become more than 110 attempts
//     in any second, whatever the peer does. In general a Transport adds a tenth
//     of its request rate, or one retry a second where that is more.
//   - No retry starts that is not expected to end before the deadline.
//   - The deadline on the wire only falls from service to service.
//   - Nothing is sent twice that the caller, the method or the peer did not
//     make safe to repeat.
//   - A response that exists is returned with a nil error. An error that only
//     the base decided is returned as it is.
//   - The caller's request is not modified, and its body is not buffered.
//   - Every retry that is not made has one [Reason], in the metrics, in the hook
//     and in the [Outcome].
//   - Memory and metric series are bounded, however many peers there are.
//   - Everything exported is safe for concurrent use, and nothing needs to be
//     closed.
//
// # Vocabulary
//
// A request is what the caller hands to RoundTrip. An attempt is one pass of a
// request to the base, which is the wrapped RoundTripper; attempts count from
// 1. A retry is any attempt after the first. Amplification is attempts divided
// by requests.
//
// A peer is whoever answers, by default a host and port. Each peer has a budget,
// which says how many retries it may get: a share of the requests that
// succeeded in the window before, or the floor where that is more. The floor is
// what callers of few requests may retry without having earned it. A turn is
// the moment that the budget gives to one retry; turns lie apart, so that
// retries come evenly and not at once. See [BudgetConfig].
//
// A deadline is an instant, a timeout is a duration that somebody has set, and
// what remains is the duration left until the deadline. The reserve is the part
// of it that each service keeps for its answer's way back: the peer is told a
// deadline that much earlier. A service adopts a deadline when it takes over
// the caller's.
//
// A method is idempotent where doing it twice has the effect of doing it once
// (RFC 9110 section 9.2.2). A request is replayable if its body can be sent
// again: it has none, or it has GetBody.
//
// # Deadlines and contexts
//
// The deadline of a request being served is the deadline of its context, so
// clients of other protocols heed it too. The context also carries what the next
// Transport needs to send it on, in the clock of the host that set it.
// [context.WithTimeout] shortens it and nothing extends it, [context.WithoutCancel]
// neither; [Detach] leaves it, for work that may outlive the request.
//
// # Retries in one layer
//
// When a handler's calls have failed and their retries are done, or refused by
// the budget, its answer 502, 503 or 504 is marked X-Should-Retry: false, and a
// Transport above passes it on without a retry of its own.
//
// # Reverse proxies
//
// A [net/http/httputil.ReverseProxy] can have a Transport as its Transport and
// stand behind a Middleware. It needs an ErrorHandler that writes nothing where
// the request's own context has ended, see [Middleware.Handler]. A request with a
// body passes it once: what a server has received has no GetBody. A key that it
// copies is no promise, see [KeyPolicy].
//
// # Further reading
//
// README.md has the defaults of every field, the headers, the metrics, what a
// strict budget costs, how to put stint into a running service, what its handlers
// answer, and how to test it.
package stint
