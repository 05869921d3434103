package manager

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/console"
	"github.com/warrenhq/warren/internal/sandbox"
)

// consolePipe is the FIFO in a sandbox's directory into which its first
// process prints (internal/console).
const consolePipe = "console.fifo"

// consoleWait bounds the wait for a console that nobody drains.
const consoleWait = 5 * time.Second

// consoleWriter prints into a sandbox's console beside its first process, until ctx
// ends. It opens the pipe with the first write, since the runtime makes it.
type consoleWriter struct {
	ctx  context.Context
	dir  string
	pipe *os.File
}

func (c *consoleWriter) Write(p []byte) (int, error) {
	if c.pipe == nil {
		// Reading and writing: the open does not wait for the other end.
		// O_NONBLOCK lets the deadline and the close below end a write.
		fd, err := unix.Open(filepath.Join(c.dir, consolePipe), unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return 0, err
		}
		c.pipe = os.NewFile(uintptr(fd), consolePipe)
		context.AfterFunc(c.ctx, func() { c.pipe.Close() })
	}
	c.pipe.SetWriteDeadline(time.Now().Add(consoleWait))
	return c.pipe.Write(p)
}

// Logs reads a sandbox's console: what its agent and its template's start
// command printed, of a live one about the last MiB, of an ended one the last
// 256 KiB. With follow, reading goes on as more comes, until the sandbox ends
// or ctx does; both read as io.EOF.
func (m *Manager) Logs(ctx context.Context, tenant string, id sandbox.ID, follow bool) (io.ReadCloser, error) {
	l, err := m.of(ctx, tenant, id)
	if errors.Is(err, &sandbox.Error{Code: sandbox.CodeConflict}) {
		tail, err := m.store.Console(ctx, id)
		return io.NopCloser(bytes.NewReader(tail)), err
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	r := console.Open(ctx, func() string { return m.dir(l.record().HostID()) }, follow)
	stop := context.AfterFunc(l.ctx, func() {
		// The last words may be on their way from the pipe to the file.
		time.AfterFunc(100*time.Millisecond, cancel)
	})
	return &consoleReader{ReadCloser: r, stop: func() { stop(); cancel() }}, nil
}

type consoleReader struct {
	io.ReadCloser
	stop func()
}

func (r *consoleReader) Close() error {
	r.stop()
	return r.ReadCloser.Close()
}
