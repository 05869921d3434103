package wire

import "time"

// Template is one immutable root filesystem with its defaults.
type Template struct {
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Shared    bool            `json:"shared,omitempty" doc:"Every tenant may use it"`
	Source    string          `json:"source,omitempty" doc:"What it was made of" example:"debian:bookworm"`
	SizeBytes int64           `json:"size_bytes" doc:"File content in its layers; layers that it shares count in full"`
	CreatedAt time.Time       `json:"created_at"`
	Layers    []string        `json:"layers,omitempty" doc:"Digests, topmost first"`
	Resources ResourceRequest `json:"resources,omitzero" doc:"Defaults of its own; absent: the platform's"`
	Config    TemplateConfig  `json:"config"`
}

// TemplateConfig is what a sandbox of the template starts with.
type TemplateConfig struct {
	Env          map[string]string `json:"env,omitempty"`
	User         string            `json:"user,omitempty"`
	Workdir      string            `json:"workdir,omitempty"`
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	StartCmd     string            `json:"start_cmd,omitempty"`
	ReadyCmd     string            `json:"ready_cmd,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"`
	HasShell     bool              `json:"has_shell" doc:"/bin/sh is there"`
}

// TemplateList is the templates that the tenant may use.
type TemplateList struct {
	Templates []Template `json:"templates"`
}

// BuildTemplate asks for a new template. Exactly one of debian, import and
// dockerfile is set.
type BuildTemplate struct {
	Name      string          `json:"name" minLength:"1" maxLength:"128" doc:"The template of this name is replaced once the build is whole"`
	Shared    bool            `json:"shared,omitempty" doc:"Every tenant may use it; only for the tenant default"`
	Resources ResourceRequest `json:"resources,omitzero" doc:"Defaults of its sandboxes"`
	StartCmd  string          `json:"start_cmd,omitempty" doc:"Run by a shell when a sandbox starts"`
	ReadyCmd  string          `json:"ready_cmd,omitempty" doc:"Run by a shell until it exits with 0: the sandbox is ready"`

	Debian     *BuildDebian     `json:"debian,omitempty"`
	Import     *BuildImport     `json:"import,omitempty"`
	Dockerfile *BuildDockerfile `json:"dockerfile,omitempty"`
}

// BuildDebian makes a template of Debian packages.
type BuildDebian struct {
	Suite       string            `json:"suite,omitempty" example:"bookworm"`
	Packages    []string          `json:"packages,omitempty"`
	Mirror      string            `json:"mirror,omitempty" doc:"http(s) URL; default: the host's own apt sources for the suite"`
	User        string            `json:"user,omitempty" doc:"A login user to make, with uid 1000"`
	Env         map[string]string `json:"env,omitempty"`
	Slim        []string          `json:"slim,omitempty" doc:"Path patterns that packages do not get to unpack; default: documentation, man pages and translations"`
	Prune       []string          `json:"prune,omitempty" doc:"Path patterns to remove when all is installed"`
	Variant     string            `json:"variant,omitempty" enum:"minbase,essential,apt,custom"`
	Reseed      bool              `json:"reseed,omitempty" doc:"Install what makes the random numbers of Python, Node.js and OpenSSL differ between forks"`
	Interpreter bool              `json:"interpreter,omitempty" doc:"Install the code interpreter, which runs code in Jupyter kernels on port 49999; its packages have to be among packages"`
}

// BuildImport makes a template of an OCI image.
type BuildImport struct {
	Ref      string `json:"ref" minLength:"1" maxLength:"1024" doc:"A registry reference; docker-archive:FILE for an archive that the request carries; on the unix socket also oci:DIR and docker-archive:FILE of the daemon's host"`
	Insecure bool   `json:"insecure,omitempty" doc:"Plain HTTP and unverified TLS to the registry"`
}

// BuildDockerfile makes a template by running a Dockerfile. Its context is the
// request's "context" part: a tar archive, plain, gzip or zstd.
type BuildDockerfile struct {
	Dockerfile string            `json:"dockerfile,omitempty" doc:"Its path in the context; default: Dockerfile"`
	Content    string            `json:"content,omitempty" maxLength:"1048576" doc:"The Dockerfile itself, where it is not in the context"`
	BuildArgs  map[string]string `json:"build_args,omitempty"`
	Stage      string            `json:"stage,omitempty" doc:"The stage to build; default: the last"`
	NoCache    bool              `json:"no_cache,omitempty"`
	Insecure   bool              `json:"insecure,omitempty"`
}

// BuildEvent is one line of a build's answer. The last line has template or
// error set.
type BuildEvent struct {
	Stage    string    `json:"stage,omitempty"`
	Message  string    `json:"message,omitempty"`
	Current  int64     `json:"current,omitempty"`
	Total    int64     `json:"total,omitempty" doc:"Absent: not known"`
	Unit     string    `json:"unit,omitempty" doc:"Of current and total: bytes, packages or steps"`
	Cached   bool      `json:"cached,omitempty"`
	Line     int       `json:"line,omitempty" doc:"In the Dockerfile"`
	Template *Template `json:"template,omitempty"`
	Error    *Error    `json:"error,omitempty"`
}
