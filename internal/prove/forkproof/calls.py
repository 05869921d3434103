# Processes that wait in system calls, each in another. A capture or a freeze
# must not end any of the waits: what interrupts a call without a signal's
# handler is to begin it anew. They wait until there is a file "release" in the
# directory $1; then each is given what it waits for, and "result" tells of each
# call whether it had gone on waiting and then got it. Straight libc calls:
# Python's own begin anew by themselves.
import ctypes, fcntl, mmap, os, pty, select, signal, socket, struct, sys, time

os.chdir(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NR = {"x86_64": {"futex": 202, "io_setup": 206, "io_getevents": 208}, "aarch64": {"futex": 98, "io_setup": 0, "io_getevents": 4}}.get(os.uname().machine, {})
LONG = 6.0  # seconds that a call with a timeout of its own waits
calls = []  # name, what waits, what gives it what it waits for, what the call has to return


class ts(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("n", ctypes.c_long)]


def call(name, wait, release=None, want=lambda ret, err: ret >= 0):
    calls.append((name, wait, release, want))


def buf(n=64): return ctypes.create_string_buffer(n)
def pollfd(fd): return ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLIN, 0))
def epolled(fd):
    e = select.epoll()
    e.register(fd, select.EPOLLIN)
    return os.dup(e.fileno())
def fdset(fd):
    b = ctypes.create_string_buffer(128)
    b[fd // 8] = bytes([1 << fd % 8])
    return b
def sigset(s):
    b = ctypes.create_string_buffer(128)
    libc.sigemptyset(b)
    if s: libc.sigaddset(b, s)
    return b
def piped(name, wait):
    r, w = os.pipe()
    call(name, lambda: wait(r), lambda pid: os.write(w, b"x"))


piped("read of a pipe", lambda r: libc.read(r, buf(), 1))
piped("poll", lambda r: libc.poll(pollfd(r), 1, -1))
piped("ppoll", lambda r: libc.ppoll(pollfd(r), 1, None, None))
piped("select", lambda r: libc.select(r + 1, fdset(r), None, None, None))
piped("pselect", lambda r: libc.pselect(r + 1, fdset(r), None, None, None, None))
piped("epoll_wait", lambda r: libc.epoll_wait(epolled(r), buf(), 1, -1))
piped("epoll_pwait", lambda r: libc.epoll_pwait(epolled(r), buf(), 1, -1, None))


def spliced():
    (r, w), (_, out) = os.pipe(), os.pipe()
    call("splice", lambda: libc.splice(r, None, out, None, 1, 0), lambda pid: os.write(w, b"x"))
def full():
    r, w = os.pipe()
    size = fcntl.fcntl(w, 1032)  # F_GETPIPE_SZ
    os.write(w, b"x" * size)
    call("write to a full pipe", lambda: libc.write(w, b"y", 1), lambda pid: os.read(r, size))
    r2, w2 = os.pipe()
    n = 4 * fcntl.fcntl(w2, 1032)
    def drain(pid):
        left = n
        while left and select.select([r2], [], [], 3)[0]: left -= len(os.read(r2, 1 << 20))
    call("write of more than a pipe holds, whole", lambda: libc.write(w2, b"y" * n, n), drain, lambda ret, err: ret == n)
spliced(), full()

for kind, name in ((socket.SOCK_STREAM, "recv of a unix socket"), (socket.SOCK_DGRAM, "recvmsg of a unix socket")):
    def one(a, b):
        wait = (lambda: libc.recv(a.fileno(), buf(), 1, 0)) if "msg" not in name else (
            lambda: libc.recvmsg(a.fileno(), ctypes.create_string_buffer(bytes(56)), 0))
        call(name, wait, lambda pid: b.send(b"x"))
    one(*socket.socketpair(socket.AF_UNIX, kind))


def tcp():
    s = socket.create_server(("127.0.0.1", 0))
    c = socket.create_connection(s.getsockname())
    p, _ = s.accept()
    call("recv of a TCP connection", lambda: libc.recv(c.fileno(), buf(), 1, 0), lambda pid: p.send(b"x"))
    l = socket.create_server(("127.0.0.1", 0))
    kept = []
    call("accept", lambda: libc.accept(l.fileno(), None, None), lambda pid: kept.append(socket.create_connection(l.getsockname())))
    l4 = socket.create_server(("127.0.0.1", 0))
    call("accept4", lambda: libc.accept4(l4.fileno(), None, None, 0), lambda pid: kept.append(socket.create_connection(l4.getsockname())))
    t = socket.create_connection(s.getsockname())
    kept.append(s.accept())
    t.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(LONG), 0))
    call("recv with SO_RCVTIMEO", lambda: libc.recv(t.fileno(), buf(), 1, 0), None, lambda ret, err: ret < 0 and err == 11)
    u = socket.socket(socket.AF_UNIX)
    u.bind("full.sock")
    u.listen(0)
    for _ in range(4):
        x = socket.socket(socket.AF_UNIX)
        x.setblocking(False)
        try: x.connect("full.sock")
        except OSError: pass
        kept.append(x)
    path = struct.pack("H", socket.AF_UNIX) + b"full.sock\0"
    call("connect to a full backlog", lambda: libc.connect(socket.socket(socket.AF_UNIX).detach(), path, len(path)),
         lambda pid: kept.extend(u.accept() for _ in range(1)))
tcp()


def terminal():
    m, s = pty.openpty()
    call("read of a terminal", lambda: libc.read(s, buf(), 8), lambda pid: os.write(m, b"x\n"))
def events():
    e = libc.eventfd(0, 0)
    call("read of an eventfd", lambda: libc.read(e, buf(), 8), lambda pid: os.write(e, struct.pack("Q", 1)))
    i = libc.inotify_init1(0)
    os.mkdir("seen")
    libc.inotify_add_watch(i, b"seen", 0x100)
    call("read of an inotify", lambda: libc.read(i, buf(512), 512), lambda pid: open("seen/new", "w").close())
    t = libc.timerfd_create(1, 0)
    call("read of a timerfd", lambda: libc.timerfd_settime(t, 0, struct.pack("llll", 0, 0, int(LONG), 0), None) or libc.read(t, buf(), 8))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    # gVisor's signalfd is of the process that made it.
    call("read of a signalfd", lambda: libc.read(libc.signalfd(-1, sigset(signal.SIGUSR2), 0), buf(128), 128), lambda pid: os.kill(pid, signal.SIGUSR2))
    call("sigtimedwait", lambda: libc.sigtimedwait(sigset(signal.SIGUSR2), None, None), lambda pid: os.kill(pid, signal.SIGUSR2))
    call("sigtimedwait with a timeout", lambda: libc.sigtimedwait(sigset(signal.SIGUSR2), None, ctypes.byref(ts(int(LONG), 0))), None, lambda ret, err: ret < 0 and err == 11)
terminal(), events()


def handled(f):
    def wait():
        signal.signal(signal.SIGUSR1, lambda *_: None)
        return f()
    return wait
interrupted = lambda ret, err: ret < 0 and err == 4  # what pause is for
call("pause", handled(lambda: libc.pause()), lambda pid: os.kill(pid, signal.SIGUSR1), interrupted)
call("sigsuspend", handled(lambda: libc.sigsuspend(sigset(0))), lambda pid: os.kill(pid, signal.SIGUSR1), interrupted)

call("nanosleep", lambda: libc.nanosleep(ctypes.byref(ts(int(LONG), 0)), None))
call("clock_nanosleep", lambda: libc.clock_nanosleep(1, 0, ctypes.byref(ts(int(LONG), 0)), None), None, lambda ret, err: ret == 0)
for name, f in (("poll with a timeout", lambda: libc.poll(pollfd(os.pipe()[0]), 1, int(LONG * 1000))),
                ("select with a timeout", lambda: libc.select(0, None, None, None, struct.pack("ll", int(LONG), 0))),
                ("epoll_wait with a timeout", lambda: libc.epoll_wait(epolled(os.pipe()[0]), buf(), 1, int(LONG * 1000)))):
    call(name, f, None, lambda ret, err: ret == 0)

word = mmap.mmap(-1, 4096)
addr = ctypes.addressof(ctypes.c_int.from_buffer(word))
if "futex" in NR:
    call("futex", lambda: libc.syscall(NR["futex"], ctypes.c_void_p(addr), 0, 0, None),
         lambda pid: libc.syscall(NR["futex"], ctypes.c_void_p(addr), 1, 1))
    addr2 = addr + 64
    call("futex with a timeout", lambda: libc.syscall(NR["futex"], ctypes.c_void_p(addr2), 0, 0, ctypes.byref(ts(int(LONG), 0))), None, lambda ret, err: ret < 0 and err == 110)
    def aio():
        c = ctypes.c_ulong(0)
        if libc.syscall(NR["io_setup"], 4, ctypes.byref(c)) < 0: return -1
        return libc.syscall(NR["io_getevents"], c, 1, 1, buf(256), ctypes.byref(ts(int(LONG), 0)))
    call("io_getevents", aio, None, lambda ret, err: ret == 0)


def children(f):
    def wait():
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            while not os.path.exists("release"): time.sleep(0.1)
            os._exit(0)
        return f(pid)
    return wait
call("wait4", children(lambda pid: libc.waitpid(pid, None, 0)))
call("waitid", children(lambda pid: libc.waitid(1, pid, buf(128), 4)))


def locked():
    f = open("flock", "w")
    fcntl.flock(f, fcntl.LOCK_EX)
    call("flock", lambda: libc.flock(os.open("flock", os.O_RDWR), 2), lambda pid: fcntl.flock(f, fcntl.LOCK_UN))
    g = open("fcntl", "w")
    fcntl.lockf(g, fcntl.LOCK_EX)
    lock = struct.pack("hhqqi4x", 1, 0, 0, 0, 0)
    call("fcntl lock", lambda: libc.fcntl(os.open("fcntl", os.O_RDWR), 7, lock), lambda pid: fcntl.lockf(g, fcntl.LOCK_UN))
def sysv():
    q = libc.msgget(0, 0o1600)
    call("msgrcv", lambda: libc.msgrcv(q, buf(), 8, 0, 0), lambda pid: libc.msgsnd(q, struct.pack("l8s", 1, b"x"), 8, 0))
    q2, n = libc.msgget(0, 0o1600), struct.pack("l4096s", 1, b"x")
    while libc.msgsnd(q2, n, 4096, 0o4000) == 0: pass
    call("msgsnd to a full queue", lambda: libc.msgsnd(q2, n, 4096, 0), lambda pid: libc.msgrcv(q2, buf(8192), 4096, 0, 0))
    s = libc.semget(0, 1, 0o1600)
    down, up = struct.pack("Hhh", 0, -1, 0), struct.pack("Hhh", 0, 1, 0)
    call("semop", lambda: libc.semop(s, down, 1), lambda pid: libc.semop(s, up, 1))
locked(), sysv()

for name in "fifo.r", "fifo.w": os.mkfifo(name)
call("open of a fifo to read", lambda: libc.open(b"fifo.r", os.O_RDONLY), lambda pid: os.open("fifo.r", os.O_WRONLY | os.O_NONBLOCK))
call("open of a fifo to write", lambda: libc.open(b"fifo.w", os.O_WRONLY), lambda pid: os.open("fifo.w", os.O_RDONLY | os.O_NONBLOCK))

pids = []
for i, (name, wait, release, want) in enumerate(calls):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGURG, signal.SIG_DFL)  # as in a program that knows nothing of Warren
        open("%d.begun" % i, "w").close()
        began = time.monotonic()
        ctypes.set_errno(0)
        try: ret, err = wait(), ctypes.get_errno()
        except Exception as e: ret, err = -1, str(e).replace(" ", "_")
        with open("%d.new" % i, "w") as f: f.write("%d %s %f" % (ret, err, time.monotonic() - began))
        os.rename("%d.new" % i, "%d.end" % i)
        os._exit(0)
    pids.append(pid)
ended = lambda i: os.path.exists("%d.end" % i)
while not all(os.path.exists("%d.begun" % i) for i in range(len(calls))): time.sleep(0.05)
time.sleep(0.5)
absent = [i for i in range(len(calls)) if ended(i)]  # this kernel does not have it, or does not wait
print("up", len(calls) - len(absent), flush=True)
open("up", "w").close()
while not os.path.exists("release"): time.sleep(0.1)
early = [i for i in range(len(calls)) if ended(i)]
for i, (name, wait, release, want) in enumerate(calls):
    if release and i not in early:
        try: release(pids[i])
        except OSError: pass
end = time.monotonic() + 4 * LONG
while time.monotonic() < end and not all(ended(i) for i in range(len(calls))): time.sleep(0.1)
said = []
for i, (name, wait, release, want) in enumerate(calls):
    ret, err, took = open("%d.end" % i).read().split() if ended(i) else ("", "", "0")
    timed = release is None and not name.startswith("wait")
    if i in absent: what = "absent: returned %s, errno %s" % (ret, err)
    elif not ret: what = "no: it waits still"
    elif release and i in early: what = "no: returned %s, errno %s after %.1f s, before it was to" % (ret, err, float(took))
    elif not want(int(ret), int(err) if err.isdigit() else err): what = "no: returned %s, errno %s" % (ret, err)
    elif timed and float(took) < LONG - 0.1: what = "no: returned after %.1f s instead of %d" % (float(took), LONG)
    else: what = "yes"
    said.append(name + ": " + what)
with open("result.new", "w") as f: f.write("\n".join(said) + "\n")
os.rename("result.new", "result")
print("done", flush=True)
