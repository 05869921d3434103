// Package fault lets the crash-safety tests end the process, as if by a power
// cut, at named points between the steps of an operation.
//
// A point does nothing unless the environment variable WARREN_FAULT names it:
// "network.slot.linked" kills at its first hit, "network.slot.linked:3" at its
// third. The process ends by SIGKILL, so no deferred call or signal handler
// runs: what is on the host and on the disk then is what a restart finds.
package fault

import (
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// Env is the variable that arms one point.
const Env = "WARREN_FAULT"

// A Point is one place where the process can be made to end.
type Point struct {
	name string
	left atomic.Int64 // hits until the kill; 0 is unarmed
}

// trace, where set, is told of every hit.
var trace atomic.Pointer[func(name string)]

// Trace has f called with the name of every point that is passed from now on;
// nil ends it. Tests learn by it which points an operation has.
func Trace(f func(name string)) {
	if f == nil {
		trace.Store(nil)
		return
	}
	trace.Store(&f)
}

// Arm makes the point kill at its nth hit from now on, and tells whether there
// is such a point.
func Arm(name string, hits int64) bool {
	mu.Lock()
	defer mu.Unlock()
	p := points[name]
	if p != nil {
		p.left.Store(hits)
	}
	return p != nil
}

var (
	mu       sync.Mutex
	points   = map[string]*Point{}
	armed, n = parse(os.Getenv(Env))
)

// Register declares a point. It is called from package-level variables;
// registering a name twice panics.
func Register(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if points[name] != nil {
		panic("fault: point " + name + " is registered twice")
	}
	p := &Point{name: name}
	if name == armed {
		p.left.Store(n)
	}
	points[name] = p
	return p
}

// Points lists the names of all registered points, sorted.
func Points() []string {
	mu.Lock()
	defer mu.Unlock()
	names := make([]string, 0, len(points))
	for name := range points {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// Hit passes the point: it ends the process if the point is armed and this is
// the hit that it was armed for.
func (p *Point) Hit() {
	if f := trace.Load(); f != nil {
		(*f)(p.name)
	}
	if p.left.Load() == 0 {
		return
	}
	if p.left.Add(-1) == 0 {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal is on its way; nothing more may happen here
	}
}

func parse(s string) (name string, hits int64) {
	name, count, ok := strings.Cut(s, ":")
	if !ok {
		return name, 1
	}
	hits, err := strconv.ParseInt(count, 10, 64)
	if err != nil || hits < 1 {
		return "", 0
	}
	return name, hits
}
