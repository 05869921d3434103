// Package arch holds no code: its test keeps the imports running one way,
//
//	cmd → api → manager → {runtime/*, template, network, store} → sandbox
package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/warrenhq/warren/"

// rules say, for the packages below a prefix, which of Warren's packages (by
// prefix) they may not import, and why.
var rules = []struct {
	of, not, why string
}{
	{of: "internal/sandbox", not: "internal/", why: "the domain imports nothing of ours"},
	{of: "internal/runtime/", not: "internal/manager", why: "a runtime knows nothing of the lifecycle"},
	{of: "internal/runtime/", not: "internal/store", why: "a runtime keeps no durable state"},
	{of: "internal/runtime/", not: "internal/api", why: "a runtime knows nothing of the API"},
	{of: "internal/runtime/", not: "internal/network", why: "a runtime gets its link ready made"},
	{of: "internal/runtime/", not: "internal/template", why: "a runtime gets layer directories"},
	{of: "internal/runtime/container", not: "internal/runtime/gvisor", why: "runtimes do not know each other"},
	{of: "internal/runtime/gvisor", not: "internal/runtime/container", why: "runtimes do not know each other"},
	{of: "internal/manager", not: "internal/runtime/", why: "the manager knows no runtime by name"},
	{of: "internal/manager", not: "internal/api", why: "the API is above the manager"},
	{of: "internal/manager", not: "internal/proxy", why: "the proxy is above the manager"},
	{of: "internal/store", not: "internal/manager", why: "the store is below the manager"},
	{of: "internal/network", not: "internal/manager", why: "the network is below the manager"},
	{of: "internal/network", not: "internal/runtime", why: "the network knows no runtime"},
	{of: "internal/template", not: "internal/manager", why: "templates are below the manager: steps run through StepRunner"},
	{of: "internal/template", not: "internal/runtime", why: "templates know no runtime"},
	{of: "internal/cli", not: "internal/store", why: "the CLI speaks to the daemon's API"},
	{of: "internal/prove", not: "internal/manager", why: "prove measures what the API's users get"},
	{of: "internal/prove", not: "internal/runtime", why: "prove measures what the API's users get"},
	{of: "internal/prove/forkproof", not: "internal/", why: "its checks go by an interface, for tests and product alike"},
	{of: "internal/client", not: "internal/manager", why: "the client speaks HTTP"},
	{of: "internal/agent", not: "internal/manager", why: "the agent runs inside the sandbox"},
	{of: "internal/agent", not: "internal/store", why: "the agent runs inside the sandbox"},
	{of: "internal/agent", not: "internal/template", why: "the agent runs inside the sandbox"},
	{of: "internal/agent", not: "internal/network", why: "the agent runs inside the sandbox"},
	{of: "cmd/warren-agent", not: "internal/api", why: "the agent is small"},
}

func TestImportsRunOneWay(t *testing.T) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", module+"...")
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	seen := 0
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		seen++
		path := strings.TrimPrefix(p.ImportPath, module)
		for _, imp := range p.Imports {
			imp, ours := strings.CutPrefix(imp, module)
			if !ours {
				continue
			}
			for _, r := range rules {
				if within(path, r.of) && within(imp, r.not) {
					t.Errorf("%s imports %s: %s", path, imp, r.why)
				}
			}
		}
	}
	if seen < 5 {
		t.Fatalf("go list told of %d packages only", seen)
	}
}

// within tells whether path is the package prefix or below it.
func within(path, prefix string) bool {
	prefix = strings.TrimSuffix(prefix, "/")
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}
