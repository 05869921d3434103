package report

import (
	"errors"
	"testing"
)

func TestPercentile(t *testing.T) {
	s := []float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for _, tc := range []struct{ p, want float64 }{{0, 1}, {10, 1}, {50, 5}, {51, 6}, {99, 10}, {100, 10}} {
		if got := Percentile(s, tc.p); got != tc.want {
			t.Errorf("p%v is %v, want %v", tc.p, got, tc.want)
		}
	}
	if Percentile(nil, 50) != 0 {
		t.Error("no samples")
	}
}

func TestFigureCountsFailuresApart(t *testing.T) {
	r := New("x", "y")
	f := r.Figure("a", "ms")
	f.Add(3, nil)
	f.Add(0, errors.New("no"))
	f.Add(1, nil)
	if f.N != 3 || f.Failures != 1 || f.P50 != 1 || f.Max != 3 || len(f.Samples) != 2 {
		t.Errorf("%+v", f)
	}
	r.AtMost("a", 2, 1, "ms")
	r.AtLeast("a", 2, 1, "ms")
	if r.Marks[0].Met || !r.Marks[1].Met {
		t.Errorf("%+v", r.Marks)
	}
}
