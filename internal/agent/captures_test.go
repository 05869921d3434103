package agent_test

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agent/agenttest"
	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// capturable is an agent that was initialized and frozen, with the token "one".
func capturable(t *testing.T) (*agenttest.Agent, *agentclient.Client) {
	t.Helper()
	a := agenttest.Start(t)
	req := agentclient.InitRequest{AccessToken: "one", SandboxID: "a", Hostname: "a", EnvVars: map[string]string{"KEEP": "k", "SECRET": "s"}}
	if err := a.Client(t, "").Init(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	c := a.Client(t, "one")
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	return a, c
}

func restoredRequest(id string) agentclient.RestoredRequest {
	var r agentclient.RestoredRequest
	r.AccessToken, r.SandboxID, r.Hostname, r.Timestamp = "two", id, id, time.Now()
	return r
}

func TestRestored(t *testing.T) {
	a, c := capturable(t)
	if err := a.Client(t, "x").Freeze(t.Context()); sandbox.CodeOf(err) != sandbox.CodeUnauthenticated {
		t.Errorf("freeze with a wrong token: %v", err)
	}
	if err := a.Client(t, "x").Thaw(t.Context()); sandbox.CodeOf(err) != sandbox.CodeUnauthenticated {
		t.Errorf("thaw with a wrong token: %v", err)
	}
	if _, err := c.Stats(t.Context()); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
		t.Errorf("frozen, stats: %v", err)
	}
	machine, generation := read(t, a.Etc+"/machine-id"), read(t, a.Run+"/warren/generation")
	bad := restoredRequest("b")
	bad.Hostname = "not valid"
	if err := c.Restored(t.Context(), bad); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("a wrong hostname: %v", err)
	}
	if !a.Freezer.Frozen() {
		t.Fatal("thawed after a failure")
	}
	r := restoredRequest("b")
	r.DropEnv = []string{"SECRET"}
	if err := c.Restored(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if a.Freezer.Frozen() || a.Freezer.Signals.Load() != 1 {
		t.Errorf("frozen %v, signals %d", a.Freezer.Frozen(), a.Freezer.Signals.Load())
	}
	if err := c.Restored(t.Context(), r); sandbox.CodeOf(err) != sandbox.CodeUnauthenticated {
		t.Errorf("again with the capture's token: %v", err)
	}
	if read(t, a.Etc+"/machine-id") == machine || read(t, a.Run+"/warren/generation") == generation || read(t, a.Etc+"/hostname") != "b\n" {
		t.Error("the identity is the capture's")
	}
	c = a.Client(t, "two")
	res, err := c.Run(t.Context(), agentclient.Command{Path: "/bin/sh", Args: []string{"-c", "echo $KEEP-$SECRET-$E2B_SANDBOX_ID"}, User: "root"})
	if err != nil || strings.TrimSpace(string(res.Stdout)) != "k--b" {
		t.Errorf("%+v %v", res, err)
	}
	// Waking up, it is the same machine.
	machine, generation = read(t, a.Etc+"/machine-id"), read(t, a.Run+"/warren/generation")
	wake := restoredRequest("b")
	wake.AccessToken, wake.Wake = "", true
	if err := c.Restored(t.Context(), wake); err != nil {
		t.Fatal(err)
	}
	if read(t, a.Etc+"/machine-id") != machine || read(t, a.Run+"/warren/generation") == generation {
		t.Error("woken: another machine-id, or the same generation")
	}
}

func TestRestoredDropsConnections(t *testing.T) {
	a, c := capturable(t)
	if err := c.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A stream of the old life.
	up, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := a.Client(t, "one").Exec(t.Context(), agentclient.Command{Path: "/bin/sleep", Args: []string{"1000"}, User: "root"},
			agentclient.Output{Start: func(uint32) error { close(up); return nil }})
		ended <- err
	}()
	<-up
	if err := c.Restored(t.Context(), restoredRequest("b")); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the stream ended as if the command had")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the stream hangs")
	}
	// Its command goes on.
	if list, err := a.Client(t, "two").Processes(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%v %v", list, err)
	}
}

func TestRestoredHooks(t *testing.T) {
	a, c := capturable(t)
	dir := filepath.Join(a.Etc, "warren/restored.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	hook := func(name, script string, mode os.FileMode) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(a.Home, "out")
	hook("10-a", `echo "a $WARREN_SANDBOX_ID $WARREN_WAKE" >>`+out, 0o755)
	hook("20-no", "echo never >>"+out, 0o644)
	hook("30-b", "echo why it failed; exit 3", 0o755)
	// A hook that fails leaves everything stopped, and the call can be repeated.
	err := c.Restored(t.Context(), restoredRequest("b"))
	if err == nil || !strings.Contains(err.Error(), "why it failed") || !a.Freezer.Frozen() {
		t.Fatalf("frozen %v: %v", a.Freezer.Frozen(), err)
	}
	hook("30-b", "sleep 3 & exit 0", 0o755)
	hook("40-c", "echo c >>"+out, 0o777)
	if err := c.Restored(t.Context(), restoredRequest("b")); err == nil || !strings.Contains(err.Error(), "others than root") {
		t.Fatalf("a hook that anybody can write to: %v", err)
	}
	hook("40-c", "echo c >>"+out, 0o755)
	if err := c.Restored(t.Context(), restoredRequest("b")); err != nil {
		t.Fatal(err)
	}
	if got := read(t, out); got != "a b false\na b false\nc\n" {
		t.Errorf("the hooks wrote %q", got)
	}
}

func TestRestoredHostKeys(t *testing.T) {
	if _, err := exec.LookPath("ssh-keygen"); err != nil {
		t.Skip("needs ssh-keygen: install openssh-client")
	}
	a, c := capturable(t)
	key := filepath.Join(a.Etc, "ssh/ssh_host_ed25519_key")
	if err := os.MkdirAll(filepath.Dir(key), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	old, oldPub := read(t, key), read(t, key+".pub")
	if err := c.Restored(t.Context(), restoredRequest("b")); err != nil {
		t.Fatal(err)
	}
	if read(t, key) == old || read(t, key+".pub") == oldPub {
		t.Error("the keys are the capture's")
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	// A woken one keeps its own.
	old = read(t, key)
	c = a.Client(t, "two")
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	wake := restoredRequest("b")
	wake.Wake = true
	if err := c.Restored(t.Context(), wake); err != nil {
		t.Fatal(err)
	}
	if read(t, key) != old {
		t.Error("woken, it has other keys")
	}
}

// A sandbox that boots with a copy of another's disk is another machine: what
// is on the disk of the other's identity is made anew.
func TestInitCopied(t *testing.T) {
	a := agenttest.Start(t)
	hooks, out := filepath.Join(a.Etc, "warren/restored.d"), filepath.Join(a.Home, "out")
	key := filepath.Join(a.Etc, "ssh/ssh_host_ed25519_key")
	bus := filepath.Join(a.Var, "lib/dbus")
	for _, dir := range []string{hooks, filepath.Dir(key), bus, filepath.Join(a.Run, "warren")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const old = "00112233445566778899aabbccddeeff\n"
	files := []string{filepath.Join(a.Etc, "machine-id"), filepath.Join(bus, "machine-id"), filepath.Join(a.Run, "warren/generation")}
	if _, err := exec.LookPath("ssh-keygen"); err == nil {
		if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for _, f := range files {
		if err := os.WriteFile(f, []byte(old), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(hooks, "10"), []byte("#!/bin/sh\necho $WARREN_SANDBOX_ID $WARREN_WAKE >"+out+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	oldKey, _ := os.ReadFile(key)
	req := agentclient.InitRequest{AccessToken: "one", SandboxID: "b", Hostname: "b", Copied: true}
	if err := a.Client(t, "").Init(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if read(t, f) == old {
			t.Errorf("%s is the other's", f)
		}
	}
	if read(t, files[0]) != read(t, files[1]) {
		t.Error("D-Bus has another machine-id")
	}
	if oldKey != nil && read(t, key) == string(oldKey) {
		t.Error("the SSH host key is the other's")
	}
	if got := read(t, out); got != "b false\n" {
		t.Errorf("the hook wrote %q", got)
	}
}

// One that boots with a template's disk keeps the keys that are in it.
func TestInitKeepsHostKeys(t *testing.T) {
	a := agenttest.Start(t)
	key := filepath.Join(a.Etc, "ssh/ssh_host_ed25519_key")
	if err := os.MkdirAll(filepath.Dir(key), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, []byte("a key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.Client(t, "").Init(t.Context(), agentclient.InitRequest{AccessToken: "one", SandboxID: "b"}); err != nil {
		t.Fatal(err)
	}
	if read(t, key) != "a key" {
		t.Error("the template's key was replaced")
	}
}

// TestNothingIsAnsweredWhileFrozen writes a file whose last byte comes when the
// processes are stopped: the capture that is made then may lack it, so the
// client is told when they go on, and no sooner.
func TestNothingIsAnsweredWhileFrozen(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "")
	path := filepath.Join(a.Home, "late")
	body, end := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- c.WriteFile(t.Context(), path, "", body, 0) }()
	if _, err := end.Write([]byte("all of ")); err != nil { // it is under way
		t.Fatal(err)
	}
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := end.Write([]byte("it")); err != nil {
		t.Fatal(err)
	}
	end.Close()
	wait(t, func() bool { _, err := os.Stat(path); return err == nil })
	select {
	case err := <-done:
		t.Fatalf("it was answered while frozen: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := c.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || read(t, path) != "all of it" {
		t.Errorf("%v, %q", err, read(t, path))
	}
}
