package oci

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// killStarters ends the OCI runtime's processes that are still making a
// sandbox, and tells how many there were. A runtime killed in the middle can
// leave them: `crun run --detach` does its work in a child that nothing ties
// to its parent, and which is in no group yet. They are known by the bundle
// among their arguments, which no two sandboxes share.
func (e *Engine) killStarters(id sandbox.ID) (int, error) {
	mark := []byte("\x00" + e.bundleArg(id) + "\x00")
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	n := 0
	for _, path := range paths {
		if !argsHave(path, mark) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
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
