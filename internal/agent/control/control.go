// Package control holds what the agent and its client say to each other
// beside the E2B interface: the bodies of the private calls, and the names of
// headers and paths. It imports nothing heavy, so that both sides can.
package control

import (
	"net/netip"
	"time"
)

// Headers of the agent's interface.
const (
	TokenHeader     = "X-Access-Token"          // the access token, on every call after the first POST /init
	MetadataPrefix  = "X-Metadata-"             // a file's metadata on upload
	KeepaliveHeader = "Keepalive-Ping-Interval" // seconds between keepalive events on a stream
	// ScrollbackHeader, on Connect to a process with a terminal, asks for up to so
	// many bytes of what the terminal wrote before, read or not, ahead of what
	// nobody has read yet. The agent keeps 64 KiB.
	ScrollbackHeader = "X-Warren-Scrollback"
	ModeHeader       = "X-Warren-Mode" // octal permission bits of an uploaded file
)

// Paths of the plain HTTP calls.
const (
	PathHealth  = "/health"
	PathInit    = "/init"
	PathEnvs    = "/envs"
	PathMetrics = "/metrics"
	PathFiles   = "/files"
	PathCompose = "/files/compose"
	PathTar     = "/tar"
	PathTunnel  = "/tunnel"
	PathStats   = "/stats"
	PathFreeze  = "/freeze"
	PathThaw    = "/thaw"
	PathRestore = "/restored"
)

// UpgradeProtocol is the Upgrade token of GET /tunnel.
const UpgradeProtocol = "warren-tcp"

// InitRequest is the body of POST /init. Names that E2B's /init has are the
// same; the agent ignores fields that it does not know.
//
// The first init of an agent needs no token and sets AccessToken; later ones
// need the token in force. Fields that are zero change nothing.
type InitRequest struct {
	EnvVars        map[string]string `json:"envVars,omitempty"`        // replaces the environment of all later commands
	AccessToken    string            `json:"accessToken,omitempty"`    // what later calls must carry
	Timestamp      time.Time         `json:"timestamp,omitzero"`       // now; an older one than the last that was taken is ignored
	DefaultUser    string            `json:"defaultUser,omitempty"`    // of calls that name none: a name of /etc/passwd, or uid[:gid]
	DefaultWorkdir string            `json:"defaultWorkdir,omitempty"` // of commands that name none

	SandboxID   string       `json:"sandboxID,omitempty"`   // E2B_SANDBOX_ID; a new one makes a new machine-id
	TemplateID  string       `json:"templateID,omitempty"`  // E2B_TEMPLATE_ID
	Hostname    string       `json:"hostname,omitempty"`    // set and written to /etc/hostname and /etc/hosts
	Address     netip.Addr   `json:"address,omitzero"`      // the sandbox's own, for /etc/hosts; 127.0.1.1 where it has none
	Hosts       []HostEntry  `json:"hosts,omitempty"`       // more lines of /etc/hosts
	Nameservers []netip.Addr `json:"nameservers,omitempty"` // of /etc/resolv.conf; at most 3 are used by C libraries
	Search      []string     `json:"search,omitempty"`      // its search domains

	// Copied is that the disk is a copy of another sandbox's, and this one boots
	// with it: SSH host keys are made anew, and the programs of
	// /etc/warren/restored.d are run.
	Copied bool `json:"copied,omitempty"`
	// Rebooted is that the disk is this sandbox's own: it keeps the identity
	// that it has there.
	Rebooted bool `json:"rebooted,omitempty"`
}

// RestoredRequest is the body of POST /restored: what a sandbox that was
// restored from a capture has to be told before its processes go on. It carries
// the token that the capture had; AccessToken is the new one.
type RestoredRequest struct {
	InitRequest
	// DropEnv are variables that later commands do not get any more, unless
	// EnvVars has them anew: secrets of the capture's source. What processes that
	// run already have in their memory stays there.
	DropEnv []string `json:"dropEnv,omitempty"`
	// Wake is that this is the same sandbox, which wakes up: it keeps machine-id,
	// SSH host keys and whatever else is its identity.
	Wake bool `json:"wake,omitempty"`
}

// HostEntry is one line of /etc/hosts.
type HostEntry struct {
	Address netip.Addr `json:"address"`
	Names   []string   `json:"names"`
}

// Stats is what GET /stats tells of the agent itself.
type Stats struct {
	Version    string  `json:"version"`    // the agent's, which is the envd version that it speaks
	PID        int     `json:"pid"`        // 1 in a sandbox
	UptimeSec  float64 `json:"uptimeSec"`  // seconds since the agent started
	RSSBytes   int64   `json:"rssBytes"`   // resident memory, shared pages of its binary included
	HeapBytes  int64   `json:"heapBytes"`  // live and not yet collected Go heap
	Goroutines int     `json:"goroutines"` //
	Processes  int     `json:"processes"`  // commands that run now
	Started    int64   `json:"started"`    // commands started so far
	Reaped     int64   `json:"reaped"`     // orphans reaped so far
	Watchers   int     `json:"watchers"`   // file watches open
	Tunnels    int     `json:"tunnels"`    // TCP tunnels open
}

// Error is the body of every plain HTTP error.
type Error struct {
	Code    int    `json:"code"` // the HTTP status
	Message string `json:"message"`
}

// FileEntry is one file in the reply of POST /files and /files/compose.
type FileEntry struct {
	Name     string            `json:"name"`
	Type     string            `json:"type"` // "file"
	Path     string            `json:"path"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// ComposeRequest is the body of POST /files/compose.
type ComposeRequest struct {
	SourcePaths []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username,omitempty"`
}

// Metrics is the reply of GET /metrics; sizes are in bytes.
type Metrics struct {
	Timestamp   int64   `json:"ts"` // Unix seconds
	CPUCount    int     `json:"cpu_count"`
	CPUUsedPct  float64 `json:"cpu_used_pct"` // of one core: 200 is two cores busy
	MemTotal    uint64  `json:"mem_total"`
	MemUsed     uint64  `json:"mem_used"`
	MemCache    uint64  `json:"mem_cache"`
	MemTotalMiB uint64  `json:"mem_total_mib"`
	MemUsedMiB  uint64  `json:"mem_used_mib"`
	DiskUsed    uint64  `json:"disk_used"`
	DiskTotal   uint64  `json:"disk_total"`
}
