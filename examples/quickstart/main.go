// Quickstart has both halves of stint: a server whose handler calls another.
//
//	curl http://127.0.0.1:8080/                                  200
//	curl -i -H 'X-Request-Deadline: 1' http://127.0.0.1:8080/    504: it was due in 1970
//	curl http://127.0.0.1:8080/metrics
package main

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stinthttp/stint"
)

func main() {
	metrics := must(stint.NewMetrics(stint.MetricsConfig{}))
	prometheus.MustRegister(metrics)
	transport := must(stint.NewTransport(stint.Config{Metrics: metrics}))
	client := &http.Client{Transport: transport}
	edge := stint.MiddlewareConfig{Service: "front", Timeout: 2 * time.Second, Metrics: metrics}
	middleware := must(stint.NewMiddleware(edge))

	backend := must(net.Listen("tcp", "127.0.0.1:0"))
	go func() { log.Fatal(http.Serve(backend, http.HandlerFunc(hello))) }()

	front := func(w http.ResponseWriter, r *http.Request) {
		// r.Context() takes the deadline along.
		req, err := http.NewRequestWithContext(r.Context(), "GET", "http://"+backend.Addr().String(), nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		resp, err := client.Do(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
		fmt.Fprintln(w, "the backend says", resp.Status)
	}
	http.Handle("GET /metrics", promhttp.Handler())
	http.Handle("/", middleware.Handler(http.HandlerFunc(front)))
	log.Fatal(http.ListenAndServe("127.0.0.1:8080", nil))
}

func hello(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "hello") }

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}
