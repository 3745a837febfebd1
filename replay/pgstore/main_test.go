package pgstore_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/stinthttp/stint/replay/pgstore"
)

var ctx = context.Background()

// TestMain is also the process that is killed: see beginAndDie.
func TestMain(m *testing.M) {
	if url := os.Getenv("STINT_TEST_BEGIN"); url != "" {
		fmt.Println(hold(url))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// theKey and thePrint are those of the process that is killed.
var theKey, thePrint = [32]byte{1}, [32]byte{2}

const theLease = 2 * time.Second

func hold(url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	store, err := pgstore.New(pool)
	if err != nil {
		return err
	}
	c, err := store.Begin(ctx, theKey, thePrint, theLease, time.Hour)
	if err != nil {
		return err
	}
	fmt.Println(c.Fence)
	time.Sleep(time.Hour)
	return nil
}

// beginAndDie has another process begin theKey, kills it, and returns its fence.
func beginAndDie(t *testing.T, url string) (fence int64) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "STINT_TEST_BEGIN="+url)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	if _, err := fmt.Fscanln(out, &fence); err != nil {
		t.Fatalf("no fence: %v", err)
	}
	return fence
}
