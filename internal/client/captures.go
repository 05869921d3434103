package client

import (
	"context"
	"iter"
	"net/url"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Suspend freezes a sandbox in RAM; one that is suspended already is no error.
func (c *Client) Suspend(ctx context.Context, id string) error {
	return c.json(ctx, call{method: "POST", path: sandboxPath(id, "/suspend")}, nil)
}

// Unsuspend lets a suspended sandbox go on.
func (c *Client) Unsuspend(ctx context.Context, id string) error {
	return c.json(ctx, call{method: "POST", path: sandboxPath(id, "/unsuspend")}, nil)
}

// Hibernate puts a sandbox on storage and frees what it held. It keeps what it
// was made to keep: its memory and disk, where nothing else was asked for.
func (c *Client) Hibernate(ctx context.Context, id string) error { return c.HibernateAs(ctx, id, "") }

// HibernateAs is Hibernate with a choice of what the sandbox keeps.
func (c *Client) HibernateAs(ctx context.Context, id string, kind sandbox.SnapshotKind) error {
	q := url.Values{}
	if kind != "" {
		q.Set("kind", string(kind))
	}
	return c.json(ctx, call{method: "POST", path: sandboxPath(id, "/hibernate"), query: q}, nil)
}

// WaitDeparted waits until no hibernated sandbox is leaving the daemon's host.
func (c *Client) WaitDeparted(ctx context.Context) error {
	for {
		have, err := c.Capacity(ctx)
		if err != nil || have.Departing == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Wake wakes a hibernated sandbox and returns once its agent is up. Any other
// call into it does so, too.
func (c *Client) Wake(ctx context.Context, id string) error {
	return c.json(ctx, call{method: "POST", path: sandboxPath(id, "/wake")}, nil)
}

// CreateSnapshot takes a snapshot of a sandbox, which goes on.
func (c *Client) CreateSnapshot(ctx context.Context, id string, r wire.CreateSnapshot) (wire.Snapshot, error) {
	var out wire.Snapshot
	return out, c.json(ctx, call{method: "POST", path: sandboxPath(id, "/snapshots"), body: r}, &out)
}

// Snapshots lists snapshots, newest first, page by page as they are taken;
// source, where it is not "", narrows them to those of one sandbox. An error
// ends it.
func (c *Client) Snapshots(ctx context.Context, source string) iter.Seq2[wire.Snapshot, error] {
	q := url.Values{"limit": {"1000"}}
	if source != "" {
		q.Set("source", source)
	}
	return func(yield func(wire.Snapshot, error) bool) {
		for {
			var page wire.SnapshotList
			if err := c.json(ctx, call{method: "GET", path: "/v1/snapshots", query: q}, &page); err != nil {
				yield(wire.Snapshot{}, err)
				return
			}
			for _, s := range page.Snapshots {
				if !yield(s, nil) {
					return
				}
			}
			if page.NextToken == "" {
				return
			}
			q.Set("token", page.NextToken)
		}
	}
}

// Snapshot gets one snapshot by name or id.
func (c *Client) Snapshot(ctx context.Context, name string) (wire.Snapshot, error) {
	var out wire.Snapshot
	return out, c.json(ctx, call{method: "GET", path: "/v1/snapshots/" + url.PathEscape(name)}, &out)
}

// RemoveSnapshot removes a snapshot, by name or id, that nothing needs still.
func (c *Client) RemoveSnapshot(ctx context.Context, name string) error {
	return c.json(ctx, call{method: "DELETE", path: "/v1/snapshots/" + url.PathEscape(name)}, nil)
}

// Fork makes copies of a sandbox; each has a result of its own.
func (c *Client) Fork(ctx context.Context, id string, r wire.Fork) (wire.ForkList, error) {
	var out wire.ForkList
	return out, c.json(ctx, call{method: "POST", path: sandboxPath(id, "/fork"), body: r}, &out)
}

// Tree reads the lineage of all sandboxes and snapshots, or of one and what
// came from it; a parent stands before its children.
func (c *Client) Tree(ctx context.Context, root string) ([]wire.TreeNode, error) {
	q := url.Values{}
	if root != "" {
		q.Set("root", root)
	}
	var out wire.Tree
	err := c.json(ctx, call{method: "GET", path: "/v1/tree", query: q}, &out)
	return out.Nodes, err
}
