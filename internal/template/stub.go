package template

import (
	"context"
	"io"
)

func (l *Library) BuildDockerfile(ctx context.Context, o DockerfileOptions, r StepRunner, p Progress) (Template, error) {
	panic("being built")
}

func PackContext(ctx context.Context, dir string, dockerfile string) (io.ReadCloser, error) {
	panic("being built")
}
