//go:build unix

package main

import (
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// A proxy passes TCP connections on, and loses some.
type proxy struct {
	l      net.Listener
	target func() string // where the next connection goes; "": nowhere
	cutOne int64         // of so many answers one is cut; 0: none

	cuts       atomic.Int64
	stallUntil atomic.Int64 // unix ns

	mu    sync.Mutex
	conns map[net.Conn]bool // guarded by mu; nil when closed
	wg    sync.WaitGroup
}

func newProxy(cutOne int64, target func() string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{l: l, target: target, cutOne: cutOne, conns: map[net.Conn]bool{}}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) addr() string { return p.l.Addr().String() }

// stall lets nothing through for d.
func (p *proxy) stall(d time.Duration) { p.stallUntil.Store(time.Now().Add(d).UnixNano()) }

func (p *proxy) wait() { time.Sleep(time.Until(time.Unix(0, p.stallUntil.Load()))) }

func (p *proxy) accept() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(c) })
	}
}

// keep reports whether c, which is to be closed with p, may be used.
func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		c.Close()
		return false
	}
	p.conns[c] = true
	return true
}

func (p *proxy) drop(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	c.Close()
}

func (p *proxy) serve(client net.Conn) {
	if !p.keep(client) {
		return
	}
	defer p.drop(client)
	p.wait()
	server, err := net.Dial("tcp", p.target())
	if err != nil {
		return
	}
	if !p.keep(server) {
		return
	}
	defer p.drop(server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.pass(server, client, 0)
		server.Close()
	}()
	p.pass(client, server, p.cutOne)
	client.Close()
	server.Close()
	<-done
}

// pass passes on what from says, until one of them ends, or it is time for a cut.
func (p *proxy) pass(to, from net.Conn, cutOne int64) {
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		p.wait()
		if cutOne > 0 && rand.Int64N(cutOne) == 0 {
			p.cuts.Add(1)
			to.(*net.TCPConn).SetLinger(0) // a reset
			return
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

// close ends the proxy and its connections.
func (p *proxy) close() {
	p.l.Close()
	p.mu.Lock()
	for c := range p.conns {
		c.Close()
	}
	p.conns = nil
	p.mu.Unlock()
	p.wg.Wait()
}
