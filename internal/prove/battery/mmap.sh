need python3
python3 - <<'P'
import mmap, os
n = 128 << 20
f = open("big", "w+b"); f.truncate(n)
m = mmap.mmap(f.fileno(), n)
for o in range(0, n, 1 << 20): m[o:o+8] = o.to_bytes(8, "little")
m.flush(); m.close()
for o in range(0, n, 1 << 20):
    f.seek(o); assert int.from_bytes(f.read(8), "little") == o
m = mmap.mmap(f.fileno(), n, flags=mmap.MAP_PRIVATE); m[0:1] = b"x"; f.seek(0); assert f.read(1) == b"\0"
print("128 MiB shared and private")
P
