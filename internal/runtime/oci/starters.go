package oci

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// killStarters ends the OCI runtime's processes that are still making a
// sandbox, and tells how many there were. A daemon that ends in the middle can
// leave them: `crun run --detach` does its work in a grandchild that nothing
// ties to its parent, and which is in no group yet. They are known by the
// bundle among their arguments, which no two sandboxes share.
func killStarters(bundleArg string) (int, error) {
	mark := []byte("\x00" + bundleArg + "\x00")
	proc, err := os.Open("/proc")
	if err != nil {
		return 0, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		path := "/proc/" + name + "/cmdline"
		if !argsHave(path, mark) {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it ended
		}
		if argsHave(path, mark) { // it is still that process, so the pidfd's
			n++
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000)
		}
		unix.Close(fd)
	}
	return n, nil
}

func argsHave(path string, mark []byte) bool {
	args, err := os.ReadFile(path)
	return err == nil && bytes.Contains(args, mark)
}

func (e *Engine) bundleArg(id sandbox.ID) string {
	return fmt.Sprintf("--bundle=%s", e.BundleDir(id))
}
