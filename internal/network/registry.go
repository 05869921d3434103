package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

var (
	pointRecorded   = fault.Register("network.range.recorded")
	pointRegistered = fault.Register("network.range.registered")
)

// record is what network.json in the state directory and the registry's file
// of the instance hold.
type record struct {
	Instance         string       `json:"instance"`
	StateDir         string       `json:"state_dir"`
	Prefix           netip.Prefix `json:"prefix"`
	EnabledIPForward bool         `json:"enabled_ip_forward"` // the host did not forward IPv4 before this daemon
}

// candidates are the /16s that an instance may take, in order of preference:
// the middle of 10/8, which home, office and container networks use least;
// then the rest of RFC 1918; last the benchmark range.
func candidates(instance string) []netip.Prefix {
	var out []netip.Prefix
	add := func(a byte, from, to int) {
		for b := from; b <= to; b++ {
			out = append(out, netip.PrefixFrom(netip.AddrFrom4([4]byte{a, byte(b)}), 16))
		}
	}
	add(10, 64, 127)
	// Instances begin at different places, so that one that was away finds
	// its range free again.
	h := fnv.New32a()
	h.Write([]byte(instance))
	k := int(h.Sum32() % uint32(len(out)))
	out = slices.Concat(out[k:], out[:k])
	add(10, 128, 255)
	add(10, 0, 63)
	add(172, 16, 31)
	add(192, 168, 168)
	add(198, 18, 19)
	return out
}

// claim chooses the instance's range, or finds the one it has, and registers
// it for the other daemons of this host.
func claim(ctx context.Context, cfg Config) (record, error) {
	unlock, err := lockFile(ctx, filepath.Join(cfg.HostDir, "network.lock"))
	if err != nil {
		return record{}, sandbox.Errorf(sandbox.CodeUnavailable, "lock the host's network registry: %w", err)
	}
	defer unlock()
	others, mine, err := readRegistry(cfg)
	if err != nil {
		return record{}, err
	}
	rec := record{Instance: cfg.Instance, StateDir: cfg.StateDir}
	var saved record
	if err := readJSON(filepath.Join(cfg.StateDir, "network.json"), &saved); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return rec, sandbox.Errorf(sandbox.CodeInternal, "read the network's record: %w; remove the file if no sandbox runs", err)
	}
	rec.EnabledIPForward = saved.EnabledIPForward
	taken, err := takenPrefixes(cfg.Instance)
	if err != nil {
		return rec, sandbox.Errorf(sandbox.CodeInternal, "read the host's addresses and routes: %w", err)
	}
	for _, o := range others {
		taken = append(taken, o.Prefix)
	}
	free := func(p netip.Prefix) bool {
		return !slices.ContainsFunc(taken, func(t netip.Prefix) bool { return t.Overlaps(p) })
	}
	switch {
	case mine != nil && usable(mine.Prefix) && mine.Prefix == saved.Prefix:
		// Live sandboxes may have addresses in it: it stays, whatever the
		// host's routes have become.
		rec.Prefix = mine.Prefix
	case usable(saved.Prefix) && free(saved.Prefix):
		rec.Prefix = saved.Prefix
	default:
		i := slices.IndexFunc(candidates(cfg.Instance), free)
		if i < 0 {
			return rec, sandbox.Errorf(sandbox.CodeUnavailable, "no private /16 is free on this host: its routes cover 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 and 198.18.0.0/15; narrow a route (a VPN's, often) so that one /16 is left")
		}
		rec.Prefix = candidates(cfg.Instance)[i]
	}
	if on, err := ipForward(); err == nil && !on {
		rec.EnabledIPForward = true
	}
	// Written only where it changed: a daemon must be able to start on a full
	// disk.
	if rec != saved {
		err = writeJSON(filepath.Join(cfg.StateDir, "network.json"), rec)
	}
	if err != nil {
		return rec, sandbox.Errorf(diskCode(err), "record the network's range: %w", err)
	}
	pointRecorded.Hit()
	if err := os.MkdirAll(filepath.Join(cfg.HostDir, "networks"), 0o700); err != nil {
		return rec, sandbox.Errorf(diskCode(err), "make the network registry: %w", err)
	}
	if err := writeJSON(registryPath(cfg), rec); err != nil {
		return rec, sandbox.Errorf(diskCode(err), "register the network's range: %w", err)
	}
	pointRegistered.Hit()
	return rec, nil
}

func registryPath(cfg Config) string {
	return filepath.Join(cfg.HostDir, "networks", cfg.Instance+".json")
}

// readRegistry lists the other instances' records and this one's, and removes
// those of instances that are gone.
func readRegistry(cfg Config) (others []record, mine *record, err error) {
	dir := filepath.Join(cfg.HostDir, "networks")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, sandbox.Errorf(sandbox.CodeInternal, "read the network registry: %w", err)
	}
	for _, e := range entries {
		instance, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		path := filepath.Join(dir, e.Name())
		var r record
		if err := readJSON(path, &r); err != nil || !usable(r.Prefix) || r.Instance != instance {
			// Files are renamed into place whole: this is not one of ours.
			return nil, nil, sandbox.Errorf(sandbox.CodeInternal, "%s is not a network record; remove it if no daemon of that name runs", path)
		}
		if instance == cfg.Instance {
			mine = &r
			continue
		}
		if instance[:min(6, len(instance))] == cfg.Instance[:6] {
			return nil, nil, sandbox.Errorf(sandbox.CodeConflict, "the daemon of state directory %s would have links of the same names as this one's; use another state directory", r.StateDir)
		}
		stale, err := isStale(r)
		if err != nil {
			return nil, nil, err
		}
		if stale {
			os.Remove(path)
			continue
		}
		others = append(others, r)
	}
	return others, mine, nil
}

// isStale tells whether an instance is gone for good: its state directory is,
// and it has no link left.
func isStale(r record) (bool, error) {
	if _, err := os.Stat(r.StateDir); !errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	links, err := listLinks()
	if err != nil {
		return false, sandbox.Errorf(sandbox.CodeInternal, "list links: %w", err)
	}
	p := layout{instance: r.Instance}.linkPrefix()
	return !slices.ContainsFunc(links, func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, p) }), nil
}

func usable(p netip.Prefix) bool {
	return p.IsValid() && p.Addr().Is4() && p.Bits() == 16 && p == p.Masked()
}

// takenPrefixes are the host's addresses and routes, but for the default
// route and what belongs to instance.
func takenPrefixes(instance string) ([]netip.Prefix, error) {
	onLink, err := onLinkPrefixes()
	if err != nil {
		return nil, err
	}
	out := onLink[:0:0]
	ours := map[int]bool{}
	links, err := listLinks()
	if err != nil {
		return nil, err
	}
	prefix := layout{instance: instance}.linkPrefix()
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, prefix) {
			ours[l.Attrs().Index] = true
		}
	}
	out = append(out, onLink...)
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, err
	}
	for _, r := range routes {
		if r.Dst == nil || ours[r.LinkIndex] {
			continue
		}
		if p, ok := fromIPNet(*r.Dst); ok && p.Bits() > 0 {
			out = append(out, p)
		}
	}
	return out, nil
}

// onLinkPrefixes are the networks that the host's own interfaces are in, but
// for those of any Warren's.
func onLinkPrefixes() ([]netip.Prefix, error) {
	links, err := listLinks()
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, l := range links {
		if isWarrenLink(l.Attrs().Name) {
			continue
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err != nil {
			if errors.Is(err, unix.ENODEV) || errors.Is(err, netlink.ErrDumpInterrupted) {
				continue
			}
			return nil, err
		}
		for _, a := range addrs {
			if p, ok := fromIPNet(*a.IPNet); ok && p.Bits() > 0 {
				out = append(out, p)
			}
		}
	}
	return out, nil
}

func isWarrenLink(name string) bool {
	return len(name) > 9 && strings.HasPrefix(name, "wr") && name[8] == '-'
}

var errBadRecord = errors.New("not JSON of a network record")

func readJSON(path string, into *record) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%s: %w: %w", path, errBadRecord, err)
	}
	return nil
}

func writeJSON(path string, r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(path, append(data, '\n'), 0o600)
}

func diskCode(err error) sandbox.Code {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandbox.CodeDiskFull
	}
	return sandbox.CodeInternal
}

// lockFile takes an exclusive lock on path until the returned function is
// called or the process ends.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("%s is locked by another process: %w", path, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func ipForward() (bool, error) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	return strings.TrimSpace(string(b)) == "1", err
}
