package template

import (
	"context"
	"os"
	"testing"
	"time"
)

// TestMeasureBase is for figures by hand: WARREN_MEASURE_BASE=DIR.
func TestMeasureBase(t *testing.T) {
	dir := os.Getenv("WARREN_MEASURE_BASE")
	if dir == "" {
		t.Skip("for measuring: set WARREN_MEASURE_BASE to a directory")
	}
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	tpl, err := l.BuildDebian(context.Background(), Base(), func(e Event) {
		if e.Stage != StageLog && e.Unit == "" {
			t.Log(time.Since(start).Round(time.Millisecond), e.Stage, e.Message)
		}
	})
	t.Log(time.Since(start), tpl, err)
	if err != nil {
		t.Logf("%#v", err)
		t.Fail()
	}
}
