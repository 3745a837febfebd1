//go:build race

package replay_test

// raceEnabled lets the long simulations do less where each step costs ten times
// as much.
const raceEnabled = true
