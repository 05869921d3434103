package network

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// The tests run in network and mount namespaces of their own, so that the
// host's network is not touched. TestMain starts the binary again in them.
const (
	envInside = "WARREN_NETWORK_TEST_INSIDE"
	envHelper = "WARREN_NETWORK_TEST_HELPER"
)

func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		os.Exit(m.Run()) // tests that need root skip themselves
	}
	if os.Getenv(envInside) == "" {
		cmd := exec.Command(os.Args[0], os.Args[1:]...)
		cmd.Env = append(os.Environ(), envInside+"=1")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Run(); err != nil {
			if cmd.ProcessState == nil {
				fmt.Fprintln(os.Stderr, "network tests: cannot make namespaces:", err)
				os.Exit(1)
			}
			os.Exit(max(cmd.ProcessState.ExitCode(), 1))
		}
		os.Exit(0)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		fmt.Fprintln(os.Stderr, "network tests: make mounts private:", err)
		os.Exit(1)
	}
	if os.Getenv(envHelper) != "" {
		os.Exit(helper())
	}
	code := m.Run()
	closeWorld()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, "network tests:", err)
		code = 1
	}
	os.Exit(code)
}
