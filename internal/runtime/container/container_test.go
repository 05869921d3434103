package container

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/runtime/runtimetest"
	"github.com/warrenhq/warren/internal/testenv"
)

func TestMain(m *testing.M) {
	code := runtimetest.Main(m)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			println(err.Error())
			code = 1
		}
	}
	os.Exit(code)
}

func factory(binary string) runtimetest.Factory {
	return func(cfg oci.Config) (runtimetest.Driver, error) {
		cfg.Binary = binary
		return New(cfg)
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
