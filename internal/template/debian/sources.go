package debian

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// HostSources gives the host's own apt sources for suite and its updates, as
// one-line "deb" entries, so that a build works wherever the host's apt does.
// It is empty where the host is of another suite or another distribution.
// root is "/" but in tests.
func HostSources(root, suite string) []string {
	files, _ := filepath.Glob(filepath.Join(root, "etc/apt/sources.list.d/*"))
	var out []string
	for _, f := range append([]string{filepath.Join(root, "etc/apt/sources.list")}, files...) {
		data, err := os.ReadFile(f)
		if err != nil || len(data) > 1<<20 {
			continue
		}
		switch {
		case strings.HasSuffix(f, ".sources"):
			out = append(out, deb822(data, suite)...)
		case strings.HasSuffix(f, ".list"):
			out = append(out, oneLine(data, suite)...)
		}
	}
	// Updates alone do not make a system.
	for _, l := range out {
		if f := fields(l); len(f) > 2 && f[2] == suite {
			return out
		}
	}
	return nil
}

// areas are the components of Debian's own archive: another archive that
// serves the same suite (a vendor's) has others, and does not belong in.
var areas = []string{"main", "contrib", "non-free", "non-free-firmware"}

// ours tells whether a source is Debian's own for suite.
func ours(suite, of string, components []string) bool {
	if of != suite && of != suite+"-updates" && of != suite+"-security" {
		return false
	}
	if !slices.Contains(components, "main") {
		return false
	}
	for _, c := range components {
		if !slices.Contains(areas, c) {
			return false
		}
	}
	return true
}

// oneLine reads sources.list(5)'s one-line style.
func oneLine(data []byte, suite string) []string {
	var out []string
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		line, _, _ := strings.Cut(sc.Text(), "#")
		f := fields(line)
		if len(f) < 4 || f[0] != "deb" {
			continue
		}
		if ours(suite, f[2], f[3:]) {
			out = append(out, strings.Join(strings.Fields(line), " "))
		}
	}
	return out
}

// fields splits a one-line entry into type, URI, suite and components; its
// [options] are left out.
func fields(line string) []string {
	if i := strings.IndexByte(line, '['); i >= 0 {
		if j := strings.IndexByte(line[i:], ']'); j >= 0 {
			line = line[:i] + line[i+j+1:]
		}
	}
	return strings.Fields(line)
}

// deb822 reads sources.list(5)'s DEB822 style.
func deb822(data []byte, suite string) []string {
	var out []string
	for _, para := range strings.Split(strings.ReplaceAll(string(data), "\r\n", "\n"), "\n\n") {
		v := map[string]string{}
		last := ""
		for _, line := range strings.Split(para, "\n") {
			if strings.HasPrefix(line, "#") {
				continue
			}
			if strings.HasPrefix(line, " ") || strings.HasPrefix(line, "\t") {
				v[last] += "\n" + strings.TrimSpace(line)
				continue
			}
			k, val, ok := strings.Cut(line, ":")
			if ok {
				last = strings.ToLower(strings.TrimSpace(k))
				v[last] = strings.TrimSpace(val)
			}
		}
		if !slices.Contains(strings.Fields(v["types"]), "deb") || strings.EqualFold(v["enabled"], "no") {
			continue
		}
		options := ""
		// A key in the file itself cannot be said in one line; mmdebstrap finds
		// Debian's own keyring then.
		if by := v["signed-by"]; strings.HasPrefix(by, "/") && !strings.ContainsAny(by, "\n ") {
			options = "[signed-by=" + by + "] "
		}
		components := strings.Fields(v["components"])
		for _, s := range strings.Fields(v["suites"]) {
			for _, uri := range strings.Fields(v["uris"]) {
				if ours(suite, s, components) {
					out = append(out, "deb "+options+uri+" "+s+" "+strings.Join(components, " "))
				}
			}
		}
	}
	return out
}
