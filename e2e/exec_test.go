package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/warrenhq/warren/e2e/pattern"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestCommands runs commands that end in every way, by both ways of the API
// and by the command line.
func TestCommands(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		l.sh(t, sb.ID, "echo text > /tmp/plain; printf '\\177ELF\\002junk' > /tmp/junk; chmod 755 /tmp/junk")
		for _, c := range []struct {
			name string
			argv []string
			code int    // of the buffered exec, where it runs at all
			cli  int    // of the command line
			sig  string // signal
			fail sandbox.Code
		}{
			{name: "exit 0", argv: []string{"true"}},
			{name: "exit 3", argv: []string{"sh", "-c", "exit 3"}, code: 3, cli: 3},
			{name: "exit 255", argv: []string{"sh", "-c", "exit 255"}, code: 255, cli: 255},
			{name: "terminated", argv: []string{"sh", "-c", "kill -TERM $$"}, code: 143, cli: 143, sig: "SIGTERM"},
			{name: "killed", argv: []string{"sh", "-c", "kill -KILL $$"}, code: 137, cli: 137, sig: "SIGKILL"},
			{name: "segmentation fault", argv: []string{"sh", "-c", "kill -SEGV $$"}, code: 139, cli: 139, sig: "SIGSEGV"},
			{name: "real-time signal", argv: []string{"sh", "-c", "kill -40 $$"}, code: 168, cli: 168, sig: "signal 40"},
			{name: "not found", argv: []string{"no-such-program"}, cli: 127, fail: sandbox.CodeInvalid},
			{name: "path not found", argv: []string{"/no/such/program"}, cli: 127, fail: sandbox.CodeInvalid},
			{name: "not executable", argv: []string{"/tmp/plain"}, cli: 126, fail: sandbox.CodeInvalid},
			{name: "a directory", argv: []string{"/tmp"}, cli: 126, fail: sandbox.CodeInvalid},
			{name: "no program", argv: []string{"/tmp/junk"}, cli: 126, fail: sandbox.CodeInvalid},
			{name: "shell's not found", argv: []string{"sh", "-c", "no-such-program"}, code: 127, cli: 127},
			{name: "NUL in an argument", argv: []string{"echo", "a\x00b"}, cli: -1, fail: sandbox.CodeInvalid},
		} {
			t.Run(c.name, func(t *testing.T) {
				res, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: c.argv}})
				switch {
				case c.fail != "":
					wantError(t, err, c.fail)
				case err != nil:
					t.Errorf("exec: %v", err)
				case res.ExitCode != c.code || res.Signal != c.sig:
					t.Errorf("exec: exit code %d, signal %q; want %d, %q", res.ExitCode, res.Signal, c.code, c.sig)
				}
				if c.cli < 0 { // a command line cannot carry it
					_, err := l.cl.Start(t.Context(), sb.ID, client.Command{Args: c.argv})
					wantError(t, err, c.fail)
					return
				}
				cli := l.cli(t, append([]string{"exec", sb.ID, "--"}, c.argv...)...)
				if cli.code != c.cli {
					t.Errorf("warren exec: exit %d, want %d: %s", cli.code, c.cli, cli.stderr)
				}
			})
		}
		t.Run("odd arguments", func(t *testing.T) {
			args := []string{"", " ", "-x", "--", "a\nb", "\xff\xfe", "$HOME", strings.Repeat("y", 100_000)}
			res := l.cli(t, append([]string{"exec", sb.ID, "--", "inside", "args"}, args[:5]...)...)
			var got []string
			if err := json.Unmarshal(res.stdout, &got); err != nil || strings.Join(got, "|") != strings.Join(args[:5], "|") {
				t.Errorf("the command line carried %q to %q: %s", args[:5], got, res.stderr)
			}
			// No UTF-8 is no text: refused, and not changed on the way.
			res = l.cli(t, "exec", sb.ID, "--", "inside", "args", args[5])
			if res.code != 125 || !strings.Contains(string(res.stderr), "UTF-8") {
				t.Errorf("an argument of %q: exit %d, %q, %q", args[5], res.code, res.stdout, res.stderr)
			}
			a := l.raw(t, "POST", "/v1/sandboxes/"+sb.ID+"/exec", http.Header{"Content-Type": {"application/json"}}, strings.NewReader("{\"cmd\":[\"echo\",\"\xff\"]}"))
			a.wantError(t, sandbox.CodeInvalid, "UTF-8")
			out := l.run(t, sb.ID, "inside", "args", args[6], args[7])
			if err := json.Unmarshal([]byte(out), &got); err != nil || got[1] != args[7] {
				t.Errorf("the API did not carry a large argument (%v)", err)
			}
		})
		t.Run("bytes", func(t *testing.T) {
			want := pattern.AllBytes()
			argv := []string{"inside", "allbytes"}
			res := l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: argv}})
			if !bytes.Equal(res.OutBytes(), want) || !bytes.Equal(res.ErrBytes(), want) || res.Stdout != nil {
				t.Errorf("the buffered exec gives\n%q\n%q", res.OutBytes(), res.ErrBytes())
			}
			var out, errs bytes.Buffer
			r, err := l.cl.Start(t.Context(), sb.ID, client.Command{Args: argv, Stdout: &out, Stderr: &errs})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.Wait(t.Context()); err != nil || !bytes.Equal(out.Bytes(), want) || !bytes.Equal(errs.Bytes(), want) {
				t.Errorf("the stream gives %v\n%q\n%q", err, out.Bytes(), errs.Bytes())
			}
			cli := l.cli(t, "exec", sb.ID, "--", "inside", "allbytes")
			if !bytes.Equal(cli.stdout, want) || !bytes.Equal(cli.stderr, want) {
				t.Errorf("the command line gives\n%q\n%q", cli.stdout, cli.stderr)
			}
			// And the way in.
			cli = l.cliIn(t, bytes.NewReader(want), "exec", sb.ID, "--", "cat")
			if !bytes.Equal(cli.stdout, want) {
				t.Errorf("through cat come\n%q", cli.stdout)
			}
			back := l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"cat"}}, StdinBase64: want})
			if !bytes.Equal(back.OutBytes(), want) {
				t.Errorf("through the buffered exec's cat come\n%q", back.OutBytes())
			}
		})
		t.Run("unknown user", func(t *testing.T) {
			_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}, User: "nobody-here"})
			wantError(t, err, sandbox.CodeInvalid, "nobody-here")
			cli := l.cli(t, "exec", "-u", "nobody-here", sb.ID, "--", "true")
			if cli.code != 125 || !strings.Contains(string(cli.stderr), "nobody-here") {
				t.Errorf("warren exec: exit %d, %s", cli.code, cli.stderr)
			}
			if out := strings.TrimSpace(string(l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"id", "-u"}}, User: "user"}).OutBytes())); out != "1000" {
				t.Errorf("as user the id is %q", out)
			}
			_, err = l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: runtime, User: "nobody-here"})
			wantError(t, err, sandbox.CodeInvalid, "nobody-here")
		})
		t.Run("missing directory", func(t *testing.T) {
			_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}, Cwd: "/no/such"})
			if code := sandbox.CodeOf(err); code != sandbox.CodeInvalid && code != sandbox.CodeNotFound {
				t.Errorf("the error is %v (%s)", err, code)
			} else if !strings.Contains(err.Error(), "/no/such") {
				t.Errorf("the error does not name the directory: %v", err)
			}
		})
		t.Run("timeout of a command", func(t *testing.T) {
			res := l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sh", "-c", "echo before; sleep 1000"}}, Timeout: 0.5})
			if !res.TimedOut || res.ExitCode != 124 || string(res.OutBytes()) != "before\n" {
				t.Errorf("it ended with %d, timed out %v, %q", res.ExitCode, res.TimedOut, res.OutBytes())
			}
			if !eventually(func() bool { return !strings.Contains(l.run(t, sb.ID, "ps"), "sleep 1000") }, longest) {
				t.Errorf("the command still runs:\n%s", l.run(t, sb.ID, "ps"))
			}
		})
		t.Run("client goes away", func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				_, err := l.cl.Exec(ctx, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sleep", "2000"}}})
				done <- err
			}()
			if !eventually(func() bool { return strings.Contains(l.run(t, sb.ID, "ps"), "sleep 2000") }, longest) {
				t.Error("the command does not come to run")
			}
			cancel()
			<-done
			if !eventually(func() bool { return !strings.Contains(l.run(t, sb.ID, "ps"), "sleep 2000") }, longest) {
				t.Errorf("nobody waits for the command, and it still runs:\n%s", l.run(t, sb.ID, "ps"))
			}
		})
		t.Run("truncated output", func(t *testing.T) {
			res := l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"inside", "spew", "3000000"}}, MaxOutput: 1000})
			if !res.Truncated || len(res.OutBytes()) != 1000 || res.ExitCode != 0 {
				t.Errorf("%d bytes, truncated %v, exit %d", len(res.OutBytes()), res.Truncated, res.ExitCode)
			}
		})
	})
	t.Run("run", func(t *testing.T) {
		res := l.cliIn(t, strings.NewReader("in"), "run", "--template", "tiny", "--mem", "64", "--net", "none", "--", "sh", "-c", "cat; echo err >&2; exit 42")
		if res.code != 42 || string(res.stdout) != "in" || string(res.stderr) != "err\n" {
			t.Errorf("exit %d, %q, %q", res.code, res.stdout, res.stderr)
		}
		res = l.cli(t, "run", "--template", "nothing", "--", "true")
		if res.code != 125 || !strings.Contains(string(res.stderr), "nothing") {
			t.Errorf("of an unknown template: exit %d, %q", res.code, res.stderr)
		}
		if left := l.list(t, client.Filter{Live: true}); len(left) > 2 {
			t.Errorf("run left sandboxes: %d live", len(left))
		}
	})
	t.Run("ended sandbox", func(t *testing.T) {
		sb := l.create(t, wire.CreateSandbox{Runtime: "container"})
		if err := l.cl.Kill(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
		wantError(t, err, sandbox.CodeConflict, sb.ID, "killed_by_user")
		_, err = l.cl.Start(t.Context(), sb.ID, client.Command{Args: []string{"true"}})
		wantError(t, err, sandbox.CodeConflict, sb.ID)
		_, err = l.cl.SetTimeout(t.Context(), sb.ID, longest)
		wantError(t, err, sandbox.CodeConflict, sb.ID)
		l.raw(t, "GET", "/v1/sandboxes/"+sb.ID+"/files?path=/etc/passwd", http.Header{}, nil).wantError(t, sandbox.CodeConflict, sb.ID)
	})
}
