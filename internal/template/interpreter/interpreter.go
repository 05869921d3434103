// Package interpreter holds the code interpreter: a service on port 49999 that
// runs code in Jupyter kernels, and what installs it into a root filesystem.
package interpreter

import (
	"embed"
	"encoding/json"
	"io/fs"
	"os"
	"path"
)

//go:embed files
var files embed.FS

// Port is where the service listens in a sandbox.
const Port = 49999

// Dir is where the service lies in a sandbox.
const Dir = "/usr/lib/warren/interpreter"

// The commands of a template with the service.
const (
	StartCmd = "exec python3 " + Dir + "/server.py"
	ReadyCmd = "curl -fsS -o /dev/null http://127.0.0.1:49999/health"
)

// Packages are the Debian packages that the service needs besides Python,
// Node.js, bash and curl. esbuild takes the types out of TypeScript.
var Packages = []string{"python3-ipykernel", "python3-jupyter-client", "python3-aiohttp", "esbuild"}

// kernels are the specifications of Jupyter kernels, see jupyter_client's
// documentation ("Making kernels for Jupyter").
var kernels = []struct{ name, title, language, file, arg string }{
	{"warren-python", "Python", "python", "python_kernel.py", ""},
	{"warren-javascript", "JavaScript", "javascript", "pipe_kernel.py", "javascript"},
	{"warren-typescript", "TypeScript", "typescript", "pipe_kernel.py", "typescript"},
	{"warren-bash", "bash", "bash", "pipe_kernel.py", "bash"},
}

// Install puts the service and its kernels into the root filesystem.
func Install(root *os.Root) error {
	rel := Dir[1:]
	if err := root.MkdirAll(rel, 0o755); err != nil {
		return err
	}
	names, err := fs.ReadDir(files, "files")
	if err != nil {
		return err
	}
	for _, e := range names {
		data, err := files.ReadFile("files/" + e.Name())
		if err != nil {
			return err
		}
		if err := root.WriteFile(path.Join(rel, e.Name()), data, 0o644); err != nil {
			return err
		}
	}
	for _, k := range kernels {
		argv := []string{"python3", path.Join(Dir, k.file)}
		if k.arg != "" {
			argv = append(argv, k.arg)
		}
		spec, err := json.MarshalIndent(map[string]any{
			"argv": append(argv, "-f", "{connection_file}"), "display_name": k.title, "language": k.language,
		}, "", " ")
		if err != nil {
			return err
		}
		dir := path.Join("usr/share/jupyter/kernels", k.name)
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := root.WriteFile(path.Join(dir, "kernel.json"), spec, 0o644); err != nil {
			return err
		}
	}
	return nil
}
