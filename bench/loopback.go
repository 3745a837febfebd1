package main

import (
	"context"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// A wire is a server on loopback and how it is spoken to. Its server and its
// clients share the process, and so the CPU time.
type wire struct {
	name   string
	method string
	http2  bool // without TLS, by prior knowledge
	body   int  // bytes of the request
}

var wires = []wire{
	{"GET, HTTP/1.1", http.MethodGet, false, 0},
	{"GET, HTTP/2", http.MethodGet, true, 0},
	{"POST 32 KiB, HTTP/1.1", http.MethodPost, false, 32 << 10},
	{"POST 32 KiB, HTTP/2", http.MethodPost, true, 32 << 10},
}

// open starts the server. Every answer is as long as a small JSON document.
func (w wire) open() (target *url.URL, stop func()) {
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	answer := make([]byte, 512)
	s := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Write(answer)
		}),
		Protocols: w.protocols(),
		ErrorLog:  log.New(io.Discard, "", 0), // clients that leave when it ends
	}
	go s.Serve(listener)
	return &url.URL{Scheme: "http", Host: listener.Addr().String(), Path: "/accounts/17"}, func() { s.Close() }
}

func (w wire) protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(!w.http2)
	p.SetUnencryptedHTTP2(w.http2)
	return p
}

// base returns net/http's Transport with kept-alive connections.
func (w wire) base() *http.Transport {
	return &http.Transport{Protocols: w.protocols(), MaxIdleConnsPerHost: 256, DisableCompression: true}
}

// load is what is sent, by so many goroutines.
func (w wire) load(target *url.URL, ctx context.Context, goroutines int) load {
	l := load{method: w.method, ctx: ctx, goroutines: goroutines, target: target}
	if w.body > 0 {
		l.body = make([]byte, w.body)
	}
	return l
}

// A trip is what a caller sees of a subject over loopback, and of the bare base
// in the slices around.
type trip struct {
	name                 string
	throughput, baseline []rate    // at saturation, by round
	latency, baseLatency []float64 // nanoseconds, of all requests at the fixed rate
}

// A rate is what a slice at saturation shows. Throughput is what counts, and the
// CPU time is what it comes to where nothing else runs on the machine.
type rate struct {
	perSecond float64
	cpu       float64 // nanoseconds of a request, its server included
}

func (r rate) mean(s rate) rate {
	return rate{(r.perSecond + s.perSecond) / 2, (r.cpu + s.cpu) / 2}
}

func perSecond(r rate) float64  { return r.perSecond }
func perRequest(r rate) float64 { return r.cpu }

func each(rates []rate, f func(rate) float64) []float64 {
	out := make([]float64, len(rates))
	for i, r := range rates {
		out[i] = f(r)
	}
	return out
}

const (
	fixedRate = 1000 // requests a second, far below saturation
	saturated = 16   // goroutines that send without a pause
)

// roundTrips measures all libraries over one wire, in wall clock time: that is
// what a caller waits for. On a shared machine only the ratios mean something.
func roundTrips(e effort, w wire) []trip {
	target, stop := w.open()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	pool := w.base() // one for all: connections are there when a slice begins
	defer pool.CloseIdleConnections()
	l := w.load(target, ctx, saturated)

	trips := make([]trip, len(libraries))
	clients := make([]http.RoundTripper, len(libraries))
	order := make([]int, len(libraries))
	for i, lib := range libraries {
		trips[i].name, clients[i], order[i] = lib.name, lib.wrap(pool), i
		l.saturate(clients[i], e.slice/4) // connections, pools and tables
	}
	for range e.rounds {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			t := &trips[i]
			before := l.saturate(pool, e.slice/2)
			with := l.saturate(clients[i], e.slice)
			after := l.saturate(pool, e.slice/2)
			t.throughput = append(t.throughput, with)
			t.baseline = append(t.baseline, before.mean(after))

			t.baseLatency = append(t.baseLatency, l.paced(pool, e.slice/2)...)
			t.latency = append(t.latency, l.paced(clients[i], e.slice)...)
			t.baseLatency = append(t.baseLatency, l.paced(pool, e.slice/2)...)
		}
	}
	return trips
}

// saturate sends as fast as it goes for that long.
func (l load) saturate(rt http.RoundTripper, length time.Duration) rate {
	counts := make([]int, l.goroutines)
	begin, spent := time.Now(), cpuTime()
	var wg sync.WaitGroup
	for i := range counts {
		wg.Go(func() {
			for time.Since(begin) < length {
				l.must(rt)
				counts[i]++
			}
		})
	}
	wg.Wait()
	n := 0
	for _, c := range counts {
		n += c
	}
	return rate{float64(n) / time.Since(begin).Seconds(), float64(cpuTime()-spent) / float64(n)}
}

// paced sends at the fixed rate, whether earlier requests have ended or not, and
// returns how long each took, from the moment that it was handed to a goroutine
// until its body was read.
func (l load) paced(rt http.RoundTripper, length time.Duration) []float64 {
	n := max(1, int(length.Seconds()*fixedRate))
	took := make([]float64, n)
	begin := time.Now()
	var wg sync.WaitGroup
	for i := range took {
		time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / fixedRate)))
		sent := time.Now()
		wg.Go(func() {
			l.must(rt)
			took[i] = float64(time.Since(sent))
		})
	}
	wg.Wait()
	return took
}

// must panics where a request fails: a failure is quick, and would look good.
func (l load) must(rt http.RoundTripper) {
	resp, err := rt.RoundTrip(l.request())
	if err != nil {
		panic(err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		panic(err)
	}
	if resp.StatusCode != http.StatusOK {
		panic(resp.Status)
	}
	resp.Body.Close()
}
