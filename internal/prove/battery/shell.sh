need awk sed sort
seq 1 1000 2>/dev/null | awk '{ s += $1 } END { exit s != 500500 }'
f=$(printf 'b\na\n' | sort | sed -n 1p)
[ "$f" = a ]
mkfifo p
echo through >p &
read -r x <p
[ "$x" = through ]
echo "pipes, a fifo, awk, sed and sort"
