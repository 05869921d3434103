package gvisor

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// The arguments of containerManager.SetNetworkArgs, as far as they are not
// zero here (gVisor's runsc/boot.CreateLinksAndRoutesArgs).
type networkArgs struct {
	LoopbackLinks []loopbackLink
	FDBasedLinks  []fdLink
	IsRestore     bool
}

type loopbackLink struct {
	Name      string
	Addresses []prefix
	Routes    []route
}

type fdLink struct {
	Name              string
	MTU               int
	Addresses         []prefix
	Routes            []route
	GSOMaxSize        uint32
	GVisorGSOEnabled  bool
	RXChecksumOffload bool
	LinkAddress       net.HardwareAddr
	QDisc             int
	NumChannels       int
}

type prefix struct {
	Address   net.IP
	PrefixLen int
}

type route struct {
	Destination net.IPNet
	Gateway     net.IP
}

const (
	qdiscFIFO = 1 // runsc/config.QDiscFIFO
	// softGSO is the largest packet where the host does not segment
	// (pkg/tcpip/stack.GVisorGSOMaxSize).
	softGSO = 1 << 16
	// packetBuffer is of the socket by which the Sentry sends and receives
	// (runsc/sandbox's createSocket).
	packetBuffer = 4 << 20
)

// wire makes what a Sentry needs of a link, as runsc's restore does: a packet
// socket on the device, whose addresses the Sentry has from here on and the
// host's kernel no more.
func wire(l sandbox.Link) (args networkArgs, device *os.File, err error) {
	ns, err := netns.GetFromPath(l.NetNS)
	if err != nil {
		return args, nil, fmt.Errorf("open %s: %w", l.NetNS, err)
	}
	defer ns.Close()
	err = within(ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		lo, err := h.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("link lo: %w", err)
		}
		if err := h.LinkSetUp(lo); err != nil {
			return fmt.Errorf("link lo up: %w", err)
		}
		loop := loopbackLink{Name: "lo"}
		addrs := []net.IPNet{{IP: net.IPv4(127, 0, 0, 1).To4(), Mask: net.CIDRMask(8, 32)}}
		if v6, err := h.AddrList(lo, netlink.FAMILY_V6); err == nil && len(v6) > 0 {
			addrs = append(addrs, net.IPNet{IP: net.IPv6loopback, Mask: net.CIDRMask(128, 128)})
		}
		for _, a := range addrs {
			ones, _ := a.Mask.Size()
			loop.Addresses = append(loop.Addresses, prefix{a.IP, ones})
			loop.Routes = append(loop.Routes, route{Destination: net.IPNet{IP: a.IP.Mask(a.Mask), Mask: a.Mask}})
		}
		dev, err := h.LinkByName(l.Device)
		if err != nil {
			return fmt.Errorf("link %s: %w", l.Device, err)
		}
		if err := h.LinkSetUp(dev); err != nil {
			return fmt.Errorf("link %s up: %w", l.Device, err)
		}
		// Those of IPv6 are the kernel's own, where the host has it.
		have, err := h.AddrList(dev, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("addresses of %s: %w", l.Device, err)
		}
		var v6 []net.IPNet
		for _, a := range have {
			if a.IP.To4() == nil {
				v6 = append(v6, *a.IPNet)
			}
			if err := h.AddrDel(dev, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return fmt.Errorf("take %s off %s: %w", a.IPNet, l.Device, err)
			}
		}
		var gso uint32
		if device, gso, err = packetSocket(dev); err != nil {
			return fmt.Errorf("packet socket on %s: %w", l.Device, err)
		}
		ip := net.IP(l.Address.Addr().AsSlice())
		mask := net.CIDRMask(l.Address.Bits(), l.Address.Addr().BitLen())
		link := fdLink{
			Name: l.Device, MTU: dev.Attrs().MTU, LinkAddress: dev.Attrs().HardwareAddr,
			Addresses:         []prefix{{ip, l.Address.Bits()}},
			Routes:            []route{{Destination: net.IPNet{IP: ip.Mask(mask), Mask: mask}}},
			GSOMaxSize:        gso,
			RXChecksumOffload: true, QDisc: qdiscFIFO, NumChannels: 1,
		}
		for _, a := range v6 {
			ones, _ := a.Mask.Size()
			link.Addresses = append(link.Addresses, prefix{a.IP, ones})
			link.Routes = append(link.Routes, route{Destination: net.IPNet{IP: a.IP.Mask(a.Mask), Mask: a.Mask}})
		}
		if gso == 0 {
			link.GSOMaxSize, link.GVisorGSOEnabled = softGSO, true
		}
		if l.Gateway.IsValid() {
			all := net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
			link.Routes = append(link.Routes, route{Destination: all, Gateway: l.Gateway.AsSlice()})
		}
		args = networkArgs{LoopbackLinks: []loopbackLink{loop}, FDBasedLinks: []fdLink{link}, IsRestore: true}
		return nil
	})
	if err != nil && device != nil {
		device.Close()
		device = nil
	}
	return args, device, err
}

// within runs f on a thread that is in a network namespace.
func within(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		own, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer own.Close()
		if err = netns.Set(ns); err == nil {
			err = f()
		}
		if netns.Set(own) == nil {
			runtime.UnlockOSThread() // else the thread ends with the goroutine
		}
		done <- err
	}()
	return <-done
}

// packetSocket makes a socket for all packets of a device. gso is how large
// those may be that the host segments; 0 where it does not.
func packetSocket(dev netlink.Link) (f *os.File, gso uint32, err error) {
	// Of no protocol until it is bound, since a bind that changes the device
	// waits for the kernel's readers.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, err
	}
	f = os.NewFile(uintptr(fd), dev.Attrs().Name)
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	const allProtocols = unix.ETH_P_ALL << 8 // in network order
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: allProtocols, Ifindex: dev.Attrs().Index}); err != nil {
		return nil, 0, err
	}
	on, err := segments(fd, dev.Attrs().Name)
	if err != nil {
		return nil, 0, err
	}
	if on {
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
			return nil, 0, err
		}
		gso = dev.Attrs().GSOMaxSize
	}
	for _, opt := range [][2]int{{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt[0], packetBuffer) != nil {
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt[1], packetBuffer) // as much as the host allows
		}
	}
	return f, gso, nil
}

// segments tells whether the host segments packets for a device
// (linux/ethtool.h).
func segments(fd int, name string) (bool, error) {
	value := struct{ cmd, data uint32 }{cmd: unix.ETHTOOL_GGSO}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(req.name[:unix.IFNAMSIZ-1], name)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); e != 0 {
		return false, e
	}
	return value.data != 0, nil
}
