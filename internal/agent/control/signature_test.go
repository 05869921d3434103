package control

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net/url"
	"strings"
	"testing"
)

func TestSignedFile(t *testing.T) {
	for _, tc := range []struct {
		query, operation, token string
		text                    string // what is hashed
		expiration              string
		err                     error
	}{
		{query: "path=/a", operation: OperationRead, token: "tok", text: "/a:read::tok"},
		{query: "path=/a%20b&username=root", operation: OperationWrite, token: "t", text: "/a b:write:root:t"},
		{query: "", operation: OperationRead, token: "", text: ":read::"},
		{query: "path=x&signature_expiration=1700000000", operation: OperationRead, token: "t", text: "x:read::t:1700000000", expiration: "1700000000"},
		{query: "path=x&signature_expiration=%2B017", operation: OperationRead, token: "t", text: "x:read::t:17", expiration: "17"},
		{query: "path=x&signature_expiration=-5", operation: OperationRead, token: "t", text: "x:read::t:-5", expiration: "-5"},
		{query: "path=x&signature_expiration=0", operation: OperationRead, token: "t", text: "x:read::t:0", expiration: "0"},
		{query: "path=x&path=y", operation: OperationRead, token: "t", text: "x:read::t"},
		{query: "path=x&signature_expiration=soon", operation: OperationRead, err: ErrExpiration},
		{query: "path=x&signature_expiration=99999999999999999999", operation: OperationRead, err: ErrExpiration},
	} {
		q, err := url.ParseQuery(tc.query)
		if err != nil {
			t.Fatal(err)
		}
		f, err := ParseSignedFile(q, tc.operation)
		if !errors.Is(err, tc.err) {
			t.Errorf("%s: %v", tc.query, err)
			continue
		}
		if err != nil {
			continue
		}
		sum := sha256.Sum256([]byte(tc.text))
		want := "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
		if got := f.Signature(tc.token); got != want || f.Expiration != tc.expiration {
			t.Errorf("%s: %s, expiration %q; want %s, %q", tc.query, got, f.Expiration, want, tc.expiration)
		}
		f.Given = want
		if got, ok := f.Sum(); !ok || got != sum {
			t.Errorf("%s: its own signature reads as %x, %v", tc.query, got, ok)
		}
	}
}

// The value was computed with sha256sum and base64.
func TestSignature(t *testing.T) {
	got, want := SignedFile{Path: "/a", Operation: OperationRead}.Signature("tok"), "v1_2/gNbgFPxFSqkheS/SD0NHlzA121E/nxkOtc/ovxeoI"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestSumOfHostileSignatures(t *testing.T) {
	good := SignedFile{Path: "/x"}.Signature("t")
	for what, s := range map[string]string{
		"none": "", "no prefix": good[3:], "another version": "v2_" + good[3:], "short": good[:45], "long": good + "A",
		"padded": good + "=", "not base64": "v1_" + strings.Repeat("*", 43), "URL alphabet": "v1_" + strings.Repeat("_", 43),
		"line ends": "v1_" + strings.Repeat("\n", 43), "line end within": good[:20] + "\n" + good[21:], "other bits at the end": good[:45] + "B",
		"NULs": "v1_" + strings.Repeat("\x00", 43),
	} {
		if sum, ok := (SignedFile{Given: s}).Sum(); ok {
			t.Errorf("%s: %q reads as %x", what, s, sum)
		}
	}
}

// Whatever the query: what is read of it signs as itself, and nothing but that
// signature reads as its hash.
func FuzzSignedFile(f *testing.F) {
	f.Add("path=/a&username=u&signature=v1_2%2FgNbgFPxFSqkheS%2FSD0NHlzA121E%2FnxkOtc%2FovxeoI&signature_expiration=12", "tok")
	f.Add("path=%zz;&signature=v1_", "")
	f.Fuzz(func(t *testing.T, query, token string) {
		q, _ := url.ParseQuery(query)
		s, err := ParseSignedFile(q, OperationRead)
		if err != nil {
			if !errors.Is(err, ErrExpiration) {
				t.Fatal(err)
			}
			return
		}
		want := s.Summer()(token)
		if sum, ok := s.Sum(); ok && sum == want != (s.Given == s.Signature(token)) {
			t.Fatalf("%q: the hash and the signature disagree", query)
		}
		s.Given = s.Signature(token)
		if sum, ok := s.Sum(); !ok || sum != want {
			t.Fatalf("%q: its own signature does not read", query)
		}
	})
}
