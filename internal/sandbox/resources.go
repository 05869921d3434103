package sandbox

import "time"

// Resources are a sandbox's limits.
type Resources struct {
	CPUs      float64 `json:"cpus"`       // CPU time per wall time; 0.5 is half a core
	MemoryMiB int     `json:"memory_mib"` // RAM, page cache of its files included
	PIDs      int     `json:"pids"`       // processes and threads
	DiskMiB   int     `json:"disk_mib"`   // bytes it may write to its root filesystem; 0 is no limit of its own
}

// Bounds of the limits that any runtime accepts. A runtime may ask for more
// (Capabilities.MinMemoryMiB).
const (
	MinCPUs      = 0.05
	MinMemoryMiB = 32
	MinPIDs      = 16
	MaxPIDs      = 65536
)

// DefaultResources are used where neither the request nor the template says.
func DefaultResources() Resources {
	return Resources{CPUs: 1, MemoryMiB: 512, PIDs: 1024}
}

// Or fills what is unset in r from d.
func (r Resources) Or(d Resources) Resources {
	if r.CPUs == 0 {
		r.CPUs = d.CPUs
	}
	if r.MemoryMiB == 0 {
		r.MemoryMiB = d.MemoryMiB
	}
	if r.PIDs == 0 {
		r.PIDs = d.PIDs
	}
	if r.DiskMiB == 0 {
		r.DiskMiB = d.DiskMiB
	}
	return r
}

// Validate checks r against the bounds; hostCPUs of 0 skips the upper bound of
// CPUs. The error has CodeInvalid and names the limit.
func (r Resources) Validate(hostCPUs int) error {
	switch {
	case !(r.CPUs >= MinCPUs): // also catches NaN
		return Errorf(CodeInvalid, "cpus is %v: the least is %v", r.CPUs, MinCPUs)
	case hostCPUs > 0 && r.CPUs > float64(hostCPUs):
		return Errorf(CodeInvalid, "cpus is %v: this host has %d", r.CPUs, hostCPUs)
	case r.MemoryMiB < MinMemoryMiB:
		return Errorf(CodeInvalid, "memory is %d MiB: the agent alone needs %d", r.MemoryMiB, MinMemoryMiB)
	case r.MemoryMiB > 1<<24:
		return Errorf(CodeInvalid, "memory is %d MiB: the most is %d (16 TiB)", r.MemoryMiB, 1<<24)
	case r.PIDs < MinPIDs || r.PIDs > MaxPIDs:
		return Errorf(CodeInvalid, "pids is %d: give %d to %d", r.PIDs, MinPIDs, MaxPIDs)
	case r.DiskMiB < 0:
		return Errorf(CodeInvalid, "disk is %d MiB: give 0 (no limit of its own) or more", r.DiskMiB)
	}
	return nil
}

// Stats is what a sandbox uses, read at one moment.
type Stats struct {
	At          time.Time     `json:"at"`
	CPUTime     time.Duration `json:"cpu_time_ns"`  // since it started
	WorkingSet  int64         `json:"working_set"`  // bytes: memory charged, less page cache that can be dropped at once
	MemoryCache int64         `json:"memory_cache"` // bytes of page cache charged
	MemoryLimit int64         `json:"memory_limit"` // bytes
	PIDs        int           `json:"pids"`         // processes and threads on the host
	OOMKills    int64         `json:"oom_kills"`    // kernel OOM kills inside its cgroup so far
}
