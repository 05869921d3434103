package wire

import (
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Sandbox is one sandbox, live or ended.
type Sandbox struct {
	ID         string            `json:"id" doc:"Names the sandbox" example:"sbx7k2m9q4x1v8n3p6tc"`
	State      sandbox.State     `json:"state" enum:"creating,running,suspended,hibernated,killed,failed"`
	Reason     sandbox.Reason    `json:"reason,omitempty" doc:"Why it ended; absent while it lives"`
	Detail     string            `json:"detail,omitempty" doc:"One line on the end, for people"`
	Runtime    string            `json:"runtime" example:"gvisor"`
	Template   string            `json:"template" doc:"The name that was asked for" example:"base"`
	TemplateID string            `json:"template_id,omitempty" doc:"The content that it got"`
	Resources  Resources         `json:"resources"`
	Network    Network           `json:"network"`
	EnvNames   []string          `json:"env_names,omitempty" doc:"Names of the environment variables given at create; their values are secrets and not told"`
	User       string            `json:"user,omitempty" doc:"The user of commands that name none"`
	Workdir    string            `json:"workdir,omitempty" doc:"The directory of commands that name none"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Hostname   string            `json:"hostname,omitempty"`
	Instance   string            `json:"instance,omitempty" doc:"The id by which the host has its processes, where that is not its own: it woke in a spare"`
	Address    string            `json:"address,omitempty" doc:"Its own address on its link to the host"`
	Start      string            `json:"start,omitempty" enum:"cold,restore,pool" doc:"How it came to run"`
	OOMKills   int64             `json:"oom_kills" doc:"Commands that the kernel ended at the memory limit"`
	CreatedAt  time.Time         `json:"created_at"`
	StartedAt  *time.Time        `json:"started_at,omitempty" doc:"When its agent first answered"`
	ExpiresAt  *time.Time        `json:"expires_at,omitempty" doc:"When its time to live runs out; absent: never"`
	EndedAt    *time.Time        `json:"ended_at,omitempty"`

	Snapshot      string               `json:"snapshot,omitempty" doc:"id of the snapshot that it started from; a fork's is that of its capture, which goes once all copies have it in memory"`
	Parent        string               `json:"parent,omitempty" doc:"id of the sandbox that it was forked from"`
	OnTimeout     sandbox.OnTimeout    `json:"on_timeout,omitempty" enum:"kill,hibernate" doc:"What happens at expires_at"`
	Volumes       []VolumeMount        `json:"volumes,omitempty"`
	HibernateKind sandbox.SnapshotKind `json:"hibernate_kind,omitempty" enum:"full,disk" doc:"What it keeps when it hibernates; absent: its memory and disk"`
	ManualWake    bool                 `json:"manual_wake,omitempty" doc:"Traffic by the proxy does not wake it"`
	IdleTimeout   float64              `json:"idle_timeout,omitempty" doc:"Seconds without a request, a running command or an open stream after which it hibernates; absent: it does not"`
	SuspendedAt   *time.Time           `json:"suspended_at,omitempty" doc:"When it was suspended; absent in other states"`
	HibernatedAt  *time.Time           `json:"hibernated_at,omitempty" doc:"When it was hibernated; absent in other states"`

	HostHeader    string `json:"host_header,omitempty" doc:"What programs inside are shown as Host of requests by the proxy; absent: what the client sent"`
	PublicTraffic bool   `json:"public_traffic,omitempty" doc:"Its ports are open to everybody who reaches the proxy"`
	TrafficToken  string `json:"traffic_token,omitempty" doc:"Opens its ports without an API key (header e2b-traffic-access-token). Told when one sandbox is asked for, not in lists"`
}

// Resources are a sandbox's limits.
type Resources struct {
	CPUs      float64 `json:"cpus" doc:"CPU time per wall time; 0.5 is half a core"`
	MemoryMiB int     `json:"memory_mib" doc:"RAM, the page cache of its files included"`
	PIDs      int     `json:"pids" doc:"Processes and threads"`
	DiskMiB   int     `json:"disk_mib,omitempty" doc:"MiB that it may write to its root filesystem; absent: no limit of its own"`
}

// VolumeMount is a volume at a path of a sandbox.
type VolumeMount struct {
	Volume   string `json:"volume" maxLength:"128" doc:"The volume's name or id"`
	Path     string `json:"path" maxLength:"4096" doc:"Where it is mounted: absolute, outside of /proc, /sys and /dev"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// ResourceRequest asks for limits; what is left out takes the template's
// value, then the default.
type ResourceRequest struct {
	CPUs      float64 `json:"cpus,omitempty" minimum:"0"`
	MemoryMiB int     `json:"memory_mib,omitempty" minimum:"0"`
	PIDs      int     `json:"pids,omitempty" minimum:"0"`
	DiskMiB   int     `json:"disk_mib,omitempty" minimum:"0"`
}

// Network is what a sandbox may reach.
type Network struct {
	Mode  sandbox.NetworkMode `json:"mode,omitempty" enum:"none,egress" doc:"none: nothing outside; egress: public addresses, and what allow adds. Default: egress"`
	Allow []EgressRule        `json:"allow,omitempty" maxItems:"1000" doc:"Goes before deny and before the default deny of private ranges"`
	Deny  []EgressRule        `json:"deny,omitempty" maxItems:"1000"`
}

// EgressRule matches destinations: exactly one of cidr and domain is set.
type EgressRule struct {
	CIDR   string `json:"cidr,omitempty" maxLength:"64" example:"192.0.2.0/24" doc:"An address or a prefix"`
	Domain string `json:"domain,omitempty" maxLength:"255" example:"*.example.com" doc:"Exact, or *. and a domain"`
	Port   int    `json:"port,omitempty" minimum:"0" maximum:"65535" doc:"Absent or 0: any"`
}

// CreateSandbox asks for a new sandbox.
type CreateSandbox struct {
	Template  string            `json:"template,omitempty" maxLength:"256" doc:"Name or id; default: base"`
	Runtime   string            `json:"runtime,omitempty" maxLength:"64" doc:"Default: gvisor where it can run, else container"`
	Resources ResourceRequest   `json:"resources,omitzero"`
	Network   Network           `json:"network,omitzero"`
	Env       map[string]string `json:"env,omitempty" doc:"Beside the template's; the values are kept as secrets"`
	Metadata  map[string]string `json:"metadata,omitempty" doc:"Labels of the client's own, to find the sandbox by"`
	User      string            `json:"user,omitempty" maxLength:"256" doc:"The user of commands that name none"`
	Workdir   string            `json:"workdir,omitempty" maxLength:"4096" doc:"The directory of commands that name none; absolute"`
	Hostname  string            `json:"hostname,omitempty" maxLength:"63" doc:"Default: the id"`
	Timeout   float64           `json:"timeout,omitempty" minimum:"0" maximum:"31536000" doc:"Seconds to live from its start; 0 or absent: until it is killed"`

	Snapshot      string               `json:"snapshot,omitempty" maxLength:"256" doc:"Name or id of a snapshot to start from. Of kind full, template, runtime, cpus and pids are the snapshot's and cannot be given anew"`
	EphemeralEnv  []string             `json:"ephemeral_env,omitempty" maxItems:"10000" doc:"Names in env that no fork of it and no sandbox of a snapshot of it is given"`
	OnTimeout     sandbox.OnTimeout    `json:"on_timeout,omitempty" enum:"kill,hibernate" doc:"What happens when timeout runs out; default: kill"`
	Volumes       []VolumeMount        `json:"volumes,omitempty" maxItems:"16" doc:"Volumes to mount. Every sandbox that has a volume sees what the others write to it"`
	HibernateKind sandbox.SnapshotKind `json:"hibernate_kind,omitempty" enum:"full,disk" doc:"What it keeps when it hibernates: its memory and disk, or its disk alone, of which it boots when it wakes; default: full"`
	ManualWake    bool                 `json:"manual_wake,omitempty" doc:"Traffic by the proxy (by header or host name) does not wake it when it is hibernated: its owner does, by the API"`
	IdleTimeout   float64              `json:"idle_timeout,omitempty" minimum:"0" maximum:"31536000" doc:"Hibernate it after so many seconds without a request, a running command or an open stream, 1 at the least; 0 or absent: never"`
	HostHeader    string               `json:"host_header,omitempty" maxLength:"300" doc:"Show programs inside this as Host of requests by the proxy, ${PORT} in it being the port; default: what the client sent" example:"app.example.com:${PORT}"`
	PublicTraffic bool                 `json:"public_traffic,omitempty" doc:"Open its ports to everybody who reaches the proxy; default: only with an API key or its traffic token"`
}

// SetTimeout sets a sandbox's time to live anew.
type SetTimeout struct {
	Timeout float64 `json:"timeout" minimum:"0" maximum:"31536000" doc:"Seconds to live from now; 0: until it is killed"`
}

// SandboxList is one page of sandboxes, newest first.
type SandboxList struct {
	Sandboxes []Sandbox `json:"sandboxes"`
	NextToken string    `json:"next_token,omitempty" doc:"Give it as ?token= for the next page; absent on the last"`
}

// Stats is what a sandbox uses at one moment.
type Stats struct {
	At          time.Time `json:"at"`
	CPUSeconds  float64   `json:"cpu_seconds" doc:"CPU time since it started"`
	WorkingSet  int64     `json:"working_set_bytes" doc:"Memory charged, less page cache that can be dropped at once"`
	MemoryCache int64     `json:"memory_cache_bytes"`
	MemoryLimit int64     `json:"memory_limit_bytes"`
	PIDs        int       `json:"pids"`
	OOMKills    int64     `json:"oom_kills"`
}

// Event tells one transition of a sandbox, or one thing that happened to it.
type Event = sandbox.Event
