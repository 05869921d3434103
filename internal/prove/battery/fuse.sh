need python3
[ -e /dev/fuse ] || no "there is no /dev/fuse"
python3 - <<'P'
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open("/dev/fuse", os.O_RDWR)
os.mkdir("m")
if libc.mount(b"x", os.path.abspath("m").encode(), b"fuse", 0, b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fd):
    raise SystemExit("mount: " + os.strerror(ctypes.get_errno()))
libc.umount2(os.path.abspath("m").encode(), 2)
print("a FUSE file system was mounted")
P
