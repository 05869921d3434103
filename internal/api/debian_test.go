package api

import (
	"reflect"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
)

// Every field of a Debian build gets to the builder.
func TestDebianBuildIsWhole(t *testing.T) {
	d := wire.BuildDebian{
		Suite: "s", Packages: []string{"p"}, Mirror: "m", User: "u", Env: map[string]string{"a": "b"},
		Slim: []string{"x"}, Prune: []string{"y"}, Variant: "minbase", Reseed: true, Interpreter: true,
	}
	b, err := toBuild(wire.BuildTemplate{Name: "n", Debian: &d}, nil, "t", true)
	if err != nil {
		t.Fatal(err)
	}
	got, want := reflect.ValueOf(*b.Debian), reflect.ValueOf(d)
	for i := range want.NumField() {
		name := want.Type().Field(i).Name
		if want.Field(i).IsZero() {
			t.Errorf("the test does not set %s", name)
		}
		if g := got.FieldByName(name); !g.IsValid() || !reflect.DeepEqual(g.Interface(), want.Field(i).Interface()) {
			t.Errorf("%s is lost", name)
		}
	}
}
