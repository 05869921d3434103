package wire

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/danielgtaylor/huma/v2"
)

// Command is what to run: argv, or one string for /bin/sh -c.
type Command struct {
	Argv  []string
	Shell string // set where the JSON was one string
}

// Args gives the argv to run.
func (c Command) Args() []string {
	if c.Shell != "" {
		return []string{"/bin/sh", "-c", c.Shell}
	}
	return c.Argv
}

// MarshalJSON writes the form that c was made in.
func (c Command) MarshalJSON() ([]byte, error) {
	if c.Shell != "" {
		return json.Marshal(c.Shell)
	}
	return json.Marshal(c.Argv)
}

// UnmarshalJSON reads either form.
func (c *Command) UnmarshalJSON(data []byte) error {
	*c = Command{}
	data = bytes.TrimSpace(data)
	if len(data) > 0 && data[0] == '"' {
		return json.Unmarshal(data, &c.Shell)
	}
	if err := json.Unmarshal(data, &c.Argv); err != nil {
		return errors.New("cmd is neither a list of strings (the program and its arguments) nor one string (a command line)")
	}
	return nil
}

// Schema describes both forms. They are an extension of the schema to huma,
// whose own message on a oneOf tells nobody what to write: UnmarshalJSON's does.
func (Command) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Extensions: map[string]any{"oneOf": []any{
		map[string]any{"type": "array", "items": map[string]any{"type": "string"}, "minItems": 1, "description": "The program and its arguments, run as they are"},
		map[string]any{"type": "string", "minLength": 1, "description": "A command line for /bin/sh -c"},
	}}}
}

// Exec asks to run a command to its end and to collect what it writes.
type Exec struct {
	Cmd         Command           `json:"cmd" doc:"argv, or a command line for /bin/sh -c"`
	Env         map[string]string `json:"env,omitempty"`
	Cwd         string            `json:"cwd,omitempty" maxLength:"4096"`
	User        string            `json:"user,omitempty" maxLength:"256"`
	Stdin       string            `json:"stdin,omitempty" doc:"Text for its standard input"`
	StdinBase64 []byte            `json:"stdin_base64,omitempty" doc:"Bytes for its standard input, in place of stdin"`
	Timeout     float64           `json:"timeout,omitempty" minimum:"0" maximum:"86400" doc:"Seconds, after which it is killed; 0 or absent: none"`
	MaxOutput   int64             `json:"max_output,omitempty" minimum:"0" maximum:"67108864" doc:"Bytes to keep of each of stdout and stderr; default 1 MiB. The rest is read and dropped"`
}

// ExecResult is how a command ended and what it wrote. Of each stream, either
// the text is set (it is valid UTF-8) or the base64 form.
type ExecResult struct {
	ExitCode     int     `json:"exit_code" doc:"128+n where signal n ended it"`
	Stdout       *string `json:"stdout,omitempty"`
	StdoutBase64 []byte  `json:"stdout_base64,omitempty" doc:"In place of stdout where that is not UTF-8"`
	Stderr       *string `json:"stderr,omitempty"`
	StderrBase64 []byte  `json:"stderr_base64,omitempty" doc:"In place of stderr where that is not UTF-8"`
	Truncated    bool    `json:"truncated,omitempty" doc:"It wrote more than max_output"`
	Signal       string  `json:"signal,omitempty" doc:"The signal that ended it" example:"SIGKILL"`
	TimedOut     bool    `json:"timed_out,omitempty" doc:"It was killed because its timeout ran out"`
	OOM          bool    `json:"oom,omitempty" doc:"The kernel ended a process of the sandbox at its memory limit while it ran"`
	DurationMS   float64 `json:"duration_ms"`
}

// OutBytes gives what the command wrote to stdout, whichever form it came in.
func (r ExecResult) OutBytes() []byte { return textOr(r.Stdout, r.StdoutBase64) }

// ErrBytes gives what the command wrote to stderr.
func (r ExecResult) ErrBytes() []byte { return textOr(r.Stderr, r.StderrBase64) }

func textOr(s *string, b []byte) []byte {
	if s != nil {
		return []byte(*s)
	}
	return b
}
