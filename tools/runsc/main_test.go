package main

import (
	"slices"
	"testing"

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

// TestFilters: gVisor finds the filter of the options that Warren's Sentries
// have, and it is the one that it would compile.
func TestFilters(t *testing.T) {
	if register == nil {
		t.Skip("no filters for this architecture: make bin/runsc")
	}
	useFilters()
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		t.Fatal(err)
	}
	for _, directFS := range []bool{true, false} {
		found := false
		for _, info := range systrap.PrecompiledSeccompInfo() {
			opt := config.Options{Platform: info, HostFilesystem: directFS, ControllerFD: 8}
			p, ok := filter.GetPrecompiled(opt.ConfigKey())
			if !ok {
				continue
			}
			found = true
			got, err := p.RenderInstructions(opt.Vars())
			if err != nil {
				t.Fatal(err)
			}
			rules, deny := config.Rules(opt)
			program := seccomp.Program{
				RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: rules, Action: seccomp.Allow}},
				Options:  config.SeccompOptions(opt),
			}
			want, _, err := program.Build()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %d instructions, and gVisor compiles %d others", opt.ConfigKey(), len(got), len(want))
			}
		}
		if !found {
			t.Errorf("no filter with direct files = %v", directFS)
		}
	}
}
