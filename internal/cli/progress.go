package cli

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/warrenhq/warren/internal/api/wire"
)

// bar shows how a copy goes on, on a terminal; elsewhere it shows nothing.
type bar struct {
	p *mpb.Progress
	b *mpb.Bar
}

// barAfter is the size below which a copy is over before a bar is seen.
const barAfter = 8 << 20

// bar begins a bar; total is -1 where it is not known.
func (p *copier) bar(name string, total int64) *bar {
	f, ok := p.a.err.(*os.File)
	if p.quiet || !ok || !tty(f) || (total >= 0 && total < barAfter) {
		return &bar{}
	}
	b := &bar{p: mpb.New(mpb.WithOutput(f), mpb.WithRefreshRate(100*time.Millisecond))}
	before := mpb.PrependDecorators(decor.Name(clean(name)+" "), decor.CountersKibiByte("% .1f / % .1f"))
	if total < 0 {
		before = mpb.PrependDecorators(decor.Name(clean(name)+" "), decor.CurrentKibiByte("% .1f"))
	}
	b.b = b.p.AddBar(max(total, 0), before, mpb.BarRemoveOnComplete(),
		mpb.AppendDecorators(decor.AverageSpeed(decor.SizeB1024(0), "% .1f")))
	return b
}

func (b *bar) reader(r io.Reader) io.Reader {
	if b.b == nil {
		return r
	}
	return &barReader{r, b.b}
}

type barReader struct {
	r io.Reader
	b *mpb.Bar
}

func (r *barReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.b.IncrBy(n)
	return n, err
}

// end passes err on.
func (b *bar) end(err error) error { return err }

// done takes the bar off the screen.
func (b *bar) done() {
	if b.b != nil {
		b.b.Abort(true)
		b.p.Wait()
	}
}

// buildProgress shows a build: bars on a terminal, plain lines elsewhere.
type buildProgress struct {
	a     *app
	p     *mpb.Progress
	b     *mpb.Bar
	stage string
	tick  time.Time
}

func (a *app) newBuildProgress(plain bool) *buildProgress {
	bp := &buildProgress{a: a}
	if f, ok := a.err.(*os.File); ok && !plain && !a.json && tty(f) {
		bp.p = mpb.New(mpb.WithOutput(f), mpb.WithRefreshRate(100*time.Millisecond))
	}
	return bp
}

// lineEvery is how often a plain line tells of a stage that counts.
const lineEvery = 5 * time.Second

func (bp *buildProgress) event(e wire.BuildEvent) {
	switch e.Stage {
	case "log":
		bp.line("  %s", e.Message)
		return
	case "warning":
		where := ""
		if e.Line > 0 {
			where = fmt.Sprintf("line %d: ", e.Line)
		}
		bp.line("warning: %s%s", where, e.Message)
		return
	case "step":
		cached := ""
		if e.Cached {
			cached = " (cached)"
		}
		bp.closeBar()
		bp.stage = e.Stage
		bp.line("[%d/%d] %s%s", e.Current, e.Total, e.Message, cached)
		return
	case "done":
		return // the result is printed by the caller
	}
	if e.Stage != bp.stage {
		bp.closeBar()
		bp.stage, bp.tick = e.Stage, time.Now()
		if bp.p == nil || (e.Total == 0 && e.Message != "") {
			if e.Message == "" {
				bp.line("%s", stageName(e.Stage))
			} else {
				bp.line("%s: %s", stageName(e.Stage), e.Message)
			}
		}
	}
	if e.Total <= 0 && e.Current <= 0 {
		return
	}
	if bp.p == nil {
		if time.Since(bp.tick) >= lineEvery {
			bp.tick = time.Now()
			bp.line("%s: %s", stageName(e.Stage), amount(e))
		}
		return
	}
	if bp.b == nil {
		counters := decor.CountersNoUnit("%d / %d")
		if e.Unit == "bytes" {
			counters = decor.CountersKibiByte("% .1f / % .1f")
		}
		bp.b = bp.p.AddBar(e.Total, mpb.PrependDecorators(decor.Name(stageName(e.Stage)+" "), counters), mpb.BarRemoveOnComplete())
	}
	bp.b.SetTotal(max(e.Total, e.Current+1), false)
	bp.b.SetCurrent(e.Current)
}

func amount(e wire.BuildEvent) string {
	show := func(n int64) string {
		if e.Unit == "bytes" {
			return size(n)
		}
		return fmt.Sprint(n)
	}
	s := show(e.Current)
	if e.Total > 0 {
		s += " of " + show(e.Total)
	}
	if e.Unit != "" && e.Unit != "bytes" {
		s += " " + e.Unit
	}
	return s
}

func stageName(stage string) string {
	switch stage {
	case "resolve":
		return "resolving"
	case "download":
		return "downloading"
	case "extract":
		return "unpacking"
	case "install":
		return "installing"
	case "context":
		return "reading the context"
	case "commit":
		return "keeping the result"
	}
	return stage
}

// line prints above the bars.
func (bp *buildProgress) line(format string, args ...any) {
	text := clean(fmt.Sprintf(format, args...)) + "\n"
	if bp.p != nil {
		bp.p.Write([]byte(text))
		return
	}
	io.WriteString(bp.a.err, text)
}

func (bp *buildProgress) closeBar() {
	if bp.b != nil {
		bp.b.Abort(true)
		bp.b.Wait()
		bp.b = nil
	}
}

func (bp *buildProgress) done() {
	bp.closeBar()
	if bp.p != nil {
		bp.p.Wait()
	}
}
