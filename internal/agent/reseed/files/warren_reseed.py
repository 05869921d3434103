"""Makes Python's own random number generators differ between the forks of a
sandbox.

A fork has the memory of its source, and so the state of the source's
generators. Warren's agent sends SIGURG to every process of a restored sandbox
before it goes on; upon it `random`, `numpy.random` and OpenSSL (`ssl`) are
seeded anew from the kernel. Generators that a program made itself
(random.Random, numpy.random.default_rng) are its own: it can read
/run/warren/generation, which is another after each restore.

A program that handles SIGURG itself replaces this. WARREN_RESEED=0 in the
environment turns it off, for programs that want `random.seed` to hold in forks.
"""

import os
import signal
import sys


def reseed(signum=None, frame=None):
    """Seeds what is loaded. Runs between two instructions of the main thread."""
    random = sys.modules.get("random")
    if hasattr(random, "seed"):
        random.seed(os.urandom(32))
    numpy = sys.modules.get("numpy.random")
    if hasattr(numpy, "seed"):
        numpy.seed(int.from_bytes(os.urandom(4), "little"))
    ssl = sys.modules.get("_ssl")
    if hasattr(ssl, "RAND_add"):
        # Into OpenSSL's primary generator, from which the threads' follow.
        ssl.RAND_add(os.urandom(32), 32.0)


def install():
    if os.environ.get("WARREN_RESEED") == "0" or not hasattr(signal, "SIGURG"):
        return
    try:
        if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
            signal.signal(signal.SIGURG, reseed)
            signal.siginterrupt(signal.SIGURG, False)
    except ValueError:  # not the main thread of the main interpreter
        pass


install()
