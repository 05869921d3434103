package files

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func seedTar(f *testing.F, entries ...tar.Header) {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, h := range entries {
		if h.Typeflag == tar.TypeReg {
			h.Size = 3
		}
		tw.WriteHeader(&h)
		if h.Typeflag == tar.TypeReg {
			tw.Write([]byte("abc"))
		}
	}
	tw.Close()
	f.Add(b.Bytes())
}

// Whatever the archive: nothing is made or changed outside of the directory.
func FuzzExtract(f *testing.F) {
	seedTar(f, tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755}, tar.Header{Typeflag: tar.TypeReg, Name: "d/f", Mode: 0o644})
	seedTar(f, tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, tar.Header{Typeflag: tar.TypeReg, Name: "l/f", Mode: 0o644})
	seedTar(f, tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "../victim"}, tar.Header{Typeflag: tar.TypeLink, Name: "h", Linkname: "l"}, tar.Header{Typeflag: tar.TypeReg, Name: "h", Mode: 0o644})
	f.Fuzz(func(t *testing.T, archive []byte) {
		top := t.TempDir()
		dst, victim := filepath.Join(top, "dst"), filepath.Join(top, "victim")
		if err := errors.Join(os.Mkdir(dst, 0o755), os.WriteFile(victim, []byte("victim"), 0o600)); err != nil {
			t.Fatal(err)
		}
		x := &extractor{uid: os.Getuid(), gid: os.Getgid(), bytes: 1 << 20, entries: 100}
		x.extract(dst, bytes.NewReader(archive))
		if es, err := os.ReadDir(top); err != nil || len(es) != 2 {
			t.Errorf("beside the directory: %v %v", es, err)
		}
		st, err := os.Lstat(victim)
		data, _ := os.ReadFile(victim)
		if err != nil || string(data) != "victim" || st.Mode() != 0o600 || st.Sys().(*syscall.Stat_t).Nlink != 1 {
			t.Errorf("the victim: %v %q %v", st, data, err)
		}
		filepath.WalkDir(dst, func(p string, d fs.DirEntry, err error) error { // make it removable
			if err == nil && d.IsDir() {
				os.Chmod(p, 0o755)
			}
			return nil
		})
	})
}

func FuzzEntryName(f *testing.F) {
	for _, s := range []string{"a/b", "../x", "/etc/passwd", "./", "a/./b/../c", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		got, err := entryName(name)
		if err == nil && (!filepath.IsLocal(got) || strings.Contains(got, "..") && !strings.Contains(name, "..")) {
			t.Errorf("%q became %q", name, got)
		}
	})
}

func FuzzPartPath(f *testing.F) {
	f.Add(`form-data; name="file"; filename="/a/b c.txt"`)
	f.Add(`form-data; name="file"; filename*=UTF-8''%e4%b8%ad`)
	f.Add(`form-data; name="file"; filename=""`)
	f.Fuzz(func(t *testing.T, header string) {
		if p, err := partPath(header); err == nil && p == "" {
			t.Errorf("%q gave no path", header)
		}
	})
}

func FuzzMetadata(f *testing.F) {
	f.Add("X-Metadata-Author", "me")
	f.Add("x-metadata-", "x")
	f.Add("X-Metadata-\xff", "\n")
	f.Fuzz(func(t *testing.T, name, value string) {
		m, err := metadata(http.Header{name: {value}})
		for k, v := range m {
			if err != nil || k == "" || len(k) > maxMetadataKey || strings.ContainsAny(k+v, "\x00\n\r") {
				t.Errorf("%q: %q gave %q: %q, %v", name, value, k, v, err)
			}
		}
	})
}

func FuzzEncoding(f *testing.F) {
	f.Add("gzip, deflate;q=0.5, *;q=0")
	f.Add("identity;q=0")
	f.Fuzz(func(t *testing.T, accept string) {
		coding, ok := encoding([]string{accept})
		if ok != (coding == "gzip" || coding == "identity") {
			t.Errorf("%q: %q, %v", accept, coding, ok)
		}
	})
}
