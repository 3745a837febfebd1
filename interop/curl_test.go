package interop

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// curl runs curl and returns the status, the time that it took by its own clock,
// the headers, and the body.
func curl(t *testing.T, stdin string, args ...string) (status int, took time.Duration, headers, body string) {
	t.Helper()
	dir := t.TempDir()
	head, out := filepath.Join(dir, "head"), filepath.Join(dir, "out")
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t, "curl"), append([]string{
		"--disable", "--silent", "--show-error", "--noproxy", "*", "--max-time", "10",
		"--dump-header", head, "--output", out, "--write-out", "%{http_code} %{time_total}",
	}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("curl %q: %v: %s", args, err, stderr.String())
	}
	code, seconds, _ := strings.Cut(stdout.String(), " ")
	status, _ = strconv.Atoi(code)
	s, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		t.Fatalf("curl wrote %q", stdout.String())
	}
	h, _ := os.ReadFile(head)
	b, _ := os.ReadFile(out)
	return status, time.Duration(s * float64(time.Second)), strings.ToLower(string(h)), string(b)
}

// S7 by hand: curl with a deadline that has passed is answered 504 at once, over
// HTTP/1.1 and HTTP/2, with a body of any size and whatever it waits for; with
// one that has not, the request is served.
func TestS7_Curl(t *testing.T) {
	program(t, "curl")
	var ran atomic.Int32
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	h := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ran.Add(1)
		// An offer of h2c is no upgrade: the deadline is in force.
		if _, ok := r.Context().Deadline(); !ok {
			t.Errorf("%s %s, Upgrade %q: no deadline", r.Proto, r.Method, r.Header["Upgrade"])
		}
		echo(w, r)
	}))
	plain := startBackend(t, h)

	cert, _, certPEM, _ := certificate(t)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	write(t, ca, certPEM)
	secure := startTLS(t, h, cert)

	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	for _, tt := range []struct {
		name  string
		stdin string
		args  []string
	}{
		{"GET", "", nil},
		{"HEAD", "", []string{"--head"}},
		{"POST", "", []string{"--data", "charge"}},
		{"POST of 1 MiB", big, []string{"--data-binary", "@-"}},
		{"upload of 1 MiB, not waiting for leave", big, []string{"--data-binary", "@-", "-H", "Expect:"}},
		{"POST of 1 MiB, waiting for leave", big, []string{"--data-binary", "@-", "-H", "Expect: 100-continue", "--expect100-timeout", "30"}},
		{"a small POST, waiting for leave", "charge", []string{"--data-binary", "@-", "-H", "Expect: 100-continue", "--expect100-timeout", "30"}},
		{"upload, chunked", big, []string{"--upload-file", "-"}},
		{"an offer of h2c", "", []string{"--http2"}},
	} {
		for _, at := range []struct {
			name string
			args []string
		}{
			{"HTTP/1.1", []string{"--http1.1", plain.url()}},
			{"HTTP/2", []string{"--http2", "--cacert", ca, "https://" + secure}},
		} {
			if tt.name == "an offer of h2c" && at.name == "HTTP/1.1" {
				at.args = []string{plain.url()}
			}
			if at.name == "HTTP/2" && strings.HasPrefix(tt.name, "upload") {
				// net/http ends the stream with RST_STREAM(NO_ERROR), as RFC 9113
				// section 8.1 has it, and curl 7.88 now and then throws away the
				// answer that it has (exit status 18) while it is still sending.
				continue
			}
			args := append(append([]string{"-H", "X-Request-Deadline: 1000"}, tt.args...), at.args...)
			status, took, headers, body := curl(t, tt.stdin, args...)
			if status != 504 || !strings.Contains(headers, "x-deadline-expired: 1") || !strings.Contains(headers, "x-should-retry: false") {
				t.Errorf("%s over %s: %d, %s", tt.name, at.name, status, headers)
			}
			if strings.Contains(headers, "100 continue") {
				t.Errorf("%s over %s: was asked for the body", tt.name, at.name)
			}
			if tt.name != "HEAD" && !strings.Contains(body, "deadline exceeded") {
				t.Errorf("%s over %s: body %q", tt.name, at.name, body)
			}
			// TLS is in it. A curl that waits for leave would wait for 30 s.
			if took > 2*time.Second {
				t.Errorf("%s over %s: after %v", tt.name, at.name, took)
			}
			t.Logf("%s over %s: after %v", tt.name, at.name, took)
		}
	}
	if n := ran.Load(); n != 0 {
		t.Errorf("the handler ran %d times", n)
	}

	// For a program that reads JSON, what is wrong, in numbers.
	_, _, headers, body := curl(t, "", "-H", "X-Request-Deadline: 1000", "-H", "Accept: application/json", plain.url())
	var problem struct {
		Status int   `json:"status"`
		Due    int64 `json:"deadline_ms"`
		Now    int64 `json:"now_ms"`
		Late   int64 `json:"late_by_ms"`
	}
	if err := json.Unmarshal([]byte(body), &problem); err != nil || problem.Status != 504 || problem.Due != 1000 ||
		problem.Now-problem.Late != 1000 || !strings.Contains(headers, "application/problem+json") {
		t.Errorf("%v: %s: %s", err, headers, body)
	}

	// And with time left.
	due := strconv.FormatInt(time.Now().Add(time.Minute).UnixMilli(), 10)
	for _, args := range [][]string{{plain.url()}, {"--http2", plain.url()}, {"--http2", "--cacert", ca, "https://" + secure}} {
		status, _, _, body := curl(t, big, append([]string{"-H", "X-Request-Deadline: " + due, "--data-binary", "@-", "-H", "Expect: 100-continue"}, args...)...)
		if status != 200 || body != big {
			t.Errorf("%q: %d, %d bytes", args, status, len(body))
		}
	}
	if ran.Load() != 3 {
		t.Errorf("the handler ran %d times", ran.Load())
	}
}

// curl through a proxy.
func TestS7_CurlThroughAProxy(t *testing.T) {
	program(t, "curl")
	eachProxy(t, func(t *testing.T, name string) {
		mw := newMiddleware(t, stint.MiddlewareConfig{})
		a := startBackend(t, mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { t.Error("the handler ran") })))
		p := startProxy(t, name, a.addr, a.addr)
		big := strings.Repeat("0123456789abcdef", 1<<16)
		for _, tt := range []struct {
			stdin string
			args  []string
		}{
			{"", nil},
			{big, []string{"--data-binary", "@-"}},
			{big, []string{"--data-binary", "@-", "-H", "Expect: 100-continue", "--expect100-timeout", "30"}},
		} {
			for _, at := range [][]string{{p.url + "/a/"}, {"--insecure", "--http2", p.tlsURL + "/a/"}} {
				args := append(append([]string{"-H", "X-Request-Deadline: 1000"}, tt.args...), at...)
				status, took, headers, _ := curl(t, tt.stdin, args...)
				if status != 504 || !strings.Contains(headers, "x-deadline-expired: 1") || took > 2*time.Second {
					t.Errorf("%q: %d after %v, %s", args, status, took, headers)
				}
				t.Logf("%q: after %v", args, took)
			}
		}
	})
}

// startTLS starts a server with HTTP/2 and HTTP/1.1, and returns its address.
func startTLS(t *testing.T, h http.Handler, cert tls.Certificate) string {
	t.Helper()
	l := listen(t)
	s := &http.Server{Handler: h, ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ServeTLS(l, "", "")
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	return l.Addr().String()
}
