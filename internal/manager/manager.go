// Package manager is the lifecycle: the only place that changes a sandbox's
// state.
package manager

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

// Manager runs the lives of all sandboxes of one daemon.
type Manager struct{}

// Config is what a Manager works with.
type Config struct{}

var errSkeleton = errors.New("manager: not filled in yet")

func New(cfg Config) (*Manager, error)             { return nil, errSkeleton }
func (m *Manager) Start(ctx context.Context) error { return errSkeleton }
func (m *Manager) Close(ctx context.Context) error { return errSkeleton }
func (m *Manager) Create(ctx context.Context, tenant string, r CreateRequest) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, errSkeleton
}
func (m *Manager) Get(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, errSkeleton
}
func (m *Manager) List(ctx context.Context, tenant string, f ListFilter) (page []sandbox.Sandbox, next string, err error) {
	return nil, "", errSkeleton
}
func (m *Manager) Kill(ctx context.Context, tenant string, id sandbox.ID) error { return errSkeleton }
func (m *Manager) SetTimeout(ctx context.Context, tenant string, id sandbox.ID, d time.Duration) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, errSkeleton
}
func (m *Manager) SetNetwork(ctx context.Context, tenant string, id sandbox.ID, p sandbox.NetworkPolicy) error {
	return errSkeleton
}
func (m *Manager) Stats(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Stats, error) {
	return sandbox.Stats{}, errSkeleton
}
func (m *Manager) Agent(ctx context.Context, tenant string, id sandbox.ID) (*agentclient.Client, error) {
	return nil, errSkeleton
}
func (m *Manager) Dial(ctx context.Context, tenant string, id sandbox.ID, port int) (net.Conn, error) {
	return nil, errSkeleton
}
func (m *Manager) Lookup(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, errSkeleton
}
func (m *Manager) Runtimes(ctx context.Context) []RuntimeStatus { return nil }
func (m *Manager) Subscribe(ctx context.Context, tenant string, afterSeq int64) (<-chan sandbox.Event, error) {
	return nil, errSkeleton
}
func (m *Manager) Logs(ctx context.Context, tenant string, id sandbox.ID, follow bool) (io.ReadCloser, error) {
	return nil, errSkeleton
}
func (m *Manager) Capacity(ctx context.Context) Capacity { return Capacity{} }
func (m *Manager) Templates(ctx context.Context, tenant string) ([]template.Template, error) {
	return nil, errSkeleton
}
func (m *Manager) Template(ctx context.Context, tenant, name string) (template.Template, error) {
	return template.Template{}, errSkeleton
}
func (m *Manager) RemoveTemplate(ctx context.Context, tenant, name string) error { return errSkeleton }
func (m *Manager) BuildTemplate(ctx context.Context, tenant string, r BuildRequest, progress template.Progress) (template.Template, error) {
	return template.Template{}, errSkeleton
}
func (m *Manager) CreateKey(ctx context.Context, tenant, name string) (k Key, secret string, err error) {
	return Key{}, "", errSkeleton
}
func (m *Manager) Keys(ctx context.Context, tenant string) ([]Key, error) { return nil, errSkeleton }
func (m *Manager) RemoveKey(ctx context.Context, tenant, id string) error { return errSkeleton }
func (m *Manager) Authenticate(ctx context.Context, secret string) (string, error) {
	return "", errSkeleton
}
