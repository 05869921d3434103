package api_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestRefusalInTheMiddle sends bodies that are refused before their end: the
// client has to get the reason, not a broken pipe.
func TestRefusalInTheMiddle(t *testing.T) {
	w := newWorld(t)
	key, err := w.root.CreateKey(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	id := w.create(t, wire.CreateSandbox{}).ID
	// No archive from its first bytes on, and much of it.
	junk := strings.Repeat("this is no archive ", 1<<19)
	for name, c := range map[string]*client.Client{"unix": w.root, "tcp": w.client(t, w.tcp, client.Options{APIKey: key.Key})} {
		for range 30 {
			if err := c.WriteTar(t.Context(), id, t.TempDir(), "", strings.NewReader(junk)); !isCode(err, sandbox.CodeInvalid) {
				t.Fatalf("%s: an upload that is refused: %v", name, err)
			}
			if err := c.WriteFile(t.Context(), id, t.TempDir(), "", strings.NewReader(junk), int64(len(junk)), 0); !isCode(err, sandbox.CodeInvalid) {
				t.Fatalf("%s: a file over a directory: %v", name, err)
			}
			_, err := c.BuildTemplate(t.Context(), wire.BuildTemplate{Name: "x"}, bytes.NewReader([]byte(junk)), nil)
			if !isCode(err, sandbox.CodeInvalid) {
				t.Fatalf("%s: a build that is refused: %v", name, err)
			}
		}
	}
}
