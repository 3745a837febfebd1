package stinttest

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestMain fails the run if goroutines of ours are left when all tests are done.
func TestMain(m *testing.M) {
	// The parallel ones wait for most of their time, and not for a processor.
	flag.Set("test.parallel", "16")
	code := m.Run()
	if code == 0 {
		if left := leftGoroutines(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines are left:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

func leftGoroutines() (left string) {
	for range 50 {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = ""
		for stack := range strings.SplitSeq(string(buf), "\n\n") {
			if strings.Contains(stack, "stinttest.") && !strings.Contains(stack, "TestMain") {
				left += stack + "\n\n"
			}
		}
		if left == "" {
			return ""
		}
		time.Sleep(100 * time.Millisecond)
	}
	return left
}

// A fakeTB notes what a check reports. Its Fatalf returns, which TB allows.
type fakeTB struct {
	mu       sync.Mutex
	reports  []string
	fatal    bool
	cleanups []func()
}

func (f *fakeTB) Helper() {}

func (f *fakeTB) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fatal {
		format = "after Fatalf: " + format
	}
	f.reports = append(f.reports, fmt.Sprintf(format, args...))
}

func (f *fakeTB) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	f.fatal = true
}

func (f *fakeTB) Cleanup(c func()) { f.cleanups = append(f.cleanups, c) }

// reports runs a check and returns what it had to say.
func reports(check func(TB)) []string {
	f := new(fakeTB)
	check(f)
	for _, c := range slices.Backward(f.cleanups) {
		c()
	}
	return f.reports
}

// wantReports fails unless one of the reports contains each of these texts, and
// there are no others.
func wantReports(t *testing.T, got []string, want ...string) {
	t.Helper()
	rest := slices.Clone(got)
	for _, w := range want {
		i := slices.IndexFunc(rest, func(r string) bool { return strings.Contains(r, w) })
		if i < 0 {
			t.Errorf("no report %q", w)
			continue
		}
		rest = slices.Delete(rest, i, i+1)
	}
	for _, r := range rest {
		t.Errorf("unexpected report %q", r)
	}
	if t.Failed() {
		t.Logf("reports:\n%s", strings.Join(got, "\n"))
	}
}
