"""Fixtures and the choice of the engine; helpers that are no fixtures are in testing.py."""

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

# What is nearly always a defect is an error of the host engine's, in the processes of tests too.
os.environ.setdefault("NCCLPY_HOST_CHECKS", "1")

# An abort completes the operations of other ranks with wrong data, as on GPUs.
os.environ.setdefault("NCCLPY_HOST_ABORT_CORRUPTS", "1")

# numpy's threads for linear algebra, of which there is none here, spin for a while in each process that begins: 0.1 s
# of processor time, and hundreds of processes begin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Those of others too, as launchers set it and say so.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # In the background of a script. Children would inherit it, and no Ctrl-C would end one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    # Under nohup it stays without effect here, but children begin with the default: `ncclpy run` leaves one alone that
    # is ignored. A worker is such a child, and does not see that the first process ran under nohup.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

from array_libs import free_garbage

import ncclpy
import testing


def pytest_xdist_auto_num_workers(config):
    """Return how many processes run the tests: three a core, since most tests wait for a deadline or for a process.

    One on GPUs, which all would share, and where files or tests are named, since who does that wants to see them run.
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
    """Have each process that runs tests rewrite the assertions of other files first, and find the rest done.

    pytest takes 12 s of processor time to rewrite them all, three times what the rest of the collection takes, and its
    processes would all begin with the same file. Each imports every n-th file first. What they make is kept with
    pytest's own cache where PYTHONDONTWRITEBYTECODE forbids to keep it beside the files.
    """
    config, before = session.config, (sys.dont_write_bytecode, sys.pycache_prefix)
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(config.cache.mkdir("bytecode"))
    gc.disable()  # all that is made here stays: to look through it again and again takes a quarter of the time
    try:
        if worker := getattr(config, "workerinput", None):
            _import_every(worker["workercount"], int(worker["workerid"].removeprefix("gw")), config.args)
        return (yield)
    finally:
        gc.enable()
        sys.dont_write_bytecode, sys.pycache_prefix = before


def _import_every(step, first, arguments):
    """Import each `step`-th file of tests, from the `first` on; pytest reports what fails here when it comes to it."""
    paths = [Path(argument.partition("::")[0]) for argument in arguments]
    files = sorted(file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path]))
    for file in files[first::step]:
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))  # as pytest does before it imports a file
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


def pytest_collection_modifyitems(config, items):
    """Leave out what another part has; give long campaigns the time that they need on a busy machine."""
    # Taken out of the environment: tests that run other tests in a process of their own want all that they name.
    part, parts = map(int, os.environ.pop("NCCLPY_TEST_PART", "1/1").split("/"))
    ours = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    if len(ours) != len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(ours)))
        items[:] = ours
    for item in items:
        if item.get_closest_marker("campaign") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(testing.LONG + 20))


def pytest_collection_finish():
    """Keep what is there before the first test out of the collections that tests ask for, and of Python's own."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def keep_what_lasts_out_of_collections():
    """Do so with what a file's tests have imported or kept: with matplotlib a collection takes ten times as long."""
    yield
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and ncclpy.library().engine != "cuda":
        pytest.skip("needs the cuda engine: NVIDIA GPUs and NCCL")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail the test that leaves work on a device: it would hang whoever synchronises the device later."""
    yield
    if ncclpy.library().engine == "host":
        for device in range(ncclpy.device_count()):
            ncclpy.synchronize(device, timeout=20)
    free_garbage()


@pytest.fixture
def host_engine():
    """Skip unless the host engine runs: numpy arrays, and CPU memory as device memory, exist there alone."""
    if ncclpy.library().engine != "host":
        pytest.skip("needs the host engine (NCCLPY_LIBRARY=host)")


@pytest.fixture(scope="session")
def arrays():
    """Return the `ArrayLib` whose arrays travel in this run."""
    return testing.arrays()


@pytest.fixture
def comms2():
    """Yield two communicators of this process, one a device, and close what the test left open."""
    yield from testing.communicators(2)


@pytest.fixture
def comms4():
    """Yield four communicators of this process, one a device, and close what the test left open."""
    yield from testing.communicators(4)


@pytest.fixture
def comm1():
    """Yield the only communicator of a world of one rank."""
    for comms in testing.communicators(1):
        yield comms[0]


@pytest.fixture
def make_manager():
    """Return a function that makes a Manager; all are closed afterwards, or aborted if that takes too long."""
    made: list[ncclpy.Manager] = []

    def make(**options):
        made.append(ncclpy.Manager(**options))
        return made[-1]

    yield make
    for manager in made:
        testing.run_with_deadline(lambda manager=manager: manager.close(timeout=10), 40)


@pytest.fixture
def manager(make_manager):
    """Return a Manager of its own for the test."""
    return make_manager()
