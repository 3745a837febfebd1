package stint

import (
	"fmt"
	"io"
	"log"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// quiet swallows what test servers log about clients that misbehave on purpose.
var quiet = log.New(io.Discard, "", 0)

// TestMain fails the run if goroutines of ours are left when all tests are done.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := leftGoroutines(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines are left:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leftGoroutines returns the stacks that have this package in them, after giving
// them time to end.
func leftGoroutines() (left string) {
	for range 50 {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = ""
		for stack := range strings.SplitSeq(string(buf), "\n\n") {
			if strings.Contains(stack, "stinthttp/stint.") && !strings.Contains(stack, "TestMain") {
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
