package users

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	passwd = `root:x:0:0:root:/root:/bin/bash
# a comment
user:x:1000:1000:,,,:/home/user:/bin/bash
bare:x:1001:1001:::
www:x:33:33:www:/var/www:/usr/sbin/nologin
4242:x:77:77::/home/n:/bin/sh
broken line
`
	group = `root:x:0:
sudo:x:27:user,www
docker:x:999:user
user:x:1000:user
`
)

func TestFind(t *testing.T) {
	user := User{Name: "user", UID: 1000, GID: 1000, Groups: []int{27, 999}, Home: "/home/user", Shell: "/bin/bash"}
	for _, tt := range []struct {
		name string
		want User
		err  error
	}{
		{"user", user, nil},
		{"1000", user, nil},
		{"root", User{Name: "root", Home: "/root", Shell: "/bin/bash"}, nil},
		{"bare", User{Name: "bare", UID: 1001, GID: 1001, Home: "/", Shell: "/bin/sh"}, nil},
		{"5000", User{Name: "5000", UID: 5000, Home: "/", Shell: "/bin/sh"}, nil},
		{"5000:6000", User{Name: "5000", UID: 5000, GID: 6000, Home: "/", Shell: "/bin/sh"}, nil},
		{"1000:27", User{Name: "user", UID: 1000, GID: 27, Groups: []int{999, 1000}, Home: "/home/user", Shell: "/bin/bash"}, nil},
		{"4242", User{Name: "4242", UID: 77, GID: 77, Home: "/home/n", Shell: "/bin/sh"}, nil},
		{"nobody-here", User{}, ErrUnknown},
		{"", User{}, ErrUnknown},
		{"-1", User{}, ErrUnknown},
		{"99999999999", User{}, ErrUnknown},
		{"user:", User{}, ErrUnknown},
	} {
		got, err := find(tt.name, strings.NewReader(passwd), strings.NewReader(group))
		if !errors.Is(err, tt.err) {
			t.Errorf("%q: error %v, want %v", tt.name, err, tt.err)
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%q: %s", tt.name, d)
		}
	}
}

func TestNoFiles(t *testing.T) {
	d := &DB{Passwd: filepath.Join(t.TempDir(), "none"), Group: filepath.Join(t.TempDir(), "none")}
	u, err := d.Lookup("root")
	if err != nil || u.UID != 0 || u.Home != "/root" {
		t.Errorf("root: %+v, %v", u, err)
	}
	if _, err := d.Lookup("user"); !errors.Is(err, ErrUnknown) {
		t.Errorf("user: %v", err)
	}
	if n := d.UserName(7); n != "7" {
		t.Errorf("name of 7: %q", n)
	}
}

func TestNamesFollowTheFile(t *testing.T) {
	dir := t.TempDir()
	d := &DB{Passwd: filepath.Join(dir, "passwd"), Group: filepath.Join(dir, "group")}
	write := func(file, s string) {
		if err := os.WriteFile(file, []byte(s), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(d.Passwd, passwd)
	write(d.Group, group)
	if u, g := d.UserName(1000), d.GroupName(27); u != "user" || g != "sudo" {
		t.Errorf("got %q and %q", u, g)
	}
	write(d.Passwd, "other:x:1000:1000::/:/bin/sh\n")
	if u := d.UserName(1000); u != "other" {
		t.Errorf("after the change: %q", u)
	}
}

func TestResolve(t *testing.T) {
	u := User{Name: "user", Home: "/home/user"}
	for _, tt := range []struct{ in, want string }{
		{"/a/b", "/a/b"},
		{"/a/../../b/", "/b"},
		{"x", "/home/user/x"},
		{"../other", "/home/other"},
		{"../../../../etc", "/etc"},
		{"~", "/home/user"},
		{"~/x", "/home/user/x"},
		{".", "/home/user"},
		{"~root/x", ""},
		{"", ""},
		{"a\x00b", ""},
		{strings.Repeat("a", 5000), ""},
	} {
		got, err := Resolve(tt.in, u)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("%.20q: %q, %v, want %q", tt.in, got, err, tt.want)
		}
	}
}

func FuzzFind(f *testing.F) {
	f.Add("user", passwd, group)
	f.Add("1000:27", passwd, "x:y:z:a,b")
	f.Add("root", "root:x:-5:99999999999999:::", ":::,")
	f.Fuzz(func(t *testing.T, name, passwd, group string) {
		u, err := find(name, strings.NewReader(passwd), strings.NewReader(group))
		if err != nil {
			return
		}
		if u.UID < 0 || u.GID < 0 || !filepath.IsAbs(u.Home) || u.Shell == "" {
			t.Errorf("%q: %+v", name, u)
		}
		for _, g := range u.Groups {
			if g < 0 {
				t.Errorf("%q: negative group in %+v", name, u)
			}
		}
	})
}

func FuzzResolve(f *testing.F) {
	f.Add("~/x", "/home/user")
	f.Add("../..", "/")
	f.Fuzz(func(t *testing.T, p, home string) {
		if !filepath.IsAbs(home) || strings.ContainsRune(home, 0) {
			return
		}
		got, err := Resolve(p, User{Home: home})
		if err == nil && (!filepath.IsAbs(got) || got != filepath.Clean(got)) {
			t.Errorf("%q in %q: %q", p, home, got)
		}
	})
}
