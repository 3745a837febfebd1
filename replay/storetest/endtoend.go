package storetest

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"

	"github.com/stinthttp/stint"
)

// Client and server: the answer is cut off after the effect, the transport retries,
// and the caller gets it. One effect.
func e01(f *fixture) {
	var n, arrivals atomic.Int64
	h := f.outer(0, false).Handler(f.middleware(nil).Handler(counting(&n)))
	s := f.serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if arrivals.Add(1) > 2 {
			h.ServeHTTP(w, r)
			return
		}
		h.ServeHTTP(httptest.NewRecorder(), r) // the effect is there, and the record
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			f.Errorf("Hijack: %v", err)
			return
		}
		conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
	}))
	tr, err := stint.NewTransport(stint.Config{Keys: stint.KeysHonoured})
	if err != nil {
		f.Fatal(err)
	}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Post(s.URL, "text/plain", strings.NewReader("body"))
	if err != nil {
		f.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	g := got{resp.StatusCode, resp.Header, string(body), err}
	f.want(g, 201, "run 1")
	f.replayed(g, true)
	f.runs(&n, 1)
	if a := arrivals.Load(); a != 3 {
		f.Errorf("%d arrivals, want 3", a)
	}
}
