package network

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Check tells what on this host keeps sandboxes from the network, each with
// its remedy, all of CodeUnavailable; none is good. It looks for what only
// the host's administrator can decide on: other firewalls that drop what this
// one accepts, forwarding that was turned off again, routes that came to
// cover the instance's range, and no resolver to forward to.
func (n *Network) Check(ctx context.Context) []*sandbox.Error {
	var out []*sandbox.Error
	say := func(format string, args ...any) {
		out = append(out, sandbox.Errorf(sandbox.CodeUnavailable, format, args...))
	}
	if on, err := ipForward(); err != nil || !on {
		say("the host does not forward IPv4, so sandboxes reach nothing outside: run `sysctl -w net.ipv4.ip_forward=1`, and see what turned it off")
	}
	if len(n.upstream.list()) == 0 {
		say("the host's /etc/resolv.conf names no resolver, so names do not resolve in sandboxes: add one there, or give the daemon resolvers of its own")
	}
	if there, err := n.rules.exists(); err == nil && !there {
		say("the nftables table %s is gone: restart the daemon", n.rules.tableName())
	}
	taken, err := takenPrefixes(n.cfg.Instance)
	if err != nil {
		say("the host's routes cannot be read: %w", err)
	}
	for _, p := range taken {
		// A route that contains the whole /16, a VPN's 10.0.0.0/8 say, loses
		// against the sandboxes' own /30s; one inside it does not.
		if p.Overlaps(n.Prefix()) && p.Bits() > n.Prefix().Bits() {
			say("the host has a route to %s, which lies in the sandboxes' range %s: remove all sandboxes and restart the daemon, and it takes another range", p, n.Prefix())
		}
	}
	for _, c := range foreignDrops(n.builder.linkPrefix()) {
		say("%s drops what it does not name: %s", c.where, c.remedy(n.builder.linkPrefix()))
	}
	if c := legacyDrop(ctx, n.builder.linkPrefix()); c != nil {
		say("%s drops what it does not name: %s", c.where, c.remedy(n.builder.linkPrefix()))
	}
	return out
}

// dropChain is a chain of another firewall that drops by default. In nftables
// a packet must pass every table: an accept in ours does not help.
type dropChain struct {
	where   string // "chain FORWARD of table ip filter"
	input   bool
	chain   string
	table   string // "ip filter"
	xtables bool   // iptables-nft or iptables-legacy made it
	docker  bool   // Docker keeps its own chain for such rules
}

func (c dropChain) remedy(link string) string {
	link += "+"
	switch {
	case c.xtables && c.input:
		return fmt.Sprintf("names do not resolve in sandboxes until you run `iptables -I INPUT -i %s -j ACCEPT` (Warren's own table decides what may pass)", link)
	case c.xtables:
		chain := "FORWARD"
		if c.docker {
			chain = "DOCKER-USER"
		}
		return fmt.Sprintf("sandboxes reach nothing outside until you run `iptables -I %[1]s -i %[2]s -j ACCEPT; iptables -I %[1]s -o %[2]s -j ACCEPT` (Warren's own table decides what may pass)", chain, link)
	}
	rule := fmt.Sprintf("nft insert rule %s %s iifname \"%s*\" accept", c.table, c.chain, strings.TrimSuffix(link, "+"))
	if c.input {
		return "names do not resolve in sandboxes until you run `" + rule + "`"
	}
	return "sandboxes reach nothing outside until you run `" + rule + "; " + strings.Replace(rule, "iifname", "oifname", 1) + "`"
}

// foreignDrops lists the nftables chains on the forward and input hooks that
// drop by default and do not name our links.
func foreignDrops(link string) (out []dropChain) {
	c, err := nftables.New()
	if err != nil {
		return nil
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil
	}
	docker := false
	for _, ch := range chains {
		docker = docker || ch.Name == "DOCKER-USER"
	}
	for _, ch := range chains {
		if ch.Hooknum == nil || ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop || ch.Type != nftables.ChainTypeFilter {
			continue
		}
		if ch.Table.Family != nftables.TableFamilyINet && ch.Table.Family != nftables.TableFamilyIPv4 {
			continue
		}
		input := *ch.Hooknum == *nftables.ChainHookInput
		if !input && *ch.Hooknum != *nftables.ChainHookForward {
			continue
		}
		if tableNames(c, ch.Table, chains, link) {
			continue
		}
		family := map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip"}[ch.Table.Family]
		table := family + " " + ch.Table.Name
		out = append(out, dropChain{
			where: fmt.Sprintf("chain %s of the nftables table %s", ch.Name, table),
			input: input, chain: ch.Name, table: table, docker: docker,
			xtables: family == "ip" && ch.Table.Name == "filter" && (ch.Name == "FORWARD" || ch.Name == "INPUT"),
		})
	}
	return out
}

// tableNames tells whether a rule of the table matches our links, the remedy
// having been applied.
func tableNames(c *nftables.Conn, t *nftables.Table, chains []*nftables.Chain, link string) bool {
	for _, ch := range chains {
		if ch.Table.Name != t.Name || ch.Table.Family != t.Family {
			continue
		}
		rules, err := c.GetRules(t, ch)
		if err != nil {
			continue
		}
		for _, r := range rules {
			for _, e := range r.Exprs {
				if cmp, ok := e.(*expr.Cmp); ok && cmp.Op == expr.CmpOpEq && namesLink(cmp.Data, link) {
					return true
				}
			}
		}
	}
	return false
}

// namesLink tells whether data, a link's name or the beginning of some, stands
// for our links ("wr", "wr123456-").
func namesLink(data []byte, link string) bool {
	name := bytes.TrimRight(data, "\x00")
	return len(name) >= 2 && bytes.HasPrefix([]byte(link), name)
}

// legacyDrop looks at the iptables of before nftables, which nftables does
// not see.
func legacyDrop(ctx context.Context, link string) *dropChain {
	tables, err := os.ReadFile("/proc/net/ip_tables_names")
	if err != nil || !strings.Contains(string(tables), "filter") {
		return nil
	}
	out, err := exec.CommandContext(ctx, "iptables-legacy", "-S").Output()
	if err != nil {
		return nil
	}
	s := string(out)
	if !strings.Contains(s, "-P FORWARD DROP") || strings.Contains(s, "-i "+link) {
		return nil
	}
	return &dropChain{where: "chain FORWARD of iptables-legacy", chain: "FORWARD", xtables: true, docker: strings.Contains(s, "-N DOCKER-USER")}
}
