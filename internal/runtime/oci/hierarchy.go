package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
)

// hierarchies are the host's mounted cgroup trees.
type hierarchies struct {
	mode  host.CgroupMode
	v1    map[string]string // controller → mount point; named ones as "name=systemd"
	roots []string          // every tree's mount point, once each, v2's last
}

// mounted reads the host's trees once: they do not change while a host runs.
var mounted = sync.OnceValues(func() (*hierarchies, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter("/sys/fs/cgroup"))
	if err != nil {
		return nil, fmt.Errorf("read the mounted cgroup trees: %w", err)
	}
	return findHierarchies(host.Cgroups(), infos)
})

func findHierarchies(mode host.CgroupMode, infos []*mountinfo.Info) (*hierarchies, error) {
	h := &hierarchies{mode: mode, v1: map[string]string{}}
	if mode == host.CgroupV2 {
		h.roots = []string{"/sys/fs/cgroup"}
		return h, nil
	}
	seen := map[string]bool{}
	var unified []string
	for _, m := range infos {
		switch m.FSType {
		case "cgroup2":
			unified = append(unified, m.Mountpoint)
		case "cgroup":
			for _, o := range strings.Split(m.VFSOptions, ",") {
				switch o {
				case "rw", "ro", "xattr", "clone_children", "noprefix", "cpuset_v2_mode", "favordynmods":
					continue
				}
				if strings.HasPrefix(o, "release_agent=") || h.v1[o] != "" {
					continue
				}
				h.v1[o] = m.Mountpoint
				if !seen[m.Mountpoint] {
					seen[m.Mountpoint] = true
					h.roots = append(h.roots, m.Mountpoint)
				}
			}
		}
	}
	for _, need := range []string{"memory", "pids", "freezer", "cpu", "cpuacct", "cpuset"} {
		if h.v1[need] == "" {
			return nil, fmt.Errorf("the cgroup controller %q is not mounted: mount the v1 controllers under /sys/fs/cgroup, or boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)", need)
		}
	}
	sort.Strings(h.roots)
	h.roots = append(h.roots, unified...)
	return h, nil
}

// v2Controllers are those that a sandbox needs.
var v2Controllers = []string{"cpu", "cpuset", "memory", "pids"}

// prepare makes the daemon's parent group, with the memory budget of all
// sandboxes together (bytes; 0 is none).
func (h *hierarchies) prepare(parent string, budget int64) error {
	if h.mode == host.CgroupV2 {
		return h.prepareV2(parent, budget)
	}
	mem := filepath.Join(h.v1["memory"], parent)
	set := filepath.Join(h.v1["cpuset"], parent)
	for _, dir := range []string{mem, set} {
		if err := mkdir(dir); err != nil {
			return err
		}
	}
	// A new v1 cpuset has no CPUs, and no child can have what it lacks.
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		have, err := os.ReadFile(filepath.Join(set, file))
		if err == nil && strings.TrimSpace(string(have)) != "" {
			continue
		}
		all, err := os.ReadFile(filepath.Join(h.v1["cpuset"], file))
		if err != nil {
			return err
		}
		if err := writeFile(filepath.Join(set, file), strings.TrimSpace(string(all))); err != nil {
			return err
		}
	}
	limit := "-1"
	if budget > 0 {
		limit = fmt.Sprint(budget)
	}
	if err := setMemoryV1(mem, limit); err != nil {
		return fmt.Errorf("memory budget of all sandboxes: %w", err)
	}
	return nil
}

func (h *hierarchies) prepareV2(parent string, budget int64) error {
	dir := filepath.Join(h.roots[0], parent)
	if err := enableV2(h.roots[0]); err != nil {
		return err
	}
	if err := mkdir(dir); err != nil {
		return err
	}
	if err := enableV2(dir); err != nil {
		return err
	}
	limit := "max"
	if budget > 0 {
		limit = fmt.Sprint(budget)
	}
	if err := writeFile(filepath.Join(dir, "memory.max"), limit); err != nil {
		return fmt.Errorf("memory budget of all sandboxes: %w", err)
	}
	return nil
}

// enableV2 gives dir's children the controllers that a sandbox needs.
func enableV2(dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return err
	}
	on := strings.Fields(string(data))
	for _, c := range v2Controllers {
		if contains(on, c) {
			continue
		}
		if err := writeFile(filepath.Join(dir, "cgroup.subtree_control"), "+"+c); err != nil {
			return fmt.Errorf("enable the cgroup controller %q: %w", c, err)
		}
	}
	return nil
}

// setMemoryV1 sets the limit of memory, and of memory with swap where the
// kernel counts it. The order of the two depends on whether the limit grows:
// the second may never be below the first.
func setMemoryV1(dir, limit string) error {
	mem := filepath.Join(dir, "memory.limit_in_bytes")
	both := filepath.Join(dir, "memory.memsw.limit_in_bytes")
	if !exists(both) {
		return writeFile(mem, limit)
	}
	if err := writeFile(both, limit); err == nil { // growing
		return writeFile(mem, limit)
	}
	if err := writeFile(mem, limit); err != nil { // shrinking
		return err
	}
	return writeFile(both, limit)
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// writeFile writes a kernel file in one write; a bad value's error names the
// file.
func writeFile(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func exists(path string) bool {
	return unix.Access(path, unix.F_OK) == nil
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
