package pgstore

import (
	"context"
	"time"
)

// SweepExpiredFor is Sweep without the minute of grace.
func (s *Store) SweepExpiredFor(ctx context.Context, limit int, d time.Duration) (int, error) {
	return s.sweep(ctx, limit, d)
}
