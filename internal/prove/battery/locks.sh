need python3
python3 - <<'P'
import fcntl, os
def other(f):
    p = os.fork()
    if p == 0:
        try: f(); os._exit(0)
        except OSError: os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(p, 0)[1])
for lock in (fcntl.flock, fcntl.lockf):
    a = open("l", "w"); lock(a, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert other(lambda: lock(open("l", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)) == 7
    a.close()
    assert other(lambda: lock(open("l", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)) == 0
print("flock and fcntl locks exclude, and end with their holder")
P
