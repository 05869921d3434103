package network

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

func newMountNS() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
}

// helper is the child of the crash test: a daemon's whole life with its
// network. It is killed at the point that the parent armed.
func helper() int {
	if err := helperLife(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func helperLife() error {
	var cfg Config
	if err := json.Unmarshal([]byte(os.Getenv(envHelper)), &cfg); err != nil {
		return err
	}
	ctx := context.Background()
	n, err := Open(ctx, cfg)
	if err != nil {
		return err
	}
	rules := egress([]sandbox.EgressRule{domain("internal.example", 0)}, []sandbox.EgressRule{cidr("9.9.9.9/32", 0)})
	var links []sandbox.Link
	for range 3 {
		l, err := n.Acquire(ctx, sandbox.NewID(), rules)
		if err != nil {
			return err
		}
		links = append(links, l)
	}
	if err := n.SetPolicy(ctx, links[0], egress(nil, []sandbox.EgressRule{domain("x.example", 0)})); err != nil {
		return err
	}
	if err := n.Release(ctx, links[1]); err != nil {
		return err
	}
	if err := n.Close(); err != nil {
		return err
	}
	// The daemon starts again: one sandbox lives, one does not.
	if n, err = Open(ctx, cfg); err != nil {
		return err
	}
	if err := n.Adopt(ctx, links[0], "sbxadopted", rules); err != nil {
		return err
	}
	if err := n.Sweep(ctx, map[int]sandbox.ID{links[0].Slot: "sbxadopted"}); err != nil {
		return err
	}
	if err := n.Release(ctx, links[0]); err != nil {
		return err
	}
	return n.Close()
}

// TestKilledAnywhere kills a daemon at every point of its network's life, and
// sometimes at a later hit, and wants the next daemon to bring the host back.
func TestKilledAnywhere(t *testing.T) {
	newWorld(t)
	_, addr := newUpstream(t)
	killed := 0
	for _, point := range fault.Points() {
		if !strings.HasPrefix(point, "network.") {
			continue
		}
		for _, hit := range []string{"", ":2", ":4"} {
			cfg := testConfig(t)
			cfg.Resolvers = []netip.AddrPort{addr}
			data, err := json.Marshal(cfg)
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), envHelper+"="+string(data), fault.Env+"="+point+hit)
			out, err := cmd.CombinedOutput()
			ws := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if ws.Signaled() && ws.Signal() == syscall.SIGKILL {
				killed++
			} else if err != nil {
				t.Fatalf("%s%s: %v\n%s", point, hit, err, out)
			} else if hit == "" {
				t.Errorf("%s is never passed", point)
			}
			n, err := Open(t.Context(), cfg)
			if err != nil {
				t.Fatalf("%s%s: the next daemon: %v", point, hit, err)
			}
			if err := n.Sweep(t.Context(), nil); err != nil {
				t.Errorf("%s%s: sweep: %v", point, hit, err)
			}
			l, err := n.Acquire(t.Context(), "sbxafter", egress(nil, nil))
			if err != nil {
				t.Fatalf("%s%s: acquire afterwards: %v", point, hit, err)
			}
			if err := n.Release(t.Context(), l); err != nil {
				t.Errorf("%s%s: release afterwards: %v", point, hit, err)
			}
			if err := n.Close(); err != nil {
				t.Errorf("%s%s: close: %v", point, hit, err)
			}
			for _, left := range leftovers(t, cfg) {
				t.Errorf("%s%s: left on the host: %s", point, hit, left)
			}
		}
	}
	t.Logf("%d kills", killed)
	if killed < 20 {
		t.Errorf("only %d kills", killed)
	}
}
