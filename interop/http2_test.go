package interop

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stinthttp/stint"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// O-10: an HTTP/2 server of net/http's winds its connections down, between
// requests (Connection: close) and during them (Shutdown, another takes over):
// 200 POSTs in parallel, with a body that can be sent again and the caller's key,
// all succeed, whole.
func TestO10_HTTP2ServersWindDown(t *testing.T) {
	cert, pool, _, _ := certificate(t)
	var at recorder
	var served atomic.Int32
	mw := newMiddleware(t, stint.MiddlewareConfig{})
	h := mw.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := at.record(r)
		time.Sleep(time.Millisecond)
		if served.Add(1)%20 == 0 {
			w.Header().Set("Connection", "close") // on HTTP/2: GOAWAY
		}
		io.WriteString(w, got.body)
	}))
	var current atomic.Value
	var stopping sync.WaitGroup
	start := func() *http.Server {
		l := listen(t)
		s := &http.Server{Handler: h, ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}}}
		stopping.Go(func() { s.ServeTLS(l, "", "") })
		current.Store(l.Addr().String())
		return s
	}
	server := start()
	var conns atomic.Int32
	base := &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "localhost"},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			conns.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, current.Load().(string))
		},
	}
	tr := newTransport(t, eager(stint.Config{Base: base, Timeout: 30 * time.Second}))
	body := strings.Repeat("0123456789abcdef", 2048)
	const n = 200
	var wg sync.WaitGroup
	limit := make(chan struct{}, 50)
	for i := range n {
		limit <- struct{}{}
		if i%40 == 39 {
			old := server
			server = start() // new connections go there from now on
			stopping.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				defer cancel()
				// A connection that was dialled and not used keeps Shutdown waiting;
				// what this is about are those in use.
				if old.Shutdown(ctx) != nil {
					old.Close()
				}
			})
		}
		wg.Go(func() {
			defer func() { <-limit }()
			req := newRequest(t, t.Context(), "POST", "https://fleet.test/", strings.NewReader(body))
			req.Header.Set(stint.HeaderIdempotencyKey, fmt.Sprint("order-", i))
			resp, text, o, err := roundTrip(t, tr, req, stint.Override{})
			if err != nil || resp.StatusCode != 200 || text != body || resp.ProtoMajor != 2 {
				t.Errorf("request %d: %v, %v, %d bytes, %+v", i, err, resp, len(text), o)
			}
		})
	}
	wg.Wait()
	server.Close()
	stopping.Wait()
	checkKeyed(t, at.take(), n, stint.DefaultMaxAttempts, body)
	if got := conns.Load(); got < 5 {
		t.Errorf("%d connections: nothing was wound down", got)
	}
	t.Logf("%d connections", conns.Load())
}

// An h2Fault is what a raw HTTP/2 server does with a request.
type h2Fault int

const (
	h2Serve         h2Fault = iota
	h2Refuse                // RST_STREAM, REFUSED_STREAM: not processed
	h2RefuseLate            // the same, when the whole request has been read
	h2GoAway                // GOAWAY, nothing processed, and the connection ends
	h2InternalError         // RST_STREAM, INTERNAL_ERROR, after the whole request
	h2ProtocolError         // RST_STREAM, PROTOCOL_ERROR, after the whole request
	h2Die                   // the connection ends, after the whole request
)

// A rawH2 is an HTTP/2 server made by hand, for what no well-behaved one does.
// It shows the first requests the faults, and serves what comes after.
type rawH2 struct {
	url   string
	cert  tls.Certificate
	fault h2Fault

	mu       sync.Mutex
	left     int // requests still to fail
	arrivals int // HEADERS frames of POSTs, GETs …, but for /warm
	executed int // requests that it read whole and could have acted on
	keys     map[string]bool
}

func startRawH2(t *testing.T, fault h2Fault, times int) (*rawH2, *http.Transport) {
	t.Helper()
	cert, pool, _, _ := certificate(t)
	l := listen(t)
	s := &rawH2{url: "https://" + l.Addr().String(), cert: cert, fault: fault, left: times, keys: make(map[string]bool)}
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
			raw, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns[raw] = true
			mu.Unlock()
			wg.Go(func() {
				defer raw.Close()
				raw.SetDeadline(time.Now().Add(time.Minute))
				conn := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}})
				s.serve(conn)
			})
		}
	})
	base, _ := h2Base(t, pool)
	return s, base
}

func (s *rawH2) serve(conn *tls.Conn) {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(conn, preface); err != nil {
		return
	}
	f := http2.NewFramer(conn, conn)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if f.WriteSettings() != nil {
		return
	}
	faults := make(map[uint32]h2Fault)
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		id := frame.Header().StreamID
		ended := false
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				f.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				f.WritePing(true, frame.Data)
			}
		case *http2.MetaHeadersFrame:
			fault := s.arrive(frame)
			faults[id] = fault
			switch fault {
			case h2Refuse:
				f.WriteRSTStream(id, http2.ErrCodeRefusedStream)
			case h2GoAway:
				f.WriteGoAway(0, http2.ErrCodeNo, nil)
				conn.Close()
				return
			default:
				ended = frame.StreamEnded()
			}
		case *http2.DataFrame:
			ended = frame.StreamEnded() && faults[id] != h2Refuse
		}
		if !ended {
			continue
		}
		switch faults[id] {
		case h2Serve:
			s.execute()
			var head strings.Builder
			e := hpack.NewEncoder(&head)
			e.WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte(head.String()), EndHeaders: true, EndStream: true})
		case h2RefuseLate:
			f.WriteRSTStream(id, http2.ErrCodeRefusedStream)
		case h2InternalError:
			s.execute()
			f.WriteRSTStream(id, http2.ErrCodeInternal)
		case h2ProtocolError:
			s.execute()
			f.WriteRSTStream(id, http2.ErrCodeProtocol)
		case h2Die:
			s.execute()
			conn.NetConn().Close()
			return
		}
	}
}

func (s *rawH2) arrive(h *http2.MetaHeadersFrame) h2Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.PseudoValue("path") == "/warm" {
		s.executed--
		return h2Serve
	}
	s.arrivals++
	for _, field := range h.RegularFields() {
		if field.Name == "idempotency-key" {
			s.keys[field.Value] = true
		}
	}
	if s.left <= 0 {
		return h2Serve
	}
	s.left--
	return s.fault
}

func (s *rawH2) execute() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.executed++
}

func (s *rawH2) counts() (arrivals, executed, keys int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.arrivals, s.executed, len(s.keys)
}

// What an HTTP/2 peer sees of one request that it does not answer, over
// connections that are new and in use, with and without otelhttp between.
//
// A stream that was refused, and a GOAWAY that says that nothing was processed,
// are sent again by net/http itself, whatever the method and the key: at once,
// then after 1, 2, 4 … s. These resends are no attempts and cost no budget; the
// peer has said that it did nothing, and a request is executed at most once by
// them. A peer that answers every new connection with GOAWAY gets them without a
// pause until the deadline: a request to such a peer needs one. Everything else arrives at most MaxAttempts times, and what is unsafe
// once.
func TestHTTP2FaultsInArrivals(t *testing.T) {
	type want struct{ arrivals, executed, attempts int }
	for _, tt := range []struct {
		name              string
		fault             h2Fault
		times             int
		get, post, keyed  want
		getOK, postOK, ok bool
	}{
		{"refused once", h2Refuse, 1, want{2, 1, 1}, want{2, 1, 1}, want{2, 1, 1}, true, true, true},
		{"refused once, late", h2RefuseLate, 1, want{2, 1, 1}, want{2, 1, 1}, want{2, 1, 1}, true, true, true},
		{"GOAWAY once", h2GoAway, 1, want{2, 1, 1}, want{2, 1, 1}, want{2, 1, 1}, true, true, true},
		{"reset once", h2InternalError, 1, want{2, 2, 2}, want{1, 1, 1}, want{2, 2, 2}, true, false, true},
		{"reset always", h2InternalError, 100, want{3, 3, 3}, want{1, 1, 1}, want{3, 3, 3}, false, false, false},
		{"connection lost once", h2Die, 1, want{2, 2, 2}, want{1, 1, 1}, want{2, 2, 2}, true, false, true},
		{"connection lost always", h2Die, 100, want{3, 3, 3}, want{1, 1, 1}, want{3, 3, 3}, false, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, of := range []struct {
				method, key string
				want        want
				ok          bool
			}{
				{"GET", "", tt.get, tt.getOK}, {"PUT", "", tt.get, tt.getOK},
				{"POST", "", tt.post, tt.postOK}, {"POST", "order-1", tt.keyed, tt.ok},
			} {
				for i := range 8 {
					warm, body, otel := i&1 != 0, "", i&4 != 0
					if i&2 != 0 {
						body = "charge"
					}
					s, base := startRawH2(t, tt.fault, tt.times)
					c := eager(stint.Config{Base: base, Timeout: patience})
					if otel {
						options, _ := tracing(t)
						c.Base = otelTransport(base, options)
					}
					tr := newTransport(t, c)
					if warm {
						if _, _, _, err := roundTrip(t, tr, newRequest(t, t.Context(), "GET", s.url+"/warm", nil), stint.Override{}); err != nil {
							t.Fatal(err)
						}
					}
					req := newRequest(t, t.Context(), of.method, s.url+"/", strings.NewReader(body))
					if of.key != "" {
						req.Header.Set(stint.HeaderIdempotencyKey, of.key)
					}
					_, _, o, err := roundTrip(t, tr, req, stint.Override{})
					arrivals, executed, keys := s.counts()
					what := fmt.Sprintf("%s key %q body %q, warm %v, otelhttp %v", of.method, of.key, body, warm, otel)
					if got := (want{arrivals, executed, o.Attempts}); got != of.want || (err == nil) != of.ok {
						t.Errorf("%s: %+v, want %+v (%v)", what, got, of.want, err)
					}
					if (keys == 1) != (of.method == "POST") || keys > 1 {
						t.Errorf("%s: %d keys", what, keys)
					}
				}
			}
		})
	}
}
