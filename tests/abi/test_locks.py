"""The order of locks: docs and header have the same list, and a build with `-Ddebug_locks=true` asserts it."""

import re
import signal
import subprocess

import pytest
from sanitizers import ROOT, compiled

import testing
from ncclpy.core.runtime import library

HEADER = (ROOT / "ncclpy/abi/ordered_mutex.h").read_text()
#: A lock's name in C and its name in the docs, in their order.
LOCKS = re.findall(r'^  LOCK\((\w+), "([^"]+)"', HEADER, re.MULTILINE)

plain = pytest.mark.skipif(library.debug_locks, reason="a build with -Ddebug_locks=true, whose locks are not plain")
debug = pytest.mark.skipif(not library.debug_locks, reason="a normal build: it does not assert the order of locks")


def locks_of_the_page():
    page = (ROOT / "docs/locks.md").read_text()
    for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE):
        if cell != "lock" and not cell.startswith("---"):
            yield from cell.removeprefix("the others: ").split(", ") if cell.startswith("the others: ") else [cell]


def test_page_and_header_have_one_list():
    page = list(locks_of_the_page())
    assert len(page) == len(LOCKS) > 25
    for said, (_, words) in zip(page, LOCKS, strict=True):
        assert said.startswith(words)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A program that takes locks, in a debug build of its own."""
    folder = tmp_path_factory.mktemp("locks")
    book, program = folder / "ordered_mutex.o", folder / "locks"
    done = compiled(book, "-c", "-x", "c", "-std=gnu11", ROOT / "ncclpy/abi/ordered_mutex.c", "-DNCCLPY_DEBUG_LOCKS")
    assert done.returncode == 0, done.stderr
    done = compiled(
        program, "-DNCCLPY_DEBUG_LOCKS", "-x", "c++", ROOT / "tests/host/base/locks.cpp", "-x", "none", book
    )
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("way", ["in order", "communicators by address", "tried"])
def test_locks_in_order_pass(way, driver):
    ran = subprocess.run([driver, way], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("in a wrong order", "it waits for a communicator's `issuing_` (.*) while it holds a stream's mutex"),
        ("two of one line", "it waits for handles (.*) while it holds handles"),
        ("one twice", "it waits for handles (.*), which it holds"),
        ("communicators against their addresses", "it waits for communicators' (.*) while it holds communicators'"),
        ("under one that was tried", "it waits for communicators' mutexes (.*) while it holds a lane's list"),
        ("given back by who has it not", "it gives a lane's list (.*) back, which it does not hold"),
        ("a task under a lock", "it runs a task of a stream, while it holds handles"),
    ],
)
def test_locks_out_of_order_end_the_process(way, said, driver):
    ran = subprocess.run([driver, way], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (-signal.SIGABRT, "")
    assert re.search(r"ncclpy: locks out of order in thread \d+ \(locks\): " + said, ran.stderr), ran.stderr
    assert "docs/locks.md" in ran.stderr
    assert str(driver) in ran.stderr, "the way to the place"


@plain
def test_normal_build_has_plain_locks():
    testing.run_python(
        """
        import ncclpy

        for comm in ncclpy.Communicator.init_all([0, 1]):
            comm.abort()
        assert "ncclpy_locks" not in open("/proc/self/maps").read()
    """,
        env={"NCCLPY_LIBRARY": "host"},
    )


OUT_OF_ORDER = """
    import ctypes, re
    import numpy as np
    import ncclpy

    comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id())
    comm.all_reduce(np.ones(1))  # this goes well
    book = ctypes.PyDLL(re.search(r"\\S+libncclpy_locks\\.so", open("/proc/self/maps").read())[0])
    held = {held}
    if held is not None:
        book.ncclpy_lock_taken(held, ctypes.c_void_p(1))
    {call}
"""


@debug
@pytest.mark.parametrize(
    ("held", "call", "said"),
    [
        ("MONITOR", "comm.all_reduce(np.ones(1))", "communicators' mutexes .* while it holds the monitor's"),
        # Python's side and the host engine's share one record.
        ("STREAM", "comm.all_reduce(np.ones(1))", "while it holds a stream's mutex"),
        ("GATE", "ncclpy.get_unique_id()", "it waits for the GIL while it holds a communicator's gate"),
        (None, "book.ncclpy_lock_wanted({COMM}, None)", "communicators' mutexes .* and has not given the GIL up"),
    ],
)
def test_package_asserts_its_order(held, call, said):
    numbers = {name: number for number, (name, _) in enumerate(LOCKS)}
    code = OUT_OF_ORDER.format(held=numbers.get(held), call=call.format(**numbers))
    done = testing.run_python(code, check=False, env={"NCCLPY_LIBRARY": "host"})
    assert done.returncode == -signal.SIGABRT, done
    assert re.search("ncclpy: locks out of order .*" + said, done.stderr), done.stderr
