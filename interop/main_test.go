package interop

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stinthttp/stint"
)

// patience bounds what has to happen on a machine that is busy with other things.
const patience = 10 * time.Second

// quiet swallows what test servers log about clients that misbehave on purpose.
var quiet = log.New(io.Discard, "", 0)

// TestMain fails the run if goroutines of stint's are left when all tests are
// done.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := leftGoroutines(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines are left:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

func leftGoroutines() (left string) {
	for range 50 {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = ""
		for stack := range strings.SplitSeq(string(buf), "\n\n") {
			if strings.Contains(stack, "stinthttp/stint.") {
				left += stack + "\n\n"
			}
		}
		if left == "" {
			return ""
		}
		time.Sleep(100 * time.Millisecond)
	}
	return left
}

// program returns the path of a program that the test needs, or skips the test;
// on CI, where nothing may be skipped in silence, it fails it.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("%s is not in PATH, and CI is set: install the Debian package %s", name, name)
	}
	t.Skipf("%s is not in PATH: install the Debian package %s", name, name)
	return ""
}

// eager lets retries follow at once, so that what a test counts does not depend
// on turns and windows.
func eager(c stint.Config) stint.Config {
	c.Budget = stint.BudgetConfig{Ratio: 1, MinPerSecond: 1000, PeakFactor: 1000}
	c.Backoff = stint.Backoff{Base: 1, Max: 1}
	return c
}

func newTransport(t *testing.T, c stint.Config) *stint.Transport {
	t.Helper()
	tr, err := stint.NewTransport(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

func newMiddleware(t *testing.T, c stint.MiddlewareConfig) *stint.Middleware {
	t.Helper()
	mw, err := stint.NewMiddleware(c)
	if err != nil {
		t.Fatal(err)
	}
	return mw
}

func newMetrics(t *testing.T) *stint.Metrics {
	t.Helper()
	m, err := stint.NewMetrics(stint.MetricsConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// counter returns the sum of all series of a counter.
func counter(t *testing.T, m *stint.Metrics, name string) int {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(m)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, series := range f.GetMetric() {
				sum += series.GetCounter().GetValue()
			}
		}
	}
	return int(sum)
}

func newRequest(t *testing.T, ctx context.Context, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// roundTrip sends the request with the override, and returns the answer, what it
// said, and what became of the request.
func roundTrip(t *testing.T, rt http.RoundTripper, req *http.Request, o stint.Override) (*http.Response, string, stint.Outcome, error) {
	t.Helper()
	var outcome stint.Outcome
	o.Outcome = &outcome
	resp, err := rt.RoundTrip(req.WithContext(stint.WithOverride(req.Context(), o)))
	if err != nil {
		return nil, "", outcome, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("the answer's body: %v", err)
	}
	return resp, string(text), outcome, nil
}

// millis reads a header of milliseconds; -1 stands for anything that is not
// exactly one number.
func millis(h http.Header, name string) int64 {
	if len(h[name]) != 1 {
		return -1
	}
	ms, err := strconv.ParseInt(h[name][0], 10, 64)
	if err != nil {
		return -1
	}
	return ms
}

// An arrival is a request as a backend saw it.
type arrival struct {
	method string
	path   string
	header http.Header
	body   string
	left   time.Duration // until the deadline of its context; 0: none
}

// A recorder keeps arrivals. Safe for concurrent use.
type recorder struct {
	mu       sync.Mutex
	arrivals []arrival
}

func (r *recorder) add(a arrival) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.arrivals = append(r.arrivals, a)
}

// take returns the arrivals so far and forgets them.
func (r *recorder) take() []arrival {
	r.mu.Lock()
	defer r.mu.Unlock()
	got := r.arrivals
	r.arrivals = nil
	return got
}

// record notes a request, whose body it reads.
func (r *recorder) record(req *http.Request) arrival {
	a := arrival{method: req.Method, path: req.URL.Path, header: req.Header.Clone()}
	if d, ok := req.Context().Deadline(); ok {
		a.left = time.Until(d)
	}
	body, err := io.ReadAll(req.Body)
	a.body = string(body)
	if err != nil {
		a.body += " (" + err.Error() + ")"
	}
	r.add(a)
	return a
}

// echo answers with the request's body. It reads all of it first: over HTTP/1,
// net/http ends a body when its answer begins.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Write(body)
}

// A backend is a server on loopback whose connections are counted.
type backend struct {
	addr   string
	server *http.Server

	mu    sync.Mutex
	conns int
}

func (b *backend) url() string { return "http://" + b.addr }

func (b *backend) connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.conns
}

func startBackend(t *testing.T, h http.Handler) *backend {
	t.Helper()
	l := listen(t)
	b := &backend{addr: l.Addr().String()}
	b.server = &http.Server{Handler: h, ErrorLog: quiet, ConnState: func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			b.mu.Lock()
			b.conns++
			b.mu.Unlock()
		}
	}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.server.Serve(l)
	}()
	t.Cleanup(func() {
		b.server.Close()
		<-done
	})
	return b
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// A counted dialer counts the connections of a client.
type countedDialer struct {
	mu sync.Mutex
	n  int
}

func (d *countedDialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	d.n++
	d.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, network, addr)
}

func (d *countedDialer) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.n
}

// certificate makes a certificate for 127.0.0.1 that vouches for itself. It is
// returned for servers, for the pools of clients, and as PEM.
func certificate(t *testing.T) (cert tls.Certificate, pool *x509.CertPool, certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "stint interop"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:              []string{"localhost"},
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(leaf)
	certPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pool, certPEM, keyPEM
}
