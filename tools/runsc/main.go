// Runsc is gVisor's own runsc, at the version that this module pins, with its
// system call filter compiled beforehand. gVisor builds its releases so; the
// modules from which this one is made lack the generated table, and without it
// every Sentry compiles the filter anew when it starts or restores.
package main

import "gvisor.dev/gvisor/runsc/cli/maincli"

func main() {
	useFilters()
	maincli.Main()
}
