package replay_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stinthttp/stint/replay"
)

// discard is a writer that costs nothing, and has the optional methods that those
// of net/http have on HTTP/1.
type discard struct{ h http.Header }

func (d *discard) WriteString(s string) (int, error)     { return len(s), nil }
func (d *discard) ReadFrom(src io.Reader) (int64, error) { return io.Copy(io.Discard, src) }
func (d *discard) CloseNotify() <-chan bool              { return nil }
func (d *discard) Flush()                                {}
func (d *discard) FlushError() error                     { return nil }
func (d *discard) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return nil, nil, http.ErrNotSupported
}

func (d *discard) Header() http.Header         { return d.h }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(int)             {}

// kib is a handler whose answer has a KiB.
func kib() http.Handler {
	answer := make([]byte, 1024)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = []string{"application/octet-stream"}
		w.Write(answer)
	})
}

func memoryMiddleware(tb testing.TB) *replay.Middleware {
	tb.Helper()
	m, err := replay.NewMetrics(replay.MetricsConfig{})
	if err != nil {
		tb.Fatal(err)
	}
	mw, err := replay.New(replay.Config{
		Store: replay.NewMemory(replay.MemoryConfig{}), Scope: replay.SingleTenant, Service: "bench", Metrics: m,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return mw
}

func benchRequest(n int) *http.Request {
	r := httptest.NewRequest("POST", "/things", strings.NewReader(`{"amount": 1}`))
	r.Header["Idempotency-Key"] = []string{"9b2a2a0e-8f1e-4f0e-9d6c-" + strconv.Itoa(n)}
	return r
}

// serveFresh measures h with requests that have a key of their own each.
func serveFresh(b *testing.B, h http.Handler) {
	b.ReportAllocs()
	n := 0
	var batch []*http.Request
	for b.Loop() {
		if len(batch) == 0 {
			b.StopTimer()
			for range 1000 {
				n++
				batch = append(batch, benchRequest(n))
			}
			b.StartTimer()
		}
		r := batch[len(batch)-1]
		batch = batch[:len(batch)-1]
		h.ServeHTTP(&discard{make(http.Header, 4)}, r)
	}
}

func BenchmarkReplay(b *testing.B) {
	b.Run("handler", func(b *testing.B) { serveFresh(b, kib()) })
	b.Run("fresh", func(b *testing.B) { serveFresh(b, memoryMiddleware(b).Handler(kib())) })
	b.Run("no key", func(b *testing.B) {
		h := memoryMiddleware(b).Handler(kib())
		r := httptest.NewRequest("POST", "/things", nil)
		b.ReportAllocs()
		for b.Loop() {
			h.ServeHTTP(&discard{make(http.Header, 4)}, r)
		}
	})
}

// What the README says of allocations. Time is for the benchmark: a machine that
// others use can only say the order.
func TestReplayCost(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	const runs = 2000
	requests := make([]*http.Request, 0, 2*runs+2)
	for n := range 2*runs + 2 {
		requests = append(requests, benchRequest(n))
	}
	cost := func(h http.Handler) float64 {
		return testing.AllocsPerRun(runs, func() {
			r := requests[len(requests)-1]
			requests = requests[:len(requests)-1]
			h.ServeHTTP(&discard{make(http.Header, 4)}, r)
		})
	}
	bare := cost(kib())
	start := time.Now()
	added := cost(memoryMiddleware(t).Handler(kib())) - bare
	t.Logf("%.0f allocations added, %v in all per request", added, time.Since(start)/runs)
	if added > 20 {
		t.Errorf("%.0f allocations over the bare handler, want at most 20", added)
	}
}
