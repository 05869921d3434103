# Starts what a capture has to preserve: processes that hold state in memory
# and answer questions about it. It needs a POSIX shell, mkfifo and setsid; each
# witness that the template has the program for leaves NAME.pid. $1 is a secret
# that only memory holds.
set -eu
D=/tmp/warren-forkproof
rm -rf $D
mkdir -p $D/watched
cd $D
for c in mkfifo setsid timeout; do
	command -v $c >/dev/null 2>&1 || { echo "$c is not in the template"; exit 77; }
done
bg() { # NAME COMMAND...
	name=$1
	shift
	setsid "$@" </dev/null >"$name.log" 2>&1 &
	echo $! >"$name.pid"
}

# A process that counts and remembers, asked through two fifos.
mkfifo q a pin open.q open.a
cat >keeper.sh <<'K'
n=0
while :; do
	read -r q <q || continue
	n=$((n + 1))
	echo "$n $SECRET" >a
done
K
SECRET=$1
export SECRET
bg keeper sh keeper.sh
unset SECRET

# Two processes with a pipe between them.
cat >pipe.sh <<'K'
while :; do read -r x <pin && echo "$x"; done | while read -r y; do echo "through $y" >"pout.$y"; done
K
bg pipe sh pipe.sh

# One that ticks.
cat >tick.sh <<'K'
i=0
while :; do
	i=$((i + 1))
	echo $i >tick.new
	mv tick.new tick
	sleep 0.2
done
K
bg tick sh tick.sh

command -v flock >/dev/null 2>&1 && bg lock flock lock sleep 1000000

# An open file that has no name any more.
cat >open.sh <<'K'
exec 3>gone.file 4<gone.file
rm gone.file
echo "in a file without a name" >&3
while :; do
	read -r x <open.q || continue
	read -r line <&4 || line="nothing"
	echo "$line" >open.a
done
K
bg open sh open.sh

# One that waits in a call which a capture must not interrupt.
mkfifo blocked.q
cat >blocked.sh <<'K'
read -r x <blocked.q && echo "$x" >blocked.got
K
bg blocked sh blocked.sh

if command -v python3 >/dev/null 2>&1; then
	bg python python3 witness.py 18080
	i=0
	until [ -S py.sock ]; do
		i=$((i + 1))
		[ $i -lt 150 ] || { cat python.log >&2; exit 1; }
		sleep 0.2
	done
	cp python.pid listen.pid
	cp python.pid inotify.pid
elif nc --help 2>&1 | grep -q -e '-e PROG'; then
	cat >conn.sh <<'K'
#!/bin/sh
cd /tmp/warren-forkproof
while read -r l; do echo "echo $l"; done
: >conn.ended
K
	chmod 755 conn.sh
	bg listen nc -ll -p 18080 -e /tmp/warren-forkproof/conn.sh
	if command -v inotifyd >/dev/null 2>&1; then
		printf '#!/bin/sh\necho "$3" >>/tmp/warren-forkproof/inotify.log\n' >event.sh
		chmod 755 event.sh
		bg inotify inotifyd ./event.sh watched:n
	fi
fi
if command -v node >/dev/null 2>&1; then
	bg node node witness.js
	i=0
	until [ -S node.sock ]; do
		i=$((i + 1))
		[ $i -lt 150 ] || { cat node.log >&2; exit 1; }
		sleep 0.2
	done
fi
# What a host makes when its SSH server is set up.
if command -v ssh-keygen >/dev/null 2>&1 && mkdir -p /etc/ssh; then
	rm -f /etc/ssh/ssh_host_ed25519_key /etc/ssh/ssh_host_ed25519_key.pub
	ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key
fi
sleep 0.5
echo ready
