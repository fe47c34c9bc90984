"""Programs with a wait that ends early, for `test_in_flight`: each checks a *canary*.

A canary is memory allocated where an array freed too early would be: an operation that still writes into its old array
overwrites the zeros of the canary. Each program ends with ``canary()``, which then fails.
"""

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np, ncclpy

class Late(Exception):
    pass

def late(*_):
    raise Late

def alarm(seconds, number=signal.SIGINT):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

def quietly(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except ncclpy.NcclError as error:
        return error

def is_soon_done(stream):
    # The operation has ended; its stream's thread may still have to say so.
    end = time.monotonic() + 5
    while not stream.is_done() and time.monotonic() < end:
        time.sleep(0.001)
    return stream.is_done()

kept = []

def canary(peer, size=2000):
    kept.extend(np.zeros(size) for _ in range(50))
    ended = threading.Thread(target=quietly, args=(peer,), daemon=True)
    ended.start()
    ended.join(0.3)  # most peers wait for a rank that has gone: what they would write is written within milliseconds
    time.sleep(0.1)
    written = [float(one.max()) for one in kept if one.any()]
    assert not written, f"somebody wrote into memory that is not its own: {written}"

options = {"timeout": float(sys.argv[1])} if len(sys.argv) > 1 and sys.argv[1] != "None" else {}
"""

EARLY_ENDS = {
    "interrupt": """
C = ncclpy.Communicator.init_all([0, 1], **options)
try:
    alarm(0.2)
    C[0].all_reduce(np.full(2000, 1.0))
    raise AssertionError("it waits for a rank that does not come")
except KeyboardInterrupt:
    pass
canary(lambda: C[1].all_reduce(np.full(2000, 5.0)))
""",
    "raising handler": """
signal.signal(signal.SIGALRM, late)
C = ncclpy.Communicator.init_all([0, 1], **options)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    C[0].all_gather(np.full(1000, 1.0), np.full(2000, 1.0))
    raise AssertionError
except Late:
    pass
canary(lambda: C[1].all_gather(np.full(1000, 5.0), np.zeros(2000)))
""",
    "with block": """
C = ncclpy.Communicator.init_all([0, 1], **options)
try:
    alarm(0.2)
    with C[0] as comm:
        comm.all_reduce(np.full(2000, 1.0))
except KeyboardInterrupt:
    pass
canary(lambda: C[1].all_reduce(np.full(2000, 5.0)))
""",
    "group": """
A, B = (ncclpy.Communicator.init_all([0, other], **options) for other in (1, 2))
try:
    alarm(0.2)
    with ncclpy.group():
        A[0].all_reduce(np.full(5, 1.0))
        B[0].all_reduce(np.full(2000, 1.0))
    raise AssertionError
except KeyboardInterrupt:
    pass
assert A[0].closed and B[0].closed
canary(lambda: B[1].all_reduce(np.full(2000, 5.0)))
""",
    "plan": """
C = ncclpy.Communicator.init_all([0, 1], **options)
array, plan = np.full(2000, 1.0), ncclpy.Plan()
with plan.record():
    C[0].all_reduce(array)
try:
    alarm(0.2)
    plan.launch()
    raise AssertionError
except KeyboardInterrupt:
    pass
del plan, array
canary(lambda: C[1].all_reduce(np.full(2000, 5.0)))
""",
    "large, in progress": """
C = ncclpy.Communicator.init_all([0, 1], **options)
def other():
    while True:
        C[1].all_reduce(np.ones(2_000_000))
threading.Thread(target=quietly, args=(other,), daemon=True).start()
try:
    alarm(0.2)
    while True:
        C[0].all_reduce(np.ones(2_000_000))
except KeyboardInterrupt:
    pass
canary(C[1].abort, 2_000_00)
""",
}

# These set their own deadlines or errors.
OTHER_ENDS = {
    "a group of two worlds, ranks that disagree": """
A, B = (ncclpy.Communicator.init_all([0, other], timeout=3) for other in (1, 2))
wrong = threading.Thread(target=quietly, args=(lambda: A[1].all_reduce(np.ones(7)),))
wrong.start()
try:
    with ncclpy.group():
        A[0].all_reduce(np.full(5, 1.0))
        B[0].all_reduce(np.full(2000, 1.0))
    raise AssertionError
except ncclpy.NcclError as error:
    assert "do not agree" in str(error), error
    assert any("NcclTimeout" in note for note in error.__notes__), error.__notes__
assert B[0].closed
canary(lambda: B[1].all_reduce(np.full(2000, 5.0)))
""",
    "a group of two worlds, one deadline is shorter": """
A, B = (ncclpy.Communicator.init_all([0, other], timeout=limit) for other, limit in ((1, 0.3), (2, 1.0)))
try:
    with ncclpy.group():
        A[0].all_reduce(np.full(5, 1.0))
        B[0].all_reduce(np.full(2000, 1.0))
    raise AssertionError
except ncclpy.NcclTimeout as error:
    assert "was not done after" in str(error) and "also NcclTimeout" in error.__notes__[0], (error, error.__notes__)
assert A[0].closed and B[0].closed
canary(lambda: B[1].all_reduce(np.full(2000, 5.0)))
""",
    "a group of send and recv": """
uid, C = ncclpy.get_unique_id(), [None] * 4
def make(rank):
    C[rank] = ncclpy.Communicator.init(4, rank, uid, device=rank, timeout=0.3 if rank == 0 else 0.8)
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
try:
    with ncclpy.group():
        C[0].send(np.ones(5), 2)
        C[1].recv(np.full(2000, 1.0), 3)
    raise AssertionError
except ncclpy.NcclTimeout:
    pass
assert C[1].closed
canary(lambda: C[3].send(np.full(2000, 5.0), 1))
""",
    "close in another thread": """
C = ncclpy.Communicator.init_all([0, 1], timeout=0.5)
ended = []
def work():
    ended.append(quietly(C[0].all_reduce, np.full(2000, 1.0)))
thread = threading.Thread(target=work)
thread.start()
time.sleep(0.2)
threading.Thread(target=quietly, args=(C[0].close,), daemon=True).start()
thread.join(10)
assert isinstance(ended[0], (ncclpy.NcclTimeout, ncclpy.NcclAborted)), ended
canary(lambda: C[1].all_reduce(np.full(2000, 5.0)))
""",
    "close waits for what was issued": """
C = ncclpy.Communicator.init_all([0, 1], **options)
stream, array = ncclpy.Stream(0), np.full(2000, 1.0)
C[0].all_reduce(array, stream=stream)
other = threading.Timer(0.5, C[1].all_reduce, (np.full(2000, 5.0),))
began = time.monotonic()
other.start()
C[0].close()
assert time.monotonic() - began > 0.3 and (array == 6).all() and is_soon_done(stream)
del array
canary(other.join)
""",
    "close gives up at its deadline": """
C = ncclpy.Communicator.init_all([0, 1], abortable=True)
ncclpy.core.ending._END_PATIENCE = 0.2
stream, array = ncclpy.Stream(0), np.full(2000, 1.0)
C[0].all_reduce(array, stream=stream)
try:
    C[0].close(timeout=0.3)
    raise AssertionError
except ncclpy.NcclTimeout:
    pass
assert C[0].closed and is_soon_done(stream)
del array
canary(lambda: C[1].all_reduce(np.full(2000, 5.0)))
""",
    "abort frees a thread that close waits for": """
C = ncclpy.Communicator.init_all([0, 1], **options)
ended = []
waits = threading.Thread(target=lambda: ended.append(quietly(C[0].all_reduce, np.ones(2000))))
closes = threading.Thread(target=lambda: ended.append(quietly(C[0].close)))
waits.start(); time.sleep(0.2); closes.start(); time.sleep(0.2)
assert waits.is_alive() and closes.is_alive(), "close takes its turn behind the thread that is inside"
C[0].abort()
waits.join(5); closes.join(5)
assert not waits.is_alive() and not closes.is_alive()
assert any(isinstance(one, ncclpy.NcclAborted) for one in ended), ended
canary(lambda: C[1].all_reduce(np.full(2000, 5.0)))
""",
    "a dead peer in one world of a group": """
import subprocess
uid = ncclpy.get_unique_id()
peer = subprocess.Popen([sys.executable, "-c", f\"\"\"
import ncclpy, time
comm = ncclpy.Communicator.init(2, 1, bytes.fromhex('{bytes(uid).hex()}'), device=1, abortable=True)
time.sleep(100)
\"\"\"])
A = ncclpy.Communicator.init(2, 0, uid, device=0, abortable=True)
B = ncclpy.Communicator.init_all([0, 2], timeout=3)
threading.Timer(0.3, peer.kill).start()
try:
    with ncclpy.group():
        A.all_reduce(np.full(5, 1.0))
        B[0].all_reduce(np.full(2000, 1.0))
    raise AssertionError
except ncclpy.NcclRemoteError as error:
    assert "NcclTimeout" in error.__notes__[0]
peer.wait()
assert B[0].closed
canary(lambda: B[1].all_reduce(np.full(2000, 5.0)))
""",
}

BIRTHS = {
    "the births of a group end together": """
uid, made = ncclpy.get_unique_id(), []
before = len(os.listdir("/proc/self/task"))
try:
    with ncclpy.group():
        made += [ncclpy.Communicator.init(3, rank, uid, device=rank, timeout=0.5) for rank in range(2)]
    raise AssertionError
except ncclpy.NcclTimeout as error:
    assert error.__notes__, "the other rank's deadline passed as well"
assert all(comm.closed for comm in made), made
time.sleep(0.3)
assert len(os.listdir("/proc/self/task")) <= before + 2
""",
    "an interrupted init leaves nobody that peers count on": """
uid = ncclpy.get_unique_id()
try:
    alarm(0.2)
    ncclpy.Communicator.init(2, 0, uid, device=0, **options)
    raise AssertionError
except KeyboardInterrupt:
    pass
try:
    comm = ncclpy.Communicator.init(2, 1, uid, device=1, timeout=0.5)
    raise AssertionError(f"{comm} is up with nobody on the other side")
except ncclpy.NcclError:
    pass
""",
    "interrupted inits leak nothing": """
def state():
    maps = sum("ncclpy-comm" in line for line in open("/proc/self/maps"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps
signal.signal(signal.SIGALRM, late)
def one():
    try:
        # Again, should it come where Python drops exceptions, as in a callback of a weak reference.
        signal.setitimer(signal.ITIMER_REAL, 0.02, 1)
        ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, **options)
    except Late:
        signal.setitimer(signal.ITIMER_REAL, 0)
for _ in range(5): one()
time.sleep(0.2); before = state()
for _ in range(20): one()
def settled(): return all(b <= a + 1 for a, b in zip(before, state()))
end = time.monotonic() + 5
while not settled() and time.monotonic() < end: time.sleep(0.02)
assert settled(), (before, state())
""",
    "a child's cell is not freed while it may be written": """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
comms = ncclpy.Communicator.init_all(range(3), **(options or {"config": ncclpy.Config(blocking=False)}))
for comm in comms: comm.wait_ready(10)
kids = []
try:
    alarm(0.2)
    with ncclpy.group():
        kids += [comm.split(0) for comm in comms[:2]]
    for kid in kids: kid.wait_ready()
    raise AssertionError
except KeyboardInterrupt:
    pass
kids.clear()
blocks = []
for size in range(200, 1200, 8):
    for _ in range(8):
        pointer = libc.malloc(size)
        blocks.append((pointer, size))
        ctypes.memset(pointer, 0x5A, size)
threading.Thread(target=quietly, args=(comms[2].split, 0), daemon=True).start()
time.sleep(0.3)
assert all(ctypes.string_at(pointer, size) == b"\\x5a" * size for pointer, size in blocks)
os._exit(0)
""",
    "several threads poll one child": """
sys.setswitchinterval(1e-5)
comms = ncclpy.Communicator.init_all(range(2), config=ncclpy.Config(blocking=False))
for comm in comms: comm.wait_ready(10)
for _ in range(20):
    child = comms[0].split(0)
    def poll():
        while not child.is_ready(): pass
    threads = [threading.Thread(target=poll) for _ in range(3)]
    for thread in threads: thread.start()
    other = comms[1].split(0)
    for thread in threads: thread.join()
    other.wait_ready(10)
    closing = threading.Thread(target=child.close)
    closing.start(); other.close(); closing.join()
os._exit(0)
""",
}

#: Waits without end in the main thread, which SIGINT must end. Those of one kind run one after the other.
BLOCKING = {
    "births": {
        "init": "ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, **options)",
        "init in a group": (
            "in_group(lambda: ncclpy.Communicator.init(2, 0, ncclpy.get_unique_id(), device=0, **options))"
        ),
        "split": "C[0].split(0)",
        "shrink": "ncclpy.Communicator.init_all([0, 1, 2], **options)[0].shrink([2])",
        "grow": "C[0].grow(3, C[0].grow_id())",
        "join": "ncclpy.Communicator.join(3, 2, C[0].grow_id(), device=2, **options)",
    },
    "calls": {
        "all_reduce": "C[0].all_reduce(np.ones(4))",
        "barrier": "C[0].barrier()",
        "send": "C[0].send(np.ones(4_000_000), 1)",
        "recv": "C[0].recv(np.ones(4), 1)",
        "window": "C[0].window(np.ones(512))",
        "a group's end": "in_group(lambda: (C[0].all_reduce(np.ones(4)), C[0].all_reduce(np.ones(5))))",
    },
    "waits": {
        "stream": "(C[0].all_reduce(array, stream=stream), stream.synchronize())",
        "event": "(C[0].all_reduce(array, stream=stream), stream.record().synchronize())",
        "device": "(C[0].all_reduce(array, stream=stream), ncclpy.synchronize(0))",
        "finalize": "(C[0].all_reduce(array, stream=stream), C[0].finalize())",
        "close": "(C[0].all_reduce(array, stream=stream), C[0].close())",
        "plan": "plan_of(lambda: C[0].all_reduce(array)).launch()",
        "work": "(manager := ncclpy.Manager()).all_reduce('key', array, device=0, num_local=2).wait()",
    },
    "turns": {
        "a call behind another thread's": "(elsewhere(lambda: C[0].split(0)), C[0].all_reduce(array, stream=stream))",
        "a group behind another thread's call": (
            "(elsewhere(lambda: C[0].split(0)), in_group(lambda: C[0].all_reduce(array, stream=stream)))"
        ),
    },
}

INTERRUPTED = """
def in_group(body):
    with ncclpy.group():
        body()

def elsewhere(body):
    threading.Thread(target=quietly, args=(body,), daemon=True).start()
    time.sleep(0.05)  # it is inside then, with the communicator's lock, for ever

def plan_of(body):
    plan = ncclpy.Plan()
    with plan.record():
        body()
    return plan

def ended(call):
    global C, array, stream
    C = ncclpy.Communicator.init_all([0, 1], **options)
    array, stream = np.ones(4), ncclpy.Stream(0)
    began = []
    handled = threading.Event()
    def interrupt():
        time.sleep(0.1)  # until it waits
        os.kill(os.getpid(), signal.SIGUSR1)
        if not handled.wait(10):
            os._exit(8)  # it does not run while the call waits
        time.sleep(0.05)  # in which the call would end
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        call()
        raise AssertionError("it returned")
    except KeyboardInterrupt:
        seconds = time.monotonic() - began[0]
    assert began, "a handler that does not raise runs while the call waits, and the call goes on"
    for comm in C:
        comm.abort()
    return seconds

threading.Timer(45, os._exit, (9,)).start()
for name, call in CALLS.items():
    print(name, flush=True)
    seconds = ended(call)
    assert seconds < 5, f"{name} ended after {seconds} s"  # 0.2 s on a machine that is not busy
os._exit(0)
"""
