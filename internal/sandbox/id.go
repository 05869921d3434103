package sandbox

import (
	"crypto/rand"
	"encoding/base32"
	"regexp"
	"strings"
)

// ID names one sandbox. It is 20 characters of [a-z0-9] that begin with a
// letter, so that it can stand in a DNS label (`<port>-<id>.<domain>`), in a
// path and in a cgroup name without escaping. It is unguessable (85 random
// bits) but it is not a secret: access needs a key or a token besides.
type ID string

var (
	idEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)
	idPattern  = regexp.MustCompile(`^[a-z][a-z0-9]{1,30}$`)
)

// NewID makes a fresh random ID.
func NewID() ID { return ID(RandomID("sbx")) }

// RandomID makes a fresh random name of something: prefix and 17 digits of 5
// random bits each.
func RandomID(prefix string) string {
	var b [12]byte
	rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return prefix + idEncoding.EncodeToString(b[:])[:17]
}

// ParseID checks that s has an ID's form. It says nothing of whether such a
// sandbox exists. The error has CodeInvalid.
func ParseID(s string) (ID, error) {
	if !idPattern.MatchString(s) {
		shown := s
		if len(shown) > 64 {
			shown = shown[:64] + "…"
		}
		return "", Errorf(CodeInvalid, "%q is not a sandbox id: expected up to 31 of a-z and 0-9, beginning with a letter", strings.ToValidUTF8(shown, "?"))
	}
	return ID(s), nil
}

func (id ID) String() string { return string(id) }
