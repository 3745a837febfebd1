package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

func TestSoak(t *testing.T) {
	if testing.Short() {
		t.Skip("takes four seconds")
	}
	var out bytes.Buffer
	if err := soak(t.Context(), config{duration: 3 * time.Second, seed: 1, workers: 16}, &out); err != nil {
		t.Error(err)
	}
	t.Log("\n" + out.String())
}

// A run that is stopped early is judged like any other.
func TestSoakStopped(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := soak(ctx, config{duration: time.Minute, seed: 2, workers: 4}, io.Discard); err != nil {
		t.Error(err)
	}
}

// kept is what a broken client never lets go of.
var kept []byte

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Each check fails on a client that does what it is there to catch.
func TestSoakFindsWhatIsBroken(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	again := func(r *http.Request) *http.Request {
		out := r.Clone(r.Context())
		if r.GetBody != nil {
			out.Body, _ = r.GetBody()
		}
		return out
	}
	for _, tt := range []struct {
		name  string
		want  string
		wrap  func(http.RoundTripper) http.RoundTripper
		skews []time.Duration
	}{
		{"repeats everything", "are allowed", func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				resp, err := rt.RoundTrip(r)
				if err != nil && r.Context().Err() == nil {
					return rt.RoundTrip(again(r))
				}
				return resp, err
			})
		}, nil},
		{"no budget", "where the budget gives", func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				// As if stint had sent it four times.
				resp, err := rt.RoundTrip(r)
				for range 3 {
					if r.Method != "GET" || err != nil {
						break
					}
					resp.Body.Close()
					out := again(r)
					out.Header.Set(stint.HeaderRetryCount, "1")
					resp, err = http.DefaultTransport.RoundTrip(out)
				}
				return resp, err
			})
		}, nil},
		{"no deadline", "after its deadline", func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				out := again(r)
				out.Header.Set(stint.HeaderDeadline, "1")
				if r.Method == "GET" && !strings.Contains(r.URL.Host, "none") {
					return http.DefaultTransport.RoundTrip(out)
				}
				return rt.RoundTrip(r)
			})
		}, nil},
		{"loses the end of a body", "is not the", func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				resp, err := rt.RoundTrip(r)
				if err == nil {
					resp.Body = struct {
						io.Reader
						io.Closer
					}{io.LimitReader(resp.Body, 200), resp.Body}
				}
				return resp, err
			})
		}, nil},
		{"loses the end of a request", "checksum", func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				if r.ContentLength >= 0 {
					return rt.RoundTrip(r)
				}
				out := r.Clone(r.Context())
				out.Body = struct {
					io.Reader
					io.Closer
				}{io.LimitReader(r.Body, 1), r.Body}
				out.GetBody = nil
				return rt.RoundTrip(out)
			})
		}, nil},
		{"does not say how much time is left", "by a host whose clock", func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				out := again(r)
				out.Header.Set(stint.HeaderDeadline, strconv.FormatInt(time.Now().Add(time.Second).UnixMilli(), 10))
				return http.DefaultTransport.RoundTrip(out)
			})
		}, []time.Duration{time.Hour}},
		{"leaks file descriptors", "file descriptors were open", func(rt http.RoundTripper) http.RoundTripper {
			var once sync.Once
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				once.Do(func() {
					for range 10 {
						if f, err := os.Open(os.DevNull); err == nil {
							t.Cleanup(func() { f.Close() })
						}
					}
				})
				return rt.RoundTrip(r)
			})
		}, nil},
		{"keeps memory", "the heap grew", func(rt http.RoundTripper) http.RoundTripper {
			begun := time.Now()
			var mu sync.Mutex
			t.Cleanup(func() { kept = nil })
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				mu.Lock()
				// The check measures first when a quarter of the second is over.
				if kept == nil && time.Since(begun) > 600*time.Millisecond {
					kept = make([]byte, heapSlack+8<<20)
				}
				mu.Unlock()
				return rt.RoundTrip(r)
			})
		}, nil},
		{"leaks goroutines", "goroutines were there", func(rt http.RoundTripper) http.RoundTripper {
			var once sync.Once
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				once.Do(func() {
					for range 10 {
						go time.Sleep(8 * time.Second)
					}
				})
				return rt.RoundTrip(r)
			})
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Cleanup(http.DefaultTransport.(*http.Transport).CloseIdleConnections)
			err := soak(t.Context(), config{duration: time.Second, grace: time.Second, seed: 3, workers: 4, wrap: tt.wrap, skews: tt.skews}, io.Discard)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want a line with %q", err, tt.want)
			}
		})
	}
}

func TestParse(t *testing.T) {
	c, err := parse([]string{"-for", "2s", "-seed", "9", "-workers", "3"})
	if err != nil || c.duration != 2*time.Second || c.seed != 9 || c.workers != 3 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range [][]string{{"-for", "1ms"}, {"-workers", "0"}, {"-workers", "257"}, {"more"}} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}
