package stint

import "net/http"

// route lets Config.Elsewhere choose the host of an attempt, in a URL of the
// attempt's own.
func (c *call) route(a *attempt, failed string) {
	u := *c.req.URL
	a.req.URL = &u
	if a.req.Host == "" {
		a.req.Host = u.Host // what the peer is called does not change with the host
	}
	a.routed = true
	a.done = c.t.cfg.Elsewhere(&a.req, failed)
	if a.req.URL != nil {
		a.host = a.req.URL.Host
	}
}

// unroute hides from the caller, and from redirects, that the answer came from
// another host than the request names.
func (c *call) unroute(r *result) {
	if r.resp == nil {
		return
	}
	// A copy: the base may still be reading its own.
	of := *r.resp.Request
	of.URL, of.Host = c.req.URL, c.req.Host
	r.resp.Request = &of
}

// report tells Config.Elsewhere how an attempt ended.
func (a *attempt) report(ok bool) {
	if a.done != nil {
		a.done(ok)
	}
}

// freshConns returns a copy of base that uses each connection once.
func freshConns(base *http.Transport) *http.Transport {
	fresh := base.Clone()
	fresh.DisableKeepAlives = true
	return fresh
}
