// Package cli is the command line of Warren: flags in, text out. Everything
// about sandboxes goes through the daemon's API by package client.
//
// Exit codes: 0; 1 for a failure; 2 for a wrong command line. run, exec and
// shell exit with the command's own code, 128+n where signal n ended it; 125
// where Warren itself failed, 126 where the command could not be run, 127
// where it was not found.
package cli
