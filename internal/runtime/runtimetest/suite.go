package runtimetest

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/console"
	"github.com/warrenhq/warren/internal/sandbox"
)

type test struct {
	name string
	run  func(t *testing.T, e *Env)
}

// Suite runs every test of the contract against the drivers that f makes.
func Suite(t *testing.T, f Factory) {
	for _, c := range append([]test{
		{"CreateRunsAndKillLeavesNothing", testLife},
		{"RootFilesystem", testRootfs},
		{"LayersAreStacked", testLayers},
		{"Adopt", testAdopt},
		{"CleanOfHalfMade", testClean},
		{"CreateFails", testCreateFails},
		{"CreateIsCanceled", testCreateCanceled},
		{"CrashIsTold", testCrash},
		{"Suspend", testSuspend},
		{"KillOfSuspended", testKillSuspended},
		{"AgentFreezes", testFreeze},
		{"Limits", testLimits},
		{"OOMOfACommand", testOOM},
		{"OOMOfAll", testOOMOfAll},
		{"CaptureDisk", testCapture},
		{"Stats", testStats},
		{"Console", testConsole},
		{"SlotIsUsedAgain", testSlotAgain},
		{"Concurrently", testConcurrently},
		{"Isolation", testIsolation},
		{"CrashAtEveryPoint", testCrashPoints},
		{"CrashAtAnyMoment", testCrashMoments},
	}, captures...) {
		t.Run(c.name, func(t *testing.T) { c.run(t, New(t, f)) })
	}
}

func testLife(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	if got := Sh(t, i, "echo hello; hostname"); got != "hello\nbox" {
		t.Errorf("output = %q", got)
	}
	if _, code, err := Exec(t.Context(), i, "exit 3"); err != nil || code != 3 {
		t.Errorf("exit 3 = %d, %v", code, err)
	}
	if _, err := i.Dial(t.Context(), 4); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
		t.Errorf("dial of a port where nothing listens = %v, want %s", err, sandbox.CodeUnavailable)
	}
	if _, err := e.Driver.Create(t.Context(), spec); sandbox.CodeOf(err) != sandbox.CodeExists {
		t.Errorf("a second sandbox of the id = %v, want %s", err, sandbox.CodeExists)
	}
	Sh(t, i, "true") // and the refusal did not harm it
	if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 1 || ids[0] != spec.ID {
		t.Errorf("List = %v, %v", ids, err)
	}
	waited := make(chan error, 1)
	go func() {
		_, err := i.Wait(context.Background())
		waited <- err
	}()
	for range 2 {
		if err := i.Kill(t.Context()); err != nil {
			t.Fatalf("kill: %v", err)
		}
	}
	if err := <-waited; err != nil {
		t.Errorf("wait: %v", err)
	}
	if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("List after the end = %v, %v", ids, err)
	}
	if _, err := i.Dial(t.Context(), sandbox.AgentPort); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
		t.Errorf("dial after the end = %v", err)
	}
}

func testAdopt(t *testing.T, e *Env) {
	spec := e.Spec(t)
	first := e.Create(t, spec)
	Sh(t, first, "echo kept > /tmp/f; (sleep 1000 >/dev/null 2>&1 &)")
	next := e.Reopen(t)
	i, err := next.Adopt(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if got := Sh(t, i, "cat /tmp/f; ps | grep -c '[s]leep 1000'"); got != "kept\n1" {
		t.Errorf("after adoption = %q", got)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := next.Adopt(t.Context(), spec); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("adopting what ended = %v, want %s", err, sandbox.CodeNotFound)
	}
}

func testClean(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	// A driver that knows nothing of it, and no record to find it by.
	d := e.Reopen(t)
	Run(t, "rm", "-rf", filepath.Join(e.Config.RunDir, "oci", d.Name(), "sandboxes", string(spec.ID)))
	ids, err := d.List(t.Context())
	if err != nil || len(ids) != 1 || ids[0] != spec.ID {
		t.Fatalf("List = %v, %v", ids, err)
	}
	for range 2 {
		if err := d.Clean(t.Context(), spec.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := i.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if ids, err := d.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("List after Clean = %v, %v", ids, err)
	}
}

func testCreateFails(t *testing.T, e *Env) {
	spec := e.Spec(t)
	broken := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(broken, []byte("#!/bin/sh\necho the disk is on fire; exit 7\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	good := e.Config.AgentPath
	e.Config.AgentPath = broken
	d := e.Reopen(t)
	e.Config.AgentPath = good
	start := time.Now()
	_, err := d.Create(t.Context(), spec)
	if err == nil || !strings.Contains(err.Error(), "the disk is on fire") {
		t.Errorf("create = %v, want the console's last words", err)
	}
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("it took %v to notice that the agent had ended", d)
	}
	for _, layers := range [][]string{nil, {"/nonexistent"}} {
		spec.Layers = layers
		if _, err := e.Driver.Create(t.Context(), spec); err == nil {
			t.Errorf("create with layers %v worked", layers)
		}
	}
	if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("left behind: %v, %v", ids, err)
	}
}

func testCreateCanceled(t *testing.T, e *Env) {
	link := e.Link(t)
	for after := time.Duration(0); after < 120; after += 3 {
		spec := e.SpecAt(t, link)
		ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
		i, err := e.Driver.Create(ctx, spec)
		cancel()
		if err == nil {
			if err := i.Kill(t.Context()); err != nil {
				t.Error(err)
			}
		} else if c := sandbox.CodeOf(err); c != sandbox.CodeTimeout {
			t.Errorf("after %d ms: %s: %v", after, c, err)
		}
		if ids, err := e.Driver.List(t.Context()); err != nil || len(ids) != 0 {
			t.Errorf("after %d ms: left behind: %v, %v", after, ids, err)
		}
		if err != nil && strings.Contains(err.Error(), "could not be removed") {
			t.Errorf("after %d ms: %v", after, err)
		}
	}
}

func testCrash(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	Exec(t.Context(), i, "kill -9 1; kill -QUIT 1; kill -ABRT 1")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	exit, err := i.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if exit.Reason != sandbox.ReasonRuntimeCrashed || exit.Detail == "" || exit.At.IsZero() {
		t.Errorf("exit = %+v", exit)
	}
}

func testSuspend(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	s, ok := i.(sandbox.Suspender)
	if ok != e.Driver.Capabilities().Suspend {
		t.Fatalf("Suspender is %v, the capability says otherwise", ok)
	}
	if !ok {
		t.Skip("this runtime cannot suspend")
	}
	Sh(t, i, "(while true; do echo x >> /tmp/ticks; sleep 0.01; done) >/dev/null 2>&1 &")
	for range 2 {
		if err := s.Suspend(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a, err := i.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	b, err := i.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b.CPUTime-a.CPUTime > 2*time.Millisecond {
		t.Errorf("suspended, it used %v of CPU", b.CPUTime-a.CPUTime)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, err := Exec(ctx, i, "true"); err == nil {
		t.Error("suspended, it ran a command")
	}
	for range 2 {
		if err := s.Unsuspend(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before, _ := strconv.Atoi(Sh(t, i, "wc -l < /tmp/ticks"))
	for deadline := time.Now().Add(10 * time.Second); ; {
		now, _ := strconv.Atoi(Sh(t, i, "wc -l < /tmp/ticks"))
		if now > before {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("its processes do not go on")
		}
	}
}

func testKillSuspended(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	s, ok := i.(sandbox.Suspender)
	if !ok {
		t.Skip("this runtime cannot suspend")
	}
	if err := s.Suspend(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func testStats(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	a, err := i.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	Sh(t, i, "dd if=/dev/zero of=/dev/shm/f bs=1M count=20 2>/dev/null; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
	b, err := i.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b.WorkingSet-a.WorkingSet < 18<<20 {
		t.Errorf("20 MiB in memory show as %d bytes", b.WorkingSet-a.WorkingSet)
	}
	if b.CPUTime <= a.CPUTime {
		t.Errorf("CPU time went from %v to %v", a.CPUTime, b.CPUTime)
	}
	if b.PIDs < 1 || b.MemoryLimit < int64(spec.Resources.MemoryMiB)<<20 || b.At.IsZero() {
		t.Errorf("stats = %+v", b)
	}
}

func testConsole(t *testing.T, e *Env) {
	// An agent that prints and then is the real one.
	dir := t.TempDir()
	layer := filepath.Join(dir, "layer")
	WriteLayer(t, layer, nil)
	Run(t, "cp", e.Config.AgentPath, filepath.Join(layer, "real-agent"))
	talking := filepath.Join(dir, "agent")
	if err := os.WriteFile(talking, []byte("#!/bin/sh\necho out; echo err >&2; exec /real-agent\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	good := e.Config.AgentPath
	e.Config.AgentPath = talking
	e.Driver = e.Reopen(t)
	e.Config.AgentPath = good
	spec := e.Spec(t)
	spec.Layers = append([]string{layer}, spec.Layers...)
	e.Create(t, spec)
	for deadline := time.Now().Add(10 * time.Second); string(console.Tail(spec.Dir, 1000)) != "out\nerr\n"; {
		if time.Now().After(deadline) {
			t.Fatalf("console = %q", console.Tail(spec.Dir, 1000))
		}
		time.Sleep(time.Millisecond)
	}
}

func testSlotAgain(t *testing.T, e *Env) {
	spec := e.Spec(t)
	for range 3 {
		i := e.Create(t, spec)
		Sh(t, i, "true")
		if err := i.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		spec = e.SpecAt(t, spec.Link)
	}
}

func testConcurrently(t *testing.T, e *Env) {
	const n = 6
	errs := make(chan error, n)
	for range n {
		spec := e.Spec(t)
		go func() {
			i, err := e.Driver.Create(t.Context(), spec)
			if err == nil {
				_, _, err = Exec(t.Context(), i, "true")
				if killErr := i.Kill(t.Context()); err == nil {
					err = killErr
				}
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
