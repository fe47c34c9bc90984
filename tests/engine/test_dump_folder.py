"""NCCLPY_DUMP_DIR, read at import: one file for each process, when its group has failed and on SIGUSR2."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

import testing
from ncclpy.engine import dump_files

pytestmark = pytest.mark.usefixtures("host_engine")

BEGIN = """
import json, logging, os, signal, sys, threading, time
import numpy as np, ncclpy, testing
from ncclpy.bootstrap import LocalStore

FOLDER = os.environ.get("NCCLPY_DUMP_DIR", "")

def files():
    return sorted(name for name in os.listdir(FOLDER) if name.endswith(".json")) if os.path.isdir(FOLDER) else []

def dumps(number=1):
    testing.wait_for(lambda: len(files()) >= number)
    return [json.load(open(os.path.join(FOLDER, name))) for name in files()]

def alone(name="default", rank=0, size=2, store=None, **options):
    return ncclpy.ProcessGroup(store or LocalStore(), rank, size, device=0, name=name, **options)
"""


def run(code, folder, check=True, **env):
    """Run a program with the variable set to `folder`; return what it printed and its errors."""
    env = {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": str(folder)} | env
    done = testing.run_python(f"{BEGIN}\n{textwrap.dedent(code)}", env=env, check=check)
    return done.stdout, done.stderr


def test_a_group_that_is_aborted_is_dumped_once(tmp_path):
    out, errors = run(
        """
        group = alone(rank=1, size=3)
        group.abort("enough")
        (found,) = dumps()
        print(os.getpid(), files()[0])
        written = os.stat(os.path.join(FOLDER, files()[0])).st_mtime_ns
        group.abort("again")
        time.sleep(0.25)
        assert os.stat(os.path.join(FOLDER, files()[0])).st_mtime_ns == written
        begins = "NcclAborted: process group 'default' was aborted by rank 1: enough. process group 'default': "
        assert found["reason"].startswith(begins), found["reason"]
        (known,) = found["groups"]
        assert {name: known[name] for name in ("name", "number", "rank", "size")} == {
            "name": "default", "number": 1, "rank": 1, "size": 3}
        assert known["made"] <= known["ended"] <= found["monotonic"] and known["error"] == found["reason"]
        assert abs(found["wall"] - time.time()) < 60 and abs(found["monotonic"] - time.monotonic()) < 60
        assert found["host"] and found["pid"] == os.getpid() and "/" in found["clock"]
        group.close()
        """,
        tmp_path / "new",
    )
    pid, name = out.split()
    assert name == f"rank-1-{socket.gethostname()}-{pid}.json"
    assert errors == ""


def test_the_signs_of_the_folder(tmp_path):
    run("group = alone(rank=1); group.abort(); group.close()", tmp_path / "%h 100%% %r")
    (folder,) = os.listdir(tmp_path)
    assert folder == f"{socket.gethostname()} 100% 1"
    assert len(os.listdir(tmp_path / folder)) == 1, "the process's end waits for it"


def test_a_sign_that_stands_for_nothing_is_warned_of_at_import(tmp_path):
    _, errors = run("group = alone(); group.abort(); group.close()", tmp_path / "%q")
    assert "RuntimeWarning: NCCLPY_DUMP_DIR=" in errors and "'%q' stands for nothing" in errors
    assert os.listdir(tmp_path) == []


def test_without_the_variable_nothing_is_written_and_no_signal_is_taken(tmp_path):
    done = testing.run_python(
        f"import os\nos.chdir({str(tmp_path)!r})\n{BEGIN}\ngroup = alone(); group.abort(); group.close()\n"
        "assert os.listdir() == [] and 'ncclpy.engine.dump_folder' not in sys.modules\n"
        "assert not any(each.name == 'ncclpy-dumps' for each in threading.enumerate())\n"
        "os.kill(os.getpid(), signal.SIGUSR2); time.sleep(60)",
        env={"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": ""},
        check=False,
    )
    assert done.returncode == -signal.SIGUSR2, done.stderr


def test_two_groups_of_a_process_are_in_one_file(tmp_path):
    run(
        """
        one, two = alone("one", rank=1, size=4), alone("two", size=2)
        two.abort("the small one")
        testing.wait_for(lambda: files() and "the small one" in dumps()[0]["reason"])
        one.abort("the large one")
        testing.wait_for(lambda: "the large one" in dumps()[0]["reason"])
        (found,) = dumps()
        assert [group["name"] for group in found["groups"] if group["ended"]] == ["one", "two"]
        assert files()[0].startswith("rank-1-")
        one.close(), two.close()
        """,
        tmp_path,
    )


def test_a_group_that_was_closed_is_told_of_no_more(tmp_path):
    run(
        """
        alone("gone").close()
        assert ncclpy.recorder.snapshot()["groups"] == []
        group = alone("there")
        assert [each["name"] for each in ncclpy.recorder.snapshot()["groups"]] == ["there"]
        assert ncclpy.recorder.snapshot()["groups"][0]["ended"] is None
        group.close()
        assert files() == [], "a group that has not failed"
        """,
        tmp_path,
    )


def test_ranks_that_do_not_meet_in_time_are_in_it(tmp_path):
    run(
        """
        group = alone(rank=0, size=3, timeout=0.3)
        work = group.all_reduce(np.ones(4))
        assert isinstance(work.exception(30), ncclpy.NcclTimeout)
        (found,) = dumps()
        assert found["reason"].startswith("NcclTimeout: ranks 1-2 of 3 did not come"), found["reason"]
        (entry,) = found["entries"]
        assert (entry["state"], entry["rank"], entry["nranks"], entry["sequence"]) == ("failed", 0, 3, 0), entry
        assert entry["communicator"] == "default (never made)"
        group.close()
        """,
        tmp_path,
    )


def test_a_group_that_goes_on_is_dumped_too(tmp_path):
    run(
        """
        group = alone(rank=0, size=3, timeout=0.3, on_error="report")
        assert isinstance(group.all_reduce(np.ones(4)).exception(30), ncclpy.NcclTimeout)
        assert "did not come" in dumps()[0]["reason"]
        assert dumps()[0]["groups"][0]["ended"] is None
        group.abort(); group.close()
        """,
        tmp_path,
    )


@pytest.mark.parametrize("on_error", ["exit", "exit_now"])
def test_a_process_that_ends_by_its_group_has_written_before(tmp_path, on_error):
    run(f"alone(timeout=0.3, on_error={on_error!r}).all_reduce(np.ones(4)); time.sleep(60)", tmp_path, check=False)
    (name,) = os.listdir(tmp_path)
    assert "did not come" in json.loads((tmp_path / name).read_text())["reason"]


def test_a_folder_that_cannot_be_written_is_told_once_and_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    _, errors = run(
        """
        for name in "ab":
            group = alone(name, rank=0, size=3, timeout=0.2)
            error = group.all_reduce(np.ones(4)).exception(30)
            assert isinstance(error, ncclpy.NcclTimeout), error
            time.sleep(0.2)
            group.close()
        """,
        tmp_path / "file",
    )
    assert errors.count("the recorder's dump cannot be written to") == 1, errors
    assert "(NCCLPY_DUMP_DIR)" in errors and "Traceback" not in errors


def test_dump_follows_no_link_in_the_place_of_its_unfinished_file(tmp_path):
    """Its name can be guessed, and the folder may be one that others can write to, as /tmp is."""
    path, victim = tmp_path / "dump.json", tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / f"dump.json.{os.getpid()}.unfinished").symlink_to(victim)
    dump_files.write(str(path), "a test")
    assert json.loads(path.read_text())["reason"] == "a test" and not path.is_symlink()
    assert victim.read_text() == "untouched" and sorted(os.listdir(tmp_path)) == ["dump.json", "victim"]


def test_a_full_disk_leaves_nothing_behind_and_the_next_dump_is_written(tmp_path):
    _, errors = run(
        """
        import ncclpy.engine.dump_files as dump_files
        whole = dump_files.dump

        def full(**options):
            raise OSError(28, "No space left on device")

        dump_files.dump = full
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.3)
        assert os.listdir(FOLDER) == [], os.listdir(FOLDER)
        dump_files.dump = whole
        os.kill(os.getpid(), signal.SIGUSR2)
        (found,) = dumps()
        assert found["reason"] == "SIGUSR2: asked for"
        """,
        tmp_path,
    )
    assert errors.count("No space left on device") == 1


STUCK = {
    "in a collective": "group.all_reduce(np.ones(4), timeout=60).wait()",
    "in C without the GIL": "import ctypes; ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)",
    "in Python": "while True: pass",
    "in a wait of Python's": "threading.Event().wait()",
}


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(where, marks=[] if where in ("in a collective", "in Python") else [pytest.mark.slow])
        for where in STUCK
    ],
)
def test_sigusr2_dumps_whatever_the_main_thread_is_in_and_it_goes_on(tmp_path, where):
    code = f"{BEGIN}\ngroup = alone(timeout=60)\nprint('ready', flush=True)\n{STUCK[where]}"
    env = os.environ | {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(testing.__file__), env.get("PYTHONPATH", "")])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            for _ in range(2):
                for name in os.listdir(tmp_path):
                    os.unlink(tmp_path / name)
                process.send_signal(signal.SIGUSR2)
                testing.wait_for(lambda: any(name.endswith(".json") for name in os.listdir(tmp_path)))
                (name,) = [name for name in os.listdir(tmp_path) if name.endswith(".json")]
                found = json.loads((tmp_path / name).read_text())
                assert (found["reason"], found["pid"]) == ("SIGUSR2: asked for", process.pid)
                assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_handler_of_the_program_is_left_alone(tmp_path, when):
    code = """
    import os, signal, sys
    def install():
        signal.signal(signal.SIGUSR2, lambda *_: print("the program's", flush=True))
    if "before" == WHEN: install()
    import ncclpy, time
    if "after" == WHEN: install()
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.3)
    assert os.listdir(os.environ["NCCLPY_DUMP_DIR"]) == []
    """
    env = {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": str(tmp_path)}
    done = testing.run_python(f"WHEN = {when!r}\n{textwrap.dedent(code)}", env=env)
    assert done.stdout == "the program's\n"


def test_an_ignored_signal_stays_ignored(tmp_path):
    env = {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": str(tmp_path)}
    testing.run_python(
        """
        import os, signal, time
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        import ncclpy
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.3)
        assert os.listdir(os.environ["NCCLPY_DUMP_DIR"]) == []
        """,
        env=env,
    )
    assert os.listdir(tmp_path) == []


def test_a_child_of_a_fork_writes_nothing_and_lives(tmp_path):
    run(
        """
        group = alone(rank=0, size=2)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.3)
            os._exit(7 if ncclpy.recorder.snapshot()["groups"] == [] and files() == [] else 8)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        group.close()
        """,
        tmp_path,
    )


def test_a_dump_of_a_deadline_is_written_when_ranks_do_not_meet(tmp_path):
    """Also that of NCCLPY_DUMP_ON_TIMEOUT, by the group's rank."""
    run(
        """
        group = alone(rank=2, size=3, timeout=0.3)
        assert isinstance(group.all_reduce(np.ones(4)).exception(30), ncclpy.NcclTimeout)
        testing.wait_for(lambda: os.path.exists(os.path.join(FOLDER, "late-2.json")))
        group.close()
        """,
        tmp_path,
        NCCLPY_DUMP_ON_TIMEOUT=str(tmp_path / "late-%r.json"),
    )
    reasons = {path.name.split("-")[0]: json.loads(path.read_text())["reason"] for path in tmp_path.iterdir()}
    assert reasons.keys() == {"late", "rank"}
    assert all("ranks 0-1 of 3 did not come" in each for each in reasons.values()), reasons
