# Prints facts as sections: a line "@@ NAME" and what follows it. It needs a
# POSIX shell and cat, and uses what else there is.
s() { echo "@@ $1"; }
s uname; uname -s -r -v -m 2>&1
s version; cat /proc/version 2>&1
s pids; for d in /proc/[0-9]*; do echo "${d#/proc/} $(cat "$d/comm" 2>/dev/null)"; done
s mounts; cat /proc/self/mounts 2>&1
s status; cat /proc/self/status 2>&1
s uidmap; cat /proc/self/uid_map 2>&1
s nproc; if command -v nproc >/dev/null 2>&1; then nproc; else grep -c ^processor /proc/cpuinfo; fi
s meminfo; cat /proc/meminfo 2>&1
s dmesg; dmesg 2>&1 | tail -n 3
s dmesgcode; dmesg >/dev/null 2>&1; echo $?
s devices; for d in kvm mem fuse net/tun kmsg sda vda nvme0n1 loop0; do [ -e "/dev/$d" ] && echo "/dev/$d"; done
s dmi; cat /sys/class/dmi/id/product_name /sys/class/dmi/id/sys_vendor 2>/dev/null
s writable; for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /sys/kernel/uevent_helper /proc/sys/vm/drop_caches; do ( : >>"$f" ) 2>/dev/null && echo "$f"; done
s hostname; hostname 2>/dev/null || cat /proc/sys/kernel/hostname
s end
