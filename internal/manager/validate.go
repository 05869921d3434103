package manager

import (
	"path"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/warrenhq/warren/internal/network"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Bounds of a create. They keep records small and a client's slip cheap; none
// is a limit of the kernel's, but maxEnvEntry: a program's single argument or
// environment string has at most 128 KiB (MAX_ARG_STRLEN, execve(2)).
const (
	maxName          = 255 // of templates, runtimes, users
	maxWorkdir       = 4096
	maxEnv           = 10_000
	maxEnvEntry      = 128<<10 - 1
	maxEnvTotal      = 1 << 20
	maxMetadata      = 256
	maxMetadataKey   = 256
	maxMetadataValue = 4096
	maxMetadataTotal = 64 << 10
	maxTimeout       = 365 * 24 * time.Hour
)

// hostnamePattern is RFC 1123's, in all at most 63 characters here, since
// Linux has at most 64 (sethostname(2)).
var hostnamePattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$`)

// hostHeaderPattern is a Host field with a name or an IPv4 address (RFC 9110,
// section 7.2).
var hostHeaderPattern = regexp.MustCompile(`^[A-Za-z0-9._-]+(:[0-9]{1,5})?$`)

// maxHostHeader is the longest name of a host (RFC 1035, section 2.3.4), and
// room for a port.
const maxHostHeader = 253 + len(":${PORT}")

func invalid(format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeInvalid, format, args...)
}

// validate checks all of r that needs no look at the host.
func (r CreateRequest) validate() error {
	for _, f := range []struct{ what, value string }{
		{"template", r.Template}, {"runtime", r.Runtime}, {"user", r.User},
	} {
		if len(f.value) > maxName {
			return invalid("the %s's name has %d bytes: at most %d", f.what, len(f.value), maxName)
		}
		if !clean(f.value) {
			return invalid("the %s's name %q has control characters or invalid UTF-8", f.what, f.value)
		}
	}
	switch {
	case len(r.Workdir) > maxWorkdir:
		return invalid("the working directory has %d bytes: at most %d", len(r.Workdir), maxWorkdir)
	case r.Workdir != "" && !path.IsAbs(r.Workdir):
		return invalid("the working directory %q is not absolute: begin it with /", r.Workdir)
	case strings.Contains(r.Workdir, "\x00"):
		return invalid("the working directory has a NUL byte")
	case r.HostHeader != "" && (len(r.HostHeader) > maxHostHeader || !hostHeaderPattern.MatchString(strings.ReplaceAll(r.HostHeader, "${PORT}", "65535"))):
		return invalid("%q cannot be shown as a request's Host: give a host name, and :PORT or :${PORT} if it is to have a port", short(r.HostHeader))
	case len(r.Hostname) > 63:
		return invalid("the hostname has %d bytes: at most 63", len(r.Hostname))
	case r.Hostname != "" && !hostnamePattern.MatchString(r.Hostname):
		return invalid("the hostname %q is not one: letters, digits, - and . between (RFC 1123)", r.Hostname)
	}
	if err := validateTimeout(r.Timeout); err != nil {
		return err
	}
	switch r.OnTimeout {
	case "", sandbox.OnTimeoutKill, sandbox.OnTimeoutHibernate:
	default:
		return invalid("%q cannot be done at the timeout: give %q or %q", short(string(r.OnTimeout)), sandbox.OnTimeoutKill, sandbox.OnTimeoutHibernate)
	}
	if err := validateKind(r.HibernateKind); err != nil {
		return err
	}
	if r.IdleTimeout != 0 && (r.IdleTimeout < minIdle || r.IdleTimeout > maxTimeout) {
		return invalid("the idle timeout is %v: give 0 (never), or %v to %v", r.IdleTimeout, minIdle, maxTimeout)
	}
	if r.Snapshot != "" && (r.Template != "" || r.InlineLayers != nil) {
		return invalid("both a snapshot and a template are given: a sandbox starts from one of them")
	}
	for _, k := range r.EphemeralEnv {
		if _, ok := r.Env[k]; !ok {
			return invalid("the ephemeral variable %q is not among the environment: give its value there", short(k))
		}
	}
	if err := validateEnv(r.Env); err != nil {
		return err
	}
	if err := validateMetadata(r.Metadata); err != nil {
		return err
	}
	return network.Validate(r.Network)
}

func validateTimeout(d time.Duration) error {
	if d < 0 || d > maxTimeout {
		return invalid("the timeout is %v: give 0 (never) to %v", d, maxTimeout)
	}
	return nil
}

// validateEnv never shows a value: values are secrets.
func validateEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return invalid("%d environment variables: at most %d; put large settings into a file", len(env), maxEnv)
	}
	total := 0
	for k, v := range env {
		switch {
		case k == "":
			return invalid("an environment variable has no name")
		case strings.ContainsAny(k, "=\x00"):
			return invalid("the environment variable name %q has a = or a NUL byte", short(k))
		case strings.Contains(v, "\x00"):
			return invalid("the value of environment variable %q has a NUL byte", short(k))
		case len(k)+1+len(v) > maxEnvEntry:
			return invalid("environment variable %q has %d bytes with its name: at most %d; put it into a file", short(k), len(k)+1+len(v), maxEnvEntry)
		}
		total += len(k) + len(v) + 2
	}
	if total > maxEnvTotal {
		return invalid("the environment has %d bytes: at most %d; put large settings into a file", total, maxEnvTotal)
	}
	return nil
}

func validateMetadata(meta map[string]string) error {
	if len(meta) > maxMetadata {
		return invalid("%d metadata entries: at most %d", len(meta), maxMetadata)
	}
	total := 0
	for k, v := range meta {
		switch {
		case k == "" || len(k) > maxMetadataKey:
			return invalid("the metadata key %q has %d bytes: give 1 to %d", short(k), len(k), maxMetadataKey)
		case len(v) > maxMetadataValue:
			return invalid("the metadata value of %q has %d bytes: at most %d", short(k), len(v), maxMetadataValue)
		case !utf8.ValidString(k) || !utf8.ValidString(v):
			return invalid("the metadata entry %q is not valid UTF-8", short(k))
		}
		total += len(k) + len(v)
	}
	if total > maxMetadataTotal {
		return invalid("the metadata has %d bytes: at most %d", total, maxMetadataTotal)
	}
	return nil
}

func clean(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f })
}

func short(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}
