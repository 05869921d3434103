package debian

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestHostSources(t *testing.T) {
	root := t.TempDir()
	write := func(name, body string) {
		p := filepath.Join(root, "etc/apt", name)
		os.MkdirAll(filepath.Dir(p), 0o755)
		os.WriteFile(p, []byte(body), 0o644)
	}
	write("sources.list", "# deb http://off bookworm main\ndeb [arch=amd64 signed-by=/k.gpg] http://one/debian bookworm main contrib # note\ndeb-src http://one/debian bookworm main\ndeb http://one/debian trixie main\n")
	write("sources.list.d/debian.sources", "Types: deb deb-src\nURIs: http://two/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/d.gpg\n\n# comment\nTypes: deb\nURIs: http://two/security\nSuites: bookworm-security\nComponents: main\nSigned-By:\n -----BEGIN PGP\n .\n xx\n\nTypes: deb\nEnabled: no\nURIs: http://off\nSuites: bookworm\nComponents: main\n")
	write("sources.list.d/vendor.list", "deb https://vendor/linux bookworm stable\ndeb https://vendor/db bookworm-pgdg main\n")
	write("sources.list.d/other.sources", "Types: deb\nURIs: https://node\nSuites: nodistro\nComponents: main\n")
	want := []string{
		"deb [arch=amd64 signed-by=/k.gpg] http://one/debian bookworm main contrib",
		"deb [signed-by=/usr/share/keyrings/d.gpg] http://two/debian bookworm main",
		"deb [signed-by=/usr/share/keyrings/d.gpg] http://two/debian bookworm-updates main",
		"deb http://two/security bookworm-security main",
	}
	if d := cmp.Diff(want, HostSources(root, "bookworm")); d != "" {
		t.Error(d)
	}
	if got := HostSources(root, "sid"); got != nil {
		t.Errorf("another suite has %v", got)
	}
	if got := HostSources(t.TempDir(), "bookworm"); got != nil {
		t.Errorf("no apt has %v", got)
	}
}

func TestParser(t *testing.T) {
	var got []Progress
	p := &parser{progress: func(e Progress) { got = append(got, e) }}
	p.read(strings.NewReader("I: running apt-get update...\n0 upgraded, 2 newly installed, 0 to remove\nGet:1 http://x\nUnpacking a (1) ...\nSetting up a (1) ...\nSetting up b (1) ...\n\xff\n" + strings.Repeat("z", 100000) + "\nE: Unable to locate package nope\n"))
	if got[0].Phase != Resolving || got[0].Message != "running apt-get update" {
		t.Errorf("%+v", got[0])
	}
	if e := got[5]; e.Phase != Configuring || e.Current != 2 || e.Total != 2 {
		t.Errorf("%+v", e)
	}
	for out, code := range map[string]sandbox.Code{
		"E: Unable to locate package nope":               sandbox.CodeInvalid,
		"cp: No space left on device":                    sandbox.CodeDiskFull,
		"E: Failed to fetch http://x  Could not resolve": sandbox.CodeUnavailable,
		"E: something else":                              sandbox.CodeBuildFailed,
	} {
		p := &parser{}
		p.read(strings.NewReader("I: x\n" + out + "\nE: mmdebstrap failed to run\n"))
		err := p.failure(os.ErrInvalid)
		if sandbox.CodeOf(err) != code {
			t.Errorf("%q is %s: %v", out, sandbox.CodeOf(err), err)
		}
	}
}

func FuzzSources(f *testing.F) {
	f.Add([]byte("deb [a] x bookworm main"))
	f.Add([]byte("Types: deb\nURIs: x\n y\nSuites: bookworm\nComponents: main"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, l := range append(oneLine(data, "bookworm"), deb822(data, "bookworm")...) {
			if strings.Contains(l, "\n") || !strings.HasPrefix(l, "deb") {
				t.Errorf("%q", l)
			}
		}
		(&parser{}).read(strings.NewReader(string(data)))
	})
}
