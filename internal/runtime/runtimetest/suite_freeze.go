package runtimetest

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
)

// testFreeze has the agent stop the commands, of root and of another user, as
// the driver set the agent up.
func testFreeze(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	c := agentclient.New(i.Dial, "")
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	used := func(pid string) time.Duration {
		t.Helper()
		f := strings.Fields(Sh(t, i, "cat /proc/"+pid+"/stat"))
		if len(f) < 15 {
			t.Fatalf("stat of %s: %q", pid, f)
		}
		user, _ := strconv.Atoi(f[13])
		system, _ := strconv.Atoi(f[14])
		return time.Duration(user+system) * 10 * time.Millisecond // USER_HZ is 100
	}
	for _, user := range []string{"root", "1000:1000"} {
		r, err := c.Run(ctx, agentclient.Command{Path: "/bin/sh", Args: []string{"-c", "(while :; do :; done) >/dev/null 2>&1 & echo $!"}, User: user, Cwd: "/"})
		if err != nil || r.ExitCode != 0 {
			t.Fatalf("%s: %+v %v", user, r, err)
		}
		pid := strings.TrimSpace(string(r.Stdout))
		before := used(pid)
		if err := c.Freeze(ctx); err != nil {
			t.Fatalf("%s: %v", user, err)
		}
		if _, _, err := Exec(ctx, i, "true"); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
			t.Errorf("frozen, a command: %v", err)
		}
		time.Sleep(3 * time.Second)
		if err := c.Thaw(ctx); err != nil {
			t.Fatal(err)
		}
		after := used(pid)
		if after-before > time.Second {
			t.Errorf("%s: frozen for 3 s, it used %s of CPU", user, after-before)
		}
		for deadline := time.Now().Add(20 * time.Second); used(pid) == after; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: it does not go on", user)
			}
		}
		Sh(t, i, "kill -9 "+pid)
	}
}
