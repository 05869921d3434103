package wire

// RunCode asks the code interpreter to run code.
type RunCode struct {
	Code      string            `json:"code" maxLength:"33554432"`
	ContextID string            `json:"context_id,omitempty" maxLength:"64" doc:"The context to run it in; default: the language's own, which every such call shares"`
	Language  string            `json:"language,omitempty" maxLength:"64" doc:"python (the default), javascript, typescript, bash, or another whose kernel is installed; not together with context_id"`
	EnvVars   map[string]string `json:"env_vars,omitempty" doc:"Environment for this execution alone"`
}

// The types of CodeEvent.
const (
	CodeStdout        = "stdout"
	CodeStderr        = "stderr"
	CodeResult        = "result"
	CodeError         = "error"
	CodeCount         = "number_of_executions"
	CodeEnd           = "end_of_execution"
	CodeUnexpectedEnd = "unexpected_end_of_execution" // the kernel died
)

// CodeEvent is one line of the code interpreter's answer. PNG, JPEG and PDF are
// base64.
type CodeEvent struct {
	Type           string         `json:"type"`
	Text           string         `json:"text,omitempty"`
	ExecutionCount int            `json:"execution_count,omitempty"`
	Name           string         `json:"name,omitempty"`
	Value          string         `json:"value,omitempty"`
	Traceback      string         `json:"traceback,omitempty"`
	HTML           string         `json:"html,omitempty"`
	Markdown       string         `json:"markdown,omitempty"`
	SVG            string         `json:"svg,omitempty"`
	PNG            string         `json:"png,omitempty"`
	JPEG           string         `json:"jpeg,omitempty"`
	PDF            string         `json:"pdf,omitempty"`
	LaTeX          string         `json:"latex,omitempty"`
	JavaScript     string         `json:"javascript,omitempty"`
	JSON           any            `json:"json,omitempty"`
	Data           any            `json:"data,omitempty"`
	Chart          any            `json:"chart,omitempty"`
	Extra          map[string]any `json:"extra,omitempty"`
	IsMainResult   bool           `json:"is_main_result,omitempty"`
}
