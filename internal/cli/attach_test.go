package cli

import (
	"context"
	"strings"
	"testing"
)

func TestDetachKey(t *testing.T) {
	for in, want := range map[string]string{
		"ls\n":            "ls\n",
		"ls\x1dnever":     "ls",
		"\x1d":            "",
		"a\x03b\x1d\x1dc": "a\x03b",
	} {
		var sent strings.Builder
		left := false
		feedAttached(t.Context(), strings.NewReader(in), func(_ context.Context, p []byte) error {
			sent.Write(p)
			return nil
		}, func() { left = true })
		if sent.String() != want || left != strings.Contains(in, "\x1d") {
			t.Errorf("%q: sent %q, left %v", in, sent.String(), left)
		}
	}
}
