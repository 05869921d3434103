package runtimetest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// captures are the tests of full captures: memory, processes and disk.
var captures = []test{
	{"FullCapture", testFull},
	{"FullCaptureKeeps", testFullKeeps},
	{"FullCaptureConnections", testFullConnections},
	{"FullCaptureEnds", testFullEnds},
	{"FullCaptureOfFullCapture", testFullChain},
	{"FullCaptureSuspended", testFullSuspended},
	{"FullCaptureRefused", testFullRefused},
	{"FullCaptureCanceled", testFullCanceled},
	{"FullCaptureSideBySide", testFullMany},
	{"FullCapturePrepared", testPrepared},
	{"FullCaptureAdopt", testFullAdopt},
	{"FullCaptureCrash", testFullCrash},
}

// capturer gives the abilities of full captures. A runtime without them must
// not claim them.
func capturer(t *testing.T, e *Env, i sandbox.Instance) (sandbox.Checkpointer, sandbox.Restorer) {
	t.Helper()
	c, isC := i.(sandbox.Checkpointer)
	r, isR := e.Driver.(sandbox.Restorer)
	claims := e.Driver.Capabilities().FullCapture
	if isC != claims || isR != claims {
		t.Fatalf("it claims full captures: %v; Checkpointer is %v, Restorer is %v", claims, isC, isR)
	}
	if !claims {
		t.Skip("this runtime captures no memory, and says so")
	}
	return c, r
}

// checkpoint captures i, which goes on.
func checkpoint(t *testing.T, e *Env, i sandbox.Instance) (dir string) {
	t.Helper()
	c, _ := capturer(t, e, i)
	dir = filepath.Join(t.TempDir(), "capture")
	if err := c.Checkpoint(t.Context(), dir, sandbox.CheckpointOptions{LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// restore makes a sandbox from a capture and fails t when that fails.
func restore(t *testing.T, e *Env, dir string, spec sandbox.Spec) sandbox.Instance {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	i, err := e.Driver.(sandbox.Restorer).Restore(ctx, dir, spec)
	if err != nil {
		t.Fatalf("restore: %v", err)
	}
	t.Cleanup(func() {
		if err := i.Kill(context.Background()); err != nil {
			t.Errorf("kill: %v", err)
		}
	})
	return i
}

// A talk is a connection to a captive.
type talk struct {
	net.Conn
	r *bufio.Reader
}

// withCaptive makes a sandbox in which a captive runs.
func withCaptive(t *testing.T, e *Env) (sandbox.Spec, sandbox.Instance) {
	t.Helper()
	layer := filepath.Join(t.TempDir(), "captive")
	WriteLayer(t, layer, nil)
	if err := build(filepath.Join(layer, "captive"), "github.com/warrenhq/warren/internal/runtime/runtimetest/captive"); err != nil {
		t.Fatal(err)
	}
	spec := e.Spec(t)
	spec.Layers = append([]string{layer}, spec.Layers...)
	i := e.Create(t, spec)
	Sh(t, i, "/captive >/tmp/captive.log 2>&1 &")
	return spec, i
}

func dial(t *testing.T, i sandbox.Instance) *talk {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		conn, err := i.Dial(t.Context(), 7000)
		if err == nil {
			t.Cleanup(func() { conn.Close() })
			return &talk{conn, bufio.NewReader(conn)}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the captive does not listen: %v", err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (k *talk) ask(t *testing.T, line string) string {
	t.Helper()
	k.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := fmt.Fprintln(k, line); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	got, err := k.r.ReadString('\n')
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return strings.TrimSpace(got)
}

// becomes asks until the answer is want.
func (k *talk) becomes(t *testing.T, line, want string, within time.Duration) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(5 * time.Millisecond) {
		got := k.ask(t, line)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s = %q after %v, want %q", line, got, within, want)
		}
	}
}

func testFull(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	Sh(t, i, `echo in upper > /var/lib/f; echo in tmp > /tmp/f; echo in shm > /dev/shm/f; rm /etc/of-layer
		(sleep 1000 >/dev/null 2>&1 &)
		(while true; do sleep 0.01; echo x >> /tmp/ticks; done >/dev/null 2>&1 &)`)
	dir := checkpoint(t, e, i)
	Sh(t, i, "echo later > /var/lib/f") // it goes on, and the capture does not follow
	if err := i.(sandbox.Checkpointer).Checkpoint(t.Context(), dir, sandbox.CheckpointOptions{LeaveRunning: true}); sandbox.CodeOf(err) != sandbox.CodeExists {
		t.Errorf("captured onto a directory that exists: %v", err)
	}
	next := e.Spec(t)
	next.Hostname = "other"
	next.Resources.MemoryMiB *= 2
	j := restore(t, e, dir, next)
	for _, x := range []struct{ cmd, want string }{
		{"cat /var/lib/f /tmp/f /dev/shm/f", "in upper\nin tmp\nin shm"},
		{"ls /etc/of-layer 2>/dev/null || echo gone", "gone"},
		{"ps | grep -c '[s]leep 1000$'", "1"},
		{"hostname", "other"},
		{"echo new > /var/lib/f; cat /var/lib/f", "new"},
		{"test $(date +%Y) -ge $(date -r /etc/passwd +%Y 2>/dev/null || echo 0) && echo yes", "yes"},
	} {
		if got := Sh(t, j, x.cmd); got != x.want {
			t.Errorf("restored, %s = %q, want %q", x.cmd, got, x.want)
		}
	}
	if got := Sh(t, i, "cat /var/lib/f; hostname"); got != "later\nbox" {
		t.Errorf("the source has %q", got)
	}
	for _, x := range []sandbox.Instance{i, j} {
		before, _ := strconv.Atoi(Sh(t, x, "wc -l < /tmp/ticks"))
		for deadline := time.Now().Add(10 * time.Second); ; {
			if now, _ := strconv.Atoi(Sh(t, x, "wc -l < /tmp/ticks")); now > before {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("its processes do not go on")
			}
		}
	}
	if s, err := j.Stats(t.Context()); err != nil || s.MemoryLimit < int64(next.Resources.MemoryMiB)<<20 {
		t.Errorf("stats = %+v, %v", s, err)
	}
	if got := strings.TrimSpace(Sh(t, j, "echo restored")); got != "restored" {
		t.Error(got)
	}
}

func testFullKeeps(t *testing.T, e *Env) {
	first, i := withCaptive(t, e)
	capturer(t, e, i)
	a := dial(t, i)
	secret := a.ask(t, "secret")
	a.ask(t, "alarm 1500ms")
	dir := checkpoint(t, e, i)
	spec := e.Spec(t)
	spec.Layers = first.Layers
	j := restore(t, e, dir, spec)
	b := dial(t, j) // the listener listens
	for who, k := range map[string]*talk{"source": a, "copy": b} {
		for _, x := range []struct{ ask, want string }{
			{"secret", secret},
			{"pipe through", "pipe:through"},
			{"socket through", "socket:through"},
			{"lock", "held"},
			{"inotify " + who, "created " + who},
			{"sleeping", "yes"},
		} {
			if got := k.ask(t, x.ask); got != x.want {
				t.Errorf("%s: %s = %q, want %q", who, x.ask, got, x.want)
			}
		}
		ticks := k.ask(t, "ticks")
		deadline := time.Now().Add(10 * time.Second)
		for k.ask(t, "ticks") == ticks {
			if time.Now().After(deadline) {
				t.Fatalf("%s: its ticker stands still", who)
			}
		}
		k.becomes(t, "alarmed", "true", 20*time.Second)
	}
}

// testFullConnections: the source's go on, and in the copy both ends of those
// that were open are done with at once.
func testFullConnections(t *testing.T, e *Env) {
	spec, i := withCaptive(t, e)
	capturer(t, e, i)
	l, err := net.Listen("tcp", net.JoinHostPort(spec.Link.Gateway.String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ended := make(chan error, 1) // the outside's end of the captive's connection
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
		}
		ended <- err
	}()
	a, idle := dial(t, i), dial(t, i)
	if got := a.ask(t, "dial "+l.Addr().String()); got != "open" {
		t.Fatal(got)
	}
	idle.ask(t, "echo here")
	dir := checkpoint(t, e, i)
	for range 3 {
		if got := a.ask(t, "echo still"); got != "still" {
			t.Errorf("the source's connection gave %q", got)
		}
	}
	next := e.Spec(t)
	next.Layers = spec.Layers
	j := restore(t, e, dir, next)
	b := dial(t, j)
	b.becomes(t, "open", "1", 5*time.Second) // b's own
	b.becomes(t, "out", "closed", 5*time.Second)
	if got := a.ask(t, "out"); got != "open" {
		t.Errorf("the source's connection to the outside is %s", got)
	}
	if got := idle.ask(t, "echo me too"); got != "me too" {
		t.Errorf("the source's other connection gave %q", got)
	}
	select {
	case err := <-ended:
		t.Errorf("the source's connection to the outside ended: %v", err)
	default:
	}
	// Put to sleep, the other ends learn of it.
	err = i.(sandbox.Checkpointer).Checkpoint(t.Context(), filepath.Join(t.TempDir(), "c"), sandbox.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the outside read something")
		}
	case <-time.After(5 * time.Second):
		t.Error("the outside waits for a sandbox that is gone")
	}
	a.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := a.r.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a client of a sandbox that is gone: %v", err)
	} else if !errors.Is(err, io.EOF) {
		t.Logf("a client sees: %v", err)
	}
}

// testFullEnds: the same sandbox goes to sleep and wakes, many times, in the
// same slot and with files that were never flushed.
func testFullEnds(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	c, _ := capturer(t, e, i)
	Sh(t, i, "(sleep 1000 >/dev/null 2>&1 &)")
	want := ""
	for n := range 4 {
		Sh(t, i, fmt.Sprintf("echo %d >> /var/lib/log; dd if=/dev/urandom of=/var/lib/f%d bs=64k count=8 2>/dev/null", n, n))
		want = Sh(t, i, "cat /var/lib/log /var/lib/f* | md5sum")
		dir := filepath.Join(t.TempDir(), "capture")
		if err := c.Checkpoint(t.Context(), dir, sandbox.CheckpointOptions{}); err != nil {
			t.Fatal(err)
		}
		if st, err := i.Wait(t.Context()); err != nil {
			t.Errorf("wait: %+v, %v", st, err)
		}
		if err := i.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		// The manager keeps the directory of one that sleeps, without what was
		// its disk.
		if err := os.RemoveAll(filepath.Join(spec.Dir, "rw")); err != nil {
			t.Fatal(err)
		}
		i = restore(t, e, dir, spec)
		c = i.(sandbox.Checkpointer)
		if got := Sh(t, i, "cat /var/lib/log /var/lib/f* | md5sum; ps | grep -c '[s]leep 1000'"); got != want+"\n1" {
			t.Fatalf("after %d times it has %q, had %q", n+1, got, want)
		}
	}
}

func testFullChain(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	capturer(t, e, i)
	for n := range 3 {
		Sh(t, i, fmt.Sprintf("echo %d >> /tmp/f", n))
		dir := checkpoint(t, e, i)
		next := e.Spec(t)
		j := restore(t, e, dir, next)
		if err := os.RemoveAll(dir); err != nil { // nobody needs it any more
			t.Fatal(err)
		}
		i = j
	}
	if got := Sh(t, i, "cat /tmp/f"); got != "0\n1\n2" {
		t.Errorf("a fork of a fork of a fork has %q", got)
	}
}

func testFullSuspended(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	capturer(t, e, i)
	s, ok := i.(sandbox.Suspender)
	if !ok {
		t.Skip("this runtime cannot suspend")
	}
	Sh(t, i, "echo kept > /tmp/f")
	if err := s.Suspend(t.Context()); err != nil {
		t.Fatal(err)
	}
	dir := checkpoint(t, e, i)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, err := Exec(ctx, i, "true"); err == nil {
		t.Error("the capture woke the suspended sandbox")
	}
	j := restore(t, e, dir, e.Spec(t))
	if got := Sh(t, j, "cat /tmp/f"); got != "kept" {
		t.Error(got)
	}
	if err := s.Unsuspend(t.Context()); err != nil {
		t.Fatal(err)
	}
	Sh(t, i, "true")
}

// testFullRefused: nothing is left of a restore of what is not whole or does
// not fit, and the errors say so.
func testFullRefused(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	_, r := capturer(t, e, i)
	if v := r.CaptureVersion(); v == "" || v != e.Reopen(t).(sandbox.Restorer).CaptureVersion() {
		t.Errorf("the version of captures is %q, and another for the next daemon", v)
	}
	dir := checkpoint(t, e, i)
	edit := func(file string, f func(string)) string {
		dst := filepath.Join(t.TempDir(), "edited")
		Run(t, "cp", "-a", dir, dst)
		f(filepath.Join(dst, file))
		return dst
	}
	remove := func(p string) { os.Remove(p) }
	cut := func(p string) {
		st, err := os.Stat(p)
		if err == nil {
			err = os.Truncate(p, st.Size()/2)
		}
		if err != nil {
			t.Error(err)
		}
	}
	replace := func(old, new string) func(string) {
		return func(p string) {
			data, err := os.ReadFile(p)
			if err == nil {
				err = os.WriteFile(p, []byte(strings.ReplaceAll(string(data), old, new)), 0o600)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	const description = "warren.json"
	for _, x := range []struct {
		name, dir string
		change    func(*sandbox.Spec)
		code      sandbox.Code
	}{
		{"no directory", filepath.Join(dir, "nowhere"), nil, sandbox.CodeCorruptCapture},
		{"no description", edit(description, remove), nil, sandbox.CodeCorruptCapture},
		{"half a description", edit(description, cut), nil, sandbox.CodeCorruptCapture},
		{"no state", edit("checkpoint.img", remove), nil, sandbox.CodeCorruptCapture},
		{"half a state", edit("checkpoint.img", cut), nil, sandbox.CodeInternal},
		{"another version", edit(description, replace(r.CaptureVersion(), "another")), nil, sandbox.CodeUnsupported},
		{"another processor", edit(description, replace(`"cpu":[`, `"cpu":["warp",`)), nil, sandbox.CodeUnsupported},
		{"other layers", dir, func(s *sandbox.Spec) { s.Layers = append([]string{t.TempDir()}, s.Layers...) }, sandbox.CodeInvalid},
		{"another disk limit", dir, func(s *sandbox.Spec) { s.Resources.DiskMiB = 77 }, sandbox.CodeInvalid},
	} {
		spec := e.Spec(t)
		if x.change != nil {
			x.change(&spec)
		}
		j, err := r.Restore(t.Context(), x.dir, spec)
		if err == nil {
			t.Errorf("%s: restored", x.name)
			j.Kill(t.Context())
			continue
		}
		if got := sandbox.CodeOf(err); got != x.code {
			t.Errorf("%s: %s: %v, want %s", x.name, got, err, x.code)
		}
		if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 1 {
			t.Errorf("%s: left behind: %v, %v", x.name, ids, err)
		}
	}
	restore(t, e, dir, e.Spec(t)) // and the capture itself is good
}

func testFullCanceled(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	c, r := capturer(t, e, i)
	for after := time.Duration(0); after < 60; after += 6 {
		ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
		dir := filepath.Join(t.TempDir(), "capture")
		err := c.Checkpoint(ctx, dir, sandbox.CheckpointOptions{LeaveRunning: true})
		cancel()
		if err == nil {
			continue
		}
		if code := sandbox.CodeOf(err); code != sandbox.CodeTimeout {
			t.Errorf("capture ended after %d ms: %s: %v", after, code, err)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("capture ended after %d ms: its directory is left", after)
		}
		Sh(t, i, "true") // it goes on
	}
	dir := checkpoint(t, e, i) // and can be captured
	link := e.Link(t)
	for after := time.Duration(0); after < 150; after += 10 {
		spec := e.SpecAt(t, link)
		ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
		j, err := r.Restore(ctx, dir, spec)
		cancel()
		if err == nil {
			if err := j.Kill(t.Context()); err != nil {
				t.Error(err)
			}
		} else if code := sandbox.CodeOf(err); code != sandbox.CodeTimeout {
			t.Errorf("restore ended after %d ms: %s: %v", after, code, err)
		}
		if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 1 {
			t.Errorf("restore ended after %d ms: left behind: %v, %v", after, ids, err)
		}
	}
}

func testFullMany(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	_, r := capturer(t, e, i)
	Sh(t, i, "echo kept > /tmp/f")
	dir := checkpoint(t, e, i)
	const n = 6
	errs := make(chan error, n)
	for range n {
		spec := e.Spec(t)
		go func() {
			j, err := r.Restore(t.Context(), dir, spec)
			if err == nil {
				var out string
				out, _, err = Exec(t.Context(), j, "cat /tmp/f; echo mine >> /tmp/f")
				if err == nil && out != "kept" {
					err = fmt.Errorf("it has %q", out)
				}
				err = errors.Join(err, j.Kill(t.Context()))
			}
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func testPrepared(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	capturer(t, e, i)
	p, ok := e.Driver.(sandbox.Preparer)
	if !ok {
		t.Skip("this runtime prepares nothing")
	}
	Sh(t, i, "echo kept > /tmp/f")
	spec, dropped := e.Spec(t), e.Spec(t)
	ready, err := p.Prepare(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Reopen(t).Adopt(t.Context(), spec); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("adopting what was only prepared = %v, want %s", err, sandbox.CodeNotFound)
	}
	none, err := p.Prepare(t.Context(), dropped)
	if err != nil {
		t.Fatal(err)
	}
	if err := none.Discard(t.Context()); err != nil {
		t.Error(err)
	}
	dir := checkpoint(t, e, i)
	j, err := ready.Restore(t.Context(), dir, "another-name")
	if err != nil {
		t.Fatal(err)
	}
	if l, ok := j.(sandbox.Loading); ok {
		if err := l.Loaded(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if got := Sh(t, j, "cat /tmp/f; hostname"); got != "kept\nanother-name" {
		t.Error(got)
	}
	// What comes of it has a name of its own, too.
	spec2 := e.Spec(t)
	k := restore(t, e, checkpoint(t, e, j), spec2)
	if got := Sh(t, k, "hostname"); got != spec2.Hostname {
		t.Errorf("a copy's hostname is %s, and should be %s", got, spec2.Hostname)
	}
	if err := k.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	next, err := e.Reopen(t).Adopt(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := j.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	// Of a capture that is not whole nothing is left either.
	bad, err := p.Prepare(t.Context(), e.Spec(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bad.Restore(t.Context(), filepath.Join(dir, "nowhere"), "another"); sandbox.CodeOf(err) != sandbox.CodeCorruptCapture {
		t.Errorf("restore of nothing = %v", err)
	}
	if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 1 {
		t.Errorf("left behind: %v, %v", ids, err)
	}
}

// testFullAdopt: the next daemon has a restored sandbox's console, and can
// capture it.
func testFullAdopt(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	capturer(t, e, i)
	Sh(t, i, "echo kept > /tmp/f")
	dir := checkpoint(t, e, i)
	spec := e.Spec(t)
	restore(t, e, dir, spec)
	d := e.Reopen(t)
	j, err := d.Adopt(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	again := filepath.Join(t.TempDir(), "again")
	if err := j.(sandbox.Checkpointer).Checkpoint(t.Context(), again, sandbox.CheckpointOptions{LeaveRunning: true, Durable: true}); err != nil {
		t.Fatal(err)
	}
	k := restore(t, e, again, e.Spec(t))
	if got := Sh(t, k, "cat /tmp/f"); got != "kept" {
		t.Error(got)
	}
	if err := j.Kill(t.Context()); err != nil {
		t.Error(err)
	}
}
