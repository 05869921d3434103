package prove

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// keptReports is how many reports Save leaves in its directory.
const keptReports = 50

// Dir is where a user's reports are kept: warren/prove in the XDG base
// directory for state ($XDG_STATE_HOME, else ~/.local/state).
func Dir(getenv func(string) string) (string, error) {
	base := getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(base) { // the specification: a relative one is ignored
		home := getenv("HOME")
		if home == "" {
			return "", errors.New("neither XDG_STATE_HOME nor HOME is set: there is no place to keep the report in")
		}
		base = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(base, "warren", "prove"), nil
}

// Save keeps a report in dir, whole or not at all, drops the oldest beyond 50,
// and gives its path.
func Save(dir string, r *Report) (string, error) {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, r.At.Format("20060102T150405Z")+".json")
	tmp, err := os.CreateTemp(dir, ".report-")
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name())
	_, werr := tmp.Write(append(data, '\n'))
	if err := errors.Join(werr, tmp.Chmod(0o644), tmp.Close()); err != nil {
		return "", err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return "", err
	}
	names, err := reports(dir)
	if err != nil {
		return path, nil
	}
	for _, old := range names[:max(0, len(names)-keptReports)] {
		os.Remove(filepath.Join(dir, old))
	}
	return path, nil
}

// reports lists the reports of dir, oldest first.
func reports(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".json") && e.Type().IsRegular() {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// maxReport bounds a report that is read back.
const maxReport = 64 << 20

// Load reads a report. One of another schema is refused.
func Load(path string) (*Report, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxReport))
	if err != nil {
		return nil, err
	}
	var r Report
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("%s is not a report of warren prove: %w", path, err)
	}
	if r.Schema != schema {
		return nil, fmt.Errorf("%s has schema %d, and this program reads %d: run warren prove again", path, r.Schema, schema)
	}
	return &r, nil
}

// Latest reads the newest report of dir; nil, "" and no error where there is
// none.
func Latest(dir string) (*Report, string, error) {
	names, err := reports(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	if len(names) == 0 {
		return nil, "", nil
	}
	path := filepath.Join(dir, names[len(names)-1])
	r, err := Load(path)
	return r, path, err
}
