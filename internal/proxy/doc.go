// Package proxy carries clients' traffic to ports inside sandboxes.
//
// A request names its sandbox and port by its host name,
//
//	<port>-<id>.<domain>
//
// or by headers (E2b-Sandbox-Id and E2b-Sandbox-Port, or Warren-Sandbox-Id and
// Warren-Sandbox-Port); the host name goes first. HTTP/1.1, WebSocket and
// other upgrades, HTTP/2 without TLS (h2c) and gRPC with its trailers pass
// through. What comes back is the workload's: it is never interpreted.
//
// The signed URL of a file (GET and POST /files with a signature) may name no
// sandbox: it goes to the one whose agent's token made the signature.
//
// Who may pass: on the daemon's unix socket everybody who could connect. On
// TCP, the agent's port is guarded by the agent's own access token; every
// other port needs an API key of the sandbox's tenant, the sandbox's traffic
// token, or a sandbox whose ports are public. Neither Warren's keys nor the
// traffic token are forwarded into the sandbox.
package proxy
