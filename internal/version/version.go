// Package version holds what this build calls itself.
package version

// Version is set when the program is linked; a build by hand is "dev".
var Version = "dev"
