// Package store is Warren's durable state: sandboxes, their events, and keys.
//
// It knows nothing of what the records mean. The manager is its only writer;
// what it records before and after each step of an operation is what a daemon
// that starts after a crash goes by.
package store

import (
	"context"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Op is an intent: an operation that was begun on a sandbox and is not known
// to have been completed.
type Op string

// The intents.
const (
	OpNone   Op = ""
	OpCreate Op = "create" // being made; State is Creating
	OpEnd    Op = "end"    // being ended for Record.EndReason; State is still the one before

	OpSuspend   Op = "suspend"   // being frozen; State is Running: undone after a crash
	OpUnsuspend Op = "unsuspend" // being let go; State is Suspended: finished after a crash
	OpHibernate Op = "hibernate" // State is Hibernated, and what ran of it is being removed: finished after a crash

	OpClaim Op = "claim" // a pool's member that is becoming somebody's sandbox: ended after a crash
)

// Record is all that is kept of one sandbox.
type Record struct {
	sandbox.Sandbox

	Version   int64          // set by the store; an Update must carry the one it read
	Op        Op             // the intent, OpNone when nothing is under way
	EndReason sandbox.Reason // of an OpEnd
	EndDetail string
	Internal  bool     // Warren's own (a template build step): not listed, no events
	Layers    []string // the layer directories it was made from, topmost first
	BootID    string   // of the host's boot in which it was made, or woke last

	Capture      string        // the snapshot that it wakes from; set exactly while it is hibernated
	Lifetime     time.Duration // its time to live anew each time that it wakes; 0 is no end
	EphemeralEnv []string      // names in Env that no child is given

	Pool string // the pool whose member it is; "" once it is claimed, and of all others
}

// Pool is all that is kept of one pool of ready sandboxes.
type Pool struct {
	ID        string
	Tenant    string
	Template  string // by name
	Runtime   string
	Resources sandbox.Resources // as asked for: zero fields are the template's
	Ready     int               // members to keep ready
	CreatedAt time.Time
	Capture   string // the snapshot that its members are restored from; see SetPoolCapture
}

// Snapshot is all that is kept of one snapshot.
type Snapshot struct {
	sandbox.Snapshot

	Layers       []string          // the directories that a sandbox of it is made from, topmost first
	Token        string            // of the agent in a full one; a secret
	Env          map[string]string // what a child of it gets; values are secrets
	EphemeralEnv []string          // names that the agent in a full one is to forget
	Transient    bool              // without checksums, and not durable
}

// SnapshotFilter chooses snapshots. Zero fields match everything.
type SnapshotFilter struct {
	Tenant string
	Source sandbox.ID
	Name   string
	Hidden bool   // also the hidden ones
	Limit  int    // most records of a page; 0 is no limit
	Token  string // the next of the page before
}

// NamedTemplate is a template's identity through all its builds and tags.
type NamedTemplate struct {
	ID        string
	Tenant    string
	Name      string // without a tag
	CreatedAt time.Time
}

// BuildState is how far a template build is.
type BuildState string

// The states of a build.
const (
	BuildWaiting  BuildState = "waiting" // for its steps
	BuildBuilding BuildState = "building"
	BuildReady    BuildState = "ready"
	BuildError    BuildState = "error"
)

// Build is all that is kept of one template build but its log.
type Build struct {
	ID         string
	Tenant     string
	Template   string // NamedTemplate.ID
	State      BuildState
	Tags       []string
	Resources  sandbox.Resources
	Reason     string // of BuildError
	Step       string // where it failed
	CreatedAt  time.Time
	FinishedAt time.Time
}

// Filter chooses records. Zero fields match everything.
type Filter struct {
	Tenant      string
	States      []sandbox.State
	Metadata    map[string]string // each key must be there with its value
	Template    string            // name or id
	Runtime     string
	Internal    bool      // also Warren's own
	StartedFrom time.Time // started then or later; zero is no bound
	Oldest      bool      // the oldest first
	Limit       int       // most records of a page; 0 is no limit
	Token       string    // the next of the page before
}

// Key is an API key's record.
type Key struct {
	ID         string
	Tenant     string
	Name       string
	Prefix     string
	Hash       [32]byte // SHA-256 of the secret
	CreatedAt  time.Time
	LastUsedAt time.Time
}

// Retention bounds what Prune leaves.
type Retention struct {
	EndedAfter time.Time // ended sandboxes older than this go
	Ended      int       // and the oldest beyond this many
	Events     int       // events beyond this many go, the oldest first
}

// Store is the whole of it. Errors are *sandbox.Error: CodeNotFound,
// CodeExists, CodeConflict (an Update of a stale Version), CodeInvalid (a bad
// page token), CodeDiskFull (nothing was changed), CodeInternal. Every method
// is safe for concurrent use.
type Store interface {
	Sandboxes
	Snapshots
	Pools
	Volumes
	Builds
	Events
	Keys
	// Maintain prunes, and gives back to the disk reserve what a full disk
	// took from it. The manager calls it now and then.
	Maintain(ctx context.Context, r Retention) (pruned int, err error)
	Close() error
}

// Sandboxes holds the sandboxes' records.
type Sandboxes interface {
	// Insert adds a record with its events in one transaction, and returns it
	// with its Version.
	Insert(ctx context.Context, r Record, events ...sandbox.Event) (Record, error)
	// Update replaces the record of r.ID, which must still have r.Version, and
	// adds events in the same transaction. It returns r with its new Version.
	Update(ctx context.Context, r Record, events ...sandbox.Event) (Record, error)
	Get(ctx context.Context, id sandbox.ID) (Record, error)
	// List gives records, the newest first, and the token of the next page, ""
	// after the last.
	List(ctx context.Context, f Filter) (page []Record, next string, err error)
	// Unfinished gives every record whose state is not final or which has an
	// intent, the oldest first.
	Unfinished(ctx context.Context) ([]Record, error)
	// SetConsole keeps the end of a sandbox's console.
	SetConsole(ctx context.Context, id sandbox.ID, tail []byte) error
	// Console gives what SetConsole kept; nil where it kept nothing.
	Console(ctx context.Context, id sandbox.ID) ([]byte, error)
}

// Snapshots holds the snapshots' records, which never change.
type Snapshots interface {
	// InsertSnapshot adds a record. CodeExists: the tenant has one of its name.
	InsertSnapshot(ctx context.Context, s Snapshot) error
	GetSnapshot(ctx context.Context, id string) (Snapshot, error)
	SnapshotNamed(ctx context.Context, tenant, name string) (Snapshot, error)
	// ListSnapshots gives records, the newest first, and the token of the next
	// page, "" after the last.
	ListSnapshots(ctx context.Context, f SnapshotFilter) (page []Snapshot, next string, err error)
	// DeleteSnapshot removes a record; it is nil for one that is gone.
	DeleteSnapshot(ctx context.Context, id string) error
}

// Pools holds the pools' records.
type Pools interface {
	// PutPool adds a record, or replaces that of the same ID: all of it but
	// CreatedAt and Capture.
	PutPool(ctx context.Context, p Pool) error
	// SetPoolCapture sets Capture; it is nil for a pool that is gone.
	SetPoolCapture(ctx context.Context, id, capture string) error
	GetPool(ctx context.Context, id string) (Pool, error)
	// ListPools gives a tenant's pools ("" is every tenant's), the oldest first.
	ListPools(ctx context.Context, tenant string) ([]Pool, error)
	// DeletePool removes a record; it is nil for one that is gone.
	DeletePool(ctx context.Context, id string) error
}

// Builds holds templates' names and builds.
type Builds interface {
	// NameTemplate records t, unless its tenant has one of the name, and gives
	// what is on record then.
	NameTemplate(ctx context.Context, t NamedTemplate) (NamedTemplate, error)
	// FindNamed gives a tenant's by name or ID.
	FindNamed(ctx context.Context, tenant, nameOrID string) (NamedTemplate, error)
	// ForgetNamed removes one and its builds; it is nil for one that is gone.
	ForgetNamed(ctx context.Context, tenant, id string) error
	// PutBuild adds a build.
	PutBuild(ctx context.Context, b Build) error
	// MoveBuild replaces a build that is still in state from; CodeConflict: it
	// is not.
	MoveBuild(ctx context.Context, b Build, from BuildState) error
	GetBuild(ctx context.Context, id string) (Build, error)
	// ListBuilds gives a template's builds ("" is all templates'), in one state
	// ("" is every state), the newest first.
	ListBuilds(ctx context.Context, template string, state BuildState) ([]Build, error)
	// DeleteBuild removes a record; it is nil for one that is gone.
	DeleteBuild(ctx context.Context, id string) error
}

// Events is the log of what happened, in the order of Seq.
type Events interface {
	// EventsAfter gives up to limit events of a tenant ("" is every tenant)
	// with a Seq above after, in order.
	EventsAfter(ctx context.Context, tenant string, after int64, limit int) ([]sandbox.Event, error)
	// LastSeq is the highest Seq ever given; 0 before the first event.
	LastSeq(ctx context.Context) (int64, error)
}

// Keys holds the API keys.
type Keys interface {
	InsertKey(ctx context.Context, k Key) error
	// KeyByHash gives the key whose secret has this SHA-256.
	KeyByHash(ctx context.Context, hash [32]byte) (Key, error)
	// ListKeys gives a tenant's keys ("" is every tenant's), the oldest first.
	ListKeys(ctx context.Context, tenant string) ([]Key, error)
	DeleteKey(ctx context.Context, tenant, id string) error
	// TouchKey sets LastUsedAt; it is nil for a key that is gone.
	TouchKey(ctx context.Context, id string, at time.Time) error
}
