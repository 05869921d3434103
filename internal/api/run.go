package api

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Run follows every sandbox's events until ctx ends: it drops the connections
// into those that have ended, and counts what /metrics tells. It returns ctx's
// error.
func (a *API) Run(ctx context.Context) error {
	last := int64(-1)
	for ctx.Err() == nil {
		sub, cancel := context.WithCancel(ctx)
		events, err := a.back.Subscribe(sub, "", last) // "" is every tenant
		if err == nil {
			for e := range events {
				last = e.Seq
				a.metrics.event(e)
				if e.Type == sandbox.EventState && e.To.Ended() {
					a.proxy.Forget(e.Sandbox)
				}
			}
		}
		cancel()
		// Cut off for reading too slowly, or not started yet: go on from there.
		select {
		case <-ctx.Done():
		case <-time.After(100*time.Millisecond + rand.N(100*time.Millisecond)):
		}
	}
	return ctx.Err()
}
