package gvisor

import (
	"os"
	"path/filepath"
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
		return New(cfg)
	}
}

func TestSuite(t *testing.T) {
	testenv.Root(t)
	runtimetest.Suite(t, factory(t))
}
