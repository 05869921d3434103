package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/idmap"
	"github.com/warrenhq/warren/internal/sandbox"
)

// A Stage is the place, in the private mount namespace of one start, where the
// OCI runtime finds a sandbox's root filesystem and what is mounted into it:
// a small tmpfs over a directory of the host that every id may enter, since in
// a user namespace the runtime is not root to the host's directories.
type Stage struct {
	dir       string
	layers    []*os.File // detached mounts, topmost first
	rw        *os.File   // of the directory with upper and work; nil is read-only
	root      int        // the host's id of the sandbox's root
	files     map[string]*os.File
	dirs      []string
	points    []string // files to have in the root, to mount at
	pointDirs []string // and directories
	ids       *idmap.Range
}

// stageDirs are candidates for Stage.dir: standard directories that nobody
// needs while an OCI runtime starts a sandbox (FHS 3.0).
var stageDirs = []string{"/mnt", "/media", "/srv", "/opt", "/home"}

// stageDir picks the first candidate that hides none of the given paths.
func stageDir(needed ...string) (string, error) {
next:
	for _, dir := range stageDirs {
		st, err := os.Lstat(dir)
		if err != nil || !st.IsDir() {
			continue
		}
		for _, p := range needed {
			if p == dir || strings.HasPrefix(p, dir+"/") {
				continue next
			}
		}
		return dir, nil
	}
	return "", fmt.Errorf("none of %s can be mounted over in the sandbox runtime's namespace: make the directory /mnt", strings.Join(stageDirs, ", "))
}

// NewStage opens a sandbox's layers and, where it is not "", the directory rw
// to hold its changes. Ids on them are those of the sandbox, which ids maps;
// nil leaves them as they are.
func (e *Engine) NewStage(spec sandbox.Spec, rw string, ids *idmap.Range) (*Stage, error) {
	if len(spec.Layers) == 0 {
		return nil, sandbox.Errorf(sandbox.CodeBadTemplate, "sandbox %s has no root filesystem: its template has no layer", spec.ID)
	}
	if err := checkRoot(spec.Layers); err != nil {
		return nil, err
	}
	dir, err := stageDir(e.cfg.RunDir, spec.Dir, e.cfg.Binary)
	if err != nil {
		return nil, unavailable(err)
	}
	s, err := newStage(dir, spec.Layers, rw, ids)
	if err != nil {
		return nil, unavailable(err)
	}
	return s, nil
}

// mountPoints are the directories of the root that things are mounted on. A
// runtime makes those that are missing; it follows no symlink there.
var mountPoints = []string{"dev", "proc", "sys", filepath.Dir(AgentMount)[1:]}

// checkRoot checks that no layer has something else than a directory where
// things are to be mounted: the OCI runtimes refuse that, too, in words that
// do not tell whose fault it is. The error has CodeBadTemplate.
func checkRoot(layers []string) error {
	for _, name := range mountPoints {
		for _, l := range layers {
			var st unix.Stat_t
			err := unix.Lstat(filepath.Join(l, name), &st)
			if errors.Is(err, unix.ENOENT) {
				continue
			}
			if err != nil {
				return unavailable(fmt.Errorf("look at a layer's /%s: %w", name, err))
			}
			kind := st.Mode & unix.S_IFMT
			if kind != unix.S_IFDIR && !(kind == unix.S_IFCHR && st.Rdev == 0) { // a whiteout
				return sandbox.Errorf(sandbox.CodeBadTemplate, "the template's /%s is no directory: make it one, or leave it out, as the sandbox's own is mounted there", name)
			}
			break // the topmost counts
		}
	}
	return nil
}

func newStage(dir string, layers []string, rw string, ids *idmap.Range) (*Stage, error) {
	s := &Stage{dir: dir, files: map[string]*os.File{}, ids: ids}
	var userns *os.File
	if ids != nil {
		var err error
		if userns, err = ids.UserNS(); err != nil {
			return nil, err
		}
		defer userns.Close()
		s.root = int(ids.Base)
	}
	for _, l := range layers {
		t, err := idmap.OpenTree(l, userns, unix.MOUNT_ATTR_RDONLY)
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("layer: %w", err)
		}
		s.layers = append(s.layers, t)
	}
	if rw != "" {
		for _, d := range []string{"upper", "work"} {
			if err := os.MkdirAll(filepath.Join(rw, d), 0o755); err != nil {
				s.Close()
				return nil, err
			}
		}
		t, err := idmap.OpenTree(rw, userns, 0)
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("writable layer: %w", err)
		}
		s.rw = t
	}
	return s, nil
}

// Bind adds a file or directory of the host, read-only, under a name in the
// stage, and returns its path there. Mounts below it are not part of it.
func (s *Stage) Bind(source, name string) (string, error) {
	return s.bind(source, name, nil, unix.MOUNT_ATTR_RDONLY)
}

func (s *Stage) bind(source, name string, userns *os.File, attrs uint64) (string, error) {
	t, err := idmap.OpenTree(source, userns, attrs)
	if err != nil {
		return "", err
	}
	s.files[name] = t
	return filepath.Join(s.dir, name), nil
}

// BindVolume adds a directory of the host under a name in the stage, with the
// ids of the sandbox on it, and returns its path there.
func (s *Stage) BindVolume(source, name string, readOnly bool) (string, error) {
	var userns *os.File
	if s.ids != nil {
		var err error
		if userns, err = s.ids.UserNS(); err != nil {
			return "", err
		}
		defer userns.Close()
	}
	// On the mount itself: what a user namespace then makes of it keeps them.
	attrs := uint64(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	if readOnly {
		attrs |= unix.MOUNT_ATTR_RDONLY
	}
	return s.bind(source, name, userns, attrs)
}

// Dir adds an empty directory and returns its path in the stage.
func (s *Stage) Dir(name string) string {
	s.dirs = append(s.dirs, name)
	return filepath.Join(s.dir, name)
}

// Point sees to it that the root has the file name, empty: a runtime that gets the root read-only cannot make the
// points to mount at.
func (s *Stage) Point(name string) { s.points = append(s.points, name) }

// PointDir is Point for a directory. Those above it that a layer has keep its
// owner and mode.
func (s *Stage) PointDir(name string) { s.pointDirs = append(s.pointDirs, name) }

// Root is where the root filesystem will be.
func (s *Stage) Root() string { return filepath.Join(s.dir, "root") }

// mount makes the stage. The calling thread is in a private mount namespace.
func (s *Stage) mount() error {
	if err := unix.Mount("warren", s.dir, "tmpfs", unix.MS_NOSUID, "mode=0755,size=1m"); err != nil {
		return fmt.Errorf("mount the stage: %w", err)
	}
	if err := unix.Chdir(s.dir); err != nil {
		return err
	}
	if err := os.Mkdir("root", 0o755); err != nil {
		return err
	}
	for _, d := range s.dirs {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := s.mountRoot(); err != nil {
		return err
	}
	for name, t := range s.files {
		if err := place(t, name); err != nil {
			return err
		}
	}
	return nil
}

// place attaches a tree at a path under the working directory, making a file
// or directory to attach it to.
func place(t *os.File, name string) error {
	st, err := t.Stat()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if st.IsDir() {
		if err := os.MkdirAll(name, 0o755); err != nil {
			return err
		}
	} else if err := os.WriteFile(name, nil, 0o644); err != nil {
		return err
	}
	return idmap.Move(t, name)
}

func (s *Stage) mountRoot() error {
	if s.rw == nil && len(s.layers) == 1 && len(s.points)+len(s.pointDirs) == 0 {
		return idmap.Move(s.layers[0], "root")
	}
	// Short relative names: the options of a mount must fit one page, whatever
	// the layers' paths, and with no character that overlayfs reads specially.
	lower := make([]string, len(s.layers))
	for i, t := range s.layers {
		lower[i] = strconv.Itoa(i)
		if err := os.Mkdir(lower[i], 0o755); err != nil {
			return err
		}
		if err := idmap.Move(t, lower[i]); err != nil {
			return err
		}
	}
	if len(s.points)+len(s.pointDirs) > 0 {
		lower = append([]string{"points"}, lower...)
		if err := os.Mkdir("points", 0o755); err != nil {
			return err
		}
		if err := errors.Join(s.makePointDirs(lower[1:]), s.makePoints()); err != nil {
			return err
		}
	}
	opts := "lowerdir=" + strings.Join(lower, ":")
	if s.rw != nil {
		if err := os.Mkdir("rw", 0o755); err != nil {
			return err
		}
		if err := idmap.Move(s.rw, "rw"); err != nil {
			return err
		}
		opts += ",upperdir=rw/upper,workdir=rw/work"
	}
	if s.rw != nil {
		// A sandbox's disk does not outlive the host's crash, so its fsyncs
		// need not reach the host's disk.
		opts += ",volatile"
	}
	// An upper must be whole by itself, as a layer of others; and a layer that
	// came from outside must not point into another.
	opts += ",metacopy=off,redirect_dir=nofollow,index=off"
	err := asFSUser(s.root, func() error { return unix.Mount("overlay", "root", "overlay", 0, opts) })
	if err != nil {
		return fmt.Errorf("mount overlay of %d layers: %w", len(s.layers), err)
	}
	return nil
}

func (s *Stage) makePoints() error {
	for _, name := range s.points {
		path := filepath.Join("points", name)
		dir := filepath.Dir(path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
		// Where the directory is in several layers, the topmost's mode counts,
		// which is this one's.
		if dir == "points/tmp" {
			if err := os.Chmod(dir, os.ModeSticky|0o777); err != nil {
				return err
			}
		}
	}
	return nil
}

// makePointDirs makes the directories to mount at, and those above them. A
// directory that is in several layers has the topmost's owner and mode, which
// is this one's: it takes them of the layer below. layers are in the working
// directory.
func (s *Stage) makePointDirs(layers []string) error {
	for _, name := range s.pointDirs {
		at := ""
		for _, part := range strings.Split(strings.Trim(name, "/"), "/") {
			at = filepath.Join(at, part)
			if err := os.Mkdir(filepath.Join("points", at), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
			for _, l := range layers {
				var st unix.Stat_t
				err := unix.Lstat(filepath.Join(l, at), &st)
				if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
					continue
				}
				if err != nil {
					return err
				}
				if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
					break // a whiteout: there is nothing
				}
				if st.Mode&unix.S_IFMT != unix.S_IFDIR {
					return sandbox.Errorf(sandbox.CodeInvalid, "no volume can be at %s: the template's /%s is no directory", name, at)
				}
				p := filepath.Join("points", at)
				if err := errors.Join(os.Chown(p, int(st.Uid), int(st.Gid)), unix.Chmod(p, st.Mode&0o7777)); err != nil {
					return err
				}
				break // the topmost counts
			}
		}
	}
	return nil
}

// AddVolumes mounts a sandbox's volumes.
func AddVolumes(spec *specs.Spec, s sandbox.Spec, stage *Stage) error {
	for n, v := range s.Volumes {
		source, err := stage.BindVolume(v.Source, fmt.Sprintf("volumes/%d", n), v.ReadOnly)
		if err != nil {
			return fmt.Errorf("the volume at %s: %w", v.Path, err)
		}
		mode := "rw"
		if v.ReadOnly {
			mode = "ro"
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: v.Path, Type: "bind", Source: source, Options: []string{"bind", mode, "nosuid", "nodev"}})
	}
	return nil
}

// asFSUser runs f with the file system ids of the sandbox's root, and with all
// of the thread's capabilities. An overlay does its own work on the upper with
// the ids of who mounted it, and the host's root has no place on a mount that
// is mapped for a sandbox.
func asFSUser(id int, f func() error) error {
	if id == 0 {
		return f()
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if err := errors.Join(unix.Setfsgid(id), unix.Setfsuid(id)); err != nil {
		return fmt.Errorf("take the ids of %d: %w", id, err)
	}
	defer func() {
		unix.Setfsgid(0)
		unix.Setfsuid(0)
	}()
	// The change dropped the capabilities over files from the effective set.
	if err := unix.Capset(&header, &caps[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return f()
}

// Close frees what was not mounted.
func (s *Stage) Close() error {
	for _, t := range append(s.layers, s.rw) {
		if t != nil {
			t.Close()
		}
	}
	for _, t := range s.files {
		t.Close()
	}
	return nil
}
