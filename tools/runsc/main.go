// Runsc is gVisor's own runsc, at the version that this module pins, with its
// system call filter compiled beforehand. gVisor builds its releases so; the
// modules from which this one is made lack the generated table, and without it
// every Sentry compiles the filter anew when it starts or restores.
package main

import (
	"gvisor.dev/gvisor/pkg/gomaxprocs"
	"gvisor.dev/gvisor/runsc/cli/maincli"
)

func main() {
	useFilters()
	// A Sentry runs as many Go threads as its sandbox has processors, and one
	// that runs or waits for a process of the sandbox does not give way to the
	// kernel's own work before the Go runtime notices, 10 to 20 ms later. One
	// more is for that; the sandbox sees no other number of processors, and its
	// control group bounds what it gets.
	gomaxprocs.Add(1)
	maincli.Main()
}
