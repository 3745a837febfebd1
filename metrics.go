package stint

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

// Bounds on what others can choose. Without them, a client of a crawler or a
// proxy makes a new set of series for each host name that somebody invents.
const (
	maxPeerLabels    = 128
	maxServiceLabels = 64
	maxLabelBytes    = 255
	otherLabel       = "_other" // shared by all beyond the bounds
)

// Values of the label "side".
const (
	sideClient = "client"
	sideServer = "server"
)

// MetricsConfig configures [NewMetrics]. The zero value is valid.
type MetricsConfig struct {
	// Namespace is put, with an underscore, in front of all names, those that
	// begin with "stint_" included: for programs that already export a
	// http_client_requests_total of their own. ASCII letters, digits and
	// underscores, not beginning with a digit. Empty, the default: the names
	// as documented at [Metrics]. Shipped rules and dashboards need the same
	// prefix.
	Namespace string

	// NativeHistograms adds native buckets to the histograms; the classic ones
	// stay. Default: false. A Prometheus server that has native histograms
	// switched on then ignores the classic buckets, unless it is told to keep
	// them (scrape_classic_histograms, always_scrape_classic_histograms in
	// newer versions), and queries for the _bucket series come back empty.
	NativeHistograms bool

	// Exemplar returns the labels, usually a trace ID, that tie an observation
	// to its request. It is asked for stint_attempts_per_success with the
	// context of the request that ended and for
	// stint_deadline_remaining_seconds with that of the request that arrived,
	// on the request's own goroutine and possibly from many at a time. Return
	// nil for none, as for traces that are not sampled: each exemplar costs
	// about a microsecond and nine allocations. Labels that Prometheus does
	// not take (together more than 128 runes, invalid UTF-8, an empty name or
	// one that begins with "__") are left out; the observation still counts.
	// Only OpenMetrics and protobuf scrapes show exemplars. Nil, the default:
	// no exemplars.
	Exemplar func(context.Context) prometheus.Labels
}

// Metrics is the set of metrics of any number of transports and middlewares. It
// is a [prometheus.Collector] that the caller registers, where and with
// whichever wrapping they like; nothing is registered behind anybody's back.
// Make one with [NewMetrics], and hand it to [Config] and [MiddlewareConfig].
//
// All methods are safe for concurrent use. A nil *Metrics, and the zero value,
// count nothing and collect nothing.
//
// Client side, by peer:
//
//	http_client_requests_total{peer}              attempts sent
//	stint_client_retries_total{peer}              of these, attempts after the first
//	stint_client_retry_successes_total{peer}      requests that ended well after a retry
//	stint_client_outcomes_total{peer,outcome}     requests: ok, error, deadline, refused, canceled
//	stint_attempts_per_success{peer}              histogram
//	stint_hedges_total{peer}                      of the retries, hedges
//	stint_hedge_wins_total{peer}                  hedges that answered first
//	stint_refused_total{peer,reason}              what was not sent, by Reason
//	stint_transparent_resends_total{peer}         resends inside net/http, with Config.CountResends
//	retry_budget_utilisation{peer}                gauge, [0, 1]: the highest of the last minute
//	retry_budget_exhausted_total{peer}            retries refused for the reason budget or turn
//	retry_amplification_factor{peer}              gauge, ≥ 1: attempts per request of the last minute
//	deadline_exceeded_total{side="client",peer}   out of time here
//	stint_clock_skew_total{side="client",peer}    answers of hosts whose clock is ahead
//
// Server side, by [MiddlewareConfig].Service:
//
//	http_server_requests_total{service,code}         answers; code is a number, "hijacked" or "other"
//	deadline_header_present_ratio{service}           gauge, [0, 1]: usable headers of the last minute
//	stint_deadline_headers_total{service,state}      arrivals by what their header was
//	stint_deadline_remaining_seconds{service}        histogram: time left on arrival
//	stint_deadline_late_seconds{service}             histogram: by how much expired requests came late
//	stint_server_retries_total{service}              arrivals that say they are retries
//	stint_refused_total{service,reason}              what was not served, by Reason
//	deadline_exceeded_total{side="server",service}   out of time here
//	stint_clock_skew_total{side="server",service}    arrivals that show a clock to be broken
//
// All series of a peer or a service exist, at 0, from the first moment that it
// is known, so that increases from the first event on can be seen; only the
// codes other than 200 come with their first answer. The gauges are neutral (0,
// 1, 1) without traffic. Where several transports share the set and talk to the
// same peer, their counts add up and the utilisation is that of the fullest
// budget.
//
// The number of series is bounded: at most 128 peers and 64 services have
// series of their own, the others share the label "_other". The series of a
// peer go when the last transport that knew it forgets it. Names are cut at
// 255 bytes, and invalid UTF-8 in them is replaced.
type Metrics struct {
	exemplar func(context.Context) prometheus.Labels
	start    time.Time // see windowEpoch

	collectors []prometheus.Collector // every vector below

	requests       *prometheus.CounterVec // peer
	retries        *prometheus.CounterVec // peer
	retrySuccesses *prometheus.CounterVec // peer
	outcomes       *prometheus.CounterVec // peer, outcome
	hedges         *prometheus.CounterVec // peer
	hedgeWins      *prometheus.CounterVec // peer
	exhausted      *prometheus.CounterVec // peer
	resends        *prometheus.CounterVec // peer
	attempts       *prometheus.HistogramVec

	served        *prometheus.CounterVec // service, code
	headers       *prometheus.CounterVec // service, state
	serverRetries *prometheus.CounterVec // service
	remaining     *prometheus.HistogramVec
	late          *prometheus.HistogramVec

	refusals *prometheus.CounterVec // peer, service, reason
	exceeded *prometheus.CounterVec // side, peer, service
	skews    *prometheus.CounterVec // side, peer, service

	utilisation   *prometheus.Desc // peer
	amplification *prometheus.Desc // peer
	headerRatio   *prometheus.Desc // service

	// badHeaders counts unusable headers of outgoing requests, by index into
	// headerStates; see peerMetrics.badHeader. Written once, before the first
	// peerMetrics is handed out.
	badHeaders []prometheus.Counter

	// mu is taken when a peer or a service comes or goes and on a scrape. The
	// methods of peerMetrics and serviceMetrics do without.
	mu           sync.Mutex
	peers        map[string]*peerMetrics    // guarded by mu; by label, without otherPeer
	services     map[string]*serviceMetrics // guarded by mu; by label, without otherService
	otherPeer    *peerMetrics               // guarded by mu; nil until needed, then for ever
	otherService *serviceMetrics            // guarded by mu; likewise
}

// NewMetrics returns an empty set. The error joins a [*ConfigError] for each
// field that cannot be used.
//
// Sets with equal Namespace are equal to a registry: Register of a second one
// returns a [prometheus.AlreadyRegisteredError] whose ExistingCollector is the
// first *Metrics. Use that one instead and both count; the NativeHistograms and
// Exemplar of the first hold. Register returns another error, and changes
// nothing, where a foreign collector already has one of the names: set
// Namespace, or wrap the registerer.
func NewMetrics(c MetricsConfig) (*Metrics, error) {
	var errs configErrors
	errs.check(validNamespace(c.Namespace), "MetricsConfig.Namespace", c.Namespace,
		"must be ASCII letters, digits and underscores and not begin with a digit")
	if err := errs.join(); err != nil {
		return nil, err
	}

	m := &Metrics{
		exemplar: c.Exemplar,
		start:    time.Now(),
		peers:    make(map[string]*peerMetrics),
		services: make(map[string]*serviceMetrics),
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: c.Namespace, Name: name, Help: help}, labels)
		m.collectors = append(m.collectors, v)
		return v
	}
	histogram := func(name, help, label string, buckets ...float64) *prometheus.HistogramVec {
		opts := prometheus.HistogramOpts{Namespace: c.Namespace, Name: name, Help: help, Buckets: buckets}
		if c.NativeHistograms {
			// A tenth per bucket, like the latency histogram of admission. The
			// bound holds memory when durations spread from microseconds to an
			// hour: buckets are then merged.
			opts.NativeHistogramBucketFactor = 1.1
			opts.NativeHistogramMaxBucketNumber = 160
			opts.NativeHistogramMinResetDuration = time.Hour
		}
		v := prometheus.NewHistogramVec(opts, []string{label})
		m.collectors = append(m.collectors, v)
		return v
	}
	gauge := func(name, help, label string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(c.Namespace, "", name), help, []string{label}, nil)
	}

	m.requests = counter("http_client_requests_total",
		"HTTP attempts sent to the peer, retries included.", "peer")
	m.retries = counter("stint_client_retries_total",
		"Attempts after the first.", "peer")
	m.retrySuccesses = counter("stint_client_retry_successes_total",
		"Requests that ended well after at least one retry.", "peer")
	m.hedges = counter("stint_hedges_total",
		"Hedges: second attempts that were sent while the first was still under way.", "peer")
	m.hedgeWins = counter("stint_hedge_wins_total",
		"Hedges that answered before the first attempt did.", "peer")
	m.outcomes = counter("stint_client_outcomes_total",
		"Finished requests by outcome: ok, error, deadline, refused, canceled.", "peer", "outcome")
	m.attempts = histogram("stint_attempts_per_success",
		"Attempts that a successful request took.", "peer", 1, 2, 3, 4, 6, 8)
	m.exhausted = counter("retry_budget_exhausted_total",
		"Retries not sent because the retry budget was spent or its next turn too far away.", "peer")
	m.resends = counter("stint_transparent_resends_total",
		"Resends by net/http itself, outside of the retry budget; counted on request only.", "peer")

	m.served = counter("http_server_requests_total",
		"HTTP requests answered, by status code; includes those refused as expired (504).", "service", "code")
	m.headers = counter("stint_deadline_headers_total",
		"Requests by the state of their deadline header.", "service", "state")
	m.remaining = histogram("stint_deadline_remaining_seconds",
		"Time left on arrival, 0 if none was; only requests with a usable deadline header.", "service",
		0, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)
	m.late = histogram("stint_deadline_late_seconds",
		"By how much requests that had expired on arrival came too late.", "service",
		.001, .005, .01, .05, .1, .5, 1, 5, 60)
	m.serverRetries = counter("stint_server_retries_total",
		"Requests that arrived marked as retries.", "service")

	m.refusals = counter("stint_refused_total",
		"Attempts not sent (peer set) and requests not served (service set), by reason.", "peer", "service", "reason")
	m.exceeded = counter("deadline_exceeded_total",
		"Requests that ran out of time (side=server: service set; side=client: peer set).", "side", "peer", "service")
	m.skews = counter("stint_clock_skew_total",
		"Requests or answers that show one of two clocks to be wrong (side=server: service set; side=client: peer set).",
		"side", "peer", "service")

	m.utilisation = gauge("retry_budget_utilisation",
		"Share of the retry budget in use, 0 to 1: the highest of the last minute. 0 when idle.", "peer")
	m.amplification = gauge("retry_amplification_factor",
		"Attempts per request over the last minute. 1 when idle.", "peer")
	m.headerRatio = gauge("deadline_header_present_ratio",
		"Share of requests over the last minute with a usable deadline header. 1 when idle.", "service")
	return m, nil
}

// validNamespace is stricter than client_golang, which takes any UTF-8 and has
// it quoted in every query, and takes the colon, which belongs to recording
// rules.
func validNamespace(s string) bool {
	for i, r := range s {
		switch {
		case r == '_', 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z':
		case '0' <= r && r <= '9' && i > 0:
		default:
			return false
		}
	}
	return true
}

// usable reports whether m was made by NewMetrics.
func (m *Metrics) usable() bool { return m != nil && m.collectors != nil }

// Describe implements [prometheus.Collector]. Sets with equal Namespace send
// the same descriptors.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	if !m.usable() {
		return
	}
	for _, c := range m.collectors {
		c.Describe(ch)
	}
	ch <- m.utilisation
	ch <- m.amplification
	ch <- m.headerRatio
}

// Collect implements [prometheus.Collector]. It only reads: how often, and by
// how many, the set is collected changes no value.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	if !m.usable() {
		return
	}
	// Not held while sending: whoever reads ch decides how long that takes.
	m.mu.Lock()
	peers := make([]*peerMetrics, 0, len(m.peers)+1)
	for _, p := range m.peers {
		peers = append(peers, p)
	}
	if m.otherPeer != nil {
		peers = append(peers, m.otherPeer)
	}
	services := make([]*serviceMetrics, 0, len(m.services)+1)
	for _, s := range m.services {
		services = append(services, s)
	}
	if m.otherService != nil {
		services = append(services, m.otherService)
	}
	badHeaders := m.badHeaders
	m.mu.Unlock()

	// Not by the vectors' own Collect, which comes in the order of a map. A
	// registry sorts every family by the values of its labels, and what is in
	// that order already costs it a third less: with many peers that is what a
	// scrape takes. So the order below is that of the labels' names: peer,
	// reason, service; code, service; outcome, peer. The services come before the
	// peers, because their peer is empty.
	slices.SortFunc(peers, func(a, b *peerMetrics) int { return strings.Compare(a.name, b.name) })
	slices.SortFunc(services, func(a, b *serviceMetrics) int { return strings.Compare(a.name, b.name) })
	if len(services) == 0 || services[0].name != "" { // else they are that service's
		for _, c := range badHeaders {
			if c != nil {
				ch <- c
			}
		}
	}
	for _, s := range services {
		for _, c := range s.headers {
			ch <- c
		}
		ch <- s.ranOut
		ch <- s.skews
		ch <- s.retries
		ch <- s.remaining
		ch <- s.lags
	}
	for i := range serverReasons {
		for _, s := range services {
			ch <- s.refusals[i]
		}
	}
	for i := range codeCount {
		for _, s := range services {
			if c := s.codes[i].Load(); c != nil {
				ch <- *c
			}
		}
	}
	for _, i := range outcomesInOrder {
		for _, p := range peers {
			ch <- p.outcomes[i]
		}
	}
	for _, p := range peers {
		for _, c := range [...]prometheus.Counter{p.requests, p.retries, p.retrySuccesses, p.hedges, p.hedgeWins, p.exhausted, p.exceeded, p.resends, p.skews} {
			ch <- c
		}
		ch <- p.attempts
		for _, i := range reasonsInOrder {
			ch <- p.refusals[i]
		}
	}
	gauge := func(desc *prometheus.Desc, v float64, label string) {
		// Must: one label each, made valid UTF-8 by labelValue.
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, label)
	}
	e := windowEpoch(m.start, time.Now())
	for _, p := range peers {
		gauge(m.utilisation, float64(p.used.highest(e))/billion, p.name)
		gauge(m.amplification, amplification(p.firstSent.sum(e), p.retriesSent.sum(e)), p.name)
	}
	for _, s := range services {
		gauge(m.headerRatio, presentRatio(s.usable.sum(e), s.unusable.sum(e)), s.name)
	}
}

// observe adds v to h, with an exemplar where there is one to be had.
func (m *Metrics) observe(ctx context.Context, h prometheus.Observer, v float64) {
	if m.exemplar != nil {
		if l := m.exemplar(ctx); len(l) > 0 && validExemplar(l) {
			if h, ok := h.(prometheus.ExemplarObserver); ok {
				h.ObserveWithExemplar(v, l)
				return
			}
		}
	}
	h.Observe(v)
}

// validExemplar reports whether client_golang takes l for an exemplar. It
// panics where it does not, and no request may die of its trace ID.
func validExemplar(l prometheus.Labels) bool {
	runes := 0
	for name, value := range l {
		if name == "" || strings.HasPrefix(name, "__") || !utf8.ValidString(name) || !utf8.ValidString(value) {
			return false
		}
		runes += utf8.RuneCountInString(name) + utf8.RuneCountInString(value)
	}
	return runes <= prometheus.ExemplarMaxRunes
}

// labelValue makes name fit for a label. WithLabelValues panics on invalid
// UTF-8, and the host of a URL can be any bytes.
func labelValue(name string) string {
	name = strings.ToValidUTF8(name, "\uFFFD")
	if len(name) <= maxLabelBytes {
		return name
	}
	n := maxLabelBytes
	for !utf8.RuneStart(name[n]) {
		n--
	}
	return name[:n]
}

// An outcome is how a request of a caller ended, attempts and waits included.
// Each request has exactly one.
type outcome string

const (
	outcomeOK       outcome = "ok"       // an answer that needed no (further) retry
	outcomeError    outcome = "error"    // the last failure is what the caller got
	outcomeDeadline outcome = "deadline" // time ran out
	outcomeRefused  outcome = "refused"  // the budget or its like ended it
	outcomeCanceled outcome = "canceled" // the caller has gone
)

// The closed sets of label values. A value outside of its set is not counted:
// no text from elsewhere becomes a label.
var (
	outcomes = [...]outcome{outcomeOK, outcomeError, outcomeDeadline, outcomeRefused, outcomeCanceled}

	clientReasons = [...]Reason{
		ReasonThrottle,
		ReasonAttempts, ReasonNotReplayable, ReasonNotIdempotent, ReasonToldNotTo, ReasonRetryAfter,
		ReasonDeadline, ReasonSlow, ReasonBudget, ReasonTurn, ReasonHeld, ReasonCanceled,
	}
	serverReasons = [...]Reason{ReasonExpired, ReasonInvalid, ReasonLimit, ReasonQueue, ReasonRetries}

	// Indexes of two of them in the order of the text, see Collect.
	outcomesInOrder = inOrder(outcomes[:])
	reasonsInOrder  = inOrder(clientReasons[:])
)

func inOrder[S ~string](values []S) []int {
	indexes := make([]int, len(values))
	for i := range indexes {
		indexes[i] = i
	}
	slices.SortFunc(indexes, func(a, b int) int { return strings.Compare(string(values[a]), string(values[b])) })
	return indexes
}

// peerMetrics are the series of one peer, resolved once. A nil one counts
// nothing: what a transport without Metrics has.
//
// After the last release it may still be written to, by requests that are under
// way; those counts are lost with the series.
type peerMetrics struct {
	m    *Metrics
	name string // the label
	refs int    // guarded by m.mu; not counted for otherPeer

	requests, retries, retrySuccesses, exhausted, exceeded, resends, skews prometheus.Counter
	hedges, hedgeWins                                                      prometheus.Counter

	outcomes [len(outcomes)]prometheus.Counter
	refusals [len(clientReasons)]prometheus.Counter
	attempts prometheus.Histogram

	firstSent, retriesSent window // attempts
	used                   window // billionths of the budget
}

// acquirePeer returns the series of one peer, made at 0 when it is new. Each
// call is undone by one releasePeer.
func (m *Metrics) acquirePeer(name string) *peerMetrics {
	if !m.usable() {
		return nil
	}
	name = labelValue(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.peers[name]
	switch {
	case p != nil:
	case name == otherLabel || m.labelsFullLocked():
		if m.otherPeer == nil {
			m.otherPeer = m.newPeerLocked(otherLabel)
		}
		return m.otherPeer
	default:
		// Cloned: the name may be a part of a long URL.
		p = m.newPeerLocked(strings.Clone(name))
		m.peers[p.name] = p
	}
	p.refs++
	return p
}

// releasePeer undoes one acquirePeer. With the last one the series go and the
// label is free for another peer; those of "_other" stay, for nobody knows
// whose they are.
func (m *Metrics) releasePeer(p *peerMetrics) {
	if !m.usable() || p == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.peers[p.name] != p {
		return // _other, or released once too often
	}
	if p.refs--; p.refs > 0 {
		return
	}
	delete(m.peers, p.name)
	// Value by value. A partial match on the peer would look at all series, and
	// for the empty name it would take those of the server side along.
	for _, v := range []*prometheus.CounterVec{m.requests, m.retries, m.retrySuccesses, m.hedges, m.hedgeWins, m.exhausted, m.resends} {
		v.DeleteLabelValues(p.name)
	}
	m.attempts.DeleteLabelValues(p.name)
	m.exceeded.DeleteLabelValues(sideClient, p.name, "")
	m.skews.DeleteLabelValues(sideClient, p.name, "")
	for _, o := range outcomes {
		m.outcomes.DeleteLabelValues(p.name, string(o))
	}
	for _, r := range clientReasons {
		m.refusals.DeleteLabelValues(p.name, "", string(r))
	}
}

// labelsFull reports whether a new peer would be counted under "_other".
func (m *Metrics) labelsFull() bool {
	if !m.usable() {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.labelsFullLocked()
}

func (m *Metrics) labelsFullLocked() bool { return len(m.peers) >= maxPeerLabels }

func (m *Metrics) newPeerLocked(name string) *peerMetrics {
	p := &peerMetrics{
		m:              m,
		name:           name,
		requests:       m.requests.WithLabelValues(name),
		retries:        m.retries.WithLabelValues(name),
		retrySuccesses: m.retrySuccesses.WithLabelValues(name),
		hedges:         m.hedges.WithLabelValues(name),
		hedgeWins:      m.hedgeWins.WithLabelValues(name),
		exhausted:      m.exhausted.WithLabelValues(name),
		resends:        m.resends.WithLabelValues(name),
		attempts:       m.attempts.WithLabelValues(name).(prometheus.Histogram),
		exceeded:       m.exceeded.WithLabelValues(sideClient, name, ""),
		skews:          m.skews.WithLabelValues(sideClient, name, ""),
	}
	for i, o := range outcomes {
		p.outcomes[i] = m.outcomes.WithLabelValues(name, string(o))
	}
	for i, r := range clientReasons {
		p.refusals[i] = m.refusals.WithLabelValues(name, "", string(r))
	}
	if m.badHeaders == nil {
		m.badHeaders = make([]prometheus.Counter, len(headerStates))
		for i, s := range headerStates {
			if s.invalid() {
				m.badHeaders[i] = m.headers.WithLabelValues("", string(s))
			}
		}
	}
	return p
}

// sent counts an attempt as it leaves; attempt counts from 1.
func (p *peerMetrics) sent(now time.Time, attempt int) {
	if p == nil {
		return
	}
	p.requests.Inc()
	e := windowEpoch(p.m.start, now)
	if attempt > 1 {
		p.retries.Inc()
		p.retriesSent.add(e)
	} else {
		p.firstSent.add(e)
	}
}

// refused counts why no (further) attempt was made. Each refusal has one
// reason; budget and turn count as an exhausted budget and deadline as a
// deadline exceeded besides, and nothing else counts as these.
func (p *peerMetrics) refused(r Reason) {
	if p == nil {
		return
	}
	for i, known := range clientReasons {
		if r == known {
			p.refusals[i].Inc()
			break
		}
	}
	switch r {
	case ReasonBudget, ReasonTurn:
		p.exhausted.Inc()
	case ReasonDeadline:
		p.exceeded.Inc()
	}
}

// done counts the end of a caller's request, after attempts of them. It is
// called once for each.
func (p *peerMetrics) done(ctx context.Context, o outcome, attempts int) {
	if p == nil {
		return
	}
	for i, known := range outcomes {
		if o == known {
			p.outcomes[i].Inc()
			break
		}
	}
	if o != outcomeOK {
		return
	}
	// At least 1: a sample for each success, whatever we are told.
	p.m.observe(ctx, p.attempts, float64(max(attempts, 1)))
	if attempts > 1 {
		p.retrySuccesses.Inc()
	}
}

// budgetUsed notes the share of the budget that is in use, in [0, 1].
func (p *peerMetrics) budgetUsed(now time.Time, share float64) {
	if p == nil {
		return
	}
	if v := toBillionths(share); v > 0 { // 0 is what an empty window says anyway
		p.used.raise(windowEpoch(p.m.start, now), v)
	}
}

// hedged counts a hedge that is sent, which counts as a retry besides.
func (p *peerMetrics) hedged() {
	if p != nil {
		p.hedges.Inc()
	}
}

// hedgeWon counts one that answered first.
func (p *peerMetrics) hedgeWon() {
	if p != nil {
		p.hedgeWins.Inc()
	}
}

// resent counts what net/http sent again by itself.
func (p *peerMetrics) resent(n int) {
	if p == nil || n <= 0 { // a counter panics on less than 0
		return
	}
	p.resends.Add(float64(n))
}

// skewed counts an answer that shows the clock of its host to be ahead.
func (p *peerMetrics) skewed() {
	if p == nil {
		return
	}
	p.skews.Inc()
}

// badHeader counts an unusable deadline header that an outgoing request carried
// and that was removed: a proxy without the middleware. The transport knows no
// service, so it counts under the empty one, in the same metric as arrivals: to
// those who look for whoever sends broken headers it is the same thing.
func (p *peerMetrics) badHeader(s headerState) {
	if p == nil || !s.invalid() {
		return
	}
	for i, known := range headerStates {
		if s == known {
			p.m.badHeaders[i].Inc()
			return
		}
	}
}

// Indexes of serviceMetrics.codes: code - minCode for what HTTP calls a status
// code, and two more.
const (
	minCode       = 100
	maxCode       = 599
	indexHijacked = maxCode - minCode + 1
	indexOther    = indexHijacked + 1
	codeCount     = indexOther + 1
)

// serviceMetrics are the series of one service. A nil one counts nothing. They
// are never removed: a service is a constant of the program, not an input.
type serviceMetrics struct {
	m    *Metrics
	name string // the label

	ranOut, skews, retries prometheus.Counter

	headers         []prometheus.Counter // as headerStates
	refusals        [len(serverReasons)]prometheus.Counter
	remaining, lags prometheus.Histogram

	// codes is filled as codes appear: five hundred series for each service,
	// nearly all of them 0 for ever, would be a poor trade.
	codes [codeCount]atomic.Pointer[prometheus.Counter]

	usable, unusable window // arrivals, by their header
}

// service returns the series of one service, made at 0 when it is new. The same
// name always gets the same ones.
func (m *Metrics) service(name string) *serviceMetrics {
	if !m.usable() {
		return nil
	}
	name = labelValue(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.services[name]; s != nil {
		return s
	}
	if name == otherLabel || len(m.services) >= maxServiceLabels {
		if m.otherService == nil {
			m.otherService = m.newService(otherLabel)
		}
		return m.otherService
	}
	s := m.newService(strings.Clone(name))
	m.services[s.name] = s
	return s
}

func (m *Metrics) newService(name string) *serviceMetrics {
	s := &serviceMetrics{
		m:         m,
		name:      name,
		ranOut:    m.exceeded.WithLabelValues(sideServer, "", name),
		skews:     m.skews.WithLabelValues(sideServer, "", name),
		retries:   m.serverRetries.WithLabelValues(name),
		remaining: m.remaining.WithLabelValues(name).(prometheus.Histogram),
		lags:      m.late.WithLabelValues(name).(prometheus.Histogram),
		headers:   make([]prometheus.Counter, len(headerStates)),
	}
	for i, state := range headerStates {
		s.headers[i] = m.headers.WithLabelValues(name, string(state))
	}
	for i, r := range serverReasons {
		s.refusals[i] = m.refusals.WithLabelValues("", name, string(r))
	}
	s.code(200 - minCode) // the one that every service will have
	return s
}

// arrived counts a request by its deadline header, and whether it is a retry.
// remaining is looked at where the header was usable: a deadline that the
// middleware set itself says nothing about the callers. It is clamped at 0,
// because a negative observation lowers the histogram's sum, which then reads
// as a restart.
func (s *serviceMetrics) arrived(ctx context.Context, now time.Time, state headerState, remaining time.Duration, retry bool) {
	if s == nil {
		return
	}
	for i, known := range headerStates {
		if state == known {
			s.headers[i].Inc()
			break
		}
	}
	e := windowEpoch(s.m.start, now)
	if state.usable() {
		s.usable.add(e)
		s.m.observe(ctx, s.remaining, max(0, remaining).Seconds())
	} else {
		s.unusable.add(e)
	}
	if retry {
		s.retries.Inc()
	}
}

// refused counts a request that was not served: expired or invalid. An expired
// one is counted by exceeded too; that is the caller's to do.
func (s *serviceMetrics) refused(r Reason) {
	if s == nil {
		return
	}
	for i, known := range serverReasons {
		if r == known {
			s.refusals[i].Inc()
			return
		}
	}
}

// exceeded counts a request that ran out of time, before or in its handler.
func (s *serviceMetrics) exceeded() {
	if s == nil {
		return
	}
	s.ranOut.Inc()
}

// late notes by how much a request that had expired on arrival came too late.
func (s *serviceMetrics) late(by time.Duration) {
	if s == nil {
		return
	}
	s.lags.Observe(max(0, by).Seconds())
}

// skewed counts an arrival whose two headers show a clock to be broken.
func (s *serviceMetrics) skewed() {
	if s == nil {
		return
	}
	s.skews.Inc()
}

// answered counts an answer by its status code; -1 is a hijacked connection,
// whose answer nobody saw.
func (s *serviceMetrics) answered(code int) {
	if s == nil {
		return
	}
	i := indexOther
	switch {
	case code >= minCode && code <= maxCode:
		i = code - minCode
	case code == -1:
		i = indexHijacked
	}
	s.code(i).Inc()
}

// code returns the counter at an index of codes. Two callers may both find it
// missing: the vector hands both the same counter, and either may store it.
func (s *serviceMetrics) code(i int) prometheus.Counter {
	if c := s.codes[i].Load(); c != nil {
		return *c
	}
	label := "other"
	switch {
	case i <= maxCode-minCode:
		label = strconv.Itoa(minCode + i)
	case i == indexHijacked:
		label = "hijacked"
	}
	c := s.m.served.WithLabelValues(s.name, label)
	s.codes[i].Store(&c)
	return c
}
