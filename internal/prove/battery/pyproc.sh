need python3
cat >p.py <<'P'
import multiprocessing as mp
def f(n): return sum(range(n))
if __name__ == "__main__":
    with mp.Pool(4) as p:
        assert p.map(f, range(0, 4000, 100)) == [f(n) for n in range(0, 4000, 100)]
    v = mp.Value("i", 0)
    print("a pool of 4, a semaphore and shared memory")
P
python3 p.py
