need python3
[ -e /dev/net/tun ] || no "there is no /dev/net/tun"
python3 - <<'P'
import fcntl, struct
f = open("/dev/net/tun", "r+b", buffering=0)
fcntl.ioctl(f, 0x400454ca, struct.pack("16sH", b"warren0", 0x1002))
print("a TAP device was made")
P
