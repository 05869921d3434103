package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
)

// printJSON prints v as JSON, indented on a terminal.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetEscapeHTML(false)
	if tty(a.out) {
		enc.SetIndent("", "  ")
	}
	return enc.Encode(v)
}

// table prints rows under a header, columns aligned.
func (a *app) table(w io.Writer, header []string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	line := func(cells []string) {
		for i, c := range cells {
			c = strings.ReplaceAll(strings.ReplaceAll(clean(c), "\t", " "), "\n", " ")
			if c == "" {
				c = "-"
			}
			cells[i] = c
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	line(header)
	for _, r := range rows {
		line(r)
	}
	return tw.Flush()
}

// paint colours s on a terminal, unless NO_COLOR (no-color.org) is set.
func (a *app) paint(w io.Writer, color, s string) string {
	if !tty(w) || a.getenv("NO_COLOR") != "" || a.getenv("TERM") == "dumb" {
		return s
	}
	return "\x1b[" + color + "m" + s + "\x1b[0m"
}

// ANSI colours (ECMA-48 SGR).
const (
	green  = "32"
	yellow = "33"
	red    = "31"
	bold   = "1"
	faint  = "2"
)

func ago(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return humanize.Time(t)
}

// until tells how long it is to t, nil being never.
func until(t *time.Time) string {
	if t == nil {
		return "never"
	}
	d := time.Until(*t)
	if d <= 0 {
		return "now"
	}
	return shortDuration(d)
}

// shortDuration prints d by its two largest units.
func shortDuration(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}

func size(n int64) string {
	if n < 0 {
		n = 0
	}
	return humanize.IBytes(uint64(n))
}

// number prints f without a needless fraction.
func number(f float64) string {
	if f == math.Trunc(f) {
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.4g", f)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
