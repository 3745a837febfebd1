package replay

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A lease keeps a key taken while its handler runs. It starts with the first
// renewal at two thirds of its time, so that a short run costs a timer.
type lease struct {
	x      *exchange
	length time.Duration
	cancel context.CancelCauseFunc // of the handler's context

	mu      sync.Mutex
	stopped bool        // guarded by mu
	timer   *time.Timer // guarded by mu
}

func (l *lease) start() {
	l.mu.Lock() // renew looks for the timer
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(l.length*2/3, l.renew)
}

// stop ends the renewals. One that is under way finds the key done, or gone.
func (l *lease) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	l.timer.Stop()
}

// renew runs on a goroutine of its own.
func (l *lease) renew() {
	l.mu.Lock()
	stopped := l.stopped
	l.mu.Unlock()
	if stopped {
		return
	}
	// Beyond this the next attempt is more use than this one.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.x.r.Context()), l.length/6)
	defer cancel()
	x := l.x
	err := x.m.call(opRenew, func() error {
		return x.m.cfg.Store.Renew(ctx, x.key, x.run.Fence, l.length)
	})

	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopped:
	case errors.Is(err, ErrLost):
		l.stopped = true
		l.cancel(ErrLost)
	case err != nil:
		// Again, also when the lease has ended: until somebody takes the key
		// over, it can be had back.
		l.timer.Reset(l.length / 12)
	default:
		l.timer.Reset(l.length * 2 / 3)
	}
}
