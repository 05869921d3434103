package template

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// maxRecord bounds a record that is read back: labels and env make most of it.
const maxRecord = 16 << 20

// layerMeta is the record beside a layer.
type layerMeta struct {
	layer.Stats
	CreatedAt time.Time `json:"created_at"`
}

// writeRecord replaces the file at path by v as JSON: whole or not at all,
// also through a power cut.
func (l *Library) writeRecord(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return layer.Error("write a record", err)
	}
	f, err := os.CreateTemp(l.path("tmp"), "record-")
	if err != nil {
		return layer.Error("write a record", err)
	}
	defer os.Remove(f.Name()) // of no effect once it is renamed
	defer f.Close()
	if _, err := f.Write(append(data, '\n')); err != nil {
		return layer.Error("write a record", err)
	}
	if err := f.Sync(); err != nil {
		return layer.Error("write a record", err)
	}
	pointRecordTemp.Hit()
	if err := os.Rename(f.Name(), path); err != nil {
		return layer.Error("write a record", err)
	}
	return layer.Error("write a record", syncDir(filepath.Dir(path)))
}

// syncDir makes the names in dir durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// syncTree makes everything written below dir durable. Layers have tens of
// thousands of files: one syncfs costs less than an fsync of each.
func syncTree(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

func readRecord[T any](path string) (T, error) {
	var v T
	f, err := os.Open(path)
	if err != nil {
		return v, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return v, err
	}
	return v, json.Unmarshal(data, &v)
}

// load reads everything from disk and undoes what a crash left half done.
func (l *Library) load() error {
	if err := l.emptyTmp(); err != nil {
		return err
	}
	if err := l.loadLayers(); err != nil {
		return err
	}
	tenants, err := os.ReadDir(l.path("templates"))
	if err != nil {
		return layer.Error("read the templates", err)
	}
	for _, tenant := range tenants {
		err := loadRecords(l, l.path("templates", tenant.Name()), func(file string, t Template) error {
			if t.Tenant != tenant.Name() || t.Name != file || !IsID(t.ID) {
				return errors.New("it is of another template")
			}
			for _, d := range t.Layers {
				if !digestPattern.MatchString(d) {
					return errors.New("a layer's digest is malformed")
				}
			}
			l.live[key(t.Tenant, t.Name)] = t
			return nil
		})
		if err != nil {
			return err
		}
	}
	err = loadRecords(l, l.path("retired"), func(file string, t Template) error {
		if t.ID != file {
			return errors.New("it is of another template")
		}
		if now, ok := l.live[key(t.Tenant, t.Name)]; ok && now.ID == t.ID {
			return os.Remove(l.path("retired", file+".json")) // the replacement never came to be
		}
		l.retired[t.ID] = t
		return nil
	})
	if err != nil {
		return err
	}
	return loadRecords(l, l.path("cache"), func(file string, c cacheEntry) error {
		if _, ok := l.layers[c.Layer]; !ok || c.Key != file {
			return os.Remove(l.path("cache", file+".json"))
		}
		if fi, err := os.Stat(l.path("cache", file+".json")); err == nil {
			c.used = fi.ModTime()
		}
		l.cache[c.Key] = c
		return nil
	})
}

// loadRecords reads every *.json of dir. A record that cannot be used is set
// aside and told by Problems: one bad sector must not keep the daemon down.
func loadRecords[T any](l *Library, dir string, take func(name string, v T) error) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return layer.Error("read the template records", err)
	}
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok {
			continue
		}
		path := filepath.Join(dir, f.Name())
		v, err := readRecord[T](path)
		if err == nil {
			err = take(name, v)
		}
		if err != nil {
			l.problems = append(l.problems, sandbox.Errorf(sandbox.CodeInternal, "the record %s is set aside as %s.broken: %w", path, path, err))
			if err := os.Rename(path, path+".broken"); err != nil {
				return layer.Error("set a broken record aside", err)
			}
		}
	}
	return nil
}

// emptyTmp removes what was being made when the last process ended.
func (l *Library) emptyTmp() error {
	entries, err := os.ReadDir(l.path("tmp"))
	if err != nil {
		return layer.Error("sweep the template directory", err)
	}
	for _, e := range entries {
		if err := layer.RemoveTree(l.path("tmp", e.Name())); err != nil {
			return layer.Error("sweep the template directory", err)
		}
	}
	return nil
}

// loadLayers finds the layers. Each has a record, which is written first: a
// layer without one, or a record without a layer, is half made or half
// removed.
func (l *Library) loadLayers() error {
	err := loadRecords(l, l.path("meta"), func(file string, m layerMeta) error {
		if !layerDirPattern.MatchString(file) {
			return errors.New("its name is not a layer's")
		}
		if _, err := os.Lstat(l.path("layers", file)); errors.Is(err, os.ErrNotExist) {
			return os.Remove(l.path("meta", file+".json"))
		}
		l.layers[digestOf(file)] = m.Stats
		return nil
	})
	if err != nil {
		return err
	}
	dirs, err := os.ReadDir(l.path("layers"))
	if err != nil {
		return layer.Error("read the layers", err)
	}
	for _, d := range dirs {
		if layerDirPattern.MatchString(d.Name()) {
			if _, ok := l.layers[digestOf(d.Name())]; ok {
				continue
			}
		}
		if err := layer.RemoveTree(l.path("layers", d.Name())); err != nil {
			return layer.Error("sweep the layers", err)
		}
	}
	return nil
}
