package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// The decisions are unexported: benchmarks of the root package measure them, by
// one goroutine and by eight at the same budget, histogram or peer.
var decisions = []struct {
	name             string
	serial, parallel string
	bound            float64 // nanoseconds
}{
	{"budget: may there be a retry?", "Budget/ask", "Budget/ask/parallel", 60},
	{"budget: that, and taking the turn", "BudgetRetry/serial", "BudgetRetry/parallel", 120},
	{"histogram: record a latency", "HistogramRecord", "HistogramRecordParallel", 20},
	{"histogram: read p99 (the eight also record)", "HistogramQuantile/Cached", "HistogramQuantileParallel", 200},
	{"peer look-up", "PeerLookup/1", "PeerLookupParallel", 30},
}

type microResult struct {
	ns     float64
	allocs int
}

var benchLine = regexp.MustCompile(`(?m)^Benchmark(\S+)\s+\d+\s+([\d.]+) ns/op.*\s(\d+) allocs/op`)

// microBenchmarks runs them and returns each by its name, with the number of
// goroutines behind it.
func microBenchmarks(length string) (map[string]microResult, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/stinthttp/stint").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	results := make(map[string]microResult)
	for _, goroutines := range []string{"1", "8"} {
		cmd := exec.Command("go", "test", "-run", "^$", "-bench", "^Benchmark(Budget|BudgetRetry|PeerLookup|PeerLookupParallel|Histogram.*)$",
			"-benchmem", "-benchtime", length, "-cpu", goroutines, "-timeout", "5m", ".")
		cmd.Dir = strings.TrimSpace(string(dir))
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, os.Stderr
		if err := cmd.Run(); err != nil {
			return nil, fmt.Errorf("go test -bench: %w\n%s", err, out.String())
		}
		for _, m := range benchLine.FindAllStringSubmatch(out.String(), -1) {
			ns, err := strconv.ParseFloat(m[2], 64)
			if err != nil {
				return nil, err
			}
			n, err := strconv.Atoi(m[3])
			if err != nil {
				return nil, err
			}
			// go test writes the number of goroutines behind the name, unless it is 1.
			results[strings.TrimSuffix(m[1], "-"+goroutines)+"-"+goroutines] = microResult{ns, n}
		}
	}
	return results, nil
}
