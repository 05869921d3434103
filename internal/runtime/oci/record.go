package oci

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/warrenhq/warren/internal/sandbox"
)

// record is what a driver keeps of a sandbox on the host, so that the next
// daemon can adopt or remove it. It is written before anything else is made
// and removed after everything else is gone.
type record struct {
	ID    sandbox.ID `json:"id"`
	PID   int        `json:"pid,omitempty"`   // of the first process; 0 until it was started
	Start uint64     `json:"start,omitempty"` // and its start time
	CPUs  []int      `json:"cpus,omitempty"`  // it is bound to these; none is all
	// Prepared: its first process waits for a capture to be restored in it.
	Prepared bool `json:"prepared,omitempty"`
}

const recordName = "warren.json"

func writeRecord(dir string, r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	// The directory is on a tmpfs in normal use: no fsync is needed, and none
	// would help, since a host's crash takes the sandbox with it.
	tmp := filepath.Join(dir, "."+recordName)
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return fmt.Errorf("record of %s: %w", r.ID, err)
	}
	return os.Rename(tmp, filepath.Join(dir, recordName))
}

// readRecord gives errGone where there is none.
func readRecord(dir string) (record, error) {
	var r record
	data, err := os.ReadFile(filepath.Join(dir, recordName))
	if errors.Is(err, os.ErrNotExist) {
		return r, errGone
	}
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("%s: %w", filepath.Join(dir, recordName), err)
	}
	return r, nil
}
