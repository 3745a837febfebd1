//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"os/signal"
	"slices"
	"time"
)

func main() {
	if isServer() {
		return
	}
	store := flag.String("store", "both", "postgres, redis, or both")
	naive := flag.Bool("naive", false, "write the effect on its own, without FinishTx and without a fence, for comparison")
	operations := flag.Int("n", 10_000, "how many operations")
	rate := flag.Float64("rate", 400, "operations a second")
	clients := flag.Int("clients", 64, "how many clients")
	processes := flag.Int("servers", 3, "how many server processes")
	crash := flag.Int64("crash", 200, "of so many runs one kills its process at the worst moment; 0: none")
	flag.Parse()
	stores := []string{*store}
	if *store == "both" {
		stores = []string{"postgres", "redis"}
	}
	if flag.NArg() > 0 || *operations < 1 || *rate <= 0 || *clients < 1 || *processes < 1 || *crash < 0 ||
		slices.ContainsFunc(stores, func(s string) bool { return s != "postgres" && s != "redis" }) {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	well := true
	for _, s := range stores {
		r, err := run(ctx, Options{
			Store: s, Naive: *naive, Operations: *operations, Rate: *rate,
			Clients: *clients, Servers: *processes, CrashOne: *crash,
		})
		if err != nil {
			log.Fatal(err)
		}
		show(os.Stdout, s, r)
		if err := r.Err(); err != nil {
			fmt.Println(err)
			well = false
		}
	}
	if !well {
		os.Exit(1)
	}
}

// show prints the number first.
func show(w io.Writer, store string, r *Report) {
	fmt.Fprintf(w, "%s: %.3f rows per key (%d keys, %d rows, between %d and %d each)\n", store, r.PerKey(), r.Keys, r.Rows, r.Least, r.Most)
	fmt.Fprintf(w, "  answers that are not those of their row: %d\n", r.Differing)
	fmt.Fprintf(w, "  %d calls in %v; %d answers were those of an earlier run, %d operations were asked for again\n", r.Calls, r.Took.Round(time.Second), r.Replayed, r.Repeated)
	fmt.Fprintf(w, "  answers that did not say that they are kept: %d\n", r.Unannounced)
	fmt.Fprintf(w, "  processes: %d killed, %d killed themselves at the worst moment, %d paused beyond their lease\n", r.Killed, r.Crashed, r.Paused)
	fmt.Fprintf(w, "  connections: %d answers cut, %d cut to the store; the store stood still %d times and was killed %d times\n", r.AnswersCut, r.StoreCut, r.Stalls, r.StoreKilled)
	fmt.Fprintf(w, "  writes of runs that had lost their key, refused: %d\n", r.Refused)
	if store == "redis" {
		fmt.Fprintf(w, "  rows written again by a later run, under a greater fence: %d\n", r.TakenOver)
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(w, "  calls that ended with %s: %d\n", kind, r.Errors[kind])
	}
}
