package agent

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/control"
)

// cpuMeter tells the use of the CPU between two looks at /proc/stat.
type cpuMeter struct {
	mu   sync.Mutex
	at   time.Time
	busy uint64  // ticks
	last float64 // percent
}

// cpuEvery is the least time between two looks: ticks are 10 ms.
const cpuEvery = 200 * time.Millisecond

// ticksPerSecond is USER_HZ, which is 100 on every architecture that Go runs
// on.
const ticksPerSecond = 100

// read gives the percent of one core that was busy since the last look; the
// first one, since boot.
func (c *cpuMeter) read(now time.Time, stat []byte) float64 {
	busy, total, ok := parseStat(stat)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !ok {
		return c.last
	}
	switch {
	case c.at.IsZero():
		if total > 0 {
			c.last = 100 * float64(busy) / float64(total) * float64(runtime.NumCPU())
		}
	case now.Sub(c.at) < cpuEvery:
		return c.last
	case busy < c.busy:
		c.last = 0
	default:
		c.last = 100 * float64(busy-c.busy) / ticksPerSecond / now.Sub(c.at).Seconds()
	}
	c.at, c.busy = now, busy
	return c.last
}

// parseStat takes the busy and all ticks out of /proc/stat's first line.
func parseStat(data []byte) (busy, total uint64, ok bool) {
	line, _, _ := bytes.Cut(data, []byte("\n"))
	f := bytes.Fields(line)
	if len(f) < 5 || string(f[0]) != "cpu" {
		return 0, 0, false
	}
	for i, s := range f[1:min(len(f), 9)] { // user nice system idle iowait irq softirq steal
		n, err := strconv.ParseUint(string(s), 10, 64)
		if err != nil {
			return 0, 0, false
		}
		total += n
		if i != 3 && i != 4 {
			busy += n
		}
	}
	return busy, total, true
}

// parseMeminfo takes sizes in bytes out of /proc/meminfo.
func parseMeminfo(data []byte) (total, available, cache uint64) {
	for line := range bytes.Lines(data) {
		f := bytes.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, err := strconv.ParseUint(string(f[1]), 10, 53)
		if err != nil {
			continue
		}
		switch string(f[0]) {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			available = n << 10
		case "Cached:":
			cache = n << 10
		}
	}
	return total, available, cache
}

// metrics reads the sandbox's resources as it sees them itself.
func (a *Agent) metrics() (control.Metrics, error) {
	now := time.Now()
	m := control.Metrics{Timestamp: now.Unix(), CPUCount: runtime.NumCPU()}
	if stat, err := os.ReadFile("/proc/stat"); err == nil {
		m.CPUUsedPct = a.cpu.read(now, stat)
	}
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, fmt.Errorf("read the memory's use: %w", err)
	}
	total, available, cache := parseMeminfo(info)
	m.MemTotal, m.MemCache = total, cache
	if available < total {
		m.MemUsed = total - available
	}
	m.MemTotalMiB, m.MemUsedMiB = m.MemTotal>>20, m.MemUsed>>20
	var st unix.Statfs_t
	if err := unix.Statfs("/", &st); err != nil {
		return m, fmt.Errorf("read the disk's use: %w", err)
	}
	m.DiskTotal = st.Blocks * uint64(st.Bsize)
	m.DiskUsed = (st.Blocks - st.Bfree) * uint64(st.Bsize)
	return m, nil
}
