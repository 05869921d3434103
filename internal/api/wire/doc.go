// Package wire is the JSON of the native API: the bodies that the server reads
// and writes, shared with the Go client. Times are RFC 3339 in UTC, durations
// are seconds unless a name says otherwise, sizes are bytes unless a name says
// MiB. A field that is not set is left out.
package wire
