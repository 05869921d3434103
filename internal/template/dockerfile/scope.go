package dockerfile

import (
	"maps"
	"runtime"
	"slices"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/warrenhq/warren/internal/template/layer"
)

// Env is a set of variables for expansion.
type Env map[string]string

// Get gives a variable.
func (e Env) Get(k string) (string, bool) { v, ok := e[k]; return v, ok }

// Keys lists the names.
func (e Env) Keys() []string { return slices.Sorted(maps.Keys(e)) }

// predefined are the arguments that a build may give without an ARG, and that
// do not count for the cache. Source: docs.docker.com, Dockerfile reference,
// "Predefined ARGs".
var predefined = map[string]bool{
	"HTTP_PROXY": true, "http_proxy": true, "HTTPS_PROXY": true, "https_proxy": true,
	"FTP_PROXY": true, "ftp_proxy": true, "NO_PROXY": true, "no_proxy": true, "ALL_PROXY": true, "all_proxy": true,
}

// Predefined tells whether name is an argument that needs no ARG.
func Predefined(name string) bool { return predefined[name] }

// automatic are the arguments that every build has in the global scope.
// Source: Dockerfile reference, "Automatic platform ARGs in the global scope".
func automatic(target string) map[string]string {
	if target == "" {
		target = "default"
	}
	m := map[string]string{"TARGETSTAGE": target}
	for _, p := range []string{"TARGET", "BUILD"} {
		m[p+"PLATFORM"] = Platform()
		m[p+"OS"] = "linux"
		m[p+"ARCH"] = runtime.GOARCH
		m[p+"VARIANT"] = ""
	}
	return m
}

// expandMeta works out the ARGs before the first FROM.
func (f *File) expandMeta(into map[string]string, args map[string]string) error {
	maps.Copy(into, automatic(""))
	for k := range into {
		if v, ok := args[k]; ok {
			into[k] = v
		}
	}
	lex := f.Lex()
	for _, cmd := range f.meta {
		for _, a := range cmd.Args {
			if v, ok := args[a.Key]; ok {
				into[a.Key] = v
				continue
			}
			if a.Value == nil {
				continue
			}
			v, _, err := lex.ProcessWord(*a.Value, Env(into))
			if err != nil {
				return Errorf(Line(&cmd), "ARG %s: %v", layer.Quote(a.Key), err)
			}
			into[a.Key] = v
		}
	}
	return nil
}

// Scope is the variables of one stage while its instructions are gone
// through. ENV goes before ARG of the same name.
type Scope struct {
	Env         map[string]string // the image's
	args        map[string]string // declared by ARG, with a value
	given, meta map[string]string
	used        map[string]bool // build arguments that an ARG declared
}

// NewScope begins a stage that starts from env. given are the build's
// arguments, meta the global scope's, used collects the names of given ones
// that are declared.
func NewScope(env, given, meta map[string]string, used map[string]bool) *Scope {
	s := &Scope{Env: map[string]string{}, args: map[string]string{}, given: given, meta: meta, used: used}
	maps.Copy(s.Env, env)
	return s
}

// Variables are what words expand with: arguments, and the environment over
// them.
func (s *Scope) Variables() Env {
	e := Env{}
	maps.Copy(e, s.args)
	maps.Copy(e, s.Env)
	return e
}

// RunEnv is a RUN step's environment; cached is the part of it that counts
// for the cache.
func (s *Scope) RunEnv() (env, cached map[string]string) {
	cached = map[string]string(s.Variables())
	env = maps.Clone(cached)
	for k, v := range s.given {
		if _, ok := env[k]; !ok && predefined[k] {
			env[k] = v
		}
	}
	return env, cached
}

// Declare does an ARG instruction, whose values are expanded already.
func (s *Scope) Declare(c *instructions.ArgCommand) {
	for _, a := range c.Args {
		s.used[a.Key] = true
		if v, ok := s.given[a.Key]; ok {
			s.args[a.Key] = v
		} else if a.Value != nil {
			s.args[a.Key] = *a.Value
		} else if v, ok := s.meta[a.Key]; ok {
			s.args[a.Key] = v
		}
	}
}

// MetaDeclares tells whether an ARG before the first FROM declares name.
func (f *File) MetaDeclares(name string) bool {
	for _, cmd := range f.meta {
		for _, a := range cmd.Args {
			if a.Key == name {
				return true
			}
		}
	}
	return false
}
