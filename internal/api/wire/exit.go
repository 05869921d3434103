package wire

import (
	"strings"

	"golang.org/x/sys/unix"
)

// signalByText maps what Go's os.ProcessState says ("killed") to the number.
var signalByText = func() map[string]unix.Signal {
	m := map[string]unix.Signal{}
	for s := unix.Signal(1); s < 65; s++ {
		m[s.String()] = s
	}
	return m
}()

// ExitStatus reads the end of a command as the agent tells it (exit_code,
// exited and status of ProcessEvent.EndEvent) into a shell's exit code, which
// is 128+n for signal n, and the signal's name, "" where it exited.
func ExitStatus(code int, exited bool, status string) (int, string) {
	if exited || !strings.HasPrefix(status, "signal: ") {
		return code & 0xff, ""
	}
	text := strings.TrimSuffix(strings.TrimPrefix(status, "signal: "), " (core dumped)")
	s, ok := signalByText[text]
	if !ok {
		return 128, strings.ToValidUTF8(text, "?")
	}
	name := unix.SignalName(s)
	if name == "" {
		name = text // a real-time signal: "signal 35"
	}
	return 128 + int(s), name
}
