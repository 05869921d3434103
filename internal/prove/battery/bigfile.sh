need dd cksum
dd if=/dev/zero of=f bs=1M count=64 2>/dev/null
sync f 2>/dev/null || sync
[ "$(cksum <f | cut -d' ' -f2)" = 67108864 ]
rm f
echo "64 MiB written, flushed and read"
