package api

import (
	"context"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// BySnapshot is the path parameter of everything about one snapshot.
type BySnapshot struct {
	ID string `path:"id" maxLength:"256" doc:"The snapshot's id or name"`
}

func (a *API) registerCaptures() {
	for _, op := range []struct {
		name, summary, description string
		do                         func(ctx context.Context, tenant string, id sandbox.ID) error
	}{
		{"suspend", "Freeze a sandbox in RAM", "It keeps its memory and gets no CPU time. One that is suspended already is no error.", a.back.Suspend},
		{"unsuspend", "Let a suspended sandbox go on", "One that runs already is no error.", a.back.Unsuspend},
		{"wake", "Wake a hibernated sandbox", "Answers once its agent is up. One that runs already is no error. corrupt_capture: what is on storage is not what was written; " +
			"the sandbox stays hibernated and its data kept.", a.back.Wake},
	} {
		register(a, huma.Operation{
			OperationID: op.name + "-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/" + op.name, Tags: []string{"captures"},
			Summary: op.summary, Description: op.description, DefaultStatus: http.StatusNoContent,
		}, func(ctx context.Context, in *ByID) (*none, error) {
			id, err := sandbox.ParseID(in.ID)
			if err != nil {
				return nil, err
			}
			return nil, op.do(ctx, tenantOf(ctx), id)
		})
	}
	register(a, huma.Operation{
		OperationID: "hibernate-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/hibernate", Tags: []string{"captures"},
		Summary: "Put a sandbox on storage", DefaultStatus: http.StatusNoContent,
		Description: "It then holds no memory, no processes and no network slot; the next request to it wakes it. Connections into it are cut. " +
			"Answers once what is kept is on the disk and on record: what the host has of the sandbox goes right afterwards, and a create that needs its room waits for that. " +
			"One that is hibernated already is no error. unsupported: its runtime cannot make this kind.",
	}, func(ctx context.Context, in *struct {
		ByID
		Kind string `query:"kind" enum:"full,disk" doc:"What it keeps: its memory and disk, or its disk alone, of which it boots when it wakes; default: what it was made for, else full"`
	}) (*none, error) {
		id, err := sandbox.ParseID(in.ID)
		if err != nil {
			return nil, err
		}
		return nil, a.back.Hibernate(ctx, tenantOf(ctx), id, sandbox.SnapshotKind(in.Kind))
	})
	register(a, huma.Operation{
		OperationID: "create-snapshot", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/snapshots", Tags: []string{"captures"},
		Summary: "Take a snapshot of a sandbox", DefaultStatus: http.StatusCreated,
		Description: "The sandbox goes on. The snapshot outlives it. unsupported: its runtime cannot make this kind.",
	}, a.createSnapshot)
	register(a, huma.Operation{
		OperationID: "fork-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/fork", Tags: []string{"captures"},
		Summary: "Make copies of a sandbox",
		Description: "One capture, and copies restored from it side by side, each with an identity of its own and a result of its own; the source goes on. " +
			"The answer is an error only where there could be no copy at all. unsupported: its runtime cannot make this kind.",
	}, a.fork)
	register(a, huma.Operation{
		OperationID: "list-snapshots", Method: http.MethodGet, Path: "/v1/snapshots", Tags: []string{"captures"},
		Summary: "List snapshots", Description: "Newest first, narrowed by every parameter that is given.",
	}, a.listSnapshots)
	register(a, huma.Operation{
		OperationID: "get-snapshot", Method: http.MethodGet, Path: "/v1/snapshots/{id}", Tags: []string{"captures"},
		Summary: "Get one snapshot",
	}, func(ctx context.Context, in *BySnapshot) (*body[wire.Snapshot], error) {
		s, err := a.back.SnapshotByName(ctx, tenantOf(ctx), in.ID)
		if err != nil {
			return nil, err
		}
		return &body[wire.Snapshot]{toSnapshot(s)}, nil
	})
	register(a, huma.Operation{
		OperationID: "delete-snapshot", Method: http.MethodDelete, Path: "/v1/snapshots/{id}", Tags: []string{"captures"},
		Summary: "Remove a snapshot", Description: "conflict: sandboxes or snapshots that were made of it need it still.",
	}, func(ctx context.Context, in *BySnapshot) (*none, error) {
		return nil, a.back.RemoveSnapshot(ctx, tenantOf(ctx), in.ID)
	})
	register(a, huma.Operation{
		OperationID: "get-tree", Method: http.MethodGet, Path: "/v1/tree", Tags: []string{"captures"},
		Summary: "Read the lineage of sandboxes and snapshots", Description: "A parent stands before its children.",
	}, a.tree)
}

func (a *API) createSnapshot(ctx context.Context, in *struct {
	ByID
	Body *wire.CreateSnapshot // all of it has defaults
}) (*body[wire.Snapshot], error) {
	id, err := sandbox.ParseID(in.ID)
	if err != nil {
		return nil, err
	}
	r := orZero(in.Body)
	s, err := a.back.Snapshot(ctx, tenantOf(ctx), id, manager.SnapshotRequest{
		Name: r.Name, Kind: r.Kind, Metadata: r.Metadata,
	})
	if err != nil {
		return nil, err
	}
	return &body[wire.Snapshot]{toSnapshot(s)}, nil
}

func (a *API) fork(ctx context.Context, in *struct {
	ByID
	Body *wire.Fork // all of it has defaults
}) (*body[wire.ForkList], error) {
	id, err := sandbox.ParseID(in.ID)
	if err != nil {
		return nil, err
	}
	r := orZero(in.Body)
	timeout, err := seconds(r.Timeout)
	if err != nil {
		return nil, err
	}
	results, err := a.back.Fork(ctx, tenantOf(ctx), id, manager.ForkRequest{
		Count: max(r.Count, 1), Kind: r.Kind, Env: r.Env, Metadata: r.Metadata, Timeout: timeout,
	})
	if err != nil {
		return nil, err
	}
	a.metrics.forked(results)
	out := wire.ForkList{Kind: r.Kind, Forks: make([]wire.ForkResult, 0, len(results))}
	for _, r := range results {
		if r.Err != nil {
			// As any other error's answer: faults of ours are logged, not told.
			out.Forks = append(out.Forks, wire.ForkResult{Error: &a.toError(ctx, r.Err).body})
			continue
		}
		// How they came to run tells what their capture held: it may be gone.
		out.Kind = sandbox.SnapshotDisk
		if r.Sandbox.Start == sandbox.StartRestore {
			out.Kind = sandbox.SnapshotFull
		}
		sb := toSandbox(r.Sandbox, true)
		out.Forks = append(out.Forks, wire.ForkResult{Sandbox: &sb})
	}
	return &body[wire.ForkList]{out}, nil
}

// orZero gives what p points to: of a body that was left out, nothing is set.
func orZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

type listSnapshotsInput struct {
	Source string `query:"source" maxLength:"64" doc:"Taken of this sandbox"`
	Name   string `query:"name" maxLength:"256" doc:"Of this name"`
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100"`
	Token  string `query:"token" maxLength:"512" doc:"next_token of the page before"`
}

func (a *API) listSnapshots(ctx context.Context, in *listSnapshotsInput) (*body[wire.SnapshotList], error) {
	f := manager.SnapshotFilter{Name: in.Name, Limit: in.Limit, Token: in.Token}
	if in.Source != "" {
		var err error
		if f.Source, err = sandbox.ParseID(in.Source); err != nil {
			return nil, err
		}
	}
	page, next, err := a.back.Snapshots(ctx, tenantOf(ctx), f)
	if err != nil {
		return nil, err
	}
	out := wire.SnapshotList{Snapshots: make([]wire.Snapshot, 0, len(page)), NextToken: next}
	for _, s := range page {
		out.Snapshots = append(out.Snapshots, toSnapshot(s))
	}
	return &body[wire.SnapshotList]{out}, nil
}

func (a *API) tree(ctx context.Context, in *struct {
	Root string `query:"root" maxLength:"64" doc:"Only this sandbox or snapshot, by id, and what came from it"`
}) (*body[wire.Tree], error) {
	nodes, err := a.back.Tree(ctx, tenantOf(ctx), in.Root)
	if err != nil {
		return nil, err
	}
	return &body[wire.Tree]{wire.Tree{Nodes: toTree(nodes)}}, nil
}

func toSnapshot(s sandbox.Snapshot) wire.Snapshot {
	return wire.Snapshot{
		ID: s.ID, Name: s.Name, Kind: s.Kind, Source: string(s.Source), Parent: s.Parent,
		Runtime: s.Runtime, RuntimeVersion: s.RuntimeVersion, Template: s.Template, TemplateID: s.TemplateID,
		Resources: wire.Resources(s.Resources), Network: toNetwork(s.Network), User: s.User, Workdir: s.Workdir,
		Metadata: s.Metadata, SizeBytes: s.SizeBytes, CreatedAt: s.CreatedAt.UTC(),
	}
}

// toTree puts parents before their children, siblings by age. A parent that is
// not among the nodes is left out of its children.
func toTree(nodes []manager.TreeNode) []wire.TreeNode {
	known := make(map[string]bool, len(nodes))
	children := map[string][]manager.TreeNode{}
	for _, n := range nodes {
		known[n.ID] = true
	}
	for _, n := range nodes {
		if !known[n.Parent] {
			n.Parent = ""
		}
		children[n.Parent] = append(children[n.Parent], n)
	}
	for _, c := range children {
		slices.SortStableFunc(c, func(a, b manager.TreeNode) int { return a.CreatedAt.Compare(b.CreatedAt) })
	}
	out := make([]wire.TreeNode, 0, len(nodes))
	todo := slices.Clone(children[""])
	slices.Reverse(todo)
	for len(todo) > 0 {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		out = append(out, wire.TreeNode{
			Kind: n.Kind, ID: n.ID, Name: n.Name, SnapshotKind: n.SnapshotKind, Parent: n.Parent, State: n.State, CreatedAt: n.CreatedAt.UTC(),
			DiskBytes: n.DiskBytes, MemoryBytes: n.MemoryBytes,
		})
		for _, c := range slices.Backward(children[n.ID]) {
			todo = append(todo, c)
		}
	}
	return out
}
