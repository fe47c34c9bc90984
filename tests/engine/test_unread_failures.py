"""A program that ends without the errors of its failed operations has no exit status of a success."""

from __future__ import annotations

import gc
import textwrap
import weakref

import pytest

import testing
from ncclpy.engine import unread_failures
from ncclpy.errors import NcclError, deliver

pytestmark = pytest.mark.usefixtures("host_engine")

#: Makes two ranks of one kind, of which the second does nothing more, and has an operation of the first fail.
MAKE = {
    "process group": """
        def make(rank):
            return ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=30)

        def begin(rank, name, **options):
            return ranks[rank].all_reduce(np.ones(4), **options)
    """,
    "Manager": """
        key = ncclpy.Manager.generate_communicator_key()

        def make(rank):
            return ncclpy.Manager(timeout=30, store=store)

        def begin(rank, name, **options):
            numbers = {"num_local": 1, "num_global": 2, "global_rank": rank, "communicator_key": key}
            work = ranks[rank].all_reduce(name, np.ones(4), device=rank, **numbers, **options)
            ranks[rank].signal_multi_node_ready(name)
            return work
    """,
    "coordinator": """
        def make(rank):
            return ncclpy.Coordinator((store, rank, 2), device=rank, timeout=30 if begun else None)

        def begin(rank, name, **options):
            if options:  # it has no deadline of a call: the other rank ends the coordinator
                work = ranks[0].all_reduce(name, np.ones(4))
                ranks[1].abort("it fails")
                return work
            return ranks[rank].all_reduce(name, np.ones(4))
    """,
}

PROGRAM = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np, ncclpy, testing
from ncclpy.bootstrap import LocalStore

store, begun = LocalStore(), []
{make}
with ThreadPoolExecutor(2) as pool:
    ranks = list(pool.map(make, range(2)))
for work in [begin(rank, "first") for rank in range(2)]:
    work.wait(30)
work = begin(0, "second", timeout=0.3)
testing.wait_for(work.is_completed, "the operation to fail")
ranks[1].abort("it is not needed")
print("the last words")
{end}
"""

NO_ERROR = {
    "nothing": "",
    "dropped": "import gc; del ranks[:], work; gc.collect()",
    "SystemExit(0)": "sys.exit(0)",
    "a thread that runs": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
}
OTHER_STATUS = {
    "sys.exit(3)": ("sys.exit(3)", 3),
    "an exception": ("raise ZeroDivisionError", 1),
    "os._exit(4)": ("sys.stdout.flush(); os._exit(4)", 4),
}
DELIVERED = {
    "exception()": "assert isinstance(work.exception(30), ncclpy.NcclError)",
    "abort()": "ranks[0].abort()",
    "close()": """
try:
    ranks[0].close()
except ncclpy.NcclError as error:
    pass
else:
    raise AssertionError
""",
    "close() in an exit handler": """
@atexit.register
def end():
    try:
        ranks[0].close()
    except ncclpy.NcclError:
        pass
""",
}


def run(kind, end):
    return testing.run_python(
        PROGRAM.format(make=textwrap.dedent(MAKE[kind]), end=end),
        check=False,
        warm=True,
        env={"NCCLPY_LIBRARY": "host"},
    )


def lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("ncclpy: ")]


@pytest.mark.parametrize("end", NO_ERROR)
@pytest.mark.parametrize("kind", MAKE)
def test_program_without_the_error_has_another_status(kind, end):
    done = run(kind, NO_ERROR[end])
    assert done.returncode == 70, done
    [line] = lines(done)
    assert kind in line and ("NcclAborted: " if kind == "coordinator" else "NcclTimeout: ") in line, line
    assert done.stdout.endswith("the last words\n")


@pytest.mark.parametrize("end", OTHER_STATUS)
def test_other_status_stays(end):
    how, status = OTHER_STATUS[end]
    assert run("process group", how).returncode == status


@pytest.mark.parametrize("end", DELIVERED)
@pytest.mark.parametrize("kind", MAKE)
def test_program_with_the_error_succeeds(kind, end):
    done = run(kind, DELIVERED[end])
    assert (done.returncode, lines(done)) == (0, []), done


def test_fork_reports_nothing():
    done = run(
        "process group",
        """
if os.fork() == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
""",
    )
    assert done.returncode == 70 and len(lines(done)) == 1, done


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"num_local": 2, "timeout": 0.1}, "not all participants arrived within 0.1 s"),
        (
            {"num_local": 1, "num_global": 2, "global_rank": 0, "communicator_key": bytes(128)},
            "rank 1 of 2 did not arrive",
        ),
        ({"num_local": 1, "device": 1}, None),
    ],
)
def test_participant_that_was_never_launched(numbers, words):
    numbers = {"device": 0, "timeout": 0.2} | numbers
    done = testing.run_python(
        f"""
        import numpy as np, ncclpy, testing
        from ncclpy.bootstrap import LocalStore

        manager = ncclpy.Manager(store=LocalStore())
        work = manager.all_reduce("key", np.ones(4), **{numbers})
        manager.signal_multi_node_ready("key")
        testing.wait_for(work.is_completed, "the operation to end")
        manager.close() if {words is None} else None
        """,
        check=False,
        warm=True,
    )
    assert done.returncode == (0 if words is None else 70), done
    assert [words in line for line in lines(done)] == ([] if words is None else [True]), done


def test_operation_that_the_end_of_python_ends_is_no_failure():
    """Torch's store ends the calls of daemon threads by SystemExit: those of the program, and the package's own."""
    done = testing.run_python(
        """
        import sys, threading, time
        from ncclpy.engine import unread_failures
        from ncclpy.engine.monitor import call_at

        unread_failures.note_failures("rank 0 of process group 'x'", [SystemExit()])
        called = threading.Event()

        def end():
            called.set()
            sys.exit(1)

        call_at(time.monotonic(), end)
        assert called.wait(30)
        """
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("noted", ["before", "after"])
def test_error_that_was_given_to_the_program_keeps_no_frames(noted):
    class Array:
        """Something that a frame of the program has."""

    def fail():
        array = Array()
        refs.append(weakref.ref(array))
        errors = [NcclError("lost")]
        if noted == "before":
            unread_failures.note_failures("rank 0 of process group 'x'", errors)
        deliver(errors[0])
        if noted == "after":
            unread_failures.note_failures("rank 0 of process group 'x'", errors)
        raise errors[0]

    refs: list = []
    with pytest.raises(NcclError, match="lost"):
        fail()
    gc.collect()
    assert refs[0]() is None
