package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// What runsc's checkpoint, restore and kill do, by calls of the Sentry's
// control server: a process of runsc's takes longer than the work.

// save writes the state of a sandbox to dir, and lets it go on. A durable one
// is on its way to the disk meanwhile.
func (d *Driver) save(ctx context.Context, id sandbox.ID, dir string, durable bool) error {
	files, err := imageFiles(dir, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	defer closeAll(files)
	if durable {
		defer writeBack(files)()
	}
	return d.call(ctx, id, "containerManager.Checkpoint", map[string]any{ // pkg/sentry/control.SaveOpts
		"metadata":                            map[string]string{"compression": "none"},
		"app_mf_exclude_committed_zero_pages": true,
		"have_pages_file":                     true,
		"Resume":                              true,
	}, nil, files, nil)
}

// writeBackEvery is how often what was written of a capture is sent on its way
// to the disk: the fsync that follows waits for the last such part alone.
const writeBackEvery = 4 * time.Millisecond

// writeBack begins the writing of files to the disk again and again while
// others fill them, until stop has returned.
func writeBack(files []*os.File) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(writeBackEvery)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			for _, f := range files {
				// A hint: what fails tells the fsync that follows.
				unix.SyncFileRange(int(f.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE)
			}
		}
	}()
	return func() {
		close(done)
		<-ended
	}
}

// imageFiles opens the files of a Sentry's state, in the order in which it
// takes them.
func imageFiles(dir string, flags int) (files []*os.File, err error) {
	for _, name := range []string{stateName, pagesMetaName, pagesName} {
		f, err := os.OpenFile(filepath.Join(dir, name), flags|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			closeAll(files)
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// killAll ends every process in a sandbox.
func (d *Driver) killAll(ctx context.Context, id sandbox.ID) error {
	const toAll = 1                                                   // runsc/boot.DeliverToAllProcesses
	return d.call(ctx, id, "containerManager.Signal", map[string]any{ // runsc/boot.SignalArgs
		"CID": string(id), "Signo": int(unix.SIGKILL), "Mode": toAll,
	}, nil, nil, nil)
}

// connect gives a Sentry that waits for a capture its network.
func (d *Driver) connect(ctx context.Context, spec sandbox.Spec) error {
	args, device, err := wire(spec.Link)
	if err != nil {
		return err
	}
	defer device.Close()
	return d.call(ctx, spec.ID, "containerManager.SetNetworkArgs", args, nil, []*os.File{device}, nil)
}

// load makes a Sentry that waits go on from the state in dir. It has all of the
// files open and reads the content of memory while the sandbox runs, what a
// program waits for first; see Loaded.
func (d *Driver) load(ctx context.Context, id sandbox.ID, dir string) error {
	files, err := imageFiles(dir, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer closeAll(files)
	err = d.call(ctx, id, "containerManager.Restore", map[string]any{ // runsc/boot.RestoreOpts
		"HavePagesFile": true, "Background": true,
	}, nil, files, nil)
	if err != nil {
		return err
	}
	return d.noteRunning(id)
}

// Loaded implements sandbox.Loading.
func (i *Instance) Loaded(ctx context.Context) error {
	id := i.Spec().ID
	if err := i.d.call(ctx, id, "containerManager.WaitRestore", struct{}{}, nil, nil, nil); err != nil {
		return runError(ctx, "read the capture of", id, err, "")
	}
	return nil
}

// noteRunning writes into runsc's record of a sandbox that it runs, as its
// restore does, so that runsc's other commands take it for what it is.
func (d *Driver) noteRunning(id sandbox.ID) (err error) {
	path := d.runscFile(id, "state")
	lock, err := os.OpenFile(d.runscFile(id, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", path, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var state, sentry map[string]json.RawMessage
	if err := json.Unmarshal(data, &state); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := json.Unmarshal(state["sandbox"], &sentry); err != nil || sentry == nil {
		return fmt.Errorf("%s has no sandbox: %w", path, errors.Join(err, fs.ErrInvalid))
	}
	sentry["restored"] = json.RawMessage("true")
	if state["sandbox"], err = json.Marshal(sentry); err != nil {
		return err
	}
	if state["status"], err = json.Marshal(specs.StateRunning); err != nil {
		return err
	}
	if data, err = json.Marshal(state); err != nil {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o640); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// runscFile is one of runsc's files about a sandbox.
func (d *Driver) runscFile(id sandbox.ID, kind string) string {
	return filepath.Join(d.eng.StateDir(), fmt.Sprintf("%s_sandbox:%s.%s", id, id, kind))
}
