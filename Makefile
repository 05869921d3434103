# Warren: `make demo` shows it work, `make test` proves it. `make help` lists the rest.

SHELL := /bin/bash
.DEFAULT_GOAL := help

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/warrenhq/warren/internal/version.Version=$(VERSION)
GOSRC    = $(shell find cmd internal proto bench -type f -not -name '*_test.go' -not -path '*/testdata/*' 2>/dev/null) # embedded files, too

GOTESTSUM := gotest.tools/gotestsum@v1.13.0
GOLANGCI  := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.PHONY: help build demo test test-root test-short check lint gen bench fuzz setup setup-test arm64 clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: bin/warren bin/warren-agent bin/runsc ## build the daemon and CLI, the agent, and the pinned gVisor

bin/warren: go.mod $(GOSRC)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags='$(LDFLAGS)' -o $@ ./cmd/warren

bin/warren-agent: go.mod $(GOSRC)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags='$(LDFLAGS)' -o $@ ./cmd/warren-agent

# The filters of this machine's architecture: another's are compiled when a
# sandbox starts.
FILTERS = tools/runsc/filters_$(shell $(GO) env GOHOSTARCH).go
RUNSC   = tools/runsc/go.mod tools/runsc/go.sum tools/runsc/main.go tools/runsc/filters.go

$(FILTERS): tools/runsc/go.mod tools/runsc/go.sum tools/runsc/precompile/main.go
	CGO_ENABLED=0 GOOS= GOARCH= $(GO) run -C tools/runsc -trimpath ./precompile $(@F)

bin/runsc: $(RUNSC) $(FILTERS)
	CGO_ENABLED=0 $(GO) build -C tools/runsc -trimpath -ldflags='-s -w' -o ../../$@ .

setup:
	@scripts/setup.sh run

setup-test:
	@scripts/setup.sh test

demo: setup build ## run an agent's program in a gVisor sandbox and fetch its chart
	@scripts/demo.sh

check: ## formatting, vet, and that the sources build for arm64
	@out=$$(gofmt -l $(GOSRC)); [ -z "$$out" ] || { echo "gofmt these files:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	GOARCH=arm64 CGO_ENABLED=0 $(GO) vet ./...

test: setup-test build check ## set up and run every test that this machine can run; list what it skips
	CGO_ENABLED=0 $(GO) test -C tools/runsc ./...
	@scripts/test.sh ./...

test-root: setup-test build ## run only the packages whose tests need root
	@scripts/test.sh $$(grep -rl --include='*_test.go' 'testenv.Root' internal cmd | xargs -n1 dirname | sort -u | sed 's|^|./|')

test-short: ## the quick tests alone, without root or a sandbox
	$(GO) test -short ./...

arm64: ## build everything for linux/arm64 into bin/arm64
	GOARCH=arm64 CGO_ENABLED=0 $(GO) build -trimpath -ldflags='$(LDFLAGS)' -o bin/arm64/ ./cmd/...
	GOARCH=arm64 CGO_ENABLED=0 $(GO) build -C tools/runsc -trimpath -ldflags='-s -w' -o ../../bin/arm64/runsc .

# gVisor's own main package, to measure beside.
bin/runsc-stock: tools/runsc/go.mod tools/runsc/go.sum
	CGO_ENABLED=0 $(GO) build -C tools/runsc -trimpath -ldflags='-s -w' -o ../../$@ gvisor.dev/gvisor/runsc

bench: setup-test build bin/runsc-stock ## measure on this host; raw JSON goes to bench/results
	$(GO) run ./bench/warren-bench

lint: ## golangci-lint
	$(GO) run $(GOLANGCI) run ./...

gen: ## regenerate the checked-in generated code
	$(GO) generate ./proto/...

clean: ## remove what was built
	rm -rf bin $(FILTERS)
