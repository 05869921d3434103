[ "$(id -u)" != 0 ] || skip "the template has no user but root"
need sudo
out=$(sudo -n id -u 2>&1) || no "$(echo "$out" | head -n 1)"
[ "$out" = 0 ]
echo "the user became root by sudo"
