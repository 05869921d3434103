package gvisor

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/runtime/runtimetest"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(runtimetest.Main(m, newDriver)) }

func newDriver(cfg oci.Config) (runtimetest.Driver, error) { return New(cfg) }

// runsc is the pinned one of `make build`.
func runsc(t testing.TB) string {
	t.Helper()
	path, err := filepath.Abs("../../../bin/runsc")
	if err != nil {
		t.Fatal(err)
	}
	return testenv.Command(t, path, "make build")
}

func factory(t testing.TB) runtimetest.Factory {
	binary := runsc(t)
	return func(cfg oci.Config) (runtimetest.Driver, error) {
		cfg.Binary = binary
		return newDriver(cfg)
	}
}

func TestSuite(t *testing.T) {
	testenv.Root(t)
	runtimetest.Suite(t, factory(t))
}

func BenchmarkCreate(b *testing.B) {
	testenv.Root(b)
	runtimetest.Bench(b, factory(b), runsc(b))
}

func BenchmarkCapture(b *testing.B) {
	testenv.Root(b)
	for _, mib := range []string{"34", "150"} {
		for _, n := range []int{1, 10} {
			b.Run(fmt.Sprintf("%sMiB/into=%d", mib, n), func(b *testing.B) { runtimetest.BenchCapture(b, factory(b), mib, n) })
		}
	}
}

// TestStopIsWhole pauses and resumes for clients that go away at any moment:
// the Sentry must not be resumed once too often.
func TestStopIsWhole(t *testing.T) {
	testenv.Root(t)
	e := runtimetest.New(t, factory(t))
	i := e.Create(t, e.Spec(t)).(sandbox.Suspender)
	r := rand.New(rand.NewPCG(1, uint64(os.Getpid())))
	for range 30 {
		for _, do := range []func(context.Context) error{i.Suspend, i.Unsuspend} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(60_000))*time.Microsecond)
			err := do(ctx)
			cancel()
			if err != nil && ctx.Err() == nil {
				t.Fatal(err)
			}
		}
	}
	if err := i.Unsuspend(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := runtimetest.Sh(t, i.(sandbox.Instance), "echo lives"); out != "lives" {
		t.Errorf("afterwards it says %q", out)
	}
}

// TestLastWords has a Sentry panic, by a resume of what is not paused, and
// looks for what it said.
func TestLastWords(t *testing.T) {
	testenv.Root(t)
	e := runtimetest.New(t, factory(t))
	spec := e.Spec(t)
	i := e.Create(t, spec)
	d := e.Driver.(*Driver)
	if err := d.call(t.Context(), spec.ID, "containerManager.Resume", struct{}{}, nil, nil, nil); err == nil {
		t.Fatal("the Sentry took it")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // else a failure would leave it on the host
	defer cancel()
	exit, err := i.Wait(ctx)
	if err != nil || exit.Reason != sandbox.ReasonRuntimeCrashed || !strings.Contains(exit.Detail, "the Sentry said: panic: Invalid stopCount") {
		t.Errorf("%+v, %v", exit, err)
	}
}
