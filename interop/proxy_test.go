package interop

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"text/template"
	"time"
)

// A proxy is an nginx or haproxy of its own for one test. Its paths are those of
// the templates in testdata.
type proxy struct {
	name   string
	url    string // HTTP/1.1
	tlsURL string // HTTP/2 and HTTP/1.1
	pool   *x509.CertPool
	cmd    *exec.Cmd
}

// eachProxy runs the test with each of the two.
func eachProxy(t *testing.T, test func(t *testing.T, name string)) {
	for _, name := range []string{"nginx", "haproxy"} {
		t.Run(name, func(t *testing.T) {
			program(t, name)
			test(t, name)
		})
	}
}

// proxyConfig is what the templates are filled with.
type proxyConfig struct {
	Dir, Nonce        string
	User, Group       string // of nginx's workers; empty where we are not root
	Port, TLSPort     int
	Cert, Key, PEM    string // files
	A, B              string // addresses of the backends
	KeepaliveRequests int    // of nginx, after which it closes a connection
}

// startProxy starts the proxy in front of the backends a and b, and waits until
// it answers.
func startProxy(t *testing.T, name, a, b string, change ...func(*proxyConfig)) *proxy {
	t.Helper()
	path := program(t, name)
	dir := t.TempDir()
	_, pool, certPEM, keyPEM := certificate(t)
	c := proxyConfig{
		Dir: dir, Nonce: rand.Text(), A: a, B: b, KeepaliveRequests: 1000,
		Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), PEM: filepath.Join(dir, "both.pem"),
	}
	if os.Geteuid() == 0 {
		// As root, nginx gives its workers to nobody, who may not enter dir.
		me, err := user.Current()
		if err != nil {
			t.Fatal(err)
		}
		group, err := user.LookupGroupId(me.Gid)
		if err != nil {
			t.Fatal(err)
		}
		c.User, c.Group = me.Username, group.Name
	}
	for _, f := range change {
		f(&c)
	}
	write(t, c.Cert, certPEM)
	write(t, c.Key, keyPEM)
	write(t, c.PEM, append(certPEM, keyPEM...))

	// A free port can be lost between our look and the proxy's; then others.
	var said string
	for range 5 {
		c.Port, c.TLSPort = freePort(t), freePort(t)
		p := &proxy{
			name: name, pool: pool,
			url:    fmt.Sprintf("http://127.0.0.1:%d", c.Port),
			tlsURL: fmt.Sprintf("https://127.0.0.1:%d", c.TLSPort),
		}
		var ready bool
		if ready, said = p.start(t, path, c); ready {
			return p
		}
	}
	t.Fatalf("%s does not start:\n%s", name, said)
	return nil
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l := listen(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// start runs the program in the foreground and reports whether it came to answer.
func (p *proxy) start(t *testing.T, path string, c proxyConfig) (ready bool, said string) {
	t.Helper()
	file, flags := "nginx.conf", []string{"-e", "stderr", "-p", c.Dir, "-c"}
	if p.name == "haproxy" {
		file, flags = "haproxy.cfg", []string{"-db", "-f"}
	}
	tmpl, err := template.ParseFiles(filepath.Join("testdata", file+".tmpl"))
	if err != nil {
		t.Fatal(err)
	}
	var config bytes.Buffer
	if err := tmpl.Execute(&config, c); err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(c.Dir, file)
	write(t, file, config.Bytes())

	var out lockedBuffer
	cmd := exec.Command(path, append(flags, file)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = patience
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		cmd.Wait()
	}()
	stop := func() {
		// SIGTERM is a fast stop to both; nginx's workers go with their master.
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(patience):
			cmd.Process.Kill()
			<-exited
		}
	}
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		select {
		case <-exited:
			return false, out.String()
		default:
		}
		resp, err := client.Get(p.url + "/ready")
		if err != nil {
			continue
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(text) != c.Nonce {
			continue // somebody else's port: ours is about to exit
		}
		p.cmd = cmd
		t.Cleanup(func() {
			stop()
			if t.Failed() {
				t.Logf("%s said:\n%s", p.name, out.String())
			}
		})
		return true, ""
	}
	stop()
	return false, out.String()
}

// A lockedBuffer takes what a process says while it runs.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// h2Base returns a base that speaks HTTP/2 to the proxy, and the count of its
// connections.
func (p *proxy) h2Base(t *testing.T) (*http.Transport, *countedDialer) {
	return h2Base(t, p.pool)
}

func h2Base(t *testing.T, pool *x509.CertPool) (*http.Transport, *countedDialer) {
	t.Helper()
	var dialer countedDialer
	base := &http.Transport{
		DialContext: dialer.dial, ForceAttemptHTTP2: true,
		TLSClientConfig: &tls.Config{RootCAs: pool},
	}
	t.Cleanup(base.CloseIdleConnections)
	return base, &dialer
}

func withTimeout(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
