package oci

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// inPrivateMounts runs f on a thread that has a mount namespace of its own, a
// copy of the host's from which nothing is propagated back. A process that f
// starts (before it returns) is in that namespace. The thread ends with f and
// the namespace with its last process, so no mount that f makes can leak.
func inPrivateMounts(f func() error) error {
	done := make(chan error, 1)
	go onOwnThread(func() { done <- privately(f) })
	return <-done
}

// onOwnThread runs f on a thread that ends afterwards. The process's main
// thread never ends, so on it f is passed on to another while this one waits:
// as long as it waits, the other cannot get the main thread.
func onOwnThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		f()
		return // locked: the thread ends with the goroutine
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		onOwnThread(f)
	}()
	<-done
	runtime.UnlockOSThread()
}

func privately(f func() error) error {
	// CLONE_FS: the working directory is the thread's own from here on.
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	return f()
}
