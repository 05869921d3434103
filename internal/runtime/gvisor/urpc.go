package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// maxReply bounds an answer of a Sentry's control server.
const maxReply = 1 << 20

// dialWithin bounds the wait for a Sentry that does not accept.
const dialWithin = 5 * time.Second

// errSentry is what a Sentry said of a call that failed.
type errSentry string

func (e errSentry) Error() string { return "the sandbox's kernel said: " + string(e) }

// call calls a method of a Sentry's control server and gives it files, without
// a process of runsc's. The answer goes to result, which may be nil. sent, which
// may be nil, is called when the Sentry has the files or will not get them. The protocol is gVisor's (pkg/urpc): one JSON
// value each way over a stream socket, the files beside the first byte.
func (d *Driver) call(ctx context.Context, id sandbox.ID, method string, arg, result any, files []*os.File, sent func()) error {
	once := func() {
		if sent != nil {
			sent()
			sent = nil
		}
	}
	defer once()
	state, err := d.runscState(id)
	if err != nil {
		return err
	}
	data, err := json.Marshal(struct {
		Method string `json:"method"`
		Arg    any    `json:"arg"`
	}{method, arg})
	if err != nil {
		return err
	}
	// Without ctx: its deadline would come as another error, and before its own.
	c, err := net.DialTimeout("unix", state.Sandbox.Socket, dialWithin)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	conn := c.(*net.UnixConn)
	fds := make([]int, len(files))
	for n, f := range files {
		fds[n] = int(f.Fd())
	}
	n, _, err := conn.WriteMsgUnix(data, unix.UnixRights(fds...), nil)
	if err == nil && n < len(data) {
		_, err = conn.Write(data[n:])
	}
	once()
	if err != nil {
		return fmt.Errorf("call the sandbox's kernel: %w", err)
	}
	reply := struct {
		Success bool   `json:"success"`
		Err     string `json:"err"`
		Result  any    `json:"result"`
	}{Result: result}
	if err := json.NewDecoder(io.LimitReader(conn, maxReply)).Decode(&reply); err != nil {
		return fmt.Errorf("the sandbox's kernel did not answer: %w", err)
	}
	if !reply.Success {
		return errSentry(fmt.Sprintf("%.500q", reply.Err))
	}
	return nil
}

// runscState is what runsc has on record of a sandbox, as far as Warren reads it.
type runscState struct {
	Status  string `json:"status"`
	Sandbox struct {
		Socket string `json:"controlSocketPath"` // it depends on the length of the state directory's path
	} `json:"sandbox"`
}

// statusPaused is runsc's word for a suspended sandbox (runsc/container.Paused).
const statusPaused = "paused"

func (d *Driver) runscState(id sandbox.ID) (runscState, error) {
	var state runscState
	data, err := os.ReadFile(d.runscFile(id, "state"))
	if err == nil {
		err = json.Unmarshal(data, &state)
	}
	if err == nil && state.Sandbox.Socket == "" {
		err = errors.New("it names no control socket")
	}
	if err != nil {
		return state, fmt.Errorf("runsc's record of the sandbox: %w", err)
	}
	return state, nil
}
