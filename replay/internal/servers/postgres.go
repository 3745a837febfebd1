//go:build unix

package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
)

// Postgres is a PostgreSQL server.
type Postgres struct{ process }

// StartPostgres makes a cluster and starts its server, with settings such as
// "fsync=off".
func StartPostgres(settings ...string) (*Postgres, error) {
	bin, err := postgresBin()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "postgres-*")
	if err != nil {
		return nil, err
	}
	p := &Postgres{process{path: filepath.Join(bin, "postgres"), dir: dir}}
	if err := p.init(bin, settings); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *Postgres) init(bin string, settings []string) (err error) {
	if p.cred, err = unprivileged(); err != nil {
		return err
	}
	if p.cred != nil {
		if err := os.Chown(p.dir, int(p.cred.Uid), int(p.cred.Gid)); err != nil {
			return err
		}
	}
	if p.port, err = freePort(); err != nil {
		return err
	}
	data := filepath.Join(p.dir, "data")
	initdb := exec.Command(filepath.Join(bin, "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	initdb.Dir, initdb.SysProcAttr = p.dir, attributes(p.cred)
	if said, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, said)
	}
	port := strconv.Itoa(p.port)
	p.args = []string{"-D", data, "-p", port, "-k", p.dir, "-c", "listen_addresses=127.0.0.1"}
	for _, s := range settings {
		p.args = append(p.args, "-c", s)
	}
	p.ready = func() error {
		said, err := exec.Command(filepath.Join(bin, "pg_isready"), "-h", "127.0.0.1", "-p", port).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, said)
		}
		return nil
	}
	return p.Start()
}

// postgresBin returns the directory of the server's programs, which Debian keeps
// off the PATH, one for each version.
func postgresBin() (string, error) {
	dirs, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	slices.Sort(dirs)
	slices.Reverse(dirs)
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append([]string{filepath.Dir(path)}, dirs...)
		}
	}
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "postgres")); err == nil {
			return dir, nil
		}
	}
	return "", &MissingError{"postgres", "postgresql"}
}

// unprivileged returns as whom to run the server, which refuses to run as root.
func unprivileged() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("there is no user postgres and no user nobody, and postgres does not run as root")
}

// URL returns where the database is, for pgx.
func (p *Postgres) URL() string {
	return "postgres://postgres@" + p.Addr() + "/postgres?sslmode=disable"
}

// Close ends the server and removes its data.
func (p *Postgres) Close() {
	p.end(syscall.SIGQUIT) // takes its children with it
	os.RemoveAll(p.dir)
}
