// Package prove measures what each runtime really does on this host, through
// the daemon's API as any user has it: what of the host is seen from inside,
// what real work succeeds, how long a start and an exec take, what an idle
// sandbox costs, and what a capture preserves. `warren advise` picks a runtime
// from five answers and these measurements.
package prove

import (
	"slices"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Verdict is what a check found.
type Verdict string

// The verdicts. Yes and No are measurements; a Skip is none, and its row says
// why there is none.
const (
	Yes  Verdict = "yes"
	No   Verdict = "no"
	Skip Verdict = "skip"
	Info Verdict = "info" // a fact that is neither good nor bad
)

// Row is one thing that was checked. What it says is for people; ID is stable.
type Row struct {
	ID      string  `json:"id"`
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Detail  string  `json:"detail"`           // one line: what was seen, or why there is nothing to see
	Output  string  `json:"output,omitempty"` // the end of what a failed one wrote
	TookMS  float64 `json:"took_ms,omitempty"`
}

// Timing is one series of samples, in milliseconds as the API's client saw it.
type Timing struct {
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	N        int       `json:"n"`
	Failures int       `json:"failures"`
	P50      float64   `json:"p50_ms"`
	P99      float64   `json:"p99_ms"` // by the nearest rank: the greatest where n < 100
	Min      float64   `json:"min_ms"`
	Max      float64   `json:"max_ms"`
	Samples  []float64 `json:"samples_ms"`
	Note     string    `json:"note,omitempty"` // why there are no samples, or the first failure
}

func (t *Timing) add(d time.Duration, err error) {
	if err != nil {
		t.Failures++
		if t.Note == "" {
			t.Note = err.Error()
		}
		return
	}
	t.Samples = append(t.Samples, float64(d.Microseconds())/1000)
	s := slices.Sorted(slices.Values(t.Samples))
	t.N, t.Min, t.Max = len(s), s[0], s[len(s)-1]
	t.P50, t.P99 = percentile(s, 50), percentile(s, 99)
}

// percentile gives the p-th percentile of sorted samples by the nearest rank.
func percentile(sorted []float64, p int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	rank := (p*len(sorted) + 99) / 100
	return sorted[min(max(rank-1, 0), len(sorted)-1)]
}

// Memory is what an idle sandbox costs the host.
type Memory struct {
	N          int    `json:"n"`                   // sandboxes that were looked at, side by side
	PSS        int64  `json:"pss_bytes,omitempty"` // per sandbox: proportional set size of its processes on the host; 0: not read
	Processes  int    `json:"host_processes,omitempty"`
	WorkingSet int64  `json:"working_set_bytes"` // per sandbox, as the daemon's stats have it
	Source     string `json:"source"`            // where the figure to quote is from
}

// Best gives the figure to quote, and whether it is PSS.
func (m Memory) Best() (bytes int64, pss bool) {
	if m.PSS > 0 {
		return m.PSS, true
	}
	return m.WorkingSet, false
}

// Runtime is what was measured of one runtime.
type Runtime struct {
	Name      string               `json:"name"`
	Available bool                 `json:"available"`
	Why       string               `json:"why,omitempty"`   // it was not measured: the reason
	Error     string               `json:"error,omitempty"` // what broke off its measurement
	Claims    sandbox.Capabilities `json:"claims"`          // what the driver says of itself, beside what was measured
	Boundary  []Row                `json:"boundary,omitempty"`
	Battery   []Row                `json:"battery,omitempty"`
	Timings   []Timing             `json:"timings,omitempty"`
	Memory    *Memory              `json:"memory,omitempty"`
	Captures  []Row                `json:"captures,omitempty"`
	TookMS    float64              `json:"took_ms,omitempty"`
}

// Measured tells whether there is anything but the reason.
func (r Runtime) Measured() bool { return len(r.Boundary)+len(r.Battery)+len(r.Timings) > 0 }

// Timing finds a series with samples.
func (r Runtime) Timing(id string) (Timing, bool) {
	for _, t := range r.Timings {
		if t.ID == id && t.N > 0 {
			return t, true
		}
	}
	return Timing{}, false
}

// Row finds a row of any section.
func (r Runtime) Row(id string) (Row, bool) {
	for _, rows := range [][]Row{r.Boundary, r.Battery, r.Captures} {
		for _, row := range rows {
			if row.ID == id {
				return row, true
			}
		}
	}
	return Row{}, false
}

// Host is the machine that was measured.
type Host struct {
	Local     bool    `json:"local"` // the program ran on the daemon's own machine; else the rest is not known
	Kernel    string  `json:"kernel,omitempty"`
	CPU       string  `json:"cpu,omitempty"`
	CPUs      int     `json:"cpus,omitempty"`
	MemoryMiB int64   `json:"memory_mib,omitempty"`
	Cgroups   string  `json:"cgroups,omitempty"`
	KVM       bool    `json:"kvm"`
	Load1     float64 `json:"load_1min"` // just before the run
}

// Report is one run.
type Report struct {
	Schema   int       `json:"schema"`
	At       time.Time `json:"at"`
	Version  string    `json:"version"` // of the daemon
	Host     Host      `json:"host"`
	Template string    `json:"template"`
	Quick    bool      `json:"quick"` // few samples: figures to look at, not to quote
	Runtimes []Runtime `json:"runtimes"`
	Notes    []string  `json:"notes,omitempty"`
	TookMS   float64   `json:"took_ms"`
}

// schema is the version of the JSON form.
const schema = 1

// Runtime finds a runtime's part.
func (r *Report) Runtime(name string) (Runtime, bool) {
	if r == nil {
		return Runtime{}, false
	}
	for _, rt := range r.Runtimes {
		if rt.Name == name {
			return rt, true
		}
	}
	return Runtime{}, false
}

// count tells how many rows have each verdict.
func count(rows []Row) (yes, no, skip int) {
	for _, r := range rows {
		switch r.Verdict {
		case Yes:
			yes++
		case No:
			no++
		case Skip:
			skip++
		}
	}
	return
}
