package gvisor

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/runtime/runtimetest"
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
