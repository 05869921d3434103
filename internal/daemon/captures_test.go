package daemon

import (
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestSuspendCycles: commands begun after each of many suspensions work, and
// the one that ran all the time goes on.
func TestSuspendCycles(t *testing.T) {
	s := newStage(t)
	s.start(t)
	for _, runtime := range []string{"container", "gvisor"} {
		t.Run(runtime, func(t *testing.T) {
			id := s.create(t, wire.CreateSandbox{Runtime: runtime}).ID
			s.counter(t, id)
			if _, err := s.run(id, "until test -s /tmp/count; do sleep 0.05; done"); err != nil {
				t.Fatal(err)
			}
			for n := range 10 {
				if err := s.client.Suspend(t.Context(), id); err != nil {
					t.Fatal(err)
				}
				if sb, err := s.client.Sandbox(t.Context(), id); err != nil || sb.State != sandbox.Suspended {
					t.Fatalf("it is %s: %v", sb.State, err)
				}
				time.Sleep(20 * time.Millisecond)
				if err := s.client.Unsuspend(t.Context(), id); err != nil {
					t.Fatal(err)
				}
				if out, err := s.run(id, "cat /tmp/starts"); err != nil || out != "started" {
					t.Errorf("after cycle %d: %q, %v", n+1, out, err)
				}
			}
			s.counts(t, id)
			s.verify(t)
		})
	}
}
