package network

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	mdl "github.com/mdlayher/netlink"
	mdns "github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// watchTable restores the table when somebody removes it: `nft flush
// ruleset`, or a restart of the nftables service. Until then, for some
// milliseconds, the host routes what the sandboxes send like anybody's.
func (n *Network) watchTable() (func(), error) {
	conn, err := mdl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, nftError("open netlink", err)
	}
	if err := conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		conn.Close()
		return nil, nftError("watch the table", err)
	}
	context.AfterFunc(n.ctx, func() { conn.Close() })
	name := append([]byte(n.rules.tableName()), 0)
	return func() {
		for n.ctx.Err() == nil {
			msgs, err := conn.Receive()
			if n.ctx.Err() != nil {
				return
			}
			// A lost message (ENOBUFS) may have been the one.
			look := err != nil
			for _, m := range msgs {
				look = look || m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE && bytes.Contains(m.Data, name)
			}
			if !look {
				continue
			}
			if err := n.restoreTable(); err != nil {
				n.cfg.Log.Error("network: the nftables table is gone and cannot be restored", "err", err)
				n.sleep(time.Second)
			}
		}
	}, nil
}

func (n *Network) sleep(d time.Duration) {
	select {
	case <-n.ctx.Done():
	case <-time.After(d):
	}
}

func (n *Network) restoreTable() error {
	there, err := n.rules.exists()
	if err != nil || there {
		return err
	}
	if err := n.rules.rebuild(); err != nil {
		return err
	}
	n.mu.Lock()
	entries := make([]*entry, 0, len(n.used))
	for _, e := range n.used {
		entries = append(entries, e)
	}
	n.mu.Unlock()
	var errs []error
	for _, e := range entries {
		errs = append(errs, e.restore())
	}
	n.cfg.Log.Warn("network: somebody removed the nftables table; it is restored", "sandboxes", len(entries))
	// Connections that were opened meanwhile are not masqueraded, and nobody
	// judged them.
	special := n.rules.specialNow()
	_, err = forget(func(f flow) bool {
		s, ok := n.builder.slotOf(f.src)
		if !ok || f.dst == n.Resolver() {
			return false
		}
		i := slices.IndexFunc(entries, func(e *entry) bool { return e.slot == s })
		return i < 0 || !f.masked || !entries[i].permits(f, special)
	})
	return errors.Join(append(errs, err)...)
}

// watchAddresses keeps the host's own networks among the denied ranges.
func (n *Network) watchAddresses() (func(), error) {
	updates := make(chan netlink.AddrUpdate, 64)
	err := netlink.AddrSubscribeWithOptions(updates, n.ctx.Done(), netlink.AddrSubscribeOptions{
		ErrorCallback: func(error) {}, // the stream ends then, and is opened again
	})
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "watch the host's addresses: %w", err)
	}
	return func() {
		for {
			select {
			case <-n.ctx.Done():
				for range updates { // until the subscription has closed it
				}
				return
			case u, open := <-updates:
				if !open {
					if n.ctx.Err() != nil {
						return
					}
					n.sleep(time.Second)
					updates = make(chan netlink.AddrUpdate, 64)
					if err := netlink.AddrSubscribe(updates, n.ctx.Done()); err != nil {
						n.cfg.Log.Warn("network: cannot watch the host's addresses", "err", err)
						close(updates)
					}
				} else if p, ok := fromIPNet(u.LinkAddress); !ok || n.builder.prefix.Contains(p.Addr()) {
					continue
				}
			}
			if err := n.refreshSpecial(); err != nil {
				n.cfg.Log.Warn("network: cannot update the host's own networks in the rules", "err", err)
			}
		}
	}, nil
}

func (n *Network) refreshSpecial() error {
	onLink, err := onLinkPrefixes()
	if err != nil {
		return err
	}
	list := slices.Concat(specialPrefixes, onLink)
	if slices.Equal(list, n.rules.specialNow()) {
		return nil
	}
	return n.rules.setSpecial(list)
}

// lookAhead has the exact names that e denies looked up, so that their
// addresses are closed before anybody asks.
func (n *Network) lookAhead(e *entry) {
	if len(e.exactDenied()) == 0 {
		return
	}
	select {
	case n.lookup <- e:
	default: // the next round finds it
	}
}

func (n *Network) lookupDenied() {
	tick := time.NewTicker(lookupGap)
	defer tick.Stop()
	for {
		var list []*entry
		select {
		case <-n.ctx.Done():
			return
		case e := <-n.lookup:
			list = []*entry{e}
		case <-tick.C:
			n.mu.Lock()
			for _, e := range n.used {
				list = append(list, e)
			}
			n.mu.Unlock()
		}
		var g errgroup.Group
		g.SetLimit(8)
		for _, e := range list {
			for _, name := range e.exactDenied() {
				g.Go(func() error { n.dns.Lookup(n.ctx, e, name); return nil })
			}
		}
		g.Wait()
	}
}

// upstreams are the resolvers that names are forwarded to.
type upstreams struct {
	fixed []netip.AddrPort
	path  string

	mu      sync.Mutex
	looked  time.Time
	changed time.Time
	current []netip.AddrPort
}

func newUpstreams(fixed []netip.AddrPort, path string) *upstreams {
	return &upstreams{fixed: fixed, path: path}
}

// list follows the file, which DHCP clients and VPNs rewrite; it looks at
// most once a second.
func (u *upstreams) list() []netip.AddrPort {
	if len(u.fixed) > 0 {
		return u.fixed
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if time.Since(u.looked) < time.Second {
		return u.current
	}
	u.looked = time.Now()
	st, err := os.Stat(u.path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			u.current = nil
		}
		return u.current
	}
	if st.ModTime().Equal(u.changed) {
		return u.current
	}
	if data, err := os.ReadFile(u.path); err == nil {
		u.current, u.changed = parseResolvers(data), st.ModTime()
	}
	return u.current
}

// parseResolvers reads the name servers out of a resolv.conf.
func parseResolvers(data []byte) (out []netip.AddrPort) {
	cfg, err := mdns.ClientConfigFromReader(bytes.NewReader(data))
	if err != nil {
		return nil
	}
	for _, s := range cfg.Servers {
		if a, err := netip.ParseAddr(s); err == nil && len(out) < 8 {
			out = append(out, netip.AddrPortFrom(a, 53))
		}
	}
	return out
}
