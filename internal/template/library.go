package template

import (
	"context"
	"io"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Library is all templates, layers and build-cache entries of one daemon.
type Library struct{ dir string }

// Option changes a Library's defaults.
type Option func(*Library)

func Open(dir string, opts ...Option) (*Library, error) { panic("being built") }
func (l *Library) Close() error                         { panic("being built") }
func (l *Library) Resolve(ctx context.Context, tenant, nameOrID string) (Template, []string, error) {
	panic("being built")
}
func (l *Library) Hold(ctx context.Context, id, holder string) error       { panic("being built") }
func (l *Library) Drop(ctx context.Context, holder string) error           { panic("being built") }
func (l *Library) Holders() map[string]string                              { panic("being built") }
func (l *Library) List(ctx context.Context, tenant string) ([]Template, error) { panic("being built") }
func (l *Library) Get(ctx context.Context, tenant, nameOrID string) (Template, error) {
	panic("being built")
}
func (l *Library) Remove(ctx context.Context, tenant, nameOrID string) (Template, error) { panic("being built") }
func (l *Library) BuildDebian(ctx context.Context, o DebianOptions, p Progress) (Template, error) {
	panic("being built")
}
func (l *Library) Import(ctx context.Context, o ImportOptions, p Progress) (Template, error) {
	panic("being built")
}
func (l *Library) BuildDockerfile(ctx context.Context, o DockerfileOptions, r StepRunner, p Progress) (Template, error) {
	panic("being built")
}

// PackContext gives dir as a tar stream.
func PackContext(ctx context.Context, dir string, dockerfile string) (io.ReadCloser, error) {
	panic("being built")
}

// Base is the default template.
func Base() DebianOptions { return DebianOptions{} }

var _ = sandbox.CodeInvalid
