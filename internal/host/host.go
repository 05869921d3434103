// Package host tells facts of the machine that Warren runs on.
package host

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Instance names one daemon on a host: 8 hex digits of the SHA-256 of its
// state directory's absolute path. It stands in the names of everything that
// the daemon makes on the host (cgroups, links, nft tables, run directories),
// so that daemons with different state directories never touch each other's.
func Instance(stateDir string) (string, error) {
	abs, err := filepath.Abs(stateDir)
	if err != nil {
		return "", fmt.Errorf("state directory %q: %w", stateDir, err)
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		abs = real
	}
	sum := sha256.Sum256([]byte(abs))
	return hex.EncodeToString(sum[:4]), nil
}

// CgroupMode is how the host mounts its cgroup hierarchies.
type CgroupMode string

// The cgroup modes.
const (
	CgroupV2     CgroupMode = "v2"     // one unified hierarchy at /sys/fs/cgroup
	CgroupHybrid CgroupMode = "hybrid" // v1 controllers, and a v2 tree without any at /sys/fs/cgroup/unified
	CgroupV1     CgroupMode = "v1"
)

// Cgroups reads the host's cgroup mode.
func Cgroups() CgroupMode {
	var st unix.Statfs_t
	if unix.Statfs("/sys/fs/cgroup", &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		return CgroupV2
	}
	if unix.Statfs("/sys/fs/cgroup/unified", &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		return CgroupHybrid
	}
	return CgroupV1
}

// CPUs is the number of processors that this process may use.
func CPUs() int { return runtime.NumCPU() }

// Memory is the host's memory in bytes, as /proc/meminfo tells it.
type Memory struct {
	Total     int64
	Available int64 // what a new workload can have without swapping
}

// ReadMemory reads /proc/meminfo.
func ReadMemory() (Memory, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Memory{}, err
	}
	return parseMeminfo(data)
}

func parseMeminfo(data []byte) (Memory, error) {
	var m Memory
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		f := bytes.Fields(sc.Bytes())
		if len(f) < 2 {
			continue
		}
		var into *int64
		switch string(f[0]) {
		case "MemTotal:":
			into = &m.Total
		case "MemAvailable:":
			into = &m.Available
		default:
			continue
		}
		kib, err := strconv.ParseInt(string(f[1]), 10, 53)
		if err != nil {
			return m, fmt.Errorf("/proc/meminfo: %s %q: %w", f[0], f[1], err)
		}
		*into = kib << 10
	}
	if m.Total == 0 || m.Available == 0 {
		return m, fmt.Errorf("/proc/meminfo has no MemTotal or MemAvailable")
	}
	return m, nil
}

// Disk is the space of the filesystem that holds a path, in bytes.
type Disk struct {
	Total int64
	Free  int64 // free to root
}

// ReadDisk reads the filesystem of path.
func ReadDisk(path string) (Disk, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Disk{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	return Disk{Total: int64(st.Blocks) * st.Bsize, Free: int64(st.Bfree) * st.Bsize}, nil
}

// Reflinks is nil where the filesystem of dir can make a copy of a file that
// shares its blocks (FICLONE, ioctl_ficlone(2)).
func Reflinks(dir string) error {
	var files [2]*os.File
	for n := range files {
		f, err := os.CreateTemp(dir, ".reflink-")
		if err != nil {
			return err
		}
		defer f.Close()
		if err := os.Remove(f.Name()); err != nil {
			return err
		}
		files[n] = f
	}
	if _, err := files[0].Write(make([]byte, 64<<10)); err != nil {
		return err
	}
	if err := unix.IoctlFileClone(int(files[1].Fd()), int(files[0].Fd())); err != nil {
		return fmt.Errorf("the filesystem of %s has no reflinks: %w", dir, err)
	}
	return nil
}
