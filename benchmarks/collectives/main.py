"""Time and bus bandwidth of every collective, from 8 bytes to 1 GiB, of ncclpy and other libraries.

With --gpu N on N GPUs: compared with nccl-tests (a thread per GPU), torch.distributed and cupy.cuda.nccl, each in
processes of its own, one per GPU. Without it on CPUs, through the host engine: compared with MPICH and Open MPI (see
`mpi`) and torch.distributed with gloo, a process per rank. The libraries take turns; one that is missing or fails
becomes a row with the reason. A size is that of the larger of a rank's two buffers, and bus bandwidth is counted as in
nccl-tests.

The sizes given with --replayed are also measured as CUDA graphs, compared with nccl-tests -G: on GPUs a small
call lasts as long as its launch, and a graph shows the time of the device.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.collectives import mpi, nccl_tests
from benchmarks.collectives.mpi_side import plan
from benchmarks.pages import report
from benchmarks.pages.markdown import size as text_of
from benchmarks.work import results, workers

SIDE = "benchmarks.collectives.side"
NAMES = tuple(nccl_tests.BINARIES)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Defaults, by whether they are for GPUs.
SIZES = {
    True: ["8", "64", "512", "4K", "32K", "256K", "2M", "16M", "128M", "256M", "1G"],
    False: ["8", "64", "512", "4K", "32K", "256K", "2M", "16M", "64M"],
}
ROUNDS = 5
#: Operations in a sample, the same number for each rival. On CPUs samples of large operations have fewer.
GPU_CALLS = 50
#: Operations in a sample of latency: each call is waited for, so that they do not fill the launch queue.
LATENCY_CALLS = 200
CPU_CALLS, CPU_BYTES = 500, 64 << 20
#: Launches of a graph of `GPU_CALLS` in a sample: the first one, which costs more, counts but weighs little.
GRAPH_LAUNCHES = 20
#: Largest size for which the latency is measured too: a call and the wait for its stream. On CPUs a call itself waits.
LATENCY_BYTES = 1 << 20
DEADLINE = 240
#: The Python rivals, and the flags of nccl-tests, of either kind of run.
PLAIN = ("ncclpy", "ncclpy.ProcessGroup", "torch.distributed", "cupy.cuda.nccl")
REGISTERED = ("ncclpy, registered", "ncclpy, windows")
NCCL_TESTS = {"nccl-tests": []}
NCCL_TESTS_REGISTERED = {"nccl-tests -R 1": ["-R", "1"], "nccl-tests -R 2": ["-R", "2"]}
#: The rivals whose calls are captured.
REPLAYED = ("ncclpy", *REGISTERED)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this experiment's options."""
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="real NCCL on N GPUs, one process a GPU")
    parser.add_argument("--apart", action="store_true", help="with --gpu: each rank as if on a host of its own")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks on CPUs (default: 2)")
    parser.add_argument("--nccl-tests", type=Path, metavar="FOLDER", help="where the *_perf binaries are, for --gpu")
    for name, option in mpi.RIVALS.items():
        parser.add_argument(f"--{option}", type=Path, metavar="PYTHON", help=f"a Python with mpi4py and {name}")
    parser.add_argument("--sizes", type=_size, nargs="+", metavar="SIZE", help="such as 8 4K 64M 1G")
    parser.add_argument("--collectives", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--registered", action="store_true", help="also with registered buffers and symmetric windows")
    parser.add_argument("--replayed", type=_size, nargs="+", metavar="SIZE", help="with --gpu: as CUDA graphs too")
    parser.add_argument("--without", nargs="+", default=[], choices=PLAIN[1:], help="leave libraries out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times that the libraries take turns (default: 5)")
    parser.add_argument(
        "--cycles", type=int, default=1, help="with --gpu: samples of a turn; a start of nccl-tests serves them all"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result with all samples, after each round"
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 8, 512K, 16M or 1G (powers of 1024)")
    return int(match[1]) * UNITS[match[2]]


def run(chosen: argparse.Namespace) -> int:
    """Measure in turns, print and write; return 1 if a rival that is there failed."""
    gpu, nranks = bool(chosen.gpu), chosen.gpu or chosen.ranks
    if chosen.apart and not gpu:
        print("python -m benchmarks collectives: --apart is for NCCL's ranks: give --gpu N too", file=sys.stderr)
        return 2
    sizes = sorted(set(chosen.sizes or map(_size, SIZES[gpu])))
    result = results.new(
        "collectives",
        _command(chosen),
        engine="gpu" if gpu else "host",
        **({"gpus": nranks} if gpu else {"ranks": nranks}),
        **({"hosts": nranks} if chosen.apart else {}),
        rounds=chosen.rounds,
    )
    result["notes"] = [
        f"Elements are {'float32' if gpu else 'float64'}. A time is the mean over successive calls"
        + (", and then over the ranks, as in nccl-tests." if gpu else " on the slowest rank."),
        "torch.distributed has all_reduce, reduce and broadcast in place only"
        + ("; latency is a call and the wait for it, which nccl-tests does not measure." if gpu else "."),
    ]
    if gpu:
        result["notes"].append(
            "nccl-tests rounds a rank's share down to 16 bytes, so it has no row for smaller sizes."
        )
    sweeps = [Sweep(gpu, nranks, sizes, chosen.collectives, chosen.cycles if gpu else 1, apart=chosen.apart)]
    if gpu and chosen.replayed:
        sizes = sorted(set(chosen.replayed))
        replayed = (chosen.collectives, chosen.cycles, GRAPH_LAUNCHES, sweeps[0].failed)
        sweeps.append(Sweep(gpu, nranks, sizes, *replayed, apart=chosen.apart))
    result["notes"] += _notes(chosen)
    sides: list[PythonRival | NcclTests | Mpi] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for sweep in sweeps:
                library = _open(_rivals(chosen, sweep), Path(folder), sweep, result, sides, chosen.registered)
                sides += _programs(chosen, library, sweep, result)
            for number in range(chosen.rounds):
                for side in sides:
                    print(f"round {number + 1} of {chosen.rounds}: {side.name}", file=sys.stderr, flush=True)
                    side.sample()
                result["rows"] = rows(sweeps, result["rows"])
                if chosen.json:
                    results.save(result, chosen.json)
        finally:
            for side in sides:
                side.close()
    print(report.text(result))
    return 1 if sweeps[0].failed else 0


def _notes(chosen: argparse.Namespace) -> list[str]:
    """Return the notes on measurements on GPUs."""
    if not chosen.gpu:
        return []
    notes = [
        "Successive calls use successive parts of buffers of the largest size, as in nccl-tests. The memory is from "
        "ncclMemAlloc, except for torch.distributed and CuPy.",
        "nccl-tests runs its ranks as threads of one process, the other libraries run one process per rank.",
    ]
    if chosen.apart:
        notes.append(
            "Each rank has an NCCL_HOSTID of its own and NCCL_NET=Socket: NCCL treats the ranks as if they were on "
            "different hosts, and uses the loopback device instead of NVLink. nccl-tests, whose ranks are in one "
            "process, cannot do so."
        )
    if chosen.replayed:
        notes.append(
            f"Replayed: {GPU_CALLS} calls are captured, one after the other, and launched {GRAPH_LAUNCHES} times as a "
            f"graph, the first time counted, as nccl-tests -G {GRAPH_LAUNCHES} does. NCCL registers the memory that a "
            "graph uses where it can, also plain memory (NCCL_GRAPH_REGISTER)."
        )
    if chosen.registered:
        notes.append(
            'The buffers of "ncclpy, registered" are from memory.alloc, so the registry registers them; those of '
            '"ncclpy, windows" are windows of Communicator.window. NCCL is told to schedule for NVLink '
            "(nvlink_centric_sched), as by nccl-tests."
        )
        if os.environ.get("NCCL_NVLS_ENABLE") == "0":
            notes.append(
                "NVLink multicast was off (NCCL_NVLS_ENABLE=0): the gain of registration for algorithms that use it "
                "(NVLS), and symmetric kernels with multicast, were not measured."
            )
    return notes


def _rivals(chosen: argparse.Namespace, sweep: Sweep) -> list[str]:
    """Return the names of the Python rivals; the first one finds the library that all must use."""
    names = REPLAYED if sweep.launches else (*PLAIN[:1], *REGISTERED, *PLAIN[1:])
    left_out = {*chosen.without, *(() if chosen.registered else REGISTERED)}
    return [name for name in names if name not in left_out]


class Sweep:
    """The settings of the measurement, and the rows collected so far.

    Attributes
    ----------
    cycles : int
        Samples in a turn.
    launches : int
        How often a graph of the calls is launched; 0 if they are made one by one.
    apart : bool
        Whether NCCL treats each rank as if it were on another host.
    itemsize, factors : int, dict
        Bytes of an element, and the factor of bus bandwidth of each collective; known when a rival is open.
    failed : list of dict
        Rows of failures, perhaps of several sweeps together.
    """

    def __init__(
        self,
        gpu: bool,
        nranks: int,
        sizes: list[int],
        collectives: list[str],
        cycles: int = 1,
        launches: int = 0,
        failed: list[dict] | None = None,
        apart: bool = False,
    ):
        self.gpu, self.nranks, self.sizes, self.collectives = gpu, nranks, sizes, collectives
        self.cycles, self.launches, self.apart = cycles, launches, apart
        self.itemsize, self.factors = 4 if gpu else 8, {}
        self.failed: list[dict] = [] if failed is None else failed
        self._rows: dict[tuple, dict] = {}

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables to add to a rank's environment."""
        return {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket"} if self.apart else {}

    def calls(self, nbytes: int) -> int:
        """Return the number of operations in a sample."""
        return GPU_CALLS if self.gpu else max(3, min(CPU_CALLS, CPU_BYTES // nbytes))

    def add(self, rival: str, collective: str, nbytes: int, seconds: float, measure: str = "time") -> None:
        """Add one sample."""
        moved = max(plan(collective, nbytes, self.nranks, self.itemsize)) * self.itemsize
        row = self._rows.setdefault(
            (rival, collective, nbytes, measure),
            {
                "operation": f"{collective}, {self.nranks} ranks{', replayed' if self.launches else ''}",
                "rival": rival,
                "road": f"{collective} {text_of(nbytes)}{', replayed' if self.launches else ''}",
                "measure": measure,
                "unit": "us",
                "collective": collective,
                "bytes": nbytes,
                "bus_bytes": moved * self.factors[collective],
                "samples": [],
            },
        )
        row["samples"].append(seconds * 1e6)

    def fail(self, rival: str, what: str, reason: str) -> None:
        """Note that a rival, or one collective of it, has failed, with the last line of its output."""
        print(f"{rival}: {what}: {reason}", file=sys.stderr, flush=True)
        words = reason.strip().splitlines() or ["no reason"]
        self.failed.append({"rival": rival, "missing": f"failed: {what}: {words[-1].rstrip(':')}"})

    def rows(self) -> list[dict]:
        """Return all rows with samples, collective by collective."""
        order = {name: place for place, name in enumerate(self.collectives)}
        return sorted(self._rows.values(), key=lambda row: (order[row["collective"]], row["bytes"]))


def rows(sweeps: list[Sweep], before: list[dict]) -> list[dict]:
    """Return the rows of all sweeps, with the missing rivals of `before`."""
    failed = sweeps[0].failed
    missing = [row for row in before if "missing" in row and row not in failed]
    return [*itertools.chain.from_iterable(sweep.rows() for sweep in sweeps), *missing, *failed]


class PythonRival:
    """A rival with a Python process for each rank."""

    def __init__(self, name: str, processes: list[workers.WorkerProcess], sweep: Sweep):
        self.name, self.processes, self._sweep = name, processes, sweep
        self._checked: set[tuple[str, int]] = set()
        self._left = list(sweep.collectives)

    def sample(self) -> None:
        """Take one sample of everything; a collective that fails is not tried again, nor a rival that is lost."""
        collective = "a run"
        try:
            if not self._left or self._sample_in_a_row():
                return
            for collective in list(self._left):
                self._sample_sizes(collective)
        except workers.WorkerLost as lost:
            self._sweep.fail(self.name, collective, str(lost))
            self._left.clear()
            self.close()

    def _sample_sizes(self, collective: str) -> None:
        try:
            for nbytes in self._sweep.sizes * self._sweep.cycles:
                self._sample(collective, nbytes)
        except workers.WorkerLost:
            raise
        except workers.WorkerFailed as failed:
            self._sweep.fail(self.name, collective, str(failed))
            self._left.remove(collective)

    def _sample_in_a_row(self) -> bool:
        """Take one sample of everything without a pause, on CPUs; return whether that was done and nothing has failed.

        An MPI's ranks never sleep during a run. Ranks that sleep between two samples may be woken on distant cores,
        above all in a virtual machine, and small calls then take twice as long. A failure is located by taking the
        samples one by one.
        """
        if self._sweep.gpu:
            return False
        cells = [(collective, nbytes) for collective in self._left for nbytes in self._sweep.sizes]
        try:
            for cell in cells:
                self._check(*cell)
            seconds = self._ask("samples", {"operations": [self._in_a_row(*cell) for cell in cells]})
        except workers.WorkerLost:
            raise
        except workers.WorkerFailed:
            return False
        for cell, *of_ranks in zip(cells, *seconds, strict=True):
            self._sweep.add(self.name, *cell, max(of_ranks))
        return True

    def _sample(self, collective: str, nbytes: int) -> None:
        sweep, what = self._sweep, {"collective": collective, "nbytes": nbytes}
        self._check(collective, nbytes)
        if sweep.launches:
            seconds = self._ask("replay", {**what, "n": sweep.calls(nbytes), "launches": sweep.launches})
        else:
            seconds = self._ask("sample", self._in_a_row(collective, nbytes))
        sweep.add(self.name, collective, nbytes, sum(seconds) / len(seconds) if sweep.gpu else max(seconds))
        if sweep.gpu and nbytes <= LATENCY_BYTES and not sweep.launches:
            seconds = self._ask("sample", {**what, "n": LATENCY_CALLS, "waiting": True, "moving": False})
            sweep.add(self.name, collective, nbytes, sum(seconds) / len(seconds), "latency")

    def _check(self, collective: str, nbytes: int) -> None:
        """Check once that the results are right."""
        if (collective, nbytes) not in self._checked:
            self._ask("check", {"collective": collective, "nbytes": nbytes})
            self._checked.add((collective, nbytes))

    def _in_a_row(self, collective: str, nbytes: int) -> dict:
        """Return the request for a sample of calls in a row."""
        what = {"collective": collective, "nbytes": nbytes, "n": self._sweep.calls(nbytes)}
        return {**what, "waiting": False, "moving": self._sweep.gpu}

    def _ask(self, do: str, what: dict) -> list:
        return workers.ask_all([(process, what) for process in self.processes], do, deadline=DEADLINE)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.close()
        self.processes = []


class NcclTests:
    """nccl-tests: one run for each collective, over sizes that include all that are measured."""

    def __init__(self, name: str, folder: Path, flags: list[str], library: str, sweep: Sweep):
        self.name, self._folder, self._flags, self._sweep = name, folder.resolve(), flags, sweep
        self._left = list(sweep.collectives)
        # The library that ncclpy drives, whatever the binaries are linked to.
        paths = [str(Path(library).parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        self._environment = {"LD_LIBRARY_PATH": ":".join(paths)}
        smallest = sweep.sizes[0]
        powers = [(size // smallest).bit_length() - 1 for size in sweep.sizes]
        self._power = math.gcd(*powers) or 1
        self._size_of_line = [smallest << power for power in range(0, powers[-1] + 1, self._power)]
        strangers = [text_of(size) for size in sweep.sizes if size not in self._size_of_line]
        if strangers:
            sweep.fail(name, ", ".join(strangers), "not the smallest size times a power of two")

    def sample(self) -> None:
        """Take one sample of everything; a collective that fails is not tried again."""
        sweep, sizes = self._sweep, self._sweep.sizes
        steps = f"-b {sizes[0]} -e {sizes[-1]} -f {1 << self._power} -N {sweep.cycles}"
        if sweep.launches:
            steps += f" -G {sweep.launches}"
        for collective in list(self._left):
            binary = self._folder / nccl_tests.BINARIES[collective]
            flags = f"{steps} -t {sweep.nranks} -g 1 -n {GPU_CALLS} -w 10 -c 1"
            command = [str(binary), *flags.split(), *self._flags]
            try:
                output = nccl_tests.output_of(command, self._environment)
                lines = nccl_tests.lines(output, nccl_tests.TIME)
                if not lines:
                    raise ValueError(f"no line of results: {shlex.join(command)}")
            except ValueError as error:  # the error, then the whole output
                self._sweep.fail(self.name, collective, str(error).splitlines()[0].rstrip(":"))
                self._left.remove(collective)
                continue
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                self._sweep.fail(self.name, collective, str(error))
                self._left.remove(collective)
                continue
            for asked, (nbytes, values) in zip(self._size_of_line * sweep.cycles, lines, strict=False):
                if nbytes and asked in sizes and values["out of place"]:
                    sweep.add(self.name, collective, asked, values["out of place"] / 1e6)

    def close(self) -> None:
        """Do nothing: a run is over when it has printed."""


class Mpi:
    """An MPI: one run of all operations."""

    def __init__(self, name: str, python: Path, sweep: Sweep):
        self.name, self._python, self._sweep, self._lost = name, python, sweep, False

    def sample(self) -> None:
        """Take one sample of everything, unless it has failed before."""
        if self._lost:
            return
        sweep = self._sweep
        operations = [(name, size, sweep.calls(size)) for name in sweep.collectives for size in sweep.sizes]
        try:
            seconds = mpi.run_mpi(self._python, sweep.nranks, operations, slowest=True)
        except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            sweep.fail(self.name, "a run", str(error))
            self._lost = True
            return
        for (name, size, _), value in zip(operations, seconds, strict=True):
            sweep.add(self.name, name, size, value)

    def close(self) -> None:
        """Do nothing: a run is over when it has printed."""


def _started(name: str, sweep: Sweep) -> tuple[list[workers.WorkerProcess], dict | None, BaseException | None]:
    """Start a rival's processes; return them, the library that they have found, and the failure if any."""
    processes: list[workers.WorkerProcess] = []
    try:
        processes += [workers.WorkerProcess(SIDE, sweep.variables(rank)) for rank in range(sweep.nranks)]
        if name == "torch.distributed":
            return processes, None, None
        asked = [(process, {"gpu": sweep.gpu, "nranks": sweep.nranks}) for process in processes]
        return processes, workers.ask_all(asked, "library", deadline=workers.FIRST_DEADLINE)[0], None
    except BaseException as failure:
        return processes, None, failure


def _open(rivals: list[str], folder: Path, sweep: Sweep, result: dict, sides: list, as_nccl_tests: bool) -> str:
    """Start and open the Python rivals, ncclpy first; add them to `sides` and return the path of the library."""
    with ThreadPoolExecutor(len(rivals)) as threads:  # they import frameworks, each for seconds
        started = list(threads.map(lambda name: _started(name, sweep), rivals))
    library: dict = {}
    try:
        for index, (name, (processes, found, failure)) in enumerate(zip(rivals, started, strict=True)):
            ident = str(folder / f"store{sweep.launches}.{index}")
            try:
                if failure is not None:
                    raise failure
                if found is not None:
                    library = found
                    if sweep.gpu and not library["cuda"]:
                        result["settings"]["engine"] = "host"  # NCCLPY_LIBRARY=host runs the same way over CPU memory
                        sweep.itemsize = 8
                    result["versions"]["nccl"] = library["version"]
                    sweep.factors = library["factors"]
                    if name != "ncclpy.ProcessGroup":  # its ranks meet in a store instead
                        ident = library["id"]
                place = {
                    "nranks": sweep.nranks,
                    "gpu": sweep.gpu and library["cuda"],
                    "nbytes": sweep.sizes[-1],
                    "ident": ident,
                    "library": library["path"],
                    "streams": bool(library["cuda"] or sweep.launches),
                    "as_nccl_tests": as_nccl_tests and library["cuda"],
                }
                asked = [(process, {"rival": name, "rank": rank, **place}) for rank, process in enumerate(processes)]
                answer = workers.ask_all(asked, "open", deadline=workers.FIRST_DEADLINE)[0]
            except workers.WorkerFailed as failed:
                # Without the first one, ncclpy, the library that the others must drive is not known.
                if not library:
                    raise
                sweep.fail(name, "start", str(failed))
                continue
            if answer["missing"]:
                result["rows"].append({"rival": name, "missing": answer["missing"]})
                continue
            if answer["version"] and answer["version"] != library["version"]:
                result["versions"][f"nccl of {name}"] = answer["version"]
            sides.append(PythonRival(name, processes, sweep))
    finally:
        measured = [process for side in sides for process in getattr(side, "processes", ())]
        for processes, _, _ in started:
            for process in processes:
                if process not in measured:
                    process.close()
    return library["path"]


def _programs(chosen: argparse.Namespace, library: str, sweep: Sweep, result: dict) -> list:
    """Return the rivals that are other programs: nccl-tests on GPUs, MPIs on CPUs."""
    if not sweep.gpu:
        return [Mpi(name, python, sweep) for name, python in mpi.found(chosen, result).items()]
    if chosen.nccl_tests is None and sweep.launches:
        return []  # the sweep of calls made one by one has reported it
    if chosen.nccl_tests is None:
        result["rows"].append({"rival": "nccl-tests", "missing": "not given (--nccl-tests FOLDER)"})
        return []
    kinds = NCCL_TESTS | (NCCL_TESTS_REGISTERED if chosen.registered else {})
    return [NcclTests(name, chosen.nccl_tests, flags, library, sweep) for name, flags in kinds.items()]


def _command(chosen: argparse.Namespace) -> list[str]:
    command = ["--gpu", str(chosen.gpu)] if chosen.gpu else ["--ranks", str(chosen.ranks)]
    if chosen.apart:
        command.append("--apart")
    if chosen.nccl_tests:
        command += ["--nccl-tests", "FOLDER"]
    for option in mpi.RIVALS.values():
        if getattr(chosen, option):
            command += [f"--{option}", "PYTHON"]
    for option in ("sizes", "replayed", "without"):
        if getattr(chosen, option):
            command += [f"--{option}", *map(str, getattr(chosen, option))]
    if chosen.collectives != list(NAMES):
        command += ["--collectives", *chosen.collectives]
    if chosen.registered:
        command.append("--registered")
    return [*command, *results.options(chosen, {"rounds": ROUNDS, "cycles": 1})]
