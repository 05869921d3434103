package e2e

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// smallDisk puts the state directory on a filesystem of its own.
func smallDisk(mib int) setup {
	return func(t *testing.T, l *lab) {
		if err := unix.Mount("tmpfs", l.state, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700", mib)); err != nil {
			t.Skipf("needs to mount a tmpfs: %v", err)
		}
		state := l.state
		t.Cleanup(func() { // before the lab's own, which needs no state any more
			l.tearDown(t)
			l.d = nil
			if err := unix.Unmount(state, unix.MNT_DETACH); err != nil {
				t.Errorf("unmount %s: %v", state, err)
			}
		})
	}
}

// TestFullDisk fills the disk of the state directory, and does everything that
// writes to it: each fails with a code that says so, nothing is lost, and all
// works again when there is room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	l := newLab(t, smallDisk(96), withFlags("--disk-reserve", "1M"))
	kept := l.create(t, wire.CreateSandbox{Runtime: "container", Metadata: map[string]string{"kept": "yes"}})
	l.sh(t, kept.ID, "echo precious > /root/file || echo precious > /tmp/file")
	full := func(err error) bool {
		return sandbox.CodeOf(err) == sandbox.CodeDiskFull || sandbox.CodeOf(err) == sandbox.CodeNoCapacity
	}
	filler := filepath.Join(l.state, "filler")
	fill := func(t *testing.T) {
		t.Helper()
		f, err := os.Create(filler)
		must(t, err)
		defer f.Close()
		if _, err := io.Copy(f, zeroes{}); err == nil {
			t.Fatal("the disk does not fill")
		}
	}
	tmpl := wire.BuildTemplate{Name: "more", Dockerfile: &wire.BuildDockerfile{NoCache: true}}
	var ctx layer
	ctx.file("Dockerfile", "FROM tiny\nCOPY big /big\nRUN cat /big /big > /bigger\n", 0o644)
	ctx.file("big", strings.Repeat("0123456789abcdef", 1<<18), 0o644) // 4 MiB
	archive := ctx.bytes()
	fill(t)
	l.each(t, func(t *testing.T, runtime string) {
		for range 20 {
			_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: runtime})
			if !full(err) {
				t.Fatalf("a create on a full disk gave %v (%s)", err, sandbox.CodeOf(err))
			}
			if !strings.Contains(err.Error(), "disk") {
				t.Errorf("the message does not say that it is the disk: %v", err)
			}
		}
	})
	t.Run("upload", func(t *testing.T) {
		err := l.cl.WriteFile(t.Context(), kept.ID, "/root/big", "root", io.LimitReader(zeroes{}, 8<<20), 8<<20, 0)
		wantError(t, err, sandbox.CodeDiskFull)
		res := l.exec(t, kept.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sh", "-c", "dd if=/dev/zero of=/root/dd bs=64k count=128"}}, User: "root"})
		if res.ExitCode == 0 || !strings.Contains(string(res.ErrBytes()), "No space") {
			t.Errorf("a write inside gave exit %d, %q", res.ExitCode, res.ErrBytes())
		}
		if out := l.sh(t, kept.ID, "ls -a /root | grep upload || echo none"); out != "none" {
			t.Errorf("the failed upload left %q", out)
		}
	})
	t.Run("build", func(t *testing.T) {
		_, err := l.cl.BuildTemplate(t.Context(), tmpl, bytes.NewReader(archive), nil)
		if !full(err) {
			t.Errorf("a build on a full disk gave %v (%s)", err, sandbox.CodeOf(err))
		}
		_, err = l.cl.BuildTemplate(t.Context(), wire.BuildTemplate{Name: "tiny2", Import: &wire.BuildImport{Ref: "docker-archive:" + image(t)}}, nil, nil)
		// Its layer is there already: it may also go well.
		if err != nil && !full(err) {
			t.Errorf("an import on a full disk gave %v (%s)", err, sandbox.CodeOf(err))
		}
	})
	t.Run("records", func(t *testing.T) {
		if a := l.raw(t, "GET", "/healthz", nil, nil); a.status != 200 {
			t.Errorf("the daemon's health is %d %s", a.status, a.body)
		}
		l.d.kill()
		l.start(t)
		got := l.get(t, kept.ID)
		if got.State != sandbox.Running || got.Metadata["kept"] != "yes" {
			t.Errorf("after a restart on the full disk the sandbox is %+v", got)
		}
		if out := l.sh(t, kept.ID, "cat /root/file /tmp/file 2>/dev/null || true"); out != "precious" {
			t.Errorf("and its file %q", out)
		}
		if n := len(l.list(t, client.Filter{Live: true})); n != 1 {
			t.Errorf("%d sandboxes are live", n)
		}
	})
	must(t, os.Remove(filler))
	t.Run("with room again", func(t *testing.T) {
		l.sh(t, kept.ID, "rm -f /root/dd /root/big 2>/dev/null || true")
		l.each(t, func(t *testing.T, runtime string) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			l.sh(t, sb.ID, "true")
			must(t, l.cl.Kill(t.Context(), sb.ID))
		})
		if _, err := l.cl.BuildTemplate(t.Context(), tmpl, bytes.NewReader(archive), nil); err != nil {
			t.Errorf("a build: %v", err)
		}
		l.verify(t)
	})
	t.Run("a sandbox fills it from inside", func(t *testing.T) {
		greedy := l.create(t, wire.CreateSandbox{Runtime: "container"})
		res := l.exec(t, greedy.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sh", "-c", "dd if=/dev/zero of=/root/all bs=64k"}}, User: "root"})
		if res.ExitCode == 0 || !strings.Contains(string(res.ErrBytes()), "No space") {
			t.Errorf("it ends with %d, %q", res.ExitCode, res.ErrBytes())
		}
		_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: "container"})
		if !full(err) {
			t.Errorf("a create beside it gave %v (%s)", err, sandbox.CodeOf(err))
		}
		must(t, l.cl.Kill(t.Context(), greedy.ID))
		if got := l.get(t, greedy.ID); got.Reason != sandbox.ReasonKilledByUser {
			t.Errorf("its end is recorded as %s", got.Reason)
		}
		l.create(t, wire.CreateSandbox{Runtime: "container"})
	})
}
