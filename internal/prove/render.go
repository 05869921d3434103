package prove

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"
)

// Table is what a report says, as text: for a terminal, and for HTML.
type Table struct {
	Title  string
	About  string
	Header []string
	Rows   [][]Cell
}

// Cell is one cell; Verdict, where set, colours it.
type Cell struct {
	Text    string
	Verdict Verdict
	More    string // the end of an output, for a page that can hide it
}

func cells(texts ...string) []Cell {
	out := make([]Cell, len(texts))
	for i, t := range texts {
		out[i].Text = t
	}
	return out
}

// Summary is the table of runtimes with what was measured in each place.
func Summary(r *Report) Table {
	t := Table{
		Title:  "Runtimes on this host",
		Header: []string{"runtime", "boundary", "real work", "start p50 / p99", "exec p50 / p99", "memory per idle sandbox", "checkpoint"},
	}
	for _, rt := range r.Runtimes {
		row := cells(rt.Name)
		if !rt.Available {
			row = append(row, Cell{Text: rt.Why, Verdict: Skip})
			t.Rows = append(t.Rows, append(row, cells("-", "-", "-", "-", "-")...))
			continue
		}
		row = append(row, boundaryCell(rt), workCell(rt), timingCell(rt, "start_pool", "start_restore", "start_cold"), timingCell(rt, "exec"), memoryCell(rt), captureCell(rt))
		t.Rows = append(t.Rows, row)
	}
	return t
}

func boundaryCell(rt Runtime) Cell {
	if len(rt.Boundary) == 0 {
		return Cell{Text: "not measured", Verdict: Skip}
	}
	c := Cell{Text: "kernel not known", Verdict: Info}
	if k, ok := rt.Row("kernel"); ok {
		switch k.Verdict {
		case Yes:
			c = Cell{Text: "a kernel of its own", Verdict: Yes}
		case No:
			c = Cell{Text: "the host's kernel", Verdict: Info} // what a container is: no fault of its driver
		}
	}
	yes, no, _ := count(rt.Boundary)
	c.Text += fmt.Sprintf("; %d of %d checks hold", yes, yes+no)
	return c
}

func workCell(rt Runtime) Cell {
	yes, no, skip := count(rt.Battery)
	if yes+no == 0 {
		return Cell{Text: "not measured", Verdict: Skip}
	}
	c := Cell{Text: fmt.Sprintf("%d of %d", yes, yes+no), Verdict: Yes}
	if no > 0 {
		c.Verdict = Info
	}
	if skip > 0 {
		c.Text += fmt.Sprintf(" (%d skipped)", skip)
	}
	return c
}

func timingCell(rt Runtime, ids ...string) Cell {
	for _, id := range ids {
		if t, ok := rt.Timing(id); ok {
			text := fmt.Sprintf("%s / %s", ms(t.P50), ms(t.P99))
			if how, ok := strings.CutPrefix(id, "start_"); ok {
				text = how + " " + text
			}
			return Cell{Text: text}
		}
	}
	return Cell{Text: "not measured", Verdict: Skip}
}

func memoryCell(rt Runtime) Cell {
	if rt.Memory == nil {
		return Cell{Text: "not measured", Verdict: Skip}
	}
	n, pss := rt.Memory.Best()
	what := "working set"
	if pss {
		what = "PSS"
	}
	return Cell{Text: fmt.Sprintf("%s %s", humanize.IBytes(uint64(max(n, 0))), what)}
}

// The ids of the rows that say which captures work at all.
const (
	rowSuspend   = "suspend"
	rowDisk      = "capture_disk"
	rowFull      = "capture_full"
	rowHibernate = "hibernate"
)

func captureCell(rt Runtime) Cell {
	if len(rt.Captures) == 0 {
		return Cell{Text: "not measured", Verdict: Skip}
	}
	var can, cannot []string
	for _, k := range []struct{ id, name string }{{rowSuspend, "suspend"}, {rowDisk, "disk"}, {rowFull, "disk and memory"}, {rowHibernate, "hibernate"}} {
		if row, ok := rt.Row(k.id); ok && row.Verdict == Yes {
			can = append(can, k.name)
		} else if ok {
			cannot = append(cannot, k.name)
		}
	}
	kept, lost := 0, 0
	for _, r := range rt.Captures {
		if strings.HasPrefix(r.ID, "fork.") {
			switch r.Verdict {
			case Yes:
				kept++
			case No:
				lost++
			}
		}
	}
	c := Cell{Text: strings.Join(can, ", "), Verdict: Yes}
	if len(can) == 0 {
		c = Cell{Text: "none", Verdict: No}
	} else if len(cannot) > 0 {
		c.Verdict = Info
	}
	if kept+lost > 0 {
		c.Text += fmt.Sprintf("; a fork is right in %d of %d", kept, kept+lost)
	}
	return c
}

func ms(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.1f ms", v)
	case v < 10000:
		return fmt.Sprintf("%.0f ms", v)
	}
	return fmt.Sprintf("%.1f s", v/1000)
}

// Tables gives everything in a report.
func Tables(r *Report) []Table {
	out := []Table{Summary(r)}
	var rts []Runtime
	for _, rt := range r.Runtimes {
		if rt.Available {
			rts = append(rts, rt)
		}
	}
	if len(rts) == 0 {
		return out
	}
	out = append(out, timingTable(rts))
	for _, s := range []struct {
		title, about string
		rows         func(Runtime) []Row
	}{
		{"Boundary", "Seen and tried from inside as root. yes: it holds; no: something of the host comes through.", func(r Runtime) []Row { return r.Boundary }},
		{"Real work", "Done in one sandbox of the template. skip: it could not be tried, and why.", func(r Runtime) []Row { return r.Battery }},
		{"Captures and forks", "What a capture preserves, found by making one. no: measured, it does not hold.", func(r Runtime) []Row { return r.Captures }},
	} {
		if t := rowTable(s.title, s.about, rts, s.rows); len(t.Rows) > 0 {
			out = append(out, t)
		}
	}
	return out
}

func timingTable(rts []Runtime) Table {
	t := Table{
		Title: "Times and memory", About: "As the API's client sees them, one after the other. p99 is the greatest where n is below 100.",
		Header: []string{"what", "runtime", "n", "failed", "p50", "p99", "min", "max", "note"},
	}
	for _, rt := range rts {
		for _, g := range rt.Timings {
			row := cells(g.Name, rt.Name, fmt.Sprint(g.N), fmt.Sprint(g.Failures))
			if g.N > 0 {
				row = append(row, cells(ms(g.P50), ms(g.P99), ms(g.Min), ms(g.Max), g.Note)...)
			} else {
				row = append(row, cells("-", "-", "-", "-", g.Note)...)
			}
			if g.Failures > 0 {
				row[3].Verdict = No
			}
			t.Rows = append(t.Rows, row)
		}
		if m := rt.Memory; m != nil {
			n, _ := m.Best()
			t.Rows = append(t.Rows, cells("memory of an idle sandbox", rt.Name, fmt.Sprint(m.N), "0", humanize.IBytes(uint64(max(n, 0))), "-", "-", "-", m.Source))
		}
	}
	return t
}

// rowTable puts the runtimes side by side where each has a verdict, with the
// details behind.
func rowTable(title, about string, rts []Runtime, rows func(Runtime) []Row) Table {
	t := Table{Title: title, About: about, Header: []string{"what"}}
	for _, rt := range rts {
		t.Header = append(t.Header, rt.Name)
	}
	t.Header = append(t.Header, "seen")
	seen := map[string]bool{}
	for _, rt := range rts {
		for _, r := range rows(rt) {
			if seen[r.ID] {
				continue
			}
			seen[r.ID] = true
			line := cells(r.Name)
			var details, more []string
			for _, other := range rts {
				c := Cell{Text: "-"}
				for _, o := range rows(other) {
					if o.ID != r.ID {
						continue
					}
					c = Cell{Text: string(o.Verdict), Verdict: o.Verdict}
					d := o.Detail
					if len(rts) > 1 && d != "" {
						d = other.Name + ": " + d
					}
					if d != "" {
						details = append(details, d)
					}
					if o.Output != "" {
						more = append(more, other.Name+":\n"+o.Output)
					}
				}
				line = append(line, c)
			}
			if len(details) > 1 && sameDetail(rts, rows, r.ID) {
				details = []string{r.Detail}
			}
			t.Rows = append(t.Rows, append(line, Cell{Text: strings.Join(details, " | "), More: strings.Join(more, "\n\n")}))
		}
	}
	return t
}

func sameDetail(rts []Runtime, rows func(Runtime) []Row, id string) bool {
	var first *Row
	for _, rt := range rts {
		for _, o := range rows(rt) {
			if o.ID == id {
				if first != nil && first.Detail != o.Detail {
					return false
				}
				first = &o
			}
		}
	}
	return true
}

// Head is the lines above the tables.
func Head(r *Report) []string {
	out := []string{fmt.Sprintf("warren prove, %s, daemon %s, template %s", r.At.Format("2006-01-02 15:04:05 UTC"), r.Version, r.Template)}
	if h := r.Host; h.Local {
		kvm := "no /dev/kvm"
		if h.KVM {
			kvm = "/dev/kvm"
		}
		out = append(out, fmt.Sprintf("host: %s, %d CPUs (%s), %d MiB, cgroups %s, %s, load %.2f", h.Kernel, h.CPUs, h.CPU, h.MemoryMiB, h.Cgroups, kvm, h.Load1))
	}
	for _, n := range r.Notes {
		out = append(out, "note: "+n)
	}
	for _, rt := range r.Runtimes {
		if rt.Error != "" {
			out = append(out, fmt.Sprintf("%s could not be measured whole: %s", rt.Name, rt.Error))
		}
	}
	return out
}

// maxCell bounds a cell on a terminal.
const maxCell = 100

// Text writes a report for a terminal. paint colours a verdict; nil does not.
func Text(w io.Writer, r *Report, paint func(v Verdict, s string) string) error {
	for _, l := range Head(r) {
		if _, err := fmt.Fprintln(w, printable(l)); err != nil {
			return err
		}
	}
	for _, t := range Tables(r) {
		fmt.Fprintf(w, "\n%s\n", t.Title)
		if t.About != "" {
			fmt.Fprintf(w, "%s\n", t.About)
		}
		if err := text(w, t, paint); err != nil {
			return err
		}
	}
	return nil
}

// text aligns by columns first and colours afterwards: tabwriter would count
// the colours.
func text(w io.Writer, t Table, paint func(Verdict, string) string) error {
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	line := func(row []Cell) {
		texts := make([]string, len(row))
		for i, c := range row {
			s := strings.Join(strings.Fields(printable(c.Text)), " ")
			if r := []rune(s); len(r) > maxCell && i < len(row)-1 {
				s = string(r[:maxCell]) + "…"
			}
			if s == "" {
				s = "-"
			}
			texts[i] = s
		}
		fmt.Fprintln(tw, strings.TrimRight(strings.Join(texts, "\t"), " "))
	}
	line(cells(upper(t.Header)...))
	for _, row := range t.Rows {
		line(row)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for i, l := range strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n") {
		if i > 0 && paint != nil {
			l = colour(l, t.Rows[i-1], paint)
		}
		if _, err := fmt.Fprintln(w, strings.TrimRight(l, " ")); err != nil {
			return err
		}
	}
	return nil
}

// colour paints the verdicts of a line where they stand as words of their own.
func colour(line string, row []Cell, paint func(Verdict, string) string) string {
	out, rest := "", line
	for i, c := range row {
		if i == 0 || c.Verdict == "" || c.Text != string(c.Verdict) {
			continue
		}
		at := strings.Index(rest, "  "+c.Text)
		if at < 0 {
			continue
		}
		out += rest[:at+2] + paint(c.Verdict, c.Text)
		rest = rest[at+2+len(c.Text):]
	}
	return out + rest
}

func upper(s []string) []string {
	out := make([]string, len(s))
	for i := range s {
		out[i] = strings.ToUpper(s[i])
	}
	return out
}
