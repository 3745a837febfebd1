package stint

import "net/http"

// A route is what Config.Elsewhere chose for an attempt.
type route struct {
	host string
	done func(ok bool) // nil: nobody wants to know
}

// host returns where the attempt went, if Config.Elsewhere was asked. a may be nil.
func (a *attempt) host() string {
	if a == nil || a.route == nil {
		return ""
	}
	return a.route.host
}

// reroute lets Config.Elsewhere choose the host of an attempt, in a URL of the
// attempt's own.
func (c *call) reroute(a *attempt, failed string) {
	u := *c.req.URL
	a.req.URL = &u
	if a.req.Host == "" {
		a.req.Host = u.Host // what the peer is called does not change with the host
	}
	a.route = new(route)
	a.route.done = c.t.cfg.Elsewhere(&a.req, failed)
	if a.req.URL != nil {
		a.route.host = a.req.URL.Host
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
	if a.route != nil && a.route.done != nil {
		a.route.done(ok)
	}
}

// freshConns returns a copy of base that uses each connection once.
func freshConns(base *http.Transport) *http.Transport {
	fresh := base.Clone()
	fresh.DisableKeepAlives = true
	return fresh
}
