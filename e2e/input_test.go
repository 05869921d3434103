package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestBadRequests sends what no create, exec or list should take, and checks
// that each refusal names what was wrong, and that nothing was made.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	long := strings.Repeat("a", 300)
	const none = "sbx00000000000000000"
	create, exec := "/v1/sandboxes", "/v1/sandboxes/"+none+"/exec"
	for _, c := range []struct {
		name, method, path, body string
		code                     sandbox.Code
		phrases                  []string
	}{
		{"unknown runtime", "POST", create, `{"template":"tiny","runtime":"vmware"}`, sandbox.CodeNotFound, []string{"vmware", "gvisor", "container"}},
		{"planned runtime", "POST", create, `{"template":"tiny","runtime":"microvm"}`, sandbox.CodeUnsupported, []string{"microvm"}},
		{"runtime's name too long", "POST", create, `{"template":"tiny","runtime":"` + long + `"}`, sandbox.CodeInvalid, []string{"runtime"}},
		{"runtime's name with control characters", "POST", create, `{"template":"tiny","runtime":"a\u0007b"}`, sandbox.CodeInvalid, []string{"runtime"}},
		{"unknown template", "POST", create, `{"template":"nothing"}`, sandbox.CodeNotFound, []string{"nothing", "template"}},
		{"template as a path", "POST", create, `{"template":"../../etc"}`, sandbox.CodeNotFound, []string{"template"}},
		{"template's name too long", "POST", create, `{"template":"` + long + `"}`, sandbox.CodeInvalid, []string{"template"}},
		{"memory below the agent's", "POST", create, `{"template":"tiny","resources":{"memory_mib":8}}`, sandbox.CodeInvalid, []string{"memory", "8 MiB", "agent"}},
		{"negative memory", "POST", create, `{"template":"tiny","resources":{"memory_mib":-1}}`, sandbox.CodeInvalid, []string{"memory"}},
		{"huge memory", "POST", create, `{"template":"tiny","resources":{"memory_mib":99999999}}`, sandbox.CodeInvalid, []string{"memory"}},
		{"memory beyond an integer", "POST", create, `{"template":"tiny","resources":{"memory_mib":1e300}}`, sandbox.CodeInvalid, []string{"memory_mib"}},
		{"fractional memory", "POST", create, `{"template":"tiny","resources":{"memory_mib":64.5}}`, sandbox.CodeInvalid, []string{"memory_mib"}},
		{"tiny cpus", "POST", create, `{"template":"tiny","resources":{"cpus":0.0001}}`, sandbox.CodeInvalid, []string{"cpus", "least"}},
		{"negative cpus", "POST", create, `{"template":"tiny","resources":{"cpus":-2}}`, sandbox.CodeInvalid, []string{"cpus"}},
		{"huge cpus", "POST", create, `{"template":"tiny","resources":{"cpus":100000}}`, sandbox.CodeInvalid, []string{"cpus", "host has"}},
		{"NaN cpus", "POST", create, `{"template":"tiny","resources":{"cpus":NaN}}`, sandbox.CodeInvalid, nil},
		{"infinite cpus", "POST", create, `{"template":"tiny","resources":{"cpus":1e999}}`, sandbox.CodeInvalid, nil},
		{"few pids", "POST", create, `{"template":"tiny","resources":{"pids":2}}`, sandbox.CodeInvalid, []string{"pids", "16"}},
		{"many pids", "POST", create, `{"template":"tiny","resources":{"pids":100000000}}`, sandbox.CodeInvalid, []string{"pids", "65536"}},
		{"negative disk", "POST", create, `{"template":"tiny","resources":{"disk_mib":-5}}`, sandbox.CodeInvalid, []string{"disk"}},
		{"negative timeout", "POST", create, `{"template":"tiny","timeout":-1}`, sandbox.CodeInvalid, []string{"timeout"}},
		{"huge timeout", "POST", create, `{"template":"tiny","timeout":1e18}`, sandbox.CodeInvalid, []string{"timeout"}},
		{"unknown network mode", "POST", create, `{"template":"tiny","network":{"mode":"host"}}`, sandbox.CodeInvalid, []string{"mode", "egress"}},
		{"bad CIDR", "POST", create, `{"template":"tiny","network":{"allow":[{"cidr":"10.0.0.0/99"}]}}`, sandbox.CodeInvalid, []string{"10.0.0.0/99"}},
		{"rule of nothing", "POST", create, `{"template":"tiny","network":{"allow":[{"port":80}]}}`, sandbox.CodeInvalid, []string{"cidr", "domain"}},
		{"relative workdir", "POST", create, `{"template":"tiny","workdir":"work"}`, sandbox.CodeInvalid, []string{"absolute"}},
		{"hostname too long", "POST", create, `{"template":"tiny","hostname":"` + long + `"}`, sandbox.CodeInvalid, []string{"hostname"}},
		{"hostname with a space", "POST", create, `{"template":"tiny","hostname":"a b"}`, sandbox.CodeInvalid, []string{"hostname"}},
		{"environment name with =", "POST", create, `{"template":"tiny","env":{"A=B":"c"}}`, sandbox.CodeInvalid, []string{"A=B"}},
		{"environment name empty", "POST", create, `{"template":"tiny","env":{"":"c"}}`, sandbox.CodeInvalid, []string{"environment", "name"}},
		{"environment value with NUL", "POST", create, `{"template":"tiny","env":{"SECRET":"a\u0000b"}}`, sandbox.CodeInvalid, []string{"SECRET", "NUL"}},
		{"garbage", "POST", create, `{"template":`, sandbox.CodeInvalid, nil},
		{"no object", "POST", create, `[1,2]`, sandbox.CodeInvalid, []string{"object"}},
		{"empty body", "POST", create, ``, sandbox.CodeInvalid, []string{"body"}},
		{"wrong types", "POST", create, `{"template":7,"env":"x","timeout":"soon"}`, sandbox.CodeInvalid, []string{"template", "env", "timeout"}},
		{"unknown field", "POST", create, `{"template":"tiny","privileged":true}`, sandbox.CodeInvalid, []string{"privileged"}},
		{"deep nesting", "POST", create, strings.Repeat(`{"env":`, 20000), sandbox.CodeInvalid, nil},
		{"unknown sandbox", "GET", "/v1/sandboxes/" + none, "", sandbox.CodeNotFound, []string{none}},
		{"malformed id", "GET", "/v1/sandboxes/UPPER_case", "", sandbox.CodeInvalid, []string{"not a sandbox id"}},
		{"id as a path", "GET", "/v1/sandboxes/..%2F..%2Fetc", "", sandbox.CodeInvalid, []string{"not a sandbox id"}},
		{"id too long", "GET", "/v1/sandboxes/" + long, "", sandbox.CodeInvalid, []string{"id"}},
		{"exec in an unknown sandbox", "POST", exec, `{"cmd":["true"]}`, sandbox.CodeNotFound, []string{none}},
		{"exec without a command", "POST", exec, `{"cmd":[]}`, sandbox.CodeInvalid, []string{"cmd is empty"}},
		{"exec of an empty word", "POST", exec, `{"cmd":[""]}`, sandbox.CodeInvalid, []string{"cmd is empty"}},
		{"exec of a number", "POST", exec, `{"cmd":5}`, sandbox.CodeInvalid, []string{"cmd"}},
		{"exec with a negative timeout", "POST", exec, `{"cmd":["true"],"timeout":-1}`, sandbox.CodeInvalid, []string{"timeout"}},
		{"exec with a huge timeout", "POST", exec, `{"cmd":["true"],"timeout":1e12}`, sandbox.CodeInvalid, []string{"timeout"}},
		{"exec with too much output asked", "POST", exec, `{"cmd":["true"],"max_output":999999999999}`, sandbox.CodeInvalid, []string{"max_output"}},
		{"port 0", "GET", "/v1/sandboxes/" + none + "/ports/0/", "", sandbox.CodeInvalid, []string{"port", "65535"}},
		{"port too high", "GET", "/v1/sandboxes/" + none + "/ports/65536/", "", sandbox.CodeInvalid, []string{"port", "65535"}},
		{"port as a word", "GET", "/v1/sandboxes/" + none + "/ports/http/", "", sandbox.CodeInvalid, []string{"port"}},
		{"timeout of an unknown sandbox", "POST", "/v1/sandboxes/" + none + "/timeout", `{"timeout":60}`, sandbox.CodeNotFound, []string{none}},
		{"list of an unknown state", "GET", "/v1/sandboxes?state=flying", "", sandbox.CodeInvalid, []string{"state"}},
		{"list with a bad token", "GET", "/v1/sandboxes?token=%00%ff", "", sandbox.CodeInvalid, []string{"token"}},
		{"unknown query", "GET", "/v1/sandboxes?nope=1", "", sandbox.CodeInvalid, []string{"nope"}},
		{"page of 0", "GET", "/v1/sandboxes?limit=0", "", sandbox.CodeInvalid, []string{"limit"}},
		{"unknown route", "GET", "/v1/nothing", "", sandbox.CodeNotFound, []string{"openapi.json"}},
		{"unknown template's removal", "DELETE", "/v1/templates/nothing", "", sandbox.CodeNotFound, []string{"nothing"}},
		{"unknown key's removal", "DELETE", "/v1/keys/nothing", "", sandbox.CodeNotFound, nil},
		{"events after a word", "GET", "/v1/events?after=yesterday", "", sandbox.CodeInvalid, []string{"yesterday"}},
		{"private call of the agent", "POST", "/v1/sandboxes/" + none + "/agent/init", "{}", sandbox.CodeNotFound, []string{"init"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := http.Header{"Content-Type": {"application/json"}}
			l.raw(t, c.method, c.path, h, strings.NewReader(c.body)).wantError(t, c.code, c.phrases...)
		})
	}
	t.Run("huge body", func(t *testing.T) {
		body := io.MultiReader(strings.NewReader(`{"template":"tiny","metadata":{"a":"`), io.LimitReader(letters{}, 3<<20), strings.NewReader(`"}}`))
		l.raw(t, "POST", create, http.Header{"Content-Type": {"application/json"}}, body).wantError(t, sandbox.CodeTooLarge)
	})
	t.Run("limits that a runtime cannot hold", func(t *testing.T) {
		all, err := l.cl.Runtimes(t.Context())
		must(t, err)
		for _, r := range all {
			if !r.Available || r.Capabilities.DiskLimit {
				continue
			}
			_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: r.Name, Resources: wire.ResourceRequest{DiskMiB: 100}})
			wantError(t, err, sandbox.CodeUnsupported, r.Name, "disk")
		}
	})
	if made := l.list(t, client.Filter{Live: true}); len(made) != 0 {
		t.Errorf("bad requests made %d sandboxes", len(made))
	}
}

// letters is an endless text.
type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}

// TestEnvironment gives a sandbox as many and as large variables as the
// documented limits allow, and more.
func TestEnvironment(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	many := func(n int, value string) map[string]string {
		env := map[string]string{}
		for i := range n {
			env[fmt.Sprintf("E2E_%05d", i)] = value
		}
		return env
	}
	const most = 128<<10 - 1  // bytes of NAME=VALUE
	const number = 10_000 - 1 // the image has one of its own, PATH
	l.each(t, func(t *testing.T, runtime string) {
		t.Run("as many as can be", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Env: many(number, "v")})
			if out := l.run(t, sb.ID, "inside", "env"); !strings.HasPrefix(out, fmt.Sprint(number, " ")) {
				t.Errorf("inside there are %s (number, largest)", out)
			}
			// Their values are secrets.
			if a := l.raw(t, "GET", "/v1/sandboxes/"+sb.ID, nil, nil); strings.Contains(string(a.body), `"E2E_00001":`) {
				t.Errorf("the record shows the environment's values")
			}
		})
		t.Run("largest value", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Env: map[string]string{"E2E_A": strings.Repeat("x", most-len("E2E_A="))}})
			if out := l.run(t, sb.ID, "inside", "env"); out != fmt.Sprintf("1 %d", most) {
				t.Errorf("inside there are %s (number, largest), not 1 of %d", out, most)
			}
		})
		t.Run("of one command", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			res := l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"inside", "env"}}, Env: many(5000, "w")})
			if !strings.HasPrefix(string(res.OutBytes()), "5000 ") {
				t.Errorf("inside there are %s", res.OutBytes())
			}
			// Beyond the kernel's own limit: a clear refusal, and the sandbox goes on.
			_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{
				Cmd: wire.Command{Argv: []string{"inside", "env"}}, Env: map[string]string{"E2E_BIG": strings.Repeat("x", 200<<10)},
			})
			switch code := sandbox.CodeOf(err); code {
			case sandbox.CodeInvalid, sandbox.CodeTooLarge:
			default:
				t.Errorf("a variable of 200 KiB gave %v (%s)", err, code)
			}
			l.run(t, sb.ID, "true")
		})
	})
	for _, c := range []struct {
		name    string
		env     map[string]string
		phrases []string
	}{
		{"too many", many(10_001, ""), []string{"10001", "10000", "file"}},
		{"value too large", map[string]string{"E2E_A": strings.Repeat("x", most)}, []string{"E2E_A", "at most", "file"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Env: c.env})
			wantError(t, err, sandbox.CodeInvalid, c.phrases...)
		})
	}
	t.Run("too much together", func(t *testing.T) {
		_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Env: many(9000, strings.Repeat("x", 200))})
		if code := sandbox.CodeOf(err); code != sandbox.CodeInvalid && code != sandbox.CodeTooLarge {
			t.Errorf("1.9 MB of environment gave %v (%s)", err, code)
		}
	})
	t.Run("values do not show in errors", func(t *testing.T) {
		_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Env: map[string]string{"TOKEN": "hush\x00hush"}})
		wantError(t, err, sandbox.CodeInvalid, "TOKEN")
		if err != nil && strings.Contains(err.Error(), "hush") {
			t.Errorf("the refusal shows the value: %v", err)
		}
	})
}
