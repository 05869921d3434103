// Package census counts what one daemon has on a host: processes, cgroups,
// mounts, loop devices, network namespaces, links, nftables rules, runtime
// state and directories. It goes by names alone (host.Instance), and by nothing that the
// daemon says of itself, so that tests and `warren doctor` can hold the two
// against each other.
package census

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"

	"github.com/warrenhq/warren/internal/host/statefs"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Kind is what an Item is.
type Kind string

// The kinds of items.
const (
	Process Kind = "process"
	Cgroup  Kind = "cgroup"
	Mount   Kind = "mount"
	Pin     Kind = "netns" // a pinned network namespace
	Link    Kind = "link"
	Rule    Kind = "nft"     // a chain, set or set element of one slot
	Runtime Kind = "runtime" // a runtime's bundle or state
	Dir     Kind = "dir"     // of the state directory
	Loop    Kind = "loop"    // a loop device of the state directory's image
)

// Item is one thing on the host.
type Item struct {
	Kind Kind
	Name string
	ID   sandbox.ID // the sandbox whose name it bears; "" where it bears none
	Slot int        // the network slot that it is of; 0 where it is of none
	// Shared is what the daemon has for all its sandboxes: it is no leak while
	// a daemon runs or a sandbox lives.
	Shared bool
}

func (i Item) String() string { return string(i.Kind) + " " + i.Name }

// Where says whose things are counted.
type Where struct {
	Instance string // host.Instance of State
	State    string
	RunDir   string // /run/warren/<instance>
	Daemon   int    // pid of the daemon, which is not counted; 0 is none
}

// Take counts. An error means that the count is not whole.
func Take(w Where) ([]Item, error) {
	var all []Item
	var errs []error
	for _, count := range []func(Where) ([]Item, error){processes, cgroups, mounts, pins, links, rules, runtimes, dirs, loops} {
		items, err := count(w)
		all = append(all, items...)
		errs = append(errs, err)
	}
	return all, errors.Join(errs...)
}

// Unexplained gives the items that the live sandboxes, by id with their slots,
// do not explain. Where daemonRuns, or a sandbox lives, what is shared is
// explained too.
func Unexplained(items []Item, live map[sandbox.ID]int, daemonRuns bool) []Item {
	slots := map[int]bool{}
	for _, slot := range live {
		slots[slot] = true
	}
	var left []Item
	for _, i := range items {
		_, ofLive := live[i.ID]
		switch {
		case i.ID != "" && ofLive:
		case i.Slot != 0 && slots[i.Slot]:
		case i.Shared && (daemonRuns || len(live) > 0):
		default:
			left = append(left, i)
		}
	}
	return left
}

// Missing tells what live sandboxes should have and do not: each needs a
// process, a cgroup, runtime state and a directory of its id, and a namespace,
// a link and a rule of its slot.
func Missing(items []Item, live map[sandbox.ID]int) []string {
	var missing []string
	for id, slot := range live {
		for _, k := range []Kind{Process, Cgroup, Runtime, Dir, Pin, Link, Rule} {
			if !slices.ContainsFunc(items, func(i Item) bool {
				return i.Kind == k && (i.ID == id || i.Slot != 0 && i.Slot == slot)
			}) {
				missing = append(missing, fmt.Sprintf("%s has no %s", id, k))
			}
		}
	}
	slices.Sort(missing)
	return missing
}

// idIn finds a sandbox's id in a name or command line.
var idPattern = regexp.MustCompile(`\bsbx[0-9a-z]{17}\b`)

func idIn(s string) sandbox.ID { return sandbox.ID(idPattern.FindString(s)) }

func (w Where) group() string { return "/warren-" + w.Instance }

// processes are those in the daemon's cgroups, and those whose command line
// names its run directory: a runtime's or a FUSE server's. A process that ends
// while it is looked at is not counted.
func processes(w Where) ([]Item, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var all []Item
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == w.Daemon || pid == os.Getpid() {
			continue
		}
		groups, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if err != nil {
			continue
		}
		raw, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil {
			continue
		}
		line := strings.TrimSpace(strings.ReplaceAll(string(raw), "\x00", " "))
		item := Item{Kind: Process, Name: e.Name() + " " + line}
		if len(item.Name) > 200 {
			item.Name = item.Name[:200]
		}
		switch {
		case strings.Contains(string(groups), ":"+w.group()+"/"):
			item.ID = idIn(string(groups))
		case strings.Contains(line, w.RunDir+"/"):
			if item.ID = idIn(line); item.ID == "" {
				item.Shared = true
			}
		default:
			continue
		}
		if line == "" && gone(e.Name()) {
			continue
		}
		all = append(all, item)
	}
	return all, nil
}

// gone tells whether a process is a zombie: it has ended, and its parent has
// not looked yet.
func gone(pid string) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return true
	}
	// The state follows the command's closing parenthesis (proc_pid_stat(5)).
	i := strings.LastIndexByte(string(stat), ')')
	return i >= 0 && strings.HasPrefix(string(stat[i+1:]), " Z")
}

func cgroups(w Where) ([]Item, error) {
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, err
	}
	var all []Item
	for _, m := range infos {
		parent := m.Mountpoint + w.group()
		entries, err := os.ReadDir(parent)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return all, err
		}
		all = append(all, Item{Kind: Cgroup, Name: parent, Shared: true})
		for _, e := range entries {
			if e.IsDir() {
				all = append(all, Item{Kind: Cgroup, Name: filepath.Join(parent, e.Name()), ID: idIn(e.Name())})
			}
		}
	}
	return all, nil
}

// mounts are those of this process's namespace below the daemon's directories.
func mounts(w Where) ([]Item, error) {
	infos, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !within(m.Mountpoint, w.RunDir) && !within(m.Mountpoint, w.State), false
	})
	if err != nil {
		return nil, err
	}
	var all []Item
	for _, m := range infos {
		if m.Mountpoint == w.State && statefs.Mounted(w.State) {
			all = append(all, Item{Kind: Mount, Name: m.Mountpoint, Shared: true})
			continue
		}
		if m.Mountpoint == w.State || m.Mountpoint == w.RunDir {
			continue // a filesystem of the administrator's
		}
		item := Item{Kind: Mount, Name: m.Mountpoint, ID: idIn(m.Mountpoint)}
		switch {
		case m.Mountpoint == filepath.Join(w.RunDir, "netns"), m.Mountpoint == filepath.Join(w.RunDir, "lxcfs"):
			item.Shared = true
		case filepath.Dir(m.Mountpoint) == filepath.Join(w.RunDir, "netns"):
			item.Slot, _ = strconv.Atoi(filepath.Base(m.Mountpoint))
		}
		all = append(all, item)
	}
	return all, nil
}

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func pins(w Where) ([]Item, error) {
	names, err := list(filepath.Join(w.RunDir, "netns"))
	var all []Item
	for _, name := range names {
		item := Item{Kind: Pin, Name: name}
		item.Slot, _ = strconv.Atoi(filepath.Base(name))
		all = append(all, item)
	}
	return all, err
}

func links(w Where) ([]Item, error) {
	found, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list the links: %w", err)
	}
	prefix := "wr" + w.Instance[:6] + "-"
	var all []Item
	for _, l := range found {
		name, ours := strings.CutPrefix(l.Attrs().Name, prefix)
		if ours {
			// The resolver's own are not numbered.
			slot := slotOf(name)
			all = append(all, Item{Kind: Link, Name: l.Attrs().Name, Slot: slot, Shared: slot == 0})
		}
	}
	return all, nil
}

func slotOf(hex string) int {
	n, err := strconv.ParseUint(hex, 16, 16)
	if err != nil {
		return 0
	}
	return int(n)
}

// slotChain is the form of the names of a slot's own chain and sets.
var slotChain = regexp.MustCompile(`^[acd]([0-9a-f]{4})$`)

func rules(w Where) ([]Item, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list the nftables tables: %w", err)
	}
	name := "warren_" + w.Instance
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == name })
	if i < 0 {
		return nil, nil
	}
	all := []Item{{Kind: Rule, Name: "table " + name, Shared: true}}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return all, fmt.Errorf("list the chains of %s: %w", name, err)
	}
	for _, ch := range chains {
		if m := slotChain.FindStringSubmatch(ch.Name); m != nil && ch.Table.Name == name {
			all = append(all, Item{Kind: Rule, Name: "chain " + ch.Name, Slot: slotOf(m[1])})
		}
	}
	sets, err := c.GetSets(tables[i])
	if err != nil {
		return all, fmt.Errorf("list the sets of %s: %w", name, err)
	}
	for _, s := range sets {
		if m := slotChain.FindStringSubmatch(s.Name); m != nil {
			all = append(all, Item{Kind: Rule, Name: "set " + s.Name, Slot: slotOf(m[1])})
		}
		if s.Name != "links" {
			continue
		}
		elements, err := c.GetSetElements(s)
		if err != nil {
			return all, fmt.Errorf("list the set %s of %s: %w", s.Name, name, err)
		}
		for _, e := range elements {
			// The key begins with the link's name, padded with NULs.
			link, _, _ := strings.Cut(string(e.Key), "\x00")
			_, hex, _ := strings.Cut(link, "-")
			all = append(all, Item{Kind: Rule, Name: "links element " + link, Slot: slotOf(hex)})
		}
	}
	return all, nil
}

func runtimes(w Where) ([]Item, error) {
	var all []Item
	for _, pattern := range []string{"oci/*/sandboxes/*", "oci/*/state/*", "stage/*"} {
		names, err := filepath.Glob(filepath.Join(w.RunDir, pattern))
		if err != nil {
			return all, err
		}
		for _, name := range names {
			all = append(all, Item{Kind: Runtime, Name: name, ID: idOfState(filepath.Base(name))})
		}
	}
	return all, nil
}

// idOfState finds the id in the name of a runtime's state: runsc makes files
// like runsc-ID_sandbox:ID.state.
func idOfState(name string) sandbox.ID {
	return idIn(strings.NewReplacer("_", " ", ":", " ", "-", " ").Replace(name))
}

func dirs(w Where) ([]Item, error) {
	var all []Item
	var errs []error
	for _, dir := range []string{"sandboxes", "tmp", "templates/tmp"} {
		names, err := list(filepath.Join(w.State, dir))
		errs = append(errs, err)
		for _, name := range names {
			item := Item{Kind: Dir, Name: name}
			if dir == "sandboxes" {
				item.ID = sandbox.ID(filepath.Base(name))
			}
			all = append(all, item)
		}
	}
	return all, errors.Join(errs...)
}

// loops are the loop devices of the state directory's image (statefs).
func loops(w Where) ([]Item, error) {
	image := statefs.Image(w.State)
	devices := statefs.Devices(image)
	if !statefs.Mounted(w.State) {
		devices = statefs.Leaked(image)
	}
	var all []Item
	for _, dev := range devices {
		all = append(all, Item{Kind: Loop, Name: dev, Shared: true})
	}
	return all, nil
}

func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		names = append(names, filepath.Join(dir, e.Name()))
	}
	return names, err
}
