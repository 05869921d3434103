package manager

import (
	"context"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Suspend freezes a running sandbox in RAM.
func (m *Manager) Suspend(ctx context.Context, tenant string, id sandbox.ID) error {
	return errNotYet
}

// Unsuspend lets a suspended sandbox go on.
func (m *Manager) Unsuspend(ctx context.Context, tenant string, id sandbox.ID) error {
	return errNotYet
}

// Snapshot captures a sandbox, which goes on as it was.
func (m *Manager) Snapshot(ctx context.Context, tenant string, id sandbox.ID, r SnapshotRequest) (sandbox.Snapshot, error) {
	return sandbox.Snapshot{}, errNotYet
}

// Snapshots lists a tenant's snapshots.
func (m *Manager) Snapshots(ctx context.Context, tenant string, f SnapshotFilter) (page []sandbox.Snapshot, next string, err error) {
	return nil, "", errNotYet
}

// SnapshotByName gives one by name or ID.
func (m *Manager) SnapshotByName(ctx context.Context, tenant, nameOrID string) (sandbox.Snapshot, error) {
	return sandbox.Snapshot{}, errNotYet
}

// RemoveSnapshot removes one.
func (m *Manager) RemoveSnapshot(ctx context.Context, tenant, nameOrID string) error {
	return errNotYet
}

// Fork makes children of a sandbox.
func (m *Manager) Fork(ctx context.Context, tenant string, id sandbox.ID, r ForkRequest) ([]ForkResult, error) {
	return nil, errNotYet
}

// Hibernate puts a sandbox on storage.
func (m *Manager) Hibernate(ctx context.Context, tenant string, id sandbox.ID) error {
	return errNotYet
}

// Wake brings a hibernated sandbox back.
func (m *Manager) Wake(ctx context.Context, tenant string, id sandbox.ID) error {
	return errNotYet
}

// Tree tells who came of whom: the tree below a sandbox or a snapshot, all of
// the tenant's where root is "".
func (m *Manager) Tree(ctx context.Context, tenant, root string) ([]TreeNode, error) {
	return nil, errNotYet
}

var errNotYet = sandbox.Errorf(sandbox.CodeUnsupported, "captures are not built yet")
