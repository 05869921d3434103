package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/network/dns"
	"github.com/warrenhq/warren/internal/sandbox"
)

var (
	pointMounted      = fault.Register("network.open.mounted")
	pointTable        = fault.Register("network.open.table")
	pointResolver     = fault.Register("network.open.resolver")
	pointDrained      = fault.Register("network.close.drained")
	pointResolverGone = fault.Register("network.close.resolver")
	pointTableGone    = fault.Register("network.close.table")
	pointUnmounted    = fault.Register("network.close.unmounted")
	dnsPort           = uint16(53)
)

// openHost makes what all slots share. Each step finds what an earlier daemon
// left of it.
func (n *Network) openHost(ctx context.Context) error {
	cfg := n.cfg
	for _, dir := range []string{cfg.HostDir, cfg.RunDir, cfg.StateDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return sandbox.Errorf(diskCode(err), "network: make a directory: %w", err)
		}
	}
	// One daemon has the instance, until it closes or dies.
	now, cancel := context.WithCancel(ctx)
	cancel()
	unlock, err := lockFile(now, filepath.Join(cfg.RunDir, "network.lock"))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeConflict, "network: another daemon runs on this state directory: %w", err)
	}
	n.unlock = unlock
	rec, err := claim(ctx, cfg)
	if err != nil {
		return err
	}
	n.builder = builder{layout: layout{instance: cfg.Instance, runDir: cfg.RunDir, prefix: rec.Prefix}, mtu: uplinkMTU()}
	if err := n.builder.mountDir(); err != nil {
		return err
	}
	pointMounted.Hit()
	if err := enableForwarding(); err != nil {
		return err
	}
	onLink, err := onLinkPrefixes()
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "read the host's addresses: %w", err)
	}
	n.rules = &ruleset{
		table:   table{layout: n.builder.layout, maxConns: connLimit()},
		slots:   map[int]held{},
		special: append(append([]netip.Prefix(nil), specialPrefixes...), onLink...),
	}
	if err := n.rules.open(); err != nil {
		return err
	}
	pointTable.Hit()
	if err := n.discover(); err != nil {
		return err
	}
	// A daemon that died may have released slots without this.
	if _, err := forget(n.ofFreeSlot); err != nil {
		return err
	}
	if err := n.builder.addResolver(); err != nil {
		return err
	}
	pointResolver.Hit()
	n.upstream = newUpstreams(cfg.Resolvers, "/etc/resolv.conf")
	n.dns, err = dns.Listen(dns.Config{
		Addr:      netip.AddrPortFrom(n.Resolver(), dnsPort),
		Upstreams: n.upstream.list,
		Client:    n.dnsClient,
		Log:       func(msg string, err error) { n.cfg.Log.Warn(msg, "err", err) },
	})
	if err != nil {
		if errors.Is(err, unix.EADDRINUSE) {
			return sandbox.Errorf(sandbox.CodeUnavailable, "network: the sandboxes' resolver cannot listen on %s port 53: %w; another program listens on every address: tell it to keep to its own (dnsmasq: bind-interfaces, unbound: interface, named: listen-on)", n.Resolver(), err)
		}
		return sandbox.Errorf(sandbox.CodeInternal, "network: start the sandboxes' resolver: %w", err)
	}
	w, err := n.watchTable()
	if err != nil {
		return err
	}
	n.wg.Go(w)
	if w, err = n.watchAddresses(); err != nil {
		return err
	}
	n.wg.Go(w)
	return nil
}

// discover finds the slots of an earlier daemon.
func (n *Network) discover() error {
	onHost, err := n.builder.onHost()
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range append(onHost, n.rules.heldSlots()...) {
		n.found[s] = true
	}
	n.free = slotRange(n.cfg.slots, n.found)
	return nil
}

// ofFreeSlot tells whether f is a connection of a slot that nobody has.
func (n *Network) ofFreeSlot(f flow) bool {
	free := func(a netip.Addr) bool {
		s, ok := n.builder.indexOf(a)
		return ok && s > 0 && !n.found[s]
	}
	return free(f.src) || free(f.dst)
}

func (n *Network) dnsClient(src netip.Addr) (dns.Client, bool) {
	s, ok := n.builder.slotOf(src)
	if !ok {
		return nil, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.used[s]
	return e, e != nil
}

// Close stops the resolver and the goroutines and destroys the pool. Slots in
// use, and those that wait for Adopt or Sweep, stay as they are, and the rules
// with them; when there are none, everything of the instance leaves the host.
func (n *Network) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	var errs []error
	if n.dns != nil {
		errs = append(errs, n.dns.Close())
	}
	n.wg.Wait()
	errs = append(errs, n.drain())
	pointDrained.Hit()
	if len(n.used) == 0 && len(n.found) == 0 && n.rules != nil {
		errs = append(errs, n.leaveHost())
	}
	n.unlock()
	return errors.Join(errs...)
}

// drain destroys the pool and forgets the connections of released slots.
func (n *Network) drain() error {
	var g errgroup.Group
	g.SetLimit(inlineBuilds)
	for _, s := range n.ready {
		g.Go(func() error { return n.discard(s) })
	}
	n.ready = nil
	return errors.Join(g.Wait(), n.forgetSlots(n.dirty))
}

func (n *Network) leaveHost() error {
	err := deleteLink(n.builder.resolverLink())
	pointResolverGone.Hit()
	err = errors.Join(err, n.rules.drop())
	pointTableGone.Hit()
	dir := n.builder.netnsDir()
	if e := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); e != nil && e != unix.EINVAL && e != unix.ENOENT {
		err = errors.Join(err, e)
	}
	pointUnmounted.Hit()
	if e := os.Remove(dir); e != nil && !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	if e := os.Remove(registryPath(n.cfg)); e != nil && !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	return err
}

// mountDir makes the pins' directory a private mount of its own, so that the
// pins in it do not spread to other mount namespaces.
func (b builder) mountDir() error {
	dir := b.netnsDir()
	fail := func(what string, err error) error {
		return sandbox.Errorf(sandbox.CodeUnavailable, "network: cannot %s %s: %w; run the daemon as root with CAP_SYS_ADMIN", what, dir, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail("make", err)
	}
	mounted, err := mountinfo.Mounted(dir)
	if err != nil {
		return fail("look at", err)
	}
	if !mounted {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return fail("mount", err)
		}
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		return fail("make private", err)
	}
	return nil
}

// addResolver makes the link that carries the resolver's address. It is a veth
// pair like the slots' rather than a dummy, whose driver some kernels lack;
// nothing ever goes over it.
func (b builder) addResolver() error {
	fail := func(err error) error {
		return sandbox.Errorf(sandbox.CodeUnavailable, "network: cannot set up link %s: %w; the kernel needs the veth driver (modprobe veth) and the daemon CAP_NET_ADMIN", b.resolverLink(), err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = b.resolverLink()
	veth := netlink.NewVeth(attrs)
	veth.PeerName = b.linkPrefix() + "dnp"
	if err := netlink.LinkAdd(veth); err != nil && !errors.Is(err, unix.EEXIST) {
		return fail(err)
	}
	link, err := netlink.LinkByName(b.resolverLink())
	if err != nil {
		return fail(err)
	}
	if err := writeSysctl("net/ipv6/conf/"+b.resolverLink()+"/disable_ipv6", "1"); err != nil {
		return fail(err)
	}
	addr := &netlink.Addr{IPNet: ipNet(b.resolver().AsSlice(), 32)}
	if err := netlink.AddrReplace(link, addr); err != nil {
		return fail(err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fail(err)
	}
	return nil
}

// enableForwarding lets the host route IPv4. It stays on when the daemon
// leaves: others may have come to need it (network.json remembers who began).
func enableForwarding() error {
	on, err := ipForward()
	if err == nil && !on {
		err = os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "network: cannot turn on IPv4 forwarding: %w; run `sysctl -w net.ipv4.ip_forward=1` on the host", err)
	}
	return nil
}

// connLimit is how many connections one sandbox may have in the host's
// connection table: a 32nd of the table, so that even 16 that try cannot fill
// half of it, but within what programs need and what is worth counting.
func connLimit() uint32 {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	size, perr := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || perr != nil {
		size = 65536
	}
	return uint32(min(max(size/32, 512), 4096))
}

// uplinkMTU is the MTU of the default route's link, at most an Ethernet's.
func uplinkMTU() int {
	const ethernet, least = 1500, 576
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return ethernet
	}
	for _, r := range routes {
		if r.Dst != nil {
			if p, ok := fromIPNet(*r.Dst); !ok || p.Bits() > 0 {
				continue
			}
		}
		if l, err := netlink.LinkByIndex(r.LinkIndex); err == nil && l.Attrs().MTU >= least {
			return min(l.Attrs().MTU, ethernet)
		}
	}
	return ethernet
}
