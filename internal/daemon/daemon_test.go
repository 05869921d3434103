package daemon

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

func TestStartCommandOutlivesTheDaemon(t *testing.T) {
	s := newStage(t)
	d := s.start(t)
	for _, runtime := range []string{"container", "gvisor"} {
		t.Run(runtime, func(t *testing.T) {
			sb := s.create(t, wire.CreateSandbox{Template: "service", Runtime: runtime})
			if out, err := s.run(sb.ID, "cat /tmp/ready"); err != nil || out != "yes" {
				t.Errorf("it was said to be ready, and /tmp/ready is %q, %v", out, err)
			}
			before := s.waitTick(t, sb.ID, 2)
			if log := s.log(t, sb.ID); !strings.Contains(log, "serving") {
				t.Errorf("the console is %q", log)
			}
			d.kill(t)
			time.Sleep(300 * time.Millisecond)
			d = s.start(t)
			s.waitTick(t, sb.ID, before+5)
			if err := s.client.Kill(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
			if log := s.log(t, sb.ID); !strings.Contains(log, "serving") {
				t.Errorf("after its end the console is %q", log)
			}
		})
	}
}

func (s *stage) log(t *testing.T, id string) string {
	t.Helper()
	r, err := s.client.Logs(t.Context(), id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// waitTick waits until the service's console has come to a tick, and gives
// the last.
func (s *stage) waitTick(t *testing.T, id string, want int) int {
	t.Helper()
	last := -1
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		for line := range strings.Lines(s.log(t, id)) {
			if n, ok := strings.CutPrefix(strings.TrimSpace(line), "tick "); ok {
				last, _ = strconv.Atoi(n)
			}
		}
		if last >= want {
			return last
		}
	}
	t.Fatalf("the console came to tick %d, not %d", last, want)
	return 0
}

func TestOOMIsOnRecord(t *testing.T) {
	s := newStage(t)
	s.start(t)
	sb := s.create(t, wire.CreateSandbox{Runtime: "container", Resources: wire.ResourceRequest{MemoryMiB: 64}})
	beside := s.create(t, wire.CreateSandbox{Runtime: "container"})
	s.counter(t, beside.ID)
	// dd's buffer is 100 MiB, above the limit; the cgroup bounds it.
	if out, err := s.run(sb.ID, "dd if=/dev/zero of=/dev/null bs=100M count=1"); err == nil {
		t.Errorf("it fitted: %q", out)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		got, err := s.client.Sandbox(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		if got.OOMKills > 0 && got.State == sandbox.Running {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it is %s with %d OOM kills", got.State, got.OOMKills)
		}
	}
	if out, err := s.run(sb.ID, "echo still here"); err != nil || out != "still here" {
		t.Errorf("afterwards it answers %q, %v", out, err)
	}
	s.counts(t, beside.ID)
	s.verify(t)
}

func TestBurst(t *testing.T) {
	s := newStage(t, func(_ string, c *Config) { c.PoolSize = 4 })
	s.start(t)
	var wg sync.WaitGroup
	errs := make(chan error, 30)
	for i := range 30 {
		wg.Go(func() {
			_, err := s.client.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: []string{"container", "gvisor"}[i%2]})
			errs <- err
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if n := len(s.live(t)); n != 30 {
		t.Errorf("%d are live", n)
	}
}

func TestFullDisk(t *testing.T) {
	s := newStage(t, func(dir string, c *Config) {
		c.State = filepath.Join(dir, "small")
		if err := os.Mkdir(c.State, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", c.State, "tmpfs", 0, "size=24m,mode=0700"); err != nil {
			t.Skipf("needs to mount a tmpfs: %v", err)
		}
		t.Cleanup(func() { // after the end of all on it
			unix.Unmount(c.State, unix.MNT_DETACH)
			os.RemoveAll(dir)
		})
		c.Budget.DiskReserve = 1 // so that the disk can be filled at all
	})
	s.start(t)
	one := s.create(t, wire.CreateSandbox{Runtime: "container"})
	two := s.create(t, wire.CreateSandbox{Runtime: "container", Timeout: 3600})
	s.counter(t, one.ID)
	if _, err := s.run(two.ID, "dd if=/dev/zero of=/filler bs=64k"); err == nil || !strings.Contains(err.Error(), "No space") {
		t.Errorf("filling the disk from inside gave %v", err)
	}
	for range 50 { // the ballast goes to records at most
		_, err := s.client.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: "container"})
		if code := sandbox.CodeOf(err); code != sandbox.CodeDiskFull && code != sandbox.CodeNoCapacity {
			t.Fatalf("a create on a full disk gave %v (%s)", err, code)
		}
	}
	s.counts(t, one.ID)
	// A restart works, and so does the end that makes room.
	s.d.kill(t)
	s.start(t)
	s.counts(t, one.ID)
	if err := s.client.Kill(t.Context(), two.ID); err != nil {
		t.Fatal(err)
	}
	got, err := s.client.Sandbox(t.Context(), two.ID)
	if err != nil || got.Reason != sandbox.ReasonKilledByUser {
		t.Errorf("it is %s, %s: %v", got.State, got.Reason, err)
	}
	s.create(t, wire.CreateSandbox{Runtime: "container"})
	s.verify(t)
}

func TestNoCapacity(t *testing.T) {
	s := newStage(t, func(_ string, c *Config) { c.Budget.MemoryReserve = 1 << 50 })
	s.start(t)
	_, err := s.client.CreateSandbox(context.Background(), wire.CreateSandbox{Template: "tiny"})
	if sandbox.CodeOf(err) != sandbox.CodeNoCapacity {
		t.Errorf("the error is %v (%s)", err, sandbox.CodeOf(err))
	}
	s.verify(t)
}
