package cli

import (
	"reflect"
	"testing"

	"github.com/warrenhq/warren/internal/template"
)

// What the default template is made of must arrive at the daemon: one that was
// left on the way was what its Node could not start without.
func TestBaseIsAskedForWhole(t *testing.T) {
	o := template.Base()
	o.Mirror, o.Variant = "http://mirror.example", "minbase"
	want, got := reflect.ValueOf(o), reflect.ValueOf(*debianOf(o))
	for i := range want.NumField() {
		f := want.Type().Field(i)
		if f.Name == "Target" { // the request's own name and resources
			continue
		}
		g := got.FieldByName(f.Name)
		if !g.IsValid() || !reflect.DeepEqual(g.Interface(), want.Field(i).Interface()) {
			t.Errorf("%s is not in the request", f.Name)
		}
	}
}
