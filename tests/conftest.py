"""Fixtures and the choice of the engine; other helpers are in testing.py."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import zlib
from pathlib import Path

import pytest

if not os.environ.get("NCCLPY_LIBRARY") and not os.path.exists("/dev/nvidiactl"):
    # Without a choice and without a GPU the suite runs on the host engine; children inherit it.
    os.environ["NCCLPY_LIBRARY"] = "host"

# Makes usage that is nearly always a defect an error of the host engine, in child processes too.
os.environ.setdefault("NCCLPY_HOST_CHECKS", "1")

# An abort completes operations of other ranks with wrong data, as on GPUs.
os.environ.setdefault("NCCLPY_HOST_ABORT_CORRUPTS", "1")

# numpy's threads for linear algebra, which tests do not use, spin at the start of each process: 0.1 s of processor
# time in each of hundreds of processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# OpenMP too, as launchers set it to 1 and print a message if it is unset.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Ignored in the background of a script. Children would inherit that, and no Ctrl-C would end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    # Under nohup SIGHUP still has no effect here, but children begin with the default: `ncclpy run` does not touch an
    # ignored one. A worker of pytest-xdist is such a child, and cannot see that the first process ran under nohup.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

from array_libs import free_garbage

import ncclpy
import testing
from ncclpy.engine import unread_failures


def pytest_xdist_auto_num_workers(config):
    """Return the number of test processes: three per core, since most tests wait for a deadline or for a process.

    One on GPUs, which all would share, and if files or tests are named, so that their output is visible.
    """
    if ncclpy.library().engine == "cuda" or config.args_source != config.ArgsSource.TESTPATHS:
        return 0
    return min(3 * len(os.sched_getaffinity(0)), 8)


def pytest_report_header():
    library = ncclpy.library()
    version = ".".join(map(str, library.version))
    arrays = testing.arrays().name
    return f"ncclpy: engine {library.engine}, NCCL {version}, {ncclpy.device_count()} devices, arrays of {arrays}"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Have each test process rewrite the assertions of other files first, and find the rest done.

    pytest takes 12 s of processor time to rewrite them all, three times the rest of the collection, and all its
    processes would begin with the same file. So each imports every n-th file first. If PYTHONDONTWRITEBYTECODE is set,
    the results are kept in pytest's cache instead of beside the files.
    """
    config, before = session.config, (sys.dont_write_bytecode, sys.pycache_prefix)
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(config.cache.mkdir("bytecode"))
    gc.disable()  # all objects made here stay: repeated collections would take a quarter of the time
    try:
        if worker := getattr(config, "workerinput", None):
            _import_every(worker["workercount"], int(worker["workerid"].removeprefix("gw")), config.args)
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode, sys.pycache_prefix = before


def _import_every(step, first, arguments):
    """Import every `step`-th test file from the `first` on; pytest reports failed imports later itself."""
    paths = [Path(argument.partition("::")[0]) for argument in arguments]
    files = sorted(file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path]))
    for file in files[first::step]:
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))  # as pytest does before an import
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of other parts; give long campaigns the time that they need on a busy machine."""
    # Removed from the environment: tests that run other tests in a separate process need all that they name.
    part, parts = map(int, os.environ.pop("NCCLPY_TEST_PART", "1/1").split("/"))
    ours = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    if len(ours) != len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(ours)))
        items[:] = ours
    for item in items:
        if item.get_closest_marker("campaign") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(testing.LONG + 20))


def pytest_collection_finish():
    """Exclude all objects that exist before the first test from garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Let pytest's exit status stand: many tests make operations fail, and ask for no error."""
    unread_failures._noted.clear()


@pytest.fixture(autouse=True, scope="module")
def keep_what_lasts_out_of_collections():
    """Exclude what a file's tests have imported or kept: with matplotlib a collection takes ten times as long."""
    yield
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and ncclpy.library().engine != "cuda":
        pytest.skip("needs the cuda engine: NVIDIA GPUs and NCCL")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail the test that leaves work on a device, where a later synchronisation would hang."""
    yield
    if ncclpy.library().engine == "host":
        for device in range(ncclpy.device_count()):
            ncclpy.synchronize(device, timeout=20)
    free_garbage()


@pytest.fixture
def host_engine():
    """Skip unless the host engine runs: only there arrays are numpy's, and CPU memory is device memory."""
    if ncclpy.library().engine != "host":
        pytest.skip("needs the host engine (NCCLPY_LIBRARY=host)")


@pytest.fixture(scope="session")
def arrays():
    """Return the `ArrayLib` of the arrays in this run."""
    return testing.arrays()


@pytest.fixture
def comms2():
    """Yield two communicators of this process, one per device, and close the open ones after the test."""
    yield from testing.communicators(2)


@pytest.fixture
def comms4():
    """Yield four communicators of this process, one per device, and close the open ones after the test."""
    yield from testing.communicators(4)


@pytest.fixture
def comm1():
    """Yield the only communicator of a world of one rank."""
    for comms in testing.communicators(1):
        yield comms[0]


@pytest.fixture
def make_manager():
    """Return a function that makes a Manager; all are closed after the test, or aborted if closing takes too long."""
    made: list[ncclpy.Manager] = []

    def make(**options):
        made.append(ncclpy.Manager(**options))
        return made[-1]

    yield make
    for manager in made:
        testing.run_with_deadline(lambda manager=manager: manager.close(timeout=10), 40)


@pytest.fixture
def manager(make_manager):
    """Return a new Manager for the test."""
    return make_manager()
