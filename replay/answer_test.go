package replay

import (
	"net/http"
	"reflect"
	"testing"
)

func TestAnswerRoundTrip(t *testing.T) {
	for _, want := range []answer{
		{kind: kindAnswer, fence: 1, status: 200},
		{kind: kindAnswer, fence: 1 << 60, status: 999, length: true, body: []byte("\x00body\xff"),
			header:   []headerOp{{opSet, "A", []string{"", "two"}}, {opAdd, "Vary", []string{"Origin"}}, {op: opDelete, name: "B"}},
			trailers: []headerOp{{opSet, "Trailer:T", []string{"t"}}}},
		{kind: kindNotKept, fence: 7, status: 201},
		{kind: kindUnknown, fence: 7},
	} {
		got, err := decode(want.encode())
		if err != nil {
			t.Fatal(err)
		}
		if len(got.body) == 0 {
			got.body = nil
		}
		if !reflect.DeepEqual(*got, want) {
			t.Errorf("got %+v, want %+v", *got, want)
		}
	}
}

func TestAnswerOfAnotherVersion(t *testing.T) {
	a := answer{kind: kindAnswer, status: 200}
	b := a.encode()
	b[0]++
	if _, err := decode(b); err == nil {
		t.Error("an encoding that nobody knows was read")
	}
	for n := range len(a.encode()) {
		if _, err := decode(a.encode()[:n]); err == nil {
			t.Errorf("%d bytes of an answer were read as one", n)
		}
	}
}

// The bytes come from a store that others may write to.
func FuzzDecode(f *testing.F) {
	for _, a := range []answer{
		{kind: kindAnswer, fence: 1, status: 200, body: []byte("x"), header: []headerOp{{opSet, "A", []string{"b", "c"}}}},
		{kind: kindNotKept, fence: 2, status: 201},
		{kind: kindUnknown, fence: 3},
	} {
		f.Add(a.encode())
	}
	f.Add([]byte{1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 200, 0, 0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decode(b)
		if err != nil {
			return
		}
		again, err := decode(a.encode())
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		if len(a.body) == 0 {
			a.body, again.body = nil, nil
		}
		if !reflect.DeepEqual(a, again) {
			t.Fatalf("got %+v, want %+v", again, a)
		}
	})
}

func TestDifference(t *testing.T) {
	before := http.Header{"Same": {"1"}, "Vary": {"Origin"}, "Changed": {"1"}, "Gone": {"1"}, "Date": {"1"}}
	after := http.Header{"Same": {"1"}, "Vary": {"Origin", "Accept"}, "Changed": {"2"}, "New": {"1", "2"}, "Connection": {"x-hop, close"}, "X-Hop": {"1"}}
	for _, outside := range []http.Header{before, {"Same": {"2"}, "Vary": {"Cookie"}, "Gone": {"2"}}} {
		h := outside.Clone()
		apply(h, difference(before, after))
		want := http.Header{"Same": outside["Same"], "Vary": append(outside.Clone()["Vary"], "Accept"), "Changed": {"2"}, "New": {"1", "2"}}
		if outside["Date"] != nil {
			want["Date"] = outside["Date"]
		}
		if !reflect.DeepEqual(h, want) {
			t.Errorf("got %v, want %v", h, want)
		}
	}
}
