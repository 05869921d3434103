// Package identity gives a sandbox its name, its clock and its name resolution:
// the hostname, /etc/hostname, /etc/hosts, /etc/resolv.conf and
// /etc/machine-id.
package identity

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/control"
)

// clockSlack is how far the clock may be off before it is set: a call takes
// some time to arrive.
const clockSlack = 500 * time.Millisecond

// Host is what Apply changes; tests replace it.
type Host struct {
	Etc         string // the directory /etc
	Run         string // the directory /run
	Var         string // the directory /var; "" is not looked at
	SetHostname func(string) error
	Hostname    func() (string, error)
	SetClock    func(time.Time) error
	Now         func() time.Time
}

// System is the sandbox itself.
func System() Host {
	return Host{
		Etc:         "/etc",
		Run:         "/run",
		Var:         "/var",
		Hostname:    os.Hostname,
		SetHostname: func(name string) error { return unix.Sethostname([]byte(name)) },
		SetClock: func(t time.Time) error {
			ts := unix.NsecToTimespec(t.UnixNano())
			return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
		},
		Now: time.Now,
	}
}

// Check tells what is wrong with a request, before anything of it is applied.
func Check(r control.InitRequest) error {
	if r.Hostname != "" && !validHostname(r.Hostname) {
		return fmt.Errorf("hostname %.70q is not valid: up to 64 letters, digits, dots and hyphens", r.Hostname)
	}
	for _, h := range r.Hosts {
		if !h.Address.IsValid() || len(h.Names) == 0 {
			return errors.New("an entry of hosts needs an address and names")
		}
		for _, n := range h.Names {
			if !validHostname(n) {
				return fmt.Errorf("host name %.70q is not valid", n)
			}
		}
	}
	for _, s := range r.Search {
		if !validHostname(s) {
			return fmt.Errorf("search domain %.70q is not valid", s)
		}
	}
	for _, a := range r.Nameservers {
		if !a.IsValid() {
			return errors.New("a nameserver is not an address")
		}
	}
	return nil
}

// HostnameMode is the agent's argument, before a name, with which it sets the
// sandbox's hostname and ends. Its runtime lets it.
const HostnameMode = "hostname"

// SetHostname is the agent in HostnameMode.
func SetHostname(name string) error {
	if !validHostname(name) {
		return fmt.Errorf("%.70q is not a hostname", name)
	}
	return unix.Sethostname([]byte(name))
}

// validHostname also keeps white space and newlines out of the files.
func validHostname(s string) bool {
	if len(s) == 0 || len(s) > 253 {
		return false
	}
	for _, label := range strings.Split(s, ".") {
		if len(label) == 0 || len(label) > 64 || label[0] == '-' {
			return false
		}
		for _, c := range label {
			if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
				return false
			}
		}
	}
	return true
}

// Apply does what a request asks for. fresh makes a new machine-id. What the
// sandbox may not do (set the clock or the name, write to a read-only disk) is
// passed over: the host has then set it itself, or cannot.
func (h Host) Apply(r control.InitRequest, fresh bool) error {
	var errs []error
	try := func(what string, err error) {
		if err != nil && !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EACCES) &&
			!errors.Is(err, syscall.EROFS) && !errors.Is(err, syscall.ENOSYS) {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	if !r.Timestamp.IsZero() {
		if off := r.Timestamp.Sub(h.Now()); off.Abs() > clockSlack {
			try("set the clock", h.SetClock(r.Timestamp))
		}
	}
	if r.Hostname != "" || fresh || len(r.Nameservers) > 0 || len(r.Hosts) > 0 {
		try("make /etc", os.MkdirAll(h.Etc, 0o755))
	}
	if r.Hostname != "" {
		try("set the hostname", h.SetHostname(r.Hostname))
		try("write /etc/hostname", write(h.Etc, "hostname", r.Hostname+"\n", 0o644))
	}
	if r.Hostname != "" || len(r.Hosts) > 0 {
		try("write /etc/hosts", write(h.Etc, "hosts", hosts(r), 0o644))
	}
	if len(r.Nameservers) > 0 {
		try("write /etc/resolv.conf", write(h.Etc, "resolv.conf", resolvConf(r.Nameservers, r.Search), 0o644))
	}
	if fresh {
		var id [16]byte
		rand.Read(id[:])
		id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // a version 4 UUID, as machine-id(5) has it
		text := hex.EncodeToString(id[:]) + "\n"
		try("write /etc/machine-id", write(h.Etc, "machine-id", text, 0o444))
		// D-Bus has one of its own where it is older than systemd's; mostly it is
		// a link to that of /etc.
		if bus := filepath.Join(h.Var, "lib/dbus"); h.Var != "" {
			if st, err := os.Lstat(filepath.Join(bus, "machine-id")); err == nil && st.Mode().IsRegular() {
				try("write "+bus+"/machine-id", write(bus, "machine-id", text, 0o444))
			}
		}
	}
	return errors.Join(errs...)
}

func hosts(r control.InitRequest) string {
	var b strings.Builder
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n")
	if r.Hostname != "" {
		addr := r.Address
		if !addr.IsValid() {
			addr = netip.AddrFrom4([4]byte{127, 0, 1, 1})
		}
		names := r.Hostname
		if short, _, ok := strings.Cut(r.Hostname, "."); ok {
			names += " " + short
		}
		fmt.Fprintf(&b, "%s\t%s\n", addr, names)
	}
	for _, e := range r.Hosts {
		fmt.Fprintf(&b, "%s\t%s\n", e.Address, strings.Join(e.Names, " "))
	}
	return b.String()
}

func resolvConf(servers []netip.Addr, search []string) string {
	var b strings.Builder
	if len(search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(search, " "))
	}
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	return b.String()
}

// write replaces a file in a directory. A link there is replaced, not followed: it is
// often to a resolver's that does not run here. A mount point is written to.
func write(dir, name, content string, mode fs.FileMode) error {
	path := filepath.Join(dir, name)
	tmp, err := os.CreateTemp(dir, ".warren-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(content)
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	err = os.Rename(tmp.Name(), path)
	if errors.Is(err, syscall.EBUSY) {
		f, ferr := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC|syscall.O_NOFOLLOW, 0)
		if ferr != nil {
			return ferr
		}
		_, err = f.WriteString(content)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}
	return err
}
