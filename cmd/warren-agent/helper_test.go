package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// helperEnv makes the test binary play a part inside a sandbox.
const helperEnv = "WARREN_AGENT_HELPER"

func TestMain(m *testing.M) {
	if part := os.Getenv(helperEnv); part != "" {
		if err := play(part, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, part+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// gapMin is from which length on the parts tell that they did not run.
const gapMin = 100 * time.Millisecond

// gaps tells on standard output when it was not called for long.
type gaps struct {
	name string
	last time.Time
}

func (g *gaps) tick() {
	// One reading of one clock: a stop between the wall clock's and the monotonic
	// one's would be a gap that ends before it begins.
	now := time.Now().Round(0)
	if !g.last.IsZero() && now.Sub(g.last) >= gapMin {
		fmt.Printf("gap %s %d %d\n", g.name, g.last.UnixNano(), now.UnixNano())
	}
	g.last = now
}

func play(part string, args []string) error {
	n := 1
	if len(args) > 0 {
		n, _ = strconv.Atoi(args[0])
	}
	switch part {
	case "spin": // n threads that do nothing but run
		for i := range n {
			go func() {
				runtime.LockOSThread()
				g := gaps{name: "spin" + strconv.Itoa(i)}
				fmt.Println("up", g.name)
				for {
					g.tick()
					time.Sleep(50 * time.Microsecond)
				}
			}()
		}
		select {}
	case "fork": // n threads that start programs, by vfork
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				g := gaps{name: "fork" + strconv.Itoa(i)}
				fmt.Println("up", g.name)
				for {
					g.tick()
					if out, err := exec.Command("/bin/echo", "ok").CombinedOutput(); err != nil || string(out) != "ok\n" {
						fmt.Println("FAIL", g.name, err, string(out))
						os.Exit(1)
					}
				}
			})
		}
		wg.Wait()
	case "wait": // a parent that looks for stops of its children
		sleeper := exec.Command("/bin/sleep", "1000")
		if err := sleeper.Start(); err != nil {
			return err
		}
		stopped := exec.Command("/bin/sleep", "1000")
		if err := stopped.Start(); err != nil {
			return err
		}
		syscall.Kill(stopped.Process.Pid, syscall.SIGSTOP)
		var ws syscall.WaitStatus
		if pid, err := syscall.Wait4(stopped.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || pid != stopped.Process.Pid || !ws.Stopped() {
			return fmt.Errorf("wait for the stop: %d %v %v", pid, ws, err)
		}
		fmt.Println("up wait", sleeper.Process.Pid, stopped.Process.Pid)
		for {
			pid, err := syscall.Wait4(-1, &ws, syscall.WUNTRACED|unix.WCONTINUED, nil)
			if err == syscall.EINTR {
				continue
			}
			fmt.Printf("saw %d %#x %v\n", pid, int(ws), err)
			if err != nil {
				return err
			}
		}
	}
	return nil
}
