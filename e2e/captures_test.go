package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// abilities gives what the runtimes that run here can do.
func (l *lab) abilities(t *testing.T) map[string]sandbox.Capabilities {
	t.Helper()
	all, err := l.cl.Runtimes(t.Context())
	must(t, err)
	can := map[string]sandbox.Capabilities{}
	for _, r := range all {
		if r.Available {
			can[r.Name] = r.Capabilities
		}
	}
	return can
}

// capable gives the runtimes that run here and of which can is true.
func (l *lab) capable(t *testing.T, can func(sandbox.Capabilities) bool) []string {
	t.Helper()
	var names []string
	for name, c := range l.abilities(t) {
		if can(c) {
			names = append(names, name)
		}
	}
	if names == nil {
		t.Skip("no runtime here can: see `warren runtimes`")
	}
	slices.Sort(names)
	return names
}

func full(c sandbox.Capabilities) bool { return c.FullCapture }
func disk(c sandbox.Capabilities) bool { return c.DiskCapture }

// waitState waits until a sandbox is in a state.
func (l *lab) waitState(t *testing.T, id string, want sandbox.State) wire.Sandbox {
	t.Helper()
	var sb wire.Sandbox
	if !eventually(func() bool { sb = l.get(t, id); return sb.State == want || sb.State.Ended() }, longest) || sb.State != want {
		t.Fatalf("sandbox %s is %s (%s %s), not %s", id, sb.State, sb.Reason, sb.Detail, want)
	}
	return sb
}

// TestHibernateCycles puts a sandbox to sleep 25 times, by hand and by
// idleness, with files that were never synced and memory that is in no file.
func TestHibernateCycles(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, runtime := range l.capable(t, full) {
		t.Run(runtime, func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, IdleTimeout: 1, User: "root"})
			// A sum of all that it ever read, which is in its memory alone. The
			// pipe stays open: gVisor ends an open that waits for a pipe's other
			// end with EINTR when it is captured, where Linux begins it anew.
			l.sh(t, sb.ID, `mkfifo /tmp/ask; (exec 3<>/tmp/ask; sum=0; while :; do read n <&3; sum=$((sum+n)); echo $sum > /tmp/sum.new; mv /tmp/sum.new /tmp/sum; done) >/dev/null 2>&1 &`)
			sum := 0
			for i := range 25 {
				sum += i + 1
				l.sh(t, sb.ID, fmt.Sprintf(`set -e
head -c %d /dev/urandom > /root/f%d; (cd /root; md5sum f%d >> sums)
head -c 100000 /dev/urandom > /tmp/t; (cd /tmp; md5sum t > tsum)
echo %d > /tmp/ask; while test "$(cat /tmp/sum 2>/dev/null)" != %d; do usleep 1000; done`, 50_000+i*7919, i, i, i+1, sum))
				if i%2 == 0 {
					must(t, l.cl.Hibernate(t.Context(), sb.ID))
				}
				if got := l.waitState(t, sb.ID, sandbox.Hibernated); got.HibernatedAt == nil || got.Address != "" {
					t.Errorf("it is hibernated since %v with the address %q", got.HibernatedAt, got.Address)
				}
				if i == 12 { // what sleeps is nothing to a daemon's end
					l.d.kill()
					l.start(t)
				}
				out := l.sh(t, sb.ID, `(cd /root; md5sum -c sums; ls f* | wc -l); (cd /tmp; md5sum -c tsum; cat sum)`)
				if strings.Contains(out, "FAILED") || !strings.Contains(out, fmt.Sprintf("\n%d\n", i+1)) || !strings.HasSuffix(out, fmt.Sprintf("\n%d", sum)) {
					t.Fatalf("after cycle %d, sum %d:\n%s", i+1, sum, out)
				}
			}
			l.verify(t)
			must(t, l.cl.Hibernate(t.Context(), sb.ID))
			must(t, l.cl.Kill(t.Context(), sb.ID))
		})
	}
}

// TestWakesOnce sends every kind of request to a hibernated sandbox at once.
func TestWakesOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, runtime := range l.capable(t, full) {
		t.Run(runtime, func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			serve(t, l, sb.ID, "0.0.0.0:8080")
			l.sh(t, sb.ID, "echo content > /tmp/file")
			host := "8080-" + sb.ID + ".localhost"
			must(t, l.cl.Hibernate(t.Context(), sb.ID))

			// Looking at it does not wake it.
			l.get(t, sb.ID)
			if _, err := l.cl.Stats(t.Context(), sb.ID); err == nil {
				t.Error("one that does not run has figures")
			}
			if _, err := l.cl.Tree(t.Context(), sb.ID); err != nil {
				t.Error(err)
			}
			r, err := l.cl.Logs(t.Context(), sb.ID, false)
			must(t, err)
			r.Close()
			l.waitState(t, sb.ID, sandbox.Hibernated)

			ctx, cancel := context.WithTimeout(t.Context(), longest)
			defer cancel()
			tr := &http.Transport{}
			defer tr.CloseIdleConnections()
			calls := map[string]func() error{
				"exec": func() error {
					res, err := l.cl.Exec(ctx, sb.ID, wire.Exec{Cmd: wire.Command{Shell: "cat /tmp/file"}})
					return gives(string(res.OutBytes()), "content", err)
				},
				"stream": func() error {
					var out bytes.Buffer
					run, err := l.cl.Start(ctx, sb.ID, client.Command{Args: []string{"cat", "/tmp/file"}, Stdout: &out})
					if err == nil {
						_, err = run.Wait(ctx)
					}
					return gives(out.String(), "content", err)
				},
				"file": func() error {
					r, _, err := l.cl.ReadFile(ctx, sb.ID, "/tmp/file", "")
					if err != nil {
						return err
					}
					defer r.Close()
					data, err := io.ReadAll(r)
					return gives(string(data), "content", err)
				},
				"port by name": func() error {
					req, err := http.NewRequestWithContext(ctx, "POST", l.tcp, strings.NewReader("hello"))
					if err != nil {
						return err
					}
					req.Host = host
					req.Header.Set("X-Api-Key", l.key)
					res, err := tr.RoundTrip(req)
					if err != nil {
						return err
					}
					defer res.Body.Close()
					data, err := io.ReadAll(res.Body)
					return gives(string(data), `"hello"`, err)
				},
				"WebSocket": func() error {
					ws, _, err := websocket.Dial(ctx, strings.Replace(l.tcp, "http", "ws", 1)+"/ws", &websocket.DialOptions{
						Host: host, HTTPHeader: http.Header{"X-Api-Key": {l.key}},
					})
					if err != nil {
						return err
					}
					defer ws.CloseNow()
					if err := ws.Write(ctx, websocket.MessageText, []byte("hello")); err != nil {
						return err
					}
					_, data, err := ws.Read(ctx)
					return gives(string(data), "hello", err)
				},
				"tunnel": func() error {
					c, err := l.cl.Tunnel(ctx, sb.ID, 8080)
					if err != nil {
						return err
					}
					defer c.Close()
					fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
					data, err := io.ReadAll(c)
					return gives(string(data), "200 OK", err)
				},
			}
			var wg sync.WaitGroup
			for name, call := range calls {
				for range 4 {
					wg.Go(func() {
						if err := call(); err != nil {
							t.Errorf("%s: %v", name, err)
						}
					})
				}
			}
			wg.Wait()
			// Each of them wakes it alone, too.
			for name, call := range calls {
				must(t, l.cl.Hibernate(t.Context(), sb.ID))
				if err := call(); err != nil {
					t.Errorf("%s alone: %v", name, err)
				}
			}
			if wakes := l.wakes(t, sb.ID); wakes != 1+len(calls) {
				t.Errorf("it was woken %d times, not %d", wakes, 1+len(calls))
			}
		})
	}
}

func gives(got, part string, err error) error {
	if err == nil && !strings.Contains(got, part) {
		err = fmt.Errorf("got %.200q, which has no %q", got, part)
	}
	return err
}

// wakes ends a sandbox, and tells how often it was woken.
func (l *lab) wakes(t *testing.T, id string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	must(t, l.cl.Kill(ctx, id))
	n, over := 0, errors.New("over")
	err := l.cl.Events(ctx, id, 0, func(e client.Event) error {
		switch {
		case e.From == sandbox.Hibernated && e.To == sandbox.Running:
			n++
		case e.To.Ended():
			return over
		}
		return nil
	})
	if !errors.Is(err, over) {
		t.Fatalf("the events of %s: %v", id, err)
	}
	return n
}

// TestActivity holds a sandbox awake by each thing that is no idleness, for
// longer than its idle time, and lets go of it.
func TestActivity(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	const idle = 1.0
	for _, runtime := range l.capable(t, full) {
		for name, hold := range map[string]func(t *testing.T, ctx context.Context, id string) (release func()){
			"exec": func(t *testing.T, ctx context.Context, id string) func() {
				ctx, cancel := context.WithCancel(ctx)
				done := make(chan struct{})
				go func() {
					defer close(done)
					l.cl.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Shell: "sleep 1000"}})
				}()
				return func() { cancel(); <-done }
			},
			"terminal": func(t *testing.T, ctx context.Context, id string) func() {
				run, err := l.cl.Start(ctx, id, client.Command{Args: []string{"sh"}, TTY: &client.Size{Cols: 80, Rows: 24}, Stdin: neverEnds{ctx}, Stdout: io.Discard})
				must(t, err)
				return func() { run.Signal(ctx, 9); run.Wait(ctx) }
			},
			"detached command": func(t *testing.T, ctx context.Context, id string) func() {
				attached, cut := context.WithCancel(ctx)
				run, err := l.cl.Start(attached, id, client.Command{Args: []string{"sleep", "1000"}})
				must(t, err)
				cut()
				return func() { l.run(t, id, "kill", "-9", fmt.Sprint(run.PID)) }
			},
			"WebSocket": func(t *testing.T, ctx context.Context, id string) func() {
				background(t, l, id)
				ws, _, err := websocket.Dial(ctx, strings.Replace(l.tcp, "http", "ws", 1)+"/ws", &websocket.DialOptions{
					Host: "8080-" + id + ".localhost", HTTPHeader: http.Header{"X-Api-Key": {l.key}},
				})
				must(t, err)
				return func() { ws.CloseNow() }
			},
			"tunnel": func(t *testing.T, ctx context.Context, id string) func() {
				background(t, l, id)
				c, err := l.cl.Tunnel(ctx, id, 8080)
				must(t, err)
				return func() { c.Close() }
			},
		} {
			t.Run(runtime+" "+name, func(t *testing.T) {
				sb := l.create(t, wire.CreateSandbox{Runtime: runtime, IdleTimeout: idle})
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				release := hold(t, ctx, sb.ID)
				for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
					if got := l.get(t, sb.ID); got.State != sandbox.Running {
						t.Fatalf("it is %s while it is in use", got.State)
					}
				}
				release()
				l.waitState(t, sb.ID, sandbox.Hibernated)
			})
		}
	}
}

// background starts a server that no client's command is left of.
func background(t *testing.T, l *lab, id string) {
	t.Helper()
	l.sh(t, id, `inside serve 0.0.0.0:8080 >/tmp/server 2>&1 & until grep -q listening /tmp/server; do usleep 1000; done`)
}

// TestTimeoutOfSleepers lets times to live run out, and begin anew, around sleep.
func TestTimeoutOfSleepers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, runtime := range l.capable(t, full) {
		t.Run(runtime+" kill", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Timeout: 3600})
			must(t, l.cl.Hibernate(t.Context(), sb.ID))
			if got := l.get(t, sb.ID); got.ExpiresAt == nil || !got.ExpiresAt.Equal(*sb.ExpiresAt) {
				t.Errorf("in its sleep it ends at %v, not %v", got.ExpiresAt, sb.ExpiresAt)
			}
			l.sh(t, sb.ID, "true")
			_, err := l.cl.SetTimeout(t.Context(), sb.ID, 2*time.Second)
			must(t, err)
			if err := l.cl.Hibernate(t.Context(), sb.ID); err != nil && sandbox.CodeOf(err) != sandbox.CodeConflict {
				t.Error(err) // so busy a machine that the end came first
			}
			l.waitEnded(t, sb.ID, sandbox.Killed, sandbox.ReasonTimeout)
		})
		t.Run(runtime+" hibernate", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Timeout: 2, OnTimeout: sandbox.OnTimeoutHibernate})
			got := l.waitState(t, sb.ID, sandbox.Hibernated)
			if got.ExpiresAt != nil || got.OnTimeout != sandbox.OnTimeoutHibernate {
				t.Errorf("it sleeps, and expires at %v by %s", got.ExpiresAt, got.OnTimeout)
			}
			must(t, l.cl.Wake(t.Context(), sb.ID))
			l.waitState(t, sb.ID, sandbox.Hibernated) // its time began anew
		})
	}
}

// neverEnds is an input on which nothing comes.
type neverEnds struct{ ctx context.Context }

func (n neverEnds) Read([]byte) (int, error) {
	<-n.ctx.Done()
	return 0, io.EOF
}

// TestFork copies sandboxes that are at work.
func TestFork(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*longest)
	defer cancel()
	ended := func(t *testing.T, out wire.ForkList) {
		t.Helper()
		for _, f := range out.Forks {
			if f.Error != nil {
				t.Fatalf("a copy: %v", f.Error.Err())
			}
			t.Cleanup(func() { l.cl.Kill(context.Background(), f.Sandbox.ID) })
		}
	}
	for _, runtime := range l.capable(t, disk) {
		t.Run(runtime+" disk", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Env: map[string]string{"A": "parent"}, User: "root"})
			l.sh(t, sb.ID, "echo kept > /root/file; rm -r /etc/group")
			out, err := l.cl.Fork(ctx, sb.ID, wire.Fork{Count: 2, Kind: sandbox.SnapshotDisk, Env: map[string]string{"B": "child"}})
			must(t, err)
			ended(t, out)
			if out.Kind != sandbox.SnapshotDisk || len(out.Forks) != 2 {
				t.Fatalf("kind %q, %d copies", out.Kind, len(out.Forks))
			}
			for _, f := range out.Forks {
				if got := l.sh(t, f.Sandbox.ID, `echo $A $B; cat /root/file; ls /etc/group 2>/dev/null; hostname`); got != "parent child\nkept\n"+f.Sandbox.ID {
					t.Errorf("in a copy: %q", got)
				}
				if got := l.get(t, f.Sandbox.ID); got.Parent != sb.ID {
					t.Errorf("its parent is %q", got.Parent)
				}
			}
			l.sh(t, sb.ID, "cat /root/file")
			if err := l.cl.Kill(ctx, sb.ID); err != nil { // the copies do not need it
				t.Fatal(err)
			}
			l.sh(t, out.Forks[0].Sandbox.ID, "cat /root/file")
			l.verify(t)
		})
	}
	for _, runtime := range runtimes {
		t.Run(runtime+" full", func(t *testing.T) {
			can, ok := l.abilities(t)[runtime]
			if !ok {
				t.Skipf("this host cannot run %s", runtime)
			}
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			out, err := l.cl.Fork(ctx, sb.ID, wire.Fork{Count: 1, Kind: sandbox.SnapshotFull})
			if !full(can) {
				wantError(t, err, sandbox.CodeUnsupported, runtime)
				return
			}
			must(t, err)
			ended(t, out)
			serve(t, l, sb.ID, "0.0.0.0:8080")
			ws, _, err := websocket.Dial(ctx, strings.Replace(l.tcp, "http", "ws", 1)+"/ws", &websocket.DialOptions{
				Host: "8080-" + sb.ID + ".localhost", HTTPHeader: http.Header{"X-Api-Key": {l.key}},
			})
			must(t, err)
			defer ws.CloseNow()
			out, err = l.cl.Fork(ctx, sb.ID, wire.Fork{Count: 3})
			must(t, err)
			ended(t, out)
			if out.Kind != sandbox.SnapshotFull {
				t.Errorf("the copies are of kind %q", out.Kind)
			}
			// The source's connections go on.
			must(t, ws.Write(ctx, websocket.MessageText, []byte("still here")))
			if _, msg, err := ws.Read(ctx); err != nil || string(msg) != "still here" {
				t.Errorf("the source's WebSocket: %q, %v", msg, err)
			}
			// Listeners listen, in each copy and in copies of copies.
			child := out.Forks[0].Sandbox.ID
			deeper, err := l.cl.Fork(ctx, child, wire.Fork{})
			must(t, err)
			ended(t, deeper)
			for _, f := range append(out.Forks, deeper.Forks...) {
				a := send(t, http.DefaultClient, "POST", l.tcp+"/", http.Header{
					"Host": {"8080-" + f.Sandbox.ID + ".localhost"}, "X-Api-Key": {l.key},
				}, strings.NewReader("copy"))
				var s said
				if err := json.Unmarshal(a.body, &s); err != nil || s.Body != "copy" {
					t.Errorf("the server in a copy: %d %s", a.status, a.body)
				}
			}
			nodes, err := l.cl.Tree(ctx, sb.ID)
			must(t, err)
			if n := len(nodes); n < 5 {
				t.Errorf("the tree has %d nodes: %+v", n, nodes)
			}
			l.verify(t)
		})
	}
}
