package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

type options struct {
	bin, state, template string
	runtimes             []string
	n                    int
	serve                []string // more of the daemon's arguments
}

// benchSpares is how many children the largest fork that is measured has.
const benchSpares = 10

// lab is a daemon to measure, and a client of it.
type lab struct {
	options
	*client.Client
	daemon   *exec.Cmd
	log      *os.File
	instance string
}

// newLab starts the daemon and sees to the template.
func newLab(ctx context.Context, o options) (*lab, error) {
	var err error
	for _, p := range []*string{&o.bin, &o.state} {
		if *p, err = filepath.Abs(*p); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(o.state, 0o755); err != nil {
		return nil, err
	}
	l := &lab{options: o}
	if l.instance, err = host.Instance(o.state); err != nil {
		return nil, err
	}
	// A socket's path has little room, so it is not below the state directory.
	socket := filepath.Join("/run/warren", "bench-"+l.instance+".sock")
	if l.log, err = os.Create(o.state + ".log"); err != nil {
		return nil, err
	}
	l.daemon = exec.Command(filepath.Join(o.bin, "warren"), append([]string{"serve", "--state", o.state, "--socket", socket, "--listen", "none", "--spares", strconv.Itoa(benchSpares)}, o.serve...)...)
	l.daemon.Stdout, l.daemon.Stderr = l.log, l.log
	l.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt is the bench's, which then stops the daemon
	if err := l.daemon.Start(); err != nil {
		l.log.Close()
		return nil, err
	}
	if l.Client, err = client.New("unix://"+socket, client.Options{}); err != nil {
		l.close()
		return nil, err
	}
	if err := l.waitReady(ctx); err != nil {
		l.close()
		return nil, fmt.Errorf("%w; its log is %s", err, l.log.Name())
	}
	if err := l.ensureTemplate(ctx); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *lab) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		_, err := l.Version(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the daemon does not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ensureTemplate builds the template if the state directory has none.
func (l *lab) ensureTemplate(ctx context.Context) error {
	_, err := l.Template(ctx, l.template)
	if sandbox.CodeOf(err) != sandbox.CodeNotFound || l.template != "base" {
		return err
	}
	fmt.Println("building the template base; it is kept for the next run")
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "warren"), "--host", l.Host(), "template", "build", "base")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// close stops the daemon, which takes nothing with it: what a benchmark made
// it has removed.
func (l *lab) close() {
	if l.Client != nil {
		l.Client.Close()
	}
	l.daemon.Process.Signal(syscall.SIGTERM)
	l.daemon.Wait()
	l.log.Close()
}

// create makes a sandbox with room enough for any of the benchmarks.
func (l *lab) create(ctx context.Context, runtime string, memoryMiB int) (wire.Sandbox, error) {
	return l.CreateSandbox(ctx, wire.CreateSandbox{
		Template: l.template, Runtime: runtime,
		Resources: wire.ResourceRequest{MemoryMiB: memoryMiB},
		Network:   wire.Network{Mode: sandbox.NetworkNone},
	})
}

// runTrue runs /bin/true and fails unless it ran and ended well.
func (l *lab) runTrue(ctx context.Context, id string) error {
	res, err := l.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Argv: []string{"/bin/true"}}})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("/bin/true exited with %d", res.ExitCode)
	}
	return err
}

// pids are the host's processes of a sandbox, by its control group.
func (l *lab) pids(id string) ([]int, error) {
	rel := filepath.Join("warren-"+l.instance, id, "cgroup.procs")
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/pids"} {
		data, err := os.ReadFile(filepath.Join(root, rel))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var pids []int
		for _, f := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return nil, err
			}
			pids = append(pids, pid)
		}
		return pids, nil
	}
	return nil, fmt.Errorf("sandbox %s has no control group", id)
}

// procKiB reads a field in KiB of a file of /proc/PID, such as Pss of
// smaps_rollup.
func procKiB(pid int, file, field string) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, fmt.Errorf("/proc/%d/%s has no %s", pid, file, field)
}

// pssMiB is the memory of a sandbox's processes, shared pages counted by
// share.
func (l *lab) pssMiB(id string) (float64, error) {
	pids, err := l.pids(id)
	if err != nil {
		return 0, err
	}
	var kib int64
	for _, pid := range pids {
		n, err := procKiB(pid, "smaps_rollup", "Pss")
		if err != nil {
			return 0, err
		}
		kib += n
	}
	return float64(kib) / 1024, nil
}
