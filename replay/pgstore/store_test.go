package pgstore_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint/replay"
	"github.com/stinthttp/stint/replay/internal/servers"
	"github.com/stinthttp/stint/replay/pgstore"
	"github.com/stinthttp/stint/replay/storetest"
)

// start starts a server that does not wait for its disk: what it has acknowledged
// survives its process, which is all that is killed here.
func start(t testing.TB) *servers.Postgres {
	t.Helper()
	s, err := servers.StartPostgres("fsync=off")
	servers.Need(t, err)
	t.Cleanup(s.Close)
	return s
}

// connect returns a pool. change may be nil.
func connect(t testing.TB, url string, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(c)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func open(t testing.TB, pool *pgxpool.Pool) *pgstore.Store {
	t.Helper()
	s, err := pgstore.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// The tests that every store must pass: at the default isolation level and at the
// strictest one, and without prepared statements, as behind a pooler.
func TestPostgresConformance(t *testing.T) {
	s := start(t)
	for name, change := range map[string]func(*pgxpool.Config){
		"default":         nil,
		"serializable":    func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" },
		"simple protocol": func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol },
	} {
		t.Run(name, func(t *testing.T) {
			store := open(t, connect(t, s.URL(), change))
			storetest.Run(t, func(t *testing.T) replay.Store { return store })
		})
	}
}

// The cases of the middleware.
func TestPostgresMiddleware(t *testing.T) {
	store := open(t, connect(t, start(t).URL(), nil))
	storetest.RunMiddleware(t, func(t *testing.T) replay.Store { return store })
}
