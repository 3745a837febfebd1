// Whatif shows what settings of stint do to your traffic, before you use them:
// it sends requests through the real transport to a made-up peer that breaks, in
// virtual time, once without retries and once with the settings.
//
//	go run ./examples/whatif
//	go run ./examples/whatif -rps 100 -instances 100 -fault outage
//	go run ./examples/whatif -fault stall -throttle
//
// Minutes of traffic take a second or two. Time is that of testing/synctest,
// which needs a *testing.T; so the simulation runs as a test inside of this
// program.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stinthttp/stint"
)

type config struct {
	rps       int
	instances int
	timeout   time.Duration
	fault     string
	seed      uint64
	stint     stint.Config
}

func main() {
	c, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "whatif:", err)
		os.Exit(2)
	}
	flag.CommandLine.Parse(nil) // our own flags are parsed; the test's stay as they are
	all := func(string, string) (bool, error) { return true, nil }
	testing.Main(all, []testing.InternalTest{{Name: "whatif", F: func(t *testing.T) {
		report(t, c, os.Stdout)
		if !t.Failed() {
			os.Exit(0) // without the word PASS behind the table
		}
	}}}, nil, nil)
}

func parse(args []string) (config, error) {
	var c config
	flags := flag.NewFlagSet("whatif", flag.ContinueOnError)
	flags.IntVar(&c.rps, "rps", 100, "requests a second to the peer, of all instances together, 1 to 2000")
	flags.IntVar(&c.instances, "instances", 1, "how many instances of the client they come from, 1 to 1000; each has a budget of its own")
	flags.DurationVar(&c.timeout, "timeout", time.Second, "deadline of each request, 10ms to 1m")
	flags.StringVar(&c.fault, "fault", "outage", "how the peer breaks: "+faultNames())
	flags.Uint64Var(&c.seed, "seed", 1, "of what is random")
	flags.Float64Var(&c.stint.Budget.Ratio, "ratio", stint.DefaultBudgetRatio, "BudgetConfig.Ratio")
	flags.Float64Var(&c.stint.Budget.MinPerSecond, "floor", stint.DefaultBudgetMinPerSecond, "BudgetConfig.MinPerSecond; negative: none")
	flags.Float64Var(&c.stint.Budget.PeakFactor, "peak", stint.DefaultBudgetPeakFactor, "BudgetConfig.PeakFactor")
	flags.DurationVar(&c.stint.Budget.MaxWait, "wait", stint.DefaultBudgetMaxWait, "BudgetConfig.MaxWait; negative: none")
	flags.IntVar(&c.stint.MaxAttempts, "attempts", stint.DefaultMaxAttempts, "Config.MaxAttempts")
	flags.BoolVar(&c.stint.Throttle, "throttle", false, "Config.Throttle")
	flags.DurationVar(&c.stint.Hedge.Delay, "hedge", 0, "HedgeConfig.Delay; 0: no hedges")
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	switch {
	case flags.NArg() > 0:
		return c, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case c.rps < 1 || c.rps > 2000:
		return c, fmt.Errorf("-rps %d: must be 1 to 2000", c.rps)
	case c.instances < 1 || c.instances > 1000:
		return c, fmt.Errorf("-instances %d: must be 1 to 1000", c.instances)
	case c.timeout < 10*time.Millisecond || c.timeout > time.Minute:
		return c, fmt.Errorf("-timeout %v: must be 10ms to 1m", c.timeout)
	case faults[c.fault] == nil:
		return c, fmt.Errorf("-fault %q: must be one of %s", c.fault, faultNames())
	}
	_, err := stint.NewTransport(c.stint)
	return c, err
}

// report runs the simulation twice and prints what differs.
func report(t *testing.T, c config, out io.Writer) {
	var without, with result
	plain := c
	plain.stint = stint.Config{MaxAttempts: 1}
	synctest.Test(t, func(t *testing.T) { without = simulate(t, plain) })
	synctest.Test(t, func(t *testing.T) { with = simulate(t, c) })

	f := faults[c.fault](c.rps)
	fmt.Fprintf(out, "%d requests a second from %d instances; %s\n\n", c.rps, c.instances, f.text)
	row := func(what, format string, a, b any) {
		fmt.Fprintf(out, "%-52s %14s %14s\n", what, fmt.Sprintf(format, a), fmt.Sprintf(format, b))
	}
	row("", "%s", "no retries", "these settings")
	row("most attempts in any second", "%d", without.peak, with.peak)
	row("attempts a second, in the last 10 s of the fault", "%.1f", without.longRun, with.longRun)
	row("requests that failed, from the fault on", "%d", without.failed, with.failed)
	row("of these held back by Throttle", "%d", without.throttled, with.throttled)
	row("requests that a retry or hedge rescued", "%d", without.rescued, with.rescued)
	row("recovered after the fault", "%s", recovery(without.recovered), recovery(with.recovered))
}

func recovery(d time.Duration) string {
	switch {
	case d == math.MaxInt64:
		return fmt.Sprintf("not in %v", after)
	case d == 0:
		return "at once"
	}
	return d.String()
}
