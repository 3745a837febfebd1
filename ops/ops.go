// Package ops holds what watches over services that use stint: alert rules, a
// dashboard, a runbook, and the tests that hold them against the metrics that
// the library really exports and against a Prometheus that runs.
//
// To use them, copy the files. [Render] adapts them.
package ops

import (
	"regexp"
	"strings"
)

//go:generate sh -c "go run ./dashboard > dashboard.json.new && mv dashboard.json.new dashboard.json"

// Runbook is where the committed rules say that the runbook is.
const Runbook = "https://github.com/stinthttp/stint/blob/main/ops/runbook.md"

// names are the metrics of stint, without a namespace.
var names = []string{
	"deadline_exceeded_total",
	"deadline_header_present_ratio",
	"http_client_requests_total",
	"http_server_requests_total",
	"retry_amplification_factor",
	"retry_budget_exhausted_total",
	"retry_budget_utilisation",
	"stint_attempts_per_success",
	"stint_client_outcomes_total",
	"stint_client_retries_total",
	"stint_client_retry_successes_total",
	"stint_clock_skew_total",
	"stint_deadline_headers_total",
	"stint_deadline_late_seconds",
	"stint_deadline_remaining_seconds",
	"stint_hedge_wins_total",
	"stint_hedges_total",
	"stint_refused_total",
	"stint_replay_begun_total",
	"stint_replay_requests_total",
	"stint_replay_store_errors_total",
	"stint_replay_store_seconds",
	"stint_replay_waited_total",
	"stint_server_retries_total",
	"stint_transparent_resends_total",
}

// Options say how [Render] changes a file. Zero fields change nothing.
type Options struct {
	Namespace string // MetricsConfig.Namespace of the services
	Edge      string // regular expression for the services that users call
	Runbook   string // address of the runbook

	// For tests, which have no time: the window of rates, the time that an
	// alert is pending, and how far back comparisons look, as PromQL durations.
	Window, For, Offset string
}

var (
	// A name is a word of its own, which a recorded name with its colons is not.
	namePattern   = regexp.MustCompile(`(^|[^a-zA-Z0-9_:])((?:` + strings.Join(names, "|") + `)(?:_bucket|_sum|_count)?)\b`)
	edgePattern   = regexp.MustCompile(`(service(?:=|!)~)"edge"`)
	edgeVariable  = regexp.MustCompile(`("query": )"edge"`)
	forPattern    = regexp.MustCompile(`(?m)^(\s+for: )\S+$`)
	offsetPattern = regexp.MustCompile(`\boffset \w+`)
)

// Render adapts the text of rules.yml, dashboard.json or runbook.md.
func Render(text string, o Options) string {
	if o.Namespace != "" {
		text = namePattern.ReplaceAllString(text, "${1}"+o.Namespace+"_${2}")
	}
	if o.Edge != "" {
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `$$`).Replace(o.Edge) + `"`
		text = edgePattern.ReplaceAllString(text, "${1}"+quoted)
		text = edgeVariable.ReplaceAllString(text, "${1}"+quoted)
	}
	if o.Runbook != "" {
		text = strings.ReplaceAll(text, Runbook, o.Runbook)
	}
	if o.Window != "" {
		text = strings.NewReplacer("[5m]", "["+o.Window+"]", "rate5m", "rate"+o.Window).Replace(text)
	}
	if o.For != "" {
		text = forPattern.ReplaceAllString(text, "${1}"+o.For)
	}
	if o.Offset != "" {
		text = offsetPattern.ReplaceAllString(text, "offset "+o.Offset)
	}
	return text
}
