need python3
python3 - <<'P'
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(425, 8, ctypes.create_string_buffer(120))  # io_uring_setup: 425 on every architecture
if fd < 0: raise SystemExit("io_uring_setup: " + os.strerror(ctypes.get_errno()))
print("a ring of 8 was set up")
P
