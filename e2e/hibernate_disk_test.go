package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestHibernateDisk sends sandboxes to sleep with their disk alone: by hand, by
// idleness, and with the daemon killed meanwhile. They boot with all of their
// files and with the identity and the variables that they had, and can be
// copied in their sleep.
func TestHibernateDisk(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	seed := rand.Uint64()
	t.Logf("seed: %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, User: "root", Env: map[string]string{"A": "kept"}, IdleTimeout: 1, HibernateKind: sandbox.SnapshotDisk})
		who := l.sh(t, sb.ID, "hostname; cat /etc/machine-id 2>/dev/null; echo $A")
		for i := range 6 {
			l.sh(t, sb.ID, fmt.Sprintf(`set -e; head -c %d /dev/urandom > /root/f%d; (cd /root; md5sum f%d >> sums); rm -f /root/gone; echo x > /root/gone; rm /root/gone
sleep 1000 >/dev/null 2>&1 & echo $! > /root/pid`, 50_000+i*7919, i, i))
			switch i % 3 {
			case 0:
				must(t, l.cl.HibernateAs(t.Context(), sb.ID, sandbox.SnapshotDisk))
			case 1: // by idleness
			case 2:
				done := make(chan struct{})
				go func() {
					defer close(done)
					l.cl.HibernateAs(context.Background(), sb.ID, "") // its end is the daemon's
				}()
				time.Sleep(time.Duration(r.IntN(150)) * time.Millisecond)
				l.d.kill()
				<-done
				l.start(t)
			}
			l.waitState(t, sb.ID, sandbox.Hibernated)
			out := l.sh(t, sb.ID, `cd /root; md5sum -c sums; ls f* | wc -l; ls gone 2>/dev/null; cat /proc/$(cat pid)/cmdline 2>/dev/null | grep -q sleep && echo sleeps; hostname; cat /etc/machine-id 2>/dev/null; echo $A`)
			if strings.Contains(out, "FAILED") || !strings.Contains(out, fmt.Sprintf("\n%d\n", i+1)) || strings.Contains(out, "gone") || strings.Contains(out, "sleeps") || !strings.HasSuffix(out, who) {
				t.Fatalf("after cycle %d it was to be %q:\n%s", i+1, who, out)
			}
		}

		// Copies of one that sleeps, which go on sleeping for themselves.
		must(t, l.cl.HibernateAs(t.Context(), sb.ID, sandbox.SnapshotDisk))
		shot, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{})
		must(t, err)
		if shot.Kind != sandbox.SnapshotDisk {
			t.Errorf("the snapshot is of kind %s", shot.Kind)
		}
		if _, err := l.cl.Fork(t.Context(), sb.ID, wire.Fork{Kind: sandbox.SnapshotFull}); sandbox.CodeOf(err) != sandbox.CodeConflict {
			t.Errorf("a fork of a memory that is not there: %v", err)
		}
		res, err := l.cl.Fork(t.Context(), sb.ID, wire.Fork{Count: 2})
		must(t, err)
		copies := []string{l.create(t, wire.CreateSandbox{Snapshot: shot.ID}).ID}
		for _, f := range res.Forks {
			if f.Error != nil {
				t.Fatal(f.Error.Err())
			}
			copies = append(copies, f.Sandbox.ID)
		}
		if got := l.get(t, sb.ID).State; got != sandbox.Hibernated {
			t.Errorf("copied, it is %s", got)
		}
		must(t, l.cl.Kill(t.Context(), sb.ID))
		if err := l.cl.RemoveSnapshot(t.Context(), shot.ID); sandbox.CodeOf(err) != sandbox.CodeConflict {
			t.Errorf("a snapshot that a copy stands on is removed: %v", err)
		}
		for _, id := range copies {
			must(t, l.cl.HibernateAs(t.Context(), id, sandbox.SnapshotDisk))
			if out := l.sh(t, id, "cd /root; md5sum -c sums | grep -c OK; ls -ld / | cut -c1-10; hostname"); out != "6\ndrwxr-xr-x\n"+id {
				t.Errorf("the copy has %q", out)
			}
			must(t, l.cl.Kill(t.Context(), id))
		}
		must(t, l.cl.RemoveSnapshot(t.Context(), shot.ID))
	})
	l.verify(t)
}
