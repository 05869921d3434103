package oci

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// cpuTable spreads sandboxes that may use only some of the host's CPUs over
// all of them. It is shared by the drivers of one daemon.
type cpuTable struct {
	mu   sync.Mutex
	load map[int]int // CPU → sandboxes bound to it
	held map[sandbox.ID][]int
}

func newCPUTable(all []int) *cpuTable {
	t := &cpuTable{load: map[int]int{}, held: map[sandbox.ID][]int{}}
	for _, c := range all {
		t.load[c] = 0
	}
	return t
}

var (
	cpuTablesMu sync.Mutex
	cpuTables   = map[string]*cpuTable{} // by daemon instance
)

func cpuTableOf(instance string, all []int) *cpuTable {
	cpuTablesMu.Lock()
	defer cpuTablesMu.Unlock()
	t := cpuTables[instance]
	if t == nil {
		t = newCPUTable(all)
		cpuTables[instance] = t
	}
	return t
}

// take binds a sandbox to the least used CPUs, as many as its limit can keep
// busy. nil is all of the host's.
func (t *cpuTable) take(id sandbox.ID, limit float64) []int {
	n := int(math.Ceil(limit))
	t.mu.Lock()
	defer t.mu.Unlock()
	if n >= len(t.load) || n < 1 {
		return nil
	}
	all := make([]int, 0, len(t.load))
	for c := range t.load {
		all = append(all, c)
	}
	sort.Slice(all, func(i, j int) bool {
		if t.load[all[i]] != t.load[all[j]] {
			return t.load[all[i]] < t.load[all[j]]
		}
		return all[i] < all[j]
	})
	cpus := all[:n:n]
	sort.Ints(cpus)
	t.hold(id, cpus)
	return cpus
}

// adopt notes what an earlier daemon bound.
func (t *cpuTable) adopt(id sandbox.ID, cpus []int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hold(id, cpus)
}

func (t *cpuTable) hold(id sandbox.ID, cpus []int) {
	t.drop(id)
	for _, c := range cpus {
		t.load[c]++
	}
	t.held[id] = cpus
}

func (t *cpuTable) free(id sandbox.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(id)
}

func (t *cpuTable) drop(id sandbox.ID) {
	for _, c := range t.held[id] {
		t.load[c]--
	}
	delete(t.held, id)
}

// hostCPUs lists the CPUs that sandboxes can have.
func (h *hierarchies) hostCPUs() ([]int, error) {
	path := filepath.Join(h.v1["cpuset"], "cpuset.cpus")
	if h.mode == host.CgroupV2 {
		path = filepath.Join(h.roots[0], "cpuset.cpus.effective")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseCPUList(strings.TrimSpace(string(data)))
}

// parseCPUList reads the kernel's list format, "0-3,8" (cpuset(7)).
func parseCPUList(s string) ([]int, error) {
	var cpus []int
	for _, part := range strings.Split(s, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(lo)
		b := a
		if err == nil && isRange {
			b, err = strconv.Atoi(hi)
		}
		if err != nil || a < 0 || b < a || b >= 1<<16 {
			return nil, fmt.Errorf("CPU list %q: %q is not a CPU or a range of them", s, part)
		}
		for c := a; c <= b; c++ {
			cpus = append(cpus, c)
		}
	}
	return cpus, nil
}

func formatCPUList(cpus []int) string {
	s := make([]string, len(cpus))
	for i, c := range cpus {
		s[i] = strconv.Itoa(c)
	}
	return strings.Join(s, ",")
}
