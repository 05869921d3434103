// Package proto holds the protobuf sources of the agent's services, and the
// code generated from them.
package proto

//go:generate go run -C ../tools/gen . ../../proto
