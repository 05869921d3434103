package e2b

import (
	"net/http"
	"net/netip"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
)

// network is what E2B's clients ask of a sandbox's network. What it names
// beyond these is refused by unsupported.
type network struct {
	AllowPublicTraffic *bool    `json:"allowPublicTraffic,omitempty"`
	AllowOut           []string `json:"allowOut,omitempty"`
	DenyOut            []string `json:"denyOut,omitempty"`

	MaskRequestHost string `json:"maskRequestHost,omitempty"`

	EgressProxy any   `json:"egressProxy,omitempty"`
	Rules       any   `json:"rules,omitempty"`
	HTTPSPorts  []int `json:"httpsPorts,omitempty"`
}

func (n network) unsupported() error {
	for _, o := range []struct {
		name  string
		given bool
		why   string
	}{
		{"egressProxy", given(n.EgressProxy), "sandboxes connect directly; give HTTP_PROXY in envVars to programs that heed it"},
		{"rules", given(n.Rules), "requests of a sandbox go out as they are; use allowOut and denyOut to bound where to"},
		{"httpsPorts", len(n.HTTPSPorts) > 0, "ports in a sandbox are reached by plain HTTP from the daemon"},
	} {
		if o.given {
			return sandbox.Errorf(sandbox.CodeUnsupported, "network.%s is not supported: %s", o.name, o.why)
		}
	}
	return nil
}

// given tells whether an option that Warren has not was asked for: null and
// empty values ask for nothing.
func given(v any) bool {
	switch v := v.(type) {
	case nil:
		return false
	case map[string]any:
		return len(v) > 0
	case []any:
		return len(v) > 0
	case bool:
		return v
	case string:
		return v != ""
	}
	return true
}

var everything = netip.MustParsePrefix("0.0.0.0/0")

// policy makes the egress policy. As at E2B, what allowOut names goes before
// denyOut, names of hosts are only in allowOut, and without denyOut all public
// addresses may be reached.
func (n network) policy(internet *bool) (sandbox.NetworkPolicy, error) {
	var p sandbox.NetworkPolicy
	if err := n.unsupported(); err != nil {
		return p, err
	}
	p.Mode = sandbox.NetworkEgress
	names, open := false, false
	for i, s := range n.AllowOut {
		r, err := rule(s, true)
		if err != nil {
			return p, sandbox.Errorf(sandbox.CodeInvalid, "network.allowOut[%d]: %w", i, err)
		}
		names = names || r.Domain != ""
		if r.CIDR == everything {
			open = true // the public addresses: it is no way into the private ones
			continue
		}
		p.Allow = append(p.Allow, r)
	}
	all := internet != nil && !*internet
	for i, s := range n.DenyOut {
		r, err := rule(s, false)
		if err != nil {
			return p, sandbox.Errorf(sandbox.CodeInvalid, "network.denyOut[%d]: %w", i, err)
		}
		all = all || r.CIDR == everything
		if r.CIDR.Addr().Is4() { // there is no IPv6 to deny
			p.Deny = append(p.Deny, r)
		}
	}
	switch {
	case open: // goes before all that is denied
		p.Deny = nil
	case names && !all:
		return p, sandbox.Errorf(sandbox.CodeInvalid, "network.allowOut names hosts, which only means something where the rest is denied: put 0.0.0.0/0 in denyOut")
	case all && len(p.Allow) == 0:
		return sandbox.NetworkPolicy{Mode: sandbox.NetworkNone}, nil
	case all:
		p.Deny = []sandbox.EgressRule{{CIDR: everything}}
	}
	return p, nil
}

// rule reads an address, a prefix or, where names may be, a host.
func rule(s string, names bool) (sandbox.EgressRule, error) {
	if p, ok := sandbox.ParsePrefix(s); ok {
		return sandbox.EgressRule{CIDR: p}, nil
	}
	if len(s) > 253 {
		s = s[:253] + "…"
	}
	s = strings.ToValidUTF8(s, "?")
	if !names {
		return sandbox.EgressRule{}, sandbox.Errorf(sandbox.CodeInvalid, "%q is neither an address nor a prefix like 192.0.2.0/24", s)
	}
	return sandbox.EgressRule{Domain: strings.ToLower(s)}, nil // the manager checks its form
}

// toNetwork is the way back.
func toNetwork(sb sandbox.Sandbox) network {
	public := sb.PublicTraffic
	n := network{AllowPublicTraffic: &public, MaskRequestHost: sb.HostHeader}
	text := func(rules []sandbox.EgressRule) []string {
		var out []string
		for _, r := range rules {
			switch {
			case r.Domain != "":
				out = append(out, r.Domain)
			case r.CIDR.IsSingleIP():
				out = append(out, r.CIDR.Addr().String())
			default:
				out = append(out, r.CIDR.String())
			}
		}
		return out
	}
	n.AllowOut, n.DenyOut = text(sb.Network.Allow), text(sb.Network.Deny)
	if sb.Network.Mode == sandbox.NetworkNone {
		n.DenyOut = []string{everything.String()}
	}
	return n
}

// internet tells whether sb may reach public addresses beyond what is allowed
// by name.
func internet(sb sandbox.Sandbox) bool {
	if sb.Network.Mode == sandbox.NetworkNone {
		return false
	}
	for _, r := range sb.Network.Deny {
		if r.CIDR == everything && r.Port == 0 {
			return false
		}
	}
	return true
}

func (f *facade) setNetwork(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		network
		Internet *bool `json:"allow_internet_access"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	p, err := in.policy(in.Internet)
	if err != nil {
		return err
	}
	if err := f.Back.SetNetwork(r.Context(), tenant, sb.ID, p); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
