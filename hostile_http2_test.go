package stint

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Of HTTP/2 (RFC 9113, section 6), as much as a server needs that resets streams
// in ways net/http's own cannot be made to.
const (
	frameData     = 0x0
	frameHeaders  = 0x1
	frameReset    = 0x3
	frameSettings = 0x4
	framePing     = 0x6

	flagEndStream  = 0x1 // of DATA and HEADERS
	flagAck        = 0x1 // of SETTINGS and PING
	flagEndHeaders = 0x4

	codeProtocolError = 0x1
)

const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// A resettingServer speaks HTTP/2. It reads each request to its end, and resets
// the first few with PROTOCOL_ERROR; what comes then it answers with 200. net/http
// takes that reset for a refusal and sends the request again by itself.
type resettingServer struct {
	url      string
	resets   int32
	arrivals atomic.Int32 // requests read to their end
}

// startResettingServer returns the server and a base that trusts it.
func startResettingServer(t *testing.T, resets int32) (*resettingServer, *http.Transport) {
	t.Helper()
	cert := certificate(t, "127.0.0.1", time.Now().Add(time.Hour))
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert.Leaf)
	base := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
	s := &resettingServer{url: "https://" + l.Addr().String(), resets: resets}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		base.CloseIdleConnections()
		l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(20 * time.Second))
				s.serve(conn)
			})
		}
	})
	return s, base
}

// serve returns when the connection ends.
func (s *resettingServer) serve(conn net.Conn) error {
	preface := make([]byte, len(http2Preface))
	if _, err := io.ReadFull(conn, preface); err != nil || string(preface) != http2Preface {
		return errors.Join(err, errors.New("no HTTP/2"))
	}
	err := writeFrame(conn, frameSettings, 0, 0, nil)
	for err == nil {
		var kind, flags byte
		var stream uint32
		var payload []byte
		kind, flags, stream, payload, err = readFrame(conn)
		switch {
		case err != nil:
		case kind == frameSettings && flags&flagAck == 0:
			err = writeFrame(conn, frameSettings, flagAck, 0, nil)
		case kind == framePing && flags&flagAck == 0:
			err = writeFrame(conn, framePing, flagAck, 0, payload)
		case (kind == frameHeaders || kind == frameData) && flags&flagEndStream != 0:
			if s.arrivals.Add(1) <= s.resets {
				err = writeFrame(conn, frameReset, 0, stream, binary.BigEndian.AppendUint32(nil, codeProtocolError))
			} else {
				const status200 = 0x88 // in HPACK's static table (RFC 7541, appendix A)
				err = writeFrame(conn, frameHeaders, flagEndHeaders|flagEndStream, stream, []byte{status200})
			}
		}
	}
	return err
}

func readFrame(r io.Reader) (kind, flags byte, stream uint32, payload []byte, err error) {
	var head [9]byte
	if _, err = io.ReadFull(r, head[:]); err != nil {
		return
	}
	payload = make([]byte, uint32(head[0])<<16|uint32(head[1])<<8|uint32(head[2]))
	_, err = io.ReadFull(r, payload)
	return head[3], head[4], binary.BigEndian.Uint32(head[5:]) & (1<<31 - 1), payload, err
}

// writeFrame writes a frame of less than 256 bytes.
func writeFrame(w io.Writer, kind, flags byte, stream uint32, payload []byte) error {
	frame := binary.BigEndian.AppendUint32([]byte{0, 0, byte(len(payload)), kind, flags}, stream)
	_, err := w.Write(append(frame, payload...))
	return err
}

// net/http by itself repeats a POST, hundreds of times a second, for as long as an
// HTTP/2 peer resets it with PROTOCOL_ERROR, although the peer may have executed
// it each time.
//
// What it repeats of a request that is idempotent is its own affair, and only
// counted.
func TestHostile_HTTP2ResendsAreBounded(t *testing.T) {
	for _, tt := range []struct {
		name     string
		method   string
		config   Config
		resets   int32
		arrivals int32
		ok       bool
	}{
		{"one resend is left to net/http", "POST", Config{}, 1, 2, true},
		{"and a second is not", "POST", Config{}, 2, 2, false},
		{"also with one attempt", "POST", Config{MaxAttempts: 1}, 1, 2, true},
		{"and no second with one attempt", "POST", Config{MaxAttempts: 1}, 2, 2, false},
		{"ten where it may be repeated", "POST", Config{Keys: KeysHonoured}, maxResends, maxResends + 1, true},
		{"and not eleven", "POST", Config{Keys: KeysHonoured}, maxResends + 1, maxResends + 1, false},
		{"what is idempotent", "PUT", Config{CountResends: true}, maxResends + 1, maxResends + 2, true},
	} {
		for _, body := range []string{"", "charge"} {
			t.Run(fmt.Sprintf("%s, body %q", tt.name, body), func(t *testing.T) {
				s, base := startResettingServer(t, tt.resets)
				config := tt.config
				config.Base = base
				config.Metrics = newTestMetrics(t)
				var o Outcome
				var content io.Reader
				if body != "" {
					content = strings.NewReader(body)
				}
				resp, err := newTestTransport(t, config).RoundTrip(newRequest(t, WithOverride(t.Context(), Override{Outcome: &o}), tt.method, s.url, content))
				if err == nil {
					readAll(t, resp)
				}
				if (err == nil) != tt.ok || err != nil && !errors.Is(err, errResends) {
					t.Errorf("error %v", err)
				}
				if got := s.arrivals.Load(); got != tt.arrivals || o.Attempts != 1 {
					t.Errorf("%d arrivals, want %d; %+v", got, tt.arrivals, o)
				}
				if got := counter(t, config.Metrics, "stint_transparent_resends_total"); got != float64(tt.arrivals-1) {
					t.Errorf("%v resends counted, want %d", got, tt.arrivals-1)
				}
			})
		}
	}
}
