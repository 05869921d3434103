package daemon

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestRunLeavesNoGoroutine runs the daemon in this process, with a sandbox
// that lives on.
func TestRunLeavesNoGoroutine(t *testing.T) {
	s := newStage(t)
	s.cfg.TLSListen, s.cfg.TLSDomain = "127.0.0.1:0", "box.test"
	before := goleak.IgnoreCurrent()
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan Info, 1), make(chan error, 1)
	go func() { ended <- Run(ctx, s.cfg, nil, func(i Info) { ready <- i }) }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	if _, err := s.client.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: "container"}); err != nil {
		t.Error(err)
	}
	s.client.Close()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	// lxcfs outlives the daemon; the wait for it ends with it.
	goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction("github.com/warrenhq/warren/internal/runtime/container.(*lxcfs).launch.func1"))
	if i := s.start(t).info; i.Adopted != 1 {
		t.Errorf("the next daemon adopted %d", i.Adopted)
	}
	s.verify(t)
}

func TestSocket(t *testing.T) {
	dir := t.TempDir()
	if len(dir) > 80 {
		t.Skip("the temporary directory's name is too long for a socket")
	}
	path := filepath.Join(dir, "s")
	l, err := listenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 || fi.Mode().Type() != os.ModeSocket {
		t.Errorf("the socket is %v, %v", fi, err)
	}
	if _, err := listenUnix(path); sandbox.CodeOf(err) != sandbox.CodeConflict {
		t.Errorf("a second listener got %v", err)
	}
	l.Close()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket outlives its listener: %v", err)
	}
	// A stale one is replaced, one that another program answers on is not.
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listenUnix(path); sandbox.CodeOf(err) != sandbox.CodeConflict {
		t.Errorf("a taken socket gave %v", err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	if l, err = listenUnix(path); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenUnix(path); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("a regular file gave %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "mine" {
		t.Error("the file is gone")
	}
}

func TestConfig(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Config{Agent: self, Runsc: self}.withDefaults()
	if err != nil || c.State != DefaultState || c.Socket != DefaultSocket || c.Listen != DefaultListen || c.Grace != 5*time.Second {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range []Config{
		{Agent: "/nowhere/agent"},
		{Agent: self, Runsc: "/nowhere/runsc"},
		{Agent: self, Socket: "/" + strings.Repeat("s", maxSocket)},
	} {
		if _, err := bad.withDefaults(); sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%+v gave %v", bad, err)
		}
	}
}

func TestStateDirectoryThatOthersMayWrite(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	d := &daemon{cfg: Config{State: dir}}
	if err := d.directories(); sandbox.CodeOf(err) != sandbox.CodeInvalid || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("the error is %v", err)
	}
}
