package template

import (
	"context"
	"io"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// SharedTenant is the tenant whose shared templates every tenant can use.
const SharedTenant = "default"

// A Template is one immutable root filesystem with its defaults.
type Template struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Tenant    string            `json:"tenant"`
	Shared    bool              `json:"shared,omitempty"` // every tenant may use it; only SharedTenant can have such
	Layers    []string          `json:"layers"`           // digests ("sha256:<hex>"), topmost first
	Config    Config            `json:"config"`
	Resources sandbox.Resources `json:"resources"`  // zero fields: the platform's defaults
	SizeBytes int64             `json:"size_bytes"` // bytes of file content in its layers; shared layers count in full
	CreatedAt time.Time         `json:"created_at"`
	Source    string            `json:"source"`             // "debian:bookworm", "oci:…", "dockerfile", … for people
	BuildID   string            `json:"build_id,omitempty"` // Target.BuildID
}

// Config is what a sandbox of a template starts with.
type Config struct {
	Env          map[string]string `json:"env,omitempty"`
	User         string            `json:"user,omitempty"`    // "" is root; "name", "uid", "name:group" or "uid:gid"
	Workdir      string            `json:"workdir,omitempty"` // "" is /
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	Shell        []string          `json:"shell,omitempty"`     // of shell-form instructions; nil is /bin/sh -c
	StartCmd     string            `json:"start_cmd,omitempty"` // run by a shell when a sandbox starts
	ReadyCmd     string            `json:"ready_cmd,omitempty"` // run by a shell until it exits 0: the sandbox is ready
	Labels       map[string]string `json:"labels,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"` // "80/tcp"; told to people, opens nothing
	OnBuild      []string          `json:"on_build,omitempty"`      // instructions for a Dockerfile that builds FROM it
	HasShell     bool              `json:"has_shell"`               // /bin/sh is there; without it StartCmd, ReadyCmd and shell commands cannot run
}

// Target says under which name a build's result is kept, and its defaults.
type Target struct {
	Tenant    string // "" is SharedTenant
	Name      string
	Shared    bool              // usable by every tenant; only for SharedTenant
	Resources sandbox.Resources // zero fields: none of its own
	StartCmd  string            // needs a shell in the template
	ReadyCmd  string            // needs a shell in the template
	BuildID   string            // the caller's name for the build; kept with its result
	Tags      []string          // the result is kept as "name:tag" for each of these, and as Name only where none is given
}

// DebianOptions describe a template made of Debian packages.
type DebianOptions struct {
	Target
	Suite    string            // "bookworm"; "" is DefaultSuite
	Packages []string          // besides Debian's essential ones and apt
	Mirror   string            // http(s) or file URL; "" is the host's own apt sources for the suite, else mmdebstrap's default
	User     string            // a login user to make, uid 1000, in group sudo; "" makes none
	Env      map[string]string // PATH and LANG have defaults
	Slim     []string          // path patterns that packages do not get to unpack (dpkg's --path-exclude); nil is documentation, man pages and translations
	Prune    []string          // patterns (path.Match, relative to /) of what is removed after the installation
	Reseed   bool              // install what makes random numbers of Python and Node differ between forks, see package reseed
	// Interpreter installs the code interpreter (package interpreter), whose
	// commands start the sandbox unless Target has others.
	Interpreter bool
	Variant     string // mmdebstrap's: "minbase" (the default), "essential", "apt", "custom"
}

// ImportOptions describe a template made of an OCI image.
type ImportOptions struct {
	Target
	// Ref is a registry reference (HOST/NAME:TAG or @DIGEST), "oci:DIR[:TAG]",
	// or "docker-archive:FILE[:REF]" (docker save; a tar of an OCI layout too).
	Ref string
	// AllowLocal permits "oci:" and "docker-archive:", which read files of this
	// host as root: only for callers that are root here.
	AllowLocal bool
	// Archive, where set, is the content of the archive that Ref names as
	// "docker-archive:…" on the caller's own machine. It needs no AllowLocal.
	Archive io.Reader
	// Insecure permits plain HTTP and unverified TLS to the registry.
	Insecure bool
}

// DockerfileOptions describe a template built from a Dockerfile.
type DockerfileOptions struct {
	Target
	ContextDir string            // a directory of this host, or
	Context    io.Reader         // a tar stream (PackContext), plain, gzip or zstd; neither: an empty context
	Dockerfile string            // its path in the context; "" is "Dockerfile"
	Content    []byte            // the Dockerfile itself, where it is not in the context
	BuildArgs  map[string]string // for ARG; one that no ARG declares gives a warning
	Stage      string            // the stage to build, by name or number; "" is the last
	NoCache    bool              // run every step anew (their results are cached all the same)
	Insecure   bool              // as ImportOptions.Insecure, for FROM
	// StepResources limit each RUN step; zero fields: the runner's defaults.
	StepResources sandbox.Resources
}

// Step is one RUN instruction, ready to be run in a sandbox.
type Step struct {
	Number    int      // of Total, as told to people
	Total     int      //
	Line      int      // in the Dockerfile
	Name      string   // the instruction, shortened, for people
	Tenant    string   // whose build it is
	Layers    []string // the root filesystem: directories, topmost first
	Argv      []string // never empty; Argv[0] is looked up in Env's PATH
	Env       map[string]string
	User      string // as Config.User
	Workdir   string // absolute; exists
	Network   sandbox.NetworkMode
	Resources sandbox.Resources // zero fields: the runner's defaults
	// LayerDir does not exist. After an exit code of 0 the runner makes it: the
	// sandbox's changes as a layer (sandbox.DiskCapturer), whole when RunStep
	// returns. It is on the library's filesystem and goes away with the build.
	LayerDir string
	// Output takes the command's stdout and stderr, as they come. Writes never
	// fail and may be concurrent.
	Output io.Writer
}

// StepResult is how a step's command ended.
type StepResult struct {
	ExitCode int // 128+n for signal n, as a shell tells it
}

// StepRunner runs build steps in sandboxes.
type StepRunner interface {
	// RunStep runs s to its end and, if it exited with 0, captures the disk
	// into s.LayerDir. An error means that the command could not be run or its
	// disk not be captured; a command that fails is no error. Nothing of the
	// sandbox is left when it returns, also when ctx ended.
	RunStep(ctx context.Context, s Step) (StepResult, error)
}

// Stage is what a build is doing.
type Stage string

// The stages.
const (
	StageResolve  Stage = "resolve"  // finding the image, base template or packages
	StageDownload Stage = "download" // Current and Total in bytes, or packages
	StageExtract  Stage = "extract"  // Current and Total in bytes, or packages
	StageInstall  Stage = "install"  // Current and Total in packages
	StageContext  Stage = "context"  // reading the build context; bytes
	StageStep     Stage = "step"     // a Dockerfile step begins: Current of Total, Message is the instruction
	StageCommit   Stage = "commit"   // hashing, syncing and recording the result
	StageLog      Stage = "log"      // Message is one line of a command's output
	StageWarning  Stage = "warning"  // Message is something the user should know
	StageDone     Stage = "done"     // Message is the template's name and id
)

// Event is one thing that a build tells of its progress.
type Event struct {
	Stage   Stage  `json:"stage"`
	Message string `json:"message,omitempty"`
	Current int64  `json:"current,omitempty"`
	Total   int64  `json:"total,omitempty"`  // 0: not known
	Unit    Unit   `json:"unit,omitempty"`   // of Current and Total
	Cached  bool   `json:"cached,omitempty"` // StageStep, told a second time: the step's result was taken from the cache
	Line    int    `json:"line,omitempty"`   // in the Dockerfile, 0 where none is meant
}

// Unit is what Event.Current counts.
type Unit string

// The units.
const (
	UnitBytes    Unit = "bytes"
	UnitPackages Unit = "packages"
	UnitSteps    Unit = "steps"
)

// Progress takes events. Calls come one at a time; a slow one slows the build,
// and it must not call the build's library. nil is allowed everywhere and
// drops them.
type Progress func(Event)
