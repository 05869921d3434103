package client

import (
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
)

func TestReadCodeEvents(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want int
		ok   bool
	}{
		"whole":   {"{\"type\":\"stdout\",\"text\":\"a\"}\n\n{\"type\":\"end_of_execution\"}\n", 2, true},
		"died":    {"{\"type\":\"unexpected_end_of_execution\"}\n", 1, true},
		"cut":     {"{\"type\":\"stdout\",\"text\":\"a\"}\n", 1, false},
		"garbage": {"what\n", 0, false},
		"empty":   {"", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			err := readCodeEvents(strings.NewReader(c.in), func(wire.CodeEvent) error { n++; return nil })
			if n != c.want || (err == nil) != c.ok {
				t.Errorf("%d events, %v", n, err)
			}
		})
	}
}

func FuzzReadCodeEvents(f *testing.F) {
	f.Add("{\"type\":\"result\",\"chart\":{},\"extra\":{\"a\":1}}\n{\"type\":\"end_of_execution\"}\n")
	f.Fuzz(func(t *testing.T, in string) {
		ended := false
		err := readCodeEvents(strings.NewReader(in), func(e wire.CodeEvent) error {
			ended = e.Type == wire.CodeEnd || e.Type == wire.CodeUnexpectedEnd
			return nil
		})
		if (err == nil) != ended {
			t.Errorf("ended %v, error %v", ended, err)
		}
	})
}
