// Command standin is a stand-in for the agent in the runtimes' tests: it
// answers GET /health, and GET /run?cmd= runs a shell command and answers with
// its output, the exit code in the X-Exit header. So the drivers are tested
// without the real agent's protocol.
package main

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

func main() {
	fmt.Println("standin: up")
	if data, err := os.ReadFile("/standin.fail"); err == nil {
		fmt.Fprintln(os.Stderr, strings.TrimSpace(string(data)))
		os.Exit(7)
	}
	http.HandleFunc("GET /health", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) })
	http.HandleFunc("GET /run", run)
	if err := http.ListenAndServe(":49983", nil); err != nil {
		fmt.Fprintln(os.Stderr, "standin:", err)
		os.Exit(1)
	}
}

func run(w http.ResponseWriter, r *http.Request) {
	// As the agent does: what it runs may be ended for memory before it is.
	cmd := exec.CommandContext(r.Context(), "/bin/sh", "-c", "echo 500 > /proc/self/oom_score_adj; "+r.FormValue("cmd"))
	out, err := cmd.CombinedOutput()
	code := 0
	if err != nil {
		code = 255
		if cmd.ProcessState != nil {
			code = cmd.ProcessState.ExitCode()
			if code < 0 {
				code = 128 + 9
			}
		}
	}
	w.Header().Set("X-Exit", strconv.Itoa(code))
	w.Write(out)
}
