package replay

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	maxServiceLen    = 128      // bytes of a metric label
	maxServiceLabels = 64       // services beyond these share a label
	otherLabel       = "_other" // this one
)

// MetricsConfig configures [NewMetrics]. The zero value is valid.
type MetricsConfig struct {
	// Namespace is put, with an underscore, in front of all names, as in
	// stint.MetricsConfig, whose value it should have. ASCII letters, digits
	// and underscores, not beginning with a digit. Empty, the default: the
	// names as documented at [Metrics].
	Namespace string
}

// Metrics is the set of metrics of any number of middlewares. It is a
// [prometheus.Collector] that the caller registers. Make one with [NewMetrics],
// and hand it to [Config]. It is safe for concurrent use. A nil *Metrics, and
// the zero value, count nothing and collect nothing.
//
//	stint_replay_requests_total{service,outcome}   keyed requests, each under one Outcome
//	stint_replay_begun_total{service,state}        runs begun: new, or taken over from a run that never ended
//	stint_replay_waited_total{service}             requests that waited for another one with their key
//	stint_replay_store_errors_total{service,op}    calls of the store that failed: begin, renew, finish, release
//	stint_replay_store_seconds{service,op}         histogram: how long the calls took
//
// All series of a service exist, at 0, from the moment that a middleware is
// made for it. At most 64 services have series of their own, the others share
// the label "_other".
type Metrics struct {
	requests *prometheus.CounterVec // service, outcome
	begun    *prometheus.CounterVec // service, state
	waited   *prometheus.CounterVec // service
	failures *prometheus.CounterVec // service, op
	latency  *prometheus.HistogramVec

	mu       sync.Mutex
	services map[string]*serviceMetrics // guarded by mu; by label
}

// NewMetrics returns an empty set. The error joins a [*stint.ConfigError] for
// each field that cannot be used. Sets with equal Namespace are equal to a
// registry, see [stint.NewMetrics].
func NewMetrics(c MetricsConfig) (*Metrics, error) {
	var errs configErrors
	errs.check(validNamespace(c.Namespace), "MetricsConfig.Namespace", c.Namespace,
		"must be ASCII letters, digits and underscores and not begin with a digit")
	if err := errs.join(); err != nil {
		return nil, err
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: c.Namespace, Name: name, Help: help}, labels)
	}
	return &Metrics{
		services: make(map[string]*serviceMetrics),
		requests: counter("stint_replay_requests_total",
			"Requests with an idempotency key by what became of them.", "service", "outcome"),
		begun: counter("stint_replay_begun_total",
			"Runs begun, by what was found: new, or taken (a run whose lease ended without an answer).", "service", "state"),
		waited: counter("stint_replay_waited_total",
			"Requests that waited for another one with the same key.", "service"),
		failures: counter("stint_replay_store_errors_total",
			"Calls of the store that failed.", "service", "op"),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: c.Namespace, Name: "stint_replay_store_seconds", Help: "Time that calls of the store took.",
			Buckets: []float64{.00001, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5},
		}, []string{"service", "op"}),
	}, nil
}

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

func (m *Metrics) collectors() []prometheus.Collector {
	if m == nil || m.services == nil {
		return nil
	}
	return []prometheus.Collector{m.requests, m.begun, m.waited, m.failures, m.latency}
}

// Describe implements [prometheus.Collector].
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.collectors() {
		c.Describe(ch)
	}
}

// Collect implements [prometheus.Collector].
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.collectors() {
		c.Collect(ch)
	}
}

// A storeOp is a method of the store.
type storeOp int

const (
	opBegin storeOp = iota
	opRenew
	opFinish
	opRelease
	storeOps
)

var opNames = [storeOps]string{"begin", "renew", "finish", "release"}

// serviceMetrics are the series of one service. A nil one counts nothing.
type serviceMetrics struct {
	outcomes             [len(outcomes)]prometheus.Counter
	begunNew, begunTaken prometheus.Counter
	waited               prometheus.Counter
	failures             [storeOps]prometheus.Counter
	latency              [storeOps]prometheus.Observer
}

// service returns the series of one service, made at 0 when it is new.
func (m *Metrics) service(name string) *serviceMetrics {
	if m.collectors() == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.services) >= maxServiceLabels && m.services[name] == nil {
		name = otherLabel
	}
	if s := m.services[name]; s != nil {
		return s
	}
	name = strings.Clone(name)
	s := &serviceMetrics{
		begunNew:   m.begun.WithLabelValues(name, StateNew.String()),
		begunTaken: m.begun.WithLabelValues(name, StateTaken.String()),
		waited:     m.waited.WithLabelValues(name),
	}
	for i, o := range outcomes {
		s.outcomes[i] = m.requests.WithLabelValues(name, string(o))
	}
	for op, opName := range opNames {
		s.failures[op] = m.failures.WithLabelValues(name, opName)
		s.latency[op] = m.latency.WithLabelValues(name, opName)
	}
	m.services[name] = s
	return s
}

func (s *serviceMetrics) ended(o Outcome) {
	if s == nil {
		return
	}
	for i, known := range outcomes {
		if o == known {
			s.outcomes[i].Inc()
			return
		}
	}
}

func (s *serviceMetrics) begin(state State) {
	switch {
	case s == nil:
	case state == StateNew:
		s.begunNew.Inc()
	case state == StateTaken:
		s.begunTaken.Inc()
	}
}

func (s *serviceMetrics) wait() {
	if s != nil {
		s.waited.Inc()
	}
}

// called counts a call of the store. That a key is lost is a finding, and that
// the client has left is not the store's fault.
func (s *serviceMetrics) called(op storeOp, took time.Duration, err error) {
	if s == nil {
		return
	}
	s.latency[op].Observe(max(0, took).Seconds())
	if err != nil && !errors.Is(err, ErrLost) && !errors.Is(err, context.Canceled) {
		s.failures[op].Inc()
	}
}

func validService(s string) bool { return utf8.ValidString(s) && len(s) <= maxServiceLen }
