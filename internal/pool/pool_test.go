package pool

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var seedFlag = flag.Uint64("seed", 0, "seed of the randomized test; 0 picks one")

// fake makes members that are nothing but IDs.
type fake struct {
	mu       sync.Mutex
	n        int
	alive    map[sandbox.ID]Key
	content  string // of the template; "" is none
	making   int
	most     int // members made at the same time
	onMake   func(ctx context.Context) error
	onEnd    func() error
	onKey    func() error
	made     int
	attempts int
}

func newFake() *fake { return &fake{alive: map[sandbox.ID]Key{}, content: "one"} }

func (f *fake) Key(_ context.Context, s Settings) (Key, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.onKey != nil {
		if err := f.onKey(); err != nil {
			return Key{}, err
		}
	}
	if f.content == "" {
		return Key{}, sandbox.Errorf(sandbox.CodeNotFound, "no template")
	}
	return Key{Tenant: s.Tenant, TemplateID: f.content, Runtime: s.Runtime}, nil
}

func (f *fake) Make(ctx context.Context, _ Settings, k Key) (sandbox.ID, error) {
	f.mu.Lock()
	f.making++
	f.attempts++
	f.most = max(f.most, f.making)
	hook := f.onMake
	f.mu.Unlock()
	var err error
	if hook != nil {
		err = hook(ctx)
	}
	if err == nil {
		err = ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.making--
	if err != nil {
		return "", err
	}
	f.n++
	f.made++
	id := sandbox.ID(fmt.Sprintf("m%d", f.n))
	f.alive[id] = k
	return id, nil
}

func (f *fake) End(_ context.Context, id sandbox.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.onEnd != nil {
		if err := f.onEnd(); err != nil {
			return err
		}
	}
	delete(f.alive, id)
	return nil
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) living() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.alive)
}

func (f *fake) tried() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.attempts
}

// run starts pools over f that hurry, and ends them with t.
func run(t *testing.T, f *fake, o Options) *Pools {
	t.Helper()
	if o.Calm == 0 {
		o.Calm = time.Nanosecond
	}
	if o.Backoff == 0 {
		o.Backoff, o.BackoffMost = time.Millisecond, 5*time.Millisecond
	}
	var all sync.WaitGroup
	o.Go = all.Go
	ctx, cancel := context.WithCancel(context.Background())
	ps := New(f, o)
	ps.Run(ctx)
	t.Cleanup(func() {
		cancel()
		all.Wait()
	})
	return ps
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("it never came to be that %s", what)
}

func waitReady(t *testing.T, ps *Pools, id string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s has %d ready", id, n), func() bool {
		s := ps.State(id)
		return len(s.Members) == n && s.Making+s.Ending == 0
	})
}

func of(id string, ready int) Settings {
	return Settings{ID: id, Tenant: "t", Template: "base", Runtime: id, Ready: ready}
}

func keyOf(id, content string) Key { return Key{Tenant: "t", TemplateID: content, Runtime: id} }

func TestFillTakeAndRefill(t *testing.T) {
	f := newFake()
	ps := run(t, f, Options{Parallel: 2})
	ps.Set(of("a", 4))
	waitReady(t, ps, "a", 4)
	if f.most > 2 {
		t.Errorf("%d were made at once", f.most)
	}
	first := ps.State("a").Members[0]
	if id, ok := ps.Take(keyOf("a", "one")); !ok || id != first {
		t.Errorf("took %s, %v; the oldest is %s", id, ok, first)
	}
	waitReady(t, ps, "a", 4)
	if slices.Contains(ps.State("a").Members, first) {
		t.Error("it is a member still")
	}
	for _, k := range []Key{{}, keyOf("a", "two"), keyOf("b", "one"), {Tenant: "u", TemplateID: "one", Runtime: "a"},
		{Tenant: "t", TemplateID: "one", Runtime: "a", Resources: sandbox.Resources{CPUs: 1}}} {
		if id, ok := ps.Take(k); ok {
			t.Errorf("took %s as %+v", id, k)
		}
	}
}

func TestShrinkOffAndRemove(t *testing.T) {
	f := newFake()
	ps := run(t, f, Options{})
	ps.Set(of("a", 5))
	waitReady(t, ps, "a", 5)
	ps.Set(of("a", 2))
	waitReady(t, ps, "a", 2)
	if n := f.living(); n != 2 {
		t.Errorf("%d live", n)
	}
	ps.Set(of("a", 0))
	waitReady(t, ps, "a", 0)
	if n := f.living(); n != 0 || !ps.Has("a") {
		t.Errorf("%d live; it is there: %v", n, ps.Has("a"))
	}
	ps.Set(of("a", 1))
	waitReady(t, ps, "a", 1)
	if err := ps.Remove(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if n := f.living(); n != 0 || ps.Has("a") {
		t.Errorf("%d live after the removal", n)
	}
	if err := ps.Remove(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

func TestRemoveGivesUpWhatIsBeingMade(t *testing.T) {
	f := newFake()
	begun := make(chan struct{}, 10)
	f.onMake = func(ctx context.Context) error {
		begun <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	ps := run(t, f, Options{})
	ps.Set(of("a", 1))
	<-begun
	if err := ps.Remove(t.Context(), "a"); err != nil || f.living() != 0 {
		t.Errorf("%v, %d live", err, f.living())
	}
	ps.Set(of("a", 1))
	<-begun
	ps.Set(of("a", 0))
	waitReady(t, ps, "a", 0)
	if s := ps.State("a"); s.Err != nil {
		t.Errorf("its error is %v", s.Err)
	}
}

func TestOutdatedMembersAreReplaced(t *testing.T) {
	f := newFake()
	ps := run(t, f, Options{})
	ps.Set(of("a", 3))
	waitReady(t, ps, "a", 3)
	f.set(func() { f.content = "two" })
	ps.Look()
	eventually(t, "all are of the new content", func() bool {
		s := ps.State("a")
		return s.Key.TemplateID == "two" && len(s.Members) == 3 && s.Ending == 0
	})
	if _, ok := ps.Take(keyOf("a", "one")); ok {
		t.Error("there is one of the old content")
	}
	f.set(func() { f.content = "" })
	ps.Look()
	eventually(t, "none is left without a template", func() bool { return f.living() == 0 })
	if s := ps.State("a"); sandbox.CodeOf(s.Err) != sandbox.CodeNotFound {
		t.Errorf("its error is %v", s.Err)
	}
	f.set(func() { f.content = "three" })
	ps.Look()
	waitReady(t, ps, "a", 3)
	if s := ps.State("a"); s.Err != nil {
		t.Errorf("its error is %v still", s.Err)
	}
}

func TestBackoff(t *testing.T) {
	f := newFake()
	f.onMake = func(context.Context) error { return errors.New("no luck") }
	ps := run(t, f, Options{Backoff: 30 * time.Millisecond, BackoffMost: time.Hour})
	ps.Set(of("a", 2))
	eventually(t, "the error is told", func() bool { return ps.State("a").Err != nil })
	if s := ps.State("a"); s.Err.Error() != "no luck" || s.ErrAt.IsZero() {
		t.Errorf("%v at %v", s.Err, s.ErrAt)
	}
	time.Sleep(300 * time.Millisecond)
	if n := f.tried(); n > 5 { // after 0, 30, 90, 210 ms
		t.Errorf("%d attempts in 300 ms", n)
	}
	f.set(func() { f.onMake = nil })
	ps.Set(of("a", 2)) // somebody who sets it anew does not wait
	waitReady(t, ps, "a", 2)
	if s := ps.State("a"); s.Err != nil {
		t.Errorf("its error is %v still", s.Err)
	}
	f.set(func() { f.onKey = func() error { return errors.New("a bad moment") } })
	ps.Look()
	eventually(t, "the error is told", func() bool { return ps.State("a").Err != nil })
	if n := len(ps.State("a").Members); n != 2 {
		t.Errorf("a bad moment left %d members", n)
	}
}

func TestMembersWaitForOthers(t *testing.T) {
	f := newFake()
	ps := run(t, f, Options{Patience: time.Hour})
	done := ps.Busy()
	ps.Set(of("a", 1))
	time.Sleep(50 * time.Millisecond)
	if n := f.tried(); n != 0 {
		t.Errorf("%d were begun while something else was made", n)
	}
	done()
	done() // of no effect
	waitReady(t, ps, "a", 1)

	impatient := run(t, f, Options{Patience: 20 * time.Millisecond})
	defer impatient.Busy()()
	impatient.Set(of("b", 2))
	waitReady(t, impatient, "b", 2)
}

func TestGiveWayLostAndAdopt(t *testing.T) {
	f := newFake()
	ps := run(t, f, Options{Backoff: time.Hour, BackoffMost: time.Hour})
	if _, ok := ps.GiveWay(errors.New("full")); ok {
		t.Error("nobody gave way")
	}
	ps.Set(of("a", 1))
	ps.Set(of("b", 3))
	waitReady(t, ps, "a", 1)
	waitReady(t, ps, "b", 3)
	id, ok := ps.GiveWay(errors.New("full"))
	if !ok || f.alive[id].Runtime != "b" {
		t.Errorf("%s gave way, %v", id, ok)
	}
	time.Sleep(30 * time.Millisecond)
	if s := ps.State("b"); len(s.Members) != 2 || s.Err == nil {
		t.Errorf("%d members after one gave way, error %v", len(s.Members), s.Err)
	}
	lost := ps.State("a").Members[0]
	ps.Lost(lost)
	ps.Lost("nobody")
	eventually(t, "another is made", func() bool { s := ps.State("a"); return len(s.Members) == 1 && s.Members[0] != lost })
	if ps.Adopt("c", "x", keyOf("c", "one")) {
		t.Error("a pool that is not there adopted")
	}
	if !ps.Adopt("b", "x", keyOf("b", "one")) {
		t.Error("not adopted")
	}
	eventually(t, "the adopted is a member", func() bool { return slices.Contains(ps.State("b").Members, "x") })
}

// TestRandom has claimers, clients who change pools, members that die and makers
// that fail, and checks that no member is given twice, that none that was given
// is ended by its pool, and that in the end all pools are full.
func TestRandom(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed: -seed=%d", seed)
	f := newFake()
	var mu sync.Mutex
	dice := rand.New(rand.NewPCG(seed, 0))
	roll := func(n int) int { mu.Lock(); defer mu.Unlock(); return dice.IntN(n) }
	f.onMake = func(ctx context.Context) error {
		select {
		case <-time.After(time.Duration(roll(500)) * time.Microsecond):
		case <-ctx.Done():
			return ctx.Err()
		}
		if roll(5) == 0 {
			return errors.New("the dice said no")
		}
		return nil
	}
	ps := run(t, f, Options{Parallel: 3, Patience: 2 * time.Millisecond})
	names := []string{"a", "b", "c"}
	given := map[sandbox.ID]bool{} // mu's
	var all sync.WaitGroup
	for n := range 6 {
		r := rand.New(rand.NewPCG(seed, uint64(n+1)))
		all.Go(func() {
			for range 150 {
				name := names[r.IntN(len(names))]
				switch r.IntN(12) {
				case 0:
					ps.Set(of(name, r.IntN(6)))
				case 1:
					ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(5))*time.Millisecond)
					ps.Remove(ctx, name)
					cancel()
				case 2:
					f.set(func() { f.content = []string{"one", "two", ""}[r.IntN(3)] })
					ps.Look()
				case 3:
					if s := ps.State(name); len(s.Members) > 0 {
						f.set(func() { delete(f.alive, s.Members[0]) })
						ps.Lost(s.Members[0])
					}
				case 4:
					if id, ok := ps.GiveWay(errors.New("full")); ok {
						f.End(context.Background(), id)
					}
				default:
					done := ps.Busy()
					id, ok := ps.Take(keyOf(name, []string{"one", "two"}[r.IntN(2)]))
					if ok {
						mu.Lock()
						if given[id] {
							t.Errorf("%s was given twice", id)
						}
						given[id] = true
						mu.Unlock()
					}
					done()
				}
				time.Sleep(time.Duration(r.IntN(500)) * time.Microsecond)
			}
		})
	}
	all.Wait()
	f.set(func() { f.content, f.onMake = "last", nil })
	for _, name := range names {
		ps.Set(of(name, 3))
	}
	ps.Look()
	for _, name := range names {
		eventually(t, name+" is full and at rest", func() bool {
			s := ps.State(name)
			return len(s.Members) == 3 && s.Making+s.Ending == 0 && s.Key.TemplateID == "last" && s.Err == nil
		})
	}
	members := map[sandbox.ID]bool{}
	for _, name := range names {
		for _, id := range ps.State(name).Members {
			members[id] = true
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, k := range f.alive {
		if !members[id] && !given[id] {
			t.Errorf("%s (%+v) lives, and is neither a member nor given", id, k)
		}
	}
	for id := range members {
		if given[id] || f.alive[id].TemplateID != "last" {
			t.Errorf("the member %s was given (%v) or is not of the last content (%+v)", id, given[id], f.alive[id])
		}
	}
}
