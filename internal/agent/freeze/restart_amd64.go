package freeze

import "golang.org/x/sys/unix"

// eintr are the system calls that answer EINTR when they were interrupted, also
// where no handler of a signal ran, so that they would tell of a freeze
// (signal(7), "Interruption of system calls and library functions by stop
// signals").
var eintr = map[uint64]bool{
	unix.SYS_EPOLL_WAIT: true, unix.SYS_EPOLL_PWAIT: true, unix.SYS_EPOLL_PWAIT2: true,
	unix.SYS_RT_SIGTIMEDWAIT: true, unix.SYS_SEMOP: true, unix.SYS_SEMTIMEDOP: true,
	unix.SYS_MSGRCV: true, unix.SYS_MSGSND: true, unix.SYS_IO_GETEVENTS: true,
	unix.SYS_READ: true, unix.SYS_READV: true, unix.SYS_WRITE: true, unix.SYS_WRITEV: true,
	unix.SYS_ACCEPT: true, unix.SYS_ACCEPT4: true, unix.SYS_CONNECT: true,
	unix.SYS_RECVFROM: true, unix.SYS_RECVMSG: true, unix.SYS_RECVMMSG: true,
	unix.SYS_SENDTO: true, unix.SYS_SENDMSG: true,
}

// errRestartNoHand is ERESTARTNOHAND (linux/errno.h): the kernel begins the
// call anew, or answers EINTR if a handler runs first.
const errRestartNoHand = 514

// restart makes the call in which a stopped thread was interrupted begin anew.
func restart(tid int) {
	var r unix.PtraceRegs
	if unix.PtraceGetRegs(tid, &r) != nil || int64(r.Orig_rax) < 0 || int64(r.Rax) != -int64(unix.EINTR) || !eintr[r.Orig_rax] {
		return
	}
	r.Rax = ^uint64(errRestartNoHand - 1)
	unix.PtraceSetRegs(tid, &r)
}
