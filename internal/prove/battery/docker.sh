need unshare mount
r=0
try() {
	what=$1
	shift
	if out=$("$@" 2>&1); then have="$have $what"; else r=1; lack="$lack $what"; why=$(echo "$out" | tail -n 1); fi
}
have="" lack="" why=""
try mounts unshare -m true
try pids unshare -p -f true
try net unshare -n true
try users unshare -U true
mkdir l u w m
try tmpfs unshare -m sh -c 'mount -t tmpfs none m'
try overlay unshare -m sh -c 'mount -t tmpfs none w && mkdir w/u w/w && mount -t overlay none -o lowerdir=l,upperdir=w/u,workdir=w/w m'
try cgroup sh -c 'd=$(ls -d /sys/fs/cgroup/memory /sys/fs/cgroup 2>/dev/null | head -n 1) && mkdir "$d/warren-prove" && rmdir "$d/warren-prove"'
[ $r = 0 ] || { echo "has:${have:- nothing}; lacks:$lack ($why)" >&2; exit 1; }
echo "has:$have"
