package replay_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay"
)

// The text of all metrics after a run, a replay, an unknown end, its repetition
// and a broken key. In a bubble, where no time passes.
func TestReplayMetricsGolden(t *testing.T) { synctest.Test(t, testMetricsGolden) }

func testMetricsGolden(t *testing.T) {
	m, err := replay.NewMetrics(replay.MetricsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	mw, err := replay.New(replay.Config{
		Store: replay.NewMemory(replay.MemoryConfig{}), Scope: replay.SingleTenant, Service: "orders", Metrics: m,
	})
	if err != nil {
		t.Fatal(err)
	}
	status := 201
	h := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	post := func(key string) {
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set("Idempotency-Key", key)
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	post("a")
	post("a")
	status = 502
	post("b")
	status = 201
	post("b")
	post("no key")

	golden, err := os.Open("testdata/metrics.golden")
	if err != nil {
		t.Fatal(err)
	}
	defer golden.Close()
	if err := testutil.CollectAndCompare(m, golden); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.CollectAndLint(m); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}

func TestReplayMetricsBounded(t *testing.T) {
	m, _ := replay.NewMetrics(replay.MetricsConfig{Namespace: "shop"})
	for i := range 200 {
		if _, err := replay.New(replay.Config{
			Store: replay.NewMemory(replay.MemoryConfig{}), Scope: replay.SingleTenant, Service: strings.Repeat("x", i%129), Metrics: m,
		}); err != nil {
			t.Fatal(err)
		}
	}
	if n := testutil.CollectAndCount(m, "shop_stint_replay_waited_total"); n != 65 {
		t.Errorf("%d services have series, want 64 and one for the others", n)
	}
	var none *replay.Metrics
	if n := testutil.CollectAndCount(none); n != 0 {
		t.Errorf("a nil set has %d series", n)
	}
	_, err := replay.NewMetrics(replay.MetricsConfig{Namespace: "1"})
	var c *stint.ConfigError
	if !errors.As(err, &c) || c.Field != "replay.MetricsConfig.Namespace" {
		t.Errorf("got error %v", err)
	}
}
