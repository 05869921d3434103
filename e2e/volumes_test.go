package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

const volumeScript = `
import { Sandbox, Volume } from 'e2b'

const out = {}
const failure = p => p.then(() => 'nothing', e => e.constructor.name)
const v = await Volume.create('js-data')
await v.writeFile('/dir/../note', 'by the API')
await v.makeDir('/a/b', { force: true, mode: 0o777 })
out.entry = await v.getInfo('/note').then(e => [e.type, e.size, e.path])
out.read = await v.readFile('/note')
out.exists = [await v.exists('/note'), await v.exists('/none')]
out.errors = [await failure(v.readFile('/none')), await failure(v.list('/none'))]
const sbx = await Sandbox.create('sdk', { timeoutMs: 120_000, volumeMounts: { '/data': v } })
out.inside = (await sbx.commands.run('cat /data/note; echo by the sandbox > /data/a/b/f; ls -l /data | grep -c note')).stdout
out.back = await v.readFile('/a/b/f')
out.list = (await v.list('/', { depth: 3 })).map(e => e.path).sort()
out.busy = await failure(Volume.destroy(v.volumeId))
await sbx.kill()
await v.remove('/a')
out.left = (await v.list('/')).map(e => e.name)
out.volumes = (await Volume.list()).map(o => o.name)
out.gone = [await Volume.destroy(v.volumeId), await Volume.destroy(v.volumeId)]
console.log(JSON.stringify(out))
process.exit(0)
`

// TestVolumes shares volumes between sandboxes of both runtimes, over forks,
// sleep and the daemon's end, and has E2B's published package use one.
func TestVolumes(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.sdkTemplate(t)
	t.Run("sdk", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		dir := javascript(t)
		script := filepath.Join(dir, "volume.mjs")
		must(t, os.WriteFile(script, []byte(volumeScript), 0o600))
		cmd := exec.CommandContext(ctx, "node", script)
		cmd.Dir, cmd.Env = dir, l.sdkEnv("E2B_VOLUME_API_URL="+l.tcp)
		checkScript(t, cmd, map[string]string{
			"entry": `["file",10,"/note"]`, "read": `"by the API"`, "exists": `[true,false]`, "errors": `["VolumePathNotFoundError","VolumePathNotFoundError"]`,
			"inside": `"by the API1\n"`, "back": `"by the sandbox\n"`, "list": `["/a","/a/b","/a/b/f","/note"]`, "left": `["note"]`, "volumes": `["js-data"]`, "gone": `[true,false]`,
		})
	})
	t.Run("shared", func(t *testing.T) {
		v, err := l.cl.CreateVolume(t.Context(), "shared")
		must(t, err)
		mount := []wire.VolumeMount{{Volume: "shared", Path: "/home/user/data"}}
		var ids []string
		for _, runtime := range runtimes {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, User: "root", Volumes: mount})
			ids = append(ids, sb.ID)
			l.sh(t, sb.ID, "echo "+runtime+" >> /home/user/data/who; chown 1000:1000 /home/user/data/who; mkdir -p /home/user/data/"+runtime+"; cp /bin/busybox /home/user/data/"+runtime+"/; chmod 4755 /home/user/data/"+runtime+"/busybox")
		}
		reader := l.create(t, wire.CreateSandbox{Volumes: []wire.VolumeMount{{Volume: v.ID, Path: "/mnt/ro", ReadOnly: true}}})
		ids = append(ids, reader.ID)
		if out := l.sh(t, reader.ID, "cat /mnt/ro/who; stat -c %u /mnt/ro/who; echo x > /mnt/ro/x 2>/dev/null || echo refused"); out != "container\ngvisor\n1000\nrefused" {
			t.Errorf("the reader sees %q", out)
		}
		for n, id := range ids[:2] {
			if out := l.sh(t, id, "cat /home/user/data/who; stat -c %u /home/user/data/who; su user -c '/home/user/data/"+runtimes[n]+"/busybox su nobody-at-all 2>&1'; true"); out != "container\ngvisor\n1000\nsu: must be suid to work properly" {
				t.Errorf("%s sees %q", id, out)
			}
		}
		// On the host nobody but root comes near what a sandbox made set-id.
		if st, err := os.Stat(filepath.Join(l.state, "volumes")); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("the volumes' directory: %v, %v", st, err)
		}
		if err := l.cl.RemoveVolume(t.Context(), "shared"); sandbox.CodeOf(err) != sandbox.CodeConflict {
			t.Errorf("removed while it is mounted: %v", err)
		}
		// A copy and a sleeper have it, too, and the next daemon knows it.
		g := ids[1]
		res, err := l.cl.Fork(t.Context(), g, wire.Fork{Kind: sandbox.SnapshotFull})
		must(t, err)
		if res.Forks[0].Error != nil {
			t.Fatal(res.Forks[0].Error.Err())
		}
		child := res.Forks[0].Sandbox.ID
		ids = append(ids, child)
		l.sh(t, child, "echo child >> /home/user/data/who")
		must(t, l.cl.Hibernate(t.Context(), g))
		l.d.kill()
		l.start(t)
		if out := l.sh(t, g, "tail -1 /home/user/data/who; echo woken >> /home/user/data/who"); out != "child" {
			t.Errorf("awake it sees %q", out)
		}
		must(t, l.cl.HibernateAs(t.Context(), ids[0], sandbox.SnapshotDisk))
		if out := l.sh(t, ids[0], "tail -1 /home/user/data/who"); out != "woken" {
			t.Errorf("booted it sees %q", out)
		}
		for _, id := range ids {
			must(t, l.cl.Kill(t.Context(), id))
		}
		must(t, l.cl.RemoveVolume(t.Context(), "shared"))
		if _, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Volumes: mount}); sandbox.CodeOf(err) != sandbox.CodeNotFound {
			t.Errorf("a volume that is gone: %v", err)
		}
		for _, bad := range []string{"data", "/", "/proc/x", "/a/../b", "/.warren/x"} {
			if _, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Volumes: []wire.VolumeMount{{Volume: "shared", Path: bad}}}); sandbox.CodeOf(err) != sandbox.CodeInvalid {
				t.Errorf("at %s: %v", bad, err)
			}
		}
	})
	l.verify(t)
}
