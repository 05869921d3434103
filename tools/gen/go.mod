// This module pins the protobuf generators. It is a module of its own so that
// they stay out of the daemon's dependencies.
module github.com/warrenhq/warren/tools/gen

go 1.26.3

require (
	github.com/bufbuild/protocompile v0.14.1
	google.golang.org/protobuf v1.36.12
)

require (
	connectrpc.com/connect v1.21.1 // indirect
	golang.org/x/sync v0.8.0 // indirect
)

tool (
	connectrpc.com/connect/cmd/protoc-gen-connect-go
	google.golang.org/protobuf/cmd/protoc-gen-go
)
