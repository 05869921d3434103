package fault

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

var testPoint = Register("fault.test")

func TestHitKillsAtTheArmedHit(t *testing.T) {
	if os.Getenv("WARREN_FAULT_TEST_CHILD") == "arm" {
		if !Arm("fault.test", 2) || Arm("fault.none", 1) {
			os.Exit(1)
		}
	}
	if os.Getenv("WARREN_FAULT_TEST_CHILD") != "" {
		for range 3 {
			os.Stdout.WriteString("x")
			testPoint.Hit()
		}
		return
	}
	for _, tc := range []struct {
		arm, out string
		killed   bool
	}{
		{"arm", "xx", true},
		{"", "xxx", false},
		{"fault.other", "xxx", false},
		{"fault.test", "x", true},
		{"fault.test:2", "xx", true},
		{"fault.test:0", "xxx", false},
		{"fault.test:4", "xxx", false},
	} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestHitKillsAtTheArmedHit$")
		cmd.Env = append(os.Environ(), Env+"="+tc.arm, "WARREN_FAULT_TEST_CHILD=1")
		if tc.arm == "arm" {
			cmd.Env = append(os.Environ(), "WARREN_FAULT_TEST_CHILD=arm")
		}
		out, err := cmd.Output()
		got := strings.TrimSuffix(string(out), "PASS\n")
		if got != tc.out {
			t.Errorf("%q: printed %q, want %q", tc.arm, got, tc.out)
		}
		ws := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if killed := ws.Signaled() && ws.Signal() == syscall.SIGKILL; killed != tc.killed {
			t.Errorf("%q: killed is %v, want %v (%v)", tc.arm, killed, tc.killed, err)
		}
	}
}

func TestTrace(t *testing.T) {
	var got []string
	Trace(func(name string) { got = append(got, name) })
	testPoint.Hit()
	Trace(nil)
	testPoint.Hit()
	if strings.Join(got, " ") != "fault.test" {
		t.Errorf("traced %v", got)
	}
}
