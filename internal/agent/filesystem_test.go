package agent_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/agenttest"
	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/testenv"
	"github.com/warrenhq/warren/proto/filesystem"
	"github.com/warrenhq/warren/proto/filesystem/filesystemconnect"
)

func fsCodecs(t *testing.T, f func(t *testing.T, a *agenttest.Agent, c filesystemconnect.FilesystemClient)) {
	for name, opts := range map[string][]connect.ClientOption{"json": {connect.WithProtoJSON()}, "proto": nil} {
		t.Run(name, func(t *testing.T) {
			a := agenttest.Start(t)
			f(t, a, filesystemconnect.NewFilesystemClient(agenttest.HTTP(t), a.URL, opts...))
		})
	}
}

func rpc[T any](msg *T) *connect.Request[T] { return connect.NewRequest(msg) }

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestStat(t *testing.T) {
	fsCodecs(t, func(t *testing.T, a *agenttest.Agent, c filesystemconnect.FilesystemClient) {
		file := filepath.Join(a.Home, "f.txt")
		write(t, file, "four")
		os.Symlink("f.txt", filepath.Join(a.Home, "link"))
		os.Symlink("nowhere", filepath.Join(a.Home, "broken"))
		unix.Mkfifo(filepath.Join(a.Home, "fifo"), 0o600)
		bad := filepath.Join(a.Home, "bad-\xff")
		write(t, bad, "")
		stat := func(path string) *filesystem.EntryInfo {
			t.Helper()
			r, err := c.Stat(t.Context(), rpc(&filesystem.StatRequest{Path: path}))
			if err != nil {
				t.Fatal(err)
			}
			return r.Msg.GetEntry()
		}
		e := stat(file)
		if e.Name != "f.txt" || e.Path != file || e.Type != filesystem.FileType_FILE_TYPE_FILE || e.Size != 4 || e.Mode != 0o644 || e.Permissions != "-rw-r--r--" || e.Owner != "root" || e.Group != "root" || e.SymlinkTarget != nil || time.Since(e.ModifiedTime.AsTime()) > time.Minute {
			t.Errorf("file: %v", e)
		}
		if e = stat(a.Home); e.Type != filesystem.FileType_FILE_TYPE_DIRECTORY || e.Permissions != "drwxr-xr-x" {
			t.Errorf("directory: %v", e)
		}
		if e = stat(filepath.Join(a.Home, "link")); e.Type != filesystem.FileType_FILE_TYPE_FILE || e.GetSymlinkTarget() != file || e.Name != "link" {
			t.Errorf("link: %v", e)
		}
		if e = stat(filepath.Join(a.Home, "broken")); e.Type != filesystem.FileType_FILE_TYPE_SYMLINK || e.GetSymlinkTarget() != "nowhere" {
			t.Errorf("broken link: %v", e)
		}
		if e = stat(filepath.Join(a.Home, "fifo")); e.Type != filesystem.FileType_FILE_TYPE_UNSPECIFIED {
			t.Errorf("pipe: %v", e)
		}
		r, err := c.ListDir(t.Context(), rpc(&filesystem.ListDirRequest{Path: a.Home}))
		if err != nil {
			t.Fatal(err) // a name that is not UTF-8 must not break the whole
		}
		if !slices.ContainsFunc(r.Msg.GetEntries(), func(e *filesystem.EntryInfo) bool { return e.Name == "bad-\uFFFD" }) {
			t.Errorf("list: %v", r.Msg)
		}
		for path, code := range map[string]connect.Code{"/no/such": connect.CodeNotFound, file + "/x": connect.CodeInvalidArgument, "~x": connect.CodeInvalidArgument} {
			if _, err := c.Stat(t.Context(), rpc(&filesystem.StatRequest{Path: path})); connect.CodeOf(err) != code {
				t.Errorf("%s: %v", path, err)
			}
		}
		req := rpc(&filesystem.StatRequest{Path: "/"})
		req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("ghost:")))
		if _, err := c.Stat(t.Context(), req); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("unknown user: %v", err)
		}
	})
}

func TestListDir(t *testing.T) {
	fsCodecs(t, func(t *testing.T, a *agenttest.Agent, c filesystemconnect.FilesystemClient) {
		root := filepath.Join(a.Home, "d")
		for _, f := range []string{"file1", "sub1/a", "sub1/deep/b", "sub2/c"} {
			write(t, filepath.Join(root, f), "")
		}
		os.Symlink("d", filepath.Join(a.Home, "l"))
		for _, tt := range []struct {
			path  string
			depth uint32
			want  string
		}{
			{root, 0, "file1 sub1 sub2"},
			{root, 1, "file1 sub1 sub2"},
			{root, 2, "file1 sub1 sub1/a sub1/deep sub2 sub2/c"},
			{root, 9, "file1 sub1 sub1/a sub1/deep sub1/deep/b sub2 sub2/c"},
			{filepath.Join(a.Home, "l"), 1, "file1 sub1 sub2"},
		} {
			r, err := c.ListDir(t.Context(), rpc(&filesystem.ListDirRequest{Path: tt.path, Depth: tt.depth}))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range r.Msg.GetEntries() {
				got = append(got, strings.TrimPrefix(e.Path, tt.path+"/"))
			}
			if strings.Join(got, " ") != tt.want {
				t.Errorf("depth %d: %q", tt.depth, got)
			}
		}
		for path, code := range map[string]connect.Code{root + "/file1": connect.CodeInvalidArgument, root + "/none": connect.CodeNotFound} {
			if _, err := c.ListDir(t.Context(), rpc(&filesystem.ListDirRequest{Path: path})); connect.CodeOf(err) != code {
				t.Errorf("%s: %v", path, err)
			}
		}
	})
}

func TestMakeDirMoveRemove(t *testing.T) {
	fsCodecs(t, func(t *testing.T, a *agenttest.Agent, c filesystemconnect.FilesystemClient) {
		dir := filepath.Join(a.Home, "x/y/z")
		r, err := c.MakeDir(t.Context(), rpc(&filesystem.MakeDirRequest{Path: dir}))
		if err != nil || r.Msg.GetEntry().GetPath() != dir || r.Msg.GetEntry().GetType() != filesystem.FileType_FILE_TYPE_DIRECTORY {
			t.Fatalf("%v, %v", r, err)
		}
		if os.Getuid() == 0 && r.Msg.GetEntry().GetOwner() != agenttest.UserName {
			t.Errorf("owner %q", r.Msg.GetEntry().GetOwner())
		}
		if _, err := c.MakeDir(t.Context(), rpc(&filesystem.MakeDirRequest{Path: dir})); connect.CodeOf(err) != connect.CodeAlreadyExists {
			t.Errorf("again: %v", err)
		}
		file := filepath.Join(dir, "f")
		write(t, file, "1")
		for _, p := range []string{file, file + "/sub"} {
			if _, err := c.MakeDir(t.Context(), rpc(&filesystem.MakeDirRequest{Path: p})); connect.CodeOf(err) != connect.CodeInvalidArgument {
				t.Errorf("%s: %v", p, err)
			}
		}
		move := func(src, dst string) (*filesystem.EntryInfo, error) {
			r, err := c.Move(t.Context(), rpc(&filesystem.MoveRequest{Source: src, Destination: dst}))
			if err != nil {
				return nil, err
			}
			return r.Msg.GetEntry(), nil
		}
		dst := filepath.Join(a.Home, "new/parent/g")
		if e, err := move(file, dst); err != nil || e.GetPath() != dst || e.GetName() != "g" {
			t.Errorf("%v, %v", e, err)
		}
		if _, err := move(file, dst); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("a source that is gone: %v", err)
		}
		if _, err := move(filepath.Join(a.Home, "x"), filepath.Join(a.Home, "x/y/inside")); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("into itself: %v", err)
		}
		if _, err := move("", dst); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("no source: %v", err)
		}
		for _, p := range []string{filepath.Join(a.Home, "new"), filepath.Join(a.Home, "new")} {
			if _, err := c.Remove(t.Context(), rpc(&filesystem.RemoveRequest{Path: p})); err != nil {
				t.Errorf("remove: %v", err)
			}
		}
		if _, err := os.Lstat(dst); err == nil {
			t.Error("still there")
		}
		for _, p := range []string{"/", "", "../../../../../../../../"} {
			if _, err := c.Remove(t.Context(), rpc(&filesystem.RemoveRequest{Path: p})); connect.CodeOf(err) != connect.CodeInvalidArgument {
				t.Errorf("remove %q: %v", p, err)
			}
		}
	})
}

// A move to another filesystem keeps what the tree is.
func TestMoveAcrossFilesystems(t *testing.T) {
	testenv.Root(t)
	a := agenttest.Start(t)
	c := filesystemconnect.NewFilesystemClient(agenttest.HTTP(t), a.URL)
	other, err := os.MkdirTemp("/dev/shm", "warren-agent-test-")
	if err != nil {
		t.Skip("needs a writable /dev/shm as a second filesystem:", err)
	}
	defer os.RemoveAll(other)
	src, dst := filepath.Join(a.Home, "tree"), filepath.Join(other, "moved")
	write(t, filepath.Join(src, "d/f"), "content")
	unix.Chmod(filepath.Join(src, "d/f"), 0o4751)
	os.Chown(filepath.Join(src, "d"), 1234, 5678)
	os.Symlink("d/f", filepath.Join(src, "l"))
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	os.Chtimes(filepath.Join(src, "d"), old, old)
	if _, err := c.Move(t.Context(), rpc(&filesystem.MoveRequest{Source: src, Destination: dst})); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(src); err == nil {
		t.Error("the source is still there")
	}
	st, err := os.Stat(filepath.Join(dst, "d"))
	if err != nil || !st.ModTime().Equal(old) {
		t.Errorf("%v, %v", st, err)
	}
	var sys unix.Stat_t
	unix.Stat(filepath.Join(dst, "d"), &sys)
	if sys.Uid != 1234 || sys.Gid != 5678 {
		t.Errorf("owner %d:%d", sys.Uid, sys.Gid)
	}
	unix.Stat(filepath.Join(dst, "d/f"), &sys)
	if sys.Mode&0o7777 != 0o4751 {
		t.Errorf("mode %o", sys.Mode)
	}
	if data, _ := os.ReadFile(filepath.Join(dst, "l")); string(data) != "content" {
		t.Errorf("through the link: %q", data)
	}
	if left, _ := os.ReadDir(other); len(left) != 1 {
		t.Errorf("left over: %v", left)
	}
}

// watching collects a stream's events until stopped.
type watching struct {
	events chan *filesystem.FilesystemEvent
	err    chan error
	stop   context.CancelFunc
}

func watch(t *testing.T, c filesystemconnect.FilesystemClient, req *filesystem.WatchDirRequest) *watching {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s, err := c.WatchDir(ctx, rpc(req))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Receive() || s.Msg().GetStart() == nil {
		t.Fatalf("no start: %v", s.Err())
	}
	w := &watching{events: make(chan *filesystem.FilesystemEvent, 100000), err: make(chan error, 1), stop: cancel}
	go func() {
		defer s.Close()
		for s.Receive() {
			if e := s.Msg().GetFilesystem(); e != nil {
				w.events <- e
			}
		}
		w.err <- s.Err()
	}()
	t.Cleanup(func() {
		cancel()
	})
	return w
}

// expect waits for an event, passing over others, and fails on any of never.
func (w *watching) expect(t *testing.T, name string, kind filesystem.EventType, never ...string) *filesystem.FilesystemEvent {
	t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case e := <-w.events:
			for _, n := range never {
				if strings.Contains(e.Name, n) {
					t.Errorf("event for %s", e.Name)
				}
			}
			if e.Name == name && e.Type == kind {
				return e
			}
		case <-timeout:
			t.Fatalf("no %v of %q", kind, name)
		}
	}
}

const (
	evCreate = filesystem.EventType_EVENT_TYPE_CREATE
	evWrite  = filesystem.EventType_EVENT_TYPE_WRITE
	evRemove = filesystem.EventType_EVENT_TYPE_REMOVE
	evRename = filesystem.EventType_EVENT_TYPE_RENAME
	evChmod  = filesystem.EventType_EVENT_TYPE_CHMOD
)

func TestWatchDir(t *testing.T) {
	fsCodecs(t, func(t *testing.T, a *agenttest.Agent, c filesystemconnect.FilesystemClient) {
		root := filepath.Join(a.Home, "w")
		write(t, filepath.Join(root, "old/keep"), "")
		flat := watch(t, c, &filesystem.WatchDirRequest{Path: root, IncludeEntry: true})
		deep := watch(t, c, &filesystem.WatchDirRequest{Path: root, Recursive: true})
		p := func(s string) string { return filepath.Join(root, s) }

		write(t, p("f"), "x")
		for _, w := range []*watching{flat, deep} {
			w.expect(t, "f", evCreate)
			e := w.expect(t, "f", evWrite)
			if (e.Entry != nil) != (w == flat) {
				t.Errorf("entry %v", e.Entry)
			}
			if w == flat && (e.Entry.GetPath() != p("f") || e.Entry.GetType() != filesystem.FileType_FILE_TYPE_FILE) {
				t.Errorf("entry %v", e.Entry)
			}
		}
		os.Chmod(p("f"), 0o600)
		flat.expect(t, "f", evChmod)
		os.Rename(p("f"), p("g"))
		flat.expect(t, "f", evRename)
		flat.expect(t, "g", evCreate)
		os.Remove(p("g"))
		if e := flat.expect(t, "g", evRemove); e.Entry != nil {
			t.Errorf("entry of a removed file: %v", e.Entry)
		}
		// Under directories: old, new, moved in and moved away ones.
		write(t, p("old/n"), "x")
		deep.expect(t, "old/n", evWrite)
		write(t, p("new/sub/n"), "x")
		deep.expect(t, "new/sub/n", evWrite)
		write(t, p("new/sub/m"), "x")
		deep.expect(t, "new/sub/m", evWrite)
		os.Rename(p("new"), p("moved"))
		deep.expect(t, "moved", evCreate)
		wait(t, func() bool { // until the watch has followed
			write(t, p("moved/sub/o"), "x")
			select {
			case e := <-deep.events:
				return e.Name == "moved/sub/o"
			case <-time.After(20 * time.Millisecond):
				return false
			}
		})
		os.Rename(p("moved"), filepath.Join(a.Home, "away"))
		deep.expect(t, "moved", evRename)
		write(t, filepath.Join(a.Home, "away/sub/p"), "x")
		write(t, p("last"), "x")
		deep.expect(t, "last", evCreate, "sub/p")
		flat.expect(t, "last", evCreate, "sub")
		// The directory itself goes.
		os.RemoveAll(root)
		flat.expect(t, ".", evRemove)

		flat.stop()
		if err := <-flat.err; connect.CodeOf(err) != connect.CodeCanceled {
			t.Errorf("end %v", err)
		}
		for path, code := range map[string]connect.Code{"/no/such": connect.CodeNotFound, "/etc/passwd": connect.CodeInvalidArgument} {
			s, err := c.WatchDir(t.Context(), rpc(&filesystem.WatchDirRequest{Path: path}))
			if err == nil {
				s.Receive()
				err = s.Err()
				s.Close()
			}
			if connect.CodeOf(err) != code {
				t.Errorf("%s: %v", path, err)
			}
		}
	})
}

// An upload is told as a write in place would be, and its temporary file not
// at all.
func TestWatchSeesUploadsAsWrites(t *testing.T) {
	a := agenttest.Start(t)
	c := filesystemconnect.NewFilesystemClient(agenttest.HTTP(t), a.URL)
	w := watch(t, c, &filesystem.WatchDirRequest{Path: a.Home, Recursive: true})
	client := a.Client(t, "")
	for _, kind := range []filesystem.EventType{evCreate, evWrite} {
		if err := client.WriteFile(t.Context(), filepath.Join(a.Home, "up"), "", strings.NewReader("x"), 0); err != nil {
			t.Fatal(err)
		}
		w.expect(t, "up", kind, ".warren")
		if kind == evCreate {
			w.expect(t, "up", evChmod, ".warren")
			w.expect(t, "up", evWrite, ".warren")
		}
	}
}

func TestPolledWatcher(t *testing.T) {
	fsCodecs(t, func(t *testing.T, a *agenttest.Agent, c filesystemconnect.FilesystemClient) {
		r, err := c.CreateWatcher(t.Context(), rpc(&filesystem.CreateWatcherRequest{Path: a.Home, Recursive: true, IncludeEntry: true}))
		if err != nil {
			t.Fatal(err)
		}
		id := r.Msg.GetWatcherId()
		take := func() ([]*filesystem.FilesystemEvent, error) {
			r, err := c.GetWatcherEvents(t.Context(), rpc(&filesystem.GetWatcherEventsRequest{WatcherId: id}))
			if err != nil {
				return nil, err
			}
			return r.Msg.GetEvents(), nil
		}
		if events, err := take(); err != nil || len(events) != 0 {
			t.Errorf("at first: %v, %v", events, err)
		}
		// What happened before the call is told by it.
		for i := range 50 {
			name := fmt.Sprintf("sub%d/f", i)
			write(t, filepath.Join(a.Home, name), "x")
			events, err := take()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(events, func(e *filesystem.FilesystemEvent) bool {
				return e.Name == name && e.Type == evWrite && e.Entry.GetName() == "f"
			}) {
				t.Fatalf("round %d: %v", i, events)
			}
		}
		// More than the watcher holds: it tells so, once, and goes on.
		for i := range 10000 {
			write(t, filepath.Join(a.Home, fmt.Sprintf("many%d", i)), "")
		}
		lost := 0
		wait(t, func() bool {
			_, err := take()
			if connect.CodeOf(err) == connect.CodeResourceExhausted {
				lost++
			} else if err != nil {
				t.Fatal(err)
			}
			return lost > 0
		})
		write(t, filepath.Join(a.Home, "after"), "x")
		wait(t, func() bool {
			events, _ := take()
			return slices.ContainsFunc(events, func(e *filesystem.FilesystemEvent) bool { return e.Name == "after" })
		})
		if _, err := c.RemoveWatcher(t.Context(), rpc(&filesystem.RemoveWatcherRequest{WatcherId: id})); err != nil {
			t.Error(err)
		}
		if _, err := take(); connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("after its end: %v", err)
		}
		s, err := a.Client(t, "").Stats(t.Context())
		if err != nil || s.Watchers != 0 {
			t.Errorf("stats %+v, %v", s, err)
		}
	})
}

func TestStats(t *testing.T) {
	a := agenttest.Start(t)
	client := a.Client(t, "")
	var s control.Stats
	s, err := client.Stats(t.Context())
	if err != nil || s.PID != os.Getpid() || s.RSSBytes == 0 || s.Version == "" {
		t.Errorf("%+v, %v", s, err)
	}
	m, err := client.Metrics(t.Context())
	if err != nil || m.CPUCount < 1 || m.MemTotal == 0 || m.MemUsed == 0 || m.DiskTotal == 0 || m.Timestamp == 0 {
		t.Errorf("%+v, %v", m, err)
	}
}
