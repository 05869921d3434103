need unshare
unshare -Ur sh -c '[ "$(id -u)" = 0 ]'
echo "a user got a user namespace of its own"
