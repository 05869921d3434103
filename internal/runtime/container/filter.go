package container

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"sync/atomic"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// filter spares crun the compiling of the system call filter, which takes it
// 15 ms: more than all the rest of a start. The profile is the same for every
// container, so the first one's compiled filter, which crun keeps in its state,
// is given to the later ones as crun's annotation for that. The profile stays
// in the bundle too, for a crun that does not know the annotation.
type filter struct{ compiled atomic.Pointer[string] }

// crunFilter is crun's annotation, its value a filter in base64 (crun(1)).
const crunFilter = "run.oci.seccomp_bpf_data"

// The size of one instruction of a filter, struct sock_filter, and the most
// instructions that the kernel takes, BPF_MAXINSNS (linux/filter.h).
const (
	instruction     = 8
	maxInstructions = 4096
)

// learn takes the filter of a running container whose crun state is in dir.
// Anything odd about it is not an error: the next start compiles again.
func (f *filter) learn(dir string) {
	if f.compiled.Load() != nil {
		return
	}
	data, err := os.ReadFile(filepath.Join(dir, "seccomp.bpf"))
	if err != nil || len(data) == 0 || len(data)%instruction != 0 || len(data) > maxInstructions*instruction {
		return
	}
	text := base64.StdEncoding.EncodeToString(data)
	f.compiled.Store(&text)
}

func (f *filter) annotate(spec *specs.Spec) {
	text := f.compiled.Load()
	if text == nil {
		return
	}
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[crunFilter] = *text
}
