package template

import (
	"context"
	"io"

	"github.com/warrenhq/warren/internal/template/buildctx"
)

// PackContext gives the build context dir as a tar stream for
// DockerfileOptions.Context, without what .dockerignore leaves out: what a
// client sends to a daemon. dockerfile is the Dockerfile's path in it, ""
// for "Dockerfile". The caller closes the stream.
func PackContext(ctx context.Context, dir, dockerfile string) (io.ReadCloser, error) {
	return buildctx.Pack(ctx, dir, dockerfile)
}
