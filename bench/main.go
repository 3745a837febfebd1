// Command bench measures what stint adds to a request, in process and over
// loopback, beside other libraries that stand at the same place, and prints the
// tables that the README shows. See README.md beside it for what is measured.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

var (
	thorough = run{
		effort: effort{rounds: 21, slice: 20 * time.Millisecond},
		wall:   effort{rounds: 11, slice: 100 * time.Millisecond},
		micro:  "200ms",
	}
	// brief is long enough for exact counts and for a look at the ratios.
	brief = run{
		effort: effort{rounds: 5, slice: 3 * time.Millisecond},
		wall:   effort{rounds: 3, slice: 40 * time.Millisecond},
		micro:  "5ms",
	}
)

func main() {
	short := flag.Bool("short", false, "measure for less than a minute: allocations are exact, times are not")
	write := flag.Bool("write", false, "put the tables into README.md here and in the root directory as well")
	flag.Parse()
	defer endEdge()
	defer endInbound()

	r := thorough
	if *short {
		r = brief
	}
	r.progress = func(name string) { fmt.Fprintln(os.Stderr, "measuring:", name) }
	if err := r.all(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	fmt.Println(machine())
	for _, t := range r.tables {
		fmt.Println()
		t.write(os.Stdout)
	}
	if *write {
		for _, file := range []string{"README.md", "../README.md"} {
			if err := rewrite(file, machine(), r.tables); err != nil {
				fmt.Fprintln(os.Stderr, "bench:", err)
				os.Exit(1)
			}
		}
	}
	for _, e := range r.guard.exceeded {
		fmt.Fprintln(os.Stderr, "bench:", e)
	}
	if len(r.guard.exceeded) > 0 {
		os.Exit(1)
	}
}

// machine says what the figures were taken on.
func machine() string {
	return fmt.Sprintf("%s %s/%s, %d cores, %s.", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), processor())
}

func processor() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "processor unknown"
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if k, v, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return "processor unknown"
}
