package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// pool sets a pool of "tiny", which ends with t, and waits until it is full.
func (l *lab) pool(t *testing.T, r wire.SetPool) wire.Pool {
	t.Helper()
	if r.Template == "" {
		r.Template = "tiny"
	}
	r.Resources.MemoryMiB = 256 // as create has it
	p, err := l.cl.SetPool(t.Context(), r)
	must(t, err)
	t.Cleanup(func() {
		if l.d != nil && !l.d.ended() {
			l.cl.RemovePool(context.Background(), p.ID)
		}
	})
	return l.waitPool(t, p.ID)
}

// waitPool waits until a pool is full and at rest.
func (l *lab) waitPool(t *testing.T, id string) wire.Pool {
	t.Helper()
	var p wire.Pool
	var err error
	if !eventually(func() bool {
		p, err = l.cl.Pool(context.Background(), id)
		return err != nil || p.Available == p.Ready && p.Making+p.Ending == 0 && p.Error == nil
	}, longest) {
		t.Fatalf("the pool is not full: %+v, error %+v", p, p.Error)
	}
	must(t, err)
	return p
}

func TestPools(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		p := l.pool(t, wire.SetPool{Runtime: runtime, Ready: 3})
		if len(p.Members) != 3 || (p.Capture != nil) != l.abilities(t)[runtime].FullCapture {
			t.Errorf("%+v", p)
		}
		for _, id := range p.Members { // nobody comes to a member
			for _, path := range []string{"", "/stats", "/logs", "/ports/8000/", "/agent/envs"} {
				if a := l.raw(t, "GET", "/v1/sandboxes/"+id+path, nil, nil); a.status != http.StatusNotFound {
					t.Errorf("GET %s of a member: %d %s", path, a.status, a.body)
				}
			}
			if res := l.cli(t, "exec", id, "--", "true"); res.code != 125 {
				t.Errorf("an exec in a member: %+v", res)
			}
		}
		seen := map[string]bool{}
		for i := range 3 {
			l.waitPool(t, p.ID)
			name := fmt.Sprintf("claim-%d", i)
			r := wire.CreateSandbox{
				Runtime: runtime, Env: map[string]string{"MINE": name}, Metadata: map[string]string{"n": name}, Timeout: 3600,
				Network: wire.Network{Mode: sandbox.NetworkNone}, Workdir: "/tmp",
			}
			sb := l.create(t, r)
			if sb.Start != "pool" || sb.State != sandbox.Running || sb.ExpiresAt == nil || sb.Metadata["n"] != name || sb.Network.Mode != sandbox.NetworkNone {
				t.Errorf("%+v", sb)
			}
			got := strings.Fields(l.sh(t, sb.ID, "echo $MINE $(hostname) $(cat /etc/machine-id) $PWD $E2B_SANDBOX_ID"))
			if len(got) != 5 || got[0] != name || got[1] != sb.ID || seen[got[2]] || got[3] != "/tmp" || got[4] != sb.ID {
				t.Errorf("claim %d of %s has %q", i, sb.ID, got)
			}
			seen[got[2]] = true
			if list := l.cli(t, "ls", "-q", "-l", "n="+name); !strings.Contains(string(list.stdout), sb.ID) {
				t.Errorf("it is not listed: %s", list.stdout)
			}
		}
		if sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 300}}); sb.Start != "cold" {
			t.Errorf("with other limits it started by %s", sb.Start)
		}
		named := l.create(t, wire.CreateSandbox{Runtime: runtime, Hostname: "named"})
		if out := l.run(t, named.ID, "hostname"); named.Start == "pool" || out != "named" {
			t.Errorf("with a host name it started by %s, and has %q", named.Start, out)
		}
		if a := l.raw(t, "POST", "/v1/sandboxes", http.Header{"Content-Type": {"application/json"}},
			strings.NewReader(`{"template":"tiny","runtime":"`+runtime+`","resources":{"memory_mib":256},"user":"nobody-such"}`)); a.status < 400 || a.status >= 500 {
			t.Errorf("a create for a user that is not there: %d %s", a.status, a.body)
		}
		must(t, l.cl.RemovePool(t.Context(), p.ID))
		l.verify(t) // members are gone, what was claimed is not
	})
}

func TestPoolClaimsAtOnce(t *testing.T) {
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		const n = 30
		p := l.pool(t, wire.SetPool{Runtime: runtime, Ready: n})
		var all sync.WaitGroup
		sbs, errs := make([]wire.Sandbox, n), make([]error, n)
		for i := range n {
			all.Go(func() {
				sbs[i], errs[i] = l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{
					Template: "tiny", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}, Env: map[string]string{"N": fmt.Sprint(i)},
				})
				if errs[i] != nil {
					return
				}
				res, err := l.cl.Exec(t.Context(), sbs[i].ID, wire.Exec{Cmd: wire.Command{Argv: []string{"/bin/sh", "-c", "echo $N"}}})
				if errs[i] = err; err == nil && strings.TrimSpace(string(res.OutBytes())) != fmt.Sprint(i) {
					errs[i] = fmt.Errorf("it says %q", res.OutBytes())
				}
			})
		}
		all.Wait()
		ids := map[string]bool{}
		for i, sb := range sbs {
			if errs[i] != nil || sb.Start != "pool" || ids[sb.ID] {
				t.Errorf("claim %d: %s by %q: %v", i, sb.ID, sb.Start, errs[i])
			}
			ids[sb.ID] = true
		}
		must(t, l.cl.RemovePool(t.Context(), p.ID))
		for id := range ids {
			must(t, l.cl.Kill(t.Context(), id))
		}
		l.verify(t)
	})
}

// TestPoolFallsBack: more creates at once than there are members, of which none
// is made meanwhile, are restored from the warm capture, or boot.
func TestPoolFallsBack(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, runtime := range l.capable(t, func(sandbox.Capabilities) bool { return true }) {
		t.Run(runtime, func(t *testing.T) {
			l.pool(t, wire.SetPool{Runtime: runtime, Ready: 1})
			var all sync.WaitGroup
			got := make([]string, 3)
			for i := range got {
				all.Go(func() {
					sb, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}})
					if err != nil {
						t.Error(err)
						return
					}
					got[i] = sb.Start
					if name := l.run(t, sb.ID, "hostname"); name != sb.ID {
						t.Errorf("%s (%s) has the host name %q", sb.ID, sb.Start, name)
					}
				})
			}
			all.Wait()
			slices.Sort(got)
			want := []string{"cold", "cold", "pool"}
			if l.abilities(t)[runtime].FullCapture {
				want = []string{"pool", "restore", "restore"}
			}
			if !slices.Equal(got, want) {
				t.Errorf("they started by %v, want %v", got, want)
			}
		})
	}
}

// TestPoolOfAService: what a template's start command is to do is done in every
// member, also after the daemon was killed; members of a template that is built
// anew, or removed, are replaced, or go.
func TestPoolOfAService(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	build := func(version string) wire.Template {
		t.Helper()
		var ctx layer
		ctx.file("Dockerfile", "FROM tiny\nCOPY version /version\n", 0o644)
		ctx.file("version", version, 0o644)
		tpl, err := l.cl.BuildTemplate(t.Context(), wire.BuildTemplate{
			Name: "service", StartCmd: "echo up $(cat /version) >> /tmp/up; while :; do sleep 1; done", ReadyCmd: "test -s /tmp/up", Dockerfile: &wire.BuildDockerfile{},
		}, bytes.NewReader(ctx.bytes()), nil)
		must(t, err)
		return tpl
	}
	first := build("one")
	l.each(t, func(t *testing.T, runtime string) {
		if cur, err := l.cl.Template(t.Context(), "service"); err != nil || cur.ID != first.ID {
			first = build("one")
		}
		p := l.pool(t, wire.SetPool{Template: "service", Runtime: runtime, Ready: 2})
		claim := func(version string) wire.Sandbox {
			t.Helper()
			l.waitPool(t, p.ID)
			sb := l.create(t, wire.CreateSandbox{Template: "service", Runtime: runtime})
			if out := l.sh(t, sb.ID, "cat /tmp/up"); sb.Start != "pool" || out != "up "+version {
				t.Errorf("it started by %s, and its service says %q", sb.Start, out)
			}
			return sb
		}
		claim("one")
		l.waitPool(t, p.ID)
		l.d.kill()
		l.start(t)
		q := l.waitPool(t, p.ID)
		if members := p.Members; q.Capture != nil && p.Capture != nil && q.Capture.ID != p.Capture.ID {
			t.Errorf("the capture was taken anew: %v, %v", q, members)
		}
		kept := claim("one")
		second := build("two")
		if !eventually(func() bool {
			q, err := l.cl.Pool(t.Context(), p.ID)
			return err == nil && q.TemplateID == second.ID && q.Available == 2 && q.Making+q.Ending == 0
		}, longest) {
			t.Fatal("members are of the old content still")
		}
		claim("two")
		if out := l.sh(t, kept.ID, "cat /tmp/up"); out != "up one" {
			t.Errorf("what was claimed before says %q", out)
		}
		off, err := l.cl.SetPool(t.Context(), wire.SetPool{Template: "service", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}})
		must(t, err)
		if off = l.waitPool(t, off.ID); off.ID != p.ID || off.Capture != nil || len(off.Members) != 0 {
			t.Errorf("%+v", off)
		}
		l.verify(t)
		_, err = l.cl.SetPool(t.Context(), wire.SetPool{Template: "service", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}, Ready: 1})
		must(t, err)
		l.waitPool(t, p.ID)
		for _, sb := range l.list(t, client.Filter{Live: true}) {
			must(t, l.cl.Kill(t.Context(), sb.ID))
		}
		must(t, l.cl.RemoveTemplate(t.Context(), "service"))
		if !eventually(func() bool {
			q, err := l.cl.Pool(t.Context(), p.ID)
			return err == nil && q.Available+q.Making+q.Ending == 0 && q.Error != nil && q.Error.Code == sandbox.CodeNotFound
		}, longest) {
			t.Error("members of a template that is gone stay")
		}
		must(t, l.cl.RemovePool(t.Context(), "service"))
		l.verify(t)
	})
}

// TestPoolFillsBesideCreates: creates that no pool serves are answered while a
// pool is filled, and the pool is filled all the same.
func TestPoolFillsBesideCreates(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		p, err := l.cl.SetPool(t.Context(), wire.SetPool{Template: "tiny", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}, Ready: 4})
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), longest)
		defer cancel()
		for range 8 {
			sb, err := l.cl.CreateSandbox(ctx, wire.CreateSandbox{Template: "tiny", Runtime: runtime})
			must(t, err)
			must(t, l.cl.Kill(ctx, sb.ID))
			time.Sleep(5 * time.Millisecond)
		}
		l.waitPool(t, p.ID)
		must(t, l.cl.RemovePool(t.Context(), p.ID))
		l.verify(t)
	})
}
