package stinttest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/stinthttp/stint"
)

// An Expired says what [ExpiredIsRefused] asks for and looks at. The zero value
// asks for "/" and looks at the answer alone.
type Expired struct {
	// Work stands in front of what must not run:
	//
	//	rec := new(stinttest.Recorder)
	//	h := mw.Handler(rec.Handler("orders", orders))
	//	stinttest.ExpiredIsRefused(t, h, stinttest.Expired{Work: rec})
	//
	// nil: whether anything runs is not checked.
	Work *Recorder
	// Target is the path, with a query if need be, of a route that serves GET.
	// "": "/".
	Target string
}

const (
	refusalFast  = 50 * time.Millisecond // the fastest of refusalTries
	refusalLimit = 2 * time.Second       // each
	refusalTries = 10
)

// ExpiredIsRefused serves a handler on a loopback address, sends it requests
// whose deadline passed ten seconds ago, and fails if
//
//   - an answer is not 504
//   - an answer takes longer than 2 s, or the fastest of ten longer than 50 ms;
//     a request whose body the client has announced and not yet sent is where
//     net/http makes an early answer wait
//   - the work has begun for any of them
//   - a GET that has a minute left is answered 504 as well, or does not reach
//     the work: a handler that refuses everything proves nothing
//
// The requests are GET and POST, over HTTP/1.1 and HTTP/2, without a body, with
// one that is there, and with one of which only the beginning is sent. The one
// GET that has time is served as any other. The server ends with the TB's
// Cleanup.
func ExpiredIsRefused(t TB, handler http.Handler, e Expired) {
	t.Helper()
	if e.Target == "" {
		e.Target = "/"
	}
	base := serve(t, handler)
	if base == "" {
		return
	}
	target, err := url.Parse(strings.TrimSuffix(base, "/") + e.Target)
	if err != nil {
		t.Fatalf("stinttest: Expired.Target: %v", err)
		return
	}
	before := e.begun()
	for _, c := range []struct {
		name      string
		send      sender
		method    string
		announced int // length of the body
		sent      int // of it
	}{
		{"GET over HTTP/1.1", askHTTP1, http.MethodGet, 0, 0},
		{"POST over HTTP/1.1", askHTTP1, http.MethodPost, 1 << 10, 1 << 10},
		{"POST over HTTP/1.1 with a small body half sent", askHTTP1, http.MethodPost, 1 << 10, 1 << 9},
		{"POST over HTTP/1.1 with a large body half sent", askHTTP1, http.MethodPost, 1 << 20, 1 << 10},
		{"GET over HTTP/2", askHTTP2, http.MethodGet, 0, 0},
		{"POST over HTTP/2", askHTTP2, http.MethodPost, 1 << 10, 1 << 10},
		{"POST over HTTP/2 with a body half sent", askHTTP2, http.MethodPost, 1 << 20, 1 << 10},
	} {
		if took, err := refusal(c.send, asking{target, c.method, c.announced, c.sent}); err != nil {
			t.Errorf("stinttest: %s, expired: %v", c.name, err)
		} else if took >= refusalFast {
			t.Errorf("stinttest: %s, expired: refused after %v at best, want less than %v", c.name, roughly(took), refusalFast)
		}
	}
	if n := e.begun() - before; n > 0 {
		t.Errorf("stinttest: the work has begun for %d expired requests", n)
	}

	before = e.begun()
	switch status, err := askHTTP1(asking{target, http.MethodGet, 0, 0}, time.Now().Add(time.Minute)); {
	case err != nil:
		t.Errorf("stinttest: a GET that has time: no answer within %v: %v", refusalLimit, err)
	case status == http.StatusGatewayTimeout:
		t.Errorf("stinttest: a GET that has time is refused as well")
	case e.Work != nil && e.begun() == before:
		t.Errorf("stinttest: a GET that has time does not reach the work (answer %d): nothing is proven", status)
	}
}

func (e Expired) begun() int {
	if e.Work == nil {
		return 0
	}
	return e.Work.count()
}

// An asking is a request with a body that may not be sent whole.
type asking struct {
	url       *url.URL
	method    string
	announced int // length of the body
	sent      int // of it
}

// A sender sends a request with a deadline and returns the status of its answer.
type sender func(asking, time.Time) (int, error)

// refusal returns how long a refusal takes: the shortest time of a few, of which
// more than one is only needed where the machine was busy with something else.
func refusal(send sender, a asking) (took time.Duration, err error) {
	for i := range refusalTries {
		start := time.Now()
		status, err := send(a, start.Add(-10*time.Second))
		if err != nil {
			return 0, fmt.Errorf("no answer within %v: %w", refusalLimit, err)
		}
		if status != http.StatusGatewayTimeout {
			return 0, fmt.Errorf("answer %d, want 504", status)
		}
		if d := time.Since(start); i == 0 || d < took {
			took = d
		}
		if took < refusalFast {
			break
		}
	}
	return took, nil
}

// askHTTP1 speaks HTTP/1.1 by hand: net/http's client cannot be made to hold
// back the rest of a body and yet wait for the answer without a race between the
// two.
func askHTTP1(a asking, deadline time.Time) (status int, err error) {
	conn, err := net.DialTimeout("tcp", a.url.Host, refusalLimit)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(refusalLimit))
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\n%s: %s\r\n", a.method, a.url.RequestURI(), a.url.Host, stint.HeaderDeadline, strconv.FormatInt(deadline.UnixMilli(), 10))
	if a.announced > 0 {
		fmt.Fprintf(&b, "Content-Type: text/plain\r\nContent-Length: %d\r\n", a.announced)
	}
	b.WriteString("\r\n")
	b.WriteString(strings.Repeat("x", a.sent))
	if _, err := io.WriteString(conn, b.String()); err != nil {
		return 0, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: a.method})
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, nil
}

func askHTTP2(a asking, deadline time.Time) (status int, err error) {
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), refusalLimit)
	defer cancel()
	var body io.Reader
	if a.announced > 0 {
		rest, _ := io.Pipe()
		// net/http closes the body to have its reader back from what never comes.
		body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(io.MultiReader(strings.NewReader(strings.Repeat("x", a.sent)), rest), int64(a.announced)), rest}
	}
	req, err := http.NewRequestWithContext(ctx, a.method, a.url.String(), body)
	if err != nil {
		return 0, err
	}
	req.ContentLength = int64(a.announced)
	req.Header.Set(stint.HeaderDeadline, strconv.FormatInt(deadline.UnixMilli(), 10))
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	resp.Body.Close()
	return resp.StatusCode, nil
}
