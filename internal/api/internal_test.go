package api

import (
	"strconv"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestEveryCodeHasAStatus(t *testing.T) {
	for _, c := range []sandbox.Code{
		sandbox.CodeInvalid, sandbox.CodeUnauthenticated, sandbox.CodeForbidden, sandbox.CodeNotFound, sandbox.CodeExists, sandbox.CodeConflict,
		sandbox.CodeUnsupported, sandbox.CodeUnavailable, sandbox.CodeNoCapacity, sandbox.CodeDiskFull, sandbox.CodeTooLarge, sandbox.CodeTimeout,
		sandbox.CodeCanceled, sandbox.CodeBadTemplate, sandbox.CodeBuildFailed, sandbox.CodeInternal,
	} {
		if s, ok := statuses[c]; !ok || s < 400 {
			t.Errorf("%s: %d", c, s)
		}
	}
}

func TestAgentPathOpen(t *testing.T) {
	for path, want := range map[string]bool{
		"/process.Process/Start": true, "/filesystem.Filesystem/Stat": true, "/files": true, "/health": true, "/tar": true,
		"/init": false, "/tunnel": false, "/process.Process/": false, "/process.Process/a/b": false, "/filesX": false,
		"/files/../init": false, "": false, "/other.Service/X": false,
	} {
		if got := agentPathOpen(path); got != want {
			t.Errorf("%q: %v", path, got)
		}
	}
}

func TestExitStatus(t *testing.T) {
	for _, tc := range []struct {
		code   int
		exited bool
		status string
		want   int
		signal string
	}{
		{0, true, "exit status 0", 0, ""}, {255, true, "exit status 255", 255, ""},
		{-1, false, "signal: killed", 137, "SIGKILL"}, {-1, false, "signal: segmentation fault (core dumped)", 139, "SIGSEGV"},
		{-1, false, "signal: hangup", 129, "SIGHUP"}, {-1, false, "signal: nonsense\xff", 128, "nonsense?"}, {-1, false, "", 255, ""},
		{300, true, "exit status 300", 44, ""},
	} {
		if got, signal := wire.ExitStatus(tc.code, tc.exited, tc.status); got != tc.want || signal != tc.signal {
			t.Errorf("%+v: %d, %q", tc, got, signal)
		}
	}
}

func FuzzLastEventID(f *testing.F) {
	for _, s := range []string{"", "0", "-1", "+1", "9223372036854775807", "9223372036854775808", " 7 ", "\x00", "1e3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseLastEventID(s)
		if err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeInvalid {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		if n < -1 {
			t.Fatalf("%q: %d", s, n)
		}
		if n >= 0 {
			if again, err := parseLastEventID(strconv.FormatInt(n, 10)); err != nil || again != n {
				t.Fatalf("%q: %d does not survive: %d, %v", s, n, again, err)
			}
		}
	})
}
