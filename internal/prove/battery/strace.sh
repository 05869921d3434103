need strace
strace -f -o t ls / >/dev/null
grep -q 'execve(' t && grep -q 'exit_group(0)' t
echo "$(wc -l <t) calls of ls"
