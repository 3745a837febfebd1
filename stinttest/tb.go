package stinttest

// TB is the part of [testing.TB] that the checks use. *testing.T, *testing.B and
// *testing.F have it; a program that is no test can bring its own, so that it
// need not import package testing.
//
// The methods are called on the goroutine that called the check. Errorf reports
// a failure and returns. Fatalf reports one after which the check cannot go on;
// it need not return, and a check whose Fatalf returns ends at once. Cleanup
// registers what ends the servers that a check has started; until it is called
// they go on.
type TB interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
}
