// Package sandbox is Warren's domain: the types, states, reasons and errors
// that every other package speaks, and the contract that a runtime fulfils.
//
// It imports nothing else of Warren's, so that a runtime, the manager and the
// API can share its vocabulary without knowing each other.
package sandbox
