package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// importImage makes a template of layers by the command line.
func (l *lab) importImage(t *testing.T, name string, layers ...[]byte) cliResult {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	must(t, writeImage(path, v1.Config{Env: []string{"PATH=/bin"}}, layers...))
	return l.cli(t, "template", "import", "--name", name, "docker-archive:"+path)
}

// build builds the context, a tar archive, by the API.
func (l *lab) build(t *testing.T, name string, context []byte) (wire.Template, error) {
	t.Helper()
	return l.cl.BuildTemplate(t.Context(), wire.BuildTemplate{Name: name, Dockerfile: &wire.BuildDockerfile{}}, bytes.NewReader(context), nil)
}

// hostile are archives that go for files outside of where they are unpacked.
// Each may be refused or be tamed; nothing may come out.
var hostile = map[string]func(a *layer, outside string){
	"dots":                func(a *layer, _ string) { a.file("../../../../../../../../tmp/wrn-evil", "x", 0o644) },
	"dots within":         func(a *layer, _ string) { a.file("a/../../../../../../../../../tmp/wrn-evil", "x", 0o644) },
	"absolute name":       func(a *layer, outside string) { a.file(outside+"/evil", "x", 0o644) },
	"absolute symlink":    func(a *layer, outside string) { a.symlink("s", outside); a.file("s/evil", "x", 0o644) },
	"symlink over a file": func(a *layer, outside string) { a.symlink("f", outside+"/keep"); a.file("f", "changed", 0o644) },
	"symlink in two steps": func(a *layer, outside string) {
		a.symlink("r", "/")
		a.symlink("s", "r"+outside)
		a.file("s/evil", "x", 0o644)
	},
	"relative symlink": func(a *layer, _ string) {
		a.symlink("s", "../../../../../../../../../../tmp")
		a.file("s/wrn-evil", "x", 0o644)
	},
	"hard link out": func(a *layer, outside string) {
		a.hardlink("h", "../../../../../../../../../.."+outside+"/keep")
		a.file("h", "changed", 0o644)
	},
	"absolute hard link": func(a *layer, outside string) { a.hardlink("h", outside+"/keep") },
	"hard link by a symlink": func(a *layer, outside string) {
		a.symlink("s", outside)
		a.hardlink("h", "s/keep")
		a.file("h", "changed", 0o644)
	},
	"whiteout of a parent":  func(a *layer, _ string) { a.file(".wh...", "", 0o644) },
	"whiteout by a symlink": func(a *layer, outside string) { a.symlink("s", outside); a.file("s/.wh.keep", "", 0o644) },
	"opaque by a symlink":   func(a *layer, outside string) { a.symlink("s", outside); a.file("s/.wh..wh..opq", "", 0o644) },
	"block device": func(a *layer, _ string) {
		a.entry(tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666}, nil)
	},
	"character device": func(a *layer, _ string) {
		a.entry(tar.Header{Name: "mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1, Mode: 0o666}, nil)
	},
	"whiteout as a device": func(a *layer, _ string) {
		a.entry(tar.Header{Name: "bin", Typeflag: tar.TypeChar, Mode: 0o666}, nil)
	},
	"overlay's attribute": func(a *layer, _ string) {
		a.entry(tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc"}}, nil)
	},
	"mode through a symlink": func(a *layer, outside string) {
		a.symlink("s", outside)
		a.dir("s", 0o777)
	},
}

// outsideDir makes a directory of the host's that hostile archives go for, and
// a check that it is as it was.
func outsideDir(t *testing.T) (string, func(t *testing.T)) {
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "keep"), []byte("kept"), 0o600))
	return dir, func(t *testing.T) {
		t.Helper()
		if got := listing(t, dir); !slices.Equal(got, []string{"keep -rw------- kept"}) {
			t.Errorf("the directory of the host's now has %q", got)
		}
		if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("the directory of the host's now is %v, %v", st.Mode(), err)
		}
		for _, p := range []string{"/tmp/wrn-evil", "/wrn-evil"} {
			mustNotExist(t, p)
		}
	}
}

// TestHostileImages imports layers that go for the host's files, and runs what
// could be imported.
func TestHostileImages(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	outside, untouched := outsideDir(t)
	base := inTiny(t)
	for _, name := range slices.Sorted(maps.Keys(hostile)) {
		t.Run(name, func(t *testing.T) {
			var a layer
			hostile[name](&a, outside)
			res := l.importImage(t, "hostile", base, a.bytes())
			untouched(t)
			if strings.Contains(name, "dots") || strings.Contains(name, "attribute") || name == "hard link out" {
				if res.code == 0 {
					t.Errorf("it was taken without a word")
				}
			}
			if res.code != 0 {
				if !strings.Contains(string(res.stderr), "archive entry") {
					t.Errorf("the refusal does not name the entry: %s", res.stderr)
				}
				return
			}
			sb := l.create(t, wire.CreateSandbox{Template: "hostile", Runtime: "container"})
			if out := l.sh(t, sb.ID, "for f in /disk /mem; do test -e $f && echo $f; done; cat "+outside+"/keep 2>/dev/null; true"); strings.Contains(out, "/disk") || strings.Contains(out, "/mem") || strings.Contains(out, "kept") {
				t.Errorf("inside there is %q", out)
			}
			untouched(t)
			must(t, l.cl.Kill(t.Context(), sb.ID))
		})
	}
	untouched(t)
	l.each(t, func(t *testing.T, runtime string) {
		// A root filesystem whose directories are symlinks to where the runtime
		// mounts things and the agent writes.
		for name, make := range map[string]func(a *layer){
			"etc is the root":  func(a *layer) { a.symlink("etc", "/") },
			"etc is outside":   func(a *layer) { a.symlink("etc", outside) },
			"dev is outside":   func(a *layer) { a.symlink("dev", outside) },
			"proc is outside":  func(a *layer) { a.symlink("proc", outside) },
			"sys is outside":   func(a *layer) { a.symlink("sys", outside) },
			"agent is outside": func(a *layer) { a.symlink(".warren", outside) },
			"hosts is outside": func(a *layer) {
				a.symlink("etc/hosts", outside+"/keep")
				a.symlink("etc/resolv.conf", outside+"/keep")
				a.symlink("etc/hostname", outside+"/keep")
			},
			"tmp is outside": func(a *layer) { a.symlink("tmp", outside) },
		} {
			t.Run(name, func(t *testing.T) {
				var a layer
				for _, d := range []string{"etc", "dev", "proc", "sys", "tmp"} {
					if !strings.HasPrefix(name, d+" ") {
						a.dir(d+"/", 0o777)
					}
				}
				make(&a)
				a.dir("bin/", 0o755)
				for _, p := range []string{"busybox", "inside"} {
					a.file("bin/"+p, string(fromTiny(t, "bin/"+p)), 0o755)
				}
				a.symlink("bin/sh", "busybox")
				tmpl := "odd-" + runtime
				if res := l.importImage(t, tmpl, a.bytes()); res.code != 0 {
					untouched(t)
					return
				}
				sb, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: tmpl, Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}})
				untouched(t)
				if err != nil {
					if sandbox.CodeOf(err) == sandbox.CodeInternal {
						t.Errorf("the template is at fault, and the create says %v (%s)", err, sandbox.CodeOf(err))
					}
					return
				}
				l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"/bin/busybox", "sh", "-c", "echo x > /etc/hosts; echo y > " + outside + "/evil"}}, User: "0"})
				untouched(t)
				must(t, l.cl.Kill(t.Context(), sb.ID))
				untouched(t)
			})
		}
	})
}

// fromTiny reads a file out of the shared image's only layer.
func fromTiny(t *testing.T, name string) []byte {
	t.Helper()
	tr := tar.NewReader(bytes.NewReader(inTiny(t)))
	for {
		h, err := tr.Next()
		must(t, err)
		if h.Name == name {
			data, err := io.ReadAll(tr)
			must(t, err)
			return data
		}
	}
}

// inTiny gives the shared image's only layer, uncompressed.
func inTiny(t *testing.T) []byte {
	t.Helper()
	f, err := os.Open(image(t))
	must(t, err)
	defer f.Close()
	tr := tar.NewReader(f)
	for {
		h, err := tr.Next()
		must(t, err)
		if !strings.HasSuffix(h.Name, ".tar.gz") {
			continue
		}
		z, err := gzip.NewReader(tr)
		must(t, err)
		data, err := io.ReadAll(z)
		must(t, err)
		return data
	}
}

// TestDockerfiles builds Dockerfiles that are wrong or hostile.
func TestDockerfiles(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	outside, untouched := outsideDir(t)
	for _, c := range []struct {
		name, dockerfile string
		code             sandbox.Code
		phrases          []string
	}{
		{"unknown instruction", "FROM tiny\n\nRUNN echo\n", sandbox.CodeInvalid, []string{"line 3", "RUNN"}},
		{"bad JSON and options", "FROM tiny\nCOPY --wrong=1 a b\n", sandbox.CodeInvalid, []string{"line 2", "wrong"}},
		{"no FROM", "RUN echo\n", sandbox.CodeInvalid, []string{"line 1", "FROM"}},
		{"empty", "", sandbox.CodeInvalid, []string{"Dockerfile"}},
		{"stage of itself", "FROM tiny\nCOPY --from=0 /bin /b\n", sandbox.CodeInvalid, []string{"line 2"}},
		{"missing source", "FROM tiny\nCOPY nothing /x\n", sandbox.CodeInvalid, []string{"line 2", "nothing"}},
		{"copy from above", "FROM tiny\nCOPY ../../etc/passwd /x\n", sandbox.CodeInvalid, []string{"line 2"}},
		{"copy an absolute path", "FROM tiny\nCOPY " + "/etc/shadow /x\n", sandbox.CodeInvalid, []string{"line 2", "shadow"}},
		{"copy through a symlink", "FROM tiny\nCOPY out/keep /x\n", sandbox.CodeInvalid, []string{"line 2"}},
		{"failing step", "FROM tiny\nRUN echo this is why >&2; exit 7\n", sandbox.CodeBuildFailed, []string{"line 2", "7"}},
		{"step without a shell", "FROM scratch\nCOPY plain /plain\nRUN echo\n", sandbox.CodeBadTemplate, []string{"line 3", "sh"}},
		{"unknown user", "FROM tiny\nUSER ghost\nRUN true\n", "", []string{"ghost"}},
		{"unpack dots", "FROM tiny\nADD dots.tar /x/\n", sandbox.CodeInvalid, []string{"line 2", ".."}},
		{"binary", "\x00\x01\x02\xff\xfe", sandbox.CodeInvalid, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var dots, ctx layer
			dots.file("../../../../../tmp/wrn-evil", "x", 0o644)
			ctx.file("Dockerfile", c.dockerfile, 0o644)
			ctx.file("plain", "p", 0o644)
			ctx.symlink("out", outside)
			ctx.file("dots.tar", string(dots.bytes()), 0o644)
			_, err := l.build(t, "bad", ctx.bytes())
			code := c.code
			if code == "" {
				code = sandbox.CodeOf(err)
			}
			wantError(t, err, code, c.phrases...)
			untouched(t)
		})
	}
	t.Run("by the command line", func(t *testing.T) {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM tiny\nRUN true\nNONSENSE\n"), 0o644))
		res := l.cli(t, "template", "build", "--name", "bad", dir)
		if res.code != 1 || !strings.Contains(string(res.stderr), "line 3") || !strings.Contains(string(res.stderr), "NONSENSE") {
			t.Errorf("exit %d: %s", res.code, res.stderr)
		}
	})
	for _, name := range slices.Sorted(maps.Keys(hostile)) {
		t.Run("ADD "+name, func(t *testing.T) {
			var evil, ctx layer
			hostile[name](&evil, outside)
			ctx.file("Dockerfile", "FROM tiny\nADD evil.tar /x/\n", 0o644)
			ctx.file("evil.tar", string(evil.bytes()), 0o644)
			l.build(t, "bad", ctx.bytes())
			untouched(t)
		})
		t.Run("context "+name, func(t *testing.T) {
			var ctx layer
			hostile[name](&ctx, outside)
			ctx.file("Dockerfile", "FROM tiny\nCOPY . /x/\n", 0o644)
			l.build(t, "bad", ctx.bytes())
			untouched(t)
		})
	}
	t.Run("base with etc as a symlink", func(t *testing.T) {
		var a, ctx layer
		a.symlink("etc", "/")
		a.symlink("work", outside)
		a.dir("bin/", 0o755)
		a.file("bin/busybox", string(fromTiny(t, "bin/busybox")), 0o755)
		a.symlink("bin/sh", "busybox")
		if res := l.importImage(t, "linked", a.bytes()); res.code != 0 {
			t.Fatalf("import: %s", res.stderr)
		}
		ctx.file("Dockerfile", "FROM linked\nWORKDIR /work\nCOPY plain /etc/evil\nCOPY plain .\nRUN /bin/busybox cat /evil /work/plain\n", 0o644)
		ctx.file("plain", "p", 0o644)
		if _, err := l.build(t, "good", ctx.bytes()); err != nil && sandbox.CodeOf(err) == sandbox.CodeInternal {
			t.Errorf("build: %v", err)
		}
		untouched(t)
		mustNotExist(t, "/evil")
	})
	t.Run("what is right", func(t *testing.T) {
		var ctx, packed layer
		packed.file("in/it", "unpacked", 0o644)
		ctx.file("Dockerfile", "ARG FROM=tiny\nFROM ${FROM} AS one\nRUN echo made > /made\nFROM tiny\nENV A=b\nWORKDIR /w\nCOPY --from=one /made .\nADD packed.tar /w/\nUSER user\nRUN cat made in/it && id -u\n", 0o644)
		ctx.file("packed.tar", string(packed.bytes()), 0o644)
		if _, err := l.build(t, "right", ctx.bytes()); err != nil {
			t.Fatal(err)
		}
		l.each(t, func(t *testing.T, runtime string) {
			sb := l.create(t, wire.CreateSandbox{Template: "right", Runtime: runtime})
			if out := l.sh(t, sb.ID, "echo $A $(pwd) $(id -u) $(cat made in/it)"); out != "b /w 1000 made unpacked" {
				t.Errorf("it gives %q", out)
			}
		})
	})
	if l.verify(t); t.Failed() {
		return
	}
}

// TestBombs imports archives that grow when they are unpacked: beyond a limit
// each is refused, and the disk does not fill.
func TestBombs(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	size := func() (n int64) {
		filepath.WalkDir(l.state, func(_ string, d os.DirEntry, err error) error {
			if err == nil {
				if st, err := d.Info(); err == nil && st.Mode().IsRegular() {
					n += st.Size()
				}
			}
			return nil
		})
		return n
	}
	before := size()
	zeros := func(w *tar.Writer, name string, n int64) {
		must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: n}))
		_, err := io.CopyN(w, zeroes{}, n)
		must(t, err)
	}
	t.Run("ratio", func(t *testing.T) {
		// 400 MiB of zeros gzip to 400 KiB.
		var b bytes.Buffer
		z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression)
		w := tar.NewWriter(z)
		zeros(w, "zeros", 400<<20)
		must(t, w.Close())
		must(t, z.Close())
		path := filepath.Join(t.TempDir(), "bomb.tar")
		must(t, writeGzipImage(path, b.Bytes()))
		res := l.cli(t, "template", "import", "--json", "--name", "bomb", "docker-archive:"+path)
		if res.code != 1 || !strings.Contains(string(res.stderr), "200 times its size") {
			t.Errorf("the bomb went in: exit %d, %s", res.code, res.stderr)
		}
		var ctx layer
		ctx.file("Dockerfile", "FROM tiny\nADD bomb.tar.gz /x/\n", 0o644)
		ctx.file("bomb.tar.gz", b.String(), 0o644)
		_, err := l.build(t, "bomb", ctx.bytes())
		wantError(t, err, sandbox.CodeTooLarge, "line 2")
		_, err = l.cl.BuildTemplate(t.Context(), wire.BuildTemplate{Name: "bomb", Dockerfile: &wire.BuildDockerfile{Content: "FROM tiny\n"}}, bytes.NewReader(b.Bytes()), nil)
		wantError(t, err, sandbox.CodeTooLarge)
	})
	t.Run("said size", func(t *testing.T) {
		// A header that promises 100 TiB.
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		must(t, w.WriteHeader(&tar.Header{Name: "huge", Typeflag: tar.TypeReg, Mode: 0o644, Size: 100 << 40}))
		w.Write([]byte("x"))
		_, err := l.build(t, "bomb", b.Bytes())
		if code := sandbox.CodeOf(err); code != sandbox.CodeTooLarge && code != sandbox.CodeInvalid {
			t.Errorf("it gave %v (%s)", err, code)
		}
	})
	t.Run("depth", func(t *testing.T) {
		var a layer
		a.dir(strings.Repeat("d/", 1000), 0o755)
		_, err := l.build(t, "bomb", a.bytes())
		wantError(t, err, sandbox.CodeTooLarge, "deep")
	})
	if after := size(); after > before+(1<<20) {
		t.Errorf("refused archives left %d bytes", after-before)
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestNoShell runs a template that has one program and no shell.
func TestNoShell(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var a layer
	a.file("inside", string(fromTiny(t, "bin/inside")), 0o755)
	if res := l.importImage(t, "bare", a.bytes()); res.code != 0 {
		t.Fatalf("import: %s", res.stderr)
	}
	tmpl, err := l.cl.Template(t.Context(), "bare")
	if err != nil || tmpl.Config.HasShell {
		t.Errorf("the template is %+v, %v", tmpl.Config, err)
	}
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Template: "bare", Runtime: runtime})
		if out := l.run(t, sb.ID, "/inside", "args", "a"); out != `["a"]` {
			t.Errorf("the program says %q", out)
		}
		_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Shell: "echo hello"}})
		wantError(t, err, sandbox.CodeOf(err), "/bin/sh")
		if code := sandbox.CodeOf(err); code == sandbox.CodeInternal || code == sandbox.CodeUnavailable {
			t.Errorf("a command line without a shell gave %v (%s)", err, code)
		}
		res := l.cli(t, "shell", sb.ID)
		if res.code != 127 || !strings.Contains(string(res.stderr), "/bin/sh") {
			t.Errorf("warren shell: exit %d, %s", res.code, res.stderr)
		}
		// Files work without a shell, too.
		if res := l.cliIn(t, strings.NewReader("data"), "cp", "-", sb.ID+":/file"); res.code != 0 {
			t.Errorf("cp: %s", res.stderr)
		}
		if res := l.cli(t, "cp", sb.ID+":/file", "-"); string(res.stdout) != "data" {
			t.Errorf("cp back: %q %s", res.stdout, res.stderr)
		}
	})
	t.Run("start command", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "image.tar")
		must(t, writeImage(path, v1.Config{}, a.b.Bytes()))
		res := l.cli(t, "template", "import", "--name", "bare2", "--start-cmd", "echo", "docker-archive:"+path)
		if res.code != 0 {
			if !strings.Contains(string(res.stderr), "/bin/sh") {
				t.Errorf("import: %s", res.stderr)
			}
			return
		}
		_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "bare2", Runtime: "container"})
		wantError(t, err, sandbox.CodeBadTemplate, "/bin/sh")
	})
}
