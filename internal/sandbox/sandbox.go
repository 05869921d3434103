package sandbox

import (
	"net/netip"
	"time"
)

// Sandbox is the durable record of one sandbox.
type Sandbox struct {
	ID         ID
	Tenant     string
	State      State
	Reason     Reason // why it ended; "" while it lives
	Detail     string // one line on the end, for people
	Runtime    string
	Template   string // the name that was asked for
	TemplateID string // the content that it got
	Resources  Resources
	Network    NetworkPolicy
	Env        map[string]string // given at create; values are secrets: never logged or listed
	User       string            // the user of commands that name none
	Workdir    string            // and their directory
	Metadata   map[string]string // the client's labels
	Hostname   string
	Token      string // the agent's access token; a secret
	// TrafficToken opens the sandbox's ports, the agent's aside, to who shows
	// it to the proxy in place of an API key; a secret, made at create.
	TrafficToken string
	// PublicTraffic opens those ports to everybody who can reach the proxy.
	PublicTraffic bool
	// HostHeader is what programs inside are shown as the Host of requests that
	// the proxy brings, "${PORT}" in it being the port; "" is the client's own.
	HostHeader string
	// Snapshot is the ID of the snapshot that it started from; "" is none. A
	// fork's is the hidden one of its capture.
	Snapshot string
	Parent   ID // the sandbox that it was forked from; "" is none
	// OnTimeout is what happens at ExpiresAt; "" is OnTimeoutKill.
	OnTimeout OnTimeout
	// IdleTimeout is how long it may go without a request, a running exec or an
	// open stream before it hibernates; 0 is for ever.
	IdleTimeout time.Duration
	// HibernateKind is what it keeps when it hibernates and nothing else is
	// asked for: "" and SnapshotFull are its memory and disk, SnapshotDisk its
	// disk alone, of which it boots when it wakes.
	HibernateKind SnapshotKind
	// ManualWake keeps traffic by the proxy from waking it: who is to use it
	// wakes it by the API.
	ManualWake bool
	Volumes    []VolumeMount
	Link       Link
	// Instance is the id under which the host has what runs of it: the
	// runtime's, the directory's and the network slot's. "" is its own; it has
	// another one when it woke in what was made before for any sandbox.
	Instance     ID
	Start        StartKind
	OOMKills     int64 // commands that the kernel ended at the memory limit
	CreatedAt    time.Time
	StartedAt    time.Time // when the agent first answered; zero before
	ExpiresAt    time.Time // when its time to live runs out; zero is never
	SuspendedAt  time.Time // when it was suspended; zero in every other state
	HibernatedAt time.Time // when it was hibernated; zero in every other state
	EndedAt      time.Time // zero while it lives
}

// VolumeMount is a volume that a sandbox has at a path.
type VolumeMount struct {
	ID       string `json:"id"`   // the volume's
	Name     string `json:"name"` // by which it was asked for
	Path     string `json:"path"` // absolute, clean
	ReadOnly bool   `json:"read_only,omitempty"`
}

// HostID is the id under which the host has what runs of the sandbox.
func (s Sandbox) HostID() ID {
	if s.Instance != "" {
		return s.Instance
	}
	return s.ID
}

// StartKind is how a sandbox came to run.
type StartKind string

// The kinds of start.
const (
	StartCold    StartKind = "cold"    // booted from its template
	StartRestore StartKind = "restore" // restored from a warm capture or a snapshot
	StartPool    StartKind = "pool"    // claimed from a pool
)

// NetworkMode is whether a sandbox can reach anything outside.
type NetworkMode string

// The network modes.
const (
	NetworkNone   NetworkMode = "none"   // the agent's link and nothing else
	NetworkEgress NetworkMode = "egress" // out to public addresses, and what Allow adds
)

// NetworkPolicy is what a sandbox may reach. Whatever the mode, nothing
// outside can open a connection to it but the daemon.
type NetworkPolicy struct {
	Mode  NetworkMode  `json:"mode"`
	Allow []EgressRule `json:"allow,omitempty"` // goes before Deny and the default deny of private ranges; never opens the host's loopback
	Deny  []EgressRule `json:"deny,omitempty"`
}

// EgressRule matches destinations. Exactly one of CIDR and Domain is set.
type EgressRule struct {
	CIDR   netip.Prefix `json:"cidr,omitzero"`
	Domain string       `json:"domain,omitempty"` // exact, or "*.example.com"
	Port   uint16       `json:"port,omitempty"`   // 0 is any
}

// ParsePrefix reads an address, as the prefix of it alone, or a prefix, of which
// bits beyond its length are taken away.
func ParsePrefix(s string) (p netip.Prefix, ok bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), true
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	return netip.Prefix{}, false
}

// Event tells one transition of a sandbox, or one thing that happened to it.
type Event struct {
	Seq     int64     `json:"seq"` // grows by at least 1; resumes a stream
	At      time.Time `json:"at"`
	Sandbox ID        `json:"sandbox"`
	Tenant  string    `json:"tenant"`
	Type    EventType `json:"type"`
	From    State     `json:"from,omitempty"`
	To      State     `json:"to,omitempty"`
	Reason  Reason    `json:"reason,omitempty"`
	Detail  string    `json:"detail,omitempty"`
}

// EventType is what an Event tells.
type EventType string

// The event types.
const (
	EventState EventType = "state"    // From → To
	EventOOM   EventType = "oom_kill" // the kernel ended a command inside; the sandbox goes on
)
