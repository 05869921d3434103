need python3
python3 - <<'P'
import ctypes, os, select
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init1(0)
if fd < 0 or libc.inotify_add_watch(fd, b".", 0x100 | 0x80 | 0x8) < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
open("made", "w").close()
os.rename("made", "moved")
got = b""
while b"moved" not in got:
    assert select.select([fd], [], [], 5)[0], "no event in 5 s"
    got += os.read(fd, 4096)
assert b"made" in got
print("create, close and rename seen")
P
