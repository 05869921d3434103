package layer

import (
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// A View shows a stack of layers as the one tree that a sandbox of them sees,
// without mounting it. Nothing in it can lead out: each component is looked up
// without following, and symlinks are resolved here.
type View struct{ layers []*os.File }

// OpenView opens layer directories, topmost first.
func OpenView(dirs []string) (*View, error) {
	v := &View{}
	for _, d := range dirs {
		f, err := openDir(d)
		if err != nil {
			v.Close()
			return nil, Error("open a layer", err)
		}
		v.layers = append(v.layers, f)
	}
	return v, nil
}

// Close closes the view's descriptors.
func (v *View) Close() error {
	for _, f := range v.layers {
		f.Close()
	}
	v.layers = nil
	return nil
}

// An Entry is one name in a View.
type Entry struct {
	Path string // relative to the root, without symlinks; "" is the root
	Stat unix.Stat_t
	dirs []int // a directory's layers, topmost first
	at   int   // the layer that it is seen from
}

// IsDir tells whether e is a directory.
func (e Entry) IsDir() bool { return isDir(e.Stat) }

// IsRegular tells whether e is a regular file.
func (e Entry) IsRegular() bool { return isRegular(e.Stat) }

// maxLinks is how many symlinks one path may go through, as in the kernel.
const maxLinks = 40

// notThere says that a name is not in the view: CodeNotFound, with
// os.ErrNotExist in its chain.
func notThere(p string) error {
	return sandbox.Errorf(sandbox.CodeNotFound, "%s does not exist: %w", Quote("/"+strings.TrimPrefix(p, "/")), os.ErrNotExist)
}

func (v *View) root() (Entry, error) {
	e := Entry{}
	for i, f := range v.layers {
		if i == 0 {
			if err := unix.Fstat(int(f.Fd()), &e.Stat); err != nil {
				return e, err
			}
		}
		e.dirs = append(e.dirs, i)
		if opaque(f) {
			break
		}
	}
	if len(e.dirs) == 0 {
		e.Stat.Mode = unix.S_IFDIR | 0o755 // scratch
	}
	return e, nil
}

func opaque(dir *os.File) bool {
	s, err := readXattr(dir, opaqueXattr)
	return err == nil && s == "y"
}

// child looks name up in dir, without following it.
func (v *View) child(dir Entry, name string) (Entry, error) {
	e := Entry{Path: path.Join(dir.Path, name), at: -1}
	for _, i := range dir.dirs {
		parent, err := strict(v.layers[i], dir.Path, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return e, err
		}
		st, err := lstatat(parent, name)
		parent.Close()
		if isNotExist(err) {
			continue
		}
		if err != nil {
			return e, err
		}
		if isWhiteout(st) || (e.at >= 0 && !isDir(st)) {
			break
		}
		if e.at < 0 {
			e.at, e.Stat = i, st
		}
		if !isDir(st) {
			return e, nil
		}
		e.dirs = append(e.dirs, i)
		d, err := strict(v.layers[i], e.Path, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return e, err
		}
		hides := opaque(d)
		d.Close()
		if hides {
			break
		}
	}
	if e.at < 0 {
		return e, notThere(e.Path)
	}
	return e, nil
}

// Lookup finds p. Symlinks on the way are followed inside the view, the last
// one only where follow says so. The error has CodeNotFound where nothing is
// there, CodeInvalid where p leads through something that is no directory.
func (v *View) Lookup(p string, follow bool) (Entry, error) {
	e, rest, err := v.walk(p, follow)
	if err == nil && len(rest) > 0 {
		return e, notThere(p)
	}
	return e, err
}

// walk goes as far as p exists. rest is what is missing, with no "." or ".."
// in it; e is then the deepest directory that is there.
func (v *View) walk(p string, follow bool) (e Entry, rest []string, err error) {
	root, err := v.root()
	if err != nil {
		return root, nil, Error("look up "+Quote(p), err)
	}
	stack := []Entry{root}
	todo := split(p)
	for links := 0; len(todo) > 0; {
		name := todo[0]
		todo = todo[1:]
		if name == ".." {
			stack = stack[:max(len(stack)-1, 1)]
			continue
		}
		dir := stack[len(stack)-1]
		if !dir.IsDir() {
			return dir, nil, sandbox.Errorf(sandbox.CodeInvalid, "%s: %s is not a directory", Quote(p), Quote("/"+dir.Path))
		}
		next, err := v.child(dir, name)
		if isNotExist(err) {
			return dir, missing(name, todo), nil
		}
		if err != nil {
			return dir, nil, Error("look up "+Quote(p), err)
		}
		if isSymlink(next.Stat) && (len(todo) > 0 || follow) {
			if links++; links > maxLinks {
				return dir, nil, sandbox.Errorf(sandbox.CodeInvalid, "%s goes through more than %d symlinks", Quote(p), maxLinks)
			}
			target, err := v.Readlink(next)
			if err != nil {
				return dir, nil, err
			}
			if strings.HasPrefix(target, "/") {
				stack = stack[:1]
			}
			todo = append(split(target), todo...)
			if len(todo) > 4096 {
				return dir, nil, sandbox.Errorf(sandbox.CodeInvalid, "%s goes through symlinks to a path of more than 4096 components", Quote(p))
			}
			continue
		}
		stack = append(stack, next)
	}
	return stack[len(stack)-1], nil, nil
}

// missing is the path below an existing directory that name and todo make,
// their ".." taken away: what is not there has no symlinks.
func missing(name string, todo []string) []string {
	rest := []string{name}
	for _, n := range todo {
		if n == ".." {
			rest = rest[:max(len(rest)-1, 0)]
		} else {
			rest = append(rest, n)
		}
	}
	return rest
}

func split(p string) []string {
	var out []string
	for c := range strings.SplitSeq(p, "/") {
		if c != "" && c != "." {
			out = append(out, c)
		}
	}
	return out
}

// ReadDir lists a directory of the view, sorted.
func (v *View) ReadDir(dir Entry) ([]string, error) {
	seen := map[string]bool{} // name → false where it is whited out
	for _, i := range dir.dirs {
		d, err := strict(v.layers[i], dir.Path, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return nil, Error("list "+Quote(dir.Path), err)
		}
		err = readDir(d, seen)
		d.Close()
		if err != nil {
			return nil, Error("list "+Quote(dir.Path), err)
		}
	}
	var names []string
	for n, there := range seen {
		if there {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names, nil
}

func readDir(d *os.File, seen map[string]bool) error {
	for {
		entries, err := d.ReadDir(1024)
		for _, e := range entries {
			if _, ok := seen[e.Name()]; ok {
				continue
			}
			there := true
			if e.Type()&os.ModeCharDevice != 0 {
				st, err := lstatat(d, e.Name())
				if err != nil {
					return err
				}
				there = !isWhiteout(st)
			}
			seen[e.Name()] = there
		}
		if int64(len(seen)) > DefaultLimits().MaxEntries {
			return tooLarge("entries", "a directory has more than %d entries", DefaultLimits().MaxEntries)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Child gives dir's entry of that name, unfollowed.
func (v *View) Child(dir Entry, name string) (Entry, error) {
	e, err := v.child(dir, name)
	return e, Error("look up "+Quote(name), err)
}

// Readlink gives a symlink's target, as it stands.
func (v *View) Readlink(e Entry) (string, error) {
	parent, err := strict(v.layers[e.at], path.Dir(e.Path), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return "", Error("read the symlink "+Quote(e.Path), err)
	}
	defer parent.Close()
	s, err := readlinkat(parent, path.Base(e.Path))
	return s, Error("read the symlink "+Quote(e.Path), err)
}

// Open opens a regular file or a directory of the view; of a directory, its
// topmost layer's.
func (v *View) Open(e Entry) (*os.File, error) {
	if !e.IsDir() && !e.IsRegular() {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a regular file", Quote("/"+e.Path))
	}
	if e.at < 0 || len(v.layers) == 0 {
		return nil, notThere(e.Path)
	}
	f, err := strict(v.layers[e.at], e.Path, unix.O_RDONLY|unix.O_NONBLOCK)
	return f, Error("open "+Quote(e.Path), err)
}

// ReadFile reads a small regular file, following symlinks. It is CodeTooLarge
// where it has more than max bytes.
func (v *View) ReadFile(p string, max int64) ([]byte, error) {
	e, err := v.Lookup(p, true)
	if err != nil {
		return nil, err
	}
	f, err := v.Open(e)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, max+1))
	if err != nil {
		return nil, Error("read "+Quote(p), err)
	}
	if int64(len(b)) > max {
		return nil, tooLarge("file_bytes", "%s has more than %d bytes", Quote(p), max)
	}
	return b, nil
}

// Executable tells whether p is a program: a regular file that somebody may
// run.
func (v *View) Executable(p string) bool {
	e, err := v.Lookup(p, true)
	return err == nil && e.IsRegular() && e.Stat.Mode&0o111 != 0
}
