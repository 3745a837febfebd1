package stinttest

import (
	"io"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

// refusing refuses expired requests as one does who has not met an unread body:
// right, and too late.
func refusing(next http.Handler, before func(w http.ResponseWriter, r *http.Request)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ms, _ := strconv.ParseInt(r.Header.Get(stint.HeaderDeadline), 10, 64)
		if time.Now().UnixMilli() < ms {
			next.ServeHTTP(w, r)
			return
		}
		if before != nil {
			before(w, r)
		}
		w.WriteHeader(http.StatusGatewayTimeout)
	})
}

func TestExpiredIsRefused(t *testing.T) {
	t.Parallel()
	expired := func(name string) string { return name + ", expired: " }
	const (
		get1   = "GET over HTTP/1.1"
		post1  = "POST over HTTP/1.1"
		small1 = "POST over HTTP/1.1 with a small body half sent"
		large1 = "POST over HTTP/1.1 with a large body half sent"
		get2   = "GET over HTTP/2"
		post2  = "POST over HTTP/2"
		part2  = "POST over HTTP/2 with a body half sent"
	)
	answer200 := func(names ...string) (want []string) {
		for _, n := range names {
			want = append(want, expired(n)+"answer 200, want 504")
		}
		return want
	}
	for _, tt := range []struct {
		name    string
		handler func(work http.Handler) http.Handler
		want    []string
	}{
		{name: "stint", handler: func(work http.Handler) http.Handler {
			return newMiddleware(t, stint.MiddlewareConfig{}).Handler(work)
		}},
		{name: "stint with all its tolerance", handler: func(work http.Handler) http.Handler {
			return newMiddleware(t, stint.MiddlewareConfig{SkewTolerance: time.Minute, Timeout: time.Minute, RejectInvalid: true}).Handler(work)
		}},
		{name: "ignores the header", handler: func(work http.Handler) http.Handler { return work },
			// Where half a body was sent, net/http waits for the rest before it
			// sends the answer.
			want: append(answer200(get1, post1, get2, post2, part2), expired(small1)+"no answer within 2s", expired(large1)+"answer 200, want 504",
				"the work has begun for 7 expired requests")},
		{name: "reports only", handler: func(work http.Handler) http.Handler {
			return newMiddleware(t, stint.MiddlewareConfig{ReportOnly: true}).Handler(work)
		}, want: append(answer200(get1, post1, get2, post2, part2), expired(small1)+"no answer within 2s", expired(large1)+"answer 200, want 504",
			"the work has begun for 7 expired requests")},
		{name: "refuses and leaves the body", handler: func(work http.Handler) http.Handler { return refusing(work, nil) },
			want: []string{expired(small1) + "no answer within 2s"}},
		{name: "refuses when it has read the body", handler: func(work http.Handler) http.Handler {
			return refusing(work, func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
		}, want: []string{expired(small1) + "no answer within 2s", expired(large1) + "no answer within 2s", expired(part2) + "no answer within 2s"}},
		{name: "serves nothing", handler: func(work http.Handler) http.Handler {
			return newMiddleware(t, stint.MiddlewareConfig{}).Handler(http.NotFoundHandler())
		}, want: []string{"does not reach the work (answer 404): nothing is proven"}},
		{name: "refuses slowly", handler: func(work http.Handler) http.Handler {
			slow := refusing(work, func(http.ResponseWriter, *http.Request) { time.Sleep(70 * time.Millisecond) })
			return newMiddleware(t, stint.MiddlewareConfig{TrustHeader: func(r *http.Request) bool { return r.Method == "POST" }}).Handler(slow)
		}, want: []string{get1 + ", expired: refused after ", get2 + ", expired: refused after "}},
		{name: "refuses everything", handler: func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				newMiddleware(t, stint.MiddlewareConfig{}).Handler(http.NotFoundHandler()).ServeHTTP(w, late(r))
			})
		}, want: []string{"a GET that has time is refused as well"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			rec := new(Recorder)
			work := rec.Handler("work", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "done") }))
			got := reports(func(tb TB) { ExpiredIsRefused(tb, tt.handler(work), Expired{Work: rec}) })
			wantReports(t, got, tt.want...)
		})
	}
}

func late(r *http.Request) *http.Request {
	r.Header.Set(stint.HeaderDeadline, "1")
	return r
}

// The work counts, also where the answer is right.
func TestExpiredIsRefused_WorkBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	rec := new(Recorder)
	work := rec.Handler("work", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	h := refusing(work, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength == 0 {
			work.ServeHTTP(w, r)
		}
	})
	h = newMiddleware(t, stint.MiddlewareConfig{TrustHeader: func(r *http.Request) bool { return r.Method == "POST" }}).Handler(h)
	got := reports(func(tb TB) { ExpiredIsRefused(tb, h, Expired{Work: rec}) })
	wantReports(t, got, "the work has begun for ") // how often it is asked depends on the machine
}

func TestExpiredIsRefused_Target(t *testing.T) {
	t.Parallel()
	rec := new(Recorder)
	mux := http.NewServeMux()
	mux.Handle("GET /orders", rec.Handler("work", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "id=1" {
			http.Error(w, r.URL.RawQuery, 400)
		}
	})))
	h := newMiddleware(t, stint.MiddlewareConfig{}).Handler(mux)
	wantReports(t, reports(func(tb TB) { ExpiredIsRefused(tb, h, Expired{Work: rec, Target: "/orders?id=1"}) }))
	wantReports(t, reports(func(tb TB) { ExpiredIsRefused(tb, h, Expired{Work: rec}) }), "does not reach the work (answer 404)")
	wantReports(t, reports(func(tb TB) { ExpiredIsRefused(tb, h, Expired{}) })) // 404 is no refusal, and there is no work to see
	wantReports(t, reports(func(tb TB) { ExpiredIsRefused(tb, h, Expired{Target: "/%zz"}) }), "Expired.Target")
}
