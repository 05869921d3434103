package sandbox

import (
	"context"
	"strings"
	"time"
)

// SnapshotKind is what a snapshot holds.
type SnapshotKind string

// The kinds of snapshot.
const (
	SnapshotDisk SnapshotKind = "disk" // the root filesystem's changes; a sandbox of it boots
	SnapshotFull SnapshotKind = "full" // memory, processes and the root filesystem's changes; a sandbox of it goes on
)

// Snapshot is the durable record of one capture of a sandbox. It never
// changes, and it outlives its source.
type Snapshot struct {
	ID       string // see NewSnapshotID
	Name     string // unique in its tenant; "" has none and goes by its ID
	Tenant   string
	Kind     SnapshotKind
	Source   ID     // the sandbox that it was taken of
	Parent   string // the snapshot that the source itself had started from; "" is none
	Runtime  string
	Template string // the name that the source had asked for
	// TemplateID is the content that lies below the snapshot's changes.
	TemplateID string
	// RuntimeVersion is Restorer.CaptureVersion at the capture, "" for a disk.
	RuntimeVersion string
	Resources      Resources // the source's; a sandbox of a full snapshot keeps its CPUs and PIDs
	Network        NetworkPolicy
	User           string
	Workdir        string
	Metadata       map[string]string // the client's labels
	// Volumes are what the source had mounted: a sandbox of a full snapshot
	// needs them, one of a disk is given none.
	Volumes []VolumeMount
	// Hidden is of a capture that was made for a fork or a hibernation and not
	// for a user: it is not listed, and goes with its last user.
	Hidden    bool
	SizeBytes int64 // what its files take on the disk
	CreatedAt time.Time
}

// snapshotPrefix begins every snapshot's ID, as "sbx" does a sandbox's.
const snapshotPrefix = "snp"

// NewSnapshotID makes a fresh random snapshot ID, of the form of a sandbox's.
func NewSnapshotID() string { return RandomID(snapshotPrefix) }

// IsSnapshotID tells whether s has the form of an ID of NewSnapshotID. It says
// nothing of whether there is such a snapshot.
func IsSnapshotID(s string) bool {
	return len(s) == len(snapshotPrefix)+17 && strings.HasPrefix(s, snapshotPrefix) && idPattern.MatchString(s)
}

// OnTimeout is what happens to a sandbox whose time to live runs out.
type OnTimeout string

// What may happen at the timeout.
const (
	OnTimeoutKill      OnTimeout = "kill"      // it ends; the default
	OnTimeoutHibernate OnTimeout = "hibernate" // it hibernates; its time starts anew when it wakes
)

// CheckpointOptions are how a Checkpoint goes.
type CheckpointOptions struct {
	// LeaveRunning lets the sandbox go on after the capture. Else nothing of
	// it runs when Checkpoint returns; Kill is still to be called.
	LeaveRunning bool
	// Durable tells that dir is to be made durable by the caller, so that it is
	// of use to send what is written of it on its way to the disk at once.
	Durable bool
}

// Checkpointer is an Instance whose memory and processes can be captured.
type Checkpointer interface {
	// Checkpoint writes memory, processes and the root filesystem's changes
	// into dir, which must not exist and is whole when it returns nil. On error
	// dir is gone, and with LeaveRunning the sandbox goes on.
	Checkpoint(ctx context.Context, dir string, o CheckpointOptions) error
}

// Loading is an Instance that a Restore can return before all of the capture
// is read. The capture's directory may go meanwhile.
type Loading interface {
	// Loaded returns when nothing of the capture is needed any more. An error
	// is that it could not be read: then the sandbox ends.
	Loaded(ctx context.Context) error
}

// Restorer is a Runtime that makes sandboxes from what its Checkpointers wrote.
type Restorer interface {
	// Restore makes a sandbox from a checkpoint's dir (read-only for it; many
	// may restore from one at once) and returns once its agent answers GET
	// /health. Its commands are still as the capture found them: stopped, where
	// the agent had frozen them, until the caller lets them go on. spec is a
	// new sandbox's: it has its own ID, Dir, Link and Hostname; its Layers and
	// its Resources but the memory are as at the capture. On error nothing of
	// it is left on the host, except its Dir.
	Restore(ctx context.Context, dir string, spec Spec) (Instance, error)
	// CaptureVersion names the format of the captures that this build makes. A
	// capture made under another must not be given to Restore.
	CaptureVersion() string
}

// Preparer is a Restorer that can do the part of Restore that needs no capture
// before there is one: while the source is being captured.
type Preparer interface {
	// Prepare makes all of a sandbox but what runs in it. Restore's words about
	// spec hold. The caller ends what it returns by Restore or Discard; Clean
	// removes one, too, and Adopt finds none. On error nothing is left on the
	// host, except the sandbox's Dir.
	Prepare(ctx context.Context, spec Spec) (Prepared, error)
}

// Prepared is a sandbox that waits for a capture.
type Prepared interface {
	// Restore is Restorer.Restore for the sandbox, which gets hostname where
	// that is not the one of Prepare's spec. The Prepared is used up by
	// it, whatever it returns.
	Restore(ctx context.Context, dir, hostname string) (Instance, error)
	// Discard removes it from the host, except its Dir.
	Discard(ctx context.Context) error
}
