// Package console keeps what a sandbox's first process prints, bounded on the
// disk whatever it prints and whether or not the daemon runs.
//
// The sandbox writes to a FIFO in its directory; a Recorder in the daemon
// drains it into console.log, which is rotated once to console.log.1. The
// sandbox's own end of the FIFO is open for reading and writing, so while no
// daemon runs the pipe fills and writers wait: nothing is lost, nobody gets
// SIGPIPE, and not one byte goes to the disk unaccounted.
package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Names of the files in a sandbox's directory.
const (
	fifoName = "console.fifo"
	logName  = "console.log"
	oldName  = "console.log.1"
)

// maxFile is the size at which console.log is rotated: a console takes twice
// this on the disk at the most.
const maxFile = 512 << 10

// A Recorder drains one sandbox's console to its log.
type Recorder struct {
	dir  string
	fifo *os.File
	done chan struct{}
	once sync.Once

	log  *os.File // owned by drain
	size int64
}

// Record starts draining the console of the sandbox whose directory is dir,
// making the FIFO where it is missing. Call Close in the end.
func Record(dir string) (*Recorder, error) {
	path := filepath.Join(dir, fifoName)
	if err := unix.Mkfifo(path, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("make %s: %w", path, err)
	}
	r := &Recorder{dir: dir, done: make(chan struct{})}
	if err := r.open(); err != nil {
		return nil, err
	}
	// Reading and writing: the open does not wait for the other end, and there
	// is no end of file when the sandbox closes its own.
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		r.log.Close()
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	r.fifo = os.NewFile(uintptr(fd), path)
	go r.drain()
	return r, nil
}

// Writer opens the end that the sandbox's first process gets as its standard
// output and error. The caller closes its copy after the start.
func (r *Recorder) Writer() (*os.File, error) {
	path := filepath.Join(r.dir, fifoName)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Close takes what is in the FIFO now and stops. It is idempotent.
func (r *Recorder) Close() error {
	r.once.Do(func() { r.fifo.SetReadDeadline(time.Now().Add(-1)) })
	<-r.done
	return nil
}

func (r *Recorder) open() error {
	log, err := os.OpenFile(filepath.Join(r.dir, logName), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("console: %w", err)
	}
	st, err := log.Stat()
	if err != nil {
		log.Close()
		return fmt.Errorf("console: %w", err)
	}
	r.log, r.size = log, st.Size()
	return nil
}

func (r *Recorder) drain() {
	defer close(r.done)
	defer func() {
		r.fifo.Close()
		if r.log != nil {
			r.log.Close()
		}
	}()
	buf := make([]byte, 4096)
	for {
		n, err := r.fifo.Read(buf)
		r.write(buf[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return
		}
	}
	// The last words: what is in the pipe, at most its capacity.
	r.rest(buf)
}

// rest reads without waiting until the pipe is empty or one capacity's worth
// was read, whichever is first: a sandbox that goes on printing must not keep
// Close from returning.
func (r *Recorder) rest(buf []byte) {
	raw, err := r.fifo.SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) {
		for left := 1 << 20; left > 0; {
			n, err := unix.Read(int(fd), buf)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if n <= 0 || err != nil {
				return
			}
			r.write(buf[:n])
			left -= n
		}
	})
}

// write appends to the log. A full disk costs lines of the console and nothing
// else: the pipe must go on being drained.
func (r *Recorder) write(p []byte) {
	if len(p) == 0 {
		return
	}
	if r.size+int64(len(p)) > maxFile {
		r.log.Close()
		r.log = nil
		os.Rename(filepath.Join(r.dir, logName), filepath.Join(r.dir, oldName))
	}
	if r.log == nil && r.open() != nil {
		return
	}
	n, _ := r.log.Write(p)
	r.size += int64(n)
}

// Tail gives the last bytes of a console, at most max, beginning at a line's
// start where one is in reach. It is empty where there is no console.
func Tail(dir string, max int64) []byte {
	var all []byte
	for _, name := range []string{oldName, logName} {
		all = append(all, tailOf(filepath.Join(dir, name), max+1)...)
	}
	if int64(len(all)) > max {
		all = all[int64(len(all))-max:]
		if i := bytes.IndexByte(all, '\n'); i >= 0 && i < len(all)-1 {
			all = all[i+1:]
		}
	}
	return all
}

func tailOf(path string, max int64) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > max {
		f.Seek(-max, io.SeekEnd)
	}
	data, _ := io.ReadAll(io.LimitReader(f, max))
	return data
}

// Carry puts what is kept of the console in one directory before the one in
// another, as its older part. It is nil where there is none to carry.
func Carry(from, to string) error {
	old := Tail(from, maxFile)
	if len(old) == 0 {
		return nil
	}
	if err := os.WriteFile(filepath.Join(to, oldName), old, 0o600); err != nil {
		return fmt.Errorf("console: %w", err)
	}
	return nil
}

// followEvery is how often a following reader looks for more.
const followEvery = 50 * time.Millisecond

// Open reads a console from the oldest kept byte. With follow, the end of what
// there is waits for more until ctx is done or the reader is closed, which
// both read as io.EOF.
//
// dir is asked anew whenever a file is opened: a console that is carried to
// another directory is followed there.
func Open(ctx context.Context, dir func() string, follow bool) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	return &reader{ctx: ctx, cancel: cancel, dir: dir, follow: follow, next: oldName}
}

type reader struct {
	ctx    context.Context
	cancel context.CancelFunc
	dir    func() string
	follow bool

	mu   sync.Mutex
	f    *os.File
	next string // the file to open when f is nil
}

func (r *reader) Read(p []byte) (int, error) {
	for {
		n, err := r.read(p)
		if n > 0 || err != nil {
			return n, err
		}
		if !r.follow {
			return 0, io.EOF
		}
		select {
		case <-r.ctx.Done():
			return 0, io.EOF
		case <-time.After(followEvery):
		}
	}
}

// read reads what there is; 0 and nil is the end for now.
func (r *reader) read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		if r.ctx.Err() != nil {
			return 0, io.EOF
		}
		if r.f == nil {
			f, err := os.Open(filepath.Join(r.dir(), r.next))
			missing := errors.Is(err, os.ErrNotExist)
			if missing && r.next == oldName {
				r.next = logName
				continue
			}
			if missing {
				return 0, nil
			}
			if err != nil {
				return 0, err
			}
			r.f = f
		}
		rotated := r.rotated() // before the read: what came before a rotation is in f
		n, err := r.f.Read(p)
		if n > 0 || (err != nil && err != io.EOF) {
			return n, err
		}
		if !rotated {
			return 0, nil
		}
		r.f.Close()
		r.f, r.next = nil, logName
	}
}

// rotated tells whether the open file is not console.log (any more).
func (r *reader) rotated() bool {
	now, err := os.Stat(filepath.Join(r.dir(), logName))
	if err != nil {
		return false // between a rotation's rename and its new file
	}
	st, err := r.f.Stat()
	return err == nil && !os.SameFile(st, now)
}

func (r *reader) Close() error {
	r.cancel()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.f == nil {
		return nil
	}
	err := r.f.Close()
	r.f = nil
	return err
}
