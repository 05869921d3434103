package control

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"hash"
	"net/url"
	"strconv"
	"strings"
)

// The operations that the URL of a file is signed for.
const (
	OperationRead  = "read"
	OperationWrite = "write"
)

// signaturePrefix is the version of the signatures that E2B's SDKs make.
const signaturePrefix = "v1_"

// What a refused one is told; E2B's words, which its clients' tests compare.
const (
	InvalidSignature = "invalid signature"
	ExpiredSignature = "signature is already expired"
)

// SignedFile is what the signed URL of a file tells.
//
// The signature is "v1_" and the unpadded base64 of the SHA-256 of
//
//	path:operation:user:token[:expiration]
//
// where user is "" for the default, token is the access token of the sandbox's
// agent, and expiration is in Unix seconds, absent for none.
type SignedFile struct {
	Path, Operation, User string
	Expiration            string // decimal, in its shortest form; "" is none
	Until                 int64  // Expiration as a number
	Given                 string // the signature that the URL carries
}

// ErrExpiration tells of a signature_expiration that is not a number.
var ErrExpiration = errors.New("signature_expiration is not a number of seconds")

// ParseSignedFile reads the query of a signed URL. The error is ErrExpiration.
func ParseSignedFile(q url.Values, operation string) (SignedFile, error) {
	f := SignedFile{Path: q.Get("path"), Operation: operation, User: q.Get("username"), Given: q.Get("signature")}
	if s := q.Get("signature_expiration"); s != "" {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return SignedFile{}, ErrExpiration
		}
		// As the signer wrote it.
		f.Until, f.Expiration = n, strconv.FormatInt(n, 10)
	}
	return f, nil
}

// Expired tells whether the URL is not good any more at a Unix time.
func (f SignedFile) Expired(now int64) bool { return f.Expiration != "" && f.Until < now }

// Signature makes the signature by a token.
func (f SignedFile) Signature(token string) string {
	sum := f.Summer()(token)
	return signaturePrefix + base64.RawStdEncoding.EncodeToString(sum[:])
}

// Summer gives what a signature is the base64 of, for one token after another:
// what does not depend on the token is hashed once. It is not safe for
// concurrent use.
func (f SignedFile) Summer() func(token string) [sha256.Size]byte {
	common := sha256.New()
	common.Write([]byte(f.Path + ":" + f.Operation + ":" + f.User + ":"))
	suffix := ""
	if f.Expiration != "" {
		suffix = ":" + f.Expiration
	}
	return func(token string) (sum [sha256.Size]byte) {
		h, err := common.(hash.Cloner).Clone()
		if err != nil {
			panic("control: SHA-256 cannot be cloned: " + err.Error()) // it can
		}
		h.Write([]byte(token + suffix))
		h.Sum(sum[:0])
		return sum
	}
}

// Sum decodes the signature that the URL carries; ok is false where it has not
// the form of one.
func (f SignedFile) Sum() (sum [sha256.Size]byte, ok bool) {
	text, ok := strings.CutPrefix(f.Given, signaturePrefix)
	// The length goes first: base64 passes over line ends.
	if !ok || len(text) != base64.RawStdEncoding.EncodedLen(sha256.Size) {
		return sum, false
	}
	data, err := base64.RawStdEncoding.Strict().DecodeString(text)
	if err != nil || len(data) != len(sum) {
		return sum, false
	}
	return [sha256.Size]byte(data), true
}
