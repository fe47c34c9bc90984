"""`ncclpy run`: the environment of processes, their output, and their ends."""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
import runs
from paths import SUPPORT

import testing
from ncclpy.cli.main import main
from ncclpy.cli.run import output, ranks
from ncclpy.cli.run.command import threads_of_each
from ncclpy.cli.run.output import Lines


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a program; the program's first argument is the folder for its notes."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text(runs.NOTE + text)
        return path, tmp_path

    return write


# Environment of the processes.


def test_each_process_has_the_variables_of_torchrun_and_the_store(program, tmp_path):
    done = runs.run("-n", 3, *program("""
import json
from ncclpy.bootstrap import environment
pathlib.Path(sys.argv[1], f"env-{rank}").write_text(json.dumps([dict(os.environ), environment()]))
"""), env={"TORCHELASTIC_USE_AGENT_STORE": "True", "NCCLPY_RUN_ID": "outer"})  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tokens = set()
    for rank in range(3):
        env, place = json.loads((tmp_path / f"env-{rank}").read_text())
        expected = {
            "RANK": f"{rank}", "WORLD_SIZE": "3", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": f"{rank}", "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        assert {name: env.get(name) for name in expected} == expected
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env, "of a torchrun further out"
        assert env["NCCLPY_RUN_ID"] == f"outer/{env['TORCHELASTIC_RUN_ID']}"
        host, _, port = env["NCCLPY_STORE"].partition(":")
        assert place == [rank, 3, rank, 3, "ncclpy", host, int(port)]
        assert env["MASTER_PORT"] != port, "that is for the program's own servers"
        tokens.add(env["NCCLPY_STORE_TOKEN"])
    assert len(tokens) == 1 and len(tokens.pop()) >= 32


PRINT_THREADS = "print(repr(os.environ.get('OMP_NUM_THREADS')))"


def test_several_ranks_share_the_cores_and_launcher_says_so(program, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = runs.run("-n", 2, *program(PRINT_THREADS))
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 2)
    assert sorted(done.stdout.splitlines()) == [f"[0] '{threads}'", f"[1] '{threads}'"]
    said = f"OMP_NUM_THREADS is not set: it is {threads} for each of the 2 processes, which share {cores} cores; "
    assert done.stderr.startswith(f"ncclpy run: {said}") and done.stderr.count("\n") == 1


def test_each_rank_has_a_thread_or_more():
    assert [threads_of_each(nproc, 8) for nproc in (2, 3, 8, 9)] == [4, 2, 1, 1]


@pytest.mark.parametrize(("size", "chosen"), [(1, None), pytest.param(2, "7", marks=pytest.mark.slow), (2, "")])
def test_thread_count_of_one_rank_or_chosen_by_user_is_kept(program, monkeypatch, size, chosen):
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = runs.run("-n", size, *program(PRINT_THREADS), env={} if chosen is None else {"OMP_NUM_THREADS": chosen})
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {chosen!r}" for rank in range(size)]
    assert done.stderr == ""


def test_ranks_make_communicators_from_environment(host_engine, program):
    done = runs.run("-n", 2, *program("""
import numpy as np, ncclpy
from ncclpy.bootstrap import rendezvous
for again in range(2):
    rendezvous()[1].close()  # one end of the store, which others go on using
    with ncclpy.Communicator.from_env(timeout=30) as comm:
        array = np.full(4, comm.rank + 1.0)
        comm.all_reduce(array)
        print(again, comm.rank, comm.nranks, comm.device, comm.timeout, array[0])
"""))  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert runs.of_rank(done.stdout, rank) == [f"{again} {rank} 2 {rank} 30.0 3.0" for again in range(2)]


def test_missing_rank_is_named(host_engine, program):
    done = runs.run("-n", 3, "--no-kill", *program("""
import ncclpy
from ncclpy.bootstrap import rendezvous
if rank != 1:
    rendezvous()[1].barrier("those who come", rank // 2, 2)
    ncclpy.Communicator.from_env(timeout=1.5)
"""))  # fmt: skip
    assert done.returncode == 1
    words = r"NcclTimeout: (.*) did not arrive to make communicator 1 of Communicator.from_env within 1.5 s; (.*)$"
    # The first rank to give up has told the other one.
    found = ("rank 1 of 3", "rank 1 has not reached the launcher's store either")
    assert re.findall(words, done.stderr, re.MULTILINE) == [found] * 2, done.stderr


@pytest.mark.slow
def test_ended_rank_is_told_apart_from_missing_rank(host_engine, program):
    """Rank 1 exits before it makes the communicator, rank 2 lives and does not make it; all others report both."""
    done = runs.run("-n", 4, "--no-kill", *program("""
import ncclpy
from ncclpy.bootstrap import rendezvous
store = rendezvous()[1]
store.barrier("all are here", rank, 4)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while store.check(["ncclpy/ranks/alive/1"]):  # the server hears of it
    time.sleep(0.01)
store.barrier("it is known", rank - (rank > 1), 3)
if rank == 2:
    store.get("done")
else:
    try:
        ncclpy.Communicator.from_env(timeout=1.5)
    except ncclpy.NcclTimeout as error:
        print(error.missing, error, [each.state for each in error.ranks], flush=True)
    store.barrier("both have told", rank // 3, 2)
    store.set("done", b"")
"""))  # fmt: skip
    said = "[1, 2] ranks 1-2 of 4 did not arrive to make communicator 1 of Communicator.from_env within 1.5 s"
    for rank in (0, 3):
        assert runs.of_rank(done.stdout, rank) == [
            f"{said}; rank 1's process has ended; rank 2 has reached the launcher's store, and the state of its "
            "process is not known ['running', 'ended', 'unknown', 'running']"
        ], done.stderr


def test_too_few_devices_are_an_error(host_engine, program):
    env = {"NCCLPY_HOST_DEVICES": "2"}
    arguments = program("import ncclpy; ncclpy.Communicator.from_env(timeout=30)")
    done = runs.run("-n", 3, "--grace", 0, *arguments, env=env)
    assert done.returncode == 1
    assert "rank 2 is number 2 of 3 on this machine, which has only 2 devices, and each rank needs one" in done.stderr
    assert "NCCLPY_HOST_DEVICES=3 shows more" in done.stderr


FLAGS, DASHES = ["-n", "9", "--grace", "--", "--help", "", "a b"], ["--", "x", "--"]


@pytest.mark.parametrize(
    ("before", "given"),
    [
        (["--"], DASHES),
        ([], FLAGS),
        pytest.param(["--"], FLAGS, marks=pytest.mark.slow),
        pytest.param([], DASHES, marks=pytest.mark.slow),
    ],
)
def test_arguments_of_the_program_are_its_own(program, before, given):
    path, _ = program("print(sys.argv[1:])")
    done = runs.run("-n", 1, *before, path, *given)
    assert (done.stdout, done.stderr) == (f"[0] {given}\n", "")


def test_program_may_be_a_module_or_any_file(tmp_path):
    (tmp_path / "amodule.py").write_text("import sys; print(sys.argv[1:])")
    done = runs.run("-n", 1, "-m", "amodule", "-x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] ['-x']\n"), done.stderr
    done = runs.run("-n", 2, "sh", "-c", "echo $RANK $0", "x")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 x", "[1] 1 x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: -n/--nproc, program\n"),
        (["-n", "2", "--"], "the following arguments are required: program"),
        (["-n", "0", "x"], "'0' is not an integer >= 1"),
        (["-n", "two", "x"], "'two' is not an integer >= 1"),
        (["-n", "2", "--grace", "-1", "x"], "-1 is not a number of seconds"),
        (["-n", "2", "--nnodes", "2", "x"], "--nnodes needs --rdzv HOST:PORT"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "2", "--rdzv", "h:1", "x"], "--node-rank 2: expected 0 to 1"),
        (["-n", "2", "--nnodes", "2", "--rdzv", "h", "x"], "'h' is not host:port"),
        (["-n", "2", "--rdzv", "tcp://h:29400", "x"], "got 'tcp://h' with a scheme; write 'h'"),
    ],
)
def test_wrong_flags_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split()) + "\n"


@pytest.mark.parametrize(("name", "code"), [("/nowhere/program", 127), (os.devnull, 126)])
def test_program_that_cannot_be_started_is_an_error(name, code):
    done = runs.run("-n", 2, name)
    assert done.returncode == code
    assert done.stderr.startswith(f"ncclpy run: '{name}' cannot be started: ")


def test_rank_0_reads_standard_input(program):
    with runs.started("-n", 2, *program("print(sys.stdin.readline())"), stdin=subprocess.PIPE) as process:
        out, _ = process.communicate("hello\n", timeout=runs.TIMEOUT)
    assert sorted(out.splitlines()) == ["[0] ", "[0] hello", "[1] "]


# Output of the processes.


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"o", b"ne\n\ntw", b"o"], [b"one", b"", b"two"]),
        ([b"one\r\ntwo\r", b"\nthree\r\n"], [b"one", b"two", b"three"]),
        ([b"\r 1%", b"\r 2%\r", b"\r 3%\n"], [b" 1%", b" 2%", b" 3%"]),
        ([b"\r"], []),
        ([b"1234567890" * 2, b"12345\n67"], [b"12345678", b"90123456", b"789012345", b"67"]),
    ],
)
def test_bytes_are_cut_into_lines(monkeypatch, pieces, lines):
    monkeypatch.setattr(output, "LONGEST", 8)
    cut = Lines(b"> ")
    text = b"".join([*(cut.feed(piece) for piece in pieces), cut.end()])
    assert text == b"".join(b"> " + line + b"\n" for line in lines)


def test_lines_of_different_ranks_are_never_interleaved(program):
    """Each rank writes its lines in pieces, on both streams, as fast as it can."""
    done = runs.run("-n", 4, *program("""
for number in range(600):
    for fd in (1, 2):
        line = f"{fd} {number} {'x' * (number * 7919 % 300)}.\\n".encode()
        cut = number * 31 % len(line)
        os.write(fd, line[:cut])
        os.write(fd, line[cut:])
"""))  # fmt: skip
    assert done.returncode == 0
    for fd, text in (1, done.stdout), (2, done.stderr):
        for rank in range(4):
            lines = runs.of_rank(text, rank)
            assert lines == [f"{fd} {number} {'x' * (number * 7919 % 300)}." for number in range(600)]
        assert len(text.splitlines()) == 4 * 600


def test_flood_without_line_ends_arrives_whole(program):
    size = 2_000_000
    done = runs.run("-n", 2, *program(f"""
for fd in (2, 1):
    left = memoryview(b"y" * {size})
    while left:
        left = left[os.write(fd, left):]
"""))  # fmt: skip
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        assert [sum(map(len, runs.of_rank(text, rank))) for rank in range(2)] == [size, size]
        assert max(map(len, text.splitlines())) < 2 * output.LONGEST


def test_output_is_forwarded_at_once(program):
    path, folder = program("print('here'); time.sleep(1000)")
    with runs.started("-n", 1, path, folder) as process:
        assert process.stdout.readline() == "[0] here\n"


def on_terminal(arguments, env=()):
    """Run a launcher with a terminal as output; return what it wrote there."""
    ours, theirs = pty.openpty()
    with runs.started(*arguments, stdout=theirs, stderr=theirs, text=False, env=env) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while select.select([ours], [], [], runs.TIMEOUT)[0]:
                text += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(runs.TIMEOUT) == 0
    return text.decode()


def test_prefixes_have_colours_on_a_terminal_only(program):
    arguments = ["-n", 2, *program("print('text')")]
    shown = on_terminal(arguments, env={"TERM": "xterm"})
    for rank in range(2):
        assert re.search(rf"\x1b\[\d+m\[{rank}\] \x1b\[0mtext\r\n", shown)
    plain = ["[0] text", "[1] text"]
    assert sorted(on_terminal(arguments, env={"TERM": "xterm", "NO_COLOR": "1"}).splitlines()) == plain
    assert sorted(runs.run(*arguments).stdout.splitlines()) == plain


def test_closed_reader_ends_run_silently(program):
    """As in `ncclpy run ... | head -1`."""
    path, folder = program("""
note()
while True:
    print("more", flush=True)
""")
    with runs.started("-n", 2, path, folder) as process:
        pids = runs.wait_for_pids(folder, 2)
        assert "more" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(runs.TIMEOUT) == 1
        err = process.stderr.read()
        process.stdout = None  # closed: `started` must not read it
    runs.wait_until_gone(pids)
    assert err == ""


# Ends of the processes.


def test_first_failure_ends_others_and_decides_exit_code(program, tmp_path):
    """Of the other ranks one ends by itself in time, one at SIGTERM, and one must be killed."""
    path, folder = program("""
if rank == 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
note()
while len(list(pathlib.Path(sys.argv[1]).glob("pid-*"))) < 4:
    time.sleep(0.01)
if rank == 1:
    sys.exit(7)
if rank == 0:
    while "rank 1" not in pathlib.Path(sys.argv[1], "errors").read_text():
        time.sleep(0.01)
    sys.exit(8)
time.sleep(1000)
""")
    began = time.monotonic()
    with open(tmp_path / "errors", "w") as errors:
        done = runs.run("-n", 4, "--grace", 0.5, path, folder, stderr=errors)
    assert done.returncode == 7
    pids = dict(zip(range(4), ((tmp_path / f"pid-{rank}").read_text().strip() for rank in range(4)), strict=True))
    assert (tmp_path / "errors").read_text().splitlines() == [
        f"ncclpy run: rank 1 (process {pids[1]}) ended with exit code 7; the others are ended in 0.5 s",
        "ncclpy run: killing what has not ended: rank 3",
    ]
    assert time.monotonic() - began > 1, "one grace before SIGTERM, another before SIGKILL"
    runs.wait_until_gone(map(int, pids.values()))


def test_rank_killed_by_signal_gives_shell_exit_code(program):
    done = runs.run(
        "-n", 2, "--grace", 0, *program("os.kill(os.getpid(), signal.SIGSEGV) if rank else time.sleep(1000)")
    )
    assert done.returncode == 128 + signal.SIGSEGV
    assert re.search(r"rank 1 \(process \d+\) was ended by SIGSEGV", done.stderr)


def test_no_kill_lets_other_ranks_continue(program):
    done = runs.run("-n", 3, "--grace", 0, "--no-kill", *program("""
note()
if rank == 0:
    sys.exit(5)
while runs := pathlib.Path(sys.argv[1], "pid-0").exists() is False:
    time.sleep(0.01)
time.sleep(0.3)
print("survived")
if rank == 2:
    sys.exit(6)
"""))  # fmt: skip
    assert done.returncode == 5
    assert sorted(done.stdout.splitlines()) == ["[1] survived", "[2] survived"]
    assert "rank 0" in done.stderr and "exit code 6" in done.stderr


def test_killed_rank_does_not_end_the_store(program):
    """The store stays without a line about the lost connection: the end of the rank is reported once."""
    done = runs.run("-n", 3, "--no-kill", *program("""
from ncclpy.bootstrap import rendezvous
place, store = rendezvous(60)
watch = store.watch("alive")
store.barrier("all", rank, 3)
store.set(f"alive/{rank}", b"", ephemeral=True)
if rank == 0:
    store.set("left", b"by rank 0")
    os.kill(os.getpid(), signal.SIGKILL)
while watch.next(60) != ("alive/0", None):
    pass
store.barrier("survivors", rank - 1, 2)
print(store.get("left", 0))
"""))  # fmt: skip
    assert done.returncode == 128 + signal.SIGKILL
    assert sorted(done.stdout.splitlines()) == ["[1] b'by rank 0'", "[2] b'by rank 0'"]
    assert re.fullmatch(r"ncclpy run: rank 0 \(process \d+\) was ended by SIGKILL\n", done.stderr)


PATIENT = """
def told(number, frame):
    print("told", signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR1:
        sys.exit(3 if len(sys.argv) > 2 else 0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, told)
note()
while True:
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("name", "code", "more"),
    [
        ("SIGTERM", 143, ("fail",)),
        ("SIGINT", 130, ("fail",)),
        ("SIGHUP", 0, ()),
        pytest.param("SIGTERM", 0, (), marks=pytest.mark.slow),
    ],
)
def test_signals_are_passed_on(program, name, code, more):
    path, folder = program(PATIENT)
    with runs.started("-n", 2, path, folder, *more) as process:
        pids = runs.wait_for_pids(folder, 2)
        process.send_signal(signal.SIGUSR1)
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines == ["[0] told SIGUSR1\n", "[1] told SIGUSR1\n"]
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=runs.TIMEOUT)
        assert sorted(out.splitlines()) == [f"[0] told {name}", f"[1] told {name}"]
        assert (process.returncode, err) == (code, "")
    runs.wait_until_gone(pids)


def test_sighup_that_was_ignored_stays_so(program):
    """As under nohup, for the launcher and its processes."""
    path, folder = program("""
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    note()
signal.sigwait({signal.SIGUSR1})
print("told SIGUSR1")
""")
    had = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the processes that it starts
    with runs.started("-n", 1, path, folder) as process:
        signal.signal(signal.SIGHUP, had)
        pids = runs.wait_for_pids(folder, 1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=runs.TIMEOUT) == ("[0] told SIGUSR1\n", "")
        assert process.returncode == 0
    runs.wait_until_gone(pids)


def test_rank_that_ignores_sigterm_is_killed_after_grace(program):
    path, folder = program("signal.signal(signal.SIGTERM, signal.SIG_IGN); note(); time.sleep(1000)")
    with runs.started("-n", 2, "--grace", 0.5, path, folder) as process:
        pids = runs.wait_for_pids(folder, 2)
        process.terminate()
        assert process.wait(runs.TIMEOUT) == 143
        assert process.stderr.read() == "ncclpy run: killing what has not ended: rank 0, 1\n"
    runs.wait_until_gone(pids)


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_launcher_asked_to_end_does_not_wait_for_reader(program, name):
    path, folder = program("note(); sys.stdout.write('x' * 1000 + '\\n'); print('flood\\n' * 10**6); time.sleep(1000)")
    with runs.started("-n", 2, "--grace", 0.3, path, folder) as process:  # the output is not read
        pids = runs.wait_for_pids(folder, 2)
        time.sleep(0.5)
        process.send_signal(signal.Signals[name])
        assert process.wait(runs.TIMEOUT) == 128 + signal.Signals[name]
    runs.wait_until_gone(pids)


def test_second_ctrl_c_kills(program):
    path, folder = program("signal.signal(signal.SIGINT, signal.SIG_IGN); note(); time.sleep(1000)")
    with runs.started("-n", 2, "--grace", 1000, path, folder) as process:
        pids = runs.wait_for_pids(folder, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals at once would be one
        process.send_signal(signal.SIGINT)
        assert process.wait(runs.TIMEOUT) == 130
    runs.wait_until_gone(pids)


def test_ctrl_z_stops_the_ranks_too(program):
    path, folder = program("note(); time.sleep(1000)")

    def states(pids):
        return {runs.state(pid) for pid in pids}

    with runs.started("-n", 2, path, folder) as process:
        pids = [*runs.wait_for_pids(folder, 2), process.pid]
        process.send_signal(signal.SIGTSTP)
        testing.wait_for(lambda: states(pids) == {"T"}, "all to stop")
        process.send_signal(signal.SIGCONT)
        testing.wait_for(lambda: states(pids) <= {"S", "R"}, "all to go on")
        process.terminate()
        assert process.wait(runs.TIMEOUT) == 143
    runs.wait_until_gone(pids)


# Leftovers.


# A child's environment has no variable of the run, as if its process title had overwritten it; a daemon leads its own
# session.
OFFSPRING = """
if sys.argv[2] == "offspring":
    note(sys.argv[3])
    time.sleep(1000)
command = [sys.executable, sys.argv[0], sys.argv[1], "offspring"]
subprocess.Popen([*command, f"child-{rank}"], env={})
subprocess.Popen([*command, f"daemon-{rank}"], start_new_session=True)
note()
while len(list(pathlib.Path(sys.argv[1]).glob("pid-*"))) < 6:
    time.sleep(0.01)
if sys.argv[2] == "wait":
    time.sleep(1000)
"""


def test_processes_started_by_ranks_end_with_the_run(program):
    path, folder = program(OFFSPRING)
    done = runs.run("-n", 2, path, folder, "end")
    assert (done.returncode, done.stderr) == (0, "")
    runs.wait_until_gone(runs.wait_for_pids(folder, 6))


def test_killed_launcher_leaves_nothing_behind(program):
    path, folder = program(OFFSPRING)
    with runs.started("-n", 2, path, folder, "wait") as process:
        pids = runs.wait_for_pids(folder, 6)
        process.kill()
        process.wait(runs.TIMEOUT)
        runs.wait_until_gone(pids)


def test_nested_run_ends_with_outer_run(program):
    path, folder = program("note(); time.sleep(1000)")
    inner = runs.command("-n", 2, path, folder)
    with runs.started("-n", 1, "--", *inner) as process:
        pids = runs.wait_for_pids(folder, 2)
        process.kill()
        process.wait(runs.TIMEOUT)
        runs.wait_until_gone(pids)


# A launcher that lacks resources.


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-"))]
)
def test_standard_streams_may_be_closed(program, closed):
    path, folder = program("note(); rank or sys.stdin.read(); print('out'); print('err', file=sys.stderr)")
    line = f"exec {' '.join(map(shlex.quote, runs.command('-n', 2, path, folder)))} {closed}"
    done = subprocess.run(
        ["sh", "-c", line], input="", capture_output=True, text=True, env=runs.environment(), timeout=runs.TIMEOUT,
        cwd=SUPPORT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out, err = ([f"[{rank}] {word}" for rank in range(2)] for word in ("out", "err"))
    assert sorted(done.stdout.splitlines()) == (out if " >&-" not in f" {closed}" else [])
    assert sorted(done.stderr.splitlines()) == (err if "2>&-" not in closed else [])
    assert len(runs.wait_for_pids(folder, 2)) == 2


@pytest.mark.parametrize("limit", [22, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (14, 18, 26))])
def test_descriptor_limit_is_an_error(program, limit):
    path, folder = program("note(); time.sleep(1000)")
    line = f"ulimit -n {limit}; exec {' '.join(map(shlex.quote, runs.command('-n', 20, path, folder)))}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env=runs.environment(), timeout=runs.TIMEOUT, cwd=SUPPORT
    )
    assert done.returncode in (1, 126) and "Traceback" not in done.stderr, done.stderr
    assert "Too many open files" in done.stderr or "ulimit -n" in done.stderr


def test_empty_token_is_no_token(program):
    done = runs.run("-n", 1, *program("print(os.environ['NCCLPY_STORE_TOKEN'])"), env={"NCCLPY_STORE_TOKEN": ""})
    assert len(runs.of_rank(done.stdout, 0)[0]) == 64


def test_signal_to_process_of_other_user_is_ignored(monkeypatch):
    with contextlib.closing(ranks.Ranks()) as started:
        pipes = started.start(0, [sys.executable, "-c", "import time; time.sleep(1000)"], os.environ, None)

        def refused(pid, number):
            raise PermissionError(1, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", refused)
            started.send(signal.SIGTERM)
        assert started.running
        started.end()
        for each in pipes:
            os.close(each)
