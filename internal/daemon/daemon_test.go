package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestServe(t *testing.T) {
	s := newStage(t)
	d := s.start(t)
	if !strings.HasPrefix(d.info.FirstKey, "e2b_") || d.info.Listen == "" {
		t.Errorf("it serves %+v", d.info)
	}
	ids := map[string]string{}
	for _, runtime := range []string{"container", "gvisor"} {
		sb := s.create(t, wire.CreateSandbox{Runtime: runtime})
		ids[runtime] = sb.ID
		s.counter(t, sb.ID)
	}
	s.verify(t)

	t.Run("clean restart", func(t *testing.T) {
		began := time.Now()
		d.terminate(t)
		t.Logf("stopped after %v", time.Since(began))
		d = s.start(t)
		if d.info.Adopted != 2 || d.info.FirstKey != "" {
			t.Errorf("the next daemon is %+v", d.info)
		}
		for _, id := range ids {
			s.counts(t, id)
		}
		s.verify(t)
	})
	t.Run("second daemon", func(t *testing.T) {
		other := *s
		p := other.launch(t)
		<-p.done
		if !strings.Contains(p.stderr.String(), "another daemon") {
			t.Errorf("a second daemon on the state directory said %q", p.stderr)
		}
		other.cfg.State += "2"
		p = other.launch(t)
		<-p.done
		if !strings.Contains(p.stderr.String(), "serves on") {
			t.Errorf("a second daemon on the socket said %q", p.stderr)
		}
	})
	t.Run("timeout while no daemon runs", func(t *testing.T) {
		sb := s.create(t, wire.CreateSandbox{Runtime: "container", Timeout: 1})
		d.kill(t)
		time.Sleep(1100 * time.Millisecond)
		d = s.start(t)
		got, err := s.client.Sandbox(t.Context(), sb.ID)
		if err != nil || got.State != sandbox.Killed || got.Reason != sandbox.ReasonTimeout {
			t.Errorf("it is %s, %s: %v", got.State, got.Reason, err)
		}
		s.verify(t)
	})
	t.Run("end while no daemon runs", func(t *testing.T) {
		sb := s.create(t, wire.CreateSandbox{Runtime: "container"})
		pid := s.firstProcess(t, sb.ID)
		d.kill(t)
		killAndWait(t, pid)
		d = s.start(t)
		got, err := s.client.Sandbox(t.Context(), sb.ID)
		if err != nil || got.State != sandbox.Failed || got.Reason != sandbox.ReasonRuntimeCrashed {
			t.Errorf("it is %s, %s: %v", got.State, got.Reason, err)
		}
		s.verify(t)
	})
	t.Run("crash under a daemon", func(t *testing.T) {
		sb := s.create(t, wire.CreateSandbox{Runtime: "container"})
		killAndWait(t, s.firstProcess(t, sb.ID))
		s.waitEnded(t, sb.ID, sandbox.ReasonRuntimeCrashed)
		s.verify(t)
	})
	for _, id := range ids {
		s.counts(t, id)
	}
}
