package container

import (
	"context"
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/warrenhq/warren/internal/idmap"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// bundle writes a sandbox's config.json.
func (d *Driver) bundle(ctx context.Context, s sandbox.Spec, ids idmap.Range, cpus []int, stage *oci.Stage) error {
	g, err := d.eng.Cgroup(s.ID)
	if err != nil {
		return err
	}
	spec, err := oci.NewSpec(s, g, cpus, stage, d.cfg.AgentPath)
	if err != nil {
		return err
	}
	m := []specs.LinuxIDMapping{{ContainerID: 0, HostID: ids.Base, Size: idmap.Size}}
	spec.Linux.UIDMappings, spec.Linux.GIDMappings = m, m
	spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	spec.Mounts = append(spec.Mounts, specs.Mount{
		Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"},
	})
	if err := d.addSys(ctx, spec, g, stage); err != nil {
		return err
	}
	if err := oci.AddVolumes(spec, s, stage); err != nil {
		return err
	}
	if err := oci.AddSeccomp(spec); err != nil {
		return err
	}
	if d.isCrun() {
		d.filter.annotate(spec)
	}
	return d.eng.WriteBundle(s.ID, spec)
}

// addSys gives /sys and the files of /proc that tell limits. The real sysfs is
// the host's, and cannot be mounted by a user namespace which does not own its
// network namespace; so /sys is an empty read-only directory with the parts
// that programs need to see: the CPUs, and the sandbox's own control group.
func (d *Driver) addSys(ctx context.Context, spec *specs.Spec, g *oci.Cgroup, stage *oci.Stage) error {
	ro := []string{"rbind", "ro", "nosuid", "nodev", "noexec"}
	sys := stage.Dir("sys")
	stage.Dir("sys/devices/system/cpu")
	stage.Dir("sys/fs/cgroup")
	stage.Dir("sys/class/net")
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/sys", Type: "bind", Source: sys, Options: ro})
	g.AddMounts(spec)

	cpu := "/" + cpuDir
	if paths := d.lxcfs.start(ctx); paths != nil {
		for _, name := range lxcfsFiles {
			src, err := stage.Bind(paths["proc/"+name], "proc/"+name)
			if err != nil {
				return fmt.Errorf("lxcfs: %w", err)
			}
			spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/proc/" + name, Type: "bind", Source: src, Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"}})
		}
		cpu = paths[cpuDir]
	}
	src, err := stage.Bind(cpu, "cpu")
	if err != nil {
		return err
	}
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/sys/devices/system/cpu", Type: "bind", Source: src, Options: ro})
	return nil
}
