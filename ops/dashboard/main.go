// Dashboard writes the Grafana dashboard for the metrics of stint.
//
//	go run ./dashboard > dashboard.json
//
// dashboard.json is committed; import that one. It needs a Prometheus data
// source and nothing else.
package main

//lint:file-ignore SA1019 the classic schema is what every Grafana in use can import; dashboardv2 is not

import (
	"bytes"
	"encoding/json"
	"log"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/heatmap"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func main() {
	text, err := build()
	if err != nil {
		log.Fatal(err)
	}
	if _, err := os.Stdout.Write(text); err != nil {
		log.Fatal(err)
	}
}

// Units, as Grafana names them.
const (
	share     = "percentunit"
	perSecond = "reqps"
	seconds   = "s"
	times     = "none"
)

// A row is a heading and its panels.
type row struct {
	title  string
	panels []panel
}

// A panel is one question, and the queries that answer it.
type panel struct {
	title, about string
	unit         string
	limit        float64 // the alert's, drawn as a line; 0: none
	below        bool    // the alert is for less than limit
	max          float64 // of the axis; 0: as the values are
	stack        bool
	heat         bool
	queries      []query
}

type query struct{ legend, expr string }

// one returns the queries of a panel that has one.
func one(legend, expr string) []query { return []query{{legend, expr}} }

const (
	byPeer    = "{{job}} → {{peer}}"
	byService = "{{service}} ({{job}})"
)

// The rows, in the order in which somebody looks who was woken up.
var rows = []row{
	{"Which hop is in trouble", []panel{
		{
			title: "Retry budget in use", unit: share, limit: 0.8, max: 1,
			about:   "The fullest budget of any instance, its highest of the last minute. At 100 % the next retry is refused.",
			queries: one(byPeer, `max by (job, peer) (retry_budget_utilisation{job=~"$job", peer=~"$peer"})`),
		},
		{
			title: "Retries refused for want of budget", unit: perSecond,
			about:   "Failures that reach the callers, so that the peer is not buried under retries.",
			queries: one(byPeer, `sum by (job, peer) (rate(retry_budget_exhausted_total{job=~"$job", peer=~"$peer"}[$__rate_interval]))`),
		},
		{
			title: "Requests that run out of time", unit: share, limit: 0.01,
			about: "Share of a service's requests that expired on arrival or before the answer. The lowest service of the chain that shows here is where the time goes.",
			queries: one(byService, `sum by (job, service) (rate(deadline_exceeded_total{side="server", job=~"$job", service=~"$service"}[$__rate_interval]))`+
				` / (sum by (job, service) (rate(http_server_requests_total{job=~"$job", service=~"$service"}[$__rate_interval])) > 0)`),
		},
		{
			title: "Requests at a service per request of a user", unit: times,
			about: "The whole chain's amplification, with legal fan-out: what matters is a change. All jobs; the services that users call are named by the variable edge.",
			queries: one("{{service}}", `sum by (service) (rate(http_server_requests_total{service=~"$service"}[$__rate_interval]))`+
				` / on () group_left () (sum(rate(http_server_requests_total{service=~"$edge"}[$__rate_interval])) > 0)`),
		},
		{
			title: "Requests with a deadline", unit: share, limit: 0.95, below: true, max: 1,
			about:   "Share with a usable deadline header, the lowest of any instance. 0 at an edge is right: deadlines begin there.",
			queries: one(byService, `min by (job, service) (deadline_header_present_ratio{job=~"$job", service=~"$service"})`),
		},
		{
			title: "Errors answered", unit: perSecond, stack: true,
			about:   "By the service that answered. The lowest one in the chain is the cause, the others pass it on.",
			queries: one("{{service}} {{code}}", `sum by (service, code) (rate(http_server_requests_total{job=~"$job", service=~"$service", code=~"5..|429|hijacked|other"}[$__rate_interval])) > 0`),
		},
	}},
	{"Whether retries help", []panel{
		{
			title: "Attempts per request", unit: times, limit: 1.3,
			about:   "What retries add at one hop, the highest of any instance over the last minute. A budget of a tenth keeps it at 1.1 or below, except for callers of few requests.",
			queries: one(byPeer, `max by (job, peer) (retry_amplification_factor{job=~"$job", peer=~"$peer"})`),
		},
		{
			title: "Attempts at a peer per success of the edge", unit: times,
			about: "What a successful answer to a user costs at each dependency. In a full outage there is no success to divide by; look at the panel “Requests at a service per request of a user”.",
			queries: one("{{peer}}", `sum by (peer) (rate(http_client_requests_total{peer=~"$peer"}[$__rate_interval]))`+
				` / on () group_left () (sum(rate(http_server_requests_total{service=~"$edge", code=~"2.."}[$__rate_interval])) > 0)`),
		},
		{
			title: "Retried requests that ended well", unit: share, max: 1,
			about: "Per retry sent. Near zero the retries are load and nothing else: the fault is not one that goes away.",
			queries: one(byPeer, `sum by (job, peer) (rate(stint_client_retry_successes_total{job=~"$job", peer=~"$peer"}[$__rate_interval]))`+
				` / (sum by (job, peer) (rate(stint_client_retries_total{job=~"$job", peer=~"$peer"}[$__rate_interval])) > 0)`),
		},
		{
			title: "Attempts that a success took", unit: times,
			about: "The mean, and how many the unluckiest hundredth took at most.",
			queries: []query{
				{byPeer + " mean", `sum by (job, peer) (rate(stint_attempts_per_success_sum{job=~"$job", peer=~"$peer"}[$__rate_interval]))` +
					` / (sum by (job, peer) (rate(stint_attempts_per_success_count{job=~"$job", peer=~"$peer"}[$__rate_interval])) > 0)`},
				{byPeer + " p99", `histogram_quantile(0.99, sum by (job, peer, le) (rate(stint_attempts_per_success_bucket{job=~"$job", peer=~"$peer"}[$__rate_interval])))` +
					` and sum by (job, peer) (rate(stint_attempts_per_success_count{job=~"$job", peer=~"$peer"}[$__rate_interval])) > 0`},
			},
		},
		{
			title: "Why no further attempt was made", unit: perSecond, stack: true,
			about:   "By reason. budget and turn: the peer fails too much. deadline: no time for another. told_not_to: a layer below has retried already. attempts: all were used. throttle: the client holds requests back.",
			queries: one("{{peer}} {{reason}}", `sum by (peer, reason) (rate(stint_refused_total{job=~"$job", peer=~"$peer", peer!=""}[$__rate_interval])) > 0`),
		},
		{
			title: "Retries among arrivals", unit: share,
			about: "Share of a service's requests that say they are retries: what its callers' retries cost it.",
			queries: one(byService, `sum by (job, service) (rate(stint_server_retries_total{job=~"$job", service=~"$service"}[$__rate_interval]))`+
				` / (sum by (job, service) (rate(http_server_requests_total{job=~"$job", service=~"$service"}[$__rate_interval])) > 0)`),
		},
	}},
	{"Load and outcome", []panel{
		{
			title: "Attempts sent", unit: perSecond,
			about: "Retries included; the retries alone; of these the hedges, and those that answered first. Hedges that hardly ever win are sent too early.",
			queries: []query{
				{byPeer, `sum by (job, peer) (rate(http_client_requests_total{job=~"$job", peer=~"$peer"}[$__rate_interval]))`},
				{byPeer + " retries", `sum by (job, peer) (rate(stint_client_retries_total{job=~"$job", peer=~"$peer"}[$__rate_interval]))`},
				{byPeer + " hedges", `sum by (job, peer) (rate(stint_hedges_total{job=~"$job", peer=~"$peer"}[$__rate_interval])) > 0`},
				{byPeer + " hedges that won", `sum by (job, peer) (rate(stint_hedge_wins_total{job=~"$job", peer=~"$peer"}[$__rate_interval])) > 0`},
			},
		},
		{
			title: "How callers' requests ended", unit: perSecond, stack: true,
			about:   "After all attempts. ok is any answer that is not of the retried statuses.",
			queries: one("{{peer}} {{outcome}}", `sum by (peer, outcome) (rate(stint_client_outcomes_total{job=~"$job", peer=~"$peer"}[$__rate_interval])) > 0`),
		},
		{
			title: "Answers", unit: perSecond, stack: true,
			about:   "By service and status.",
			queries: one("{{service}} {{code}}", `sum by (service, code) (rate(http_server_requests_total{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`),
		},
	}},
	{"Where the time goes", []panel{
		{
			title: "Time left on arrival", unit: seconds, heat: true,
			about:   "Of the requests to the chosen services that brought a deadline. The lowest band came too late.",
			queries: one("{{le}}", `sum by (le) (increase(stint_deadline_remaining_seconds_bucket{job=~"$job", service=~"$service"}[$__rate_interval]))`),
		},
		{
			title: "Time left on arrival, p50 and p1", unit: seconds,
			about: "Where it falls from one service to the next, the one above used the time.",
			queries: []query{
				{byService + " p50", `histogram_quantile(0.5, sum by (job, service, le) (rate(stint_deadline_remaining_seconds_bucket{job=~"$job", service=~"$service"}[$__rate_interval])))` +
					` and sum by (job, service) (rate(stint_deadline_remaining_seconds_count{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`},
				{byService + " p1", `histogram_quantile(0.01, sum by (job, service, le) (rate(stint_deadline_remaining_seconds_bucket{job=~"$job", service=~"$service"}[$__rate_interval])))` +
					` and sum by (job, service) (rate(stint_deadline_remaining_seconds_count{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`},
			},
		},
		{
			title: "How late the expired came, p50 and p99", unit: seconds,
			about: "A few milliseconds are the network. Seconds are a queue in front of the service, or a clock.",
			queries: []query{
				{byService + " p50", `histogram_quantile(0.5, sum by (job, service, le) (rate(stint_deadline_late_seconds_bucket{job=~"$job", service=~"$service"}[$__rate_interval])))` +
					` and sum by (job, service) (rate(stint_deadline_late_seconds_count{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`},
				{byService + " p99", `histogram_quantile(0.99, sum by (job, service, le) (rate(stint_deadline_late_seconds_bucket{job=~"$job", service=~"$service"}[$__rate_interval])))` +
					` and sum by (job, service) (rate(stint_deadline_late_seconds_count{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`},
			},
		},
		{
			title: "Callers that run out of time", unit: perSecond,
			about:   "Requests that a caller ended, or did not send or repeat, for want of time.",
			queries: one(byPeer, `sum by (job, peer) (rate(deadline_exceeded_total{side="client", job=~"$job", peer=~"$peer"}[$__rate_interval]))`),
		},
		{
			title: "Refused on arrival", unit: perSecond,
			about:   "expired: a 504 before any work. invalid: a 400, with RejectInvalid. limit, queue: a 503 by Limit. retries: a 503, more than RetryBudget allows.",
			queries: one("{{service}} {{reason}}", `sum by (service, reason) (rate(stint_refused_total{job=~"$job", service=~"$service", service!=""}[$__rate_interval]))`),
		},
		{
			title: "Deadline headers", unit: perSecond, stack: true,
			about:   "By what they were. Anything but present, absent and multiple is a caller to be found.",
			queries: one("{{service}} {{state}}", `sum by (service, state) (rate(stint_deadline_headers_total{job=~"$job", service=~"$service|"}[$__rate_interval])) > 0`),
		},
	}},
	{"Executed once (package replay)", []panel{
		{
			title: "Requests with a key", unit: perSecond, stack: true,
			about:   "By what became of them. replayed: a retry that did no work twice. store_error: a 503 because the store failed.",
			queries: one("{{service}} {{outcome}}", `sum by (service, outcome) (rate(stint_replay_requests_total{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`),
		},
		{
			title: "Runs whose effect is not known", unit: share,
			about: "unknown: the handler ended in a way that says nothing. unsaved: the store failed when its answer was there. Per run begun.",
			queries: one(byService, `sum by (job, service) (rate(stint_replay_requests_total{outcome=~"unknown|unsaved", job=~"$job", service=~"$service"}[$__rate_interval]))`+
				` / (sum by (job, service) (rate(stint_replay_begun_total{job=~"$job", service=~"$service"}[$__rate_interval])) > 0)`),
		},
		{
			title: "Keys taken over", unit: perSecond,
			about:   "From runs that never ended, since their process died or could not renew its lease.",
			queries: one(byService, `sum by (job, service) (rate(stint_replay_begun_total{state="taken", job=~"$job", service=~"$service"}[$__rate_interval]))`),
		},
		{
			title: "Requests that waited for another one", unit: perSecond,
			about:   "With the same key: clients that retry while the first attempt still runs.",
			queries: one(byService, `sum by (job, service) (rate(stint_replay_waited_total{job=~"$job", service=~"$service"}[$__rate_interval]))`),
		},
		{
			title: "Calls of the store that failed", unit: perSecond,
			about:   "begin: the request gets 503. finish: its answer is delivered, and not stored.",
			queries: one("{{service}} {{op}}", `sum by (service, op) (rate(stint_replay_store_errors_total{job=~"$job", service=~"$service"}[$__rate_interval]))`),
		},
		{
			title: "Time that the store took, p99", unit: seconds,
			about: "Two calls, begin and finish, are added to a request that runs, one to a replay.",
			queries: one("{{service}} {{op}}", `histogram_quantile(0.99, sum by (service, op, le) (rate(stint_replay_store_seconds_bucket{job=~"$job", service=~"$service"}[$__rate_interval])))`+
				` and sum by (service, op) (rate(stint_replay_store_seconds_count{job=~"$job", service=~"$service"}[$__rate_interval])) > 0`),
		},
	}},
	{"What should be zero", []panel{
		{
			title: "Clocks that are wrong", unit: perSecond,
			about: "Requests and answers that show one of two clocks to be wrong. By service: a caller's or this host's. By peer: the peer's is ahead.",
			queries: one("{{side}} {{peer}}{{service}}",
				`sum by (side, peer, service) (rate(stint_clock_skew_total{job=~"$job", peer=~"$peer|", service=~"$service|"}[$__rate_interval]))`),
		},
		{
			title: "Resends by net/http", unit: perSecond,
			about:   "On top of the budget, when a kept-alive connection turns out to be dead. Counted with Config.CountResends, else 0.",
			queries: one(byPeer, `sum by (job, peer) (rate(stint_transparent_resends_total{job=~"$job", peer=~"$peer"}[$__rate_interval]))`),
		},
	}},
}

// source is the data source that the user chooses.
var source = common.DataSourceRef{Type: cog.ToPtr("prometheus"), Uid: cog.ToPtr("$datasource")}

// build returns the dashboard as JSON.
func build() ([]byte, error) {
	b := dashboard.NewDashboardBuilder("Retries and deadlines (stint)").
		Uid("stint").
		Description("Which hop is in trouble, whether retries help, and where the time went. The runbook has the same words.").
		Tags([]string{"stint"}).
		Editable().
		Tooltip(dashboard.DashboardCursorSyncCrosshair).
		Time("now-1h", "now").
		Refresh("30s").
		WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("Data source").Type("prometheus")).
		WithVariable(variable("job", `label_values({__name__=~"http_client_requests_total|http_server_requests_total"}, job)`)).
		WithVariable(variable("peer", `label_values(http_client_requests_total{job=~"$job"}, peer)`)).
		WithVariable(variable("service", `label_values(http_server_requests_total{job=~"$job"}, service)`)).
		WithVariable(dashboard.NewTextBoxVariableBuilder("edge").Label("edge (regular expression)").
			Description("The services that users call.").
			DefaultValue(dashboard.StringOrMap{String: cog.ToPtr("edge")}))
	id := uint32(0)
	next := func() uint32 { id++; return id }
	for _, r := range rows {
		b = b.WithRow(dashboard.NewRowBuilder(r.title).Id(next()))
		width := uint32(8)
		if len(r.panels)%3 != 0 {
			width = 12
		}
		for _, p := range r.panels {
			if p.heat {
				b = b.WithPanel(p.heatmap(next(), width))
			} else {
				b = b.WithPanel(p.timeseries(next(), width))
			}
		}
	}
	d, err := b.Build()
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err = enc.Encode(d)
	return text.Bytes(), err
}

// variable is a choice among the values of a label: all, at first.
func variable(name, q string) *dashboard.QueryVariableBuilder {
	return dashboard.NewQueryVariableBuilder(name).Label(name).Datasource(source).
		Query(dashboard.StringOrMap{String: &q}).
		Refresh(dashboard.VariableRefreshOnTimeRangeChanged).
		Sort(dashboard.VariableSortAlphabeticalAsc).
		Multi(true).IncludeAll(true).AllValue(".*").
		Current(dashboard.VariableOption{
			Text:  dashboard.StringOrArrayOfString{String: cog.ToPtr("All")},
			Value: dashboard.StringOrArrayOfString{String: cog.ToPtr("$__all")},
		})
}

// targets returns the queries, each with the data source of its own: Grafana
// takes the panel's for all, but checks of the JSON look here.
func (p panel) targets() (ts []*prometheus.DataqueryBuilder) {
	for i, q := range p.queries {
		t := prometheus.NewDataqueryBuilder().RefId(string(rune('A' + i))).Datasource(source).
			Expr(q.expr).LegendFormat(q.legend).Range().EditorMode(prometheus.QueryEditorModeCode)
		if p.heat {
			t = t.Format(prometheus.PromQueryFormatHeatmap)
		}
		ts = append(ts, t)
	}
	return ts
}

func (p panel) timeseries(id, width uint32) *timeseries.PanelBuilder {
	b := timeseries.NewPanelBuilder().Id(id).Title(p.title).Description(p.about).Datasource(source).
		Unit(p.unit).Min(0).Span(width).Height(8).NoValue("none").
		LineWidth(1).FillOpacity(5).ShowPoints(common.VisibilityModeNever).
		Legend(common.NewVizLegendOptionsBuilder().DisplayMode(common.LegendDisplayModeTable).
			Placement(common.LegendPlacementBottom).ShowLegend(true).Calcs([]string{"lastNotNull", "max"})).
		Tooltip(common.NewVizTooltipOptionsBuilder().Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending))
	if p.max > 0 {
		b = b.Max(p.max)
	}
	if p.stack {
		b = b.FillOpacity(40).Stacking(common.NewStackingConfigBuilder().Mode(common.StackingModeNormal).Group("A"))
	}
	if p.limit > 0 {
		good, bad := "green", "red"
		if p.below {
			good, bad = bad, good
		}
		b = b.ThresholdsStyle(common.NewGraphThresholdsStyleConfigBuilder().Mode(common.GraphThresholdsStyleModeDashed)).
			Thresholds(dashboard.NewThresholdsConfigBuilder().Mode(dashboard.ThresholdsModeAbsolute).
				Steps([]dashboard.Threshold{{Color: good}, {Color: bad, Value: &p.limit}}))
	}
	for _, t := range p.targets() {
		b = b.WithTarget(t)
	}
	return b
}

func (p panel) heatmap(id, width uint32) *heatmap.PanelBuilder {
	b := heatmap.NewPanelBuilder().Id(id).Title(p.title).Description(p.about).Datasource(source).
		Span(width).Height(8).Calculate(false).NoValue("none").
		YAxis(heatmap.NewYAxisConfigBuilder().Unit(p.unit)).
		Color(heatmap.NewHeatmapColorOptionsBuilder().Mode(heatmap.HeatmapColorModeScheme).Scheme("Oranges").Steps(64)).
		ShowLegend()
	for _, t := range p.targets() {
		b = b.WithTarget(t)
	}
	return b
}
