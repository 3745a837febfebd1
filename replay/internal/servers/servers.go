//go:build unix

// Package servers starts Redis and PostgreSQL for tests: on loopback, each on a
// port and with data of its own, whatever else runs on the machine.
package servers

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A MissingError says that a program is not installed.
type MissingError struct{ Program, Package string }

// Error names the Debian package that has the program.
func (e *MissingError) Error() string {
	return fmt.Sprintf("%s is not installed: install the Debian package %s", e.Program, e.Package)
}

// Need ends the test if err is not nil. One that needs a program that is not
// there is skipped, but on CI, where nothing may be skipped in silence, it fails.
func Need(t testing.TB, err error) {
	t.Helper()
	switch missing := (*MissingError)(nil); {
	case err == nil:
	case errors.As(err, &missing) && os.Getenv("CI") == "":
		t.Skip(err)
	default:
		t.Fatal(err)
	}
}

// patience bounds how long a server may take to start or to end.
const patience = 60 * time.Second

// A process is a server that can be killed and started again on the same port
// with the same data.
type process struct {
	path  string
	args  []string
	dir   string // its own, to be removed in the end
	port  int
	cred  *syscall.Credential // nil: as we are
	ready func() error

	cmd    *exec.Cmd     // nil: does not run
	exited chan struct{} // closed when cmd has ended
}

// Addr returns host and port.
func (p *process) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)) }

// freePort returns a port that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// Start starts the server, with the data of before if it has run, and returns
// when it answers.
func (p *process) Start() error {
	if p.cmd != nil {
		return errors.New("it runs already")
	}
	var err error
	// What was killed may still hold what the next one needs, for a moment.
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err = p.start(); err == nil {
			return nil
		}
	}
	return err
}

func (p *process) start() error {
	logPath := filepath.Join(p.dir, "log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, log, log
	cmd.SysProcAttr = attributes(p.cred)
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.exited = cmd, make(chan struct{})
	go func(exited chan struct{}) {
		cmd.Wait()
		close(exited)
	}(p.exited)
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if err = p.ready(); err == nil {
			return nil
		}
		select {
		case <-p.exited:
			p.cmd = nil
			said, _ := os.ReadFile(logPath)
			return fmt.Errorf("%s has ended; its log ends with\n%s", filepath.Base(p.path), said[max(0, len(said)-2000):])
		default:
		}
		if time.Now().After(end) {
			p.Kill()
			return fmt.Errorf("%s does not answer: %w", filepath.Base(p.path), err)
		}
	}
}

// Kill ends the server with SIGKILL.
func (p *process) Kill() { p.end(syscall.SIGKILL) }

func (p *process) end(s syscall.Signal) {
	if p.cmd == nil {
		return
	}
	p.cmd.Process.Signal(s)
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.cmd.Process.Kill()
		<-p.exited
	}
	p.cmd = nil
}

// Pause stops the server where it is, with its connections open. Continue lets it
// go on.
func (p *process) Pause() { p.cmd.Process.Signal(syscall.SIGSTOP) }

// Continue undoes Pause.
func (p *process) Continue() { p.cmd.Process.Signal(syscall.SIGCONT) }
