// Package users finds the sandbox's users and groups, and resolves the paths
// that calls give relative to a user.
package users

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/user"
)

// User is who a call acts as.
type User struct {
	Name   string
	UID    int
	GID    int
	Groups []int // supplementary, without GID
	Home   string
	Shell  string
}

// ErrUnknown is that there is no such user.
var ErrUnknown = errors.New("unknown user")

// maxFile bounds what is read of a passwd or group file, in bytes: they are
// the workload's to write.
const maxFile = 4 << 20

// DB reads users from a passwd and a group file, anew for each lookup of a
// user, as the workload may change them.
type DB struct {
	Passwd, Group string

	mu    sync.Mutex
	names map[string]*nameCache // by file
}

// System is the database of /etc.
func System() *DB { return &DB{Passwd: "/etc/passwd", Group: "/etc/group"} }

// Lookup finds a user by name, or by uid or uid:gid in decimal, which need not
// be in the files (images name their user so). root is known even where there
// are no files at all. The error is ErrUnknown, or the file's.
func (d *DB) Lookup(name string) (User, error) {
	passwd, err := open(d.Passwd)
	if err != nil {
		return User{}, err
	}
	defer passwd.Close()
	group, err := open(d.Group)
	if err != nil {
		return User{}, err
	}
	defer group.Close()
	return find(name, io.LimitReader(passwd, maxFile), io.LimitReader(group, maxFile))
}

// open opens path; one that is missing is empty.
func open(path string) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return io.NopCloser(strings.NewReader("")), nil
	}
	return f, err
}

func find(name string, passwd, group io.Reader) (User, error) {
	if name == "" {
		return User{}, ErrUnknown
	}
	wantUID, wantGID := -1, -1
	if uid, gid, isID := strings.Cut(name, ":"); isNumber(uid) && (!isID || isNumber(gid)) {
		wantUID, _ = strconv.Atoi(uid)
		if isID {
			wantGID, _ = strconv.Atoi(gid)
		}
	}
	found, err := user.ParsePasswdFilter(passwd, func(u user.User) bool {
		return u.Name == name || wantUID >= 0 && u.Uid == wantUID
	})
	if err != nil {
		return User{}, fmt.Errorf("read the users: %w", err)
	}
	var u User
	switch {
	case len(found) > 0:
		// A name that looks like a number wins over the number.
		e := found[0]
		for _, f := range found {
			if f.Name == name {
				e = f
				break
			}
		}
		u = User{Name: e.Name, UID: e.Uid, GID: e.Gid, Home: e.Home, Shell: e.Shell}
	case wantUID >= 0:
		u = User{Name: strconv.Itoa(wantUID), UID: wantUID}
	case name == "root":
		u = User{Name: "root", Home: "/root"}
	default:
		return User{}, ErrUnknown
	}
	if u.UID < 0 || u.GID < 0 {
		return User{}, fmt.Errorf("user %q has a negative id", name)
	}
	if wantGID >= 0 {
		u.GID = wantGID
	}
	if !path.IsAbs(u.Home) {
		u.Home = "/"
	}
	u.Home = path.Clean(u.Home)
	if u.Shell == "" {
		u.Shell = "/bin/sh"
	}
	groups, err := user.ParseGroupFilter(group, func(g user.Group) bool {
		for _, member := range g.List {
			if member == u.Name {
				return true
			}
		}
		return false
	})
	if err != nil {
		return User{}, fmt.Errorf("read the groups: %w", err)
	}
	seen := map[int]bool{u.GID: true}
	for _, g := range groups {
		if g.Gid >= 0 && !seen[g.Gid] && len(u.Groups) < 1024 {
			seen[g.Gid] = true
			u.Groups = append(u.Groups, g.Gid)
		}
	}
	return u, nil
}

func isNumber(s string) bool {
	n, err := strconv.ParseInt(s, 10, 32)
	return err == nil && n >= 0
}

// nameCache is the names of one file's ids, as long as the file stays.
type nameCache struct {
	size  int64
	mtime time.Time
	names map[int]string
}

// UserName is the name of a uid, or its number.
func (d *DB) UserName(uid int) string {
	return d.name(d.Passwd, uid, func(r io.Reader, names map[int]string) error {
		_, err := user.ParsePasswdFilter(r, func(u user.User) bool {
			if _, ok := names[u.Uid]; !ok {
				names[u.Uid] = u.Name
			}
			return false
		})
		return err
	})
}

// GroupName is the name of a gid, or its number.
func (d *DB) GroupName(gid int) string {
	return d.name(d.Group, gid, func(r io.Reader, names map[int]string) error {
		_, err := user.ParseGroupFilter(r, func(g user.Group) bool {
			if _, ok := names[g.Gid]; !ok {
				names[g.Gid] = g.Name
			}
			return false
		})
		return err
	})
}

func (d *DB) name(file string, id int, parse func(io.Reader, map[int]string) error) string {
	var size int64
	var mtime time.Time
	if st, err := os.Stat(file); err == nil {
		size, mtime = st.Size(), st.ModTime()
	}
	d.mu.Lock()
	c := d.names[file]
	d.mu.Unlock()
	if c == nil || c.size != size || !c.mtime.Equal(mtime) {
		c = &nameCache{size: size, mtime: mtime, names: map[int]string{}}
		if f, err := open(file); err == nil {
			parse(io.LimitReader(f, maxFile), c.names) // what was read before an error serves
			f.Close()
		}
		d.mu.Lock()
		if d.names == nil {
			d.names = map[string]*nameCache{}
		}
		d.names[file] = c
		d.mu.Unlock()
	}
	if name, ok := c.names[id]; ok && name != "" {
		return name
	}
	return strconv.Itoa(id)
}

// Resolve makes p absolute and clean: "~" and "~/x" are u's home, and a
// relative path is under it. "" is an error.
func Resolve(p string, u User) (string, error) {
	switch {
	case p == "":
		return "", errors.New("the path is empty")
	case strings.ContainsRune(p, 0):
		return "", errors.New("the path has a NUL byte")
	case len(p) > 4096:
		return "", fmt.Errorf("the path is %d bytes long: the most is 4096", len(p))
	case p == "~" || strings.HasPrefix(p, "~/"):
		p = u.Home + p[1:]
	case p[0] == '~':
		return "", fmt.Errorf("cannot expand the home directory of another user in %q", p)
	case p[0] != '/':
		p = u.Home + "/" + p
	}
	return path.Clean(p), nil
}
