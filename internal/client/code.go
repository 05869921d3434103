package client

import (
	"bufio"
	"context"
	"encoding/json"
	"io"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// maxCodeEvent bounds one event of running code, in bytes.
const maxCodeEvent = 256 << 20

// RunCode runs code in a sandbox's code interpreter and calls f for each event.
// An exception in the code is an event and no error. The end of ctx interrupts
// the code.
func (c *Client) RunCode(ctx context.Context, id string, r wire.RunCode, f func(wire.CodeEvent) error) error {
	res, err := c.send(ctx, call{method: "POST", path: sandboxPath(id, "/code"), body: r})
	if err != nil {
		return err
	}
	defer res.Body.Close()
	err = readCodeEvents(res.Body, f)
	if ctx.Err() != nil {
		return c.Error(ctx.Err())
	}
	return err
}

// readCodeEvents reads events up to the one that ends the execution.
func readCodeEvents(r io.Reader, f func(wire.CodeEvent) error) error {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxCodeEvent)
	for s.Scan() {
		if len(s.Bytes()) == 0 {
			continue
		}
		var e wire.CodeEvent
		if err := json.Unmarshal(s.Bytes(), &e); err != nil {
			return sandbox.Errorf(sandbox.CodeInternal, "an event of the code interpreter is not its JSON: %w", err)
		}
		if err := f(e); err != nil {
			return err
		}
		if e.Type == wire.CodeEnd || e.Type == wire.CodeUnexpectedEnd {
			return nil
		}
	}
	if err := s.Err(); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the answer broke off: %w", err)
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "the answer ended before the execution did: its sandbox has probably ended")
}
