//go:build unix

package main

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint/replay/internal/servers"
)

// TestMain is also the server processes.
func TestMain(m *testing.M) {
	if isServer() {
		return
	}
	os.Exit(m.Run())
}

// short is a run of some seconds in which everything fails at least once.
func short(t *testing.T, o Options) *Report {
	t.Helper()
	o.Operations, o.Rate, o.Clients, o.Servers, o.CrashOne = 900, 150, 64, 3, 50
	r, err := run(t.Context(), o)
	servers.Need(t, err)
	var b strings.Builder
	show(&b, o.Store, r)
	t.Log(b.String())
	for what, n := range map[string]int{
		"processes killed": r.Killed, "processes that killed themselves": r.Crashed, "processes paused": r.Paused,
		"answers cut": int(r.AnswersCut), "times that the store stood still": r.Stalls, "times that it was killed": r.StoreKilled,
		"answers of an earlier run": r.Replayed,
	} {
		if n == 0 {
			t.Errorf("%s: none", what)
		}
	}
	return r
}

func TestOncePostgres(t *testing.T) {
	if err := short(t, Options{Store: "postgres"}).Err(); err != nil {
		t.Error(err)
	}
}

func TestOnceRedis(t *testing.T) {
	if err := short(t, Options{Store: "redis"}).Err(); err != nil {
		t.Error(err)
	}
}

// Without FinishTx and without a fence the same run counts more rows than keys: the
// test above can fail.
func TestOnceNaive(t *testing.T) {
	for _, store := range []string{"postgres", "redis"} {
		r := short(t, Options{Store: store, Naive: true})
		if r.Rows <= r.Keys || r.Most < 2 || r.Err() == nil {
			t.Errorf("%s: %d rows for %d keys: nothing has failed at the worst moment", store, r.Rows, r.Keys)
		}
	}
}

// A run that is over does not write over a later one's row.
func TestOnceFenced(t *testing.T) {
	pg, err := servers.StartPostgres("fsync=off")
	servers.Need(t, err)
	t.Cleanup(pg.Close)
	pool, err := pgxpool.New(t.Context(), pg.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(), schema(true)); err != nil {
		t.Fatal(err)
	}
	o := &operation{pool: pool}
	for _, tt := range []struct {
		token string
		fence int64
		err   error
		want  string
	}{{"a", 5, nil, "a"}, {"b", 9, nil, "b"}, {"a", 5, errFenced, "b"}, {"b", 9, nil, "b"}, {"c", 10, nil, "c"}} {
		if err := o.fenced(t.Context(), 1, tt.token, tt.fence); !errors.Is(err, tt.err) {
			t.Errorf("%s under %d: got error %v, want %v", tt.token, tt.fence, err, tt.err)
		}
		var token string
		if err := pool.QueryRow(t.Context(), "SELECT token FROM effects").Scan(&token); err != nil || token != tt.want {
			t.Errorf("after %s under %d: the row has %q, %v, want %q", tt.token, tt.fence, token, err, tt.want)
		}
	}
}

func TestReportErr(t *testing.T) {
	well := Report{Keys: 2, Rows: 2, Least: 1, Most: 1}
	if err := well.Err(); err != nil {
		t.Errorf("got error %v, want none", err)
	}
	for what, r := range map[string]Report{
		"one twice":            {Keys: 2, Rows: 3, Least: 1, Most: 2},
		"one twice, one never": {Keys: 2, Rows: 2, Least: 0, Most: 2},
		"one never":            {Keys: 2, Rows: 1, Least: 0, Most: 1},
		"an answer of nobody":  {Keys: 2, Rows: 2, Least: 1, Most: 1, Differing: 1},
		"an unknown error":     {Keys: 2, Rows: 2, Least: 1, Most: 1, Untyped: []string{"?"}},
	} {
		if r.Err() == nil {
			t.Errorf("%s: no error", what)
		}
	}
	if kind := kindOf(errors.New("?")); kind != "" {
		t.Errorf("an unknown error is of the kind %q", kind)
	}
	if kind := kindOf(&statusError{422, "mismatch"}); kind != "" {
		t.Errorf("422 is of the kind %q, want none: no client has sent two operations under one key", kind)
	}
}
