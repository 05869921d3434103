package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/warrenhq/warren/bench/internal/report"
)

// stockRunsc is gVisor's main package built from its module with nothing
// changed, beside the other programs (make bench builds it).
const stockRunsc = "runsc-stock"

// rival is a bare sandbox to measure beside, by what its runsc is.
type rival struct {
	*bareSource
	called string
}

// newRivals makes a bare source for each runsc that there is. Those that were
// made are to be closed, also on error.
func newRivals(ctx context.Context, l *lab, r *report.Report, mib int) (all []rival, err error) {
	stock := filepath.Join(l.bin, stockRunsc)
	if _, err := os.Stat(stock); err != nil {
		r.Note("%s is not beside the other programs, so nothing is measured beside gVisor's own build: run make bench", stockRunsc)
		stock = ""
	}
	for _, build := range []struct{ called, tool string }{{"stock", stock}, {"own", filepath.Join(l.bin, "runsc")}} {
		if build.tool == "" {
			continue
		}
		b, err := newBareSource(ctx, l, mib, build.tool)
		if err != nil {
			return all, fmt.Errorf("bare %s: %w", build.tool, err)
		}
		all = append(all, rival{bareSource: b, called: build.called})
	}
	return all, nil
}

// bareSource is a sandbox that runsc itself runs, with the holder in it.
type bareSource struct {
	*bare
	image string
}

func newBareSource(ctx context.Context, l *lab, mib int, tool string) (*bareSource, error) {
	b, err := newBare(ctx, l, "gvisor", tool)
	if err != nil {
		return nil, err
	}
	s := &bareSource{bare: b, image: filepath.Join(b.dir, "image")}
	path := filepath.Join(b.dir, "config.json")
	data, err := os.ReadFile(path)
	var spec specs.Spec
	if err == nil {
		err = json.Unmarshal(data, &spec)
	}
	if err == nil {
		spec.Process.Args = []string{"python3", "-c", holder, strconv.Itoa(mib)}
		spec.Linux.CgroupsPath, spec.Linux.Resources = "", nil // all the forks would share one group and its limits
		data, err = json.Marshal(&spec)
	}
	if err == nil {
		err = os.WriteFile(path, data, 0o644)
	}
	if err == nil {
		err = s.tool(ctx, "run", "--detach", "--bundle="+b.dir, s.source())
	}
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	time.Sleep(3 * time.Second) // until it holds its memory
	return s, nil
}

// tool runs runsc once. Its processes go on with the streams that they were
// given, so these are files.
func (s *bareSource) tool(ctx context.Context, args ...string) error {
	out, err := os.CreateTemp(s.dir, "out")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	cmd := exec.CommandContext(ctx, s.argv[0], append(s.argv[1:len(s.argv):len(s.argv)], args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	done := make(chan error, 1)
	s.jobs <- func() {
		if err := cmd.Start(); err != nil {
			done <- err
			return
		}
		go func() { done <- cmd.Wait() }()
	}
	if err := <-done; err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("runsc %s: %w: %s", args[0], err, bytes.TrimSpace(said))
	}
	return nil
}

func (s *bareSource) checkpoint(ctx context.Context) error {
	if err := os.RemoveAll(s.image); err != nil {
		return err
	}
	return s.tool(ctx, "checkpoint", "--leave-running", "--image-path="+s.image, s.source())
}

// bareSleep is what a rival's commands for a sleep and a wake take.
type bareSleep struct{ leaving, ending, restore *report.Figure }

// sleepAndWake times a checkpoint, a restore from it, and a checkpoint of what
// was restored, which ends that.
func (s *bareSource) sleepAndWake(ctx context.Context, f bareSleep) error {
	t := time.Now()
	err := s.checkpoint(ctx)
	f.leaving.AddMillis(t, err)
	t = time.Now()
	if err == nil {
		err = s.restore(ctx, 0)
	}
	f.restore.AddMillis(t, err)
	image := s.image + "-last"
	if rmErr := os.RemoveAll(image); rmErr != nil {
		return rmErr
	}
	t = time.Now()
	if err == nil {
		err = s.tool(ctx, "checkpoint", "--image-path="+image, s.forkID(0))
	}
	f.ending.AddMillis(t, err)
	return s.removeForks(ctx, 1)
}

// source and forkID are what runsc knows its sandboxes as. Their control
// groups are called so too, and several rivals are there side by side.
func (s *bareSource) source() string { return filepath.Base(s.dir) + "-source" }

func (s *bareSource) forkID(i int) string { return filepath.Base(s.dir) + "-fork" + strconv.Itoa(i) }

func (s *bareSource) restore(ctx context.Context, i int) error {
	id := s.forkID(i)
	if err := s.tool(ctx, "restore", "--detach", "--bundle="+s.dir, "--image-path="+s.image, id); err != nil {
		return err
	}
	return s.tool(ctx, "exec", id, "/bin/true")
}

func (s *bareSource) fork(ctx context.Context, n int) error {
	if err := s.checkpoint(ctx); err != nil {
		return err
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = s.restore(ctx, i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

func (s *bareSource) removeForks(ctx context.Context, n int) error {
	var errs []error
	for i := range n {
		errs = append(errs, s.tool(ctx, "delete", "--force", s.forkID(i)))
	}
	return errors.Join(errs...)
}

func (s *bareSource) close() error {
	err := s.tool(context.Background(), "delete", "--force", s.source())
	return errors.Join(err, s.bare.close())
}
