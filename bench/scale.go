package main

import (
	"context"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/stinthttp/stint"
)

// heap returns what is alive, after two collections: the first one empties the
// pools only halfway.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// peersMemory returns what a Transport and its Metrics hold for so many peers,
// each of which has answered, failed and been refused retries, as often as
// there is room to remember refusals.
func peersMemory(peers int) int64 {
	status := http.StatusOK
	base := roundTripper(func(r *http.Request) (*http.Response, error) { return answer(r, status), nil })
	l := inProcess(http.MethodGet, edgeContext, 1)
	before := heap()
	rt := newStint(stint.Config{Base: base, Metrics: newMetrics(), Throttle: true, MaxPeers: peers, Budget: stint.BudgetConfig{MinPerSecond: -1}})
	for _, status = range []int{http.StatusOK, http.StatusServiceUnavailable} {
		for host := range peers {
			for range 32 {
				exchange(rt, l.to(host))
			}
		}
	}
	grown := heap() - before
	runtime.KeepAlive(rt)
	return grown
}

// heapAfter returns by how much the heap has grown after so many requests, once
// the first thousand have made what is made once.
func heapAfter(requests int) int64 {
	rt := everything(noop())
	s := inProcess(http.MethodGet, edgeContext, 1).through("", rt)
	s.run(1000)
	before := heap()
	s.run(requests)
	grown := heap() - before
	runtime.KeepAlive(rt)
	return grown
}

// A growth is one thing that could make requests dearer, small and large.
type growth struct {
	name  string
	small cost
	large cost
}

// growths measures what a request adds where there is little of something, and
// where there is much. Each has a base of its own, which sends the same
// requests: a thousand URLs are dearer than one for the bare base too, since they
// do not fit the processor's caches.
func growths(e effort) []growth {
	l := inProcess(http.MethodGet, edgeContext, 1)
	one := func(base subject, with subject) cost { return measure(e, base, with)[0] }
	peers := func(n int) cost {
		with := l.around(nameMetrics, everything(noop()), n)
		with.run(n) // the first contacts are another row
		return one(l.around("bare", noop(), n), with)
	}
	window := func(d time.Duration) cost {
		rt := newStint(stint.Config{
			Base: noop(), Metrics: newMetrics(),
			Budget: stint.BudgetConfig{Window: d}, Admission: stint.AdmissionConfig{Window: d},
		})
		return one(l.through("bare", noop()), l.through(nameMetrics, rt))
	}
	flight := func(n int) cost {
		base, release := crowded()
		defer release()
		rt := everything(base)
		crowd(rt, n)
		return one(l.through("bare", base), l.through(nameMetrics, rt))
	}
	return []growth{
		{"1 or 1,000 peers", peers(1), peers(1000)},
		{"windows of 10 s or 10 min", window(10 * time.Second), window(10 * time.Minute)},
		{"10 or 10,000 requests in flight", flight(10), flight(10_000)},
	}
}

// crowdKey marks the contexts of requests that stay in flight.
type crowdKey struct{}

// crowded returns a base that answers at once, except to requests of a crowd:
// these it keeps until release.
func crowded() (base http.RoundTripper, release func()) {
	held, all := make(chan struct{}), new(sync.WaitGroup)
	base = roundTripper(func(r *http.Request) (*http.Response, error) {
		if arrived, ok := r.Context().Value(crowdKey{}).(*sync.WaitGroup); ok {
			all.Add(1)
			defer all.Done()
			arrived.Done()
			<-held
		}
		return answer(r, http.StatusOK), nil
	})
	return base, func() { close(held); all.Wait() }
}

// crowd puts n requests in flight and returns when all of them are.
func crowd(rt http.RoundTripper, n int) {
	var arrived sync.WaitGroup
	arrived.Add(n)
	l := inProcess(http.MethodGet, context.WithValue(edgeContext, crowdKey{}, &arrived), 1)
	for range n {
		go exchange(rt, l.request())
	}
	arrived.Wait()
}
