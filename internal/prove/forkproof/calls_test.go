package forkproof

import (
	"strings"
	"testing"
)

func TestJudgeCalls(t *testing.T) {
	for name, c := range map[string]struct{ result, seen, err string }{
		"all":     {"a: yes\nb: yes\n" + largeWrite + ": no: short\n", "2 kinds", ""},
		"absent":  {"a: yes\nb: absent: returned -1, errno 38\n", "1 kinds; not in this kernel, or not waiting: b", ""},
		"early":   {"a: yes\nb: no: returned -1, errno 4\n", "", "1 of 2 do not: b (returned -1, errno 4)"},
		"nothing": {"", "", "nothing was found"},
		"garbage": {"what\n", "", "nothing was found"},
	} {
		seen, err := JudgeCalls(c.result)
		if seen != c.seen || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%s: %q, %v", name, seen, err)
		}
	}
	if err := judgeWrite("a: yes\n" + largeWrite + ": no: returned 65536\n"); err == nil || !strings.Contains(err.Error(), "65536") {
		t.Errorf("a short write: %v", err)
	}
	if err := judgeWrite(largeWrite + ": yes\n"); err != nil {
		t.Error(err)
	}
	if judgeWrite("") == nil {
		t.Error("nothing is a whole write")
	}
}
