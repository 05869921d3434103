package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// The published packages that the tests drive.
const (
	jsSDK     = "e2b@2.51.0"
	pythonSDK = "e2b==2.63.0"
)

// published is a directory with a published package, made once.
type published struct {
	once sync.Once
	dir  string
	err  error
}

var publishedJS, publishedPython, jsCode, pythonCode published

// get makes the directory by an installer's command line, to which it is added.
// It skips t where the package cannot be had.
func (p *published) get(t *testing.T, tool string, install ...string) string {
	t.Helper()
	p.once.Do(func() {
		if _, p.err = exec.LookPath(tool); p.err != nil {
			return
		}
		if p.dir, p.err = os.MkdirTemp("", "warren-sdk-"); p.err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, install[0], append(install[1:], p.dir)...).CombinedOutput()
		if err != nil {
			p.err = fmt.Errorf("%s: %w: %s", strings.Join(install, " "), err, out)
		}
	})
	if p.err != nil {
		t.Skipf("the published SDK cannot be had: %v", p.err)
	}
	return p.dir
}

// javascript gives a directory in which programs find E2B's published package.
func javascript(t *testing.T) string {
	t.Helper()
	return publishedJS.get(t, "npm", "npm", "install", "--no-audit", "--no-fund", jsSDK, "--prefix")
}

// python gives a directory for PYTHONPATH with E2B's published package.
func python(t *testing.T) string {
	t.Helper()
	return publishedPython.get(t, "python3", "python3", "-m", "pip", "install", "--quiet", "--no-warn-script-location", pythonSDK, "--target")
}

// sdkEnv is all that a user of an SDK exports.
func (l *lab) sdkEnv(more ...string) []string {
	return append(append(os.Environ(), "E2B_API_KEY="+l.key, "E2B_API_URL="+l.tcp, "E2B_SANDBOX_URL="+l.tcp), more...)
}

// sdkTemplate makes the template "sdk": the SDKs run commands by bash, which
// the tests' image has not.
func (l *lab) sdkTemplate(t *testing.T) {
	t.Helper()
	l.importTiny(t)
	var ctx layer
	ctx.file("Dockerfile", "FROM tiny\nRUN printf '#!/bin/sh\\nexec /bin/sh \"$@\"\\n' > /bin/bash && chmod 755 /bin/bash\n", 0o644)
	if _, err := l.build(t, "sdk", ctx.bytes()); err != nil {
		t.Fatal(err)
	}
}

const jsLifeScript = `
import { Sandbox, SandboxNotFoundError, NotFoundError, AuthenticationError, CommandExitError, FileNotFoundError } from 'e2b'

const out = {}
const failure = p => p.then(() => 'nothing', e => e.constructor.name)
const all = async pages => { const items = []; while (pages.hasNext) items.push(...await pages.nextItems()); return items }
const sbx = await Sandbox.create('sdk', { timeoutMs: 120_000, metadata: { part: 'life & limb' }, envs: { A: 'of the sandbox' } })

out.env = (await sbx.commands.run('echo $A $B', { envs: { B: 'of the command' } })).stdout
out.exit = await sbx.commands.run('echo to stderr >&2; exit 3').catch(e => [e instanceof CommandExitError, e.exitCode, e.stderr])
const cat = await sbx.commands.run('cat', { background: true, stdin: true })
await sbx.commands.sendStdin(cat.pid, 'said\n')
while (!cat.stdout.includes('said')) await new Promise(r => setTimeout(r, 5))
out.listed = (await sbx.commands.list()).some(p => p.pid === cat.pid)
out.killed = [await sbx.commands.kill(cat.pid)]
await failure(cat.wait()) // until it has ended, it can be killed again
out.killed.push(await sbx.commands.kill(cat.pid))
let typed = ''
const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: d => { typed += Buffer.from(d).toString() } })
await sbx.pty.sendInput(pty.pid, Buffer.from('echo $((6*7)); exit\n'))
await pty.wait()
out.pty = typed.includes('42')

await sbx.files.makeDir('/tmp/dir')
const seen = []
const watch = await sbx.files.watchDir('/tmp/dir', e => seen.push(e.type + ' ' + e.name))
await sbx.files.write('/tmp/dir/f', 'one')
await sbx.files.rename('/tmp/dir/f', '/tmp/dir/g')
while (!seen.includes('create g')) await new Promise(r => setTimeout(r, 5))
await watch.stop()
out.seen = [...new Set(seen)].sort()
out.files = [await sbx.files.read('/tmp/dir/g'), await sbx.files.exists('/tmp/dir/f'), (await sbx.files.list('/tmp/dir')).map(e => e.name), await failure(sbx.files.read('/tmp/none'))]

const info = await sbx.getInfo()
out.info = [info.state, info.name, info.metadata, info.sandboxId === sbx.sandboxId]
await sbx.setTimeout(600_000)
out.ttl = (await sbx.getInfo()).endAt - info.endAt > 300_000
out.list = (await all(Sandbox.list({ query: { metadata: { part: 'life & limb' }, state: ['running'] } }))).map(s => s.sandboxId === sbx.sandboxId)
out.metrics = (await sbx.getMetrics()).map(m => m.cpuCount > 0 && m.memTotal > 0)
await sbx.updateNetwork({ denyOut: ['0.0.0.0/0'] })
out.offline = (await sbx.getInfo()).allowInternetAccess

// Asleep, and awake again.
await sbx.commands.run('echo kept > /tmp/kept; sleep 1000 & echo $! > /tmp/pid')
out.paused = [await sbx.pause(), await sbx.pause(), (await sbx.getInfo()).state, await sbx.isRunning()]
const again = await Sandbox.connect(sbx.sandboxId, { timeoutMs: 120_000 })
out.woken = [(await again.commands.run('cat /tmp/kept; kill -0 $(cat /tmp/pid) && echo runs')).stdout, (await again.getInfo()).state]
await again.pause({ keepMemory: false })
const anew = await Sandbox.connect(sbx.sandboxId)
out.booted = (await anew.commands.run('cat /tmp/kept; ls /proc/$(cat /tmp/pid)/cmdline 2>/dev/null; true')).stdout

// Copies.
const shot = await sbx.createSnapshot({ name: 'js' })
const copies = [...await sbx.fork({ count: 2 }), await Sandbox.create(shot.snapshotId)]
out.copies = await Promise.all(copies.map(async c => (await c.commands.run('cat /tmp/kept')).stdout))
out.snapshots = (await all(sbx.listSnapshots())).map(s => s.snapshotId === shot.snapshotId)
await Promise.all(copies.map(c => c.kill()))
out.removed = [await Sandbox.deleteSnapshot(shot.snapshotId), await Sandbox.deleteSnapshot(shot.snapshotId)]

// What is wrong has its own class.
out.errors = [
	await failure(Sandbox.create('no-such-template')), await failure(Sandbox.connect('sbxnone')), await failure(Sandbox.getInfo('sbxnone')),
	await failure(Sandbox.create('sdk', { apiKey: 'e2b_' + '0'.repeat(40) })), await failure(Sandbox.create('sdk', { network: { egressProxy: { address: '192.0.2.1:1080' } } })),
]
out.end = [await sbx.kill(), await sbx.kill(), await sbx.isRunning()]
console.log(JSON.stringify(out))
process.exit(0)
`

const pythonLifeScript = `
import json
from e2b import Sandbox, SandboxQuery, SandboxState, CommandExitException

out = {}
def failure(f):
    try:
        f()
    except Exception as e:
        return type(e).__name__
def all(pages):
    items = []
    while pages.has_next:
        items += pages.next_items()
    return items

sbx = Sandbox.create("sdk", timeout=120, metadata={"part": "python & all"}, envs={"A": "of the sandbox"})
out["env"] = sbx.commands.run("echo $A $B", envs={"B": "of the command"}).stdout
try:
    sbx.commands.run("echo to stderr >&2; exit 3")
except CommandExitException as e:
    out["exit"] = [e.exit_code, e.stderr]
sbx.files.make_dir("/tmp/dir")
watch = sbx.files.watch_dir("/tmp/dir")
sbx.files.write("/tmp/dir/f", "one")
out["seen"] = [e.type.value + " " + e.name for e in watch.get_new_events()]
watch.stop()
out["files"] = [sbx.files.read("/tmp/dir/f"), sbx.files.exists("/tmp/none"), [e.name for e in sbx.files.list("/tmp/dir")], failure(lambda: sbx.files.read("/tmp/none"))]
info = sbx.get_info()
out["info"] = [info.state.value, info.name, info.metadata]
sbx.set_timeout(600)
out["ttl"] = (sbx.get_info().end_at - info.end_at).total_seconds() > 300
out["list"] = [s.sandbox_id == sbx.sandbox_id for s in all(Sandbox.list(query=SandboxQuery(metadata={"part": "python & all"}, state=[SandboxState.RUNNING])))]
out["metrics"] = [m.cpu_count > 0 for m in sbx.get_metrics()]
sbx.commands.run("echo kept > /tmp/kept; sleep 1000 & echo $! > /tmp/pid")
sbx.pause()
out["paused"] = [sbx.get_info().state.value, sbx.is_running()]
sbx.connect()
out["woken"] = sbx.commands.run("cat /tmp/kept; kill -0 $(cat /tmp/pid) && echo runs").stdout
auto = Sandbox.create("sdk", timeout=60, lifecycle={"on_timeout": "pause"})
auto.set_timeout(0)
while auto.is_running():
    pass
auto.connect(timeout=60)
out["auto"] = auto.commands.run("echo on").stdout
auto.kill()
shot = sbx.create_snapshot()
copies = sbx.fork(count=2) + [Sandbox.create(shot.snapshot_id)]
out["copies"] = [c.commands.run("cat /tmp/kept").stdout for c in copies]
for c in copies:
    c.kill()
out["removed"] = [Sandbox.delete_snapshot(shot.snapshot_id), Sandbox.delete_snapshot(shot.snapshot_id)]
out["errors"] = [failure(lambda: Sandbox.create("no-such-template")), failure(lambda: Sandbox.connect("sbxnone")), failure(lambda: Sandbox.create("sdk", api_key="e2b_" + "0" * 40))]
out["end"] = [sbx.kill(), sbx.kill(), sbx.is_running()]
print(json.dumps(out))
`

// TestSDK drives E2B's published packages over a sandbox's whole life.
func TestSDK(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.sdkTemplate(t)
	for _, tc := range []struct {
		name string
		cmd  func(t *testing.T, ctx context.Context) *exec.Cmd
		want map[string]string
	}{
		{"javascript", func(t *testing.T, ctx context.Context) *exec.Cmd {
			dir := javascript(t)
			script := filepath.Join(dir, "life.mjs")
			must(t, os.WriteFile(script, []byte(jsLifeScript), 0o600))
			cmd := exec.CommandContext(ctx, "node", script)
			cmd.Dir, cmd.Env = dir, l.sdkEnv()
			return cmd
		}, map[string]string{
			"env": `"of the sandbox of the command\n"`, "exit": `[true,3,"to stderr\n"]`, "listed": `true`, "killed": `[true,false]`, "pty": `true`,
			"seen":  `["chmod f","create f","create g","rename f","write f"]`,
			"files": `["one",false,["g"],"FileNotFoundError"]`, "info": `["running","sdk",{"part":"life \u0026 limb"},true]`,
			"ttl": `true`, "list": `[true]`, "metrics": `[true]`, "offline": `false`,
			"paused": `[true,false,"paused",false]`, "woken": `["kept\nruns\n","running"]`, "booted": `"kept\n"`,
			"copies": `["kept\n","kept\n","kept\n"]`, "snapshots": `[true]`, "removed": `[true,false]`,
			"errors": `["SandboxError","SandboxNotFoundError","SandboxNotFoundError","AuthenticationError","SandboxError"]`,
			"end":    `[true,false,false]`,
		}},
		{"python", func(t *testing.T, ctx context.Context) *exec.Cmd {
			cmd := exec.CommandContext(ctx, "python3", "-c", pythonLifeScript)
			cmd.Env = l.sdkEnv("PYTHONPATH=" + python(t))
			return cmd
		}, map[string]string{
			"env": `"of the sandbox of the command\n"`, "exit": `[3,"to stderr\n"]`, "seen": `["create f","chmod f","write f"]`,
			"files": `["one",false,["f"],"FileNotFoundException"]`, "info": `["running","sdk",{"part":"python \u0026 all"}]`,
			"ttl": `true`, "list": `[true]`, "metrics": `[true]`, "paused": `["paused",false]`, "woken": `"kept\nruns\n"`, "auto": `"on\n"`,
			"copies": `["kept\n","kept\n","kept\n"]`, "removed": `[true,false]`,
			"errors": `["SandboxException","SandboxNotFoundException","AuthenticationException"]`, "end": `[true,false,false]`,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			cmd := tc.cmd(t, ctx)
			checkScript(t, cmd, tc.want)
		})
	}
}

// checkScript runs a program that prints one JSON object, and compares its
// members with what they have to be, as JSON.
func checkScript(t *testing.T, cmd *exec.Cmd, want map[string]string) {
	t.Helper()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	data, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s\n%s", err, data, stderr.String())
	}
	var got map[string]any
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	for name, want := range want {
		if have, _ := json.Marshal(got[name]); string(have) != want {
			t.Errorf("%s: %s, want %s", name, have, want)
		}
	}
}
