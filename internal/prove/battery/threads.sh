need python3
python3 - <<'P'
import threading, time
t = time.time()
threading.stack_size(128 << 10)
b, stop = threading.Barrier(1001), threading.Event()
ts = [threading.Thread(target=lambda: (b.wait(), stop.wait())) for _ in range(1000)]
for x in ts: x.start()
b.wait(timeout=60); stop.set()
for x in ts: x.join()
print("1000 threads at once, in %.1f s" % (time.time() - t))
P
