package ops

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stinthttp/stint/replay"
)

// A flaky store fails when it is told to.
type flaky struct {
	replay.Store
	begin, release atomic.Bool // fail
}

var errFlaky = errors.New("flaky")

func (f *flaky) Begin(ctx context.Context, key, print [32]byte, lease, ttl time.Duration) (replay.Claim, error) {
	if f.begin.Load() {
		return replay.Claim{}, errFlaky
	}
	return f.Store.Begin(ctx, key, print, lease, ttl)
}

func (f *flaky) Release(ctx context.Context, key [32]byte, fence int64) error {
	if f.release.Load() {
		return errFlaky
	}
	return f.Store.Release(ctx, key, fence)
}

// startOrders starts a service with package replay, and clients that make it do
// everything that its panels show, some times a second. It returns the address
// of its metrics.
func startOrders(t *testing.T) string {
	t.Helper()
	metrics, err := replay.NewMetrics(replay.MetricsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	store := &flaky{Store: replay.NewMemory(replay.MemoryConfig{})}
	once, err := replay.New(replay.Config{
		Store: store, Scope: replay.SingleTenant, Service: "orders", Metrics: metrics, Lease: 100 * time.Millisecond, MaxWait: 10 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	orders := once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/unknown" {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}))
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics)
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))

	stop, done := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		<-done
		server.Close()
	})
	post := func(path, key string) {
		r := httptest.NewRequest(http.MethodPost, path, strings.NewReader("x"))
		r.Header.Set("Idempotency-Key", key)
		orders.ServeHTTP(httptest.NewRecorder(), r)
	}
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			key := fmt.Sprint("order-", i)
			var both sync.WaitGroup // of which one waits for the other
			both.Add(2)
			for range 2 {
				go func() {
					defer both.Done()
					post("/", key)
				}()
			}
			both.Wait()
			post("/", key) // replayed

			store.release.Store(true)
			post("/unknown", key) // its key stays in flight until the lease ends
			store.release.Store(false)
			store.begin.Store(true)
			post("/", "failed-"+key)
			store.begin.Store(false)
			time.Sleep(150 * time.Millisecond)
			post("/unknown", key) // taken over, and released

			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return strings.TrimPrefix(server.URL, "http://")
}
