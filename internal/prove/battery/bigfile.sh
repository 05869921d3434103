need dd wc tr
dd if=/dev/zero of=f bs=1M count=64 2>/dev/null
sync f 2>/dev/null || sync
[ "$(tr -d '\000' <f | wc -c)" = 0 ]
[ "$(wc -c <f)" = 67108864 ]
rm f
echo "64 MiB written, flushed and read"
