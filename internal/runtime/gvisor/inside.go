package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/identity"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Capabilities, as bits (linux/capability.h).
const (
	capDACOverride   = 1 << 1
	capDACReadSearch = 1 << 2
	capSysAdmin      = 1 << 21
)

// inside is a run of the agent's binary in a sandbox beside the agent. Its file
// comes from the host, so that nothing inside has a part in what runs.
type inside struct {
	args          []string
	caps          uint64
	stdin, stdout *os.File // nil is /dev/null
	begun         func()   // may be nil; called when the Sentry has the files or will not get them
}

// runInside starts one, and gives its process ID in the sandbox.
func (d *Driver) runInside(ctx context.Context, id sandbox.ID, r inside) (pid int32, err error) {
	agent, err := os.Open(d.cfg.AgentPath)
	if err != nil {
		return 0, err
	}
	defer agent.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	files := []*os.File{r.stdin, r.stdout, null, agent}
	for n, f := range files {
		if f == nil {
			files[n] = null
		}
	}
	argv := append([]string{filepath.Base(d.cfg.AgentPath)}, r.args...)
	err = d.call(ctx, id, "containerManager.ExecuteAsync", map[string]any{ // pkg/sentry/control.ExecArgs
		"argv": argv, "wd": "/", "ContainerID": string(id), "GuestFDs": []int{0, 1, 2},
		"NoNewPrivileges": true, "Capabilities": map[string]uint64{"PermittedCaps": r.caps, "EffectiveCaps": r.caps, "BoundingCaps": r.caps},
	}, &pid, files, r.begun)
	return pid, err
}

// waitInside waits for its end.
func (d *Driver) waitInside(ctx context.Context, id sandbox.ID, pid int32) (unix.WaitStatus, error) {
	var status uint32
	err := d.call(ctx, id, "containerManager.WaitPID", map[string]any{"PID": pid, "CID": string(id)}, &status, nil, nil) // runsc/boot.WaitPIDArgs
	return unix.WaitStatus(status), err
}

// namedFile is the file of a bundle that is there where the sandbox's kernel was
// told another hostname than its specification has: that name. Such a kernel
// does not take the specification's at a restore any more (pkg/sentry/kernel,
// RestoreSpecValues).
const namedFile = "named"

// rename gives a sandbox another hostname. What runs in it may not do so.
func (d *Driver) rename(ctx context.Context, id sandbox.ID, hostname string) error {
	if err := d.noteName(id, hostname); err != nil {
		return err
	}
	pid, err := d.runInside(ctx, id, inside{args: []string{identity.HostnameMode, hostname}, caps: capSysAdmin})
	if err != nil {
		return fmt.Errorf("set the hostname: %w", err)
	}
	status, err := d.waitInside(ctx, id, pid)
	if err == nil && status != 0 {
		err = fmt.Errorf("its program ended with status %#x", uint32(status))
	}
	if err != nil {
		return fmt.Errorf("set the hostname: %w", err)
	}
	return nil
}

// noteName notes the hostname that a sandbox's kernel was told; "" is none.
func (d *Driver) noteName(id sandbox.ID, hostname string) error {
	if hostname == "" {
		return nil
	}
	return os.WriteFile(filepath.Join(d.eng.BundleDir(id), namedFile), []byte(hostname), 0o600)
}

// named is the hostname that a sandbox's kernel was told, "" where it has its
// specification's.
func (d *Driver) named(id sandbox.ID) (string, error) {
	name, err := os.ReadFile(filepath.Join(d.eng.BundleDir(id), namedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(name), err
}
