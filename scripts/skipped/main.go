// Command skipped reads the output of `go test -json` and lists the tests that
// were skipped with the reason that each gave, one line for each reason.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"sort"
	"strings"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "skipped:", err)
		os.Exit(1)
	}
}

type event struct{ Action, Package, Test, Output string }

// t.Skip prints "    file_test.go:12: the reason".
var reason = regexp.MustCompile(`^\s+\S+\.go:\d+: (.*)\n$`)

func run(r io.Reader, w io.Writer) error {
	last := map[string]string{} // test → the last line that it logged
	why := map[string][]string{}
	in := bufio.NewScanner(r)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) != nil || e.Test == "" {
			continue
		}
		key := strings.TrimPrefix(e.Package, "github.com/warrenhq/warren/") + "." + e.Test
		switch e.Action {
		case "output":
			if m := reason.FindStringSubmatch(e.Output); m != nil {
				last[key] = m[1]
			}
		case "skip":
			why[last[key]] = append(why[last[key]], key)
		}
	}
	if err := in.Err(); err != nil {
		return err
	}
	if len(why) == 0 {
		fmt.Fprintln(w, "  nothing")
	}
	reasons := make([]string, 0, len(why))
	for r := range why {
		reasons = append(reasons, r)
	}
	sort.Strings(reasons)
	for _, r := range reasons {
		tests := why[r]
		if r == "" {
			r = "(no reason given)"
		}
		fmt.Fprintf(w, "  %s\n    %s\n", r, strings.Join(tests, "\n    "))
	}
	return nil
}
