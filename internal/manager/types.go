package manager

import (
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

// CreateRequest is what a client asks of a new sandbox. Zero fields take the
// template's value, then the default.
type CreateRequest struct {
	Template  string // "" is "base"
	Runtime   string // "" is the default runtime
	Resources sandbox.Resources
	Network   sandbox.NetworkPolicy // Mode "" is egress
	Env       map[string]string     // beside the template's; values are secrets
	Metadata  map[string]string     // the client's labels
	User      string                // of commands that name none
	Workdir   string                // of commands that name none; absolute
	Hostname  string                // "" is the sandbox's id
	Timeout   time.Duration         // time to live from its start; 0 is no end

	// Snapshot starts it from a snapshot, by name or ID, instead of a template.
	// A full one sets the runtime and the resources but the memory; both kinds
	// give the defaults of what is left open here.
	Snapshot string
	// OnTimeout is what happens when Timeout runs out; "" is to end it.
	OnTimeout sandbox.OnTimeout
	// IdleTimeout hibernates it after so long without a request, a running
	// exec or an open stream; 0 is never.
	IdleTimeout time.Duration
	// HibernateKind is what it keeps of itself at either; "" is all.
	HibernateKind sandbox.SnapshotKind
	// Volumes are mounted into it; each is named in Name, or in ID.
	Volumes []sandbox.VolumeMount
	// ManualWake keeps traffic by the proxy from waking it.
	ManualWake bool
	// EphemeralEnv names variables of Env that no fork of it and no sandbox of
	// a snapshot of it is given.
	EphemeralEnv []string

	// PublicTraffic opens its ports to everybody who can reach the proxy.
	PublicTraffic bool
	// HostHeader is what programs inside are shown as the Host of requests that
	// the proxy brings, "${PORT}" in it being the port; "" is the client's own.
	HostHeader string

	// InlineLayers replaces the template's root filesystem by these layer
	// directories, topmost first. It is for template build steps and not
	// reachable by the API.
	InlineLayers []string
}

// ListFilter narrows List. Every set field must match.
type ListFilter struct {
	States      []sandbox.State   // empty: the ones that have not ended
	Metadata    map[string]string // each must be there with this value
	Template    string            // name or id
	Runtime     string
	StartedFrom time.Time // started then or later; zero is no bound
	Oldest      bool      // the oldest first, instead of the newest
	Limit       int       // most per page; 0 is 100, at most 1000
	Token       string    // where the page before ended; "" is the first page
}

// RuntimeStatus tells whether this host can run one runtime.
type RuntimeStatus struct {
	Name         string
	Default      bool // chosen where a create names none
	Capabilities sandbox.Capabilities
	Error        *sandbox.Error // why it cannot run here, with the remedy; nil: it can
}

// Capacity is the host's budget and how much of it is in use.
type Capacity struct {
	Sandboxes int            // live ones, template build steps included
	ByState   map[string]int // live ones by state
	ByRuntime map[string]int // live ones by runtime

	// Spares are sandboxes that are prepared and wait for a fork or a wake: by
	// id, with their network slots.
	Spares map[string]int

	// Departing counts hibernated sandboxes that are leaving the host: what they
	// had of it counts as used until they have.
	Departing int

	MemoryTotal     int64 // bytes of the host
	MemoryAvailable int64 // bytes that the host can still give without swapping
	MemoryReserve   int64 // bytes kept for the host itself
	MemoryBudget    int64 // bytes that live sandboxes may be promised together
	MemoryPromised  int64 // bytes promised: limits and overheads of the live ones

	DiskTotal   int64 // bytes of the state directory's filesystem
	DiskFree    int64
	DiskReserve int64 // bytes below which no sandbox is made

	ProcessBudget   int // processes and threads that live sandboxes may be promised together
	ProcessPromised int

	Slots     int // network slots
	SlotsUsed int

	CreatesInFlight int
	CreatesMax      int // at work at the same time; more wait their turn
}

// BuildRequest asks for a new template: exactly one field is set.
type BuildRequest struct {
	Debian     *template.DebianOptions
	Import     *template.ImportOptions
	Dockerfile *template.DockerfileOptions
}

// Key is an API key's record. The secret itself is shown once, at creation,
// and only its SHA-256 is kept.
type Key struct {
	ID         string
	Name       string
	Tenant     string
	Prefix     string // the secret's first characters, to tell keys apart
	CreatedAt  time.Time
	LastUsedAt time.Time // zero: never; exact to a minute
}

// SnapshotRequest asks for a snapshot of a sandbox.
type SnapshotRequest struct {
	Name     string               // "" has none and goes by its ID
	Kind     sandbox.SnapshotKind // "" is full where the runtime can, else disk
	Metadata map[string]string    // the client's labels
}

// SnapshotFilter narrows Snapshots. Every set field must match.
type SnapshotFilter struct {
	Source sandbox.ID
	Name   string
	Limit  int    // most per page; 0 is 100, at most 1000
	Token  string // where the page before ended; "" is the first page
}

// ForkRequest asks for children of a sandbox.
type ForkRequest struct {
	Count    int                  // 1 to 100; 0 is 1
	Kind     sandbox.SnapshotKind // "" is full where the runtime can, else disk
	Env      map[string]string    // beside the source's; values are secrets
	Metadata map[string]string    // the children's labels; nil is the source's
	Timeout  time.Duration        // the children's time to live; 0 is no end
}

// ForkResult is one child: Sandbox, or Err where it could not be made.
type ForkResult struct {
	Sandbox sandbox.Sandbox
	Err     *sandbox.Error
}

// The kinds of TreeNode.
const (
	TreeSandbox  = "sandbox"
	TreeSnapshot = "snapshot"
)

// TreeNode is one sandbox or snapshot in the tree of who came of whom.
type TreeNode struct {
	Kind         string // TreeSandbox or TreeSnapshot
	ID           string
	Name         string               // a snapshot's
	Parent       string               // ID of the node that it came of; "" is none, or gone from the records
	State        sandbox.State        // a sandbox's
	SnapshotKind sandbox.SnapshotKind // a snapshot's
	CreatedAt    time.Time
	DiskBytes    int64 // what it has of its own on the disk
	MemoryBytes  int64 // what it uses now; 0 where it does not run
}
