package freeze

import "golang.org/x/sys/unix"

// How the kernel is told to begin a call anew (linux/errno.h): with
// errRestartSys also where a handler with SA_RESTART runs first, with
// errRestartNoHand only where none does. Else the call answers EINTR.
const (
	errRestartSys    = 512
	errRestartNoHand = 514
)

// eintr are the system calls that answer EINTR when they were interrupted, also
// where no handler of a signal ran, so that they would tell of a freeze, and how
// each is begun anew. Linux has those of signal(7), "Interruption of system
// calls and library functions by stop signals"; gVisor has the opens of a FIFO
// beside them, which Linux begins anew by itself.
//
// close is none of them: the descriptor is gone when it answers.
var eintr = map[uint64]int64{
	unix.SYS_EPOLL_WAIT: errRestartNoHand, unix.SYS_EPOLL_PWAIT: errRestartNoHand, unix.SYS_EPOLL_PWAIT2: errRestartNoHand,
	unix.SYS_RT_SIGTIMEDWAIT: errRestartNoHand, unix.SYS_SEMOP: errRestartNoHand, unix.SYS_SEMTIMEDOP: errRestartNoHand,
	unix.SYS_MSGRCV: errRestartNoHand, unix.SYS_MSGSND: errRestartNoHand,
	unix.SYS_IO_GETEVENTS: errRestartNoHand, unix.SYS_IO_PGETEVENTS: errRestartNoHand, unix.SYS_IO_URING_ENTER: errRestartNoHand,
	unix.SYS_READ: errRestartNoHand, unix.SYS_READV: errRestartNoHand, unix.SYS_WRITE: errRestartNoHand, unix.SYS_WRITEV: errRestartNoHand,
	unix.SYS_ACCEPT: errRestartNoHand, unix.SYS_ACCEPT4: errRestartNoHand, unix.SYS_CONNECT: errRestartNoHand,
	unix.SYS_RECVFROM: errRestartNoHand, unix.SYS_RECVMSG: errRestartNoHand, unix.SYS_RECVMMSG: errRestartNoHand,
	unix.SYS_SENDTO: errRestartNoHand, unix.SYS_SENDMSG: errRestartNoHand,
	unix.SYS_OPEN: errRestartSys, unix.SYS_OPENAT: errRestartSys, unix.SYS_OPENAT2: errRestartSys, unix.SYS_CREAT: errRestartSys,
}

// restart makes the call in which a stopped thread was interrupted begin anew.
func restart(tid int) {
	var r unix.PtraceRegs
	if unix.PtraceGetRegs(tid, &r) != nil || int64(r.Orig_rax) < 0 || int64(r.Rax) != -int64(unix.EINTR) {
		return
	}
	how := eintr[r.Orig_rax]
	if how == 0 {
		return
	}
	r.Rax = uint64(-how)
	unix.PtraceSetRegs(tid, &r)
}
