# A process that lives through a capture: generators in user space, a listener,
# an inotify watch, and a child at the other end of a unix socket. It answers at
# py.sock, one word for each name that it is asked.
import ctypes, os, random, secrets, signal, socket, ssl, struct, sys, threading, uuid

here, there = socket.socketpair(socket.AF_UNIX)
random.random(), secrets.token_hex(1), ssl.RAND_bytes(1)  # every generator has its seed before the capture


def reseed(*_):  # the hook: SIGURG comes after a restore, before anything else
    random.seed()
    ssl.RAND_add(os.urandom(32), 32)


if os.fork() == 0:  # one that hooks, where its parent has only what the template loads
    here.close()
    signal.signal(signal.SIGURG, reseed)
    while (q := there.recv(100)):
        if q == b"random": there.send(b"%032x" % random.getrandbits(128))
        elif q == b"openssl": there.send(ssl.RAND_bytes(16).hex().encode())
        else: there.send(b"pong-" + q)
    os._exit(0)
there.close()


def other(q):
    here.send(q)
    return here.recv(100).decode()


def answer(name):
    if name == "random": return "%032x" % random.getrandbits(128)
    if name == "hooked": return other(b"random")
    if name == "opensslhooked": return other(b"openssl")
    if name == "secrets": return secrets.token_hex(16)
    if name == "uuid": return str(uuid.uuid4())
    if name == "getrandom": return os.getrandom(16).hex()
    if name == "openssl": return ssl.RAND_bytes(16).hex()
    if name == "unix": return other(b"ping")
    return "?"


def echo(c):
    try:
        f = c.makefile("rw")
        for line in f:
            f.write("echo " + line)
            f.flush()
    except OSError:
        pass
    open("conn.ended", "w").close()


def listen():
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("0.0.0.0", int(sys.argv[1])))
    s.listen()
    while True:
        c, _ = s.accept()
        threading.Thread(target=echo, args=(c,), daemon=True).start()


def watch():
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(0)
    libc.inotify_add_watch(fd, b"watched", 0x100)  # IN_CREATE
    while True:
        data = os.read(fd, 4096)
        while data:
            n = struct.unpack_from("iIII", data)[3]
            with open("inotify.log", "a") as f:
                f.write(data[16:16 + n].rstrip(b"\0").decode() + "\n")
            data = data[16 + n:]


for f in (listen, watch):
    threading.Thread(target=f, daemon=True).start()
s = socket.socket(socket.AF_UNIX)
s.bind("py.tmp")
s.listen()
os.rename("py.tmp", "py.sock")
while True:
    c, _ = s.accept()
    with c, c.makefile("rw") as f:
        for name in f.readline().split():
            f.write(name + " " + answer(name) + "\n")
