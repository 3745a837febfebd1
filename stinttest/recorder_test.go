package stinttest

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stinthttp/stint"
)

func TestHopDeadline(t *testing.T) {
	for _, tt := range []struct {
		header []string
		ms     int64
		ok     bool
	}{
		{nil, 0, false},
		{[]string{""}, 0, false},
		{[]string{"1700000000000"}, 1700000000000, true},
		{[]string{"0"}, 0, true},
		{[]string{"9223372036854775807"}, 1<<63 - 1, true},
		{[]string{"9223372036854775808"}, 0, false},
		{[]string{"+5"}, 0, false},
		{[]string{"-5"}, 0, false},
		{[]string{"5ms"}, 0, false},
		{[]string{"0x5"}, 0, false},
		{[]string{"5_0"}, 0, false},
		{[]string{"7, 5", "6"}, 5, true},
		{[]string{"7", "soon"}, 7, true},
		{[]string{"1,2,3,4,5"}, 0, false},
	} {
		if ms, ok := (Hop{Header: tt.header}).Deadline(); ms != tt.ms || ok != tt.ok {
			t.Errorf("%q: %d, %v; want %d, %v", tt.header, ms, ok, tt.ms, tt.ok)
		}
	}
}

func TestRecorderPassesTheWriterOn(t *testing.T) {
	rec := new(Recorder)
	var w http.ResponseWriter = httptest.NewRecorder()
	r := httptest.NewRequest("GET", "/", nil)
	called := false
	rec.Handler("one", http.HandlerFunc(func(w2 http.ResponseWriter, r2 *http.Request) {
		called = w2 == w && r2 == r
	})).ServeHTTP(w, r)
	if !called {
		t.Error("not called with what came")
	}
}

// serving lets a test call hops by name, nested as they please.
type serving struct {
	rec *Recorder
	t   *testing.T
}

func (s serving) call(name, id string, inside func()) {
	r := httptest.NewRequest("GET", "/", nil)
	r.Header.Set("X-Request-Id", id)
	s.rec.Handler(name, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if inside != nil {
			inside()
		}
	})).ServeHTTP(httptest.NewRecorder(), r)
}

// tree prints requests as name←caller.
func tree(rec *Recorder) string {
	var all []string
	for _, hops := range rec.Requests() {
		var one []string
		for _, h := range hops {
			caller := "-"
			if h.Caller >= 0 {
				caller = hops[h.Caller].Name
			}
			one = append(one, h.Name+"←"+caller)
		}
		all = append(all, strings.Join(one, " "))
	}
	return strings.Join(all, "; ")
}

func TestRecorderTellsWhoCalled(t *testing.T) {
	byID := func(r *http.Request) string { return r.Header.Get("X-Request-Id") }
	for _, tt := range []struct {
		name    string
		rec     *Recorder
		calls   func(s serving)
		want    string
		overlap bool
	}{
		{"one after another", new(Recorder), func(s serving) {
			for range 2 {
				s.call("edge", "", func() { s.call("orders", "", func() { s.call("ledger", "", nil) }) })
			}
		}, "edge←- orders←edge ledger←orders; edge←- orders←edge ledger←orders", false},
		{"two calls in turn", new(Recorder), func(s serving) {
			s.call("edge", "", func() { s.call("orders", "", nil); s.call("stock", "", nil) })
		}, "edge←- orders←edge stock←edge", false},
		{"a retry while the first attempt is at work", new(Recorder), func(s serving) {
			s.call("edge", "", func() { s.call("orders", "", func() { s.call("orders", "", nil) }) })
		}, "edge←- orders←edge orders←edge", false},
		{"two at once, named", &Recorder{Caller: map[string]string{"orders": "edge", "stock": "edge"}}, func(s serving) {
			s.call("edge", "", func() { s.call("orders", "", func() { s.call("stock", "", nil) }) })
		}, "edge←- orders←edge stock←edge", false},
		{"a panic", new(Recorder), func(s serving) {
			func() {
				defer func() { recover() }()
				s.call("edge", "", func() { panic("edge") })
			}()
			s.call("edge", "", nil)
		}, "edge←-; edge←-", false},
		{"overlapping", new(Recorder), func(s serving) {
			s.call("edge", "", func() { s.call("orders", "", func() { s.call("edge", "", nil) }) })
		}, "edge←- orders←edge edge←orders", true},
		{"overlapping at the first", new(Recorder), func(s serving) {
			s.call("edge", "", func() { s.call("edge", "", nil) })
		}, "edge←- edge←-", true},
		{"overlapping with IDs", &Recorder{ID: byID}, func(s serving) {
			s.call("edge", "a", func() {
				s.call("edge", "b", func() { s.call("orders", "a", nil); s.call("orders", "b", nil) })
			})
		}, "edge←- orders←edge; edge←- orders←edge", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.calls(serving{tt.rec, t})
			if got := tree(tt.rec); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if got := tt.rec.overlaps(); got != tt.overlap {
				t.Errorf("overlap %v", got)
			}
			if got := tt.rec.serving(); got != "" {
				t.Errorf("%s is still open", got)
			}
		})
	}
}

func TestRecorderSeesHeaderAndContext(t *testing.T) {
	rec := new(Recorder)
	h := rec.Handler("one", http.NotFoundHandler())
	r := httptest.NewRequest("GET", "/", nil)
	h.ServeHTTP(httptest.NewRecorder(), r)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r = r.WithContext(ctx)
	r.Header.Add(stint.HeaderDeadline, "7")
	r.Header.Add(stint.HeaderDeadline, "8")
	h.ServeHTTP(httptest.NewRecorder(), r)
	got := rec.Requests()
	none, both := got[0][0], got[1][0]
	if none.Header != nil || none.Bounded || none.Remaining != 0 {
		t.Errorf("without: %+v", none)
	}
	if fmt.Sprint(both.Header) != "[7 8]" || !both.Bounded || both.Remaining > time.Minute || both.Remaining < 30*time.Second {
		t.Errorf("with: %+v", both)
	}
}

func TestRecorderIsSafeForConcurrentUse(t *testing.T) {
	rec := &Recorder{ID: func(r *http.Request) string { return r.Header.Get("X-Request-Id") }}
	s := serving{rec, t}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			id := fmt.Sprint(i)
			s.call("edge", id, func() { s.call("orders", id, nil); rec.Requests() })
		})
	}
	wg.Wait()
	if got := rec.count(); got != 100 {
		t.Errorf("%d hops", got)
	}
	for _, hops := range rec.Requests() {
		if len(hops) != 2 || hops[1].Caller != 0 {
			t.Errorf("%+v", hops)
		}
	}
}
