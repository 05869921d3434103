package identity

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"syscall"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
)

// clockBehind and clockAhead are how far the clock of a restored sandbox may be
// off: where it cannot be set from inside, the runtime has to have it right. The
// request may have been under way for a while.
const (
	clockBehind = 5 * time.Second
	clockAhead  = time.Minute
)

// Verify tells what of a request did not take effect: what Apply passes over
// is no matter for a sandbox that starts, but a restored one must not run with
// the name or the time of another.
func (h Host) Verify(r control.InitRequest) error {
	if r.Hostname != "" {
		if got, err := h.Hostname(); err != nil || got != r.Hostname {
			return fmt.Errorf("the hostname is %q and should be %q: the sandbox may not set it, and the runtime did not", got, r.Hostname)
		}
	}
	if !r.Timestamp.IsZero() {
		if off := h.Now().Sub(r.Timestamp); off < -clockBehind || off > clockAhead {
			return fmt.Errorf("the clock is off by %s: the sandbox may not set it, and the runtime did not", off.Round(time.Millisecond))
		}
	}
	return nil
}

// generationPath is where a program can see that it was restored.
const generationPath = "warren/generation"

// Generation makes a new generation, 32 hexadecimal digits, and writes it to
// /run/warren/generation, in place: a program can map the file, watch it with
// inotify or read it. It is another after each restore, and in each fork.
func (h Host) Generation() (string, error) {
	var id [16]byte
	rand.Read(id[:])
	text := hex.EncodeToString(id[:])
	path := filepath.Join(h.Run, generationPath)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|syscall.O_NOFOLLOW, 0o644)
	if err != nil {
		return "", err
	}
	_, err = f.WriteAt([]byte(text+"\n"), 0)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return text, err
}

// HasGeneration tells whether a generation was made.
func (h Host) HasGeneration() bool {
	_, err := os.Lstat(filepath.Join(h.Run, generationPath))
	return err == nil
}

var hostKey = regexp.MustCompile(`^ssh_host_([a-z0-9]+)_key$`)

// HostKey is an SSH server's key.
type HostKey struct{ Type, Path string }

// HostKeys are the SSH server's keys in /etc/ssh.
func (h Host) HostKeys() ([]HostKey, error) {
	dir := filepath.Join(h.Etc, "ssh")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var keys []HostKey
	for _, e := range entries {
		if m := hostKey.FindStringSubmatch(e.Name()); m != nil {
			keys = append(keys, HostKey{m[1], filepath.Join(dir, e.Name())})
		}
	}
	return keys, err
}

// hooksDir has the programs that are run in a restored sandbox.
const hooksDir = "warren/restored.d"

// Hooks are the programs of /etc/warren/restored.d, in the order of their
// names. As they run as the agent's user, directory and programs must be its
// own and writable by nobody else.
func (h Host) Hooks() ([]string, error) {
	dir := filepath.Join(h.Etc, hooksDir)
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.IsDir() || !ours(info) {
		return nil, fmt.Errorf("%s is not a directory that only root can write to", dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var hooks []string
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info, err := os.Stat(path)
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			continue
		}
		if !ours(info) {
			return nil, fmt.Errorf("others than root can write to %s", path)
		}
		hooks = append(hooks, path)
	}
	sort.Strings(hooks)
	return hooks, nil
}

func ours(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid() && info.Mode()&0o022 == 0
}
