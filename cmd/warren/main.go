// Command warren is Warren's command line and daemon.
package main

import (
	"os"

	"github.com/warrenhq/warren/internal/cli"
)

func main() { os.Exit(cli.Main()) }
