package census

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestUnexplainedAndMissing(t *testing.T) {
	const one, two sandbox.ID = "sbx00000000000000001", "sbx00000000000000002"
	live := map[sandbox.ID]int{one: 5}
	items := []Item{
		{Kind: Process, Name: "1", ID: one},
		{Kind: Process, Name: "2", ID: two},
		{Kind: Process, Name: "lxcfs", Shared: true},
		{Kind: Link, Name: "a", Slot: 5},
		{Kind: Link, Name: "b", Slot: 6},
		{Kind: Dir, Name: "tmp/x"},
	}
	names := func(items []Item) (all []string) {
		for _, i := range items {
			all = append(all, i.Name)
		}
		return all
	}
	if d := cmp.Diff([]string{"2", "b", "tmp/x"}, names(Unexplained(items, live, false))); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"1", "2", "lxcfs", "a", "b", "tmp/x"}, names(Unexplained(items, nil, false))); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"1", "2", "a", "b", "tmp/x"}, names(Unexplained(items, nil, true))); d != "" {
		t.Error(d)
	}
	want := []string{string(one) + " has no cgroup", string(one) + " has no dir", string(one) + " has no netns", string(one) + " has no nft", string(one) + " has no runtime"}
	if d := cmp.Diff(want, Missing(items, live)); d != "" {
		t.Error(d)
	}
}

func TestNames(t *testing.T) {
	const id = "sbx0123456789abcdefg"
	for name, want := range map[string]sandbox.ID{
		id: id, "runsc-" + id + "_sandbox:" + id + ".state": id, "." + id + ".lock": id, id + "x": "", "sbx": "", "x" + id: "",
	} {
		if got := idOfState(name); got != want {
			t.Errorf("idOfState(%q) is %q", name, got)
		}
	}
	if got := idIn("10:memory:/warren-01234567/" + id + "/agent"); got != id {
		t.Errorf("idIn of a cgroup is %q", got)
	}
}

func TestTakeOfNothing(t *testing.T) {
	items, err := Take(Where{Instance: "ffffffff", State: t.TempDir(), RunDir: "/run/warren/ffffffff"})
	if err != nil {
		t.Skipf("needs to read the host's nftables and links: %v", err)
	}
	if len(items) > 0 {
		t.Errorf("an instance that never was has %v", items)
	}
}
