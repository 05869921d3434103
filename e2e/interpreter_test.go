package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The published packages of the code interpreter.
const (
	jsInterpreter     = "@e2b/code-interpreter@2.8.0"
	pythonInterpreter = "e2b-code-interpreter==2.11.5"
)

const jsCodeScript = `
import { Sandbox } from '@e2b/code-interpreter'

const out = {}
const sbx = await Sandbox.create({ timeoutMs: 300_000 })
const text = async (code, o) => (await sbx.runCode(code, o)).text
await sbx.runCode('x = 40')
out.state = await text('x + 2')
out.languages = await Promise.all([
	sbx.runCode("const m: string = 'typed'; console.log(m)", { language: 'ts' }), sbx.runCode("import { sep } from 'path'\nsep", { language: 'js' }), sbx.runCode('echo $((6*7))', { language: 'bash' }),
].map(async r => { const e = await r; return e.logs.stdout.join('') + (e.text ?? '') }))
const streamed = []
let early = false
const run = await sbx.runCode("import time, sys\nprint('first', flush=True)\ntime.sleep(0.5)\nprint('second', file=sys.stderr)\n'last'", {
	onStdout: m => { streamed.push(m.line); early = true }, onStderr: m => streamed.push(m.line), onResult: r => streamed.push(r.text) })
out.streamed = [streamed, early, run.executionCount > 0]
const bad = await sbx.runCode('def f():\n  return 1/0\nf()')
out.error = [bad.error.name, bad.error.value, bad.error.traceback.replace(/\x1b\[[0-9;]*m/g, '').includes('1/0')]
out.env = [await text("import os; os.environ['K']", { envs: { K: 'once' } }), await text("os.environ.get('K', 'gone')")]
const chart = (await sbx.runCode("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.bar(['a','b'], [1, 2])\nax.set_title('T')\nplt.show()")).results[0]
out.chart = [chart.chart.type, chart.chart.title, chart.chart.elements.map(e => [e.label, e.value]), chart.png.length > 1000]
const rich = (await sbx.runCode("from IPython.display import *\ndisplay(HTML('<b>h</b>')); display(Markdown('*m*')); display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')); display(Latex('$l$')); display(JSON({'j': 1}))")).results
out.rich = [rich[0].html, rich[1].markdown, rich[2].svg?.includes('<svg'), rich[3].latex, rich[4].json]
out.frame = (await sbx.runCode("import pandas as pd; pd.DataFrame({'a': [1, 2]})")).results[0].data
const c = await sbx.createCodeContext({ cwd: '/tmp', language: 'python' })
out.context = [await text('import os; os.getcwd()', { context: c }), await sbx.runCode('x', { context: c }).then(e => e.error.name), (await sbx.listCodeContexts()).some(o => o.id === c.id)]
await sbx.runCode('y = 1', { context: c })
await sbx.restartCodeContext(c)
out.restarted = (await sbx.runCode('y', { context: c })).error.name
await sbx.removeCodeContext(c)
out.removed = (await sbx.listCodeContexts()).some(o => o.id === c.id)
out.late = await sbx.runCode('import time\nkept = 7\ntime.sleep(60)', { timeoutMs: 1000 }).then(() => 'nothing', e => e.constructor.name)
out.after = await text('kept')
// Code that sends many messages is interrupted as well, and keeps its state.
out.flood = await sbx.runCode('many = 8\nwhile True: display(1)', { timeoutMs: 1500 }).then(() => 'nothing', e => e.constructor.name)
out.afterFlood = await text('many')
out.died = await sbx.runCode('import os; os._exit(3)').then(e => e.error?.name ?? 'nothing', e => e.constructor.name)
out.anew = await text('1 + 1')
await sbx.kill()
console.log(JSON.stringify(out))
process.exit(0)
`

const pythonCodeScript = `
import json
from e2b_code_interpreter import Sandbox

out = {}
sbx = Sandbox.create(timeout=300)
sbx.run_code("x = 40")
out["state"] = sbx.run_code("x + 2").text
out["bash"] = "".join(sbx.run_code("echo $((6*7))", language="bash").logs.stdout)
e = sbx.run_code("1/0").error
out["error"] = [e.name, e.value]
chart = sbx.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4])\nplt.show()").results[0].chart
out["chart"] = [chart.type.value, [list(p) for p in chart.elements[0].points]]
c = sbx.create_code_context(cwd="/tmp")
out["context"] = sbx.run_code("import os; os.getcwd()", context=c).text
sbx.pause()
sbx.connect()
out["woken"] = sbx.run_code("x + 3").text
sbx.kill()
print(json.dumps(out))
`

// code runs code in a sandbox's default context and gives its text.
func (l *lab) code(t *testing.T, id, code string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var text strings.Builder
	err := l.cl.RunCode(ctx, id, wire.RunCode{Code: code}, func(e wire.CodeEvent) error {
		switch e.Type {
		case wire.CodeStdout, wire.CodeResult:
			text.WriteString(e.Text)
		case wire.CodeError, wire.CodeUnexpectedEnd:
			t.Errorf("%s in %s: %s %s", e.Type, id, e.Name, e.Value)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// TestCodeInterpreter builds the template of the code interpreter as a user
// does, and uses it by the published packages and by Warren's own API.
func TestCodeInterpreter(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a template of a gigabyte; left out by -short")
	}
	t.Parallel()
	l := newLab(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	build := exec.CommandContext(ctx, l.bin, "template", "build", "--code-interpreter")
	build.Env = append(os.Environ(), "WARREN_HOST=unix://"+l.socket)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out[max(0, len(out)-4000):]) // it needs a mirror of Debian's packages, as the tests' set-up does
	}
	t.Run("javascript", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		dir := jsCode.get(t, "npm", "npm", "install", "--no-audit", "--no-fund", jsInterpreter, "--prefix")
		script := filepath.Join(dir, "code.mjs")
		must(t, os.WriteFile(script, []byte(jsCodeScript), 0o600))
		cmd := exec.CommandContext(ctx, "node", script)
		cmd.Dir, cmd.Env = dir, l.sdkEnv()
		checkScript(t, cmd, map[string]string{
			"state": `"42"`, "languages": `["typed\n","/","42\n"]`, "streamed": `[["first\n","second\n","last"],true,true]`,
			"error": `["ZeroDivisionError","division by zero",true]`, "env": `["once","gone"]`, "chart": `["bar","T",[["a",1],["b",2]],true]`,
			"rich": `["\u003cb\u003eh\u003c/b\u003e","*m*",true,"$l$",{"j":1}]`, "frame": `{"a":[1,2]}`,
			"context": `["/tmp","NameError",true]`, "restarted": `"NameError"`, "removed": `false`,
			"late": `"TimeoutError"`, "after": `"7"`, "flood": `"TimeoutError"`, "afterFlood": `"8"`, "anew": `"2"`,
		})
	})
	t.Run("python", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		dir := pythonCode.get(t, "python3", "python3", "-m", "pip", "install", "--quiet", "--no-warn-script-location", pythonInterpreter, "--target")
		cmd := exec.CommandContext(ctx, "python3", "-c", pythonCodeScript)
		cmd.Env = l.sdkEnv("PYTHONPATH=" + dir)
		checkScript(t, cmd, map[string]string{
			"state": `"42"`, "bash": `"42\n"`, "error": `["ZeroDivisionError","division by zero"]`, "chart": `["line",[[1,3],[2,4]]]`,
			"context": `"/tmp"`, "woken": `"43"`,
		})
	})
	// A context with a data frame of 50 MB goes on in every copy, and wakes.
	t.Run("copies", func(t *testing.T) {
		sb := l.create(t, wire.CreateSandbox{Runtime: "gvisor", Template: "code-interpreter-v1", Resources: wire.ResourceRequest{MemoryMiB: 1024}})
		l.code(t, sb.ID, "import numpy as np, pandas as pd\ndf = pd.DataFrame(np.arange(6_250_000.0).reshape(-1, 5))\ntotal = df.sum().sum()")
		const look = "print(len(df), int(df.sum().sum() - total), df.memory_usage().sum() > 49_000_000)"
		res, err := l.cl.Fork(t.Context(), sb.ID, wire.Fork{Count: 2, Kind: sandbox.SnapshotFull})
		must(t, err)
		ids := []string{sb.ID}
		for _, f := range res.Forks {
			if f.Error != nil {
				t.Fatal(f.Error.Err())
			}
			ids = append(ids, f.Sandbox.ID)
		}
		for i, id := range ids {
			l.code(t, id, fmt.Sprintf("df.iloc[0, 0] += %d", i+1)) // each for itself
		}
		for range 2 {
			for i, id := range ids {
				if got, want := l.code(t, id, look), fmt.Sprintf("1250000 %d True\n", i+1); got != want {
					t.Errorf("copy %d has %q, want %q", i, got, want)
				}
				must(t, l.cl.Hibernate(t.Context(), id))
			}
		}
		for _, id := range ids {
			must(t, l.cl.Kill(t.Context(), id))
		}
	})
	l.verify(t)
}
