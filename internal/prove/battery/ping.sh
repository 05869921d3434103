need ping
ping -c 1 -W 2 127.0.0.1 >log 2>&1 || no "$(tail -n 1 log)"
echo "loopback answers"
