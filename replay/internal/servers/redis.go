//go:build unix

package servers

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// Redis is a redis-server that loses nothing when it is killed: each write is in
// its log before it is answered.
type Redis struct{ process }

// StartRedis starts one, with options as on its command line.
func StartRedis(options ...string) (*Redis, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, &MissingError{"redis-server", "redis-server"}
	}
	dir, err := os.MkdirTemp("", "redis-*")
	if err != nil {
		return nil, err
	}
	r := &Redis{process{path: path, dir: dir}}
	if r.port, err = freePort(); err == nil {
		r.args = append([]string{
			"--bind", "127.0.0.1", "--port", strconv.Itoa(r.port), "--dir", dir,
			"--save", "", "--appendonly", "yes", "--appendfsync", "always",
			"--repl-diskless-sync-delay", "0",
		}, options...)
		r.ready = r.ping
		err = r.Start()
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// ping asks without a client library, which this module has none of.
func (r *Redis) ping() error {
	c, err := net.DialTimeout("tcp", r.Addr(), time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	b := make([]byte, 5)
	if _, err := c.Read(b); err != nil || string(b) != "+PONG" {
		return fmt.Errorf("PING: %q, %v", b, err)
	}
	return nil
}

// Close ends the server and removes its data.
func (r *Redis) Close() {
	r.Kill()
	os.RemoveAll(r.dir)
}

// StartSentinel starts a sentinel that promotes the replica of the master at addr, by
// itself, when that has not answered for half a second. The master's name is "main".
func StartSentinel(addr string) (*Redis, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, &MissingError{"redis-server", "redis-server"}
	}
	dir, err := os.MkdirTemp("", "sentinel-*")
	if err != nil {
		return nil, err
	}
	r := &Redis{process{path: path, dir: dir}}
	if r.port, err = freePort(); err == nil {
		host, port, _ := net.SplitHostPort(addr)
		conf := fmt.Sprintf("bind 127.0.0.1\nport %d\ndir %s\nsentinel monitor main %s %s 1\n"+
			"sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 10000\n", r.port, dir, host, port)
		file := filepath.Join(dir, "sentinel.conf") // which it writes to
		if err = os.WriteFile(file, []byte(conf), 0o600); err == nil {
			r.args, r.ready = []string{file, "--sentinel"}, r.ping
			err = r.Start()
		}
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}
