package e2e

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
)

// screen keeps what a terminal wrote.
type screen struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) has(part string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.text.String(), part)
}

// A terminal that was left is reattached with what it had shown, also after a
// hibernation, by the CLI.
func TestAttach(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	can := l.abilities(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		if res := l.cli(t, "attach", sb.ID); res.code == 0 || !strings.Contains(string(res.stderr), "no command runs") {
			t.Errorf("with nothing to attach to: %d %s", res.code, res.stderr)
		}
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		var shown screen
		run, err := l.cl.Start(ctx, sb.ID, client.Command{Args: []string{"sh"}, TTY: &client.Size{Cols: 80, Rows: 24}, Stdout: &shown})
		must(t, err)
		left := make(chan struct{})
		go func() {
			defer close(left)
			run.Wait(ctx)
		}()
		must(t, run.Type(ctx, []byte("a=kept; echo sh''own\n")))
		if !eventually(func() bool { return shown.has("shown") }, longest) {
			t.Fatal("the terminal shows nothing")
		}
		leave()
		<-left
		if full(can[runtime]) {
			must(t, l.cl.Hibernate(t.Context(), sb.ID))
		}
		var out, errs screen
		cmd := exec.CommandContext(t.Context(), l.bin, "attach", sb.ID)
		cmd.Env = append(os.Environ(), "WARREN_HOST=unix://"+l.socket)
		cmd.Stdout, cmd.Stderr = &out, &errs
		must(t, cmd.Start())
		if !eventually(func() bool { return out.has("shown") }, longest) {
			t.Errorf("attached, it does not show what was there: %q %q", out.text.String(), errs.text.String())
		}
		// Another client ends what the CLI is attached to.
		var other screen
		again, err := l.cl.Attach(t.Context(), sb.ID, run.PID, 0, &other)
		must(t, err)
		go again.Wait(t.Context())
		must(t, again.Type(t.Context(), []byte("echo go-$a-on; exit 7\n")))
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 7 || !out.has("go-kept-on") {
			t.Errorf("it exited with %d and showed %q, %q", code, out.text.String(), errs.text.String())
		}
	})
}
