// Package stinttest checks services and clients, made with stint or not, for
// what stint promises: deadlines that only get shorter along a chain, requests
// refused once they are too late, retries within a budget, and nothing executed
// twice.
//
// A [Peer] is the other side of a client under test and does what its script
// says: it fails, stalls, drops connections. It is an [net/http.Handler], for
// real sockets, and an [net/http.RoundTripper], for tests without any, among
// them those in virtual time (testing/synctest):
//
//	peer := stinttest.NewPeer(stinttest.Fail(503).Times(2), stinttest.OK())
//	transport, err := stint.NewTransport(stint.Config{Base: peer})
//
// A [Recorder] stands in front of the handlers of a chain and collects the
// deadlines that they received.
//
// The checks each take a client or a handler and report to a [TB], which every
// *testing.T is:
//
//   - [DeadlineNeverRises], over what a Recorder has seen, and
//     [DeadlineNeverRisesAt] and [DeadlineNeverRisesThrough], which send the
//     requests as well
//   - [ExpiredIsRefused]
//   - [RetriesWithinBudget]
//   - [ExecutedOnce]
//
// A check that had nothing to look at fails: a chain whose second service was
// never reached has not shown that its deadline falls.
package stinttest
