package cli

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// place is one side of a copy: a path here, a path in a sandbox, or "-".
type place struct {
	id   string // "" is here
	path string
	std  bool // standard input or output
}

// parsePlace reads ID:PATH, a local path, or "-". A local path that looks like
// ID:PATH is written with ./ in front.
func parsePlace(s string) (place, error) {
	switch s {
	case "":
		return place{}, usagef("a path is empty")
	case "-":
		return place{std: true}, nil
	}
	head, rest, ok := strings.Cut(s, ":")
	if !ok || strings.ContainsAny(head, "/.") {
		return place{path: s}, nil
	}
	if _, err := sandbox.ParseID(head); err != nil {
		if head == "" {
			return place{}, usagef("%q begins with a colon: write ID:PATH, or ./%s for a file here", s, s)
		}
		return place{path: s}, nil
	}
	if rest == "" {
		return place{}, usagef("%q has no path behind the colon", s)
	}
	if strings.ContainsRune(rest, 0) {
		return place{}, usagef("a path holds a zero byte")
	}
	return place{id: head, path: rest}, nil
}

// parseEnv reads the --env flags: K=V, or K for the value that it has here; a
// K that is not set here is left out, as docker does it.
func parseEnv(flags []string, lookup func(string) (string, bool), into map[string]string) error {
	for _, f := range flags {
		k, v, ok := strings.Cut(f, "=")
		if !validEnvName(k) {
			return usagef("--env %q: write NAME=VALUE, or NAME for the value that it has here", f)
		}
		if !ok {
			if v, ok = lookup(k); !ok {
				continue
			}
		}
		if strings.ContainsRune(v, 0) {
			return usagef("--env %s: the value holds a zero byte", k)
		}
		into[k] = v
	}
	return nil
}

func validEnvName(s string) bool { return s != "" && !strings.ContainsAny(s, "=\x00") }

// maxEnvLine is the most that Linux takes in one string of an environment
// (MAX_ARG_STRLEN).
const maxEnvLine = 128 << 10

// parseEnvFile reads lines of NAME=VALUE or NAME into into. Empty lines and
// those that begin with # are skipped; values are taken as they stand, without
// quoting; a line may begin with "export ".
func parseEnvFile(name string, r io.Reader, lookup func(string) (string, bool), into map[string]string) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 4096), maxEnvLine)
	for n := 1; sc.Scan(); n++ {
		line := sc.Text()
		if n == 1 {
			line = strings.TrimPrefix(line, "\ufeff")
		}
		line = strings.TrimSuffix(strings.TrimLeft(line, " \t"), "\r")
		if line == "" || line[0] == '#' {
			continue
		}
		line = strings.TrimPrefix(line, "export ")
		k, v, ok := strings.Cut(line, "=")
		k = strings.TrimSpace(k)
		if !validEnvName(k) || strings.ContainsAny(k, " \t") || !utf8.ValidString(k) {
			return usagef("%s:%d: expected NAME=VALUE", name, n)
		}
		if !ok {
			if v, ok = lookup(k); !ok {
				continue
			}
		}
		if strings.ContainsRune(v, 0) {
			return usagef("%s:%d: the value of %s holds a zero byte", name, n, k)
		}
		into[k] = v
	}
	if err := sc.Err(); err != nil {
		return usagef("%s: %v", name, err)
	}
	return nil
}

// environment gathers --env-file and --env; the flags go before the files.
func (a *app) environment(files, flags []string) (map[string]string, error) {
	env := map[string]string{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, usageError{err}
		}
		err = parseEnvFile(name, f, os.LookupEnv, env)
		f.Close()
		if err != nil {
			return nil, err
		}
	}
	return env, parseEnv(flags, os.LookupEnv, env)
}

// parseMemory reads an amount of memory in MiB: "512", "512M", "1.5G", "1GiB".
// A bare number is MiB.
func parseMemory(s string) (int, error) {
	text := strings.ToLower(strings.TrimSpace(s))
	text = strings.TrimSuffix(strings.TrimSuffix(text, "b"), "i")
	unit := 1.0
	switch {
	case strings.HasSuffix(text, "k"):
		text, unit = text[:len(text)-1], 1.0/1024
	case strings.HasSuffix(text, "m"):
		text = text[:len(text)-1]
	case strings.HasSuffix(text, "g"):
		text, unit = text[:len(text)-1], 1024
	case strings.HasSuffix(text, "t"):
		text, unit = text[:len(text)-1], 1024*1024
	}
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || math.IsNaN(n) || n <= 0 || n*unit > 1<<24 {
		return 0, usagef("%q is not an amount of memory: write 512M or 1.5G", s)
	}
	return int(math.Ceil(n * unit)), nil
}

// parseTimeout reads a time to live: "90s", "1h30m", "3d", or seconds.
func parseTimeout(s string) (time.Duration, error) {
	if n, err := strconv.ParseFloat(s, 64); err == nil {
		s = fmt.Sprintf("%fs", n)
	}
	if days, ok := strings.CutSuffix(s, "d"); ok {
		if n, err := strconv.ParseFloat(days, 64); err == nil {
			s = fmt.Sprintf("%fh", n*24)
		}
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, usagef("%q is not a time: write 90s, 1h30m or 3d, or 0 for no end", s)
	}
	return d, nil
}

// parseRule reads a destination: an address, a prefix or a domain, with an
// optional port: "10.0.0.0/8", "10.1.2.3:5432", "[2001:db8::1]:443",
// "*.example.com:443".
func parseRule(s string) (wire.EgressRule, error) {
	bad := func() (wire.EgressRule, error) {
		return wire.EgressRule{}, usagef("%q is not a destination: write an address, a prefix like 10.0.0.0/8, or a domain, and :PORT where only one port is meant", s)
	}
	var r wire.EgressRule
	host := s
	if _, err := netip.ParsePrefix(s); err != nil {
		if _, err := netip.ParseAddr(s); err != nil {
			if i := strings.LastIndexByte(s, ':'); i >= 0 {
				port, err := strconv.ParseUint(s[i+1:], 10, 16)
				if err != nil || port == 0 {
					return bad()
				}
				host, r.Port = strings.TrimSuffix(strings.TrimPrefix(s[:i], "["), "]"), int(port)
			}
		}
	}
	if p, ok := sandbox.ParsePrefix(host); ok {
		r.CIDR = p.String()
		return r, nil
	}
	if host == "" || len(host) > 253 || strings.ContainsAny(host, "/:[] \t") {
		return bad()
	}
	r.Domain = strings.ToLower(host)
	return r, nil
}

func parseRules(in []string) ([]wire.EgressRule, error) {
	var out []wire.EgressRule
	for _, s := range in {
		r, err := parseRule(s)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// parsePairs reads K=V flags.
func parsePairs(flag string, in []string) (map[string]string, error) {
	out := map[string]string{}
	for _, s := range in {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, usagef("--%s %q: write KEY=VALUE", flag, s)
		}
		out[k] = v
	}
	return out, nil
}
