package sandbox

import (
	"context"
	"net"
	"net/netip"
	"time"
)

// AgentPort is the TCP port on which the agent serves in every sandbox
// (E2B's envd port).
const AgentPort = 49983

// Runtime drives one isolation boundary. A driver's life with a sandbox is:
//
//	Create or Adopt → Instance → … → Kill
//
// and Clean for whatever a crash left. A driver keeps nothing about a sandbox
// that is not also on the host: after a restart of the daemon, Adopt must find
// by ID and Dir all that it needs. Every method is safe for concurrent use on
// different sandboxes; the manager orders calls about one sandbox. Calls that
// end early by ctx leave nothing behind that Clean does not remove.
type Runtime interface {
	// Name is the runtime's name in the API ("container", "gvisor").
	Name() string
	// Capabilities is what the driver claims; `warren prove` measures it.
	Capabilities() Capabilities
	// Probe tells whether this host can run it: nil, or an Error of
	// CodeUnavailable whose message has the reason and the remedy. It is cheap
	// enough to call on every `warren runtimes`.
	Probe(ctx context.Context) error
	// Create makes and starts a sandbox and returns once its agent answers
	// GET /health. On error nothing of the sandbox is left on the host, except
	// its Dir, which belongs to the manager.
	Create(ctx context.Context, spec Spec) (Instance, error)
	// Adopt takes over a sandbox that an earlier daemon created from spec and
	// that still runs. CodeNotFound: it does not run any more (the caller then
	// calls Clean).
	Adopt(ctx context.Context, spec Spec) (Instance, error)
	// Clean removes all that the host still holds of the sandbox: processes,
	// cgroups, runtime state, mounts, whole or half made. It does not touch
	// Dir. It is idempotent, and nil where nothing was there.
	Clean(ctx context.Context, id ID) error
	// List gives the IDs of which the host holds anything for this daemon,
	// half-made ones included, whether or not the daemon knows them.
	List(ctx context.Context) ([]ID, error)
}

// Capabilities is what a runtime can do at all. The abilities that are methods
// are optional interfaces, found by assertion (Suspender, DiskCapturer, …);
// these flags say the same to clients.
type Capabilities struct {
	Boundary     string `json:"boundary"`       // what separates the sandbox from the host, in a few words
	ArbitraryELF bool   `json:"arbitrary_code"` // runs any Linux program
	Suspend      bool   `json:"suspend"`
	DiskCapture  bool   `json:"disk_capture"`
	FullCapture  bool   `json:"full_capture"` // memory, processes and disk
	DiskLimit    bool   `json:"disk_limit"`   // enforces Resources.DiskMiB
	HidesHost    bool   `json:"hides_host"`   // nproc and /proc/meminfo show the limits
	MinMemoryMiB int    `json:"min_memory_mib"`
	// OverheadMiB is host memory that an idle sandbox costs beside its
	// workload, counted by admission.
	OverheadMiB int `json:"overhead_mib"`
}

// Spec is all that a driver needs to make a sandbox. Environment, users, DNS
// and tokens are not in it: the manager gives them to the agent afterwards.
type Spec struct {
	ID        ID
	Dir       string   // the sandbox's own directory, absolute, root-owned, 0700; the driver may put anything in it
	Layers    []string // read-only root filesystem directories, topmost first, overlayfs whiteouts; at least one
	Link      Link
	Resources Resources
	Hostname  string
	Volumes   []Volume // directories of the host that are mounted beside the root
}

// Volume is a directory of the host that several sandboxes may have at once.
// The ids on it are those inside, and set-id bits and devices have no effect.
type Volume struct {
	Source   string // absolute
	Path     string // absolute and clean, within the sandbox
	ReadOnly bool
}

// Link is a sandbox's place on the network, taken from a slot.
type Link struct {
	Slot    int          `json:"slot"`    // 0 … 16383; also picks the sandbox's uid range
	NetNS   string       `json:"netns"`   // path of the pinned network namespace
	Device  string       `json:"device"`  // name of the interface inside (eth0)
	Address netip.Prefix `json:"address"` // the sandbox's address in its /30
	Gateway netip.Addr   `json:"gateway"` // the host's end
	DNS     netip.Addr   `json:"dns"`     // the resolver; it refuses at once while the policy is NetworkNone
}

// Exit is how a sandbox ended by itself.
type Exit struct {
	Reason Reason    // ReasonOOM or ReasonRuntimeCrashed
	Detail string    // one line for people
	At     time.Time // when it was noticed
}

// Instance is one running sandbox.
type Instance interface {
	// Dial connects to a TCP port inside, with or without a network of its
	// own. CodeUnavailable: nothing listens there.
	Dial(ctx context.Context, port int) (net.Conn, error)
	// Stats reads what it uses now.
	Stats(ctx context.Context) (Stats, error)
	// Wait blocks until the sandbox ended by itself or by Kill, or ctx is done
	// (then the error is ctx's). Any number of callers may wait.
	Wait(ctx context.Context) (Exit, error)
	// Kill ends it and removes all that the host holds of it, except Dir. It
	// is idempotent, never needs a resume first, and returns when it is gone.
	Kill(ctx context.Context) error
}

// Suspender is an Instance that can be frozen in RAM. Both calls are
// idempotent.
type Suspender interface {
	Suspend(ctx context.Context) error
	Unsuspend(ctx context.Context) error
}

// DiskCapturer is an Instance whose changes to its root filesystem can be
// taken. dir must not exist; it becomes a layer directory (overlayfs
// whiteouts, ids as seen inside) that is whole when the call returns nil.
type DiskCapturer interface {
	CaptureDisk(ctx context.Context, dir string) error
}

// DiskSharer is an Instance that came of a full capture, or was the source of
// one, and whose changes to its root filesystem are a copy of its own. The calls
// have equal blocks kept once where the filesystem can do that, and else do
// nothing; what the sandboxes see never changes. They take as long as reading
// the disk.
type DiskSharer interface {
	// ShareDisk shares with an instance of the same runtime that came of the
	// same capture, or was its source.
	ShareDisk(ctx context.Context, from Instance) error
	// ShareCapture has the capture in dir share with the instance.
	ShareCapture(ctx context.Context, dir string) error
}

// OOMWatcher is an Instance that outlives the kernel's OOM kill of a command
// inside it. WatchOOM calls f with the total count after each kill, until ctx
// is done or the sandbox ends, and returns then.
type OOMWatcher interface {
	WatchOOM(ctx context.Context, f func(total int64)) error
}
