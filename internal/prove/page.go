package prove

import (
	_ "embed"
	"encoding/json"
	"html/template"
	"io"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Parse(pageText))

// Writer writes a report in one form.
type Writer func(w io.Writer, r *Report) error

// JSON writes a report as it is kept.
func JSON(w io.Writer, r *Report) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// HTML writes a report as one page that needs nothing else; the raw report is
// in it.
func HTML(w io.Writer, r *Report) error {
	raw, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return page.Execute(w, map[string]any{"Head": Head(r), "Tables": Tables(r), "Raw": string(raw)})
}
