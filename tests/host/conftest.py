"""Fixtures of the tests of the host engine's NCCL half: the library, processes, ranks and their streams."""

import pytest
from host_ranks import Processes
from nccl_calls import Nccl

import ncclpy
from ncclpy.core.runtime.search import host_engine_path


@pytest.fixture(scope="session", autouse=True)
def host_engine_is_loaded():
    """Skip all tests of this folder where NCCL is loaded: none depends on it, and some load ncclpy in processes."""
    if ncclpy.library().engine != "host":
        pytest.skip("needs the host engine (NCCLPY_LIBRARY=host)")


@pytest.fixture(scope="module")
def nccl():
    return Nccl(host_engine_path())


@pytest.fixture(autouse=True)
def first_device(nccl):
    nccl.driver.use(0)


@pytest.fixture(scope="module")
def processes():
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def comms(nccl):
    """Four ranks in this process."""
    comms = nccl.init_all(4)
    yield comms
    for comm in comms:
        nccl.library.ncclCommDestroy(comm)


@pytest.fixture
def streams(nccl):
    streams = []
    for device in range(4):
        nccl.driver.use(device)
        streams.append(nccl.driver.stream(1))
    nccl.driver.use(0)
    return streams
