package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// captures gives the ids of all captures on the disk, and fails where one is
// half written.
func (l *lab) captures(t *testing.T) []string {
	t.Helper()
	half, err := filepath.Glob(filepath.Join(l.state, "snapshots", "tmp", "*"))
	must(t, err)
	if len(half) > 0 {
		t.Errorf("half written captures are left: %v", half)
	}
	all, err := filepath.Glob(filepath.Join(l.state, "snapshots", "snp*"))
	must(t, err)
	for i := range all {
		all[i] = filepath.Base(all[i])
	}
	return all
}

// noCapture checks that there is none, also not in a while: the end of a
// sandbox is told before its capture is gone.
func (l *lab) noCapture(t *testing.T) {
	t.Helper()
	eventually(func() bool {
		all, err := filepath.Glob(filepath.Join(l.state, "snapshots", "*", "*"))
		return err == nil && len(all) == 0
	}, 10*time.Second)
	if left := l.captures(t); len(left) > 0 {
		t.Errorf("captures that nothing needs are there: %v", left)
	}
}

// ticker starts a command that counts in its memory, and gives a check that it
// is that command which goes on.
func ticker(t *testing.T, l *lab, id string) func(t *testing.T, id string) {
	t.Helper()
	l.sh(t, id, `echo started >> /tmp/starts; (i=0; while :; do i=$((i+1)); echo $i > /tmp/tick.new; mv /tmp/tick.new /tmp/tick; sleep 0.05; done) >/dev/null 2>&1 & until test -s /tmp/tick; do usleep 1000; done`)
	return func(t *testing.T, id string) {
		t.Helper()
		out := l.sh(t, id, `cat /tmp/starts; a=$(cat /tmp/tick); n=0; while test "$(cat /tmp/tick)" = "$a"; do n=$((n+1)); test $n -gt 200 && echo stands; usleep 50000; done`)
		if out != "started" {
			t.Errorf("the command in %s does not go on: %q", id, out)
		}
	}
}

// TestCaptureOnFullDisk captures and wakes sandboxes where there is room for
// nothing, and for a part of it.
func TestCaptureOnFullDisk(t *testing.T) {
	t.Parallel()
	l := newLab(t, smallDisk(192), withFlags("--disk-reserve", "1M"))
	full := func(t *testing.T, what string, err error) {
		t.Helper()
		if c := sandbox.CodeOf(err); c != sandbox.CodeDiskFull && c != sandbox.CodeNoCapacity || !strings.Contains(err.Error(), "disk") && !strings.Contains(err.Error(), "space") {
			t.Errorf("%s on a full disk gave %v (%s)", what, err, c)
		}
	}
	filler := filepath.Join(l.state, "filler")
	fill := func(t *testing.T, room int64) {
		t.Helper()
		f, err := os.Create(filler)
		must(t, err)
		defer f.Close()
		n, err := io.Copy(f, zeroes{})
		if err == nil {
			t.Fatal("the disk does not fill")
		}
		if n < room {
			t.Fatalf("there were only %d bytes of room", n)
		}
		must(t, f.Truncate(n-room))
	}
	l.each(t, func(t *testing.T, runtime string) {
		can := l.abilities(t)[runtime]
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, User: "root"})
		goesOn := ticker(t, l, sb.ID)
		l.sh(t, sb.ID, "echo precious > /tmp/file; head -c 3000000 /dev/urandom > /root/big; md5sum /root/big > /tmp/sum")
		fine := func(t *testing.T, id string) {
			t.Helper()
			goesOn(t, id)
			if out := l.sh(t, id, "cat /tmp/file; md5sum -c /tmp/sum"); out != "precious\n/root/big: OK" {
				t.Errorf("it has %q", out)
			}
		}
		for _, room := range []int64{0, 2 << 20} {
			t.Run(fmt.Sprintf("room for %d bytes", room), func(t *testing.T) {
				fill(t, room)
				_, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{Name: "whole"})
				full(t, "a snapshot", err)
				fine(t, sb.ID)
				if res, err := l.cl.Fork(t.Context(), sb.ID, wire.Fork{Count: 2}); err != nil {
					full(t, "a fork", err)
				} else { // the capture fitted, its copies do not
					for _, f := range res.Forks {
						if f.Error == nil {
							t.Errorf("there is room for the copy %s", f.Sandbox.ID)
						} else {
							full(t, "a fork's copy", f.Error.Err())
						}
					}
				}
				fine(t, sb.ID)
				if can.FullCapture {
					full(t, "hibernation", l.cl.Hibernate(t.Context(), sb.ID))
					if got := l.get(t, sb.ID); got.State != sandbox.Running {
						t.Errorf("it is %s", got.State)
					}
					fine(t, sb.ID)
				}
				if left := l.captures(t); len(left) > 0 {
					t.Errorf("captures that failed are there: %v", left)
				}
				for n, err := range l.cl.Snapshots(t.Context(), "") {
					t.Errorf("a snapshot that failed is listed: %+v %v", n, err)
				}
				must(t, os.Remove(filler))
			})
		}
		n, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{Name: "whole"})
		must(t, err)
		if can.FullCapture {
			t.Run("wake", func(t *testing.T) {
				must(t, l.cl.Hibernate(t.Context(), sb.ID))
				must(t, l.cl.WaitDeparted(t.Context())) // which makes room
				fill(t, 0)
				full(t, "a wake", l.cl.Wake(t.Context(), sb.ID))
				_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
				full(t, "a command", err)
				if got := l.get(t, sb.ID); got.State != sandbox.Hibernated {
					t.Errorf("it is %s", got.State)
				}
				_, err = l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Snapshot: n.ID})
				full(t, "a create from a snapshot", err)
				must(t, os.Remove(filler))
			})
		}
		fine(t, sb.ID)
		copied, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Snapshot: n.ID})
		must(t, err)
		if out := l.sh(t, copied.ID, "md5sum /root/big | cut -c -32"); !strings.HasPrefix(l.sh(t, sb.ID, "cat /tmp/sum"), out) {
			t.Errorf("a sandbox of the snapshot has %q", out)
		}
		must(t, l.cl.Kill(t.Context(), copied.ID))
		must(t, l.cl.Kill(t.Context(), sb.ID))
		must(t, l.cl.RemoveSnapshot(t.Context(), n.ID))
		l.noCapture(t)
		l.verify(t)
	})
}

// harm is something that happens to a file of a capture.
var harm = map[string]func(path, elsewhere string, r *rand.Rand) error{
	"a bit": func(path, elsewhere string, r *rand.Rand) error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		fi, err := f.Stat()
		if err != nil {
			return err
		}
		var b [1]byte
		at := r.Int64N(fi.Size())
		if _, err := f.ReadAt(b[:], at); err != nil {
			return err
		}
		b[0] ^= 1 << r.IntN(8)
		_, err = f.WriteAt(b[:], at)
		return err
	},
	"cut": func(path, elsewhere string, r *rand.Rand) error {
		fi, err := os.Stat(path)
		if err != nil {
			return err
		}
		return os.Truncate(path, r.Int64N(fi.Size()))
	},
	"longer": func(path, elsewhere string, r *rand.Rand) error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.Write([]byte{0})
		return err
	},
	"removed": func(path, elsewhere string, _ *rand.Rand) error { return os.Remove(path) },
	"a symbolic link": func(path, elsewhere string, _ *rand.Rand) error {
		moved := filepath.Join(elsewhere, "moved")
		if err := copyTo(path, moved); err != nil {
			return err
		}
		return errors.Join(os.Remove(path), os.Symlink(moved, path))
	},
	"a directory": func(path, elsewhere string, _ *rand.Rand) error {
		return errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
	},
}

func copyTo(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o600)
}

// harmed harms a copy of the file in its place, calls f, and puts the file
// back.
func harmed(t *testing.T, path string, do func(path string) error, f func()) {
	t.Helper()
	safe := filepath.Join(t.TempDir(), "safe")
	// The name is given to a copy: other captures may share the file.
	must(t, copyTo(path, safe))
	must(t, os.Remove(path))
	must(t, copyTo(safe, path))
	must(t, do(path))
	f()
	must(t, os.RemoveAll(path))
	must(t, copyTo(safe, path))
}

// TestCorruptCaptures harms every file of captures, and checks that nothing is
// made of them and nothing is lost by it.
func TestCorruptCaptures(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	l := newLab(t)
	refused := func(t *testing.T, what string, err error) {
		t.Helper()
		if sandbox.CodeOf(err) != sandbox.CodeCorruptCapture || !strings.Contains(err.Error(), "restore") && !strings.Contains(err.Error(), "anew") {
			t.Errorf("%s: %v (%s)", what, err, sandbox.CodeOf(err))
		}
	}
	for _, runtime := range l.capable(t, func(c sandbox.Capabilities) bool { return c.FullCapture || c.DiskCapture }) {
		can := l.abilities(t)[runtime]
		t.Run(runtime+" snapshot", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, User: "root"})
			l.sh(t, sb.ID, "echo precious > /root/file")
			n, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{})
			must(t, err)
			must(t, l.cl.Kill(t.Context(), sb.ID))
			l.eachFile(t, n.ID, func(t *testing.T, path string) {
				for what, do := range harm {
					harmed(t, path, func(p string) error { return do(p, t.TempDir(), r) }, func() {
						_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Snapshot: n.ID})
						refused(t, what, err)
					})
				}
			})
			l.manifests(t, n.ID, func(t *testing.T, what string, code sandbox.Code) {
				_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Snapshot: n.ID})
				if sandbox.CodeOf(err) != code {
					t.Errorf("%s: %v (%s)", what, err, sandbox.CodeOf(err))
				}
			})
			copied := l.create(t, wire.CreateSandbox{Snapshot: n.ID})
			if out := l.sh(t, copied.ID, "cat /root/file"); out != "precious" {
				t.Errorf("with its files back it has %q", out)
			}
			must(t, l.cl.Kill(t.Context(), copied.ID))
			must(t, l.cl.RemoveSnapshot(t.Context(), n.ID))
			l.verify(t)
		})
		if !can.FullCapture {
			continue
		}
		t.Run(runtime+" hibernated", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, User: "root"})
			goesOn := ticker(t, l, sb.ID)
			must(t, l.cl.Hibernate(t.Context(), sb.ID))
			capture := l.captures(t)
			if len(capture) != 1 {
				t.Fatalf("there are the captures %v", capture)
			}
			asleep := func(t *testing.T) {
				t.Helper()
				if got := l.get(t, sb.ID); got.State != sandbox.Hibernated {
					t.Fatalf("it is %s (%s %s)", got.State, got.Reason, got.Detail)
				}
			}
			l.eachFile(t, capture[0], func(t *testing.T, path string) {
				for what, do := range harm {
					harmed(t, path, func(p string) error { return do(p, t.TempDir(), r) }, func() {
						refused(t, what, l.cl.Wake(t.Context(), sb.ID))
						_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
						refused(t, what+", by a command", err)
						_, err = l.cl.Fork(t.Context(), sb.ID, wire.Fork{})
						refused(t, what+", by a fork", err)
						_, err = l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{})
						refused(t, what+", by a snapshot", err)
						asleep(t)
					})
				}
			})
			l.manifests(t, capture[0], func(t *testing.T, what string, code sandbox.Code) {
				if err := l.cl.Wake(t.Context(), sb.ID); sandbox.CodeOf(err) != code {
					t.Errorf("%s: %v (%s)", what, err, sandbox.CodeOf(err))
				}
				asleep(t)
			})
			if now := l.captures(t); !slices.Equal(now, capture) {
				t.Errorf("of the captures %v there are %v", capture, now)
			}
			// Another version of its runtime.
			other := filepath.Join(l.dir, "other-runsc")
			real, err := filepath.Abs(filepath.Join(binDir(), "runsc"))
			must(t, err)
			must(t, os.WriteFile(other, fmt.Appendf(nil, "#!/bin/sh\nexec %s \"$@\"\n", real), 0o755))
			flags := l.flags
			for _, kill := range []bool{true, false} {
				if kill {
					l.d.kill()
				} else {
					l.d.terminate(t)
				}
				l.flags = append(slices.Clone(flags), "--runsc", other)
				l.start(t)
				wantError(t, l.cl.Wake(t.Context(), sb.ID), sandbox.CodeUnsupported, "version", "run the")
				_, err = l.cl.Fork(t.Context(), sb.ID, wire.Fork{})
				wantError(t, err, sandbox.CodeUnsupported, "version", "run the")
				asleep(t)
				l.d.terminate(t)
				l.flags = flags
				l.start(t)
			}
			goesOn(t, sb.ID) // wakes it
			must(t, l.cl.Kill(t.Context(), sb.ID))
			l.noCapture(t)
			l.verify(t)
		})
	}
}

// eachFile calls f for each file of a capture that has something in it.
func (l *lab) eachFile(t *testing.T, capture string, f func(t *testing.T, path string)) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(filepath.Join(l.state, "snapshots", capture, "data"), func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		if fi, err := e.Info(); err != nil || fi.Size() == 0 {
			return err
		}
		n++
		t.Run(e.Name(), func(t *testing.T) { f(t, path) })
		return nil
	})
	must(t, err)
	if n == 0 {
		t.Error("it has no files")
	}
}

// manifests puts manifests in the place of a capture's.
func (l *lab) manifests(t *testing.T, capture string, f func(t *testing.T, what string, code sandbox.Code)) {
	t.Helper()
	path := filepath.Join(l.state, "snapshots", capture, "manifest.json")
	edit := func(from, to string) func(string) error {
		return func(p string) error {
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			out := bytes.Replace(data, []byte(from), []byte(to), 1)
			if bytes.Equal(out, data) {
				return fmt.Errorf("it has no %s: %s", from, data)
			}
			return os.WriteFile(p, out, 0o600)
		}
	}
	for what, c := range map[string]struct {
		do   func(string) error
		code sandbox.Code
	}{
		"of a later format": {edit(`"version":1`, `"version":2`), sandbox.CodeUnsupported},
		"of another":        {edit(capture, "snp00000000000000000"), sandbox.CodeCorruptCapture},
		"of another kind":   {edit(`"kind":"`, `"kind":"x`), sandbox.CodeCorruptCapture},
		"of a path":         {edit(`"path":"`, `"path":"../`), sandbox.CodeCorruptCapture},
		"of another sum":    {edit(`"crc32c":"`, `"crc32c":"f`), sandbox.CodeCorruptCapture},
		"of no files":       {edit(`"files":[`, `"files":[],"x":[`), sandbox.CodeCorruptCapture},
		"cut":               {func(p string) error { return os.Truncate(p, 30) }, sandbox.CodeCorruptCapture},
		"empty":             {func(p string) error { return os.Truncate(p, 0) }, sandbox.CodeCorruptCapture},
		"removed":           {os.Remove, sandbox.CodeCorruptCapture},
		"a symbolic link": {func(p string) error {
			to := filepath.Join(l.dir, "manifest")
			return errors.Join(copyTo(p, to), os.Remove(p), os.Symlink(to, p))
		}, sandbox.CodeCorruptCapture},
		"a directory": {func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o700)) }, sandbox.CodeCorruptCapture},
	} {
		harmed(t, path, c.do, func() { f(t, "a manifest "+what, c.code) })
	}
}

// TestCaptureRequests sends what no capture, fork or wake should take.
func TestCaptureRequests(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const none, noSnapshot = "sbx00000000000000000", "snp00000000000000000"
	runtime := l.capable(t, full)[0]
	sb := l.create(t, wire.CreateSandbox{Runtime: runtime, User: "root"})
	at := "/v1/sandboxes/" + sb.ID
	typed := http.Header{"Content-Type": {"application/json"}}
	labels := map[string]string{}
	for i := range 2000 {
		labels[fmt.Sprint(i)] = "x"
	}
	many, err := json.Marshal(map[string]any{"metadata": labels})
	must(t, err)
	for _, c := range []struct {
		name, method, path, body string
		code                     sandbox.Code
		phrases                  []string
	}{
		{"no forks", "POST", at + "/fork", `{"count":0}`, sandbox.CodeInvalid, []string{"count"}},
		{"fewer than no forks", "POST", at + "/fork", `{"count":-1}`, sandbox.CodeInvalid, []string{"count"}},
		{"too many forks", "POST", at + "/fork", `{"count":101}`, sandbox.CodeInvalid, []string{"count", "100"}},
		{"half a fork", "POST", at + "/fork", `{"count":1.5}`, sandbox.CodeInvalid, []string{"count"}},
		{"a fork of words", "POST", at + "/fork", `{"count":"two"}`, sandbox.CodeInvalid, []string{"count"}},
		{"a list of forks", "POST", at + "/fork", `[]`, sandbox.CodeInvalid, nil},
		{"half a body", "POST", at + "/fork", `{"count":`, sandbox.CodeInvalid, nil},
		{"an unknown field", "POST", at + "/fork", `{"counts":2}`, sandbox.CodeInvalid, []string{"counts"}},
		{"an unknown kind of fork", "POST", at + "/fork", `{"kind":"half"}`, sandbox.CodeInvalid, []string{"kind"}},
		{"a variable without a name", "POST", at + "/fork", `{"env":{"":"x"}}`, sandbox.CodeInvalid, []string{"environment"}},
		{"too many labels", "POST", at + "/fork", string(many), sandbox.CodeInvalid, []string{"metadata"}},
		{"a life of less than nothing", "POST", at + "/fork", `{"timeout":-1}`, sandbox.CodeInvalid, []string{"timeout"}},
		{"a fork of nothing", "POST", "/v1/sandboxes/" + none + "/fork", ``, sandbox.CodeNotFound, []string{none}},
		{"a fork of a path", "POST", "/v1/sandboxes/..%2f..%2fetc/fork", `{}`, sandbox.CodeInvalid, []string{"id"}},
		{"an unknown kind", "POST", at + "/snapshots", `{"kind":"ram"}`, sandbox.CodeInvalid, []string{"kind"}},
		{"a name that is a path", "POST", at + "/snapshots", `{"name":"../../etc/passwd"}`, sandbox.CodeInvalid, []string{"name"}},
		{"a name that begins with a point", "POST", at + "/snapshots", `{"name":".hidden"}`, sandbox.CodeInvalid, []string{"name"}},
		{"a name of a line", "POST", at + "/snapshots", `{"name":"a\nb"}`, sandbox.CodeInvalid, []string{"name"}},
		{"a name with a NUL", "POST", at + "/snapshots", `{"name":"a\u0000"}`, sandbox.CodeInvalid, []string{"name"}},
		{"a name of an escape", "POST", at + "/snapshots", `{"name":"\u001b[31m"}`, sandbox.CodeInvalid, []string{"name"}},
		{"a name that is an id", "POST", at + "/snapshots", `{"name":"` + noSnapshot + `"}`, sandbox.CodeInvalid, []string{"name", "id"}},
		{"a name too long", "POST", at + "/snapshots", `{"name":"` + strings.Repeat("n", 129) + `"}`, sandbox.CodeInvalid, []string{"name"}},
		{"a snapshot of nothing", "POST", "/v1/sandboxes/" + none + "/snapshots", `{}`, sandbox.CodeNotFound, []string{none}},
		{"the removal of nothing", "DELETE", "/v1/snapshots/" + noSnapshot, ``, sandbox.CodeNotFound, []string{noSnapshot}},
		{"the removal of a path", "DELETE", "/v1/snapshots/..%2f" + noSnapshot, ``, sandbox.CodeNotFound, nil},
		{"a look at a long name", "GET", "/v1/snapshots/" + strings.Repeat("n", 300), ``, sandbox.CodeInvalid, nil},
		{"snapshots of no id", "GET", "/v1/snapshots?source=UPPER", ``, sandbox.CodeInvalid, []string{"id"}},
		{"too many snapshots", "GET", "/v1/snapshots?limit=1001", ``, sandbox.CodeInvalid, []string{"limit"}},
		{"snapshots after nothing", "GET", "/v1/snapshots?token=%00%ff", ``, sandbox.CodeInvalid, []string{"token"}},
		{"a tree of nothing", "GET", "/v1/tree?root=" + none, ``, sandbox.CodeNotFound, []string{none}},
		{"a create from nothing", "POST", "/v1/sandboxes", `{"snapshot":"` + noSnapshot + `"}`, sandbox.CodeNotFound, []string{noSnapshot}},
		{"a create from a path", "POST", "/v1/sandboxes", `{"snapshot":"../` + noSnapshot + `"}`, sandbox.CodeNotFound, nil},
		{"a create from two things", "POST", "/v1/sandboxes", `{"snapshot":"` + noSnapshot + `","template":"tiny"}`, sandbox.CodeInvalid, []string{"template", "snapshot"}},
		{"the hibernation of nothing", "POST", "/v1/sandboxes/" + none + "/hibernate", ``, sandbox.CodeNotFound, []string{none}},
		{"the waking of nothing", "POST", "/v1/sandboxes/" + none + "/wake", ``, sandbox.CodeNotFound, []string{none}},
		{"the suspension of nothing", "POST", "/v1/sandboxes/" + none + "/suspend", ``, sandbox.CodeNotFound, []string{none}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l.raw(t, c.method, c.path, typed, strings.NewReader(c.body)).wantError(t, c.code, c.phrases...)
		})
	}
	if n := len(l.list(t, client.Filter{Live: true})); n != 1 || len(l.captures(t)) > 0 {
		t.Errorf("bad requests made sandboxes, of which there are %d, or captures", n)
	}
	t.Run("no body", func(t *testing.T) { // all of it has defaults
		for _, h := range []http.Header{{}, typed} {
			for _, path := range []string{"/fork", "/snapshots"} {
				if a := l.raw(t, "POST", at+path, h, nil); a.status >= 300 {
					t.Errorf("POST %s with %v: %d %s", path, h, a.status, a.body)
				}
			}
			for _, path := range []string{"/suspend", "/suspend", "/unsuspend", "/unsuspend", "/hibernate", "/hibernate", "/wake", "/wake"} {
				if a := l.raw(t, "POST", at+path, h, nil); a.status != 204 {
					t.Errorf("POST %s with %v: %d %s", path, h, a.status, a.body)
				}
			}
		}
	})
	t.Run("a name twice", func(t *testing.T) {
		_, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{Name: "once"})
		must(t, err)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				_, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{Name: "once"})
				wantError(t, err, sandbox.CodeExists, "once")
			})
		}
		wg.Wait()
	})
	t.Run("another tenant", func(t *testing.T) {
		other, err := client.New("unix://"+l.socket, client.Options{Tenant: "other"})
		must(t, err)
		defer other.Close()
		n, err := l.cl.Snapshot(t.Context(), "once")
		must(t, err)
		for what, call := range map[string]func(id, snapshot string) error{
			"fork": func(id, _ string) error { _, err := other.Fork(t.Context(), id, wire.Fork{}); return err },
			"snapshot": func(id, _ string) error {
				_, err := other.CreateSnapshot(t.Context(), id, wire.CreateSnapshot{})
				return err
			},
			"hibernate":        func(id, _ string) error { return other.Hibernate(t.Context(), id) },
			"wake":             func(id, _ string) error { return other.Wake(t.Context(), id) },
			"suspend":          func(id, _ string) error { return other.Suspend(t.Context(), id) },
			"unsuspend":        func(id, _ string) error { return other.Unsuspend(t.Context(), id) },
			"tree":             func(id, _ string) error { _, err := other.Tree(t.Context(), id); return err },
			"tree of snapshot": func(_, n string) error { _, err := other.Tree(t.Context(), n); return err },
			"inspect":          func(_, n string) error { _, err := other.Snapshot(t.Context(), n); return err },
			"remove":           func(_, n string) error { return other.RemoveSnapshot(t.Context(), n) },
			"create": func(_, n string) error {
				_, err := other.CreateSandbox(t.Context(), wire.CreateSandbox{Snapshot: n})
				return err
			},
		} {
			theirs, nobodys := call(sb.ID, n.ID), call(none, noSnapshot)
			if sandbox.CodeOf(theirs) != sandbox.CodeNotFound || sandbox.CodeOf(nobodys) != sandbox.CodeNotFound {
				t.Errorf("%s: %v (%s), and of what is nobody's %v", what, theirs, sandbox.CodeOf(theirs), nobodys)
			}
			// What is another's and what is not there look the same.
			a := strings.NewReplacer(sb.ID, "ID", n.ID, "ID").Replace(fmt.Sprint(theirs))
			b := strings.NewReplacer(none, "ID", noSnapshot, "ID").Replace(fmt.Sprint(nobodys))
			if a != b {
				t.Errorf("%s tells another's from nobody's:\n%s\n%s", what, a, b)
			}
		}
		if _, err := other.Snapshot(t.Context(), "once"); sandbox.CodeOf(err) != sandbox.CodeNotFound {
			t.Errorf("another tenant's name: %v", err)
		}
	})
	t.Run("what is suspended", func(t *testing.T) {
		must(t, l.cl.Suspend(t.Context(), sb.ID))
		_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
		wantError(t, err, sandbox.CodeConflict, "suspended")
		_, _, err = l.cl.ReadFile(t.Context(), sb.ID, "/etc/passwd", "")
		wantError(t, err, sandbox.CodeConflict, "suspended")
		err = l.cl.WriteFile(t.Context(), sb.ID, "/tmp/x", "", strings.NewReader("x"), 1, 0)
		wantError(t, err, sandbox.CodeConflict, "suspended")
		wantError(t, l.cl.Wake(t.Context(), sb.ID), sandbox.CodeConflict, "suspended")
		if got, err := l.cl.SetNetwork(t.Context(), sb.ID, wire.Network{Mode: "none"}); err != nil || got.Network.Mode != "none" {
			t.Errorf("its network: %+v, %v", got.Network, err)
		}
		must(t, l.cl.Unsuspend(t.Context(), sb.ID))
	})
	t.Run("what is hibernated", func(t *testing.T) {
		must(t, l.cl.Hibernate(t.Context(), sb.ID))
		wantError(t, l.cl.Suspend(t.Context(), sb.ID), sandbox.CodeConflict, "hibernated")
		wantError(t, l.cl.Unsuspend(t.Context(), sb.ID), sandbox.CodeConflict, "hibernated")
		_, err := l.cl.CreateSnapshot(t.Context(), sb.ID, wire.CreateSnapshot{Kind: sandbox.SnapshotDisk})
		wantError(t, err, sandbox.CodeConflict, "hibernated", "full")
		// Its network is changed without waking it, and is so when it wakes.
		got, err := l.cl.SetNetwork(t.Context(), sb.ID, wire.Network{Mode: "egress", Allow: []wire.EgressRule{{CIDR: "192.0.2.0/24"}}})
		if err != nil || got.State != sandbox.Hibernated || len(got.Network.Allow) != 1 {
			t.Errorf("its network: %+v, %v", got, err)
		}
		must(t, l.cl.WriteFile(t.Context(), sb.ID, "/tmp/x", "", strings.NewReader("x"), 1, 0))
		if got := l.get(t, sb.ID); got.State != sandbox.Running || len(got.Network.Allow) != 1 || got.Network.Mode != "egress" {
			t.Errorf("awake it is %s with %+v", got.State, got.Network)
		}
	})
	t.Run("what has ended", func(t *testing.T) {
		must(t, l.cl.Kill(t.Context(), sb.ID))
		for what, err := range map[string]error{
			"hibernate": l.cl.Hibernate(t.Context(), sb.ID), "wake": l.cl.Wake(t.Context(), sb.ID),
			"suspend": l.cl.Suspend(t.Context(), sb.ID), "unsuspend": l.cl.Unsuspend(t.Context(), sb.ID),
		} {
			if sandbox.CodeOf(err) != sandbox.CodeConflict || !strings.Contains(err.Error(), "killed") {
				t.Errorf("%s: %v (%s)", what, err, sandbox.CodeOf(err))
			}
		}
	})
}

// TestRemovedBelow takes away what forks, hibernated sandboxes and snapshots
// stand on, while they do.
func TestRemovedBelow(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*longest)
	defer cancel()
	for _, runtime := range l.capable(t, func(c sandbox.Capabilities) bool { return c.FullCapture || c.DiskCapture }) {
		can := l.abilities(t)[runtime]
		t.Run(runtime+" template", func(t *testing.T) {
			build := func(file string) {
				t.Helper()
				var d layer
				d.file("Dockerfile", "FROM tiny\nCOPY file /file\n", 0o644)
				d.file("file", file, 0o644)
				_, err := l.cl.BuildTemplate(ctx, wire.BuildTemplate{Name: "below", Dockerfile: &wire.BuildDockerfile{}}, bytes.NewReader(d.bytes()), nil)
				must(t, err)
			}
			build("of the template")
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Template: "below"})
			l.sh(t, sb.ID, "echo kept > /tmp/file")
			n, err := l.cl.CreateSnapshot(ctx, sb.ID, wire.CreateSnapshot{})
			must(t, err)
			if can.FullCapture {
				must(t, l.cl.Hibernate(ctx, sb.ID))
			}
			wantError(t, l.cl.RemoveTemplate(ctx, "below"), sandbox.CodeConflict, sb.ID)
			build("another template's") // takes its place
			l.d.kill()                  // the next daemon has to find the layers, too
			l.start(t)
			res, err := l.cl.Fork(ctx, sb.ID, wire.Fork{})
			must(t, err)
			if res.Forks[0].Error != nil {
				t.Fatalf("a fork: %v", res.Forks[0].Error.Err())
			}
			of := l.create(t, wire.CreateSandbox{Snapshot: n.ID})
			for _, id := range []string{sb.ID, res.Forks[0].Sandbox.ID, of.ID} {
				if out := l.sh(t, id, "cat /file"); out != "of the template" {
					t.Errorf("it has %q", out)
				}
				must(t, l.cl.Kill(ctx, id))
			}
			must(t, l.cl.RemoveSnapshot(ctx, n.ID))
			must(t, l.cl.RemoveTemplate(ctx, "below"))
			l.noCapture(t)
		})
		t.Run(runtime+" source", func(t *testing.T) {
			// Ends of the source, and of the copies as soon as they are seen.
			for i := range 4 {
				sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
				l.sh(t, sb.ID, "echo kept > /root/file || echo kept > /tmp/file")
				var wg sync.WaitGroup
				forked := make(chan wire.ForkList, 1)
				wg.Go(func() {
					res, err := l.cl.Fork(ctx, sb.ID, wire.Fork{Count: 3})
					if err != nil && sandbox.CodeOf(err) != sandbox.CodeConflict {
						t.Errorf("the fork: %v (%s)", err, sandbox.CodeOf(err))
					}
					forked <- res
				})
				time.Sleep(time.Duration(i*150) * time.Millisecond)
				wg.Go(func() {
					if err := l.cl.Kill(ctx, sb.ID); err != nil {
						t.Error(err)
					}
				})
				if i%2 == 1 {
					wg.Go(func() { // one copy, as soon as it is there
						for range 100 {
							for _, c := range l.list(t, client.Filter{Live: true}) {
								if c.Parent == sb.ID {
									if err := l.cl.Kill(ctx, c.ID); err != nil {
										t.Errorf("the end of a copy: %v", err)
									}
									return
								}
							}
							time.Sleep(10 * time.Millisecond)
						}
					})
				}
				wg.Wait()
				for _, f := range (<-forked).Forks {
					if f.Error != nil {
						if f.Error.Code != sandbox.CodeConflict {
							t.Errorf("a copy: %v", f.Error.Err())
						}
						continue
					}
					if got := l.get(t, f.Sandbox.ID); got.State == sandbox.Running {
						if out := l.sh(t, got.ID, "cat /root/file /tmp/file 2>/dev/null; true"); out != "kept" {
							t.Errorf("a copy has %q", out)
						}
						must(t, l.cl.Kill(ctx, got.ID))
					}
				}
				for _, c := range l.list(t, client.Filter{Live: true}) {
					must(t, l.cl.Kill(ctx, c.ID))
				}
				l.noCapture(t)
				l.verify(t)
			}
		})
		t.Run(runtime+" snapshot", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			n, err := l.cl.CreateSnapshot(ctx, sb.ID, wire.CreateSnapshot{})
			must(t, err)
			must(t, l.cl.Kill(ctx, sb.ID))
			of := l.create(t, wire.CreateSandbox{Snapshot: n.ID})
			wantError(t, l.cl.RemoveSnapshot(ctx, n.ID), sandbox.CodeConflict, of.ID)
			if can.FullCapture {
				must(t, l.cl.Hibernate(ctx, of.ID))
				l.d.kill()
				l.start(t)
				wantError(t, l.cl.RemoveSnapshot(ctx, n.ID), sandbox.CodeConflict, of.ID)
				must(t, l.cl.Wake(ctx, of.ID))
			}
			l.sh(t, of.ID, "true")
			must(t, l.cl.Kill(ctx, of.ID))
			// A removal and creates at once: either sees the other.
			var wg sync.WaitGroup
			var removed error
			wg.Go(func() { removed = l.cl.RemoveSnapshot(ctx, n.ID) })
			for range 3 {
				wg.Go(func() {
					c, err := l.cl.CreateSandbox(ctx, wire.CreateSandbox{Snapshot: n.ID})
					if err == nil {
						if err := l.cl.Kill(ctx, c.ID); err != nil {
							t.Error(err)
						}
					} else if c := sandbox.CodeOf(err); c != sandbox.CodeNotFound {
						t.Errorf("a create beside the removal: %v (%s)", err, c)
					}
				})
			}
			wg.Wait()
			if removed != nil {
				wantError(t, removed, sandbox.CodeConflict)
				must(t, l.cl.RemoveSnapshot(ctx, n.ID))
			}
			l.noCapture(t)
		})
		if !can.FullCapture {
			continue
		}
		t.Run(runtime+" time", func(t *testing.T) {
			// The time to live runs out around captures and wakes.
			for i := range 6 {
				sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
				if i%3 == 2 {
					must(t, l.cl.Hibernate(ctx, sb.ID))
				}
				_, err := l.cl.SetTimeout(ctx, sb.ID, time.Duration(20+60*i)*time.Millisecond)
				must(t, err)
				switch i % 3 {
				case 0:
					var res wire.ForkList
					if res, err = l.cl.Fork(ctx, sb.ID, wire.Fork{Count: 2}); err == nil {
						for _, f := range res.Forks {
							if f.Error != nil {
								t.Errorf("a copy: %v", f.Error.Err())
								continue
							}
							l.sh(t, f.Sandbox.ID, "true") // their time is their own
							must(t, l.cl.Kill(ctx, f.Sandbox.ID))
						}
					}
				case 1:
					err = l.cl.Hibernate(ctx, sb.ID)
				case 2:
					err = l.cl.Wake(ctx, sb.ID)
				}
				if err != nil && sandbox.CodeOf(err) != sandbox.CodeConflict {
					t.Errorf("%d: %v (%s)", i, err, sandbox.CodeOf(err))
				}
				l.waitEnded(t, sb.ID, sandbox.Killed, sandbox.ReasonTimeout)
				l.noCapture(t)
			}
			l.verify(t)
		})
	}
}
