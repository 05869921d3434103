//go:build !amd64

package freeze

// restart would hide from a thread that it was interrupted in a call that
// answers EINTR. The kernel of arm64 has put the call's arguments out of reach
// by then, so there the few calls of signal(7) that do so (epoll_wait is the
// commonest) answer EINTR, as after any stop and continue.
func restart(int) {}
