package manager_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestAdmission(t *testing.T) {
	w := newWorld(t)
	w.net.Total = 3
	m := w.start(t)
	for _, tc := range []struct {
		name     string
		r        sandbox.Resources
		worsen   func()
		resource string
	}{
		{"more memory than there is", sandbox.Resources{MemoryMiB: 62 << 10}, func() {}, "memory"},
		{"available memory", sandbox.Resources{}, func() { w.host.Mem.Available = 3<<30 + 10<<20 }, "memory"},
		{"disk", sandbox.Resources{}, func() { w.host.Dsk.Free = 1<<30 + 1 }, "disk"},
		{"host's processes", sandbox.Resources{}, func() { w.host.Proc.Now = 1 << 20 }, "processes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			mem, dsk, proc := w.host.Mem, w.host.Dsk, w.host.Proc
			tc.worsen()
			defer func() { w.host.Mem, w.host.Dsk, w.host.Proc = mem, dsk, proc }()
			_, err := m.Create(t.Context(), tenant, manager.CreateRequest{Resources: tc.r})
			wantCode(t, err, sandbox.CodeNoCapacity, tc.resource)
			var e *sandbox.Error
			if errors.As(err, &e); e.Details["resource"] != tc.resource {
				t.Errorf("the details are %v", e.Details)
			}
		})
	}
	w.check(t)
	for range 3 {
		create(t, m, manager.CreateRequest{})
	}
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeNoCapacity, "slots")
	w.check(t)
}

func TestPromisedMemory(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	big := manager.CreateRequest{Resources: sandbox.Resources{MemoryMiB: 48 << 10}}
	var last sandbox.Sandbox
	for range 5 { // 4 times 60.8 GiB is the budget
		last = create(t, m, big)
	}
	_, err := m.Create(t.Context(), tenant, big)
	wantCode(t, err, sandbox.CodeNoCapacity, "promised")
	if err := m.Kill(t.Context(), tenant, last.ID); err != nil {
		t.Fatal(err)
	}
	create(t, m, big)
	w.check(t)
}

func TestPromisedProcesses(t *testing.T) {
	w := newWorld(t)
	w.tune = func(c *manager.Config) { c.Budget.ProcessOvercommit = 0.1 }
	m := w.start(t)
	big := manager.CreateRequest{Resources: sandbox.Resources{PIDs: sandbox.MaxPIDs}}
	create(t, m, big) // 0.1 of 0.9 of 1 Mi is the budget
	_, err := m.Create(t.Context(), tenant, big)
	wantCode(t, err, sandbox.CodeNoCapacity, "process budget")
	w.check(t)
}

func TestAdmissionCountsCreatesInFlight(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	// Room for the floors of two (8 MiB of overhead and 16 MiB each) above the
	// reserve of 5 % of 64 GiB.
	w.host.Mem.Available = w.host.Mem.Total/20 + 50<<20
	began := w.blockCreate()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { m.Create(ctx, tenant, manager.CreateRequest{}) })
		<-began
	}
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeNoCapacity, "under way")
	if c := m.Capacity(t.Context()); c.CreatesInFlight != 2 || c.ByState["creating"] != 2 {
		t.Errorf("capacity is %+v", c)
	}
	cancel()
	wg.Wait()
	w.check(t)
}

func TestCreatesWaitTheirTurn(t *testing.T) {
	w := newWorld(t)
	w.tune = func(c *manager.Config) { c.Budget.Creates = 2 }
	m := w.start(t)
	began := w.blockCreate()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() { m.Create(ctx, tenant, manager.CreateRequest{}) })
	}
	<-began
	<-began
	time.Sleep(20 * time.Millisecond)
	if n := len(began); n != 0 {
		t.Errorf("%d more are at work", n)
	}
	cancel()
	wg.Wait()
	w.check(t)
}
