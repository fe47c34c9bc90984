"""Unique ids as plain values: their cost, access to their memory, and the errors of ids that cannot be used."""

from __future__ import annotations

import copy
import ctypes
import fcntl
import os
import pickle
import struct

import numpy as np
import pytest
import thread_ranks
from host_checks import in_thread, join, start, wait_for
from nccl_calls import INVALID_ARGUMENT, INVALID_USAGE, SYSTEM, NcclError

import ncclpy
import testing

# The start of an id: magic, process, descriptor, nonce, entry.
HEAD = struct.Struct("Qii16sI")


def memories(name=""):
    """Return {descriptor: name} of the memfds that this process has open and that other processes could open."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"/memfd:ncclpy-{name}"):
            found[int(entry)] = target
    return found


def test_a_dropped_id_costs_next_to_nothing(nccl):
    def state():
        with open("/proc/self/maps") as maps, open("/proc/self/status") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
            return len(os.listdir("/proc/self/fd")), sum(1 for _ in maps), resident

    nccl.unique_id()
    descriptors, mappings, resident = state()
    for _ in range(3000):
        nccl.unique_id()
    after = state()
    assert after[0] == descriptors
    assert after[1] <= mappings + 4 and after[2] < resident + 4096


def test_more_ids_than_a_table_holds_all_work(nccl):
    """The entry of a used id is reused; dropped ids fill tables of thousands, and all ids still work."""
    first = nccl.unique_id()
    for _ in range(17_000):
        last = nccl.unique_id()
    assert len(memories("ids")) <= 4
    for uid in (first, last):
        nccl.ncclCommDestroy(nccl.init(1, uid, 0))
        with pytest.raises(NcclError, match="already used"):
            nccl.init(1, uid, 0)
    places = set()
    for _ in range(100):
        uid = nccl.unique_id()
        places.add(HEAD.unpack(uid[: HEAD.size])[1:5:3])
        nccl.ncclCommDestroy(nccl.init(1, uid, 0))
    assert len(places) < 50, "a place that has served is used again"


def test_refused_initialisations_leave_nothing_open(nccl):
    nccl.ncclCommDestroy(nccl.init(1, nccl.unique_id(), 0))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with pytest.raises(NcclError, match="at most 4096"):
            nccl.init(5000, nccl.unique_id(), 0)
        with pytest.raises(NcclError, match="on device 0"):  # both ranks join, and are refused
            same_device(nccl, nccl.unique_id())
    assert len(os.listdir("/proc/self/fd")) == before


def same_device(nccl, uid):
    def rank(number):
        nccl.driver.use(0)
        return nccl.init(2, uid, number)

    other = in_thread(rank, 1)
    try:
        rank(0)
    finally:
        with pytest.raises(NcclError):
            join(other)


def test_an_id_is_a_plain_value():
    uid = ncclpy.get_unique_id()
    raw = bytes(uid)
    assert len(raw) == 128 and ncclpy.UniqueId.from_bytes(raw) == uid != ncclpy.get_unique_id()
    assert pickle.loads(pickle.dumps(uid)) == copy.deepcopy(uid) == uid
    del uid  # as in `store.set(bytes(get_unique_id()))`
    with ncclpy.Communicator.init(1, 0, raw, device=0) as comm:
        assert comm.nranks == 1


def test_id_passed_as_bytes_joins_other_processes(nccl):
    uid = nccl.unique_id().hex()
    ranks = [start(f"comm = init(2, {rank}, sys.argv[1])\nsay('in')", uid) for rank in range(2)]
    for rank in ranks:
        said, errors = rank.communicate(timeout=60)
        assert said.split() == ["in"], errors
    assert not memories("communicator"), "the memory is the ranks' alone"
    with pytest.raises(NcclError, match="already used"):
        nccl.init(2, bytes.fromhex(uid), 0)


@pytest.fixture
def half_joined(nccl):
    """Rank 0 of 2 waits in another thread; yield the id."""
    uid = nccl.unique_id()
    comm = ctypes.c_void_p()

    def init():
        nccl.driver.use(0)
        with pytest.raises(NcclError, match="aborted"):
            nccl.init_into(comm, 2, uid, 0)

    thread = in_thread(init)
    wait_for(lambda: comm.value and memories("communicator"))
    yield uid
    nccl.ncclCommAbort(comm)
    join(thread)


def test_the_memory_is_sealed_and_the_users_alone(nccl, half_joined):
    opened = {**memories("communicator"), **memories("ids")}
    assert len(opened) >= 2
    nccl.ncclMemAlloc(ctypes.byref(window := ctypes.c_void_p()), 1 << 16)
    opened |= memories("memory")
    assert any("ncclpy-memory" in name for name in opened.values())
    for descriptor in opened:
        info = os.fstat(descriptor)
        assert (info.st_mode & 0o777, info.st_uid) == (0o600, os.getuid())
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as any process of the user can
        for size in {0, 4096, info.st_size + 4096} - {info.st_size}:  # other tests' memory may have that size
            with pytest.raises(PermissionError):
                os.ftruncate(again, size)
        os.close(again)
    nccl.ncclMemFree(window)


def forged(uid, sealed, name="ncclpy-ids", change=None):
    """Return an id that refers to a copy of its table, made here."""
    magic, pid, descriptor, nonce, place = HEAD.unpack(uid[: HEAD.size])
    table = os.pread(descriptor, 1 << 20, 0)
    made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(made, table)
    if change is not None:
        change(made)
    if sealed:
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return HEAD.pack(magic, pid, made, nonce, place) + uid[HEAD.size :], made


def test_unsealed_memory_is_not_used(nccl):
    uid, descriptor = forged(nccl.unique_id(), sealed=False)
    with pytest.raises(NcclError, match="is not sealed") as caught:
        nccl.init(1, uid, 0)
    assert caught.value.code == INVALID_USAGE
    os.close(descriptor)
    uid, descriptor = forged(nccl.unique_id(), sealed=True)
    nccl.ncclCommDestroy(nccl.init(1, uid, 0))  # only the seal was missing
    os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_memory_of_another_user_is_not_used(nccl):
    uid, descriptor = forged(nccl.unique_id(), sealed=True, change=lambda made: os.fchown(made, 65534, -1))
    with pytest.raises(NcclError, match="belongs to user 65534 and this process runs as 0"):
        nccl.init(1, uid, 0)
    os.close(descriptor)


# What is said


def said_by_a_rank(nccl, before):
    """Return the error of a rank in another process that joins with an id of this one, after some preparation."""
    body = f"""{before}
try:
    init(2, 1, sys.argv[1])
except Exception as error:
    say(error.code, error.text)
"""
    rank = start(body, nccl.unique_id().hex())
    said, errors = rank.communicate(timeout=60)
    assert rank.returncode == 0, errors
    return said


FULL = "import resource, os\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\nkept = []\n" + (
    "try:\n    while True: kept.append(os.dup(0))\nexcept OSError: pass"
)


def test_lack_of_descriptors_is_reported_for_the_right_process(nccl):
    said = said_by_a_rank(nccl, FULL)
    assert said.startswith(f"{SYSTEM} ") and "no file descriptor is free" in said and "ulimit -n" in said
    assert "cannot be used" not in said


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_other_user_is_reported(nccl):
    said = said_by_a_rank(nccl, "import os\nos.setgid(65534)\nos.setuid(65534)")
    assert f"may not open the memory of process {os.getpid()}, which made this unique id" in said
    assert "another user" in said and "PR_SET_DUMPABLE" in said and said.startswith(f"{SYSTEM} ")


def test_ended_process_is_reported(nccl):
    maker = start("print(nccl.unique_id().hex())", "")
    uid, errors = maker.communicate(timeout=60)
    assert uid, errors
    with pytest.raises(NcclError, match=rf"process {maker.pid}, which made this unique id, has ended") as caught:
        nccl.init(2, bytes.fromhex(uid.strip()), 0)
    assert caught.value.code == INVALID_USAGE


def test_rank_that_gave_up_is_reported(nccl):
    """A rank that joins later would otherwise wait without end."""
    uid = nccl.unique_id()
    comm = ctypes.c_void_p()

    def init():
        nccl.driver.use(0)
        with pytest.raises(NcclError, match="aborted"):
            nccl.init_into(comm, 2, uid, 0)

    thread = in_thread(init)
    wait_for(lambda: comm.value and memories("communicator"))
    nccl.ncclCommAbort(comm)
    join(thread)
    with pytest.raises(NcclError, match="gave up, or was aborted, before all ranks had joined"):
        nccl.init(2, uid, 1)


def test_damaged_id_is_reported(nccl):
    uid = bytearray(nccl.unique_id())
    uid[32:36] = b"\xff" * 4
    with pytest.raises(NcclError, match="damaged: it was not passed on byte for byte") as caught:
        nccl.init(1, bytes(uid), 0)
    assert caught.value.code == INVALID_ARGUMENT


def test_refused_thread_is_reported_as_a_thread():
    """`ulimit -v`: the stacks of threads find no address space."""
    said = testing.run_python(
        """
        import resource
        import glob, time
        import numpy as np, ncclpy
        comms = ncclpy.Communicator.init_all(range(8))
        streams = [ncclpy.Stream(comm.device) for comm in comms]
        def names():
            for name in glob.glob("/proc/self/task/*/comm"):
                try:
                    yield open(name).read()
                except OSError:  # it has ended meanwhile
                    pass
        while any(name.startswith("ncclpy-dev") for name in names()):
            time.sleep(0.1)  # idle threads would do
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20),) * 2)
        try:
            with ncclpy.group():
                for comm, stream in zip(comms, streams):
                    comm.all_reduce(np.ones(3), stream=stream)
        except ncclpy.NcclError as error:
            print(error, flush=True)
        import os
        os._exit(0)
        """,
        env={"NCCLPY_LIBRARY": "host"},
        warm=True,
    ).stdout
    assert "no thread can be started" in said and "ulimit -u" in said and "ulimit -v" in said


# A process that cannot be inspected counts as alive


def test_rank_without_descriptors_does_not_report_peers_dead(nccl):
    """The peers do not report the rank dead either."""
    uid = ncclpy.get_unique_id()
    rank = start(
        FULL + "\nos.close(kept.pop())\ncomm = init(2, 1, sys.argv[1])\nsay('in')\n"
        "import numpy as np, ctypes, time\nx = np.ones(4, np.float32)\nstream = nccl.driver.stream(1)\n"
        "for _ in range(10):\n"
        "    nccl.ncclAllReduce(x.ctypes.data, x.ctypes.data, 4, 7, 0, comm, stream)\n"
        "    nccl.driver.cuStreamSynchronize(stream)\n    time.sleep(0.05)\n"
        "os.close(kept.pop()); os.close(kept.pop())\n"
        "say(nccl.async_error(comm), x[0])\nnccl.ncclCommDestroy(comm)",
        bytes(uid).hex(),
    )
    with ncclpy.Communicator.init(2, 0, uid, device=0) as comm:
        value = np.ones(4, np.float32)
        for _ in range(10):
            comm.all_reduce(value)
        assert value[0] == 1024
    said, errors = rank.communicate(timeout=60)
    assert said.split() == ["in", "0", "1024.0"], errors


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_shrink_without_descriptors_reports_the_lack(timeout):
    """The error is reported on every rank, also on those that wait for another rank's memory, and in a polled call."""
    said = testing.run_python(
        f"""
        import os, resource, threading, ncclpy
        comms = ncclpy.Communicator.init_all(range(3), timeout={timeout})
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = []
        try:
            while True:
                kept.append(os.dup(0))
        except OSError:
            pass
        def shrink(comm):
            try:
                comm.shrink([2], abort=True)
            except ncclpy.NcclError as error:
                os.write(1, (str(error) + "\\n").encode())
        threads = [threading.Thread(target=shrink, args=(comm,)) for comm in comms[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
        """,
        env={"NCCLPY_LIBRARY": "host"},
        warm=True,
    ).stdout.splitlines()
    assert len(said) == 2 and any("no file descriptor is free" in line for line in said), said
    assert all("no file descriptor is free" in line or "gave up" in line for line in said), said


def test_a_death_is_noticed_without_descriptors(nccl):
    """The watching thread needs no descriptor to notice that a process has ended."""
    said = testing.run_python(
        """
        import os, resource, subprocess, sys, time
        import numpy as np, ncclpy
        uid = ncclpy.get_unique_id()
        code = f'''
        import ncclpy, os, sys
        comm = ncclpy.Communicator.init(2, 1, bytes.fromhex("{bytes(uid).hex()}"), device=1)
        sys.stdin.readline()
        os._exit(0)
        '''
        import textwrap
        peer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = []
        try:
            while True:
                kept.append(os.dup(0))
        except OSError:
            for _ in range(1):
                os.close(kept.pop())
        comm = ncclpy.Communicator.init(2, 0, uid, device=0)
        peer.stdin.close()
        peer.wait()
        try:
            while True:
                comm.all_reduce(np.ones(4))
        except ncclpy.NcclRemoteError as error:
            print(error)
        """,
        env={"NCCLPY_LIBRARY": "host"},
        warm=True,
    ).stdout
    assert "rank 1 of 2 is dead" in said


def test_threads_join_at_once_through_one_table(nccl):
    """Hundreds of ids made, used and freed at the same time."""

    def many(device):
        nccl.driver.use(device)
        for _ in range(200):
            uid = nccl.unique_id()
            nccl.ncclCommDestroy(nccl.init(1, uid, 0))
            with pytest.raises(NcclError):
                nccl.init(1, uid, 0)

    thread_ranks.run_ranks(6, many, 100)
