package reaper

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// helperEnv makes the test binary play a part: the storm must run in a process
// of its own, as a reaper of orphans takes every child of its process.
const helperEnv = "WARREN_REAPER_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) == "storm" {
		if err := storm(); err != nil {
			fmt.Println("FAIL:", err)
			os.Exit(1)
		}
		fmt.Println("ok")
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func attr() *syscall.ProcAttr {
	return &syscall.ProcAttr{Env: []string{"PATH=" + os.Getenv("PATH")}, Files: []uintptr{0, 1, 2}}
}

func TestExitStatus(t *testing.T) {
	r, err := New(false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, code := range []int{0, 1, 7, 126, 255} {
		c, err := r.Start("/bin/sh", []string{"sh", "-c", "exit " + strconv.Itoa(code)}, attr())
		if err != nil {
			t.Fatal(err)
		}
		<-c.Done()
		if got := c.Status().ExitStatus(); got != code {
			t.Errorf("exit %d came back as %d", code, got)
		}
		if err := c.Signal(syscall.SIGKILL); err != ErrEnded {
			t.Errorf("signal after the end: %v, want ErrEnded", err)
		}
	}
}

func TestSignalReachesTheGroup(t *testing.T) {
	r, err := New(false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	pr, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pr.Close()
	a := attr()
	a.Files[1] = pw.Fd()
	c, err := r.Start("/bin/sh", []string{"sh", "-c", "sleep 1000 & echo up; wait"}, a)
	pw.Close()
	if err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(pr)
	if line, _ := br.ReadString('\n'); line != "up\n" {
		t.Fatalf("got %q", line)
	}
	if err := c.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if ws := c.Status(); !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
		t.Errorf("status %v, want killed", ws)
	}
	// sleep held the pipe too: end of file means that it is gone.
	if _, err := br.ReadByte(); err == nil {
		t.Error("more output after the kill")
	}
}

func TestStartErrors(t *testing.T) {
	r, err := New(false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Start("/does/not/exist", []string{"x"}, attr()); err != syscall.ENOENT {
		t.Errorf("got %v, want ENOENT", err)
	}
}

func TestStormOfOrphans(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperEnv+"=storm")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ok") {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// storm starts thousands of short commands with known exit codes from several
// goroutines, some of them failing to start at all, while other commands leave
// orphans behind as fast as they can.
func storm() error {
	r, err := New(true)
	if err != nil {
		return err
	}
	const workers, each = 8, 400
	errs := make(chan error, workers+1)
	stop := make(chan struct{})
	var left sync.WaitGroup
	left.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			// Each leaves 10 orphans that die at once or a little later.
			c, err := r.Start("/bin/sh", []string{"sh", "-c", "for i in 1 2 3 4 5; do (sleep 0.01 &) ; (true &) ; done; exit 3"}, attr())
			if err != nil {
				errs <- err
				return
			}
			<-c.Done()
			if c.Status().ExitStatus() != 3 {
				errs <- fmt.Errorf("orphaner: %v", c.Status())
				return
			}
		}
	})
	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			for i := range each {
				if i%20 == 0 {
					if _, err := r.Start("/does/not/exist", []string{"x"}, attr()); err != syscall.ENOENT {
						errs <- fmt.Errorf("missing program: %v", err)
						return
					}
				}
				want := (w*each + i) % 256
				c, err := r.Start("/bin/sh", []string{"sh", "-c", "exit " + strconv.Itoa(want)}, attr())
				if err != nil {
					errs <- err
					return
				}
				select {
				case <-c.Done():
				case <-time.After(30 * time.Second):
					errs <- fmt.Errorf("pid %d: no end", c.Pid)
					return
				}
				if ws := c.Status(); !ws.Exited() || ws.ExitStatus() != want {
					errs <- fmt.Errorf("pid %d: %v, want exit %d", c.Pid, ws, want)
					return
				}
			}
		})
	}
	work.Wait()
	close(stop)
	left.Wait()
	select {
	case err := <-errs:
		return err
	default:
	}
	// No zombie is left once the last sleepers are over.
	for deadline := time.Now().Add(10 * time.Second); ; {
		left, err := children()
		if err != nil {
			return err
		}
		if left == "" {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("children left: %s", left)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if r.Reaped() == 0 {
		return fmt.Errorf("no orphan was reaped: the test did not test")
	}
	fmt.Printf("%d commands, %d orphans\n", workers*each, r.Reaped())
	r.Close()
	return nil
}

func children() (string, error) {
	var all string
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return "", err
	}
	for _, task := range tasks {
		data, err := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		if err != nil && !os.IsNotExist(err) {
			return "", err
		}
		all += string(data)
	}
	return all, nil
}

func TestOOMScore(t *testing.T) {
	before, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Skip("the kernel tells no oom_score_adj:", err)
	}
	r, err := New(false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	pr, pw, _ := os.Pipe()
	defer pr.Close()
	a := attr()
	a.Files[1] = pw.Fd()
	c, err := r.Start("/bin/cat", []string{"cat", "/proc/self/oom_score_adj"}, a)
	pw.Close()
	if err != nil {
		t.Fatal(err)
	}
	got, _ := bufio.NewReader(pr).ReadString('\n')
	<-c.Done()
	if strings.TrimSpace(got) != strconv.Itoa(commandScore) {
		t.Errorf("the command's score is %q, want %d", got, commandScore)
	}
	if own, _ := os.ReadFile("/proc/self/oom_score_adj"); !bytes.Equal(own, before) {
		t.Errorf("the agent's score is %s after a command, and was %s", own, before)
	}
}
