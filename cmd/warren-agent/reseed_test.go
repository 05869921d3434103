package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/agent/reseed"
	"github.com/warrenhq/warren/internal/agentclient"
)

// draw is a program that draws numbers before the capture, and each time that a
// file appears.
type draw struct{ name, program, script string }

var draws = []draw{
	{"python", "python3", `
import os, random, ssl, secrets, sys, time, uuid
random.random(); ssl.RAND_bytes(8)
print("up", flush=True)
while not os.path.exists("/tmp/go"): time.sleep(0.02)
print("random", random.getrandbits(64), flush=True)
print("ssl", ssl.RAND_bytes(8).hex(), flush=True)
print("secrets", secrets.token_hex(8), flush=True)
print("uuid", uuid.uuid4(), flush=True)
time.sleep(1000)
`},
	{"node", "node", `
const crypto = require('crypto'), fs = require('fs');
const key = () => crypto.generateKeyPairSync('ed25519').publicKey.export({ format: 'der', type: 'spki' }).toString('hex');
crypto.randomBytes(8); crypto.randomUUID(); crypto.randomInt(10); Math.random(); key();
console.log('up');
const t = setInterval(() => {
  if (!fs.existsSync('/tmp/go')) return;
  clearInterval(t);
  console.log('randomBytes', crypto.randomBytes(8).toString('hex'));
  console.log('randomUUID', crypto.randomUUID());
  console.log('randomInt', crypto.randomInt(2 ** 47));
  console.log('webcrypto', crypto.webcrypto.getRandomValues(new Uint32Array(2)).join());
  console.log('fill', crypto.randomFillSync(new Uint16Array(8), 2, 3).join());
  console.log('key', key());
  console.log('math', Math.random());
  setInterval(() => {}, 1000);
}, 20);
`},
}

// Two forks and their source draw different numbers, with the files of package
// reseed; and without them some are the same, or they were of no use.
func TestReseedInGVisor(t *testing.T) {
	for _, d := range draws {
		for _, with := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", d.name, with), func(t *testing.T) {
				r := newRig(t)
				source, c := r.start()
				needs(t, c, d.program)
				if err := c.Init(t.Context(), agentclient.InitRequest{AccessToken: "one", SandboxID: source.id}); err != nil {
					t.Fatal(err)
				}
				c = source.client("one")
				env := map[string]string{"WARREN_RESEED": "0"}
				if with {
					env = map[string]string{"NODE_OPTIONS": reseed.NodeOptions, "PYTHONPATH": "/tmp/python"}
				}
				for path, data := range map[string][]byte{reseed.NodePath: reseed.Node, "/tmp/python/" + reseed.PythonModule: reseed.Python} {
					sh(t, c, "mkdir -p "+filepath.Dir(path))
					if err := c.WriteFile(t.Context(), path, "root", bytes.NewReader(data), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				if gcc, err := exec.LookPath("gcc"); err == nil && with && d.program == "node" {
					out := filepath.Join(t.TempDir(), "reseed.node")
					cmd := exec.Command(gcc, "-shared", "-fPIC", "-x", "c", "-o", out, "-")
					cmd.Stdin = bytes.NewReader(reseed.Addon)
					if msg, err := cmd.CombinedOutput(); err != nil {
						t.Fatalf("%v: %s", err, msg)
					}
					data, err := os.ReadFile(out)
					if err == nil {
						err = c.WriteFile(t.Context(), reseed.AddonPath, "root", bytes.NewReader(data), 0o644)
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				flag, script := "-c", d.script
				if d.program == "node" {
					flag = "-e"
				} else if with {
					script = "import warren_reseed\n" + script // any Python, not Debian's alone
				}
				background(t, c, 1, agentclient.Command{Path: d.program, Args: []string{flag, script}, Env: env})
				if err := c.Freeze(t.Context()); err != nil {
					t.Fatal(err)
				}
				image, _ := source.checkpoint(true)
				if err := c.Thaw(t.Context()); err != nil {
					t.Fatal(err)
				}
				seen := map[string]bool{}
				same := map[string]bool{}
				for i := range 2 {
					b, old := r.restore(image, "one")
					token := fmt.Sprint("two", i)
					if err := old.Restored(t.Context(), b.restored(token)); err != nil {
						t.Fatal(err)
					}
					c := b.client(token)
					sh(t, c, "touch /tmp/go")
					l := follow(t, c, d.program)
					last := map[string]string{"python": "uuid", "node": "math"}[d.name]
					eventually(t, testLimit, func() error {
						if len(l.with(last)) == 0 {
							return fmt.Errorf("%q", l.all())
						}
						return nil
					})
					for _, s := range l.all() {
						if s != "up" && seen[s] {
							same[strings.Fields(s)[0]] = true
						}
						seen[s] = true
					}
				}
				t.Logf("the same in both forks: %v; drawn: %d", same, len(seen))
				switch {
				case with && len(same) > 0:
					t.Errorf("the same in both forks: %v", same)
				case !with && len(same) == 0:
					t.Error("nothing is the same without the files either: they are of no use, or the test is not")
				}
			})
		}
	}
}
