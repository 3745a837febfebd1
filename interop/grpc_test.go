package interop

import (
	"context"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stinthttp/stint"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// A healthService answers Check at once, and "stuck" never. It notes how much
// time each call had.
type healthService struct {
	grpc_health_v1.UnimplementedHealthServer
	left  chan time.Duration // 0: no deadline
	ended chan error
}

func (h *healthService) Check(ctx context.Context, req *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	var left time.Duration
	if d, ok := ctx.Deadline(); ok {
		left = time.Until(d)
	}
	h.left <- left
	if req.GetService() == "stuck" {
		<-ctx.Done()
		h.ended <- ctx.Err()
		return nil, ctx.Err()
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

// S32: a gRPC client in a handler takes the context, and with it the deadline that
// came in, on the wire of its own protocol.
func TestS32_GRPCInheritsTheDeadline(t *testing.T) {
	t.Parallel()
	service := &healthService{left: make(chan time.Duration, 1), ended: make(chan error, 1)}
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, service)
	l := listen(t)
	served := make(chan struct{})
	go func() {
		defer close(served)
		server.Serve(l)
	}()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := grpc_health_v1.NewHealthClient(conn)

	failed := make(chan error, 1)
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, err := client.Check(r.Context(), &grpc_health_v1.HealthCheckRequest{Service: r.URL.Query().Get("service")})
		if err != nil {
			failed <- err // and nothing is written: the 504 is the middleware's
			return
		}
		io.WriteString(w, answer.GetStatus().String())
	})))

	// The time that the caller has, less a reserve.
	const timeout, reserve = 5 * time.Second, time.Second
	tr := newTransport(t, stint.Config{Timeout: timeout, Reserve: reserve})
	resp, text, _, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", a.url(), nil), stint.Override{})
	if err != nil || resp.StatusCode != 200 || text != "SERVING" {
		t.Fatalf("%v, %v, %q", err, resp, text)
	}
	if left := <-service.left; left <= 0 || left > timeout-reserve {
		t.Errorf("the gRPC service had %v, want less than %v", left, timeout-reserve)
	}

	// Without a deadline there is none.
	resp, _, _, err = roundTrip(t, newTransport(t, stint.Config{}), newRequest(t, t.Context(), "GET", a.url(), nil), stint.Override{})
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v, %v", err, resp)
	}
	if left := <-service.left; left != 0 {
		t.Errorf("the gRPC service had %v, want no deadline", left)
	}

	// A gRPC service that is stuck is given up in time, on both sides.
	start := time.Now()
	tr = newTransport(t, stint.Config{Timeout: 3300 * time.Millisecond, Reserve: 3 * time.Second})
	resp, _, o, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", a.url()+"?service=stuck", nil), stint.Override{})
	if err != nil || resp.StatusCode != 504 || resp.Header.Get(stint.HeaderDeadlineExpired) != "1" || o.Reason != stint.ReasonDeadline {
		t.Errorf("after %v: %v, %v, %+v", time.Since(start), err, resp, o)
	}
	<-service.left
	if err := <-failed; status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("the gRPC client ended with %v", err)
	}
	select {
	case err := <-service.ended:
		if err != context.DeadlineExceeded && err != context.Canceled {
			t.Errorf("the gRPC service ended with %v", err)
		}
	case <-time.After(patience):
		t.Error("the gRPC service was left running")
	}
}
