package forkproof

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// ticker is a process that counts in a file, five times a second.
const ticker = `(i=0; while :; do i=$((i+1)); echo $i >/tmp/warren-tick.new; mv /tmp/warren-tick.new /tmp/warren-tick; sleep 0.2; done) >/dev/null 2>&1 </dev/null & sleep 1; cat /tmp/warren-tick`

func tick(ctx context.Context, sb Sandbox, line string) (int, error) {
	out, err := sh(ctx, sb, line)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(out)
	if err != nil {
		return 0, fmt.Errorf("the counter is %q", out)
	}
	return n, nil
}

// suspend checks that a suspended sandbox runs nothing, and goes on after.
func (s *suite) suspend(ctx context.Context) error {
	const id, name = "suspend", "suspend in RAM"
	s.o.Progress(name)
	sb, err := s.create(ctx, nil, nil)
	if err != nil {
		return err
	}
	defer sb.Kill(ctx)
	start := time.Now()
	before, err := tick(ctx, sb, ticker)
	if err != nil {
		s.add(id, name, start, Unsupported, "no process to suspend: %v", err)
		return nil
	}
	callsErr := startCalls(ctx, sb)
	t := time.Now()
	if err := sb.Suspend(ctx); err != nil {
		s.add(id, name, start, No, "%v", err)
		return nil
	}
	took := time.Since(t)
	ran := int(time.Since(start)/(200*time.Millisecond)) + 2 // the most that it ticked until here
	pause(ctx, 3*time.Second)
	t = time.Now()
	if err := sb.Unsuspend(ctx); err != nil {
		s.add(id, name, start, No, "it cannot go on: %v", err)
		return nil
	}
	back := time.Since(t)
	// 15 ticks are in the 3 s that it was suspended.
	after, err := tick(ctx, sb, "cat /tmp/warren-tick")
	if err == nil && after > before+ran+int(time.Since(t)/(200*time.Millisecond))+2 {
		err = fmt.Errorf("it ran while it was suspended: a counter went from %d to %d", before, after)
	}
	if err == nil {
		var later int
		for end := time.Now().Add(waitLimit); err == nil && later <= after; pause(ctx, 200*time.Millisecond) {
			if time.Now().After(end) || ctx.Err() != nil {
				err = fmt.Errorf("its process stands still afterwards")
				break
			}
			later, err = tick(ctx, sb, "cat /tmp/warren-tick")
		}
	}
	s.verdict(id, name, start, err, "suspended in %d ms, back in %d ms; its process stood still between", took.Milliseconds(), back.Milliseconds())
	s.suspendedCalls(ctx, sb, callsErr)
	return nil
}

// suspendedCalls checks that calls that waited when sb was suspended went on.
func (s *suite) suspendedCalls(ctx context.Context, sb Sandbox, err error) {
	start := time.Now()
	var seen string
	if err == nil {
		if seen, err = endCalls(ctx, sb); err == nil {
			seen, err = JudgeCalls(seen)
		}
	}
	const id, name = "suspend.calls", "calls that wait go on waiting over a suspension"
	if e := (errUntried{}); errors.As(err, &e) {
		s.add(id, name, start, Unsupported, "%s", e.why)
		return
	}
	s.verdict(id, name, start, err, "%s", seen)
}

// disk checks a snapshot of the disk and a sandbox of it.
func (s *suite) disk(ctx context.Context) error {
	const id, name = "capture_disk", "snapshot of the disk"
	s.o.Progress(name)
	sb, err := s.create(ctx, nil, nil)
	if err != nil {
		return err
	}
	defer sb.Kill(ctx)
	start := time.Now()
	err = func() error {
		if _, err := sh(ctx, sb, makeHostKey); err != nil {
			return err
		}
		if _, err := sh(ctx, sb, "mkdir -p /srv/p && echo before >/srv/p/f && ln /srv/p/f /srv/p/h && ln -s f /srv/p/l && rm -rf /var/tmp && head -c 300000 /dev/urandom >/srv/p/big"); err != nil {
			return err
		}
		sum, err := sh(ctx, sb, "md5sum </srv/p/big")
		if err != nil {
			return err
		}
		snap, err := sb.Snapshot(ctx, Disk)
		if err != nil {
			return err
		}
		defer s.p.RemoveSnapshot(context.WithoutCancel(ctx), snap)
		if _, err := sh(ctx, sb, "echo after >/srv/p/f"); err != nil {
			return fmt.Errorf("the source does not go on: %w", err)
		}
		child, err := s.p.FromSnapshot(ctx, snap)
		if err != nil {
			return fmt.Errorf("no sandbox can be made of it: %w", err)
		}
		s.made = append(s.made, child)
		defer child.Kill(ctx)
		got, err := sh(ctx, child, `cat /srv/p/f /srv/p/l /srv/p/h; ls /var/tmp 2>/dev/null || echo gone`)
		if err != nil {
			return err
		}
		if got != "before\nbefore\nbefore\ngone" {
			return fmt.Errorf("its files are %q", got)
		}
		if again, err := sh(ctx, child, "md5sum </srv/p/big"); err != nil || again != sum {
			return fmt.Errorf("a file that was never synced is not the same: %s, then %s (%w)", sum, again, err)
		}
		return otherIdentity(ctx, sb, child)
	}()
	s.verdict(id, name, start, err, "files, links and removals are in a sandbox made of it, unsynced writes too, and nothing later; its identity is its own")
	return nil
}

// makeHostKey makes what a host makes when its SSH server is set up, where the
// template can.
const makeHostKey = `if command -v ssh-keygen >/dev/null 2>&1; then mkdir -p /etc/ssh; [ -e /etc/ssh/ssh_host_ed25519_key ] || ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key; fi`

// otherIdentity checks that nothing that tells a machine from others is the same
// in two.
func otherIdentity(ctx context.Context, one, other Sandbox) error {
	for what, line := range map[string]string{
		"host name":    "hostname 2>/dev/null || cat /proc/sys/kernel/hostname",
		"machine-id":   "cat /etc/machine-id 2>/dev/null || true",
		"generation":   "cat /run/warren/generation 2>/dev/null || true",
		"SSH host key": "cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null || true",
	} {
		a, err := sh(ctx, one, line)
		if err != nil {
			return err
		}
		b, err := sh(ctx, other, line)
		if err != nil {
			return err
		}
		if a == b && a != "" {
			return fmt.Errorf("it has the %s of its source", what)
		}
	}
	return nil
}
