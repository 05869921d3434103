need tar python3
mkdir d
python3 - <<'P'
import os
open("d/a", "w").write("x"); os.link("d/a", "d/h"); os.symlink("a", "d/s"); os.mkfifo("d/p")
os.setxattr("d/a", "user.warren", b"kept")
f = open("d/sparse", "wb"); f.truncate(64 << 20); f.close()
os.utime("d/a", ns=(1, 1_234_567_890_123_456_789))
P
tar --version | grep -q GNU || skip "tar is not GNU tar"
tar --xattrs -Scf a.tar d
holes=kept
[ "$(wc -c <a.tar)" -lt 1000000 ] || holes=lost
mkdir e
tar --xattrs -xf a.tar -C e
python3 - <<'P'
import os
assert os.getxattr("e/d/a", "user.warren") == b"kept", "the extended attribute is gone"
assert os.stat("e/d/a").st_nlink == 2 and os.readlink("e/d/s") == "a"
assert os.stat("e/d/sparse").st_size == 64 << 20
print("hard links, symlinks, a fifo, a sparse file and user.* attributes kept")
P
[ $holes = kept ] || no "all but the holes of a sparse file are kept: tar -S is not told of them, and writes 64 MiB"
