//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint"
	"github.com/stinthttp/stint/replay/internal/servers"
	"github.com/stinthttp/stint/replay/pgstore"
)

// Options say what to do.
type Options struct {
	Store      string // postgres or redis
	Naive      bool   // the effect on its own, for comparison
	Operations int
	Rate       float64 // of operations a second
	Clients    int
	Servers    int
	CrashOne   int64 // of so many runs one ends its process at the worst moment
}

// A Report says what came out.
type Report struct {
	Keys, Rows, Least, Most int            // of rows for one key
	Differing               int            // answers that are not their row's
	Calls, Replayed         int            // by clients; and how many answers were those of an earlier run
	Repeated                int            // operations asked for again after their answer
	Unannounced             int            // answers without the key, which say that they are not kept
	Errors                  map[string]int // calls that ended without the answer, by kind
	Untyped                 []string       // errors that are of no known type
	Refused                 int            // writes of runs that had lost their key
	TakenOver               int            // rows that a later run of the same key has written again (redis)
	Killed, Crashed, Paused int            // server processes
	AnswersCut, StoreCut    int64          // connections
	Stalls, StoreKilled     int
	Took                    time.Duration
}

// PerKey is the number that counts.
func (r *Report) PerKey() float64 { return float64(r.Rows) / float64(max(r.Keys, 1)) }

// Err returns what is wrong.
func (r *Report) Err() error {
	var errs []error
	if r.Rows != r.Keys || r.Least != 1 || r.Most != 1 {
		errs = append(errs, fmt.Errorf("%d rows for %d keys, between %d and %d each", r.Rows, r.Keys, r.Least, r.Most))
	}
	if r.Differing > 0 {
		errs = append(errs, fmt.Errorf("%d answers are not those of their row", r.Differing))
	}
	if len(r.Untyped) > 0 {
		errs = append(errs, fmt.Errorf("errors that are of no known type: %q", r.Untyped))
	}
	return errors.Join(errs...)
}

// A fire is one run.
type fire struct {
	Options
	pool   *pgxpool.Pool
	pg     *servers.Postgres
	redis  *servers.Redis
	db     *proxy // to PostgreSQL
	store  *proxy // to the store
	front  *proxy // to the servers
	slots  []*slot
	report Report

	mu     sync.Mutex
	tokens []string // guarded by mu, as is report; the answers, by operation
}

// run does all of it.
func run(ctx context.Context, o Options) (_ *Report, err error) {
	f := &fire{Options: o, tokens: make([]string, o.Operations)}
	f.report.Errors = map[string]int{}
	defer f.close()
	if err := f.open(ctx); err != nil {
		return nil, err
	}
	start := time.Now()
	workers, end := context.WithCancel(ctx)
	var faults sync.WaitGroup
	for _, f := range []func(context.Context){f.breakServers, f.stallStore, f.killStore} {
		faults.Go(func() { f(workers) })
	}
	err = f.work(workers)
	end()
	faults.Wait()
	f.report.Took = time.Since(start)
	if err != nil {
		return nil, err
	}
	for _, s := range f.slots {
		f.report.Crashed += int(s.crashed.Load())
	}
	f.report.AnswersCut, f.report.StoreCut = f.front.cuts.Load(), f.store.cuts.Load()
	return &f.report, f.count(ctx)
}

func (f *fire) open(ctx context.Context) (err error) {
	// What is acknowledged survives the process, which is all that is killed.
	if f.pg, err = servers.StartPostgres("fsync=off", "max_connections=200"); err != nil {
		return err
	}
	if f.pool, err = pgxpool.New(ctx, f.pg.URL()); err != nil {
		return err
	}
	if _, err := f.pool.Exec(ctx, schema(f.Store == "redis" && !f.Naive)); err != nil {
		return err
	}
	const storeCutOne = 2000
	if f.db, err = newProxy(storeCutOne, f.pg.Addr); err != nil {
		return err
	}
	f.store = f.db
	s := settings{Store: f.Store, Naive: f.Naive, CrashOne: f.CrashOne}
	if f.Store == "redis" {
		if f.redis, err = servers.StartRedis(); err != nil {
			return err
		}
		if f.store, err = newProxy(storeCutOne, f.redis.Addr); err != nil {
			return err
		}
		s.Redis = f.store.addr()
	} else {
		records, err := pgstore.New(f.pool)
		if err == nil {
			err = records.Migrate(ctx)
		}
		if err != nil {
			return err
		}
	}
	s.Database = strings.Replace(f.pg.URL(), f.pg.Addr(), f.db.addr(), 1)
	env, err := json.Marshal(s)
	if err != nil {
		return err
	}
	for range f.Servers {
		s := &slot{env: serverEnv + "=" + string(env), stop: make(chan struct{}), stopped: make(chan struct{})}
		f.slots = append(f.slots, s)
		go s.run()
	}
	var turn atomic.Uint64
	f.front, err = newProxy(50, func() string {
		for range f.Servers { // one that is there, if any is
			if addr := f.slots[turn.Add(1)%uint64(f.Servers)].address(); addr != "" {
				return addr
			}
		}
		return ""
	})
	return err
}

// schema creates what the operations write to. With a fence, the operation is the key.
func schema(fenced bool) string {
	unique := ""
	if fenced {
		unique = " PRIMARY KEY"
	}
	return `CREATE TABLE effects (operation bigint` + unique + `, token text, fence bigint, runs bigint DEFAULT 1);
		CREATE TABLE refused (operation bigint)`
}

func (f *fire) close() {
	for _, s := range f.slots {
		s.end()
	}
	for _, p := range []*proxy{f.front, f.store, f.db} {
		if p != nil {
			p.close()
		}
	}
	if f.pool != nil {
		f.pool.Close()
	}
	if f.redis != nil {
		f.redis.Close()
	}
	if f.pg != nil {
		f.pg.Close()
	}
}

// A slot is where one server process runs at a time.
type slot struct {
	env           string
	stop, stopped chan struct{}
	crashed       atomic.Int64 // processes that have ended by themselves

	mu     sync.Mutex
	addr   string      // guarded by mu; "" while there is none
	proc   *os.Process // guarded by mu
	killed bool        // guarded by mu; by us
}

func (s *slot) address() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// run starts a server, and another one when it has ended.
func (s *slot) run() {
	defer close(s.stopped)
	for {
		select {
		case <-s.stop:
			return
		default:
		}
		s.once()
	}
}

func (s *slot) once() {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), s.env)
	cmd.Stderr = os.Stderr
	stdin, err1 := cmd.StdinPipe() // open as long as we are
	stdout, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		panic(err)
	}
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	defer stdin.Close()
	addr, err := bufio.NewReader(stdout).ReadString('\n')
	if err == nil {
		s.mu.Lock()
		s.addr, s.proc, s.killed = strings.TrimSpace(addr), cmd.Process, false
		s.mu.Unlock()
	}
	select {
	case <-s.stop:
		cmd.Process.Kill()
	default:
	}
	cmd.Wait()
	s.mu.Lock()
	if s.addr != "" && !s.killed {
		s.crashed.Add(1)
	}
	s.addr, s.proc = "", nil
	s.mu.Unlock()
}

// signal reports whether there is a process to get it.
func (s *slot) signal(sig syscall.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil {
		return false
	}
	s.killed = s.killed || sig == syscall.SIGKILL
	return s.proc.Signal(sig) == nil
}

func (s *slot) end() {
	close(s.stop)
	s.signal(syscall.SIGKILL)
	<-s.stopped
}

// sleep reports whether d has passed before ctx was over.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// breakServers kills server processes, and pauses them for longer than their lease.
func (f *fire) breakServers(ctx context.Context) {
	for i := 0; sleep(ctx, 250*time.Millisecond+rand.N(500*time.Millisecond)); i++ {
		s := f.slots[rand.IntN(len(f.slots))]
		if i%3 != 0 {
			if s.signal(syscall.SIGKILL) {
				f.add(func(r *Report) { r.Killed++ })
			}
			continue
		}
		if s.signal(syscall.SIGSTOP) {
			f.add(func(r *Report) { r.Paused++ })
			sleep(ctx, 5*lease/2)
			s.signal(syscall.SIGCONT)
		}
	}
}

// stallStore lets the store stand still.
func (f *fire) stallStore(ctx context.Context) {
	for sleep(ctx, 500*time.Millisecond+rand.N(time.Second)) {
		f.store.stall(100*time.Millisecond + rand.N(500*time.Millisecond))
		f.add(func(r *Report) { r.Stalls++ })
	}
}

// killStore kills the store when half of the operations have begun, and starts it
// again.
func (f *fire) killStore(ctx context.Context) {
	if !sleep(ctx, time.Duration(float64(f.Operations)/f.Rate/2*float64(time.Second))) {
		return
	}
	var err error
	if f.redis != nil {
		f.redis.Kill()
		err = f.redis.Start()
	} else {
		f.pg.Kill()
		err = f.pg.Start()
	}
	if err != nil {
		panic(err)
	}
	f.add(func(r *Report) { r.StoreKilled++ })
}

func (f *fire) add(change func(*Report)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.report)
}

// work has the clients do all operations.
func (f *fire) work(ctx context.Context) error {
	start := time.Now()
	var next atomic.Int64
	errs := make([]error, f.Clients)
	var wg sync.WaitGroup
	for i := range f.Clients {
		wg.Go(func() {
			tr, err := stint.NewTransport(stint.Config{
				Base:    &http.Transport{},
				Timeout: 10 * time.Second,
				// A server that is paused is given up in time for another one to take over.
				AttemptTimeout: lease,
				Keys:           stint.KeysHonoured,
				// What is measured is not the budget.
				Budget: stint.BudgetConfig{Ratio: 1, MinPerSecond: 1000, PeakFactor: 1000},
			})
			if err != nil {
				errs[i] = err
				return
			}
			defer tr.CloseIdleConnections()
			client := &http.Client{Transport: tr}
			for {
				n := int(next.Add(1)) - 1
				if n >= f.Operations {
					return
				}
				sleep(ctx, time.Until(start.Add(time.Duration(float64(n)/f.Rate*float64(time.Second)))))
				if errs[i] = f.operate(ctx, client, n); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// operate asks until it has the answer, as a user would: under the key that the
// transport has made for the first call. One in ten asks once more, if the answer has
// the key in it, which is the promise that it can be had again.
func (f *fire) operate(ctx context.Context, client *http.Client, n int) error {
	key := ""
	var first string
	for call := 0; ; call++ {
		if call == 100 {
			return fmt.Errorf("operation %d has no answer after %d calls", n, call)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		a, err := f.call(ctx, client, n, key)
		f.add(func(r *Report) {
			r.Calls++
			if a.replayed {
				r.Replayed++
			}
			if err != nil {
				if kind := kindOf(err); kind != "" {
					r.Errors[kind]++
				} else {
					r.Untyped = append(r.Untyped, err.Error())
				}
			}
		})
		if key == "" {
			key = a.key
		}
		switch {
		case err != nil:
			sleep(ctx, rand.N(200*time.Millisecond))
		case first == "":
			first = a.token
			f.mu.Lock()
			f.tokens[n] = a.token
			f.mu.Unlock()
			if !a.announced {
				f.add(func(r *Report) { r.Unannounced++ })
			}
			if n%10 != 0 || !a.announced {
				return nil
			}
			f.add(func(r *Report) { r.Repeated++ })
		default:
			if a.token != first || !a.replayed {
				f.add(func(r *Report) { r.Differing++ })
			}
			return nil
		}
	}
}

// A statusError is an answer that is none.
type statusError struct {
	status int
	reason string // of the server's middleware; "": the handler's own
}

func (e *statusError) Error() string {
	if e.reason == "" {
		return fmt.Sprintf("%d of the handler", e.status)
	}
	return fmt.Sprintf("%d %s", e.status, e.reason)
}

// An answer is what a call has brought.
type answer struct {
	token               string
	replayed, announced bool
	key                 string // that was sent, also where there is no answer
}

func (f *fire) call(ctx context.Context, client *http.Client, n int, key string) (a answer, err error) {
	var o stint.Outcome
	ctx = stint.WithOverride(ctx, stint.Override{IdempotencyKey: key, Outcome: &o})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+f.front.addr()+"/operations", strings.NewReader(strconv.Itoa(n)))
	if err != nil {
		return a, err
	}
	resp, err := client.Do(req)
	a.key = o.Key
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	if resp.StatusCode != http.StatusCreated {
		var problem struct{ Reason string }
		json.Unmarshal(body, &problem)
		return a, &statusError{resp.StatusCode, problem.Reason}
	}
	if uuid.Validate(string(body)) != nil {
		return a, fmt.Errorf("the answer %q", body)
	}
	a.token = string(body)
	a.replayed = resp.Header.Get("Idempotent-Replayed") == "true"
	a.announced = resp.Header.Get(stint.HeaderIdempotencyKey) == o.Key
	return a, nil
}

// kindOf returns what an error is, "" for one that a client cannot tell.
func kindOf(err error) string {
	status, ours, network, cut := (*statusError)(nil), (*stint.Error)(nil), (*net.OpError)(nil), (*url.Error)(nil)
	switch {
	case errors.As(err, &status):
		if slices.Contains([]string{"409 conflict", "503 store_error", "503 of the handler", "502 of the handler"}, status.Error()) {
			return status.Error()
		}
		return ""
	case errors.As(err, &ours):
		return "stint.Error: " + string(ours.Reason)
	case errors.As(err, &network), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF),
		strings.HasSuffix(err.Error(), "http: server closed idle connection"): // which net/http does not export
		return "the connection was lost"
	case errors.As(err, &cut) && cut.Timeout():
		return "timeout"
	}
	return ""
}

// count holds the rows against the answers.
func (f *fire) count(ctx context.Context) error {
	f.pool.Reset() // the server was started again
	if err := f.pool.QueryRow(ctx, "SELECT count(*) FROM refused").Scan(&f.report.Refused); err != nil {
		return err
	}
	rows, err := f.pool.Query(ctx, "SELECT operation, count(*), min(token), sum(runs - 1)::bigint FROM effects GROUP BY operation")
	if err != nil {
		return err
	}
	defer rows.Close()
	r := &f.report
	r.Keys = f.Operations
	seen := 0
	for rows.Next() {
		var n, count, again int
		var token string
		if err := rows.Scan(&n, &count, &token, &again); err != nil {
			return err
		}
		if seen == 0 || count < r.Least {
			r.Least = count
		}
		seen++
		r.Rows += count
		r.Most = max(r.Most, count)
		r.TakenOver += again
		if count == 1 && token != f.tokens[n] {
			r.Differing++
		}
	}
	if seen < r.Keys {
		r.Least = 0
	}
	return rows.Err()
}
