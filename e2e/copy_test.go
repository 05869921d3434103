package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/e2e/pattern"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/filesystem"
	"github.com/warrenhq/warren/proto/filesystem/filesystemconnect"
)

// TestCopy copies files and directories both ways by the command line, and
// checks that no name or symlink leads out of the sandbox or out of the
// directory here.
func TestCopy(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Network: wire.Network{Mode: sandbox.NetworkNone}})
		cp := func(t *testing.T, src, dst string) {
			t.Helper()
			if res := l.cli(t, "cp", src, dst); res.code != 0 {
				t.Fatalf("cp %s %s: exit %d\n%s", src, dst, res.code, res.stderr)
			}
		}
		// A secret of the host's that every escape goes for.
		outside := t.TempDir()
		secret := filepath.Join(outside, "secret")
		if err := os.WriteFile(secret, []byte("the host's"), 0o600); err != nil {
			t.Fatal(err)
		}

		t.Run("there and back", func(t *testing.T) {
			src := t.TempDir()
			var big bytes.Buffer
			pattern.Copy(&big, 5_000_000)
			must(t, os.WriteFile(filepath.Join(src, "big"), big.Bytes(), 0o640))
			must(t, os.WriteFile(filepath.Join(src, "run.sh"), []byte("#!/bin/sh\necho ran\n"), 0o755))
			must(t, os.WriteFile(filepath.Join(src, "ein Name\nmit \xff"), pattern.AllBytes(), 0o644))
			must(t, os.MkdirAll(filepath.Join(src, "a", "b", "empty"), 0o755))
			must(t, os.WriteFile(filepath.Join(src, "a", "none"), nil, 0o644))
			must(t, os.Symlink("../run.sh", filepath.Join(src, "a", "link")))
			cp(t, src, sb.ID+":/tmp/copy")
			if out := l.run(t, sb.ID, "/tmp/copy/run.sh"); out != "ran" {
				t.Errorf("the script says %q", out)
			}
			back := filepath.Join(t.TempDir(), "back")
			cp(t, sb.ID+":/tmp/copy", back)
			sameTree(t, src, back)
			cp(t, filepath.Join(src, "big"), sb.ID+":/tmp/big2")
			one := filepath.Join(t.TempDir(), "one")
			cp(t, sb.ID+":/tmp/big2", one)
			if got, err := os.ReadFile(one); err != nil || !bytes.Equal(got, big.Bytes()) {
				t.Errorf("the file is another one: %v", err)
			}
		})
		t.Run("dots lead no further than the root", func(t *testing.T) {
			dst := filepath.Join(t.TempDir(), "passwd")
			cp(t, sb.ID+":/tmp/../../../../../../etc/passwd", dst)
			if got, _ := os.ReadFile(dst); !strings.Contains(string(got), "user:x:1000") {
				t.Errorf("it is another passwd: %q", got)
			}
			res := l.cli(t, "cp", sb.ID+":"+strings.Repeat("../", 20)+strings.TrimPrefix(secret, "/"), filepath.Join(t.TempDir(), "x"))
			if res.code == 0 || bytes.Contains(res.stderr, []byte("the host's")) {
				t.Errorf("a file of the host's was read: exit %d, %s", res.code, res.stderr)
			}
			in := filepath.Join(t.TempDir(), "in")
			must(t, os.WriteFile(in, []byte("x"), 0o644))
			cp(t, in, sb.ID+":/../../tmp/escaped")
			l.sh(t, sb.ID, "test -f /tmp/escaped")
			mustNotExist(t, "/tmp/escaped")
		})
		t.Run("symlinks lead no further than the root", func(t *testing.T) {
			l.sh(t, sb.ID, "ln -s "+outside+" /tmp/out; ln -s "+secret+" /tmp/outfile; ln -s /etc /tmp/etc; ln -s /proc/1/root /tmp/rootlink")
			for _, p := range []string{"/tmp/out/secret", "/tmp/outfile"} {
				dst := filepath.Join(t.TempDir(), "x")
				if res := l.cli(t, "cp", sb.ID+":"+p, dst); res.code == 0 {
					t.Errorf("%s was read: %q", p, contents(dst))
				}
			}
			dst := filepath.Join(t.TempDir(), "x")
			cp(t, sb.ID+":/tmp/rootlink/etc/passwd", dst)
			if !strings.Contains(contents(dst), "user:x:1000") {
				t.Errorf("/proc/1/root of the sandbox is not the sandbox's: %q", contents(dst))
			}
			in := filepath.Join(t.TempDir(), "in")
			must(t, os.WriteFile(in, []byte("overwritten"), 0o644))
			l.cli(t, "cp", in, sb.ID+":/tmp/out/secret") // may make the directory inside
			l.cli(t, "cp", in, sb.ID+":/tmp/outfile")
			if got := contents(secret); got != "the host's" {
				t.Errorf("the host's file holds %q", got)
			}
			cp(t, in, sb.ID+":/tmp/etc/through")
			if out := l.sh(t, sb.ID, "cat /etc/through"); out != "overwritten" {
				t.Errorf("through a symlink inside came %q", out)
			}
		})
		t.Run("archive that goes in", func(t *testing.T) {
			for name, make := range map[string]func(*layer){
				"dots":             func(a *layer) { a.file("../../../../up", "x", 0o644) },
				"dots within":      func(a *layer) { a.file("a/../../../up", "x", 0o644) },
				"symlink out":      func(a *layer) { a.symlink("s", "/"); a.file("s/up", "x", 0o644) },
				"relative symlink": func(a *layer) { a.symlink("s", "../../.."); a.file("s/up", "x", 0o644) },
				"hard link":        func(a *layer) { a.hardlink("h", "../../../etc/passwd"); a.file("h", "broken", 0o644) },
				"absolute hard link": func(a *layer) {
					a.hardlink("h", "/etc/passwd")
					a.file("h", "broken", 0o644)
				},
			} {
				var a layer
				make(&a)
				res := l.cliIn(t, bytes.NewReader(a.bytes()), "cp", "-u", "root", "-", sb.ID+":/tmp/into/deep/here/")
				l.sh(t, sb.ID, "test ! -e /up || { echo 'it came out of the directory' >&2; exit 1; }")
				if out := l.sh(t, sb.ID, "cat /etc/passwd"); !strings.Contains(out, "user:x:1000") {
					t.Fatalf("%s: /etc/passwd of the sandbox is %q", name, out)
				}
				mustNotExist(t, "/up")
				if res.code == 0 && strings.Contains(name, "dots") {
					t.Errorf("%s: it was taken without a word", name)
				}
			}
			var a layer
			a.entry(tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666}, nil)
			a.file("plain", "x", 0o644)
			l.cliIn(t, bytes.NewReader(a.bytes()), "cp", "-u", "root", "-", sb.ID+":/tmp/dev/")
			if out := l.sh(t, sb.ID, "test -b /tmp/dev/sda && cat /tmp/dev/sda | head -c 1 | wc -c || echo none"); out != "none" {
				t.Errorf("a device node of the host's disk is in the sandbox and gives %q", out)
			}
		})
		t.Run("refusals", func(t *testing.T) {
			for _, c := range []struct {
				src, dst string
				phrase   string
			}{
				{sb.ID + ":/no/such", t.TempDir(), "no such file"},
				{"/no/such/here", sb.ID + ":/tmp/", "no such file"},
				{t.TempDir(), sb.ID + ":/etc/passwd", "is a file"},
				{"sbx00000000000000000:/etc/passwd", t.TempDir(), "sbx00000000000000000"},
			} {
				if res := l.cli(t, "cp", c.src, c.dst); res.code == 0 || !strings.Contains(string(res.stderr), c.phrase) {
					t.Errorf("cp %s %s: exit %d, %q", c.src, c.dst, res.code, res.stderr)
				}
			}
			for name, path := range map[string]string{"NUL": "/tmp/a%00b", "too long": "/tmp/" + strings.Repeat("a", 5000)} {
				a := l.raw(t, "PUT", "/v1/sandboxes/"+sb.ID+"/files?path="+path, http.Header{}, strings.NewReader("x"))
				if a.status < 400 || a.status >= 500 {
					t.Errorf("a file's name with %s: %d %s", name, a.status, a.body)
				}
			}
			a := l.raw(t, "GET", "/v1/sandboxes/"+sb.ID+"/files?path=/tmp", http.Header{}, nil)
			a.wantError(t, sandbox.CodeInvalid, "directory")
			l.raw(t, "PUT", "/v1/sandboxes/"+sb.ID+"/files?path=/tmp/m&mode=99", http.Header{}, strings.NewReader("x")).wantError(t, sandbox.CodeInvalid, "octal")
			l.raw(t, "PUT", "/v1/sandboxes/"+sb.ID+"/tar?path=/tmp/t", http.Header{}, strings.NewReader("this is no archive, "+strings.Repeat("x", 2000))).wantError(t, sandbox.CodeInvalid, "tar")
		})
		t.Run("archive beyond its bounds", func(t *testing.T) {
			var a layer
			for i := range 50 {
				a.file("f"+string(rune('a'+i%26))+strings.Repeat("x", i), strings.Repeat("z", 10_000), 0o644)
			}
			data := a.bytes()
			l.raw(t, "PUT", "/v1/sandboxes/"+sb.ID+"/tar?path=/tmp/b1&max_bytes=100000", http.Header{}, bytes.NewReader(data)).wantError(t, sandbox.CodeTooLarge)
			l.raw(t, "PUT", "/v1/sandboxes/"+sb.ID+"/tar?path=/tmp/b2&max_entries=10", http.Header{}, bytes.NewReader(data)).wantError(t, sandbox.CodeTooLarge)
		})
		t.Run("file that is cut off", func(t *testing.T) {
			l.sh(t, sb.ID, "echo before > /tmp/whole")
			c, err := net.Dial("unix", l.socket)
			if err != nil {
				t.Fatal(err)
			}
			io.WriteString(c, "PUT /v1/sandboxes/"+sb.ID+"/files?path=/tmp/whole HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nonly this")
			c.Close()
			l.sh(t, sb.ID, "sleep 0.3")
			if out := l.sh(t, sb.ID, "cat /tmp/whole; ls -a /tmp | grep upload || true"); out != "before" {
				t.Errorf("after half an upload there is %q", out)
			}
		})
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mustNotExist(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); err == nil {
		t.Fatalf("%s is on the host", path)
	}
}

func contents(path string) string {
	b, _ := os.ReadFile(path)
	return string(b)
}

// sameTree checks that two directories hold the same.
func sameTree(t *testing.T, want, got string) {
	t.Helper()
	a, b := listing(t, want), listing(t, got)
	if !slices.Equal(a, b) {
		t.Errorf("the copy has\n%q\nnot\n%q", b, a)
	}
}

func listing(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		st, err := d.Info()
		if err != nil {
			return err
		}
		what := ""
		switch {
		case st.Mode().IsRegular():
			what = contents(path)
			if len(what) > 1000 {
				what = what[:500] + what[len(what)-500:]
			}
		case st.Mode()&fs.ModeSymlink != 0:
			what, _ = os.Readlink(path)
		}
		mode := st.Mode()
		if st.IsDir() {
			mode = fs.ModeDir
		}
		all = append(all, rel+" "+mode.String()+" "+what)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// liar is a daemon whose sandbox sends any archive that a test wants: what an
// agent that was taken over could send.
type liar struct {
	filesystemconnect.UnimplementedFilesystemHandler
	archive []byte
}

func (*liar) Stat(_ context.Context, r *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	return connect.NewResponse(&filesystem.StatResponse{Entry: &filesystem.EntryInfo{
		Name: "d", Path: r.Msg.GetPath(), Type: filesystem.FileType_FILE_TYPE_DIRECTORY, Mode: 0o755,
	}}), nil
}

// TestHostileArchiveOut has the command line copy archives out of a sandbox
// that lies.
func TestHostileArchiveOut(t *testing.T) {
	t.Parallel()
	bin := warrenBin(t)
	for name, build := range map[string]func(a *layer, outside string){
		"dots":             func(a *layer, _ string) { a.file("d/../../evil", "x", 0o644) },
		"leading dots":     func(a *layer, _ string) { a.file("../evil", "x", 0o644) },
		"absolute":         func(a *layer, outside string) { a.file(outside+"/evil", "x", 0o644) },
		"dots alone":       func(a *layer, _ string) { a.dir("..", 0o777) },
		"absolute symlink": func(a *layer, outside string) { a.symlink("d/s", outside); a.file("d/s/evil", "x", 0o644) },
		"relative symlink": func(a *layer, _ string) { a.symlink("d/s", "../../outside"); a.file("d/s/evil", "x", 0o644) },
		"symlink in two steps": func(a *layer, _ string) {
			a.symlink("d/a", "..")
			a.symlink("d/b", "a/..")
			a.file("d/b/outside/evil", "x", 0o644)
		},
		"symlink as the root": func(a *layer, outside string) { a.symlink("d", outside); a.file("d/evil", "x", 0o644) },
		"symlink over a file": func(a *layer, outside string) { a.symlink("d/f", outside+"/keep"); a.file("d/f", "changed", 0o644) },
		"hard link out":       func(a *layer, _ string) { a.hardlink("d/h", "d/../../outside/keep"); a.file("d/h", "changed", 0o644) },
		"absolute hard link":  func(a *layer, outside string) { a.hardlink("d/h", outside+"/keep"); a.file("d/h", "changed", 0o644) },
		"hard link by a symlink": func(a *layer, outside string) {
			a.symlink("d/s", outside)
			a.hardlink("d/h", "d/s/keep")
			a.file("d/h", "changed", 0o644)
		},
		"directory over symlink": func(a *layer, outside string) {
			a.symlink("d/s", outside)
			a.dir("d/s", 0o777)
			a.file("d/s/evil", "x", 0o644)
		},
		"mode through a symlink": func(a *layer, outside string) {
			a.dir("d/s", 0o700)
			a.symlink("d/t", outside+"/keep")
			a.dir("d/s", 0o777)
		},
		"set-user-id": func(a *layer, _ string) { a.file("d/su", "x", 0o4755) },
		"character device": func(a *layer, _ string) {
			a.entry(tar.Header{Name: "d/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}, nil)
		},
		"block device": func(a *layer, _ string) {
			a.entry(tar.Header{Name: "d/sda", Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666}, nil)
		},
		"pipe": func(a *layer, _ string) {
			a.entry(tar.Header{Name: "d/fifo", Typeflag: tar.TypeFifo, Mode: 0o666}, nil)
		},
		"name with escapes": func(a *layer, _ string) { a.file("../\x1b]0;owned\x07evil", "x", 0o644) },
		"ends in the middle": func(a *layer, _ string) {
			a.file("d/big", strings.Repeat("x", 100_000), 0o644)
			a.w.Flush()
			a.b.Truncate(50_000)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "wrn-")
			must(t, err)
			defer os.RemoveAll(dir)
			outside, into := filepath.Join(dir, "outside"), filepath.Join(dir, "into")
			must(t, os.Mkdir(outside, 0o700))
			must(t, os.WriteFile(filepath.Join(outside, "keep"), []byte("kept"), 0o600))
			var a layer
			a.dir("d/", 0o755)
			build(&a, outside)
			li := &liar{}
			if name == "ends in the middle" {
				li.archive = a.b.Bytes()
			} else {
				li.archive = a.bytes()
			}
			host := serveLiar(t, dir, li)
			res := runCLI(t, bin, host, nil, "cp", "sbx00000000000000000:/d", into)
			if got := listing(t, outside); !slices.Equal(got, []string{"keep -rw------- kept"}) {
				t.Errorf("outside there is now %q\n%s", got, res.stderr)
			}
			if st, err := os.Stat(outside); err != nil || st.Mode().Perm() != 0o700 {
				t.Errorf("the directory outside changed: %v, %v", st.Mode(), err)
			}
			for _, top := range []string{"evil", "owned"} {
				mustNotExist(t, filepath.Join(dir, top))
			}
			filepath.WalkDir(into, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.Type()&(fs.ModeDevice|fs.ModeNamedPipe|fs.ModeSocket) != 0 {
					t.Errorf("%s is made, a %v", path, d.Type())
				}
				if st, serr := os.Lstat(path); serr == nil && st.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
					t.Errorf("%s has a set-id bit", path)
				}
				return nil
			})
			if strings.Contains(name, "dots") || name == "absolute" || name == "ends in the middle" {
				if res.code == 0 {
					t.Errorf("it was taken without a word: %q", res.stderr)
				}
			}
			if bytes.ContainsRune(res.stderr, '\x1b') {
				t.Errorf("an escape sequence came through to the terminal: %q", res.stderr)
			}
		})
	}
}

// serveLiar serves li as a daemon would, and gives its host.
func serveLiar(t *testing.T, dir string, li *liar) string {
	t.Helper()
	mux := http.NewServeMux()
	const base = "/v1/sandboxes/sbx00000000000000000"
	prefix, h := filesystemconnect.NewFilesystemHandler(li)
	mux.Handle(base+"/agent"+prefix, http.StripPrefix(base+"/agent", h))
	mux.HandleFunc("GET "+base+"/tar", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/x-tar")
		w.Write(li.archive)
	})
	socket := filepath.Join(dir, "s")
	ln, err := net.Listen("unix", socket)
	must(t, err)
	s := &http.Server{Handler: mux}
	go s.Serve(ln)
	t.Cleanup(func() { s.Close() })
	return "unix://" + socket
}
