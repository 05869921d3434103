package forkproof

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

const callsDir = "/tmp/warren-forkproof-calls"

// startCalls starts CallsPython, which waits in a system call of each kind. The
// calls that have a timeout wait six seconds, so it is the last thing to do
// before the capture.
func startCalls(ctx context.Context, sb Sandbox) error {
	if err := sb.WriteFile(ctx, callsDir+".py", CallsPython, 0o644); err != nil {
		return err
	}
	out, err := sb.Exec(ctx, `command -v python3 >/dev/null && command -v setsid >/dev/null || exit 77
rm -rf `+callsDir+` && mkdir `+callsDir+` && cd `+callsDir+`
setsid python3 ../$(basename `+callsDir+`).py . </dev/null >log 2>&1 & echo $! >pid
i=0; until [ -e up ]; do i=$((i+1)); [ $i -lt 200 ] || { tail -n 3 log >&2; exit 1; }; sleep 0.1; done`, execLimit)
	switch {
	case err != nil:
		return err
	case out.Code == 77:
		return untried("the template has no program for it")
	case out.Code != 0:
		return errors.New(strings.TrimSpace(out.Stderr))
	}
	return nil
}

// endCalls lets the calls come to their end and tells what became of them.
func endCalls(ctx context.Context, sb Sandbox) (string, error) {
	if _, err := sh(ctx, sb, "command -v python3 >/dev/null && test -e "+callsDir+"/up"); err != nil {
		return "", untried("the template has no program for it")
	}
	if _, err := sh(ctx, sb, "cd "+callsDir+" && { kill -0 $(cat pid) 2>/dev/null || test -e result; } && touch release"); err != nil {
		return "", errors.New("its process is not there")
	}
	out, err := until(ctx, sb, "cat "+callsDir+"/result", waitLimit)
	if err != nil {
		return "", errors.New("its calls do not come to an end")
	}
	return out, nil
}

// largeWrite is the call of CallsPython that any stop ends early: what it has
// written by then is its answer, by the rules of write(2).
const largeWrite = "write of more than a pipe holds, whole"

// JudgeCalls reads what CallsPython found. The error names the calls that were
// ended before their time. A large write is not looked at.
func JudgeCalls(result string) (string, error) {
	var bad, absent []string
	good := 0
	for line := range strings.Lines(result) {
		name, what, ok := strings.Cut(strings.TrimSpace(line), ": ")
		switch {
		case !ok || name == largeWrite:
		case what == "yes":
			good++
		case strings.HasPrefix(what, "absent"):
			absent = append(absent, name)
		default:
			bad = append(bad, name+" ("+strings.TrimPrefix(what, "no: ")+")")
		}
	}
	if len(bad) > 0 {
		return "", fmt.Errorf("%d of %d do not: %s", len(bad), good+len(bad), strings.Join(bad, "; "))
	}
	if good == 0 {
		return "", errors.New("nothing was found")
	}
	said := fmt.Sprintf("%d kinds", good)
	if len(absent) > 0 {
		said += "; not in this kernel, or not waiting: " + strings.Join(absent, ", ")
	}
	return said, nil
}

// judgeWrite reads what became of the large write.
func judgeWrite(result string) error {
	for line := range strings.Lines(result) {
		name, what, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch {
		case name != largeWrite:
		case what == "yes":
			return nil
		default:
			return fmt.Errorf("%s; remedy: go on after a short write, as stdio, Python, Node and Go do", strings.TrimPrefix(what, "no: "))
		}
	}
	return errors.New("nothing was found")
}

// overCalls are checks of what became of the calls of the source and of each
// child.
func overCalls(judge func(result string) (string, error)) func(context.Context, *family) (string, error) {
	return func(ctx context.Context, f *family) (string, error) {
		one := func(sb Sandbox) (string, error) {
			result, err := endCalls(ctx, sb)
			if err != nil {
				return "", err
			}
			return judge(result)
		}
		seen, err := one(f.source)
		if err != nil {
			if !errors.As(err, new(errUntried)) {
				err = fmt.Errorf("the source: %w", err)
			}
			return "", err
		}
		return seen + ", in the source and in each child", f.eachKid(func(sb Sandbox) error {
			_, err := one(sb)
			return err
		})
	}
}

func largeWrites(result string) (string, error) { return "written whole", judgeWrite(result) }
