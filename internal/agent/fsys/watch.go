package fsys

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/proto/filesystem"
)

// All watches of the sandbox share one inotify instance: the kernel's limit on
// instances (fs.inotify.max_user_instances, 128 by default) is charged to the
// user that made the sandbox's user namespace, which is the same for all
// sandboxes of a host.

// maxEvents is how many events of one watcher wait to be taken. When more
// come they are dropped, and the watcher tells how many.
const maxEvents = 8192

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK

// Event is one change under a watched directory; Name is relative to it.
type Event struct {
	Name string
	Type filesystem.EventType
}

// Watches is the sandbox's watches.
type Watches struct {
	mu     sync.Mutex // held over inotify_add_watch, so that no event of a new watch is seen before its node
	inst   *instance
	closed bool
}

// instance is one inotify instance; it lives while it has watchers.
type instance struct {
	file     *os.File
	fd       int
	nodes    map[int32]map[*Watcher]string // by watch descriptor: the path in each watcher
	watchers map[*Watcher]struct{}
	done     chan struct{}

	turn    sync.Mutex // of who reads; before the set's
	buf     []byte
	uploads map[uint32]byte // renames of uploads under way: 'n' or 'o', by cookie
}

// Watcher watches one directory, or a tree.
type Watcher struct {
	set       *Watches
	inst      *instance
	root      string
	shown     string // root as the client named it
	withEntry bool   // of a polled one
	recursive bool
	wds       map[string]int32 // by path relative to root; root is ""
	queue     []Event
	lost      int
	why       error // why events were lost, where it is not the queue
	closed    bool
	ready     chan struct{}
}

// ErrLost is that events were lost: there were more than were taken.
var ErrLost = errors.New("events of the watch were lost")

// Watch watches the directory root, and with recursive all directories under
// it, those that are made later too. Close ends it.
func (s *Watches) Watch(root string, recursive bool) (*Watcher, error) {
	w := &Watcher{set: s, root: root, recursive: recursive, wds: map[string]int32{}, ready: make(chan struct{}, 1)}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, os.ErrClosed
	}
	if s.inst == nil {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			s.mu.Unlock()
			return nil, fmt.Errorf("open inotify: %w: the host's fs.inotify.max_user_instances may be used up", err)
		}
		s.inst = &instance{file: os.NewFile(uintptr(fd), "inotify"), fd: fd, nodes: map[int32]map[*Watcher]string{}, watchers: map[*Watcher]struct{}{}, done: make(chan struct{}), buf: make([]byte, 16<<10), uploads: map[uint32]byte{}}
		go s.loop(s.inst)
	}
	w.inst = s.inst
	w.inst.watchers[w] = struct{}{}
	s.mu.Unlock()
	if err := w.add("", false); err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// add watches the directory rel and, in a recursive watcher, what is under it.
// With tell, what is found there is told as created: it was made before the
// watch was in place (and may then be told twice).
func (w *Watcher) add(rel string, tell bool) error {
	dir := filepath.Join(w.root, rel)
	w.set.mu.Lock()
	if w.closed {
		w.set.mu.Unlock()
		return nil
	}
	mask := uint32(watchMask)
	if rel != "" {
		mask |= unix.IN_DONT_FOLLOW
	}
	wd, err := unix.InotifyAddWatch(w.inst.fd, dir, mask)
	if err == nil {
		views := w.inst.nodes[int32(wd)]
		if views == nil {
			views = map[*Watcher]string{}
			w.inst.nodes[int32(wd)] = views
		}
		views[w] = rel
		w.wds[rel] = int32(wd)
	}
	w.set.mu.Unlock()
	switch {
	case err == unix.ENOSPC:
		return fmt.Errorf("watch %s: %w: the host's fs.inotify.max_user_watches is used up; raise it, or watch less", dir, err)
	case err != nil && rel != "" && (err == unix.ENOENT || err == unix.ENOTDIR || err == unix.EACCES || err == unix.ELOOP):
		return nil // gone meanwhile
	case err != nil:
		return &fs.PathError{Op: "watch", Path: dir, Err: err}
	}
	if !w.recursive {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		name := filepath.Join(rel, e.Name())
		if strings.HasPrefix(e.Name(), UploadPrefix) {
			continue
		}
		if tell {
			events := []Event{{name, filesystem.EventType_EVENT_TYPE_CREATE}}
			if st, err := e.Info(); err == nil && st.Mode().IsRegular() && st.Size() > 0 {
				events = append(events, Event{name, filesystem.EventType_EVENT_TYPE_WRITE})
			}
			w.set.mu.Lock()
			w.push(events...)
			w.set.mu.Unlock()
		}
		if e.IsDir() {
			if err := w.add(name, tell); err != nil {
				return err
			}
		}
	}
	return nil
}

// push queues events; the set's lock is held.
func (w *Watcher) push(events ...Event) {
	for _, e := range events {
		if n := len(w.queue); n > 0 && w.queue[n-1] == e {
			continue // the same again, and nobody saw the first yet
		}
		if len(w.queue) >= maxEvents {
			w.lost++
			continue
		}
		w.queue = append(w.queue, e)
	}
	w.notify()
}

func (w *Watcher) notify() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// drop forgets the watch descriptor of rel in w; the set's lock is held.
func (w *Watcher) drop(rel string) {
	wd, ok := w.wds[rel]
	if !ok {
		return
	}
	delete(w.wds, rel)
	views := w.inst.nodes[wd]
	if views[w] == rel {
		delete(views, w)
	}
	if len(views) == 0 {
		delete(w.inst.nodes, wd)
		unix.InotifyRmWatch(w.inst.fd, uint32(wd)) // it may be gone already
	}
}

// dropTree forgets rel and all under it.
func (w *Watcher) dropTree(rel string) {
	for p := range w.wds {
		if p == rel || strings.HasPrefix(p, rel+"/") {
			w.drop(p)
		}
	}
}

// Take gives the events that came, and ErrLost (once) after the last one that
// came before a loss.
func (w *Watcher) Take() ([]Event, error) {
	w.set.mu.Lock()
	defer w.set.mu.Unlock()
	if len(w.queue) == 0 && w.lost > 0 {
		err := fmt.Errorf("%w: %d or more", ErrLost, w.lost)
		if w.why != nil {
			err = fmt.Errorf("%w: %w", ErrLost, w.why)
		}
		w.lost, w.why = 0, nil
		return nil, err
	}
	q := w.queue
	w.queue = nil
	if w.lost > 0 {
		w.notify()
	}
	if w.closed && len(q) == 0 {
		return nil, os.ErrClosed
	}
	return q, nil
}

// Next waits for events, until ctx is done or tick fires (then there are
// none).
func (w *Watcher) Next(ctx context.Context, tick <-chan time.Time) ([]Event, error) {
	for {
		if q, err := w.Take(); len(q) > 0 || err != nil {
			return q, err
		}
		select {
		case <-w.ready:
		case <-tick:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Close ends the watch. It is idempotent.
func (w *Watcher) Close() {
	s := w.set
	var last *os.File
	defer func() {
		if last != nil {
			last.Close() // ends the loop, and waits for a read under way, which takes the lock
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.closed {
		return
	}
	w.closed = true
	w.dropTree("")
	for p := range w.wds {
		w.drop(p)
	}
	delete(w.inst.watchers, w)
	w.notify()
	if len(w.inst.watchers) == 0 && s.inst == w.inst {
		s.inst = nil
		last = w.inst.file
	}
}

// Close ends all watches.
func (s *Watches) Close() {
	s.mu.Lock()
	s.closed = true
	inst := s.inst
	var all []*Watcher
	if inst != nil {
		for w := range inst.watchers {
			all = append(all, w)
		}
	}
	s.mu.Unlock()
	for _, w := range all {
		w.Close()
	}
	if inst != nil {
		<-inst.done
	}
}

func (s *Watches) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inst == nil {
		return 0
	}
	return len(s.inst.watchers)
}

// later is a directory that a watcher must add.
type later struct {
	w    *Watcher
	rel  string
	tell bool
}

// loop reads an instance's events until it is closed.
func (s *Watches) loop(inst *instance) {
	defer close(inst.done)
	raw, err := inst.file.SyscallConn()
	if err != nil {
		return
	}
	raw.Read(func(uintptr) bool { return s.pump(inst) != nil }) // false waits for more
}

// pump handles all events that are there. The error is of an instance that is
// closed or cannot be read.
func (s *Watches) pump(inst *instance) error {
	inst.turn.Lock()
	defer inst.turn.Unlock()
	for {
		var adds []later
		s.mu.Lock()
		if s.inst != inst {
			s.mu.Unlock()
			return os.ErrClosed
		}
		n, err := unix.Read(inst.fd, inst.buf)
		if err == nil {
			parseEvents(inst.buf[:n], func(wd int32, mask, cookie uint32, name string) {
				adds = append(adds, inst.event(wd, mask, cookie, name)...)
			})
		}
		s.mu.Unlock()
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return nil
		case err != nil:
			return err
		}
		if len(inst.uploads) > 1024 { // renames out of a watched tree
			clear(inst.uploads)
		}
		for _, a := range adds {
			if err := a.w.add(a.rel, a.tell); err != nil {
				s.mu.Lock()
				a.w.lost, a.w.why = a.w.lost+1, err
				a.w.notify()
				s.mu.Unlock()
			}
		}
	}
}

// Sync sees to it that Take gives all that happened before the call.
func (w *Watcher) Sync() { w.set.pump(w.inst) } // of a closed one there is no more

// parseEvents takes a buffer of struct inotify_event apart.
func parseEvents(buf []byte, f func(wd int32, mask, cookie uint32, name string)) {
	for len(buf) >= unix.SizeofInotifyEvent {
		ev := (*unix.InotifyEvent)(unsafe.Pointer(&buf[0]))
		end := unix.SizeofInotifyEvent + int(ev.Len)
		if end > len(buf) {
			return
		}
		name := string(buf[unix.SizeofInotifyEvent:end])
		if i := strings.IndexByte(name, 0); i >= 0 {
			name = name[:i]
		}
		f(ev.Wd, ev.Mask, ev.Cookie, name)
		buf = buf[end:]
	}
}

// event handles one event, and gives what must be added; the set's lock is
// held.
func (inst *instance) event(wd int32, mask, cookie uint32, name string) (adds []later) {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		for w := range inst.watchers {
			w.lost++
			w.notify()
		}
		return nil
	}
	views := inst.nodes[wd]
	if mask&unix.IN_IGNORED != 0 { // the directory is gone
		for w, rel := range views {
			if w.wds[rel] == wd {
				delete(w.wds, rel)
			}
		}
		delete(inst.nodes, wd)
		return nil
	}
	if mask&unix.IN_DELETE_SELF != 0 {
		for w, rel := range views {
			if rel == "" { // of others their parent tells
				w.push(Event{".", filesystem.EventType_EVENT_TYPE_REMOVE})
			}
		}
		return nil
	}
	if name == "" {
		return nil // of the directory itself; its parent tells
	}
	upload := strings.HasPrefix(name, UploadPrefix)
	if upload {
		if mask&unix.IN_MOVED_FROM != 0 && len(name) > len(UploadPrefix) {
			inst.uploads[cookie] = name[len(UploadPrefix)]
		}
		return nil
	}
	types := eventTypes(mask)
	isDir := mask&unix.IN_ISDIR != 0
	if mask&unix.IN_MOVED_TO != 0 {
		if kind, ok := inst.uploads[cookie]; ok {
			delete(inst.uploads, cookie)
			if !isDir { // tell it as if it had been made, given to its owner and written in place
				types = []filesystem.EventType{filesystem.EventType_EVENT_TYPE_WRITE}
				if kind == 'n' {
					types = []filesystem.EventType{filesystem.EventType_EVENT_TYPE_CREATE, filesystem.EventType_EVENT_TYPE_CHMOD, filesystem.EventType_EVENT_TYPE_WRITE}
				}
			}
		}
	}
	for w, dir := range views {
		rel := filepath.Join(dir, name)
		if isDir && w.recursive {
			switch {
			case mask&unix.IN_MOVED_FROM != 0:
				w.dropTree(rel)
			case mask&unix.IN_CREATE != 0:
				adds = append(adds, later{w, rel, true})
			case mask&unix.IN_MOVED_TO != 0:
				adds = append(adds, later{w, rel, false})
			}
		}
		for _, t := range types {
			w.push(Event{rel, t})
		}
	}
	return adds
}

func eventTypes(mask uint32) []filesystem.EventType {
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		return []filesystem.EventType{filesystem.EventType_EVENT_TYPE_CREATE}
	case mask&unix.IN_MODIFY != 0:
		return []filesystem.EventType{filesystem.EventType_EVENT_TYPE_WRITE}
	case mask&unix.IN_DELETE != 0:
		return []filesystem.EventType{filesystem.EventType_EVENT_TYPE_REMOVE}
	case mask&unix.IN_MOVED_FROM != 0:
		return []filesystem.EventType{filesystem.EventType_EVENT_TYPE_RENAME}
	case mask&unix.IN_ATTRIB != 0:
		return []filesystem.EventType{filesystem.EventType_EVENT_TYPE_CHMOD}
	}
	return nil
}
