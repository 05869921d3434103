package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"

	"github.com/warrenhq/warren/bench/internal/report"
)

const (
	proxiedBytes   = 2 << 30
	proxiedSamples = 3
)

func proxied(ctx context.Context, l *lab, r *report.Report) error {
	base, err := l.tcp()
	if err != nil {
		return err
	}
	key, err := l.CreateKey(ctx, "bench")
	if err != nil {
		return err
	}
	defer l.RemoveKey(context.WithoutCancel(ctx), key.ID)
	for _, rt := range l.runtimes {
		if err := proxiedIn(ctx, l, r, rt, base, key.Key); err != nil {
			return fmt.Errorf("%s: %w", rt, err)
		}
	}
	r.Note("by TCP, the sandbox named by headers, with the agent's token: POST and GET /files, one request each way")
	r.Note("the sandboxes have 6144 MiB, so that the file fits their page cache")
	return nil
}

// listening is what the daemon tells of its TCP address.
var listening = regexp.MustCompile(`serves on .* and (http://\S+)`)

// tcp gives the URL of the daemon's TCP address.
func (l *lab) tcp() (string, error) {
	data, err := os.ReadFile(l.log.Name())
	if err != nil {
		return "", err
	}
	m := listening.FindSubmatch(data)
	if m == nil {
		return "", errors.New("the daemon does not tell of its TCP address: see " + l.log.Name())
	}
	return string(m[1]), nil
}

func proxiedIn(ctx context.Context, l *lab, r *report.Report, rt, base, key string) (err error) {
	s, err := l.create(ctx, rt, 6144)
	if err != nil {
		return err
	}
	defer func() {
		if e := l.Kill(context.WithoutCancel(ctx), s.ID); err == nil {
			err = e
		}
	}()
	tr := &http.Transport{DisableCompression: true, ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10}
	defer tr.CloseIdleConnections()
	// call gives the body of an answer of 200.
	call := func(method, path string, h http.Header, body io.Reader, size int64) (io.ReadCloser, int64, error) {
		req, err := http.NewRequestWithContext(ctx, method, base+path, body)
		if err != nil {
			return nil, 0, err
		}
		req.Header, req.ContentLength = h, size
		res, err := (&http.Client{Transport: tr}).Do(req)
		if err != nil {
			return nil, 0, err
		}
		if res.StatusCode != http.StatusOK {
			defer res.Body.Close()
			text, _ := io.ReadAll(io.LimitReader(res.Body, 1000))
			return nil, 0, fmt.Errorf("%s %s: %s %s", method, path, res.Status, text)
		}
		return res.Body, res.ContentLength, nil
	}
	info, _, err := call("GET", "/sandboxes/"+s.ID, http.Header{"X-Api-Key": {key}}, nil, 0)
	if err != nil {
		return err
	}
	var told struct {
		Token string `json:"envdAccessToken"`
	}
	err = json.NewDecoder(info).Decode(&told)
	info.Close()
	if err != nil {
		return err
	}
	h := http.Header{
		"E2b-Sandbox-Id": {s.ID}, "E2b-Sandbox-Port": {"49983"}, "X-Access-Token": {told.Token},
		"Content-Type": {"application/octet-stream"},
	}
	path := "/files?" + url.Values{"path": {transferPath}, "username": {"root"}}.Encode()

	_, _, err = l.measureTransfers(ctx, r, rt, s.ID, proxiedSamples, proxiedBytes,
		func() error {
			b, _, err := call("POST", path, h, io.LimitReader(pattern{}, proxiedBytes), proxiedBytes)
			if err == nil {
				_, err = io.Copy(io.Discard, b)
				b.Close()
			}
			return err
		},
		func() error {
			b, size, err := call("GET", path, h, nil, 0)
			if err != nil {
				return err
			}
			defer b.Close()
			n, err := io.Copy(io.Discard, b)
			if err == nil && (n != proxiedBytes || size != proxiedBytes) {
				err = fmt.Errorf("got %d bytes of %d, want %d", n, size, int64(proxiedBytes))
			}
			return err
		})
	return err
}
