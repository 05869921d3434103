package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// templateScript builds by the published SDK: steps, files, a tag, an error.
const templateScript = `
import { Template, waitForTimeout } from 'e2b'
import fs from 'node:fs'
fs.mkdirSync('ctx/folder', { recursive: true })
fs.writeFileSync('ctx/folder/test.txt', 'hello from the context\n')
const lines = []
const t = Template({ fileContextPath: 'ctx' }).fromTemplate('tiny').setUser('root').setWorkdir('/app')
	.copy('folder/*', 'folder').setEnvs({ GREETING: 'good day' })
	.runCmd('cat folder/test.txt; echo $GREETING').setStartCmd('sleep 60', waitForTimeout(100))
const b = await Template.build(t, 'app:v1', { onBuildLogs: l => lines.push(l.message) })
await Template.assignTags('app:v1', ['prod'])
const tags = (await Template.getTags(b.templateId)).map(g => g.tag).sort()
let failed = ''
try {
	await Template.build(Template().fromTemplate('tiny').runCmd('echo oops; exit 3'), 'bad')
} catch (e) { failed = e.constructor.name + ' ' + e.message }
console.log(JSON.stringify({ lines, tags, failed, there: await Template.exists('app'), not: await Template.exists('nope') }))
`

// TestTemplateBuildSDK drives the template builder of E2B's published package.
func TestTemplateBuildSDK(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("npm is not installed: the published SDK cannot be had")
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	npm := exec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--prefix", dir, "e2b@2.51.0")
	if out, err := npm.CombinedOutput(); err != nil {
		t.Skipf("the published SDK cannot be had: %v: %s", err, out)
	}
	l := newLab(t)
	l.importTiny(t)
	if err := os.WriteFile(filepath.Join(dir, "build.mjs"), []byte(templateScript), 0o600); err != nil {
		t.Fatal(err)
	}
	node := exec.CommandContext(ctx, "node", "build.mjs")
	node.Dir = dir
	node.Env = append(os.Environ(), "E2B_API_KEY="+l.key, "E2B_API_URL="+l.tcp, "E2B_SANDBOX_URL="+l.tcp)
	out, err := node.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{"hello from the context", "good day", `"tags":["prod","v1"]`, `"failed":"BuildError`, "exit code 3", "oops", `"there":true`, `"not":false`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
}
