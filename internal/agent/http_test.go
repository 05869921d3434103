package agent_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/agenttest"
	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/testenv"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// call sends one request and reads the whole answer.
func call(t *testing.T, c *http.Client, method, url string, body io.Reader, headers ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode >= 400 {
		var e control.Error
		if json.Unmarshal(data, &e) != nil || e.Code != resp.StatusCode || e.Message == "" {
			t.Errorf("%s %s: %d with body %q, not {code,message}", method, url, resp.StatusCode, data)
		}
	}
	return resp, string(data)
}

func filesURL(a *agenttest.Agent, params ...string) string {
	q := url.Values{}
	for i := 0; i+1 < len(params); i += 2 {
		q.Set(params[i], params[i+1])
	}
	return a.URL + "/files?" + q.Encode()
}

func TestDownload(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	content := strings.Repeat("0123456789", 1000)
	write(t, filepath.Join(a.Home, "f"), content)
	write(t, filepath.Join(a.Home, "empty"), "")
	write(t, filepath.Join(a.Home, "d/ä ö.txt"), "umlaut")
	unix.Mkfifo(filepath.Join(a.Home, "fifo"), 0o666)
	get := func(path string, headers ...string) (*http.Response, string) {
		return call(t, c, "GET", filesURL(a, "path", path), nil, headers...)
	}
	f := filepath.Join(a.Home, "f")
	if r, body := get(f); r.StatusCode != 200 || body != content || r.ContentLength != int64(len(content)) || r.Header.Get("Content-Encoding") != "" {
		t.Errorf("plain: %v", r)
	}
	if r, body := get(filepath.Join(a.Home, "empty")); r.StatusCode != 200 || body != "" || r.Header.Get("Content-Length") != "0" {
		t.Errorf("empty: %v", r)
	}
	if r, body := get(filepath.Join(a.Home, "d/ä ö.txt")); body != "umlaut" || r.Header.Get("Content-Disposition") == "" {
		t.Errorf("umlaut: %v", r)
	}
	if r, body := get(f, "Range", "bytes=5-14"); r.StatusCode != 206 || body != "5678901234" || r.Header.Get("Content-Range") != "bytes 5-14/10000" {
		t.Errorf("range: %v %q", r, body)
	}
	if r, body := get(f, "Range", "bytes=5-14", "Accept-Encoding", "gzip"); r.StatusCode != 206 || body != "5678901234" {
		t.Errorf("range with gzip: %v %q", r, body)
	}
	for _, accept := range []string{"gzip", "gzip, deflate", "deflate, gzip;q=1.0, *;q=0.5", "identity;q=0, *"} {
		r, body := get(f, "Accept-Encoding", accept)
		zr, err := gzip.NewReader(strings.NewReader(body))
		if err != nil || r.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("%q: %v, %v", accept, r, err)
			continue
		}
		if data, _ := io.ReadAll(zr); string(data) != content {
			t.Errorf("%q: %d bytes", accept, len(data))
		}
	}
	for _, accept := range []string{"identity", "br", "*", "gzip;q=0", "gzip;q=0.1, identity;q=0.5", "nonsense;q=x"} {
		if r, body := get(f, "Accept-Encoding", accept); r.StatusCode != 200 || body != content {
			t.Errorf("%q: %v", accept, r)
		}
	}
	for _, accept := range []string{"identity;q=0", "*;q=0", "br, identity;q=0"} {
		if r, _ := get(f, "Accept-Encoding", accept); r.StatusCode != 406 {
			t.Errorf("%q: %v", accept, r)
		}
	}
	if r, body := get("/proc/self/status"); r.StatusCode != 200 || !strings.Contains(body, "VmRSS") {
		t.Errorf("proc: %v", r)
	}
	if r, _ := call(t, c, "HEAD", filesURL(a, "path", f), nil); r.StatusCode != 200 || r.ContentLength != 10000 {
		t.Errorf("head: %v", r)
	}
	for path, status := range map[string]int{
		a.Home: 400, "": 400, "~x/y": 400, f + "/x": 400, filepath.Join(a.Home, "fifo"): 400,
		filepath.Join(a.Home, "none"): 404,
	} {
		if r, _ := get(path); r.StatusCode != status {
			t.Errorf("%q: %d, want %d", path, r.StatusCode, status)
		}
	}
	if r, body := call(t, c, "GET", filesURL(a, "path", f, "username", "ghost"), nil); r.StatusCode != 401 || !strings.Contains(body, "invalid username: 'ghost'") {
		t.Errorf("unknown user: %v %s", r, body)
	}
}

func TestUpload(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	post := func(path, kind, body string, headers ...string) (*http.Response, string) {
		t.Helper()
		return call(t, c, "POST", filesURL(a, "path", path), strings.NewReader(body), append([]string{"Content-Type", kind}, headers...)...)
	}
	const octets = "application/octet-stream"
	check := func(path, want string) os.FileInfo {
		t.Helper()
		data, err := os.ReadFile(path)
		if err != nil || string(data) != want {
			t.Errorf("%s: %.40q, %v", path, data, err)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	// A relative path is under the user's home; parents are made for it.
	r, body := post("new/dir/f.txt", octets, "hello")
	var entries []control.FileEntry
	if r.StatusCode != 200 || json.Unmarshal([]byte(body), &entries) != nil || len(entries) != 1 {
		t.Fatalf("%v %s", r, body)
	}
	home := a.Home
	if os.Getuid() != 0 {
		home = filepath.Join(filepath.Dir(a.Home), "root")
	}
	f := filepath.Join(home, "new/dir/f.txt")
	if e := entries[0]; e.Path != f || e.Name != "f.txt" || e.Type != "file" || e.Metadata != nil {
		t.Errorf("%+v", e)
	}
	if st := check(f, "hello"); st.Mode().Perm() != 0o644 {
		t.Errorf("mode %v", st.Mode())
	}
	if os.Getuid() == 0 {
		for _, p := range []string{f, filepath.Dir(f), filepath.Join(home, "new")} {
			var sys unix.Stat_t
			unix.Stat(p, &sys)
			if sys.Uid != agenttest.UserID || sys.Gid != agenttest.UserID {
				t.Errorf("%s belongs to %d:%d", p, sys.Uid, sys.Gid)
			}
		}
	}
	// A file that is there keeps its mode; an explicit one wins.
	os.Chmod(f, 0o600)
	post(f, octets, "again")
	if st := check(f, "again"); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	post(f, octets, "", control.ModeHeader, "755")
	if st := check(f, ""); st.Mode().Perm() != 0o755 {
		t.Errorf("mode %v", st.Mode())
	}
	// Through a link, also a dangling one.
	os.Symlink("target", filepath.Join(home, "link"))
	for _, s := range []string{"one", "two"} {
		post(filepath.Join(home, "link"), octets, s)
		check(filepath.Join(home, "target"), s)
	}
	if st, _ := os.Lstat(filepath.Join(home, "link")); st.Mode()&os.ModeSymlink == 0 {
		t.Error("the link was replaced")
	}
	// gzip.
	var z bytes.Buffer
	zw := gzip.NewWriter(&z)
	io.WriteString(zw, "unzipped")
	zw.Close()
	post(f, octets, z.String(), "Content-Encoding", "gzip")
	check(f, "unzipped")
	// Multipart, with names and without.
	var m bytes.Buffer
	mw := multipart.NewWriter(&m)
	for _, name := range []string{filepath.Join(home, "multi/a"), "multi/b"} {
		w, _ := mw.CreateFormFile("file", name)
		io.WriteString(w, "content of "+filepath.Base(name))
	}
	w, _ := mw.CreateFormField("other")
	io.WriteString(w, "ignored")
	mw.Close()
	r, body = call(t, c, "POST", filesURL(a), bytes.NewReader(m.Bytes()), "Content-Type", mw.FormDataContentType(), "X-Metadata-Author", "me")
	if json.Unmarshal([]byte(body), &entries) != nil || len(entries) != 2 {
		t.Fatalf("%v %s", r, body)
	}
	for i, n := range []string{"a", "b"} {
		check(filepath.Join(home, "multi", n), "content of "+n)
		if entries[i].Metadata != nil && entries[i].Metadata["author"] != "me" {
			t.Errorf("%+v", entries[i])
		}
	}
	r, _ = call(t, c, "POST", filesURL(a, "path", f), bytes.NewReader(m.Bytes()), "Content-Type", mw.FormDataContentType())
	if r.StatusCode != 400 { // two files at one path
		t.Errorf("%v", r)
	}
	// Metadata: replaced by each upload, where the filesystem keeps any.
	if unix.Setxattr(f, "user.e2b.old", []byte("x"), 0) == nil {
		_, body = post(f, octets, "m", "X-Metadata-Author", "me", "x-metadata-purpose", "test")
		json.Unmarshal([]byte(body), &entries)
		if m := entries[0].Metadata; len(m) != 2 || m["author"] != "me" || m["purpose"] != "test" {
			t.Errorf("metadata %v", m)
		}
		if _, body = post(f, octets, "m"); strings.Contains(body, "metadata") {
			t.Errorf("metadata was kept: %s", body)
		}
	}
	before := check(f, "m").ModTime()
	for name, do := range map[string]func() *http.Response{
		"bad metadata": func() *http.Response { r, _ := post(f, octets, "x", "X-Metadata-A", "b\tc\xff"); return r },
		"long metadata": func() *http.Response {
			r, _ := post(f, octets, "x", "X-Metadata-A", strings.Repeat("x", 4097))
			return r
		},
		"long key": func() *http.Response {
			r, _ := post(f, octets, "x", "X-Metadata-"+strings.Repeat("k", 247), "x")
			return r
		},
		"not gzip":         func() *http.Response { r, _ := post(f, octets, "x", "Content-Encoding", "gzip"); return r },
		"broken gzip":      func() *http.Response { r, _ := post(f, octets, z.String()[:15], "Content-Encoding", "gzip"); return r },
		"unknown encoding": func() *http.Response { r, _ := post(f, octets, "x", "Content-Encoding", "br"); return r },
		"bad mode":         func() *http.Response { r, _ := post(f, octets, "x", control.ModeHeader, "9"); return r },
		"no type":          func() *http.Response { r, _ := post(f, "", "x"); return r },
		"no path":          func() *http.Response { r, _ := post("", octets, "x"); return r },
		"no boundary":      func() *http.Response { r, _ := post(f, "multipart/form-data", "x"); return r },
		"broken multipart": func() *http.Response { r, _ := post(f, "multipart/form-data; boundary=b", "x"); return r },
		"cut multipart": func() *http.Response {
			r, _ := call(t, c, "POST", filesURL(a, "path", f), strings.NewReader(m.String()[:200]), "Content-Type", mw.FormDataContentType())
			return r
		},
		"a directory":   func() *http.Response { r, _ := post(home, octets, "x"); return r },
		"under a file":  func() *http.Response { r, _ := post(f+"/x", octets, "x"); return r },
		"name too long": func() *http.Response { r, _ := post(strings.Repeat("n", 300), octets, "x"); return r },
		"path too long": func() *http.Response { r, _ := post(strings.Repeat("n/", 3000), octets, "x"); return r },
	} {
		if r := do(); r.StatusCode != 400 {
			t.Errorf("%s: %v", name, r.Status)
		}
	}
	if st := check(f, "m"); !st.ModTime().Equal(before) {
		t.Error("a refused upload changed the file")
	}
	noLeftovers(t, home)
}

func noLeftovers(t *testing.T, dir string) {
	t.Helper()
	filepath.Walk(dir, func(path string, _ os.FileInfo, err error) error {
		if err == nil && strings.Contains(filepath.Base(path), ".warren") {
			t.Errorf("left over: %s", path)
		}
		return nil
	})
}

// A client that breaks off leaves what was there before.
func TestUploadBrokenOff(t *testing.T) {
	a := agenttest.Start(t)
	f := filepath.Join(a.Home, "f")
	write(t, f, "before")
	conn, err := net.Dial("tcp", a.Addr)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /files?path=%s HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\n%s", url.QueryEscape(f), strings.Repeat("x", 500000))
	time.Sleep(50 * time.Millisecond)
	conn.Close()
	wait(t, func() bool { es, _ := os.ReadDir(a.Home); return len(es) == 1 })
	if data, _ := os.ReadFile(f); string(data) != "before" {
		t.Errorf("%.20q", data)
	}
}

// A full disk is told, and leaves nothing behind.
func TestUploadDiskFull(t *testing.T) {
	testenv.Root(t)
	a := agenttest.Start(t)
	small := filepath.Join(a.Home, "small")
	os.Mkdir(small, 0o755)
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m"); err != nil {
		t.Skip("needs to mount a tmpfs:", err)
	}
	defer unix.Unmount(small, unix.MNT_DETACH)
	c := agenttest.HTTP(t)
	r, body := call(t, c, "POST", filesURL(a, "path", small+"/big"), bytes.NewReader(make([]byte, 4<<20)), "Content-Type", "application/octet-stream")
	if r.StatusCode != 507 || !strings.Contains(body, "not enough disk space") {
		t.Errorf("%v %s", r, body)
	}
	if es, _ := os.ReadDir(small); len(es) != 0 {
		t.Errorf("left over: %v", es)
	}
}

func TestCompose(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	p := func(s string) string { return filepath.Join(a.Home, s) }
	compose := func(dst string, src ...string) (*http.Response, string) {
		body, _ := json.Marshal(control.ComposeRequest{SourcePaths: src, Destination: dst})
		return call(t, c, "POST", a.URL+"/files/compose", bytes.NewReader(body), "Content-Type", "application/json")
	}
	write(t, p("1"), "one")
	write(t, p("2"), "two")
	for name, tt := range map[string]struct {
		dst    string
		src    []string
		status int
	}{
		"no sources":     {p("out"), nil, 400},
		"no destination": {"", []string{p("1")}, 400},
		"itself":         {p("1"), []string{p("1")}, 400},
		"missing":        {p("out"), []string{p("1"), p("none")}, 404},
		"directory":      {p("out"), []string{a.Home}, 400},
	} {
		if r, _ := compose(tt.dst, tt.src...); r.StatusCode != tt.status {
			t.Errorf("%s: %v", name, r.Status)
		}
	}
	r, body := compose(p("sub/out"), p("1"), p("2"), p("1"))
	var e control.FileEntry
	if r.StatusCode != 200 || json.Unmarshal([]byte(body), &e) != nil || e.Path != p("sub/out") || e.Name != "out" || e.Type != "file" {
		t.Fatalf("%v %s", r, body)
	}
	if data, _ := os.ReadFile(p("sub/out")); string(data) != "onetwoone" {
		t.Errorf("%q", data)
	}
	if _, err := os.Stat(p("1")); err == nil {
		t.Error("a source is still there")
	}
	if r, _ := call(t, c, "POST", a.URL+"/files/compose", strings.NewReader("{"), "Content-Type", "application/json"); r.StatusCode != 400 {
		t.Errorf("broken JSON: %v", r.Status)
	}
}

func TestTokenAndInit(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	f := filepath.Join(a.Home, "f")
	write(t, f, "x")
	os.Symlink("/run/nowhere/stub-resolv.conf", filepath.Join(a.Etc, "resolv.conf"))
	init := func(body, token string) int {
		r, _ := call(t, c, "POST", a.URL+"/init", strings.NewReader(body), control.TokenHeader, token)
		return r.StatusCode
	}
	if got := init("", ""); got != 204 {
		t.Errorf("empty init: %d", got)
	}
	for _, bad := range []string{"{", `{"hostname":"a b"}`, `{"hostname":"a\nb"}`, `{"envVars":{"A=B":"c"}}`, `{"accessToken":"a\nb"}`, `{"nameservers":["x"]}`, `{"hosts":[{"address":"1.2.3.4"}]}`, `[]`} {
		if got := init(bad, ""); got != 400 {
			t.Errorf("%s: %d", bad, got)
		}
	}
	now := time.Now()
	good, _ := json.Marshal(control.InitRequest{
		AccessToken: "tok", SandboxID: "sbx1", TemplateID: "base", Hostname: "box.example", Timestamp: now.Add(time.Hour),
		EnvVars: map[string]string{"A": "b"}, Nameservers: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Address: netip.MustParseAddr("10.0.0.2"),
		Hosts: []control.HostEntry{{Address: netip.MustParseAddr("10.0.0.3"), Names: []string{"peer"}}},
	})
	if got := init(string(good), ""); got != 204 {
		t.Fatalf("init: %d", got)
	}
	etc := func(name string) string {
		data, err := os.ReadFile(filepath.Join(a.Etc, name))
		if err != nil {
			t.Error(err)
		}
		return string(data)
	}
	if etc("hostname") != "box.example\n" || etc("resolv.conf") != "nameserver 10.0.0.1\n" ||
		!strings.Contains(etc("hosts"), "10.0.0.2\tbox.example box\n10.0.0.3\tpeer\n") || !strings.Contains(etc("hosts"), "127.0.0.1\tlocalhost\n") {
		t.Errorf("%q %q %q", etc("hostname"), etc("resolv.conf"), etc("hosts"))
	}
	id := etc("machine-id")
	if len(id) != 33 {
		t.Errorf("machine-id %q", id)
	}
	if len(*a.Hostnames) != 1 || (*a.Hostnames)[0] != "box.example" || len(*a.Clocks) != 1 {
		t.Errorf("%v %v", a.Hostnames, a.Clocks)
	}
	noLeftovers(t, a.Etc)
	// From now on the token is needed.
	for _, tt := range []struct {
		method, path string
		open         bool
	}{
		{"GET", "/health", true}, {"GET", "/envs", false}, {"GET", "/metrics", false}, {"GET", "/stats", false},
		{"GET", "/files?path=" + f, false}, {"POST", "/files?path=" + f, false}, {"POST", "/init", false}, {"POST", "/files/compose", false},
		{"GET", "/tar?path=/", false}, {"PUT", "/tar?path=/", false}, {"GET", "/tunnel?port=1", false}, {"GET", "/none", false},
		{"POST", processconnect.ProcessListProcedure, false}, {"POST", "/filesystem.Filesystem/Stat", false}, {"DELETE", "/files", false},
	} {
		for _, token := range []string{"", "wrong"} {
			r, _ := call(t, c, tt.method, a.URL+tt.path, nil, control.TokenHeader, token)
			if (r.StatusCode == 401) == tt.open {
				t.Errorf("%s %s with token %q: %v", tt.method, tt.path, token, r.Status)
			}
		}
	}
	if r, _ := call(t, c, "GET", a.URL+"/files?path="+f+"&signature="+url.QueryEscape(control.SignedFile{Path: f, Operation: "read"}.Signature("tok")), nil); r.StatusCode != 200 {
		t.Errorf("signed: %v", r.Status)
	}
	sig := url.QueryEscape(control.SignedFile{Path: f, Operation: "write"}.Signature("tok"))
	if r, _ := call(t, c, "POST", a.URL+"/files?path="+f+"&signature="+sig, strings.NewReader("y"), "Content-Type", "application/octet-stream"); r.StatusCode != 200 {
		t.Errorf("signed upload: %v", r.Status)
	}
	r, body := call(t, c, "GET", a.URL+"/envs", nil, control.TokenHeader, "tok")
	var env map[string]string
	if json.Unmarshal([]byte(body), &env); r.StatusCode != 200 || env["A"] != "b" || env["E2B_SANDBOX"] != "true" || env["E2B_SANDBOX_ID"] != "sbx1" {
		t.Errorf("envs %v %s", r.Status, body)
	}
	// Later inits: with the token, not older, and the same sandbox keeps its id.
	if got := init(`{"accessToken":"stolen"}`, ""); got != 401 {
		t.Errorf("a second first init: %d", got)
	}
	if got := init(`{"sandboxID":"sbx1","timestamp":"2001-01-01T00:00:00Z","accessToken":"old"}`, "tok"); got != 204 {
		t.Errorf("an old init: %d", got)
	}
	if got := init(`{"sandboxID":"sbx1","accessToken":"tok2"}`, "tok"); got != 204 || etc("machine-id") != id {
		t.Errorf("the same sandbox: %d, %q", got, etc("machine-id"))
	}
	if got := init(`{"sandboxID":"sbx2"}`, "tok2"); got != 204 || etc("machine-id") == id {
		t.Errorf("another sandbox: %d", got)
	}
}

func TestCORS(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	r, _ := call(t, c, "OPTIONS", a.URL+"/files", nil, "Origin", "https://x.example", "Access-Control-Request-Method", "POST")
	if r.StatusCode != 204 || r.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("%v", r)
	}
}

type tarEntry struct {
	hdr  tar.Header
	body string
}

func makeTar(t *testing.T, entries ...tarEntry) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, e := range entries {
		e.hdr.Size = int64(len(e.body))
		if e.hdr.Mode == 0 {
			e.hdr.Mode = 0o644
		}
		if err := tw.WriteHeader(&e.hdr); err != nil {
			t.Fatal(err)
		}
		io.WriteString(tw, e.body)
	}
	tw.Close()
	return b.Bytes()
}

func reg(name, body string) tarEntry {
	return tarEntry{tar.Header{Typeflag: tar.TypeReg, Name: name}, body}
}
func link(kind byte, name, target string) tarEntry {
	return tarEntry{tar.Header{Typeflag: kind, Name: name, Linkname: target}, ""}
}

func TestTarRoundTrip(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	src := filepath.Join(a.Home, "src")
	write(t, filepath.Join(src, "d/f"), strings.Repeat("x", 300000))
	write(t, filepath.Join(src, "run.sh"), "#!/bin/sh\n")
	os.Chmod(filepath.Join(src, "run.sh"), 0o751)
	os.Symlink("d/f", filepath.Join(src, "l"))
	os.Link(filepath.Join(src, "d/f"), filepath.Join(src, "z"))
	os.Mkdir(filepath.Join(src, "empty"), 0o700)
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	os.Chtimes(filepath.Join(src, "d"), old, old)
	r, archive := call(t, c, "GET", a.URL+"/tar?path="+url.QueryEscape(src), nil)
	if r.StatusCode != 200 {
		t.Fatal(r.Status)
	}
	dst := filepath.Join(a.Home, "dst/deep")
	if r, body := call(t, c, "PUT", a.URL+"/tar?path="+url.QueryEscape(dst), strings.NewReader(archive)); r.StatusCode != 204 {
		t.Fatal(r.Status, body)
	}
	p := func(s string) string { return filepath.Join(dst, "src", s) }
	for _, n := range []string{"d/f", "l", "z"} {
		if data, err := os.ReadFile(p(n)); err != nil || len(data) != 300000 {
			t.Errorf("%s: %d bytes, %v", n, len(data), err)
		}
	}
	if st, err := os.Stat(p("run.sh")); err != nil || st.Mode().Perm() != 0o751 {
		t.Errorf("%v %v", st, err)
	}
	if st, err := os.Stat(p("empty")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", st, err)
	}
	if st, err := os.Stat(p("d")); err != nil || !st.ModTime().Equal(old) {
		t.Errorf("%v %v", st, err)
	}
	var f, z unix.Stat_t
	unix.Stat(p("d/f"), &f)
	unix.Stat(p("z"), &z)
	if f.Ino != z.Ino {
		t.Error("the hard link became two files")
	}
	if os.Getuid() == 0 && (f.Uid != agenttest.UserID || f.Gid != agenttest.UserID) {
		t.Errorf("owner %d:%d", f.Uid, f.Gid)
	}
	// A single file.
	_, archive = call(t, c, "GET", a.URL+"/tar?path="+url.QueryEscape(filepath.Join(src, "run.sh")), nil)
	hdr, err := tar.NewReader(strings.NewReader(archive)).Next()
	if err != nil || hdr.Name != "run.sh" {
		t.Errorf("%v %v", hdr, err)
	}
	for path, status := range map[string]int{"/no/such": 404, "": 400, "/dev/null": 400} {
		if r, _ := call(t, c, "GET", a.URL+"/tar?path="+url.QueryEscape(path), nil); r.StatusCode != status {
			t.Errorf("%q: %v", path, r.Status)
		}
	}
}

func TestHostileTar(t *testing.T) {
	a := agenttest.Start(t)
	c := agenttest.HTTP(t)
	outside := filepath.Join(a.Home, "outside")
	secret := filepath.Join(outside, "secret")
	write(t, secret, "secret")
	dst := filepath.Join(a.Home, "dst")
	put := func(archive []byte, params string) *http.Response {
		t.Helper()
		os.RemoveAll(dst)
		os.MkdirAll(dst, 0o755)
		os.Symlink(outside, filepath.Join(dst, "old-link"))
		r, _ := call(t, c, "PUT", a.URL+"/tar?path="+url.QueryEscape(dst)+params, bytes.NewReader(archive))
		return r
	}
	for name, archive := range map[string][]byte{
		"dot dot":                makeTar(t, reg("../evil", "x")),
		"dot dot inside":         makeTar(t, reg("a/../../evil", "x")),
		"through its own link":   makeTar(t, link(tar.TypeSymlink, "l", "../outside"), reg("l/evil", "x")),
		"through absolute link":  makeTar(t, link(tar.TypeSymlink, "l", outside), reg("l/evil", "x")),
		"through two links":      makeTar(t, link(tar.TypeSymlink, "a", "b/.."), link(tar.TypeSymlink, "b", ".."), reg("b/outside/evil", "x")),
		"through an old link":    makeTar(t, reg("old-link/evil", "x")),
		"directory through link": makeTar(t, tarEntry{tar.Header{Typeflag: tar.TypeDir, Name: "old-link/evil/", Mode: 0o755}, ""}),
		"link under old link":    makeTar(t, link(tar.TypeSymlink, "old-link/evil", "x")),
		"hard link out":          makeTar(t, link(tar.TypeLink, "h", "../outside/secret"), reg("h", "overwritten")),
		"hard link through link": makeTar(t, link(tar.TypeLink, "h", "old-link/secret")),
		"hard link to a link":    makeTar(t, link(tar.TypeSymlink, "s", secret), link(tar.TypeLink, "h", "s")),
		"hard link to itself":    makeTar(t, reg("h", "x"), link(tar.TypeLink, "h", "h")),
		"device":                 makeTar(t, tarEntry{tar.Header{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1, Devminor: 3}, ""}),
		"pipe":                   makeTar(t, tarEntry{tar.Header{Typeflag: tar.TypeFifo, Name: "fifo"}, ""}),
		"the directory itself":   makeTar(t, reg(".", "x")),
		"file for directory":     makeTar(t, reg("d/f", "x"), reg("d", "x")),
		"under a file":           makeTar(t, reg("f", "x"), reg("f/g", "x")),
		"cut":                    makeTar(t, reg("f", strings.Repeat("x", 5000)))[:2000],
		"no tar":                 []byte(strings.Repeat("no tar at all ", 100)),
	} {
		if r := put(archive, ""); r.StatusCode != 400 {
			t.Errorf("%s: %v", name, r.Status)
		}
		if es, _ := os.ReadDir(outside); len(es) != 1 {
			t.Errorf("%s: outside has %v", name, es)
			os.RemoveAll(filepath.Join(outside, "evil"))
		}
		if data, _ := os.ReadFile(secret); string(data) != "secret" {
			t.Fatalf("%s: the secret is %q", name, data)
		}
		if es, _ := os.ReadDir(a.Home); len(es) != 2 {
			t.Errorf("%s: home has %v", name, es)
		}
	}
	// A file or link in the way of a file is replaced, not written through.
	if r := put(makeTar(t, reg("old-link", "x"), reg("/abs/f", "y"), reg("./dot", "z")), ""); r.StatusCode != 204 {
		t.Errorf("%v", r.Status)
	}
	if data, _ := os.ReadFile(filepath.Join(dst, "abs/f")); string(data) != "y" {
		t.Errorf("%q", data)
	}
	if r := put(makeTar(t, tarEntry{tar.Header{Typeflag: tar.TypeReg, Name: "suid", Mode: 0o6755}, "x"}), ""); r.StatusCode != 204 {
		t.Errorf("%v", r.Status)
	}
	if st, err := os.Stat(filepath.Join(dst, "suid")); err != nil || st.Mode() != 0o755 {
		t.Errorf("%v %v", st, err)
	}
	// Limits.
	many := make([]tarEntry, 50)
	for i := range many {
		many[i] = reg("f"+strconv.Itoa(i), strings.Repeat("x", 100))
	}
	for params, status := range map[string]int{"&max_entries=49": 413, "&max_entries=50": 204, "&max_bytes=4999": 413, "&max_bytes=5000": 204, "&max_bytes=x": 400, "&max_entries=-1": 400} {
		if r := put(makeTar(t, many...), params); r.StatusCode != status {
			t.Errorf("%s: %v", params, r.Status)
		}
	}
}
