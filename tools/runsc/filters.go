package main

import (
	_ "unsafe" // for linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/runsc/boot/filter"
)

// precompiled is the table in which gVisor looks for a filter by the options
// that it is of; one that it does not find it compiles.
//
//go:linkname precompiled gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiled map[string]precompiledseccomp.Program

// register is filters_<GOARCH>.go's, which ./precompile writes.
var register func(map[string]precompiledseccomp.Program)

// useFilters enters the filters in gVisor's table. A build without them works
// as well, and is slower.
func useFilters() {
	filter.ListPrecompiled() // makes the table, empty
	if register != nil && precompiled != nil {
		register(precompiled)
	}
}
