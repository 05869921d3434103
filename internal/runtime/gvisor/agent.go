package gvisor

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// A captured agent has its own binary mapped, so it must find the same bytes
// at a restore, though the daemon may have been upgraded in between. So every
// sandbox's directory and every capture has the binary that runs in it: a hard
// link where the filesystem is the same, else a copy, and that only in
// captures.
const agentName = "agent"

// agentDigest is the file of a bundle with the SHA-256 of its agent.
const agentDigest = "agent.sha256"

// fileKey tells a file's content apart without reading it.
type fileKey struct {
	dev, ino uint64
	size     int64
	mtime    unix.Timespec
}

var digests sync.Map // fileKey to SHA-256 in hex

// digest is the SHA-256 of a file in hex. It remembers those of files that
// have not changed.
func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	key := fileKey{uint64(st.Dev), st.Ino, st.Size, st.Mtim}
	if sum, ok := digests.Load(key); ok {
		return sum.(string), nil
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	sum := hex.EncodeToString(h.Sum(nil))
	digests.Store(key, sum)
	return sum, nil
}

// placeAgent picks the binary that a new sandbox's first process is, and notes
// which it is. want is a capture's agent, in the capture's dir; "" is the
// daemon's.
func (d *Driver) placeAgent(spec sandbox.Spec, dir, want string) (path string, err error) {
	sum, err := digest(d.cfg.AgentPath)
	if err != nil {
		return "", sandbox.Errorf(sandbox.CodeUnavailable, "the agent's binary: %w", err)
	}
	own := filepath.Join(spec.Dir, agentName)
	if err := os.Remove(own); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	path = d.cfg.AgentPath
	if want != "" && want != sum {
		sum = want
		path = own
		kept := filepath.Join(dir, agentName)
		if got, err := digest(kept); err != nil || got != want {
			return "", sandbox.Errorf(sandbox.CodeCorruptCapture, "the capture's agent is not the one that it was made with: make a new capture")
		}
		if err := copyFile(kept, own); err != nil {
			return "", sandbox.Errorf(sandbox.CodeInternal, "the agent of sandbox %s: %w", spec.ID, err)
		}
	} else {
		os.Link(path, own) // on another filesystem: the daemon's has to do
	}
	err = os.WriteFile(filepath.Join(d.eng.BundleDir(spec.ID), agentDigest), []byte(sum), 0o600)
	if err != nil {
		return "", sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	return path, nil
}

// agentOf is the digest of a sandbox's agent.
func (d *Driver) agentOf(spec sandbox.Spec) (string, error) {
	sum, err := os.ReadFile(filepath.Join(d.eng.BundleDir(spec.ID), agentDigest))
	if err != nil {
		return "", sandbox.Errorf(sandbox.CodeInternal, "the agent of sandbox %s: %w", spec.ID, err)
	}
	return string(sum), nil
}

// keepAgent makes to a copy of a sandbox's agent and tells its digest.
func (d *Driver) keepAgent(spec sandbox.Spec, to string) (string, error) {
	sum, err := d.agentOf(spec)
	if err != nil {
		return "", err
	}
	for _, path := range []string{filepath.Join(spec.Dir, agentName), d.cfg.AgentPath} {
		if got, err := digest(path); err != nil || got != sum {
			continue
		}
		if os.Link(path, to) == nil {
			return sum, nil
		}
		return sum, copyFile(path, to)
	}
	return "", sandbox.Errorf(sandbox.CodeUnavailable,
		"the agent's binary was replaced since sandbox %s started, and the one that runs in it is gone: capture it in the daemon's version that started it, or keep the binary and the state directory on one filesystem", spec.ID)
}

// copyFile copies a file, by reflink where the filesystem has them. On error
// to may be half made.
func copyFile(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) != nil {
		_, err = io.Copy(dst, src)
	}
	return errors.Join(err, dst.Close())
}
