package daemon

import (
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// waitSpares waits until the daemon has n sandboxes prepared.
func (s *stage) waitSpares(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		c, err := s.client.Capacity(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Spares) == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("there are %d spares, want %d", len(c.Spares), n)
		}
	}
}

// TestSpares: forks and wakes go on in what waits for them, whatever becomes of
// the daemon, and the next daemon removes what the last one had ready.
func TestSpares(t *testing.T) {
	s := newStage(t, func(_ string, cfg *Config) { cfg.Spares = 2 })
	if s.cfg.Runsc == "" {
		t.Skip("bin/runsc is missing: make build")
	}
	s.start(t)
	id := s.create(t, wire.CreateSandbox{Template: "tiny", Runtime: "gvisor"}).ID
	s.counter(t, id)
	fork := func() string {
		t.Helper()
		out, err := s.client.Fork(t.Context(), id, wire.Fork{Count: 1})
		if err != nil || out.Forks[0].Error != nil {
			t.Fatalf("fork: %+v, %v", out, err)
		}
		return out.Forks[0].Sandbox.ID
	}
	s.counts(t, fork())
	s.waitSpares(t, 1)
	waiting, err := s.client.Capacity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	child := fork()
	if _, ok := waiting.Spares[child]; !ok {
		t.Errorf("the child is %s, and none of the spares %v", child, waiting.Spares)
	}
	s.counts(t, child)
	s.waitSpares(t, 1)
	s.verify(t)

	// A daemon that is killed leaves its spares to the next one.
	s.d.cmd.Process.Kill()
	<-s.d.done
	s.start(t)
	s.waitSpares(t, 0)
	s.verify(t)

	// It wakes in a spare, under its own id and name, and is adopted there.
	if err := s.client.Hibernate(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	s.waitSpares(t, 1)
	s.counts(t, id)
	sb, err := s.client.Sandbox(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if sb.Instance == "" || sb.State != sandbox.Running {
		t.Errorf("it did not wake in a spare: %+v", sb)
	}
	if name, err := s.run(id, "hostname"); err != nil || name != sb.Hostname {
		t.Errorf("its hostname is %q and should be %q (%v)", name, sb.Hostname, err)
	}
	s.d.cmd.Process.Kill()
	<-s.d.done
	s.start(t)
	s.counts(t, id)
	s.verify(t)
	grandchild := fork() // of a sandbox whose kernel was renamed
	if name, err := s.run(grandchild, "hostname"); err != nil || name != grandchild {
		t.Errorf("the hostname of %s is %q (%v)", grandchild, name, err)
	}
	for range 2 {
		if err := s.client.Hibernate(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		s.counts(t, id)
	}
	s.verify(t)
	if err := s.client.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	s.verify(t)
}
