need gcc su
mkdir -p /tmp/warren-suid && cd /tmp/warren-suid
cat >s.c <<'C'
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("%d", (int)geteuid()); return 0; }
C
gcc -o s s.c
chmod 4755 s
chmod 755 .
u=$(awk -F: '$3 >= 1000 && $3 < 60000 { print $1; exit }' /etc/passwd)
[ -n "$u" ] || skip "the template has no user but root"
got=$(su -s /bin/sh "$u" -c "$PWD/s")
cd / && rm -rf /tmp/warren-suid
[ "$got" = 0 ] || no "a setuid program of root's ran as uid $got: no_new_privs"
echo "a setuid program gave a user root's rights inside"
