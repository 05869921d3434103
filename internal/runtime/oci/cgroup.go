package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// A Cgroup is the control group of one sandbox in every tree of the host. The
// OCI runtime makes it; this type reads, freezes, kills and removes it.
type Cgroup struct {
	h    *hierarchies
	path string // in each tree, "/warren-<instance>/<id>"
}

// Path is the group's path in each tree, as an OCI spec wants it.
func (g *Cgroup) Path() string { return g.path }

// dir is the group's directory for a v1 controller, or the one of v2.
func (g *Cgroup) dir(controller string) string {
	if g.h.mode == host.CgroupV2 {
		return filepath.Join(g.h.roots[0], g.path)
	}
	return filepath.Join(g.h.v1[controller], g.path)
}

// exists tells whether any tree has the group.
func (g *Cgroup) exists() bool {
	for _, root := range g.h.roots {
		if exists(filepath.Join(root, g.path)) {
			return true
		}
	}
	return false
}

// procs lists the processes in the group and the groups below it, in any tree:
// a half-made sandbox may be in some trees only.
func (g *Cgroup) procs() ([]int, error) {
	seen := map[int]bool{}
	var pids []int
	for _, root := range g.h.roots {
		err := filepath.WalkDir(filepath.Join(root, g.path), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				return nil // removed meanwhile
			}
			if err != nil || !d.IsDir() {
				return err
			}
			data, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				return nil
			}
			if err != nil {
				return err
			}
			for _, f := range strings.Fields(string(data)) {
				if pid, err := strconv.Atoi(f); err == nil && pid > 0 && !seen[pid] {
					seen[pid] = true
					pids = append(pids, pid)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return pids, nil
}

// Kill ends every process in the group by SIGKILL, frozen or not, and returns
// when none is left.
func (g *Cgroup) Kill(ctx context.Context) error {
	kill := filepath.Join(g.dir("freezer"), "cgroup.kill") // v2, Linux 5.14
	signaled := map[int]bool{}
	for start := time.Now(); ; {
		pids, err := g.procs()
		if err != nil {
			return fmt.Errorf("processes of %s: %w", g.path, err)
		}
		if len(pids) == 0 {
			return nil
		}
		fresh := slices.ContainsFunc(pids, func(pid int) bool { return !signaled[pid] })
		if time.Since(start) > time.Second { // in case that a pid is a new process's
			clear(signaled)
		}
		if fresh && (g.h.mode != host.CgroupV2 || writeFile(kill, "1") != nil) {
			// Frozen, no process forks away between the list and its signal.
			// A signal to a frozen process of v1 waits for the thaw.
			g.setFrozen(true)
			if pids, err = g.procs(); err == nil {
				for _, pid := range pids {
					signaled[pid] = unix.Kill(pid, unix.SIGKILL) == nil
				}
			}
			g.setFrozen(false)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d processes of %s do not end: %w", len(pids), g.path, ctx.Err())
		case <-time.After(pollStep(time.Since(start))):
		}
	}
}

// setFrozen asks for a freeze or thaw without waiting for it.
func (g *Cgroup) setFrozen(frozen bool) error {
	if g.h.mode == host.CgroupV2 {
		v := "0"
		if frozen {
			v = "1"
		}
		return writeFile(filepath.Join(g.dir(""), "cgroup.freeze"), v)
	}
	v := "THAWED"
	if frozen {
		v = "FROZEN"
	}
	return writeFile(filepath.Join(g.dir("freezer"), "freezer.state"), v)
}

// Freeze stops every process of the group and returns when all have stopped.
// When ctx ends first the group is thawed again.
func (g *Cgroup) Freeze(ctx context.Context) error {
	wait := 100 * time.Microsecond
	for {
		// v1 needs to be asked again while tasks come and go.
		if err := g.setFrozen(true); err != nil {
			return fmt.Errorf("freeze %s: %w", g.path, err)
		}
		frozen, err := g.Frozen()
		if err != nil {
			return fmt.Errorf("freeze %s: %w", g.path, err)
		}
		if frozen {
			return nil
		}
		select {
		case <-ctx.Done():
			g.setFrozen(false)
			return fmt.Errorf("freeze %s: %w", g.path, ctx.Err())
		case <-time.After(wait):
		}
		wait = min(wait*2, 10*time.Millisecond)
	}
}

// Thaw lets the group's processes go on.
func (g *Cgroup) Thaw() error {
	if err := g.setFrozen(false); err != nil {
		return fmt.Errorf("thaw %s: %w", g.path, err)
	}
	return nil
}

// Frozen tells whether every process of the group is stopped.
func (g *Cgroup) Frozen() (bool, error) {
	if g.h.mode == host.CgroupV2 {
		n, err := keyed(filepath.Join(g.dir(""), "cgroup.events"), "frozen")
		return n == 1, err
	}
	data, err := os.ReadFile(filepath.Join(g.dir("freezer"), "freezer.state"))
	return strings.TrimSpace(string(data)) == "FROZEN", err
}

// SetMemory changes the memory limit, in bytes.
func (g *Cgroup) SetMemory(limit int64) error {
	if g.h.mode == host.CgroupV2 {
		return writeFile(filepath.Join(g.dir(""), "memory.max"), strconv.FormatInt(limit, 10))
	}
	return setMemoryV1(g.dir("memory"), strconv.FormatInt(limit, 10))
}

// SetCPU changes the limit of CPU time, in CPUs, and which CPUs it is of: 0 is
// no limit, and none are all.
func (g *Cgroup) SetCPU(limit float64, cpus []int) error {
	if g.h.mode == host.CgroupV2 {
		quota := "max"
		if limit > 0 {
			quota = strconv.FormatInt(int64(limit*cpuPeriod), 10)
		}
		return errors.Join(
			writeFile(filepath.Join(g.dir(""), "cpu.max"), quota+" "+strconv.Itoa(cpuPeriod)),
			writeFile(filepath.Join(g.dir(""), "cpuset.cpus"), formatCPUList(cpus)+"\n"))
	}
	quota := int64(-1)
	if limit > 0 {
		quota = int64(limit * cpuPeriod)
	}
	set := formatCPUList(cpus)
	if len(cpus) == 0 {
		all, err := os.ReadFile(filepath.Join(filepath.Dir(g.dir("cpuset")), "cpuset.cpus"))
		if err != nil {
			return err
		}
		set = strings.TrimSpace(string(all))
	}
	return errors.Join(
		writeFile(filepath.Join(g.dir("cpu"), "cpu.cfs_quota_us"), strconv.FormatInt(quota, 10)),
		writeFile(filepath.Join(g.dir("cpuset"), "cpuset.cpus"), set))
}

// OOMKills is the number of the group's processes that the kernel ended at a
// memory limit so far.
func (g *Cgroup) OOMKills() (int64, error) {
	if g.h.mode == host.CgroupV2 {
		return keyed(filepath.Join(g.dir(""), "memory.events"), "oom_kill")
	}
	return keyed(filepath.Join(g.dir("memory"), "memory.oom_control"), "oom_kill")
}

// Stats reads what the group uses.
func (g *Cgroup) Stats() (sandbox.Stats, error) {
	s := sandbox.Stats{At: time.Now()}
	var usage, inactive int64
	var errs [7]error
	if g.h.mode == host.CgroupV2 {
		dir := g.dir("")
		var usec int64
		usec, errs[0] = keyed(filepath.Join(dir, "cpu.stat"), "usage_usec")
		s.CPUTime = time.Duration(usec) * time.Microsecond
		usage, errs[1] = number(filepath.Join(dir, "memory.current"))
		s.MemoryLimit, errs[2] = number(filepath.Join(dir, "memory.max"))
		inactive, errs[3] = keyed(filepath.Join(dir, "memory.stat"), "inactive_file")
		s.MemoryCache, errs[4] = keyed(filepath.Join(dir, "memory.stat"), "file")
	} else {
		dir := g.dir("memory")
		var nsec int64
		nsec, errs[0] = number(filepath.Join(g.dir("cpuacct"), "cpuacct.usage"))
		s.CPUTime = time.Duration(nsec)
		usage, errs[1] = number(filepath.Join(dir, "memory.usage_in_bytes"))
		s.MemoryLimit, errs[2] = number(filepath.Join(dir, "memory.limit_in_bytes"))
		inactive, errs[3] = keyed(filepath.Join(dir, "memory.stat"), "total_inactive_file")
		s.MemoryCache, errs[4] = keyed(filepath.Join(dir, "memory.stat"), "total_cache")
	}
	var pids int64
	pids, errs[5] = number(filepath.Join(g.dir("pids"), "pids.current"))
	s.PIDs = int(pids)
	s.OOMKills, errs[6] = g.OOMKills()
	s.WorkingSet = max(usage-inactive, 0)
	if err := errors.Join(errs[:]...); err != nil {
		return sandbox.Stats{}, fmt.Errorf("usage of %s: %w", g.path, err)
	}
	return s, nil
}

// Remove removes the emptied group from every tree. The kernel takes a moment
// to let go of one whose last process has just ended.
func (g *Cgroup) Remove(ctx context.Context) error {
	for _, root := range g.h.roots {
		if err := removeTree(ctx, filepath.Join(root, g.path)); err != nil {
			return err
		}
	}
	return nil
}

func removeTree(ctx context.Context, dir string) error {
	wait := time.Millisecond
	for {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		entries, err2 := os.ReadDir(dir)
		if err2 != nil && !errors.Is(err2, os.ErrNotExist) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err2)
		}
		below := false
		for _, e := range entries {
			if e.IsDir() {
				below = true
				if err := removeTree(ctx, filepath.Join(dir, e.Name())); err != nil {
					return err
				}
			}
		}
		if below {
			continue
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		case <-time.After(wait):
		}
		wait = min(wait*2, 20*time.Millisecond)
	}
}

// number reads a kernel file of one number; "max" is 0.
func number(path string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	s := strings.TrimSpace(string(data))
	if s == "max" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

// keyed reads one value of a kernel file of "key value" lines.
func keyed(path, key string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, ok := parseKeyed(data, key)
	if !ok {
		return 0, fmt.Errorf("%s has no %q", path, key)
	}
	return n, nil
}

func parseKeyed(data []byte, key string) (int64, bool) {
	for line := range bytes.Lines(data) {
		k, v, ok := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		if ok && string(k) == key {
			n, err := strconv.ParseInt(string(v), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
