// Package template makes the root filesystems that sandboxes start from, and
// keeps them.
//
// A template is an immutable list of read-only layers with defaults. It comes
// from Debian packages (BuildDebian), an OCI image (Import) or a Dockerfile
// (BuildDockerfile). A build under a name that exists makes a new template
// with a new ID and swaps the name over to it; sandboxes of the old one keep
// its layers by their Hold.
//
// Everything lives under one directory:
//
//	layers/sha256-<hex>/       root filesystem trees: overlayfs lowers, ids as seen inside
//	meta/sha256-<hex>.json     size and entries of each
//	templates/<tenant>/<name>.json
//	retired/<id>.json          replaced or removed templates that a holder still needs
//	holds/<holder>             the id that a sandbox was made from
//	cache/<key>.json           which layer a Dockerfile step made
//	tmp/                       what is being made; emptied by Open
//
// Records and layers are written under tmp, synced, and renamed into place,
// so that a crash at any moment leaves whole things and rubbish in tmp only.
// The directory is root's alone (0700): layers hold setuid files of images
// that nobody vouches for.
package template
