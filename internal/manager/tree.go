package manager

import (
	"cmp"
	"context"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// Tree tells who came of whom, parents before their children: of a sandbox or
// a snapshot (by name or ID) and all that came of it, or of all that the tenant
// has where root is "". A sandbox comes of the snapshot that it started from or
// of the sandbox that it was forked from, a snapshot of its source. Ended
// sandboxes are in it where something that is left came of them.
//
// CodeNotFound: the tenant has no such root.
func (m *Manager) Tree(ctx context.Context, tenant, root string) ([]TreeNode, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	recs, _, err := m.store.List(ctx, store.Filter{Tenant: tenant})
	if err != nil {
		return nil, err
	}
	snaps, _, err := m.store.ListSnapshots(ctx, store.SnapshotFilter{Tenant: tenant, Hidden: true})
	if err != nil {
		return nil, err
	}
	nodes := map[string]*TreeNode{}
	captures := map[string]store.Snapshot{}
	for _, n := range snaps {
		captures[n.ID] = n
		if !n.Hidden {
			nodes[n.ID] = &TreeNode{
				Kind: TreeSnapshot, ID: n.ID, Name: n.Name, Parent: string(n.Source),
				SnapshotKind: n.Kind, CreatedAt: n.CreatedAt, DiskBytes: n.SizeBytes,
			}
		}
	}
	for _, r := range recs {
		node := &TreeNode{Kind: TreeSandbox, ID: string(r.ID), State: r.State, CreatedAt: r.CreatedAt, Parent: string(r.Parent)}
		if r.Parent == "" {
			node.Parent = r.Snapshot
		}
		if r.Capture != "" {
			node.DiskBytes = captures[r.Capture].SizeBytes
		}
		nodes[node.ID] = node
	}
	children := map[string][]*TreeNode{}
	for _, n := range nodes {
		if nodes[n.Parent] == nil {
			n.Parent = ""
		}
		children[n.Parent] = append(children[n.Parent], n)
	}
	for _, c := range children {
		slices.SortFunc(c, func(a, b *TreeNode) int { return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID)) })
	}
	from := children[""]
	if root != "" {
		top := nodes[root]
		if top == nil {
			n, err := m.snapshotOf(ctx, tenant, root)
			if err != nil || nodes[n.ID] == nil {
				return nil, sandbox.Errorf(sandbox.CodeNotFound, "no sandbox or snapshot %q: `warren tree` shows what there is", short(root))
			}
			top = nodes[n.ID]
		}
		from = []*TreeNode{top}
	}
	var all []TreeNode
	var walk func(n *TreeNode, asked bool) bool
	walk = func(n *TreeNode, asked bool) bool {
		at := len(all)
		all = append(all, *n)
		keep := asked || n.Kind == TreeSnapshot || !n.State.Ended()
		for _, c := range children[n.ID] {
			keep = walk(c, false) || keep
		}
		if !keep {
			all = all[:at]
		}
		return keep
	}
	for _, n := range from {
		walk(n, root != "")
	}
	for i := range all {
		if all[i].Kind == TreeSandbox && all[i].State.Live() {
			m.measure(ctx, &all[i])
		}
	}
	return all, nil
}

// measure fills in what a live sandbox uses. What cannot be read is 0.
func (m *Manager) measure(ctx context.Context, n *TreeNode) {
	id := sandbox.ID(n.ID)
	l := m.find(id)
	if l == nil {
		return
	}
	n.DiskBytes += diskUse(ctx, m.dir(l.record().HostID()))
	if inst := l.instance(); inst != nil {
		if s, err := inst.Stats(ctx); err == nil {
			n.MemoryBytes = s.WorkingSet
		}
	}
}

// diskUse is what the files below dir take on the disk, in bytes. Files come
// and go meanwhile.
func diskUse(ctx context.Context, dir string) int64 {
	var n int64
	filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fs.SkipAll
		}
		if fi, err := d.Info(); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				n += st.Blocks * 512 // stat(2): always of 512 bytes
			}
		}
		return nil
	})
	return n
}
