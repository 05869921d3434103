package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
)

// dataPlaneScript uses sandboxes by the published SDK. Where the daemon is to be
// restarted it prints "restart", and waits for a line.
const dataPlaneScript = `
import { Sandbox, TimeoutError } from 'e2b'
import dns from 'node:dns'
import readline from 'node:readline/promises'

// As a wildcard in the DNS does it.
const lookup = dns.lookup
dns.lookup = (name, o, cb) => {
	if (typeof o === 'function') { cb = o; o = {} }
	if (!name.endsWith('.box.test')) return lookup(name, o, cb)
	process.nextTick(() => o.all ? cb(null, [{ address: '127.0.0.1', family: 4 }]) : cb(null, '127.0.0.1', 4))
}
const ids = process.env.IDS.split(',')
const out = {}
const boxes = await Promise.all(ids.map(id => Sandbox.connect(id)))
const sbx = boxes[0]

// 200 commands at once.
const all = await Promise.allSettled(boxes.flatMap((b, i) => [...Array(200 / boxes.length).keys()].map(async j => {
	const r = await b.commands.run('echo ' + i + ' ' + j)
	if (r.stdout !== i + ' ' + j + '\n') throw new Error('it says ' + r.stdout)
})))
out.failed = all.filter(r => r.status === 'rejected').map(r => String(r.reason))

// A stream that is left, and taken up again.
let first = '', rest = ''
const job = await sbx.commands.run('i=0; until test -e /tmp/go; do echo line $i; sleep 0.05; i=$((i+1)); done; echo the end; exit 5', { background: true, onStdout: d => { first += d } })
while (!first.includes('line 5')) await new Promise(r => setTimeout(r, 10))
await job.disconnect()
const again = await sbx.commands.connect(job.pid, { onStdout: d => { rest += d } })
await sbx.commands.run('touch /tmp/go')
out.exit = await again.wait().then(() => 0, e => e.exitCode)
out.last = rest.trim().split('\n').pop()

// Files, and URLs of them that name no sandbox.
const data = new Uint8Array(8 << 20).map((_, i) => i * 7)
await sbx.files.write('/tmp/big', data.buffer)
const back = await sbx.files.read('/tmp/big', { format: 'bytes' })
out.same = Buffer.compare(Buffer.from(back), Buffer.from(data)) === 0
const form = new FormData()
form.append('file', new Blob(['by a URL']))
const up = await fetch(await sbx.uploadUrl('/tmp/up', { useSignatureExpiration: 60 }), { method: 'POST', body: form })
const down = await fetch(await sbx.downloadUrl('/tmp/up', { useSignatureExpiration: 60 }))
const late = await fetch(await sbx.downloadUrl('/tmp/up', { useSignatureExpiration: -60 }))
out.urls = [up.status, down.status, await down.text(), late.status, await late.json()]

// getHost(), by TLS.
const page = await fetch('https://' + sbx.getHost(8080) + '/page')
out.page = [page.status, (await page.json()).path]

// A restart of the daemon.
console.log('restart')
const lines = readline.createInterface({ input: process.stdin })
await new Promise(r => lines.once('line', r))
out.restarted = (await sbx.commands.run('echo on')).stdout
out.running = await sbx.isRunning()

// An end in the middle of a stream.
const doomed = await sbx.commands.run('while :; do echo on; sleep 0.05; done', { background: true })
const ended = doomed.wait().then(() => null, e => e)
await sbx.kill()
const e = await ended
out.error = [e instanceof TimeoutError, String(e?.constructor?.name), String(e?.message)]
out.gone = await sbx.isRunning()
console.log(JSON.stringify(out))
process.exit(0)
`

// TestDataPlaneSDK drives the data plane by E2B's published package.
func TestDataPlaneSDK(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	dir := javascript(t)
	must(t, os.WriteFile(filepath.Join(dir, "use.mjs"), []byte(dataPlaneScript), 0o600))
	l := openLab(t)
	ip := loopback()
	l.flags = []string{"--listen", ip + ":0", "--tls-listen", "127.0.0.1:0", "--pool=-1", "--grace", "1s", "--tls-domain", "box.test"}
	l.start(t)
	_, addr, _ := strings.Cut(servesLine.FindString(l.d.output()), "http://")
	_, port, err := net.SplitHostPort(addr)
	must(t, err)
	l.flags[1] = net.JoinHostPort(ip, port)
	key := l.key
	l.importTiny(t)
	ca := filepath.Join(dir, "ca.pem")
	must(t, os.WriteFile(ca, l.cli(t, "tls", "ca").stdout, 0o600))
	l.each(t, func(t *testing.T, runtime string) {
		var ids []string
		for range 20 {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, PublicTraffic: true, Resources: wire.ResourceRequest{MemoryMiB: 192}})
			ids = append(ids, sb.ID)
			// The SDK runs commands by bash, which the image has not.
			res := l.exec(t, sb.ID, wire.Exec{User: "root", Cmd: wire.Command{Argv: []string{"/bin/sh", "-c", `printf '#!/bin/sh\nexec /bin/sh "$@"\n' > /bin/bash && chmod 755 /bin/bash`}}})
			if res.ExitCode != 0 {
				t.Fatalf("make a bash: %s", res.ErrBytes())
			}
		}
		serve(t, l, ids[0], "0.0.0.0:8080")
		node := exec.CommandContext(ctx, "node", "use.mjs")
		node.Dir = dir
		node.Env = append(os.Environ(), "E2B_API_KEY="+key, "E2B_API_URL=http://"+l.flags[1], "E2B_SANDBOX_URL=http://"+l.flags[1],
			"NODE_EXTRA_CA_CERTS="+ca, "IDS="+strings.Join(ids, ","))
		in, err := node.StdinPipe()
		must(t, err)
		stdout, err := node.StdoutPipe()
		must(t, err)
		var stderr strings.Builder
		node.Stderr = &stderr
		must(t, node.Start())
		var last string
		for sc := bufio.NewScanner(stdout); sc.Scan(); {
			if last = sc.Text(); last == "restart" {
				l.d.kill()
				l.start(t)
				_, err := io.WriteString(in, "go on\n")
				must(t, err)
			}
		}
		if err := node.Wait(); err != nil {
			t.Fatalf("%v: %s\n%s", err, last, stderr.String())
		}
		var got struct {
			Failed              []string
			Exit                int
			Last, Restarted     string
			Same, Running, Gone bool
			URLs, Page, Error   []any
		}
		if err := json.Unmarshal([]byte(last), &got); err != nil {
			t.Fatalf("%v: %s", err, last)
		}
		if len(got.Failed) > 0 {
			t.Errorf("of 200 commands at once %d failed: %v", len(got.Failed), got.Failed)
		}
		if got.Exit != 5 || got.Last != "the end" {
			t.Errorf("taken up again, the command ends with %d after %q", got.Exit, got.Last)
		}
		urls, _ := json.Marshal(got.URLs)
		if !got.Same || string(urls) != `[200,200,"by a URL",401,{"code":401,"message":"signature is already expired"}]` {
			t.Errorf("files: the same is %v, URLs give %s", got.Same, urls)
		}
		if page, _ := json.Marshal(got.Page); string(page) != `[200,"/page"]` {
			t.Errorf("getHost() gives %s", page)
		}
		if got.Restarted != "on\n" || !got.Running || got.Gone {
			t.Errorf("after a restart a command says %q, it runs: %v, and after its end: %v", got.Restarted, got.Running, got.Gone)
		}
		if len(got.Error) != 3 || got.Error[0] != true {
			t.Errorf("a kill in the middle of a stream gives %v", got.Error)
		}
		t.Logf("%s: a kill in the middle of a stream gives %v", runtime, got.Error)
	})
}
