// Package snapshot keeps captures on the disk: what a runtime wrote of a
// sandbox, whole and unchanged, for as long as anything needs it.
//
//	<dir>/<id>/manifest.json   what data holds: sizes and checksums
//	<dir>/<id>/data/           a layer's root, or a checkpoint's files
//	<dir>/tmp/                 what is being made or removed; emptied by Open
//
// A capture is written below tmp, made durable, and renamed: one that can be
// seen is whole. What a capture means is the caller's to know; this package
// knows files.
package snapshot
