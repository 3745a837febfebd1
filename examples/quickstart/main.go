// Quickstart has both halves of stint: a server whose handler calls another.
package main

import (
	"context"
	"errors"
	"flag"
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
	addr := flag.String("addr", "127.0.0.1:8080", "where to listen")
	flag.Parse()
	metrics := must(stint.NewMetrics(stint.MetricsConfig{}))
	prometheus.MustRegister(metrics)
	client := &http.Client{Transport: must(stint.NewTransport(stint.Config{Metrics: metrics}))}
	middleware := must(stint.NewMiddleware(stint.MiddlewareConfig{Service: "front", Timeout: 2 * time.Second, Metrics: metrics}))
	backend := must(net.Listen("tcp", "127.0.0.1:0"))
	hello := func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "hello") }
	go func() { log.Fatal(http.Serve(backend, http.HandlerFunc(hello))) }()
	front := func(w http.ResponseWriter, r *http.Request) {
		// r.Context() takes the deadline along.
		req, err := http.NewRequestWithContext(r.Context(), "GET", "http://"+backend.Addr().String(), nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		resp, err := client.Do(req)
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			http.Error(w, err.Error(), http.StatusGatewayTimeout)
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadGateway)
		default:
			defer resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
			fmt.Fprintln(w, "the backend says", resp.Status)
		}
	}
	http.Handle("GET /metrics", promhttp.Handler())
	http.Handle("/", middleware.Handler(http.HandlerFunc(front)))
	log.Printf("try: curl -i -H 'X-Request-Deadline: 1' http://%s/", *addr)
	log.Fatal(http.ListenAndServe(*addr, nil))
}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}
