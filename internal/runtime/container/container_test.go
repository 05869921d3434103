package container

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

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

// TestFilterIsTheSame compares the filters that the kernel has for the first
// container, compiled, and for the second, given.
func TestFilterIsTheSame(t *testing.T) {
	testenv.Root(t)
	if oci.FindBinary("crun") == "" {
		t.Skip("needs crun: apt-get install crun")
	}
	e := runtimetest.New(t, factory("crun"))
	var got [2][]byte
	for n := range got {
		i := e.Create(t, e.Spec(t)).(*Instance)
		got[n] = kernelFilter(t, i.PID())
	}
	if e.Driver.(*Driver).filter.compiled.Load() == nil {
		t.Error("the first container's filter was not learned")
	}
	if len(got[0]) < 1000 || !bytes.Equal(got[0], got[1]) {
		t.Errorf("the filters differ: %d and %d bytes", len(got[0]), len(got[1]))
	}
}

// kernelFilter reads a process's first seccomp filter (ptrace(2),
// PTRACE_SECCOMP_GET_FILTER).
func kernelFilter(t *testing.T, pid int) []byte {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(pid); err != nil {
		t.Skipf("cannot ptrace: %v", err)
	}
	defer unix.PtraceDetach(pid)
	if err := unix.PtraceInterrupt(pid); err != nil {
		t.Fatal(err)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	n, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(pid), 0, 0, 0, 0)
	if errno != 0 {
		t.Skipf("the kernel does not tell filters: %v", errno)
	}
	buf := make([]byte, n*instruction)
	_, _, errno = unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(pid), 0, uintptr(unsafe.Pointer(&buf[0])), 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	return buf
}

func TestFilterLearnsOnlyWhatCanBeOne(t *testing.T) {
	for _, size := range []int{-1, 0, 7, 12, 8 * 4097} {
		dir := t.TempDir()
		if size >= 0 {
			if err := os.WriteFile(filepath.Join(dir, "seccomp.bpf"), make([]byte, size), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var f filter
		f.learn(dir)
		if f.compiled.Load() != nil {
			t.Errorf("%d bytes were taken for a filter", size)
		}
	}
}
