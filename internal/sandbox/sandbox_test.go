package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
	"testing"
)

func TestNewID(t *testing.T) {
	seen := map[ID]bool{}
	for range 1000 {
		id := NewID()
		if seen[id] {
			t.Fatalf("%s came twice", id)
		}
		seen[id] = true
		if len(id) != 20 {
			t.Fatalf("%s has %d characters", id, len(id))
		}
		if got, err := ParseID(string(id)); err != nil || got != id {
			t.Fatalf("ParseID(%s) = %s, %v", id, got, err)
		}
	}
}

func TestParseIDRefuses(t *testing.T) {
	for _, s := range []string{
		"", "a", "1abc", "Abc", "a-b", "a_b", "a.b", "a/b", "../etc", "ab\x00", "ab\n", "ü23", strings.Repeat("a", 32), strings.Repeat("x", 1<<20), "\xff\xfe",
	} {
		_, err := ParseID(s)
		if CodeOf(err) != CodeInvalid {
			t.Errorf("ParseID(%.20q) gave %v", s, err)
		} else if len(err.Error()) > 300 {
			t.Errorf("ParseID(%.20q): a message of %d bytes", s, len(err.Error()))
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("sbx0123456789abcdefgh")
	f.Add("../x")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err == nil && (string(id) != s || strings.ContainsAny(s, "/.-\x00 ")) {
			t.Errorf("took %q as %q", s, id)
		}
	})
}

func TestStates(t *testing.T) {
	for _, s := range States() {
		for _, to := range States() {
			if s.Ended() && s.CanBecome(to) {
				t.Errorf("%s is final, but may become %s", s, to)
			}
			if !s.Ended() && to.Ended() && !s.CanBecome(to) {
				t.Errorf("%s cannot end as %s", s, to)
			}
		}
		if s.CanBecome(s) || s.CanBecome(Creating) {
			t.Errorf("%s may become itself or creating", s)
		}
		if s.Live() && s.Ended() {
			t.Errorf("%s is live and ended", s)
		}
	}
	for r, want := range map[Reason]State{
		ReasonKilledByUser: Killed, ReasonTimeout: Killed, ReasonPolicy: Killed,
		ReasonOOM: Failed, ReasonRuntimeCrashed: Failed, ReasonCreateFailed: Failed,
		ReasonInterrupted: Failed, ReasonHostRestarted: Failed,
	} {
		if got := r.FinalState(); got != want {
			t.Errorf("%s ends in %s, want %s", r, got, want)
		}
	}
}

func TestErrors(t *testing.T) {
	err := Errorf(CodeNotFound, "template %q is not here: %w", "x", fs.ErrNotExist).With("template", "x")
	wrapped := fmt.Errorf("create: %w", err)
	if CodeOf(wrapped) != CodeNotFound {
		t.Errorf("code of a wrapped error is %s", CodeOf(wrapped))
	}
	if !errors.Is(wrapped, fs.ErrNotExist) {
		t.Error("the cause is lost")
	}
	if !errors.Is(wrapped, &Error{Code: CodeNotFound}) || errors.Is(wrapped, &Error{Code: CodeExists}) {
		t.Error("errors.Is does not go by code")
	}
	if CodeOf(nil) != "" || CodeOf(errors.New("x")) != CodeInternal {
		t.Error("codes of nil and of a plain error")
	}
	more := err.With("a", "b")
	if len(err.Details) != 1 || len(more.Details) != 2 {
		t.Errorf("With changed its receiver: %v, %v", err.Details, more.Details)
	}
}

func TestResourcesValidate(t *testing.T) {
	ok := DefaultResources()
	for _, tc := range []struct {
		name string
		edit func(*Resources)
		ok   bool
	}{
		{"defaults", func(*Resources) {}, true},
		{"no cpu", func(r *Resources) { r.CPUs = 0 }, false},
		{"NaN", func(r *Resources) { r.CPUs = math.NaN() }, false},
		{"infinite", func(r *Resources) { r.CPUs = math.Inf(1) }, false},
		{"negative cpu", func(r *Resources) { r.CPUs = -1 }, false},
		{"more than the host", func(r *Resources) { r.CPUs = 3 }, false},
		{"too little memory", func(r *Resources) { r.MemoryMiB = MinMemoryMiB - 1 }, false},
		{"absurd memory", func(r *Resources) { r.MemoryMiB = math.MaxInt }, false},
		{"few pids", func(r *Resources) { r.PIDs = 1 }, false},
		{"many pids", func(r *Resources) { r.PIDs = MaxPIDs + 1 }, false},
		{"negative disk", func(r *Resources) { r.DiskMiB = -1 }, false},
	} {
		r := ok
		tc.edit(&r)
		err := r.Validate(2)
		if (err == nil) != tc.ok || err != nil && CodeOf(err) != CodeInvalid {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if got := (Resources{CPUs: 2}).Or(ok); got.CPUs != 2 || got.MemoryMiB != ok.MemoryMiB || got.PIDs != ok.PIDs {
		t.Errorf("Or gave %+v", got)
	}
}
