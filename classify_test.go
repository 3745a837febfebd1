package stint

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

// O-13: what no repeat can mend is tried once, over net/http's own transport, so
// that a Go release that changes an error's type or text turns this red; the
// types stay within reach, and no budget is spent.
func TestO13_HopelessRequestsAreTriedOnce(t *testing.T) {
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }))
	defer plain.Close()
	as := func(target any) func(error) bool {
		return func(err error) bool { return errors.As(err, target) }
	}
	text := func(begin string) func(error) bool {
		if !slices.Contains(untypedRequestErrors, begin) {
			t.Errorf("%q is not in the table", begin)
		}
		return func(err error) bool {
			for errors.Unwrap(err) != nil {
				err = errors.Unwrap(err)
			}
			return strings.HasPrefix(err.Error(), begin)
		}
	}
	secure := func(tls tls.Certificate) string {
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.TLS = tlsConfig(tls)
		s.Config.ErrorLog = quiet
		s.StartTLS()
		t.Cleanup(s.Close)
		return s.URL
	}
	now := time.Now()
	valid := certificate(t, "127.0.0.1", now.Add(time.Hour))
	expired := certificate(t, "127.0.0.1", now.Add(-time.Hour))
	misnamed := certificate(t, "127.0.0.2", now.Add(time.Hour))
	trust := x509.NewCertPool()
	for _, c := range []tls.Certificate{expired, misnamed} {
		trust.AddCert(c.Leaf)
	}

	var authority x509.UnknownAuthorityError
	var hostname x509.HostnameError
	var invalid x509.CertificateInvalidError
	var verification *tls.CertificateVerificationError
	tests := []struct {
		name  string
		url   string
		prep  func(*http.Request)
		check func(error) bool
	}{
		{"unknown authority", secure(valid), nil, as(&authority)},
		{"verification", secure(valid), nil, as(&verification)},
		{"another host's certificate", secure(misnamed), nil, as(&hostname)},
		{"expired certificate", secure(expired), nil, as(&invalid)},
		{"plain HTTP on an https URL", strings.Replace(plain.URL, "http:", "https:", 1), nil, func(err error) bool {
			var record tls.RecordHeaderError
			return errors.Is(err, http.ErrSchemeMismatch) || errors.As(err, &record)
		}},
		{"scheme", "gopher://peer.test/", nil, text("unsupported protocol scheme")},
		{"no host", plain.URL, func(r *http.Request) { r.URL.Host = "" }, text("http: no Host in request URL")},
		{"bad Host", plain.URL, func(r *http.Request) { r.Host = "a\x7fb" }, text("http: invalid Host header")},
		{"bad header name", plain.URL, func(r *http.Request) { r.Header["a b"] = []string{"x"} }, text("net/http: invalid header ")},
		{"bad header value", plain.URL, func(r *http.Request) { r.Header.Set("A", "x\ny") }, text("net/http: invalid header ")},
		{"bad trailer", plain.URL, func(r *http.Request) { r.Trailer = http.Header{"a b": {"x"}} }, text("net/http: invalid trailer ")},
		{"bad method", plain.URL, func(r *http.Request) { r.Method = "G T" }, text("net/http: invalid method ")},
		{"control character in the URL", plain.URL, func(r *http.Request) { r.URL.Opaque = "//x/\x7f" }, text("net/http: can't write control character in Request.URL")},
		{"body shorter than it says", plain.URL, func(r *http.Request) {
			r.Method, r.ContentLength = "PUT", 10
			r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("five!")), nil }
			r.Body, _ = r.GetBody()
		}, text("http: ContentLength=")},
		{"length without a body", plain.URL, func(r *http.Request) { r.Method, r.ContentLength = "PUT", 10 }, text("http: Request.ContentLength=")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			base := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: trust}}
			if tt.name == "bad Host" { // to a server, net/http sends an empty one
				proxy, _ := url.Parse(plain.URL)
				base.Proxy = http.ProxyURL(proxy)
			}
			defer base.CloseIdleConnections()
			tr := newTestTransport(t, Config{Base: base, Metrics: newTestMetrics(t)})
			var o Outcome
			req := newRequest(t, WithOverride(t.Context(), Override{Outcome: &o, MaxAttempts: 5}), "GET", tt.url, nil)
			if tt.prep != nil {
				tt.prep(req)
			}
			_, err := tr.RoundTrip(req)
			if err == nil || !tt.check(err) {
				t.Fatalf("%v (%T)", err, err)
			}
			if o.Attempts != 1 || o.Reason != "" {
				t.Errorf("%+v (%v)", o, err)
			}
			if got := counter(t, tr.cfg.Metrics, "stint_refused_total"); got != 0 {
				t.Errorf("%v refusals", got)
			}
		})
	}
	// A nil URL or header never reaches the base; the text stands for other bases.
	if !requestError(errors.New("http: nil Request.URL")) {
		t.Error("nil URL")
	}
	if !requestError(fmt.Errorf("wrapped: %w", http.ErrSkipAltProtocol)) {
		t.Error("ErrSkipAltProtocol")
	}
}

func TestRefusedStreamIsUnbegun(t *testing.T) {
	if v := classifyError(streamError{StreamID: 1, Code: 7}, false); v != unbegun {
		t.Errorf("REFUSED_STREAM: %v", v)
	}
	if v := classifyError(streamError{StreamID: 1, Code: 8}, false); v != failed {
		t.Errorf("CANCEL: %v", v)
	}
	for _, err := range []error{io.EOF, &net.OpError{Op: "read", Err: errors.New("reset")}, &url.Error{Err: io.ErrUnexpectedEOF}, context.DeadlineExceeded} {
		if v := classifyError(err, false); v != failed {
			t.Errorf("%v: %v", err, v)
		}
		if v := classifyError(err, true); v != unbegun {
			t.Errorf("%v, nothing written: %v", err, v)
		}
	}
}

// FuzzClassify: arbitrary answers and chains of errors are judged without a panic,
// false wins over true, and a success is never retried.
func FuzzClassify(f *testing.F) {
	f.Add(503, "true", "", "reset", false)
	f.Add(200, "true", "false", "net/http: invalid header", true)
	f.Add(409, " TRUE ", "", "", false)
	f.Fuzz(func(t *testing.T, code int, own, stripe, text string, unsent bool) {
		resp := answer(code, "", HeaderShouldRetry, own, "Stripe-Should-Retry", stripe)
		v := classifyResponse(resp, transientStatus, false)
		if toldNotTo(resp.Header) && toldToRetry(resp) {
			t.Error("both")
		}
		if code < 400 && v != done {
			t.Errorf("%d is judged %v", code, v)
		}
		if v == unbegun && classifyResponse(resp, transientStatus, true) == unbegun && code != 421 && code != 425 {
			t.Error("a foreign peer's word counts as proof")
		}
		err := errors.Join(fmt.Errorf("%s: %w", text, errors.New(text)), &net.OpError{Op: text, Err: errors.New(text)})
		switch classifyError(err, unsent) {
		case done:
			t.Error("an error is no answer")
		case unbegun:
			if !unsent {
				t.Error("a text proves nothing")
			}
		}
	})
}

func certificate(t *testing.T, ip string, notAfter time.Time) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: ip},
		NotBefore: notAfter.Add(-24 * time.Hour), NotAfter: notAfter,
		IPAddresses: []net.IP{net.ParseIP(ip)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func tlsConfig(c tls.Certificate) *tls.Config { return &tls.Config{Certificates: []tls.Certificate{c}} }
