# Tries one TCP connection to $1 port $2 and prints how it went.
if command -v python3 >/dev/null 2>&1; then
	exec python3 -c '
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()
    print("connected")
except Exception as e:
    print(e.strerror if getattr(e, "strerror", None) else e)' "$1" "$2"
elif command -v nc >/dev/null 2>&1; then
	out=$(nc -w 3 "$1" "$2" </dev/null 2>&1) && { echo connected; exit; }
	echo "${out:-no answer}"
elif command -v bash >/dev/null 2>&1; then
	out=$(timeout 3 bash -c ': <>"/dev/tcp/$0/$1"' "$1" "$2" 2>&1) && { echo connected; exit; }
	echo "${out:-no answer}"
else
	echo "cannot try: the template has no python3, nc or bash"
fi
