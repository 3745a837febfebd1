package interop

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stinthttp/stint"
)

// TestProbePassesProxies has a probe with more to report than a header may hold,
// through proxies as they are by default: nginx takes 4 KiB of header and answers
// 502 in place of what does not fit, which would break what is only looked at.
func TestProbePassesProxies(t *testing.T) {
	eachProxy(t, func(t *testing.T, name string) {
		everybody := func(*http.Request) bool { return true }
		service := strings.Repeat("a-long-name-", 5)
		bottom := startBackend(t, newMiddleware(t, stint.MiddlewareConfig{Service: service, DebugEcho: everybody}).Handler(
			http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
		tr := newTransport(t, stint.Config{})
		middle := startBackend(t, newMiddleware(t, stint.MiddlewareConfig{Service: service, DebugEcho: everybody}).Handler(
			http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				for range 20 {
					resp, _, _, err := roundTrip(t, tr, newRequest(t, r.Context(), "GET", bottom.url(), nil), stint.Override{})
					if err != nil || resp.StatusCode != http.StatusOK {
						t.Errorf("the bottom: %v, %v", resp, err)
						return
					}
				}
				w.Header().Set("Set-Cookie", strings.Repeat("c", len(r.URL.Query().Get("cookie"))))
				io.WriteString(w, "the middle's answer")
			})))
		p := startProxy(t, name, middle.addr, middle.addr)
		for _, path := range []string{"/a/", "/buffered/"} {
			for _, cookie := range []int{0, 1000, 3000, 3700} {
				edge := newMiddleware(t, stint.MiddlewareConfig{Service: "edge", DebugEcho: everybody, Timeout: patience}).Handler(
					http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						req := newRequest(t, r.Context(), "GET", p.url+path+"?cookie="+strings.Repeat("c", cookie), nil)
						resp, text, outcome, err := roundTrip(t, tr, req, stint.Override{})
						if err != nil || resp.StatusCode != http.StatusOK || text != "the middle's answer" || outcome.Attempts != 1 {
							t.Errorf("%s, cookie of %d: %v, %q, %+v, %v", path, cookie, resp, text, outcome, err)
						}
						if n := len(resp.Header.Get("Set-Cookie")); n != cookie {
							t.Errorf("%s: of a cookie of %d came %d", path, cookie, n)
						}
					}))
				server := startBackend(t, edge)
				req := newRequest(t, t.Context(), "GET", server.url(), nil)
				req.Header.Set(stint.HeaderDebugEcho, "1")
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				var list struct {
					Status    int
					Truncated bool
					Hops      []struct {
						Service string
						Status  int
					}
				}
				err = json.NewDecoder(resp.Body).Decode(&list)
				resp.Body.Close()
				if err != nil || list.Status != http.StatusOK || len(list.Hops) < 2 {
					t.Fatalf("%s, cookie of %d: %+v, %v", path, cookie, list, err)
				}
				// A report that has no room is missing, and nothing else is.
				full := cookie <= 3000
				if full != (list.Hops[1].Service == service) || full != list.Truncated || list.Hops[1].Status != http.StatusOK {
					t.Errorf("%s, cookie of %d: %+v", path, cookie, list)
				}
			}
		}
	})
}
