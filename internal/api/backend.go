package api

import (
	"context"
	"io"
	"net"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/api/e2b"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

// Backend is what the API needs below it: the manager.
type Backend interface {
	Lives
	Captures
	Pools
	Insides
	Templates
	e2b.TemplatesBackend
	Keys
	Host
}

// Lives makes, finds and ends sandboxes.
type Lives interface {
	Create(ctx context.Context, tenant string, r manager.CreateRequest) (sandbox.Sandbox, error)
	Get(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Sandbox, error)
	List(ctx context.Context, tenant string, f manager.ListFilter) (page []sandbox.Sandbox, next string, err error)
	Kill(ctx context.Context, tenant string, id sandbox.ID) error
	SetTimeout(ctx context.Context, tenant string, id sandbox.ID, d time.Duration) (sandbox.Sandbox, error)
	SetNetwork(ctx context.Context, tenant string, id sandbox.ID, p sandbox.NetworkPolicy) error
	Subscribe(ctx context.Context, tenant string, afterSeq int64) (<-chan sandbox.Event, error)
}

// Captures puts sandboxes to sleep, and makes snapshots and copies of them.
type Captures interface {
	Suspend(ctx context.Context, tenant string, id sandbox.ID) error
	Unsuspend(ctx context.Context, tenant string, id sandbox.ID) error
	Hibernate(ctx context.Context, tenant string, id sandbox.ID) error
	Wake(ctx context.Context, tenant string, id sandbox.ID) error
	Snapshot(ctx context.Context, tenant string, id sandbox.ID, r manager.SnapshotRequest) (sandbox.Snapshot, error)
	Snapshots(ctx context.Context, tenant string, f manager.SnapshotFilter) (page []sandbox.Snapshot, next string, err error)
	SnapshotByName(ctx context.Context, tenant, nameOrID string) (sandbox.Snapshot, error)
	RemoveSnapshot(ctx context.Context, tenant, nameOrID string) error
	Fork(ctx context.Context, tenant string, id sandbox.ID, r manager.ForkRequest) ([]manager.ForkResult, error)
	Tree(ctx context.Context, tenant, root string) ([]manager.TreeNode, error)
}

// Pools keeps sandboxes ready to be claimed by Create.
type Pools interface {
	SetPool(ctx context.Context, tenant string, r manager.PoolRequest) (manager.Pool, error)
	Pools(ctx context.Context, tenant string) ([]manager.Pool, error)
	PoolByName(ctx context.Context, tenant, nameOrID string) (manager.Pool, error)
	RemovePool(ctx context.Context, tenant, nameOrID string) error
}

// Insides reaches into live sandboxes.
type Insides interface {
	// Use wakes a sandbox that is hibernated, and keeps it from being taken for
	// idle until release is called.
	Use(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error)
	Agent(ctx context.Context, tenant string, id sandbox.ID) (*agentclient.Client, error)
	Dial(ctx context.Context, tenant string, id sandbox.ID, port int) (net.Conn, error)
	Lookup(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	Stats(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Stats, error)
	Logs(ctx context.Context, tenant string, id sandbox.ID, follow bool) (io.ReadCloser, error)
}

// Templates makes, finds and removes templates.
type Templates interface {
	Templates(ctx context.Context, tenant string) ([]template.Template, error)
	Template(ctx context.Context, tenant, name string) (template.Template, error)
	RemoveTemplate(ctx context.Context, tenant, name string) error
	BuildTemplate(ctx context.Context, tenant string, r manager.BuildRequest, progress template.Progress) (template.Template, error)
}

// Keys makes, lists, removes and checks API keys.
type Keys interface {
	CreateKey(ctx context.Context, tenant, name string) (k manager.Key, secret string, err error)
	Keys(ctx context.Context, tenant string) ([]manager.Key, error)
	RemoveKey(ctx context.Context, tenant, id string) error
	Authenticate(ctx context.Context, secret string) (string, error)
}

// Host tells of the machine.
type Host interface {
	Runtimes(ctx context.Context) []manager.RuntimeStatus
	Capacity(ctx context.Context) manager.Capacity
}

var _ Backend = (*manager.Manager)(nil)
