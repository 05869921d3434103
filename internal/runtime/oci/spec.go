package oci

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// capabilities are what root inside keeps: enough to install packages, change
// owners and become other users. Against Docker's default set these are gone:
// NET_RAW (packets of any form), MKNOD (devices), AUDIT_WRITE (the host's
// audit log).
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// agentCapabilities are the agent's: it also traces processes, to freeze them
// (internal/agent/freeze), and takes that from its bounding set before it starts
// a command.
var agentCapabilities = append(capabilities[:len(capabilities):len(capabilities)], "CAP_SYS_PTRACE")

// MaskedPaths and ReadonlyPaths are the parts of /proc and /sys that a sandbox
// must not see or write: the OCI runtimes' usual list, and what newer kernels
// added.
var (
	MaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
	}
	ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// cpuPeriod is the CPU quota's period in microseconds, the kernel's default.
const cpuPeriod = 100_000

// NewSpec is the part of a bundle's config.json that the drivers share. The
// root is at stage.Root and the agent is bound from the stage. cpus is what
// Engine.Begin gave.
func NewSpec(s sandbox.Spec, g *Cgroup, cpus []int, stage *Stage, agent string) (*specs.Spec, error) {
	agentInStage, err := stage.Bind(agent, "agent")
	if err != nil {
		return nil, fmt.Errorf("the agent's binary: %w", err)
	}
	pids := int64(s.Resources.PIDs)
	memory := int64(s.Resources.MemoryMiB) << 20
	quota := int64(s.Resources.CPUs * cpuPeriod)
	period := uint64(cpuPeriod)
	spec := &specs.Spec{
		Version:  "1.0.2", // the newest that the oldest supported runtime knows
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: stage.Root()},
		Process: &specs.Process{
			Args:            []string{AgentMount},
			Cwd:             "/",
			Env:             []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"},
			NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: agentCapabilities, Effective: agentCapabilities, Permitted: agentCapabilities,
			},
			Rlimits: []specs.POSIXRlimit{
				files(),
				{Type: "RLIMIT_CORE", Soft: 0, Hard: 0}, // a core would go where the host's core_pattern says
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", fmt.Sprintf("size=%dk", memory/2>>10)}},
			{Destination: AgentMount, Type: "bind", Source: agentInStage, Options: []string{"bind", "ro", "nosuid", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: g.Path(),
			Resources: &specs.LinuxResources{
				Devices: devices(),
				Memory:  &specs.LinuxMemory{Limit: &memory},
				CPU:     &specs.LinuxCPU{Quota: &quota, Period: &period, Cpus: formatCPUList(cpus)},
				Pids:    &specs.LinuxPids{Limit: &pids},
			},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace}, {Type: specs.CgroupNamespace},
				{Type: specs.NetworkNamespace, Path: s.Link.NetNS},
			},
			MaskedPaths:   MaskedPaths,
			ReadonlyPaths: ReadonlyPaths,
		},
	}
	if g.CountsSwap() {
		spec.Linux.Resources.Memory.Swap = &memory // memory and swap together: no swap
	}
	return spec, nil
}

// files is the limit of open files: many, within what the daemon itself has,
// since a user namespace cannot go above.
func files() specs.POSIXRlimit {
	most := uint64(1 << 20)
	var have unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &have) == nil {
		most = min(most, have.Max)
	}
	return specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Soft: min(65536, most), Hard: most}
}

// devices denies all devices but the harmless ones.
func devices() []specs.LinuxDeviceCgroup {
	n := func(i int64) *int64 { return &i }
	out := []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	for _, d := range [][2]int64{
		{1, 3}, {1, 5}, {1, 7}, {1, 8}, {1, 9}, // null, zero, full, random, urandom
		{5, 0}, {5, 2}, // tty, ptmx
	} {
		out = append(out, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: n(d[0]), Minor: n(d[1]), Access: "rw"})
	}
	return append(out, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: n(136), Access: "rw"}) // pts
}

// CountsSwap tells whether the kernel can limit swap.
func (g *Cgroup) CountsSwap() bool {
	if g.h.mode == host.CgroupV2 {
		return exists(filepath.Join(g.h.roots[0], filepath.Dir(g.path), "memory.swap.max"))
	}
	return exists(filepath.Join(g.h.v1["memory"], "memory.memsw.limit_in_bytes"))
}

// AddSeccomp adds the default system call filter, for the capabilities that
// commands have: it allows ptrace(2) to everybody, of what the kernel lets them
// trace.
func AddSeccomp(spec *specs.Spec) error {
	p, err := seccomp.GetDefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: capabilities}}})
	if err != nil {
		return fmt.Errorf("default seccomp profile: %w", err)
	}
	spec.Linux.Seccomp = p
	return nil
}

// WriteBundle writes spec as a sandbox's config.json.
func (e *Engine) WriteBundle(id sandbox.ID, spec *specs.Spec) error {
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(e.BundleDir(id), "config.json"), data, 0o600)
}

// AddMounts makes the sandbox's own control group readable under
// /sys/fs/cgroup, where programs look for their limits.
func (g *Cgroup) AddMounts(spec *specs.Spec) {
	spec.Mounts = append(spec.Mounts, specs.Mount{
		Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"ro", "nosuid", "noexec", "nodev"},
	})
	if g.h.mode != host.CgroupV2 {
		// The directory over v1's trees is a tmpfs that stays writable.
		spec.Linux.ReadonlyPaths = append(spec.Linux.ReadonlyPaths[:len(spec.Linux.ReadonlyPaths):len(spec.Linux.ReadonlyPaths)], "/sys/fs/cgroup")
	}
}
