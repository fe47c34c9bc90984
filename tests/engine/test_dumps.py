"""NCCLPY_DUMP_DIR, read at import: one dump for each process, after a failure of its operations and on SIGUSR2."""

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
from ncclpy.cli.main import main

pytestmark = pytest.mark.usefixtures("host_engine")

BEGIN = '''
import json, logging, os, signal, sys, threading, time
import numpy as np, ncclpy, testing
from ncclpy.bootstrap import LocalStore

FOLDER = os.environ.get("NCCLPY_DUMP_DIR", "")

def files():
    return sorted(name for name in os.listdir(FOLDER) if name.endswith(".json")) if os.path.isdir(FOLDER) else []

def dumps(number=1):
    testing.wait_for(lambda: len(files()) >= number)
    return [json.load(open(os.path.join(FOLDER, name))) for name in files()]

def the_dump():
    (name,) = files()
    with open(os.path.join(FOLDER, name)) as file:
        return json.load(file)

def states():
    return [entry["state"] for entry in the_dump()["entries"]]

def alone(name="default", rank=0, size=2, store=None, **options):
    return ncclpy.ProcessGroup(store or LocalStore(), rank, size, device=0, name=name, **options)

def count_writes():
    """Return a list that grows with each dump that the process has tried to write."""
    tried, write = [], ncclpy.engine.dumps._write
    def counted(*what):
        try:
            write(*what)
        finally:
            tried.append(what)
    ncclpy.engine.dumps._write = counted
    return tried

def late(call):
    try:
        call()
    except ncclpy.NcclTimeout as error:
        return error
    raise AssertionError("it was in time")
'''


def run(code, folder, check=True, **env):
    """Run a program with the variable set to `folder`; return what it printed and its errors."""
    env = {"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": str(folder)} | env
    done = testing.run_python(f"{BEGIN}\n{textwrap.dedent(code)}", env=env, check=check)
    return done.stdout, done.stderr


def test_aborted_group_is_dumped_once(tmp_path):
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


def test_without_the_variable_nothing_is_written_and_no_signal_is_taken(tmp_path):
    done = testing.run_python(
        f"import os\nos.chdir({str(tmp_path)!r})\n{BEGIN}\ngroup = alone(); group.abort(); group.close()\n"
        "assert os.listdir() == [] and 'ncclpy.engine.dumps' not in sys.modules\n"
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


def test_closed_group_is_not_listed(tmp_path):
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


def test_dump_has_ranks_that_do_not_meet_in_time(tmp_path):
    run(
        """
        group = alone(rank=0, size=3, timeout=0.3)
        work = group.all_reduce(np.ones(4))
        assert isinstance(work.exception(30), ncclpy.NcclTimeout)
        (found,) = dumps()
        assert found["reason"].startswith("NcclTimeout: ranks 1-2 of 3 did not arrive"), found["reason"]
        (entry,) = found["entries"]
        assert (entry["state"], entry["rank"], entry["nranks"], entry["sequence"]) == ("failed", 0, 3, 0), entry
        assert entry["communicator"] == "default (never made)"
        group.close()
        """,
        tmp_path,
    )


def test_group_that_reports_errors_is_dumped_too(tmp_path):
    run(
        """
        group = alone(rank=0, size=3, timeout=0.3, on_error="report")
        assert isinstance(group.all_reduce(np.ones(4)).exception(30), ncclpy.NcclTimeout)
        assert "did not arrive" in dumps()[0]["reason"]
        assert dumps()[0]["groups"][0]["ended"] is None
        group.abort(); group.close()
        """,
        tmp_path,
    )


@pytest.mark.parametrize("on_error", ["exit", "exit_now"])
def test_dump_is_written_before_its_group_ends_the_process(tmp_path, on_error):
    run(f"alone(timeout=0.3, on_error={on_error!r}).all_reduce(np.ones(4)); time.sleep(60)", tmp_path, check=False)
    (name,) = os.listdir(tmp_path)
    assert "did not arrive" in json.loads((tmp_path / name).read_text())["reason"]


def test_folder_that_cannot_be_written_is_reported_once_and_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    _, errors = run(
        """
        tried = count_writes()
        for number, name in enumerate("ab"):
            group = alone(name, rank=0, size=3, timeout=0.2)
            error = group.all_reduce(np.ones(4)).exception(30)
            assert isinstance(error, ncclpy.NcclTimeout), error
            testing.wait_for(lambda: len(tried) > number)
            group.close()
        """,
        tmp_path / "file",
    )
    assert errors.count("the recorder's dump cannot be written to") == 1, errors
    assert "(NCCLPY_DUMP_DIR)" in errors and "Traceback" not in errors


def test_relative_folder_starts_at_the_folder_of_the_import(tmp_path):
    code = """
    import os
    os.chdir(%r)
    import ncclpy
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    ncclpy.ProcessGroup(ncclpy.bootstrap.LocalStore(), 0, 2, device=0).abort()
    """
    testing.run_python(code % str(tmp_path), env={"NCCLPY_LIBRARY": "host", "NCCLPY_DUMP_DIR": "new"})
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "new"]
    assert len(os.listdir(tmp_path / "new")) == 1, "the process's end waits for it"


def test_folder_of_another_user_is_refused_and_reported_once(tmp_path):
    me = os.geteuid()
    if me == 0:  # every process trusts a folder of root
        os.chown(tmp_path, 4711, 4711)
    _, errors = run(
        f"""
        os.geteuid = lambda: {me + 1}
        tried = count_writes()
        for number in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
            testing.wait_for(lambda: len(tried) > number)
        """,
        tmp_path,
    )
    assert os.listdir(tmp_path) == []
    assert errors.count("the recorder's dump cannot be written to") == 1, errors
    assert f"{tmp_path} belongs to user {me or 4711}, and this process runs as user {me + 1}" in errors


def test_dump_follows_no_link_in_the_place_of_its_unfinished_file(tmp_path):
    """The name of that file can be guessed, and the folder may be open to others, as /tmp is."""
    folder, victim = tmp_path / "dumps", tmp_path / "victim"
    victim.write_text("untouched")
    run(
        f"""
        os.mkdir(FOLDER)
        name = f"{{ncclpy.engine.dumps.socket.gethostname()}}-{{os.getpid()}}.json"
        os.symlink({str(victim)!r}, os.path.join(FOLDER, name + ".unfinished"))
        os.kill(os.getpid(), signal.SIGUSR2)
        (found,) = dumps()
        assert found["reason"] == "requested by SIGUSR2" and os.listdir(FOLDER) == [name], os.listdir(FOLDER)
        assert not os.path.islink(os.path.join(FOLDER, name))
        """,
        folder,
    )
    assert victim.read_text() == "untouched"


def test_full_disk_leaves_no_file_and_the_next_dump_is_written(tmp_path):
    _, errors = run(
        """
        from ncclpy.engine import dumps as writer
        whole = writer.dump

        def full(**options):
            raise OSError(28, "No space left on device")

        tried = count_writes()
        writer.dump = full
        os.kill(os.getpid(), signal.SIGUSR2)
        testing.wait_for(lambda: tried)
        assert os.listdir(FOLDER) == [], os.listdir(FOLDER)
        writer.dump = whole
        os.kill(os.getpid(), signal.SIGUSR2)
        (found,) = dumps()
        assert found["reason"] == "requested by SIGUSR2"
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
def test_sigusr2_dumps_in_any_state_of_the_main_thread_which_continues(tmp_path, where):
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
                assert (found["reason"], found["pid"]) == ("requested by SIGUSR2", process.pid)
                assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_handler_of_the_program_is_kept(tmp_path, when):
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


def test_ignored_signal_stays_ignored(tmp_path):
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


def test_forked_child_writes_nothing_and_lives(tmp_path):
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


def test_file_is_written_before_the_error_is_raised(tmp_path):
    run(
        """
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        error = late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        assert [name[:9] for name in os.listdir(FOLDER)] == ["rank-0-1-"], os.listdir(FOLDER)
        found = the_dump()
        said, _, where = str(error).partition(". This rank called ")
        assert found["reason"] == f"NcclTimeout: {said}" and where == "all_reduce #0 at <string>:46", found["reason"]
        (entry,) = found["entries"]
        assert (entry["state"], entry["error"], entry["sequence"]) == ("failed", said, 0), entry
        os._exit(0)
        """,
        tmp_path / "new",
    )


def test_deadline_of_the_first_call_names_the_rank(tmp_path):
    """No communicator was made, and nothing was recorded."""
    run("late(lambda: ncclpy.Communicator.init(6, 5, ncclpy.get_unique_id(), timeout=0.3))", tmp_path)
    (name,) = os.listdir(tmp_path)
    assert name.startswith("rank-5-")


def test_rank_that_learns_of_a_remote_failure_dumps_too(tmp_path):
    run(
        """
        (comm,) = ncclpy.Communicator.init_all([0], timeout=30)
        with ncclpy.faults("call=AllReduce do=error:ncclRemoteError"):
            try:
                comm.all_reduce(np.ones(4))
            except ncclpy.NcclRemoteError:
                assert the_dump()["reason"].startswith("NcclRemoteError: ")
            else:
                sys.exit("it has not failed")
        """,
        tmp_path,
    )


def test_refused_call_writes_nothing(tmp_path):
    run(
        """
        (comm,) = ncclpy.Communicator.init_all([0], timeout=30)
        with ncclpy.faults("call=AllReduce do=error:ncclInvalidArgument"):
            try:
                comm.all_reduce(np.ones(4))
            except ncclpy.NcclError:
                pass
            else:
                sys.exit("it was not refused")
        """,
        tmp_path,
    )
    assert os.listdir(tmp_path) == []


def test_file_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "file").write_text("")
    _, errors = run(
        """
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        """,
        tmp_path / "file",
    )
    assert os.listdir(tmp_path) == ["file"]
    assert "the recorder's dump cannot be written to" in errors and "file/rank-0-1-" in errors


def test_file_system_that_hangs_delays_neither_the_error_nor_the_exit(tmp_path):
    """A write without end would hold up the program until the test's deadline."""
    run(
        """
        ncclpy.engine.dumps._PATIENCE = 0.1
        ncclpy.engine.dumps.dump = lambda **options: threading.Event().wait()
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
        assert files() == []
        """,
        tmp_path,
    )


CALLS = {
    "a call": """
        late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
    """,
    "a group": """
        def group():
            with ncclpy.group(timeout=0.2):
                comms[0].all_reduce(np.ones(4))
        late(group)
    """,
    "a plan": """
        plan = ncclpy.Plan()
        with plan.record():
            comms[0].all_reduce(np.ones(4))
        late(lambda: plan.launch(timeout=0.2))
    """,
    "a stuck call of a plan": """
        plan = ncclpy.Plan()
        with plan.record():
            for comm in comms:
                comm.all_reduce(np.ones(4))
        with ncclpy.faults("rank=0 call=AllReduce do=hang"):
            late(lambda: plan.launch(timeout=0.2))
    """,
    "a graph": """
        plan = ncclpy.Plan()
        with plan.record():
            comms[0].all_reduce(np.ones(4), timeout=0.2)
        graph = plan.capture()
        late(graph.launch)
    """,
    "a split": """
        late(lambda: comms[0].split(0, timeout=0.2))
    """,
    "a finalize": """
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), timeout=0.5)
        with ncclpy.faults("rank=0 call=CommFinalize do=hang"):
            late(comm.finalize)
    """,
    "a call of a child": """
        with ncclpy.group():
            children = [comm.split(comm.rank) for comm in comms]
        assert [child.rank for child in children] == [0, 0]
        with ncclpy.faults("call=AllReduce at=run do=hang"):
            late(lambda: children[1].all_reduce(np.ones(4), timeout=0.2))
    """,
    "the watcher's verdict": """
        stream = ncclpy.Stream(0)
        comms[0].all_reduce(np.ones(4), stream=stream, timeout=0.2)
        late(lambda: stream.synchronize(30))
    """,
    "a work of a Manager": """
        manager = ncclpy.Manager(timeout=0.5)
        with ncclpy.faults("rank=1 call=AllReduce at=run do=hang"):
            works = [manager.all_reduce("k", np.ones(4), device=device, num_local=2) for device in (0, 1)]
            late(works[0].wait)
        testing.wait_for(files)
    """,
    "a gathering": """
        manager = ncclpy.Manager(timeout=0.3)
        work = manager.all_reduce("k", np.ones(4), device=0, num_local=2)
        late(work.wait)
        testing.wait_for(files)
    """,
    "communicators of a Manager": """
        manager = ncclpy.Manager(timeout=0.5)
        key = manager.generate_communicator_key()
        work = manager.all_reduce(
            "k", np.ones(4), device=0, num_local=1, num_global=2, communicator_key=key, global_rank=0
        )
        manager.signal_multi_node_ready("k")
        late(work.wait)
        testing.wait_for(files)
    """,
    "a wait for initialisation": """
        comm = ncclpy.Communicator.init(3, 2, ncclpy.get_unique_id(), config=ncclpy.Config(blocking=False))
        late(lambda: comm.wait_ready(0.3))
    """,
    "a close": """
        ncclpy.core.ending._END_PATIENCE = 0.2
        comm = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), abortable=True)
        with ncclpy.faults("rank=0 call=CommDestroy do=hang; rank=0 call=CommFinalize do=hang"):
            late(lambda: comm.close(timeout=0.3))
    """,
    "an await": """
        import asyncio
        config = ncclpy.Config(blocking=False)
        async def wait():
            comm = ncclpy.Communicator.init(3, 2, ncclpy.get_unique_id(), config=config)
            await comm.ready(timeout=0.3)
        late(lambda: asyncio.run(wait()))
        testing.wait_for(files)
    """,
}


# Deadlines of plain calls, of groups, of plans and so on are dumped from different places.
QUICK = (
    "a group",
    "a plan",
    "a call of a child",
    "the watcher's verdict",
    "a work of a Manager",
    "a gathering",
    "a close",
)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in QUICK else [pytest.mark.slow]) for what in CALLS]
)
def test_each_kind_of_timeout_is_dumped(tmp_path, what):
    run(
        f"""
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        {CALLS[what].strip()}
        assert the_dump()["reason"].startswith("NcclTimeout: ")
        os._exit(0)
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_many_late_works_of_a_manager_are_dumped_together(tmp_path):
    """The file is written a few times, not hundreds, and finally has all of them."""
    run(
        """
        written = []
        class Count(logging.Handler):
            def emit(self, record):
                if "dump is in" in record.getMessage():
                    written.append(time.monotonic())
        logging.getLogger("ncclpy").setLevel(logging.INFO)
        logging.getLogger("ncclpy").addHandler(Count())
        manager = ncclpy.Manager(timeout=30, fail_fast=False)
        def bring(key, **options):
            return [manager.all_reduce(key, np.ones(4), device=device, num_local=2, **options) for device in (0, 1)]
        for work in bring("warm"):
            work.wait()
        with ncclpy.faults("rank=1 call=AllReduce at=run do=hang"):
            works = [work for number in range(100) for work in bring(number, timeout=1.0)]
            gathered = [manager.all_reduce(("alone", number), np.ones(4), device=0, num_local=2, timeout=1.0)
                        for number in range(100)]
            errors = [work.exception(timeout=30) for work in works + gathered]
        assert sum(isinstance(error, ncclpy.NcclTimeout) for error in errors) >= 101, errors
        testing.wait_for(lambda: written)
        def told():
            entries = dumps()[0]["entries"]
            return len(entries) == 302 and [entry["state"] for entry in entries].count("failed") == 300
        testing.wait_for(told, "the last state in the file", timeout=10)
        assert len(files()) == 1, files()
        assert all(after - before > 0.5 for before, after in zip(written, written[1:])), written
        os._exit(0)
        """,
        tmp_path,
    )


def test_exit_writes_the_dump_that_is_still_queued(tmp_path):
    run(
        """
        ncclpy.engine.dumps._MIN_INTERVAL = 1000.0
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        with ncclpy.group():
            a, b = (comm.split(comm.rank) for comm in comms)
        with ncclpy.faults("call=AllReduce nth=* at=run do=hang"):
            late(lambda: a.all_reduce(np.ones(4), timeout=0.2))
            late(lambda: b.all_reduce(np.ones(4), timeout=0.2))
        assert states() == ["failed"], "the second is a second later at the earliest"
        """,
        tmp_path,
    )
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert [entry["state"] for entry in found["entries"]] == ["failed"] * 2


@pytest.mark.slow
def test_file_is_written_once_per_second_and_never_half(tmp_path):
    run(
        """
        def rounds(number):
            for _ in range(number):
                comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
                late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.05))

        with ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id()) as alone:
            for _ in range(1000):
                alone.all_reduce(np.ones(4))
        times, done = set(), False

        def look():
            while not done:
                try:
                    for name in files():
                        times.add(os.stat(os.path.join(FOLDER, name)).st_mtime_ns)
                        dumps()
                except FileNotFoundError:
                    pass

        reader = threading.Thread(target=look)
        begun = time.monotonic()
        try:
            reader.start()
            rounds(10)
            seconds = time.monotonic() - begun
            several = len(times)
            ncclpy.engine.dumps._MIN_INTERVAL = 0.0
            rounds(10)
        finally:
            done = True
            reader.join()
        assert several <= seconds + 1, (several, seconds)
        assert len(times) > several
        """,
        tmp_path,
    )


def test_forked_child_writes_its_own_file(tmp_path):
    run(
        """
        if os.fork() == 0:
            comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
            late(lambda: comms[0].all_reduce(np.ones(4), timeout=0.2))
            assert the_dump()["pid"] == os.getpid()
            os.kill(os.getpid(), signal.SIGUSR2)
            testing.wait_for(lambda: the_dump()["reason"] == "requested by SIGUSR2")
            os._exit(0)
        assert os.wait()[1] == 0
        """,
        tmp_path,
    )


def test_forked_child_leaves_the_parents_dump_to_the_parent(tmp_path):
    run(
        """
        ncclpy.engine.dumps._MIN_INTERVAL, ncclpy.engine.dumps._PATIENCE = 1000.0, 30.0
        comms = ncclpy.Communicator.init_all([0, 1], timeout=30)
        with ncclpy.group():
            children = [comm.split(comm.rank) for comm in comms]
        with ncclpy.faults("call=AllReduce nth=* at=run do=hang"):
            for child in children:
                late(lambda: child.all_reduce(np.ones(4), timeout=0.2))
        import warnings
        warnings.simplefilter("ignore")  # Python's, of threads
        begun = time.monotonic()
        if os.fork() == 0:
            sys.exit(0)  # what is to be done at the end is done here
        assert os.wait()[1] == 0
        assert time.monotonic() - begun < 15, "it has waited for the thread that writes, which it does not have"
        assert the_dump()["pid"] == os.getpid()
        """,
        tmp_path,
    )


def test_failures_while_a_write_hangs_are_kept_up_to_a_limit(tmp_path):
    run(
        """
        import collections, gc
        ncclpy.engine.dumps._MAX_FAILURES = 3
        hangs = threading.Event()
        ncclpy.engine.dumps.dump = lambda **options: (hangs.set(), threading.Event().wait())
        os.kill(os.getpid(), signal.SIGUSR2)
        assert hangs.wait(30)
        for number in range(6):
            alone(str(number)).abort()
        queues = [each for each in gc.get_objects() if isinstance(each, collections.deque)]
        kept = [len(each) for each in queues if each and isinstance(each[0], tuple) and "NcclAborted" in each[0]]
        assert kept == [3], kept
        os._exit(0)
        """,
        tmp_path,
    )


RANK = """
rank = int(os.environ["RANK"])
if rank == 0:
    with open(os.environ["ID"] + ".unfinished", "wb") as file:
        file.write(bytes(ncclpy.get_unique_id()))
    os.rename(os.environ["ID"] + ".unfinished", os.environ["ID"])
testing.wait_for(lambda: os.path.exists(os.environ["ID"]))
with open(os.environ["ID"], "rb") as file:
    comm = ncclpy.Communicator.init(3, rank, file.read(), device=rank, timeout=20)
comm.all_reduce(np.ones(4))
if rank == 1:
    other = ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=rank)
    other.all_reduce(np.ones(2))
    os.kill(os.getpid(), signal.SIGUSR2)
else:
    late(lambda: comm.all_reduce(np.ones(8), timeout=1.0))
# One that ended before the others' deadlines would be what they tell of.
testing.wait_for(lambda: len(files()) == 3)
os._exit(0)
"""


def test_trace_names_the_missing_rank(tmp_path, capsys):
    """Once with the dumps of all ranks, and once without that of the missing rank."""

    def start(rank):
        # Without a store the first abort may complete the other rank's operation, which then has no deadline to
        # report.
        variables = {"RANK": str(rank), "ID": str(tmp_path / "id"), "NCCLPY_HOST_ABORT_CORRUPTS": "0"}
        return run(RANK, tmp_path / "dumps", **variables)

    testing.run_threads(3, lambda rank: start(rank.rank))
    names = sorted(str(path) for path in (tmp_path / "dumps").iterdir())
    assert main(["trace", str(tmp_path / "dumps")]) == 1
    said = capsys.readouterr().out
    assert "sequence 1 waits for rank 1" in said, said
    assert "last on it: sequence 0, all_reduce of 4 float64 (sum), completed" in said, said
    assert "now: nothing in progress; last recorded was all_reduce of 2 float64" in said, said
    assert main(["trace", names[0], names[2]]) == 1
    assert "unknown: rank 1" in capsys.readouterr().out
