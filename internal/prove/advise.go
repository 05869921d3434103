package prove

import (
	"fmt"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"
)

// Question is one of the five that Advise goes by.
type Question struct {
	ID      string   `json:"id"` // the flag's name
	Text    string   `json:"text"`
	Choices []Choice `json:"choices"`
}

// Choice is one answer to a Question.
type Choice struct {
	ID   string `json:"id"`
	Text string `json:"text"`
}

// The answers.
const (
	EmitsJS      = "js"
	EmitsAny     = "any"
	TrustMine    = "mine"
	TrustOthers  = "strangers"
	StateNone    = "none"
	StateSuspend = "suspend"
	StateFork    = "fork"
	WhereCloud   = "cloud"
	WhereMetal   = "metal"
	WhereAny     = "anywhere"
	AbuseNone    = "none"
	AbuseLimits  = "limits"
	AbuseHostile = "hostile"
)

// Questions are the five, in the order in which they are asked.
var Questions = []Question{
	{"emits", "What does the model emit?", []Choice{
		{EmitsJS, "JavaScript or WebAssembly only"}, {EmitsAny, "any program: shell, Python, compilers, packages"},
	}},
	{"trust", "Whose code is it?", []Choice{
		{TrustMine, "mine: a mistake is the worst that it does"}, {TrustOthers, "strangers': prompts or code of people that I do not know"},
	}},
	{"state", "Must a sandbox be paused or forked?", []Choice{
		{StateNone, "no"}, {StateSuspend, "paused in RAM, or its disk copied"}, {StateFork, "forked or put to sleep with its memory and processes"},
	}},
	{"where", "Where must it run?", []Choice{
		{WhereCloud, "cloud VMs without KVM"}, {WhereMetal, "bare metal, or VMs with KVM"}, {WhereAny, "anywhere"},
	}},
	{"abuse", "What is the abuse story?", []Choice{
		{AbuseNone, "none: nobody gains by it"}, {AbuseLimits, "limits: rates, quotas and an egress lock are enough"}, {AbuseHostile, "hostile tenants side by side on one host"},
	}},
}

// Answers are one choice's ID for each question.
type Answers struct {
	Emits string `json:"emits"`
	Trust string `json:"trust"`
	State string `json:"state"`
	Where string `json:"where"`
	Abuse string `json:"abuse"`
}

// Field gives the place of a question's answer; nil for no such question.
func (a *Answers) Field(id string) *string {
	switch id {
	case "emits":
		return &a.Emits
	case "trust":
		return &a.Trust
	case "state":
		return &a.State
	case "where":
		return &a.Where
	case "abuse":
		return &a.Abuse
	}
	return nil
}

// Check tells whether every question has one of its answers.
func (a Answers) Check() error {
	for _, q := range Questions {
		got := *a.Field(q.ID)
		if !slices.ContainsFunc(q.Choices, func(c Choice) bool { return c.ID == got }) {
			var ids []string
			for _, c := range q.Choices {
				ids = append(ids, c.ID)
			}
			return fmt.Errorf("--%s %q: give one of %s", q.ID, got, strings.Join(ids, ", "))
		}
	}
	return nil
}

// Fact is what is known of one runtime apart from measurements.
type Fact struct {
	Name      string `json:"name"`
	Available bool   `json:"available"`
	Why       string `json:"why,omitempty"` // not available: the reason
}

// Facts are what Advise goes by beside the answers.
type Facts struct {
	Runtimes []Fact  // what the daemon told; nil where none answers: then what is on record of the report is taken
	Report   *Report // the last measurements; nil where there are none
}

// Advice is the answer.
type Advice struct {
	Answers  Answers   `json:"answers"`
	Runtime  string    `json:"runtime,omitempty"` // "": none that runs here will do
	Reasons  []string  `json:"reasons"`
	Settings []string  `json:"settings,omitempty"` // how to create the sandboxes
	Measured []string  `json:"measured"`           // figures of this host, or why there are none
	Others   []Refusal `json:"others,omitempty"`   // why not the others
	// IfBuilt is what would be chosen if every runtime were built and ran
	// here; "" where that is Runtime.
	IfBuilt        string   `json:"if_built,omitempty"`
	IfBuiltReasons []string `json:"if_built_reasons,omitempty"`
}

// Refusal says why a runtime was not chosen.
type Refusal struct {
	Runtime string `json:"runtime"`
	Why     string `json:"why"`
}

// trait is what a runtime is by its construction.
type trait struct {
	name     string
	kvm      bool // needs /dev/kvm
	jsOnly   bool
	kernel   string // what the code's system calls meet
	shared   bool   // the host's own kernel
	memory   bool   // can fork and hibernate with memory
	suspends bool
	is       string // the reason to take it
}

// traits are in the order of preference where several will do: what costs less
// goes first.
var traits = []trait{
	{name: "isolate", jsOnly: true, kernel: "V8's sandbox, and no system calls", is: "an isolate starts in about a millisecond and costs megabytes"},
	{name: "container", shared: true, kernel: "the host's kernel, behind namespaces and seccomp", suspends: true,
		is: "a container runs all of Linux at the host's speed, starts fastest of those that do, and costs least"},
	{name: "microvm", kvm: true, kernel: "a guest kernel on KVM behind a minimal VMM", memory: true, suspends: true,
		is: "a microVM has a kernel of its own behind the CPU's virtualization, and its RAM can be captured and shared by copies"},
	{name: "gvisor", kernel: "gVisor's kernel in user space", memory: true, suspends: true,
		is: "gVisor has a kernel of its own that needs no KVM, and captures memory and processes"},
	{name: "libkrun", kvm: true, kernel: "a guest kernel on KVM, the VMM being a library",
		is: "libkrun has a guest kernel at a low cost"},
	{name: "kata", kvm: true, kernel: "a guest kernel in a VM per sandbox",
		is: "Kata gives a container a VM of its own"},
}

// refuse tells why t will not do for a; "" where it will.
func (t trait) refuse(a Answers) string {
	switch {
	case t.jsOnly && a.Emits != EmitsJS:
		return "it runs JavaScript and WebAssembly only"
	case t.jsOnly && a.State != StateNone:
		return "an isolate has no processes to pause or to fork: its captures are of the heap alone"
	case t.jsOnly && a.Abuse == AbuseHostile:
		return "hostile tenants would share one process but for V8's sandbox, in which holes are found every year"
	case t.kvm && a.Where == WhereCloud:
		return "it needs KVM, which those machines do not have"
	case t.kvm && a.Where == WhereAny:
		return "it needs KVM, which not every machine has"
	case t.shared && a.State == StateFork:
		return "it cannot capture memory: its forks are of the disk"
	case a.State == StateFork && !t.memory:
		return "its captures of memory are still to be measured"
	case a.State == StateSuspend && !t.suspends:
		return "its suspend is still to be measured"
	case t.shared && a.Trust == TrustOthers:
		return "strangers' code would meet the host's own kernel: one hole in it is a way out"
	case t.shared && a.Abuse == AbuseHostile:
		return "hostile tenants would share the host's kernel"
	}
	return ""
}

// choose picks the first that will do. Where tenants are hostile, hardware's
// boundary goes before one in software; microvm is before gvisor already.
func choose(a Answers, allowed func(name string) bool) (trait, bool) {
	order := slices.Clone(traits)
	if a.Trust == TrustMine && a.Abuse != AbuseHostile && a.State == StateFork {
		// Among one's own, no KVM and no guest RAM to set aside is simpler.
		slices.SortStableFunc(order, func(x, y trait) int { return boolOrder(x.name == "gvisor", y.name == "gvisor") })
	}
	for _, t := range order {
		if allowed(t.name) && t.refuse(a) == "" {
			return t, true
		}
	}
	return trait{}, false
}

func boolOrder(x, y bool) int {
	switch {
	case x && !y:
		return -1
	case y && !x:
		return 1
	}
	return 0
}

// Advise picks a runtime. It is a pure function of the answers and the facts.
func Advise(a Answers, f Facts) (Advice, error) {
	if err := a.Check(); err != nil {
		return Advice{}, err
	}
	facts := f.Runtimes
	if facts == nil && f.Report != nil {
		for _, rt := range f.Report.Runtimes {
			facts = append(facts, Fact{rt.Name, rt.Available, rt.Why})
		}
	}
	fact := func(name string) Fact {
		for _, x := range facts {
			if x.Name == name {
				return x
			}
		}
		why := "this daemon does not know it"
		if facts == nil {
			why = "no daemon answered, and there is no report of warren prove: what runs here is not known"
		}
		return Fact{Name: name, Why: why}
	}
	out := Advice{Answers: a}
	best, ok := choose(a, func(name string) bool { return fact(name).Available })
	if ok {
		out.Runtime = best.name
		out.Reasons = reasons(best, a)
		out.Settings = settings(best, a)
	} else {
		out.Reasons = []string{"no runtime that runs on this host will do for these answers"}
	}
	if ideal, found := choose(a, func(string) bool { return true }); found && ideal.name != out.Runtime {
		out.IfBuilt = ideal.name
		out.IfBuiltReasons = reasons(ideal, a)
		if !ok {
			out.Reasons = append(out.Reasons, fmt.Sprintf("%s would, but: %s", ideal.name, fact(ideal.name).Why))
		}
	}
	for _, t := range traits {
		if t.name == out.Runtime {
			continue
		}
		why := t.refuse(a)
		if x := fact(t.name); why == "" && !x.Available {
			why = "it would do, but: " + x.Why
		} else if why == "" {
			why = "it would do, and costs more"
		}
		out.Others = append(out.Others, Refusal{t.name, why})
	}
	out.Measured = measured(f.Report, out.Runtime, a)
	return out, nil
}

// reasons says why t.
func reasons(t trait, a Answers) []string {
	out := []string{t.is}
	if a.Emits == EmitsAny {
		out = append(out, "any program runs in it; its system calls meet "+t.kernel)
	} else {
		out = append(out, "what it runs meets "+t.kernel)
	}
	switch {
	case a.Trust == TrustOthers && t.kvm:
		out = append(out, "strangers' code never meets the host's kernel: hardware keeps it in the guest")
	case a.Trust == TrustOthers && !t.shared && !t.jsOnly:
		out = append(out, "strangers' code never meets the host's kernel, only gVisor's, which itself may call little of the host")
	case a.Trust == TrustMine && t.shared:
		out = append(out, "your own code does not need a kernel of its own: that it shares the host's is its price")
	}
	switch {
	case a.State == StateFork:
		out = append(out, "a running sandbox can be forked, snapshotted and hibernated with its memory and processes")
	case a.State == StateSuspend:
		out = append(out, "it can be paused in RAM, and its disk captured")
	}
	if a.Where != WhereMetal && !t.kvm {
		out = append(out, "it needs no KVM")
	}
	if a.Abuse == AbuseHostile && !t.kvm {
		out = append(out, "against hostile tenants a VM's boundary is stronger, where there is KVM")
	}
	return out
}

// settings says how to make its sandboxes for the answers.
func settings(t trait, a Answers) []string {
	out := []string{"--runtime " + t.name}
	switch a.Abuse {
	case AbuseLimits:
		out = append(out, "--net none, or --deny-net of what they need not reach", "--cpus, --mem, --pids and --timeout on every create")
	case AbuseHostile:
		out = append(out, "--net none, and single --allow-net rules for what must be reached", "--cpus, --mem, --pids, --disk and --timeout on every create", "one tenant (API key) for each customer")
	}
	if a.State == StateFork {
		out = append(out, "keep secrets out of the captures: give them as ephemeral environment (ephemeral_env)")
	}
	return out
}

// measured tells the figures that matter for the answers.
func measured(r *Report, name string, a Answers) []string {
	if r == nil {
		return []string{"nothing was measured on this host yet: run 'warren prove'"}
	}
	if name == "" {
		return []string{"the last run measured none that will do"}
	}
	rt, ok := r.Runtime(name)
	if !ok || !rt.Measured() {
		return []string{fmt.Sprintf("the last run of warren prove (%s) has no figures of %s", r.At.Format("2006-01-02"), name)}
	}
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if r.Quick {
		say("of a quick run: figures to look at, not to quote")
	}
	for _, id := range []string{"start_pool", "start_restore", "start_cold"} {
		if t, ok := rt.Timing(id); ok {
			say("%s: %s p50, %s p99 (n %d)", t.Name, ms(t.P50), ms(t.P99), t.N)
		}
	}
	if t, ok := rt.Timing("exec"); ok {
		say("exec round trip: %s p50, %s p99 (n %d)", ms(t.P50), ms(t.P99), t.N)
	}
	if a.State == StateFork {
		for _, id := range []string{"fork", "hibernate", "wake"} {
			if t, ok := rt.Timing(id); ok {
				say("%s: %s p50, %s p99 (n %d)", t.Name, ms(t.P50), ms(t.P99), t.N)
			}
		}
	}
	if rt.Memory != nil {
		n, pss := rt.Memory.Best()
		what := "working set"
		if pss {
			what = "PSS"
		}
		say("memory of an idle sandbox: %s %s", humanize.IBytes(uint64(max(n, 0))), what)
	}
	if yes, no, _ := count(rt.Battery); yes+no > 0 {
		var fails []string
		for _, row := range rt.Battery {
			if row.Verdict == No {
				fails = append(fails, row.Name)
			}
		}
		line := fmt.Sprintf("%d of %d pieces of real work succeed", yes, yes+no)
		if len(fails) > 0 {
			line += "; not: " + strings.Join(fails, "; ")
		}
		say("%s", line)
	}
	if k, ok := rt.Row("kernel"); ok {
		say("kernel seen inside: %s", k.Detail)
	}
	if a.State != StateNone {
		if c := captureCell(rt); c.Verdict != Skip {
			say("captures that work: %s", c.Text)
		} else {
			say("captures were not measured")
		}
	}
	return out
}
