package wire

import (
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Snapshot is one capture of a sandbox. It never changes.
type Snapshot struct {
	ID             string               `json:"id" doc:"Names the snapshot" example:"snp4c9y2w7h0r5j8m1ze"`
	Name           string               `json:"name,omitempty" doc:"The name that it was given; absent: it goes by its id"`
	Kind           sandbox.SnapshotKind `json:"kind" enum:"disk,full" doc:"disk: the root filesystem; a sandbox of it boots. full: memory and processes, too; a sandbox of it goes on"`
	Source         string               `json:"source" doc:"The sandbox that it was taken of"`
	Parent         string               `json:"parent,omitempty" doc:"The snapshot that the source itself had started from"`
	Runtime        string               `json:"runtime" example:"gvisor"`
	RuntimeVersion string               `json:"runtime_version,omitempty" doc:"The runtime's build, of kind full: no other one can restore it"`
	Template       string               `json:"template" doc:"The source's template"`
	TemplateID     string               `json:"template_id,omitempty"`
	Resources      Resources            `json:"resources" doc:"The source's limits"`
	Network        Network              `json:"network" doc:"What the source might reach"`
	User           string               `json:"user,omitempty"`
	Workdir        string               `json:"workdir,omitempty"`
	Metadata       map[string]string    `json:"metadata,omitempty" doc:"The snapshot's own labels"`
	SizeBytes      int64                `json:"size_bytes" doc:"What its files take on the host's disk"`
	CreatedAt      time.Time            `json:"created_at"`
}

// CreateSnapshot asks for a snapshot of a sandbox.
type CreateSnapshot struct {
	Name     string               `json:"name,omitempty" maxLength:"128" doc:"Its name, unique among the tenant's snapshots; absent: it goes by its id"`
	Kind     sandbox.SnapshotKind `json:"kind,omitempty" enum:"disk,full" doc:"Default: full where the runtime can, else disk"`
	Metadata map[string]string    `json:"metadata,omitempty" doc:"Labels of the snapshot's own"`
}

// SnapshotList is one page of snapshots, newest first.
type SnapshotList struct {
	Snapshots []Snapshot `json:"snapshots"`
	NextToken string     `json:"next_token,omitempty" doc:"Give it as ?token= for the next page; absent on the last"`
}

// Fork asks for copies of a sandbox.
type Fork struct {
	Count    int                  `json:"count,omitempty" minimum:"1" maximum:"100" doc:"How many; default: 1"`
	Kind     sandbox.SnapshotKind `json:"kind,omitempty" enum:"disk,full" doc:"full: memory and processes, too; disk: the root filesystem, and each copy boots. Default: full where the runtime can, else disk"`
	Env      map[string]string    `json:"env,omitempty" doc:"Beside the source's; the values are kept as secrets"`
	Metadata map[string]string    `json:"metadata,omitempty" doc:"Labels of the copies; absent: the source's"`
	Timeout  float64              `json:"timeout,omitempty" minimum:"0" maximum:"31536000" doc:"Seconds to live from their start; 0 or absent: until they are killed"`
}

// ForkResult is what became of one copy: exactly one field is set.
type ForkResult struct {
	Sandbox *Sandbox `json:"sandbox,omitempty"`
	Error   *Error   `json:"error,omitempty"`
}

// ForkList has a result for each copy that was asked for.
type ForkList struct {
	Kind  sandbox.SnapshotKind `json:"kind,omitempty" enum:"disk,full" doc:"What the copies have of the source"`
	Forks []ForkResult         `json:"forks"`
}

// TreeNode is one sandbox or snapshot and what it came from.
type TreeNode struct {
	Kind         string               `json:"kind" enum:"sandbox,snapshot"`
	ID           string               `json:"id"`
	Name         string               `json:"name,omitempty" doc:"A snapshot's name"`
	SnapshotKind sandbox.SnapshotKind `json:"snapshot_kind,omitempty" enum:"disk,full" doc:"Of a snapshot"`
	Parent       string               `json:"parent,omitempty" doc:"id of the node that it came from; absent: of none that is on record"`
	State        sandbox.State        `json:"state,omitempty" enum:"creating,running,suspended,hibernated,killed,failed" doc:"Of a sandbox"`
	CreatedAt    time.Time            `json:"created_at"`
	DiskBytes    int64                `json:"disk_bytes" doc:"Its own disk: what is not its parent's"`
	MemoryBytes  int64                `json:"memory_bytes" doc:"Its own memory now; 0 where it does not run"`
}

// Tree is the lineage of sandboxes and snapshots; a parent stands before its
// children.
type Tree struct {
	Nodes []TreeNode `json:"nodes"`
}

// TreeSnapshot is the kind of a TreeNode that is a snapshot.
const TreeSnapshot = "snapshot"
