need python3
python3 - <<'P'
import ctypes, os, select, socket
e, ps = select.epoll(), [socket.socketpair() for _ in range(400)]
by = {}
for a, b in ps: e.register(b, select.EPOLLIN | select.EPOLLET); by[b.fileno()] = b
for a, b in ps: a.send(b"1")
seen = set()
while len(seen) < 400:
    got = e.poll(5); assert got, "no event in 5 s"
    for fd, _ in got: seen.add(fd)
v = os.eventfd(0); e.register(v, select.EPOLLIN); os.eventfd_write(v, 7); assert os.eventfd_read(v) == 7
libc = ctypes.CDLL(None, use_errno=True)
t = libc.timerfd_create(1, 0); assert t >= 0
libc.timerfd_settime(t, 0, (ctypes.c_long * 4)(0, 0, 0, 10_000_000), None)
e.register(t, select.EPOLLIN); assert e.poll(5)
print("400 sockets by edges, an eventfd, a timerfd")
P
