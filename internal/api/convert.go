package api

import (
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

var errorType = reflect.TypeFor[wire.Error]()

func toSandbox(s sandbox.Sandbox, secrets bool) wire.Sandbox {
	w := wire.Sandbox{
		ID: string(s.ID), State: s.State, Reason: s.Reason, Detail: s.Detail,
		Runtime: s.Runtime, Template: s.Template, TemplateID: s.TemplateID,
		Resources: wire.Resources(s.Resources), Network: toNetwork(s.Network),
		EnvNames: slices.Sorted(maps.Keys(s.Env)),
		User:     s.User, Workdir: s.Workdir, Metadata: s.Metadata, Hostname: s.Hostname,
		Start: string(s.Start), OOMKills: s.OOMKills, CreatedAt: s.CreatedAt.UTC(),
		StartedAt: timeOrNil(s.StartedAt), ExpiresAt: timeOrNil(s.ExpiresAt), EndedAt: timeOrNil(s.EndedAt),
		PublicTraffic: s.PublicTraffic, HostHeader: s.HostHeader, Instance: string(s.Instance),
		Snapshot: s.Snapshot, Parent: string(s.Parent), OnTimeout: s.OnTimeout, IdleTimeout: s.IdleTimeout.Seconds(), HibernateKind: s.HibernateKind, ManualWake: s.ManualWake,
		SuspendedAt: timeOrNil(s.SuspendedAt), HibernatedAt: timeOrNil(s.HibernatedAt),
	}
	for _, v := range s.Volumes {
		w.Volumes = append(w.Volumes, wire.VolumeMount{Volume: v.Name, Path: v.Path, ReadOnly: v.ReadOnly})
	}
	if s.Link.Address.IsValid() && !s.State.Ended() {
		w.Address = s.Link.Address.Addr().String()
	}
	if secrets && !s.State.Ended() {
		w.TrafficToken = s.TrafficToken
	}
	return w
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

func toNetwork(p sandbox.NetworkPolicy) wire.Network {
	rules := func(in []sandbox.EgressRule) []wire.EgressRule {
		var out []wire.EgressRule
		for _, r := range in {
			o := wire.EgressRule{Domain: r.Domain, Port: int(r.Port)}
			if r.CIDR.IsValid() {
				o.CIDR = r.CIDR.String()
			}
			out = append(out, o)
		}
		return out
	}
	return wire.Network{Mode: p.Mode, Allow: rules(p.Allow), Deny: rules(p.Deny)}
}

func fromNetwork(n wire.Network) (sandbox.NetworkPolicy, error) {
	p := sandbox.NetworkPolicy{Mode: n.Mode}
	var err error
	if p.Allow, err = fromRules("allow", n.Allow); err == nil {
		p.Deny, err = fromRules("deny", n.Deny)
	}
	return p, err
}

func fromRules(list string, in []wire.EgressRule) ([]sandbox.EgressRule, error) {
	var out []sandbox.EgressRule
	for i, r := range in {
		o := sandbox.EgressRule{Domain: strings.ToLower(r.Domain), Port: uint16(r.Port)}
		switch {
		case (r.CIDR == "") == (r.Domain == ""):
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "network.%s[%d]: give exactly one of cidr and domain", list, i)
		case r.CIDR != "":
			var ok bool
			if o.CIDR, ok = sandbox.ParsePrefix(r.CIDR); !ok {
				return nil, sandbox.Errorf(sandbox.CodeInvalid, "network.%s[%d]: %q is neither an address nor a prefix like 192.0.2.0/24", list, i, r.CIDR)
			}
		}
		out = append(out, o)
	}
	return out, nil
}

// seconds makes a duration of a number of seconds that the schema has bounded.
func seconds(s float64) (time.Duration, error) {
	if math.IsNaN(s) || s < 0 || s > math.MaxInt64/1e9/2 {
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "%v is not a number of seconds", s)
	}
	d := time.Duration(s * float64(time.Second))
	if s > 0 && d == 0 {
		d = 1
	}
	return d, nil
}

func toStats(s sandbox.Stats) wire.Stats {
	return wire.Stats{
		At: s.At.UTC(), CPUSeconds: s.CPUTime.Seconds(), WorkingSet: s.WorkingSet, MemoryCache: s.MemoryCache,
		MemoryLimit: s.MemoryLimit, PIDs: s.PIDs, OOMKills: s.OOMKills,
	}
}

func toTemplate(t template.Template) wire.Template {
	return wire.Template{
		ID: t.ID, Name: t.Name, Shared: t.Shared, Source: t.Source, SizeBytes: t.SizeBytes, CreatedAt: t.CreatedAt.UTC(),
		Layers: t.Layers, Resources: wire.ResourceRequest(t.Resources),
		Config: wire.TemplateConfig{
			Env: t.Config.Env, User: t.Config.User, Workdir: t.Config.Workdir, Entrypoint: t.Config.Entrypoint, Cmd: t.Config.Cmd,
			StartCmd: t.Config.StartCmd, ReadyCmd: t.Config.ReadyCmd, Labels: t.Config.Labels,
			ExposedPorts: t.Config.ExposedPorts, HasShell: t.Config.HasShell,
		},
	}
}

func toKey(k manager.Key, secret string) wire.Key {
	return wire.Key{
		ID: k.ID, Name: k.Name, Tenant: k.Tenant, Prefix: k.Prefix, Key: secret,
		CreatedAt: k.CreatedAt.UTC(), LastUsedAt: timeOrNil(k.LastUsedAt),
	}
}

func toRuntime(r manager.RuntimeStatus) wire.Runtime {
	w := wire.Runtime{Name: r.Name, Default: r.Default, Available: r.Error == nil, Capabilities: r.Capabilities}
	if r.Error != nil {
		w.Error = &wire.Error{Code: r.Error.Code, Message: r.Error.Message, Details: r.Error.Details}
	}
	return w
}

func toCapacity(c manager.Capacity) wire.Capacity {
	w := wire.Capacity(c)
	if w.ByState == nil {
		w.ByState = map[string]int{}
	}
	if w.ByRuntime == nil {
		w.ByRuntime = map[string]int{}
	}
	return w
}
