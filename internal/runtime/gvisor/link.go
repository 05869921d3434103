package gvisor

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/warrenhq/warren/internal/sandbox"
)

// restoreLink puts a link's addresses and default route in place in its
// namespace. It changes nothing where they are there.
func restoreLink(l sandbox.Link) error {
	ns, err := netns.GetFromPath(l.NetNS)
	if err != nil {
		return fmt.Errorf("open %s: %w", l.NetNS, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return fmt.Errorf("enter %s: %w", l.NetNS, err)
	}
	defer h.Close()
	if err := up(h, "lo", netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(127, 0, 0, 1).To4(), Mask: net.CIDRMask(8, 32)}}); err != nil {
		return err
	}
	addr := netlink.Addr{IPNet: &net.IPNet{
		IP:   l.Address.Addr().AsSlice(),
		Mask: net.CIDRMask(l.Address.Bits(), l.Address.Addr().BitLen()),
	}}
	if err := up(h, l.Device, addr); err != nil {
		return err
	}
	if !l.Gateway.IsValid() {
		return nil
	}
	link, err := h.LinkByName(l.Device)
	if err != nil {
		return err
	}
	err = h.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: l.Gateway.AsSlice()})
	if err != nil {
		return fmt.Errorf("default route by %s: %w", l.Gateway, err)
	}
	return nil
}

func up(h *netlink.Handle, name string, addr netlink.Addr) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := h.AddrReplace(link, &addr); err != nil {
		return fmt.Errorf("address %s of %s: %w", addr.IPNet, name, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("link %s up: %w", name, err)
	}
	return nil
}
