package main

import (
	"bytes"
	"math"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func run(t *testing.T, args ...string) (r result) {
	t.Helper()
	c, err := parse(args)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) { r = simulate(t, c) })
	t.Logf("%v: %+v", args, r)
	return r
}

// TestFigures holds the simulation against what the README says of the library.
func TestFigures(t *testing.T) {
	if r := run(t, "-fault", "outage"); r.peak > 110 || r.peak <= 100 || r.failed != 3000 || r.longRun > 101 {
		t.Errorf("outage: %+v, want a peak of at most 110, and about the floor in the long run", r)
	}
	if r := run(t, "-fault", "outage", "-instances", "100"); r.peak < 150 || r.peak > 200 || r.longRun < 110 || r.longRun > 131 {
		t.Errorf("outage, 100 instances: %+v, want a peak of about 200 and 130 in the long run", r)
	}
	if r := run(t, "-fault", "partial"); r.peak > 110 || r.rescued < 100 || r.failed > 5 {
		t.Errorf("partial: %+v, want nearly all of 150 rescued", r)
	}
	strict, peaky := run(t, "-fault", "blip"), run(t, "-fault", "blip", "-peak", "3")
	if strict.failed+strict.rescued != 30 || strict.peak > 110 || peaky.rescued <= strict.rescued || peaky.peak <= 110 || peaky.peak > 130 {
		t.Errorf("blip: %+v, with -peak 3 %+v", strict, peaky)
	}
	plain, throttled := run(t, "-fault", "stall", "-attempts", "1"), run(t, "-fault", "stall", "-throttle")
	if plain.recovered < 35*time.Second || plain.recovered == math.MaxInt64 || throttled.recovered > 25*time.Second || 2*throttled.failed > plain.failed || throttled.throttled == 0 {
		t.Errorf("stall: %+v, with -throttle %+v", plain, throttled)
	}
	if r := run(t, "-fault", "tail", "-hedge", "50ms"); r.rescued < 50 || r.peak > 110 {
		t.Errorf("tail: %+v, want hedges", r)
	}
	if r := run(t, "-fault", "slow"); r.failed != 3000 || r.recovered != 0 {
		t.Errorf("slow: %+v", r)
	}
	if r := run(t, "-fault", "flap"); r.peak > 110 {
		t.Errorf("flap: %+v", r)
	}
}

func TestParse(t *testing.T) {
	for _, args := range [][]string{
		{"-rps", "0"}, {"-rps", "2001"}, {"-instances", "0"}, {"-timeout", "1ms"}, {"-fault", "flood"}, {"x"}, {"-ratio", "2"}, {"-attempts", "-1"},
	} {
		if _, err := parse(args); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}

// TestProgram runs it as a user does: outside of go test, the test inside has to
// make do with what testing.Main gives it.
func TestProgram(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program")
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip(err)
	}
	binary := t.TempDir() + "/whatif"
	if out, err := exec.CommandContext(t.Context(), goTool, "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), binary, "-fault", "blip", "-peak", "3")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil || stderr.Len() > 0 || strings.Contains(stdout.String(), "PASS") {
		t.Errorf("%v\n%s\n%s", err, &stderr, &stdout)
	}
	for _, line := range []string{"most attempts in any second", "in the last 10 s of the fault", "rescued", "recovered after the fault", "these settings"} {
		if !strings.Contains(stdout.String(), line) {
			t.Errorf("no %q in\n%s", line, &stdout)
		}
	}
}
