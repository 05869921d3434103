need python3 curl
echo served >f
python3 -u -m http.server --bind 127.0.0.1 0 >log 2>&1 &
p=$!
trap 'kill $p' EXIT
i=0
until port=$(sed -n 's/.* port \([0-9]*\) .*/\1/p' log) && [ -n "$port" ]; do
	i=$((i + 1))
	[ $i -lt 300 ]
	sleep 0.1
done
[ "$(curl -sS --noproxy '*' http://127.0.0.1:$port/f)" = served ]
echo "a server and curl on loopback"
