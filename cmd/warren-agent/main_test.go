package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// buildAgent builds the agent as it is shipped.
func buildAgent(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "warren-agent")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return bin
}

// startPID1 builds the agent and runs it as PID 1 of new PID, mount and UTS
// namespaces with a /proc of their own.
func startPID1(t *testing.T) (*exec.Cmd, *agentclient.Client) {
	t.Helper()
	testenv.Root(t)
	unshare := testenv.Command(t, "unshare", "install util-linux")
	bin := buildAgent(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	cmd := exec.Command(unshare, "--fork", "--pid", "--mount-proc", "--uts", "--kill-child", bin, "-port", port)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	c := agentclient.New(func(ctx context.Context, p int) (net.Conn, error) {
		if p == sandbox.AgentPort {
			return new(net.Dialer).DialContext(ctx, "tcp", "127.0.0.1:"+port)
		}
		return nil, fmt.Errorf("port %d", p)
	}, "")
	t.Cleanup(c.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := c.WaitReady(ctx); err != nil {
		t.Skip("cannot run the agent in namespaces here:", err)
	}
	return cmd, c
}

func TestPID1(t *testing.T) {
	_, c := startPID1(t)
	s, err := c.Stats(t.Context())
	if err != nil || s.PID != 1 {
		t.Fatalf("%+v %v", s, err)
	}
	// Commands with known ends, while others leave orphans behind.
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 150 {
				want := (w*150 + i) % 250
				r, err := c.Run(t.Context(), agentclient.Command{Path: "/bin/sh", Args: []string{"-c", fmt.Sprintf("(sleep 0.02 >/dev/null 2>&1 &); (true &); echo %d; exit %d", i, want)}, User: "root"})
				if err != nil || r.ExitCode != want || string(r.Stdout) != strconv.Itoa(i)+"\n" {
					t.Errorf("%d: %+v %v", i, r, err)
					return
				}
			}
		})
	}
	wg.Wait()
	// All orphans are reaped: besides PID 1 there is the command that looks.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		r, err := c.Run(t.Context(), agentclient.Command{Path: "/bin/sh", Args: []string{"-c", "ls -d /proc/[0-9]*; cat /proc/[0-9]*/stat"}, User: "root"})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(r.Stdout), ") Z ") && strings.Count(string(r.Stdout), "/proc/") <= 4 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes are left:\n%s", r.Stdout)
		}
	}
	if s, err = c.Stats(t.Context()); err != nil || s.Reaped < 1200 || s.Processes != 0 {
		t.Errorf("%+v %v", s, err)
	}
	t.Logf("%d commands, %d orphans, RSS %d KiB", s.Started, s.Reaped, s.RSSBytes>>10)
}

// Large files cost no memory.
func TestConstantMemory(t *testing.T) {
	_, c := startPID1(t)
	dir, err := os.MkdirTemp("/dev/shm", "warren-agent-test-")
	if err != nil {
		dir = t.TempDir()
	}
	defer os.RemoveAll(dir)
	before, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const size = 512 << 20
	began := time.Now()
	if err := c.WriteFile(t.Context(), dir+"/f", "root", io.LimitReader(zeros{}, size), 0); err != nil {
		t.Fatal(err)
	}
	up := time.Since(began)
	began = time.Now()
	r, n, err := c.ReadFile(t.Context(), dir+"/f", "root")
	if err != nil || n != size {
		t.Fatal(n, err)
	}
	got, err := io.Copy(io.Discard, r)
	r.Close()
	if err != nil || got != size {
		t.Fatal(got, err)
	}
	down := time.Since(began)
	tr, err := c.GetTar(t.Context(), dir, "root")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, tr); err != nil {
		t.Fatal(err)
	}
	tr.Close()
	var out int64
	if _, err := c.Exec(t.Context(), agentclient.Command{Path: "cat", Args: []string{dir + "/f"}, User: "root"}, agentclient.Output{Stdout: func(p []byte) error { out += int64(len(p)); return nil }}); err != nil || out != size {
		t.Fatal(out, err)
	}
	after, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up %.0f MB/s, down %.0f MB/s, RSS %d -> %d KiB", size/up.Seconds()/1e6, size/down.Seconds()/1e6, before.RSSBytes>>10, after.RSSBytes>>10)
	if grew := after.RSSBytes - before.RSSBytes; grew > 24<<20 {
		t.Errorf("the agent grew by %d MiB", grew>>20)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// SIGTERM to PID 1 ends the commands and then the sandbox.
func TestTerminate(t *testing.T) {
	cmd, c := startPID1(t)
	ended := make(chan agentclient.Result, 1)
	running := make(chan struct{})
	go func() {
		r, err := c.Exec(context.Background(), agentclient.Command{Path: "/bin/sh", Args: []string{"-c", "trap 'exit 42' TERM; while :; do sleep 0.02; done"}, User: "root"},
			agentclient.Output{Start: func(uint32) error { close(running); return nil }})
		if err != nil {
			t.Error(err)
		}
		ended <- r
	}()
	<-running
	time.Sleep(200 * time.Millisecond) // let the trap be set
	// unshare's child is the agent.
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	agent, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(agent, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if r := <-ended; r.ExitCode != 42 {
		t.Errorf("the command ended with %+v", r)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the agent ended with %v", err)
	}
}
