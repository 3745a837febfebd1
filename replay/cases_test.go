package replay_test

import (
	"testing"

	"github.com/stinthttp/stint/replay/storetest"
)

// The cases of the middleware, over the memory store. S23 is for stores on other
// hosts; S24 and S27 are in memory_test.go.
func TestReplayS01_SameAnswer(t *testing.T) { storetest.RunMiddleware(t, openMemory, "S01") }
func TestReplayS02_InParallel(t *testing.T) { storetest.RunMiddleware(t, openMemory, "S02") }
func TestReplayS03_ConflictBeforeTheDeadline(t *testing.T) {
	storetest.RunMiddleware(t, openMemory, "S03")
}
func TestReplayS04_Mismatch(t *testing.T)             { storetest.RunMiddleware(t, openMemory, "S04") }
func TestReplayS05_SeparateRecords(t *testing.T)      { storetest.RunMiddleware(t, openMemory, "S05") }
func TestReplayS06_BareAndQuoted(t *testing.T)        { storetest.RunMiddleware(t, openMemory, "S06") }
func TestReplayS07_UnusableKeys(t *testing.T)         { storetest.RunMiddleware(t, openMemory, "S07") }
func TestReplayS08_PassedThrough(t *testing.T)        { storetest.RunMiddleware(t, openMemory, "S08") }
func TestReplayS09_FinalAndNotDone(t *testing.T)      { storetest.RunMiddleware(t, openMemory, "S09") }
func TestReplayS10_PanicsAndGoexit(t *testing.T)      { storetest.RunMiddleware(t, openMemory, "S10") }
func TestReplayS11_SilentAtTheDeadline(t *testing.T)  { storetest.RunMiddleware(t, openMemory, "S11") }
func TestReplayS12_HardStop(t *testing.T)             { storetest.RunMiddleware(t, openMemory, "S12") }
func TestReplayS13_ClientLeaves(t *testing.T)         { storetest.RunMiddleware(t, openMemory, "S13") }
func TestReplayS14_TooLargeToKeep(t *testing.T)       { storetest.RunMiddleware(t, openMemory, "S14") }
func TestReplayS15_Streams(t *testing.T)              { storetest.RunMiddleware(t, openMemory, "S15") }
func TestReplayS16_Upgrades(t *testing.T)             { storetest.RunMiddleware(t, openMemory, "S16") }
func TestReplayS17_HeadersNotKept(t *testing.T)       { storetest.RunMiddleware(t, openMemory, "S17") }
func TestReplayS18_HeadersFromOutside(t *testing.T)   { storetest.RunMiddleware(t, openMemory, "S18") }
func TestReplayS19_RequestBodies(t *testing.T)        { storetest.RunMiddleware(t, openMemory, "S19") }
func TestReplayS20_StoreDown(t *testing.T)            { storetest.RunMiddleware(t, openMemory, "S20") }
func TestReplayS21_OutlivesTheLease(t *testing.T)     { storetest.RunMiddleware(t, openMemory, "S21") }
func TestReplayS22_ProcessKilled(t *testing.T)        { storetest.RunMiddleware(t, openMemory, "S22") }
func TestReplayS25_RecordGoneAtTheEnd(t *testing.T)   { storetest.RunMiddleware(t, openMemory, "S25") }
func TestReplayS26_FinishedByTheHandler(t *testing.T) { storetest.RunMiddleware(t, openMemory, "S26") }
