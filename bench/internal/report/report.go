// Package report holds what a benchmark measured: samples with their
// percentiles and failures, and the marks that they are held against. A report
// is kept as JSON with every sample in it, so that a figure can be checked.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warrenhq/warren/internal/host"
)

// Report is one run of one benchmark.
type Report struct {
	Name    string    `json:"name"`
	About   string    `json:"about"`
	At      time.Time `json:"at"`
	Commit  string    `json:"commit"`
	Host    Host      `json:"host"`
	Figures []*Figure `json:"figures"`
	Marks   []Mark    `json:"marks"`
	Notes   []string  `json:"notes,omitempty"`
}

// Host is the machine that a report was made on.
type Host struct {
	Kernel    string          `json:"kernel"`
	CPU       string          `json:"cpu"`
	CPUs      int             `json:"cpus"`
	MemoryMiB int64           `json:"memory_mib"`
	Cgroups   host.CgroupMode `json:"cgroups"`
	Load1     string          `json:"load_1min"` // just before the run: these hosts are shared
}

// Figure is one series of samples of the same thing.
type Figure struct {
	Name     string    `json:"name"`
	Unit     string    `json:"unit"`
	N        int       `json:"n"`
	Failures int       `json:"failures"`
	Errors   []string  `json:"errors,omitempty"` // the first few
	Min      float64   `json:"min"`
	P50      float64   `json:"p50"`
	P99      float64   `json:"p99"`
	Max      float64   `json:"max"`
	Samples  []float64 `json:"samples"`
}

// Mark is a bound that a figure is held against.
type Mark struct {
	Name  string  `json:"name"`
	Bound string  `json:"bound"` // "≤" or "≥"
	Limit float64 `json:"limit"`
	Got   float64 `json:"got"`
	Unit  string  `json:"unit"`
	Met   bool    `json:"met"`
}

// New starts a report.
func New(name, about string) *Report {
	mem, _ := host.ReadMemory()
	return &Report{
		Name: name, About: about, At: time.Now().UTC().Truncate(time.Second), Commit: commit(),
		Host: Host{
			Kernel: firstLine("/proc/sys/kernel/osrelease"), CPU: cpuModel(), CPUs: runtime.NumCPU(),
			MemoryMiB: mem.Total >> 20, Cgroups: host.Cgroups(),
			Load1: strings.SplitN(firstLine("/proc/loadavg"), " ", 2)[0],
		},
	}
}

// Figure adds a series.
func (r *Report) Figure(name, unit string) *Figure {
	f := &Figure{Name: name, Unit: unit}
	r.Figures = append(r.Figures, f)
	return f
}

// Add takes one sample, or counts a failure.
func (f *Figure) Add(v float64, err error) {
	f.N++
	if err != nil {
		f.Failures++
		if len(f.Errors) < 5 {
			f.Errors = append(f.Errors, err.Error())
		}
		return
	}
	f.Samples = append(f.Samples, v)
	s := slices.Sorted(slices.Values(f.Samples))
	f.Min, f.Max = s[0], s[len(s)-1]
	f.P50, f.P99 = Percentile(s, 50), Percentile(s, 99)
}

// AddMillis takes a duration since start as milliseconds.
func (f *Figure) AddMillis(start time.Time, err error) {
	f.Add(float64(time.Since(start).Microseconds())/1000, err)
}

// Percentile gives the p-th percentile of sorted samples by the nearest rank.
func Percentile(sorted []float64, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(p/100*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

// AtMost holds got against an upper bound.
func (r *Report) AtMost(name string, got, limit float64, unit string) {
	r.Marks = append(r.Marks, Mark{Name: name, Bound: "≤", Limit: limit, Got: got, Unit: unit, Met: got <= limit})
}

// AtLeast holds got against a lower bound.
func (r *Report) AtLeast(name string, got, limit float64, unit string) {
	r.Marks = append(r.Marks, Mark{Name: name, Bound: "≥", Limit: limit, Got: got, Unit: unit, Met: got >= limit})
}

// Note adds a sentence that a reader of the figures needs.
func (r *Report) Note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// Print writes the report as text.
func (r *Report) Print(w io.Writer) {
	fmt.Fprintf(w, "\n%s: %s\n", r.Name, r.About)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  figure\tn\tfailed\tp50\tp99\tmax\t")
	for _, f := range r.Figures {
		fmt.Fprintf(t, "  %s\t%d\t%d\t%.4g\t%.4g\t%.4g\t%s\n", f.Name, f.N, f.Failures, f.P50, f.P99, f.Max, f.Unit)
	}
	t.Flush()
	for _, m := range r.Marks {
		verdict := "met"
		if !m.Met {
			verdict = "MISSED"
		}
		fmt.Fprintf(w, "  %s: %s: %.4g (%s %.4g %s)\n", verdict, m.Name, m.Got, m.Bound, m.Limit, m.Unit)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "  note: %s\n", n)
	}
}

// Save writes the report as dir/NAME.json.
func (r *Report) Save(dir string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, r.Name+".json"), append(data, '\n'), 0o644)
}

func firstLine(path string) string {
	data, _ := os.ReadFile(path)
	line, _, _ := strings.Cut(string(data), "\n")
	return line
}

func cpuModel() string {
	data, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(data)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}

func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
