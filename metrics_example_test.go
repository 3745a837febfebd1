package stint_test

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stinthttp/stint"
)

// registerMetrics returns the set of metrics that reg has, and registers one if
// it has none: for packages that each make clients and share a registry without
// knowing of each other.
func registerMetrics(reg prometheus.Registerer) (*stint.Metrics, error) {
	m, err := stint.NewMetrics(stint.MetricsConfig{})
	if err != nil {
		return nil, err
	}
	err = reg.Register(m)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if first, ok := already.ExistingCollector.(*stint.Metrics); ok {
			return first, nil
		}
	}
	if err != nil {
		return nil, err // some other collector has one of the names
	}
	return m, nil
}

func ExampleNewMetrics() {
	reg := prometheus.NewRegistry() // or prometheus.DefaultRegisterer

	orders, err := registerMetrics(reg)
	if err != nil {
		fmt.Println(err)
		return
	}
	payments, err := registerMetrics(reg)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("one set:", orders == payments)

	// One set serves many transports and middlewares.
	if _, err := stint.NewTransport(stint.Config{Metrics: orders}); err != nil {
		fmt.Println(err)
	}
	if _, err := stint.NewMiddleware(stint.MiddlewareConfig{Service: "orders", Metrics: orders}); err != nil {
		fmt.Println(err)
	}
	// Output: one set: true
}

// A program that has an http_client_requests_total of its own keeps it:
// registering ours is an error, and a Namespace avoids it.
func ExampleMetricsConfig_namespace() {
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "http_client_requests_total",
		Help: "Calls of the old client.",
	}, []string{"client", "method"}))

	plain, _ := stint.NewMetrics(stint.MetricsConfig{})
	fmt.Println("plain:", reg.Register(plain) == nil)

	prefixed, _ := stint.NewMetrics(stint.MetricsConfig{Namespace: "shop"})
	fmt.Println("with namespace:", reg.Register(prefixed) == nil)

	_, err := stint.NewMetrics(stint.MetricsConfig{Namespace: "my-shop"})
	fmt.Println(err)
	// Output:
	// plain: false
	// with namespace: true
	// stint: MetricsConfig.Namespace = my-shop: must be ASCII letters, digits and underscores and not begin with a digit
}
