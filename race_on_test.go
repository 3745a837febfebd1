//go:build race

package stint

// raceEnabled lets the long simulations do less where each step costs ten times
// as much.
const raceEnabled = true
