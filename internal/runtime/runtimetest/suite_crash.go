package runtimetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// childEnv holds a doomed daemon's orders; with it a test program is that.
const childEnv = "WARREN_RUNTIMETEST_CHILD"

type orders struct {
	Config oci.Config
	Spec   sandbox.Spec
	// Capture is where to capture the sandbox before its end, for another with
	// the specification Next. "" is nowhere.
	Capture string
	Next    sandbox.Spec
}

// child is the daemon: it creates, uses and kills one sandbox or two, if it
// lives so long.
func child(f Factory) int {
	var o orders
	err := json.Unmarshal([]byte(os.Getenv(childEnv)), &o)
	os.Unsetenv(childEnv)
	if err == nil {
		err = func() error {
			d, err := f(o.Config)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			i, err := d.Create(ctx, o.Spec)
			if err != nil {
				return err
			}
			if _, _, err := Exec(ctx, i, "echo here > /tmp/mark; (sleep 1000 >/dev/null 2>&1 &)"); err != nil {
				return err
			}
			if o.Capture != "" {
				if err := again(ctx, d, i, o); err != nil {
					return err
				}
			}
			return i.Kill(ctx)
		}()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// again captures i and has it live a second time.
func again(ctx context.Context, d Driver, i sandbox.Instance, o orders) error {
	err := i.(sandbox.Checkpointer).Checkpoint(ctx, o.Capture, sandbox.CheckpointOptions{LeaveRunning: true})
	if err != nil {
		return err
	}
	j, err := d.(sandbox.Restorer).Restore(ctx, o.Capture, o.Next)
	if err != nil {
		return err
	}
	if _, _, err := Exec(ctx, j, "true"); err != nil {
		return err
	}
	return j.Kill(ctx)
}

// doom starts the daemon with one more variable.
func (e *Env) doom(t *testing.T, o orders, env string) *exec.Cmd {
	t.Helper()
	o.Config = e.Config
	if b, ok := e.Driver.(interface{ Binary() string }); ok {
		o.Config.Binary = b.Binary()
	}
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+string(data), env)
	cmd.Stderr = os.Stderr
	return cmd
}

// ended waits a little for i's end.
func ended(ctx context.Context, i sandbox.Instance) bool {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	_, err := i.Wait(ctx)
	return err == nil
}

// after is what the next daemon does: adopt what runs, clean what does not.
func (e *Env) after(t *testing.T, what string, specs ...sandbox.Spec) {
	t.Helper()
	d := e.Reopen(t)
	for _, spec := range specs {
		adoptOrClean(t, d, spec, what)
	}
	if ids, err := d.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("%s: left behind: %v, %v", what, ids, err)
	}
}

func adoptOrClean(t *testing.T, d Driver, spec sandbox.Spec, what string) {
	t.Helper()
	i, err := d.Adopt(t.Context(), spec)
	switch {
	case err == nil:
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		// A Kill freezes before it kills: the daemon may have ended in between.
		if s, ok := i.(sandbox.Suspender); ok {
			if err := s.Unsuspend(ctx); err != nil {
				t.Errorf("%s: unsuspend: %v", what, err)
			}
		}
		// It may not yet have been ready, or have been at the point of its end.
		for ctx.Err() == nil {
			if _, _, err = Exec(ctx, i, "true"); err == nil {
				break
			}
			if ended(ctx, i) {
				break
			}
		}
		if ctx.Err() != nil {
			t.Errorf("%s: adopted, but it does not answer: %v", what, err)
		}
		if err := i.Kill(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case sandbox.CodeOf(err) == sandbox.CodeNotFound:
		if err := d.Clean(t.Context(), spec.ID); err != nil {
			t.Errorf("%s: clean: %v", what, err)
		}
	default:
		t.Errorf("%s: adopt: %v", what, err)
	}
}

func testCrashPoints(t *testing.T, e *Env) {
	link := e.Link(t)
	points := 0
	for _, name := range fault.Points() {
		if !strings.HasPrefix(name, "oci.") && !strings.HasPrefix(name, e.Driver.Name()+".") || ofCapture(e, name) || strings.HasPrefix(name, e.Driver.Name()+".disk.") {
			continue
		}
		points++
		spec := e.SpecAt(t, link)
		e.killedAt(t, orders{Spec: spec}, name)
		e.after(t, name, spec)
	}
	if points < 6 {
		t.Errorf("only %d points", points)
	}
}

// ofCapture tells the fault points that only captures come by.
func ofCapture(e *Env, point string) bool {
	return strings.HasPrefix(point, e.Driver.Name()+".capture.")
}

// killedAt runs a daemon that is to be killed at a fault point.
func (e *Env) killedAt(t *testing.T, o orders, point string) {
	t.Helper()
	err := e.doom(t, o, fault.Env+"="+point).Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("%s: the daemon was not killed there: %v", point, err)
	}
}

// testFullCrash kills the daemon at every step of a capture and a restore, and
// at random moments of them.
func testFullCrash(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	capturer(t, e, i)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	first, second := e.Link(t), e.Link(t)
	fresh := func() orders {
		return orders{Spec: e.SpecAt(t, first), Next: e.SpecAt(t, second), Capture: filepath.Join(t.TempDir(), "capture")}
	}
	points := 0
	for _, name := range fault.Points() {
		if ofCapture(e, name) {
			points++
			o := fresh()
			e.killedAt(t, o, name)
			e.after(t, name, o.Spec, o.Next)
		}
	}
	if points < 4 {
		t.Errorf("only %d points", points)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for n := range 12 {
		o := fresh()
		cmd := e.doom(t, o, "WARREN_NONE=1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// Most of it is spent between the capture's begin and the end.
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if _, err := os.Stat(o.Capture); err == nil {
				break
			}
		}
		wait := time.Duration(r.IntN(250)) * time.Millisecond
		time.Sleep(wait)
		cmd.Process.Kill()
		cmd.Wait()
		e.after(t, fmt.Sprintf("kill %d, %v after the capture began", n, wait), o.Spec, o.Next)
	}
}

func testCrashMoments(t *testing.T, e *Env) {
	link := e.Link(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for n := range 20 {
		spec := e.SpecAt(t, link)
		cmd := e.doom(t, orders{Spec: spec}, "WARREN_NONE=1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wait := time.Duration(r.IntN(250)) * time.Millisecond
		time.Sleep(wait)
		cmd.Process.Kill()
		cmd.Wait()
		e.after(t, fmt.Sprintf("kill %d after %v", n, wait), spec)
	}
}
