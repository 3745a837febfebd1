// Storm breaks the bottom of a chain of four HTTP services and measures what
// the services above do to it: first with three plain attempts per hop, then
// with stint. It takes about half a minute, needs nothing but Go, and talks to
// the loopback interface alone.
//
//	go run ./examples/storm
//	go run ./examples/storm -fault stall
//	go run ./examples/storm -fault stall -limit
//	go run ./examples/storm -fault tail -hedge
//	go run ./examples/storm -clients 100
//	go run ./examples/storm -fault stall -throttle -headroom 1.1 -after 45s
//	go run ./examples/storm -serve
//
// It prints a table, writes the curves of both runs to storm.html, and exits
// with 1 if the chain with stint sent more than it promises.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stinthttp/stint"
)

// serveRPS is the light load under which -serve keeps the chain.
const serveRPS = 10

type config struct {
	fault             faultKind
	rps               int
	warm, hold, after time.Duration
	out               string
	serve             bool
	addr              string
	clients           int
	limit             bool
	throttle          bool
	hedge             bool
	headroom          float64 // what the database can take, as a multiple of what users ask
}

// serverSide reports whether the runs to compare are two with stint, without and
// with what the database does for itself.
func (c config) serverSide() bool { return c.limit || c.clients > 1 }

// bothStint reports whether the runs to compare are two with stint.
func (c config) bothStint() bool { return c.serverSide() || c.throttle || c.hedge }

const unguardedName = "unguarded"

// guards returns the two ways to run, the second of which makes the promise.
func (c config) guards() (names [2]string, guards [2]guard, err error) {
	g, err := newGuarded()
	if err != nil {
		return names, guards, err
	}
	g.clients = c.clients
	with := g
	with.limited, with.capped = c.limit, c.clients > 1
	with.config.Throttle, with.hedged = c.throttle, c.hedge
	if !c.bothStint() {
		return [2]string{unguardedName, "with stint"}, [2]guard{unguarded{}, with}, nil
	}
	name := "with Limit"
	switch {
	case c.throttle && c.serverSide(), c.hedge && (c.throttle || c.serverSide()):
		name = "with all"
	case c.hedge:
		name = "with Hedge"
	case c.throttle:
		name = "with Throttle"
	case c.limit && c.clients > 1:
		name = "with both"
	case c.clients > 1:
		name = "with a cap"
	}
	return [2]string{"with stint", name}, [2]guard{g, with}, nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait for anything
	err := parseAndRun(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.As(err, new(usageError)):
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "storm:", err)
		os.Exit(1)
	}
}

// A usageError is a command line that cannot be used.
type usageError struct{ error }

func parseAndRun(ctx context.Context, args []string, out io.Writer) error {
	c, err := parse(args)
	if err != nil {
		return err
	}
	return run(ctx, c, out)
}

func parse(args []string) (config, error) {
	c := config{fault: faultOutage}
	flags := flag.NewFlagSet("storm", flag.ContinueOnError)
	kinds := "how the database breaks (default outage; none goes straight to -serve):"
	for _, k := range faultKinds[1:] {
		kinds += fmt.Sprintf("\n%-8s %s", k, faultTexts[k])
	}
	flags.Func("fault", kinds, func(s string) (err error) {
		c.fault, err = parseFault(s)
		return err
	})
	flags.IntVar(&c.rps, "rps", 100, "requests a second by users, 10 to 500")
	flags.DurationVar(&c.warm, "warm", 4*time.Second, "how long all is well first")
	flags.DurationVar(&c.hold, "hold", 5*time.Second, "how long the fault lasts")
	flags.DurationVar(&c.after, "after", 6*time.Second, "how long to watch the recovery")
	flags.StringVar(&c.out, "out", "storm.html", "where to write the chart")
	flags.BoolVar(&c.serve, "serve", false, "afterwards keep the chain with stint up, with /metrics, until Ctrl-C")
	flags.StringVar(&c.addr, "addr", "127.0.0.1:8080", "the edge's address under -serve, on the loopback interface")
	flags.BoolVar(&c.throttle, "throttle", false, "compare stint without and with Config.Throttle; see it in a stall, with -headroom 1.1 -after 45s")
	flags.BoolVar(&c.hedge, "hedge", false, "compare stint without and with Config.Hedge in the ledger; see it with -fault tail")
	flags.Float64Var(&c.headroom, "headroom", 2.5, "what the database can take, as a multiple of -rps, 1.05 to 10")
	flags.BoolVar(&c.limit, "limit", false, "compare stint without and with a Limit at the database; see it in a stall")
	flags.IntVar(&c.clients, "clients", 1, "how many callers of the database the requests are spread over, 1 to 500; above 1,\ncompare stint without and with a RetryBudget at the database; see it in an outage")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return config{}, err
		}
		return config{}, usageError{errors.New("see -help")} // the rest is printed already
	}
	bad := func(format string, a ...any) (config, error) { return config{}, usageError{fmt.Errorf(format, a...)} }
	if flags.NArg() > 0 {
		return bad("unexpected argument %q", flags.Arg(0))
	}
	if c.rps < 10 || c.rps > 500 {
		return bad("-rps %d: must be 10 to 500", c.rps)
	}
	if c.clients < 1 || c.clients > 500 {
		return bad("-clients %d: must be 1 to 500", c.clients)
	}
	if !(c.headroom >= 1.05 && c.headroom <= 10) {
		return bad("-headroom %v: must be 1.05 to 10", c.headroom)
	}
	for _, d := range []struct {
		name string
		d    time.Duration
	}{{"warm", c.warm}, {"hold", c.hold}, {"after", c.after}} {
		if d.d < 2*time.Second || d.d > time.Minute {
			return bad("-%s %v: must be 2s to 1m", d.name, d.d)
		}
	}
	if c.fault == faultNone && !c.serve {
		return bad("-fault none is for -serve")
	}
	// The edge has a switch that breaks the database.
	if addr, err := net.ResolveTCPAddr("tcp", c.addr); err != nil || !addr.IP.IsLoopback() {
		return bad("-addr %s: must be a port of a loopback address, such as 127.0.0.1:8080", c.addr)
	}
	return c, nil
}

// run is the whole demonstration.
func run(ctx context.Context, c config, out io.Writer) error {
	var edge net.Listener
	if c.serve { // first of all: better to fail now than in half a minute
		var err error
		if edge, err = net.Listen("tcp", c.addr); err != nil {
			return err
		}
		defer edge.Close()
	}

	var failed error
	if c.fault != faultNone {
		names, guards, err := c.guards()
		if err != nil {
			return err
		}
		plain, err := storm(ctx, c, names[0], guards[0], out)
		if err != nil {
			return err
		}
		stinted, err := storm(ctx, c, names[1], guards[1], out)
		if err != nil {
			return err
		}
		r := newReport(c, plain, stinted)
		fmt.Fprintf(out, "\n%s\n", r.table())
		if err := r.writeHTML(c.out); err != nil {
			return err
		}
		fmt.Fprintf(out, "The curves of both runs: %s\n\n", c.out)
		failed = r.printChecks(out)
	}
	if c.serve {
		if err := serve(ctx, c, edge, out); err != nil {
			return err
		}
	}
	return failed
}

// storm makes one run: a chain, its users, and the fault in the middle.
func storm(ctx context.Context, c config, name string, g guard, out io.Writer) (summary, error) {
	rec := newRecord()
	chain, err := startChain(chainConfig{guard: g, capacity: c.headroom * float64(c.rps), record: rec, inside: c.serverSide()})
	if err != nil {
		return summary{}, err
	}
	defer chain.stop()

	length := c.warm + c.hold + c.after
	fmt.Fprintf(out, "%s: %d requests/s; after %s the database breaks for %s (%s: %s)\n",
		name, c.rps, seconds(c.warm), seconds(c.hold), c.fault, faultTexts[c.fault])
	users := &load{url: chain.url, rps: c.rps, record: rec}
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		users.run(ctx, length)
	}()
	mended := make(chan time.Duration, 1)
	go func() {
		// Requests of the cohort meet the fault and nothing else, so the cohort
		// closes early enough for the last of them to be answered.
		guard := min(timeout, c.hold/3)
		pause(ctx, c.warm)
		chain.database.breakDown(c.fault)
		users.cohort.Store(true)
		pause(ctx, c.hold-guard)
		users.cohort.Store(false)
		pause(ctx, guard)
		chain.database.breakDown(faultNone)
		mended <- time.Since(rec.start)
	}()
	for i := range int(length / time.Second) {
		// A little later than the second's end, when its numbers are complete.
		if !pause(ctx, time.Until(rec.start.Add(time.Duration(i+1)*time.Second+20*time.Millisecond))) {
			break
		}
		edge, database, bad := rec.second(i)
		fmt.Fprintf(out, "%4d s  %-8s edge %5d/s   database %5d/s   errors %4d/s\n",
			i+1, phase(c, time.Duration(i)*time.Second), edge, database, bad)
	}
	<-loaded
	if ctx.Err() != nil {
		return summary{}, errors.New("interrupted")
	}
	return rec.summarise(name, <-mended, length), nil
}

// phase names the second of a run that begins at t.
func phase(c config, t time.Duration) string {
	switch {
	case t < c.warm:
		return "healthy"
	case t < c.warm+c.hold:
		return string(c.fault)
	default:
		return "mended"
	}
}

// serve keeps a chain with stint up for somebody to look at and to break.
func serve(ctx context.Context, c config, edge net.Listener, out io.Writer) error {
	g, err := newGuarded()
	if err != nil {
		return err
	}
	g.clients, g.limited, g.capped = c.clients, c.limit, c.clients > 1
	registry := prometheus.NewRegistry()
	if err := registry.Register(g.metrics); err != nil {
		return err
	}
	// Everybody may probe: the addresses are those of this machine alone.
	g.debugEcho = func(*http.Request) bool { return true }
	hop := &switchedHop{guarded: g}
	chain, err := startChain(chainConfig{
		guard:    hop,
		capacity: c.headroom * float64(c.rps),
		edge:     edge,
		outside: func(d *database, edge http.Handler) http.Handler {
			mux := http.NewServeMux()
			mux.Handle("/{$}", edge)
			mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
			for tier, h := range g.halves {
				mux.Handle("GET /debug/stint/"+tiers[tier], stint.DebugHandler(h.transport, h.middleware))
			}
			// A handler is for one transport: the ledger's other one has its own.
			mux.Handle("GET /debug/stint/ledger/lavish", stint.DebugHandler(hop.lavish, nil))
			mux.HandleFunc("POST /fault", func(w http.ResponseWriter, r *http.Request) {
				k, err := parseFault(r.FormValue("kind"))
				if err != nil {
					http.Error(w, err.Error(), http.StatusBadRequest)
					return
				}
				d.breakDown(k)
				fmt.Fprintln(w, "the database's fault is now:", k)
			})
			mux.HandleFunc("POST /hop", func(w http.ResponseWriter, r *http.Request) {
				k := hopKind(r.FormValue("kind"))
				if err := hop.set(k); err != nil {
					http.Error(w, err.Error(), http.StatusBadRequest)
					return
				}
				fmt.Fprintln(w, "the ledger now calls the database:", k)
			})
			return mux
		},
	})
	if err != nil {
		return err
	}
	defer chain.stop()
	// No comments behind the commands: zsh would pass them to curl.
	fmt.Fprintf(out, `
The chain with stint is up under %[2]d requests/s, until Ctrl-C. From another terminal:

a request, and one that was due in January 1970, which is a 504:
  curl -i %[1]s
  curl -i -H 'X-Request-Deadline: 1' %[1]s
where a deadline of two seconds goes, by the account of all four services:
  curl -s -H "X-Request-Deadline: $(($(date +%%s%%3N) + 2000))" -H 'X-Debug-Echo-Deadline: 1' %[1]s | jq
the metrics of all four services:
  curl -s %[1]smetrics
what the ledger's stint knows, as JSON; a browser gets a page (edge, orders, ledger, database):
  curl -s %[1]sdebug/stint/ledger
break the database (outage, slow, flap, stall, partial), and mend it:
  curl -X POST '%[1]sfault?kind=outage'
  curl -X POST '%[1]sfault?kind=none'
make the ledger's calls wrong (lavish, forgetful, plain), and mend them:
  curl -X POST '%[1]shop?kind=lavish'
  curl -X POST '%[1]shop?kind=guarded'
`, chain.url, serveRPS)
	(&load{url: chain.url, rps: serveRPS}).run(ctx, 0)
	return nil
}
