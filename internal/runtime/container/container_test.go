package container

import (
	"os"
	"testing"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/runtime/runtimetest"
	"github.com/warrenhq/warren/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(runtimetest.Main(m, newDriver)) }

func newDriver(cfg oci.Config) (runtimetest.Driver, error) { return New(cfg) }

func factory(binary string) runtimetest.Factory {
	return func(cfg oci.Config) (runtimetest.Driver, error) {
		cfg.Binary = binary
		return newDriver(cfg)
	}
}

func TestSuite(t *testing.T) {
	for _, binary := range []string{"crun", "runc"} {
		t.Run(binary, func(t *testing.T) {
			testenv.Root(t)
			if oci.FindBinary(binary) == "" {
				t.Skipf("needs %s: apt-get install %s", binary, binary)
			}
			runtimetest.Suite(t, factory(binary))
		})
	}
}

func BenchmarkCreate(b *testing.B) {
	for _, binary := range []string{"crun", "runc"} {
		b.Run(binary, func(b *testing.B) {
			path := oci.FindBinary(binary)
			if path == "" {
				b.Skipf("needs %s", binary)
			}
			argv := []string{path}
			if binary == "crun" {
				argv = append(argv, "--cgroup-manager=cgroupfs")
			}
			runtimetest.Bench(b, factory(binary), argv...)
		})
	}
}
