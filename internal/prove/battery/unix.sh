need python3
python3 - <<'P'
import array, os, socket, struct
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind("s"); s.listen()
c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); c.connect("s"); a, _ = s.accept()
r, w = os.pipe()
socket.send_fds(c, [b"fd"], [w])
_, fds, _, _ = socket.recv_fds(a, 10, 1)
os.write(fds[0], b"x"); assert os.read(r, 1) == b"x"
assert struct.unpack("iii", a.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] == os.getpid()
l = socket.socket(socket.AF_UNIX); l.bind("\0warren-prove"); l.listen(); socket.socket(socket.AF_UNIX).connect("\0warren-prove")
d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); d[0].send(b"1"); assert d[1].recv(9) == b"1"
print("stream, datagram, seqpacket, abstract names, descriptors passed, peer's credentials")
P
