package api

import (
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/sandbox"
)

func idParam() *huma.Param {
	return &huma.Param{Name: "id", In: "path", Required: true, Description: "The sandbox's id", Schema: &huma.Schema{Type: huma.TypeString}}
}

func pathParam(name, description string) *huma.Param {
	return &huma.Param{Name: name, In: "path", Required: true, Description: description, Schema: &huma.Schema{Type: huma.TypeString}}
}

func queryParam(name, kind, description string, required bool) *huma.Param {
	return &huma.Param{Name: name, In: "query", Required: required, Description: description, Schema: &huma.Schema{Type: kind}}
}

func bytesResponse(status, contentType, description string) map[string]*huma.Response {
	return map[string]*huma.Response{status: {
		Description: description,
		Content:     map[string]*huma.MediaType{contentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
	}}
}

func bytesBody(contentType, description string) *huma.RequestBody {
	return &huma.RequestBody{
		Description: description, Required: true,
		Content: map[string]*huma.MediaType{contentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
	}
}

func boolQuery(r *http.Request, name string) (bool, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return false, nil
	}
	v, err := strconv.ParseBool(s)
	if err != nil {
		return false, sandbox.Errorf(sandbox.CodeInvalid, "%s is %q: give true or false", name, s)
	}
	return v, nil
}
