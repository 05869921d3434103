package template

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/warrenhq/warren/internal/template/layer"
)

// cacheEntry says which layer a Dockerfile step made.
type cacheEntry struct {
	Key       string    `json:"key"`
	Layer     string    `json:"layer"`
	Step      string    `json:"step"` // for people
	CreatedAt time.Time `json:"created_at"`
	used      time.Time // the record's mtime
}

// Collect removes what nothing needs: retired templates without a holder, the
// build cache's least recently used entries above its size, and layers of
// neither. The first call says that all holders are known; from then on it
// happens by itself where something becomes useless.
func (l *Library) Collect(ctx context.Context) error {
	l.mu.Lock()
	l.adopted = true
	l.mu.Unlock()
	return l.collect(ctx)
}

func (l *Library) collect(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return layer.Error("collect templates", err)
	}
	rubbish, err := l.detach()
	for _, dir := range rubbish {
		if e := layer.RemoveTree(dir); e != nil && err == nil {
			err = layer.Error("remove a layer", e)
		}
		pointGarbageGone.Hit()
	}
	return err
}

// detach takes all garbage out of sight and gives the directories to remove.
func (l *Library) detach() (rubbish []string, err error) {
	l.commit.Lock()
	defer l.commit.Unlock()
	records, layers := l.garbage()
	for _, r := range records {
		if e := os.Remove(r); e != nil && !errors.Is(e, os.ErrNotExist) && err == nil {
			err = layer.Error("remove a record", e)
		}
	}
	for _, d := range layers {
		to := l.path("tmp", "garbage-"+dirName(d)+"-"+NewID())
		if e := os.Rename(l.layerDir(d), to); e != nil {
			if err == nil {
				err = layer.Error("remove a layer", e)
			}
			continue
		}
		pointGarbage.Hit()
		os.Remove(l.path("meta", dirName(d)+".json")) // Open removes one without a layer
		rubbish = append(rubbish, to)
	}
	return rubbish, err
}

// garbage drops from the maps what nothing needs, and gives what is on disk
// of it.
func (l *Library) garbage() (records, layers []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.adopted {
		return nil, nil
	}
	for id := range l.retired {
		if !l.held(id) {
			delete(l.retired, id)
			records = append(records, l.path("retired", id+".json"))
		}
	}
	needed := map[string]bool{}
	for d := range l.pins {
		needed[d] = true
	}
	for _, ts := range []map[string]Template{l.live, l.retired} {
		for _, t := range ts {
			for _, d := range t.Layers {
				needed[d] = true
			}
		}
	}
	entries := make([]cacheEntry, 0, len(l.cache))
	for _, c := range l.cache {
		entries = append(entries, c)
	}
	slices.SortFunc(entries, func(a, b cacheEntry) int { return cmp.Or(b.used.Compare(a.used), cmp.Compare(a.Key, b.Key)) })
	var size int64
	for _, c := range entries { // the most recently used first
		if !needed[c.Layer] {
			size += l.layers[c.Layer].Bytes + l.layers[c.Layer].Entries*512 // an inode's worth each
			if size > l.cacheMax {
				delete(l.cache, c.Key)
				records = append(records, l.path("cache", c.Key+".json"))
				continue
			}
			needed[c.Layer] = true
		}
	}
	for d := range l.layers {
		if !needed[d] {
			delete(l.layers, d)
			layers = append(layers, d)
		}
	}
	return records, layers
}

// PruneCache forgets the build cache, and removes the layers that only it
// kept. It gives the bytes that they had.
func (l *Library) PruneCache(ctx context.Context) (int64, error) {
	l.mu.Lock()
	var before, after int64
	for _, s := range l.layers {
		before += s.Bytes
	}
	var keys []string
	for k := range l.cache {
		keys = append(keys, k)
	}
	clear(l.cache)
	l.mu.Unlock()
	for _, k := range keys {
		if err := os.Remove(l.path("cache", k+".json")); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, layer.Error("prune the build cache", err)
		}
	}
	err := l.collect(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.layers {
		after += s.Bytes
	}
	return max(before-after, 0), err
}

// cached finds a step's layer and pins it.
func (b *build) cached(key string) (string, bool) {
	b.l.mu.Lock()
	c, ok := b.l.cache[key]
	if ok {
		c.used = time.Now()
		b.l.cache[key] = c
	}
	b.l.mu.Unlock()
	if !ok || !b.pin(c.Layer) {
		return "", false
	}
	// Only the order of eviction hangs on it: no error is worth a build.
	os.Chtimes(b.l.path("cache", key+".json"), c.used, c.used)
	return c.Layer, true
}

// remember stores that the step of key made the layer.
func (b *build) remember(key, digest, step string) error {
	now := time.Now()
	c := cacheEntry{Key: key, Layer: digest, Step: step, CreatedAt: now.UTC(), used: now}
	if err := b.l.writeRecord(b.l.path("cache", key+".json"), c); err != nil {
		return err
	}
	pointCacheStored.Hit()
	b.l.mu.Lock()
	b.l.cache[key] = c
	b.l.mu.Unlock()
	return nil
}
