"""Settings of NCCL that override what a guard needs: detected wherever they come from, and reported once."""

import pytest

import testing

pytestmark = pytest.mark.usefixtures("host_engine")

PRELUDE = """
import ctypes, os, warnings
import numpy as np, ncclpy

libc = ctypes.CDLL(None)
told = []

def note(message, category, filename, *more):
    told.append((str(message), filename))

warnings.showwarning = note
warnings.simplefilter("always")

def work(**options):
    comms = ncclpy.Communicator.init_all([0, 1], **options)
    arrays = [np.ones(3), np.ones(3)]
    with ncclpy.group():
        for comm, array in zip(comms, arrays):
            comm.all_reduce(array)
    assert arrays[1].tolist() == [2, 2, 2]
    for comm in comms:
        comm.close()

"""

LOST = {
    "NCCL_COMM_BLOCKING=1": "init, split and all else that makes communicators now waits",
    "NCCL_COMM_BLOCKING=0": "go through a thread of NCCL's",
    "NCCL_COMM_SPLIT_SHARE_RESOURCES=0": "an abort now does not reach what is stuck",
}


def run(code, **environment):
    return testing.run_python(PRELUDE + code, env={"NCCLPY_LIBRARY": "host", **environment}, warm=True).stdout


def run_with(way, setting, folder, code):
    """Run a program with a setting of NCCL's in the environment or in its configuration file."""
    name, value = setting.split("=")
    if way == "environment":
        return run(code, **{name: value})
    (folder / "nccl.conf").write_text(f"# a comment\n{setting}\n")
    return run(f"assert {name!r} not in os.environ\n" + code, NCCL_CONF_FILE=str(folder / "nccl.conf"))


# The effect of a setting does not depend on where it comes from.
FROM_A_FILE = "NCCL_COMM_BLOCKING=1"


@pytest.mark.parametrize(
    ("way", "setting"),
    [
        *(("environment", setting) for setting in LOST),
        *(
            pytest.param("configuration file", setting, marks=[] if setting == FROM_A_FILE else [pytest.mark.slow])
            for setting in LOST
        ),
    ],
)
def test_override_is_reported_once(way, setting, tmp_path):
    run_with(
        way,
        setting,
        tmp_path,
        f"""
work(timeout=20)
work(timeout=20)
assert len(told) == 1, told
assert told[0][0].startswith("{setting} is set and overrides what a deadline needs"), told
assert "{LOST[setting]}" in told[0][0] and told[0][1] == "<string>", told
""",
    )


@pytest.mark.parametrize("setting", [*LOST, "NCCL_COMM_SPLIT_SHARE_RESOURCES=1", "NCCL_COMM_BLOCKING=7"])
def test_setting_that_takes_nothing_away_is_not_reported(setting, tmp_path):
    """A communicator without a deadline has no guard, and a guard asks for splitShare itself."""
    options = "" if setting in LOST else "timeout=20"
    run_with("configuration file", setting, tmp_path, f"work({options})\nassert not told, told")


def test_override_outside_the_environment_is_detected_by_results_of_calls():
    """As with a plugin that answers for the environment; here the variable is unset once the engine has read it."""
    run(f"""
libc.setenv(b"NCCL_COMM_BLOCKING", b"0", 1)
work()  # the environment is read once
libc.unsetenv(b"NCCL_COMM_BLOCKING")
work(timeout=20)
work(timeout=20)
assert len(told) == 1, told
assert told[0][0].startswith("NCCL_COMM_BLOCKING=0 is in force ("), told
assert "{LOST["NCCL_COMM_BLOCKING=0"]}" in told[0][0], told
""")


def test_nothing_is_reported_where_nothing_overrides():
    """Children neither: a blocking parent makes them at once, and their guards may be as quick."""
    run("""
work(timeout=20)
with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), timeout=20) as comm:
    child = comm.split(0)
    child.all_reduce(np.ones(3))
assert not told, told
""")


def test_warning_raised_as_an_error_leaves_nothing_behind(tmp_path):
    (tmp_path / "nccl.conf").write_text("NCCL_COMM_BLOCKING=0\n")
    run(
        """
warnings.simplefilter("error")
try:
    ncclpy.Communicator.init_all([0, 1], timeout=20)
except RuntimeWarning as error:
    assert "NCCL_COMM_BLOCKING=0" in str(error)
else:
    raise AssertionError
import gc
gc.collect()
work(timeout=20)
""",
        NCCL_CONF_FILE=str(tmp_path / "nccl.conf"),
    )
