package reseed

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/testenv"
)

func TestInstall(t *testing.T) {
	dir := t.TempDir()
	lib, etc := filepath.Join(dir, "usr/lib/python3.11"), filepath.Join(dir, "etc/python3.11")
	for _, d := range []string{lib, etc, filepath.Join(dir, "usr/lib/python3.12")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{lib + "/os.py", dir + "/usr/lib/python3.12/os.py"} {
		if err := os.WriteFile(f, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(etc+"/sitecustomize.py", []byte("x = 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// As Debian has it: a link that leads out of the root filesystem.
	if err := os.Symlink("/etc/python3.11/sitecustomize.py", lib+"/sitecustomize.py"); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := Install(root); err != nil {
		t.Fatal(err)
	}
	for f, want := range map[string]string{
		etc + "/sitecustomize.py":                    "x = 1\n" + start,
		dir + "/usr/lib/python3.12/sitecustomize.py": start,
		lib + "/" + PythonModule:                     string(Python),
		dir + NodePath:                               string(Node),
	} {
		if got, err := os.ReadFile(f); err != nil || string(got) != want {
			t.Errorf("%s: %v: %.80q", f, err, got)
		}
	}
}

// A program's own handler is left alone, and SIGURG seeds anew without one.
func TestPython(t *testing.T) {
	python := testenv.Command(t, "python3", "install python3")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, PythonModule), Python, 0o644); err != nil {
		t.Fatal(err)
	}
	run := func(script string, env ...string) string {
		cmd := exec.Command(python, "-c", script)
		cmd.Env = append(os.Environ(), append(env, "PYTHONPATH="+dir)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return strings.TrimSpace(string(out))
	}
	const draw = `
import os, random, signal, warren_reseed
random.seed(1)
os.kill(os.getpid(), signal.SIGURG)
print(random.random())`
	if a, b := run(draw), run(draw); a == b {
		t.Errorf("SIGURG did not seed: %s", a)
	}
	if a, b := run(draw, "WARREN_RESEED=0"), run(draw, "WARREN_RESEED=0"); a != b {
		t.Errorf("it seeded though it was turned off: %s, %s", a, b)
	}
	if got := run("import signal; signal.signal(signal.SIGURG, lambda *a: print('own'))\nimport warren_reseed, os; os.kill(os.getpid(), signal.SIGURG)"); got != "own" {
		t.Errorf("the program's own handler: %q", got)
	}
	if got := run("import threading\nt = threading.Thread(target=__import__, args=('warren_reseed',)); t.start(); t.join(); print('ok')"); got != "ok" {
		t.Errorf("in a thread: %q", got)
	}
}

// What replaces Node's functions answers and refuses as they do.
func TestNode(t *testing.T) {
	node := testenv.Command(t, "node", "install nodejs")
	file := filepath.Join(t.TempDir(), "reseed.js")
	if err := os.WriteFile(file, Node, 0o644); err != nil {
		t.Fatal(err)
	}
	const script = `
const c = require('crypto'), { promisify } = require('util');
const say = (f) => { try { const v = f(); console.log(v); } catch (e) { console.log(e.code || e.name); } };
say(() => c.randomBytes(5).length); say(() => c.randomBytes(0).length); say(() => c.randomBytes(-1)); say(() => c.randomBytes('x'));
say(() => c.randomBytes(5, 1));
say(() => { const b = c.randomFillSync(Buffer.alloc(8), 4); return b.length + ' ' + b.subarray(0, 4).every((x) => x === 0); });
say(() => c.randomFillSync(new Float64Array(4), 1, 2)[0]); say(() => c.randomFillSync(Buffer.alloc(4), 5)); say(() => c.randomFillSync(Buffer.alloc(4), 0, 5)); say(() => c.randomFillSync(4));
say(() => c.randomFillSync(new ArrayBuffer(4)).byteLength);
say(() => c.randomInt(1)); say(() => c.randomInt(3, 4)); say(() => c.randomInt(4, 4)); say(() => c.randomInt('a')); say(() => c.randomInt(0, 2 ** 49));
say(() => /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/.test(c.randomUUID())); say(() => c.randomUUID(null)); say(() => c.randomUUID({ disableEntropyCache: true }).length);
say(() => c.webcrypto.getRandomValues(new Uint8Array(3)).length); say(() => crypto.randomUUID().length); say(() => c.webcrypto.getRandomValues(new Float32Array(1)));
(async () => {
  console.log((await promisify(c.randomBytes)(3)).length, (await promisify(c.randomFill)(Buffer.alloc(3))).length, await promisify(c.randomInt)(1));
  console.log((await import('crypto')).randomBytes === c.randomBytes);
  process.kill(process.pid, 'SIGURG');
  await new Promise((r) => setTimeout(r, 50));
  const v = Array.from({ length: 1000 }, Math.random);
  console.log(v.every((x) => x >= 0 && x < 1), new Set(v).size, c.randomBytes(2).length);
})();`
	run := func(args ...string) string {
		out, err := exec.Command(node, append(args, "-e", script)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	plain, patched := run(), run("--require="+file)
	if plain != patched {
		t.Errorf("with the file:\n%s\nwithout:\n%s", patched, plain)
	}
	if !strings.Contains(plain, "true 1000 2") {
		t.Errorf("the script itself: %s", plain)
	}
}
