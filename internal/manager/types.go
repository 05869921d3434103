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

	// PublicTraffic opens its ports to everybody who can reach the proxy.
	PublicTraffic bool

	// InlineLayers replaces the template's root filesystem by these layer
	// directories, topmost first. It is for template build steps and not
	// reachable by the API.
	InlineLayers []string
}

// ListFilter narrows List. Every set field must match.
type ListFilter struct {
	States   []sandbox.State   // empty: the ones that have not ended
	Metadata map[string]string // each must be there with this value
	Template string            // name or id
	Runtime  string
	Limit    int    // most per page; 0 is 100, at most 1000
	Token    string // where the page before ended; "" is the first page
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
