package e2b

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestPolicy(t *testing.T) {
	yes, no := true, false
	for _, tc := range []struct {
		name     string
		in       network
		internet *bool
		mode     sandbox.NetworkMode
		back     network // what is shown of it
		online   bool
		err      string
	}{
		{name: "nothing asked for", mode: sandbox.NetworkEgress, online: true},
		{name: "internet", internet: &yes, mode: sandbox.NetworkEgress, online: true},
		{name: "no internet", internet: &no, mode: sandbox.NetworkNone, back: network{DenyOut: []string{"0.0.0.0/0"}}},
		{name: "all denied", in: network{DenyOut: []string{"0.0.0.0/0"}}, mode: sandbox.NetworkNone, back: network{DenyOut: []string{"0.0.0.0/0"}}},
		{name: "some denied", in: network{DenyOut: []string{"8.8.8.8", "1.2.0.0/16"}}, mode: sandbox.NetworkEgress,
			back: network{DenyOut: []string{"8.8.8.8", "1.2.0.0/16"}}, online: true},
		{name: "one allowed", in: network{AllowOut: []string{"1.1.1.1"}, DenyOut: []string{"0.0.0.0/0"}}, mode: sandbox.NetworkEgress,
			back: network{AllowOut: []string{"1.1.1.1"}, DenyOut: []string{"0.0.0.0/0"}}},
		{name: "names allowed without the internet", in: network{AllowOut: []string{"*.Example.com"}}, internet: &no, mode: sandbox.NetworkEgress,
			back: network{AllowOut: []string{"*.example.com"}, DenyOut: []string{"0.0.0.0/0"}}},
		{name: "all allowed goes before", in: network{AllowOut: []string{"0.0.0.0/0"}, DenyOut: []string{"0.0.0.0/0", "8.8.8.8"}}, mode: sandbox.NetworkEgress, online: true},
		{name: "there is no IPv6 to deny", in: network{DenyOut: []string{"::/0"}}, mode: sandbox.NetworkEgress, online: true},
		{name: "names need the rest denied", in: network{AllowOut: []string{"example.com"}}, err: "denyOut"},
		{name: "a name cannot be denied", in: network{DenyOut: []string{"example.com"}}, err: "denyOut[0]"},
		{name: "a proxy", in: network{EgressProxy: map[string]any{"address": "x"}}, err: "egressProxy"},
		{name: "an empty proxy asks for nothing", in: network{EgressProxy: map[string]any{}}, mode: sandbox.NetworkEgress, online: true},
		{name: "headers", in: network{Rules: map[string]any{"x": nil}}, err: "rules"},
		{name: "ports of TLS", in: network{HTTPSPorts: []int{443}}, err: "httpsPorts"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := tc.in.policy(tc.internet)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("%+v, %v", p, err)
				}
				return
			}
			if err != nil || p.Mode != tc.mode {
				t.Fatalf("%+v, %v", p, err)
			}
			sb := sandbox.Sandbox{Network: p}
			back := toNetwork(sb)
			back.AllowPublicTraffic = nil
			if d := cmp.Diff(tc.back, back); d != "" {
				t.Error(d)
			}
			if internet(sb) != tc.online {
				t.Errorf("online: %v", !tc.online)
			}
		})
	}
}

func FuzzRule(f *testing.F) {
	for _, s := range []string{"1.1.1.1", "10.0.0.0/8", "::1", "fe80::1%eth0", "example.com", "*.x", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := rule(s, false)
		if err == nil && (!r.CIDR.IsValid() || r.CIDR != r.CIDR.Masked() || r.Domain != "") {
			t.Errorf("%q is %+v", s, r)
		}
		if r, err = rule(s, true); err != nil || r.CIDR.IsValid() == (r.Domain != "") && s != "" {
			t.Errorf("%q is %+v, %v", s, r, err)
		}
	})
}

func FuzzMetadataQuery(f *testing.F) {
	f.Add("a=b&c=%26")
	f.Add("%zz")
	f.Fuzz(func(t *testing.T, s string) {
		if m, err := metadataQuery(s); err != nil && sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%v, %v", m, err)
		}
	})
}
