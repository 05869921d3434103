package ociimage

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// registry reads from one repository of a registry.
type registry struct {
	repo   name.Repository
	puller *remote.Puller
	// The manifest that the reference itself leads to is had already.
	first       []byte
	firstDigest string
}

// Options say how an image is found.
type Options struct {
	Insecure bool // plain HTTP, or unverified TLS, to the registry
	// Username and Password log in to the registry; without them credentials
	// come from the docker configuration of the user that this process runs as.
	Username, Password string
}

// FromRegistry finds an image in its registry.
func FromRegistry(ctx context.Context, ref Ref, o Options) (*Image, error) {
	var nameOptions []name.Option
	transportOf := remote.DefaultTransport
	if o.Insecure {
		nameOptions = append(nameOptions, name.Insecure)
		t := remote.DefaultTransport.(*http.Transport).Clone()
		t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // asked for by name
		transportOf = t
	}
	r, err := name.ParseReference(ref.Name, nameOptions...)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s is not an image reference", layer.Quote(ref.Name))
	}
	auth := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	if o.Username != "" || o.Password != "" {
		auth = remote.WithAuth(&authn.Basic{Username: o.Username, Password: o.Password})
	}
	puller, err := remote.NewPuller(auth, remote.WithTransport(transportOf), remote.WithUserAgent("warren"))
	if err != nil {
		return nil, registryError(ctx, ref.Name, err)
	}
	d, err := puller.Get(ctx, r)
	if err != nil {
		return nil, registryError(ctx, ref.Name, err)
	}
	b := &registry{repo: r.Context(), puller: puller, first: d.Manifest, firstDigest: d.Digest.String()}
	return resolve(ctx, b, b.firstDigest, r.Context().Name(), 0)
}

func (b *registry) manifest(ctx context.Context, digest string) (io.ReadCloser, error) {
	if digest == b.firstDigest {
		return io.NopCloser(bytes.NewReader(b.first)), nil
	}
	ref := b.repo.Digest(digest)
	d, err := b.puller.Get(ctx, ref)
	if err != nil {
		return nil, registryError(ctx, ref.Name(), err)
	}
	return io.NopCloser(bytes.NewReader(d.Manifest)), nil
}

func (b *registry) blob(ctx context.Context, digest string) (io.ReadCloser, error) {
	ref := b.repo.Digest(digest)
	l, err := b.puller.Layer(ctx, ref)
	if err != nil {
		return nil, registryError(ctx, ref.Name(), err)
	}
	r, err := l.Compressed()
	if err != nil {
		return nil, registryError(ctx, ref.Name(), err)
	}
	return r, nil
}

func registryError(ctx context.Context, ref string, err error) error {
	if ctx.Err() != nil {
		return layer.Error("pull "+layer.Quote(ref), ctx.Err())
	}
	var te *transport.Error
	if errors.As(err, &te) {
		switch te.StatusCode {
		case http.StatusNotFound:
			return sandbox.Errorf(sandbox.CodeNotFound, "the registry has no image %s: check its name and tag", layer.Quote(ref))
		case http.StatusUnauthorized, http.StatusForbidden:
			return sandbox.Errorf(sandbox.CodeForbidden, "the registry does not give the image %s: it is private or does not exist; log in with `docker login` as the user that runs the daemon", layer.Quote(ref))
		case http.StatusTooManyRequests:
			return sandbox.Errorf(sandbox.CodeUnavailable, "the registry of %s says that it was asked too often: wait, or log in", layer.Quote(ref))
		}
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "the image %s cannot be pulled: %w", layer.Quote(ref), err)
}
