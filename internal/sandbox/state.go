package sandbox

// State is where a sandbox stands in its life:
//
//	creating → running ⇄ suspended
//	           running ⇄ hibernated
//	any of these → killed | failed
//
// killed and failed are final; the record stays readable with its Reason.
type State string

// The states of a sandbox.
const (
	Creating   State = "creating"   // being made; nothing may use it yet
	Running    State = "running"    // its agent answers
	Suspended  State = "suspended"  // frozen in RAM: memory kept, no CPU
	Hibernated State = "hibernated" // memory and disk on storage: no RAM, no processes
	Killed     State = "killed"     // ended on purpose: by a user, a timeout or a policy
	Failed     State = "failed"     // ended by a fault: out of memory, a crash, a failed create
)

// States lists every state in the order of a life.
func States() []State {
	return []State{Creating, Running, Suspended, Hibernated, Killed, Failed}
}

// Ended tells whether s is final.
func (s State) Ended() bool { return s == Killed || s == Failed }

// Live tells whether a sandbox in s may hold processes on the host.
func (s State) Live() bool { return s == Creating || s == Running || s == Suspended }

// next holds the legal transitions; a state's own name is never in its list.
var next = map[State][]State{
	Creating:   {Running, Killed, Failed},
	Running:    {Suspended, Hibernated, Killed, Failed},
	Suspended:  {Running, Hibernated, Killed, Failed},
	Hibernated: {Running, Killed, Failed},
}

// CanBecome tells whether a sandbox in s may go to t.
func (s State) CanBecome(t State) bool {
	for _, n := range next[s] {
		if n == t {
			return true
		}
	}
	return false
}

// Reason tells why a sandbox ended. It is set exactly when the state is final.
type Reason string

// The reasons of an end.
const (
	ReasonKilledByUser   Reason = "killed_by_user"     // a client asked for it
	ReasonTimeout        Reason = "timeout"            // its time to live ran out
	ReasonOOM            Reason = "oom_killed"         // the kernel ended it at its memory limit
	ReasonRuntimeCrashed Reason = "runtime_crashed"    // its init or its runtime's process ended unasked
	ReasonCreateFailed   Reason = "create_failed"      // it never came to run
	ReasonInterrupted    Reason = "create_interrupted" // the daemon ended while it was being made
	ReasonHostRestarted  Reason = "host_restarted"     // the host rebooted under it
	ReasonPolicy         Reason = "policy"             // a rule of the host ended it
)

// FinalState is the state that a sandbox ends in for reason r.
func (r Reason) FinalState() State {
	switch r {
	case ReasonKilledByUser, ReasonTimeout, ReasonPolicy:
		return Killed
	}
	return Failed
}
