package interop

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// A losingServer reads requests whole and, when told so, closes the connection
// instead of an answer: a peer that dies after it did the work, which net/http
// and proxies take for a kept-alive connection that was already dead.
type losingServer struct {
	addr string

	mu   sync.Mutex
	left int      // requests still to lose
	got  []string // methods of arrivals, but for /warm
}

func (s *losingServer) url() string { return "http://" + s.addr }

// lose makes the server lose the next n requests that are not for /warm.
func (s *losingServer) lose(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left, s.got = n, nil
}

func (s *losingServer) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.got
	s.got = nil
	return got
}

func startLosingServer(t *testing.T) *losingServer {
	t.Helper()
	l := listen(t)
	s := &losingServer{addr: l.Addr().String()}
	var mu sync.Mutex
	conns := make(map[net.Conn]bool)
	var wg sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns[conn] = true
			mu.Unlock()
			wg.Go(func() {
				s.serve(conn)
				mu.Lock()
				delete(conns, conn)
				mu.Unlock()
			})
		}
	})
	return s
}

func (s *losingServer) serve(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Minute))
	r := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		if !strings.HasSuffix(req.URL.Path, "/warm") {
			s.mu.Lock()
			s.got = append(s.got, req.Method)
			lose := s.left > 0
			s.left--
			s.mu.Unlock()
			if lose {
				return
			}
		}
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	}
}
