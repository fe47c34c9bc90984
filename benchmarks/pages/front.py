"""The first page on performance: for each kind of user a few figures compared with another package, and pictures.

The figures are chosen here, and their values come from the results. A line without a result is left out.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from benchmarks.pages import plot, summary, targets
from benchmarks.pages.markdown import number, table
from benchmarks.work import results

HEAD = """# Performance

This page compares the cost of ncclpy with the cost of the library that you may use today: each section has one table.
The full tables, with quartiles, machines and versions, are on one page per benchmark, [below](#all-tables).
`python -m benchmarks report` writes these pages from the raw samples in `benchmarks/results`: do not edit the pages.

A call's time is the CPU's time until the call returns, for 8 bytes and with one process per GPU unless the line says
otherwise. Less is better, except for bandwidth. Below each table are the commands that measure it on your machine, in
a clone of the sources.
"""

#: A row of a result: rival, road and measure.
Row = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Line:
    """A figure of ncclpy and one of another package.

    Attributes
    ----------
    text : str
        What is measured; in `COSTLY` a sentence with placeholders for `ours` and `theirs`.
    result : str
        The name of the result's file, without its ending.
    ours, theirs : tuple
        The two rows.
    name : str
        The other package's name.
    """

    text: str
    result: str
    ours: Row
    theirs: Row
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of bars, at most eight.

    Attributes
    ----------
    name, title, text : str
        The file's name without its ending, the title above the bars, and the page's text on them.
    result : str
        The name of the result's file, without its ending.
    bars : dict
        ``{label: row}``, from top to bottom.
    """

    name: str
    title: str
    text: str
    result: str
    bars: dict[str, Row]


GPUS, CPUS = "overhead-gpu4", "collectives-host2"
_US, _ROW = "ncclpy.Communicator", "all_reduce(torch tensor)"
_TORCH = ("torch.distributed", "all_reduce(torch tensor), in place")
_C_GROUP = ("C loop", "a group from one thread")

_OURS, _NCCL, _GLOO = (f'torch.distributed, "{name}"' for name in ("ncclpy", "nccl", "gloo"))
_SMALL = "all_reduce of 8 B"

#: Figures by what a reader uses today.
LINES = {
    "torch.distributed": [
        Line("`dist.all_reduce`, 2 GPUs", "torch-gpu2", (_OURS, _SMALL, "host"), (_NCCL, _SMALL, "host"), '"nccl"'),
        Line("The same, until the result is complete", "torch-gpu2", (_OURS, _SMALL, "latency"),
             (_NCCL, _SMALL, "latency"), '"nccl"'),
        Line("A step under DDP, 100 million parameters, 2 GPUs", "torch-training-gpu2", (_OURS, "DDP", "time"),
             (_NCCL, "DDP", "time"), '"nccl"'),
        Line("The same under FSDP2", "torch-training-gpu2", (_OURS, "FSDP2", "time"),
             (_NCCL, "FSDP2", "time"), '"nccl"'),
        Line("`dist.all_reduce` without a GPU, 2 processes, until the result is complete", "torch",
             (_OURS, _SMALL, "latency"), (_GLOO, _SMALL, "latency"), '"gloo"'),
        Line("A step under DDP without a GPU, 30 million parameters, 4 processes", "torch-training",
             (_OURS, "DDP", "time"), (_GLOO, "DDP", "time"), '"gloo"'),
        Line("`Communicator.all_reduce` instead, 4 GPUs", GPUS, (_US, f"{_ROW}, in place", "host"),
             (*_TORCH, "host"), '"nccl"'),
    ],
    "NCCL from Python: nccl4py, pynccl, ctypes": [
        Line("A call on a torch tensor", GPUS, (_US, _ROW, "host"), ("nccl4py Communicator", "allreduce(torch tensor)",
             "host"), "nccl4py"),
        Line("The same, until the result is complete", GPUS, (_US, _ROW, "latency"), ("nccl4py Communicator",
             "allreduce(torch tensor)", "latency"), "nccl4py"),
        Line("A call on a torch tensor", GPUS, (_US, _ROW, "host"), ("ctypes (pynccl style)", _ROW, "host"),
             "ctypes, as in vLLM's pynccl"),
        Line("A call on a prepared `Buffer`", GPUS, (_US, "all_reduce(prepared buffer)", "host"), ("C loop",
             "ncclAllReduce", "host"), "a loop in C"),
        Line("1 GiB, bus bandwidth", "nccl-tests-4", ("ncclpy perf", "all_reduce 1G", "out of place"), ("nccl-tests",
             "all_reduce 1G", "out of place"), "nccl-tests"),
    ],
    "CuPy": [
        Line("A call on a CuPy array", GPUS, (_US, "all_reduce(cupy array)", "host"), ("cupy.cuda.nccl",
             "allReduce(ints)", "host"), "`cupy.cuda.nccl`, given pointers"),
        Line("A call on a CuPy array", GPUS, (_US, "all_reduce(cupy array)", "host"), ("nccl4py Communicator",
             "allreduce(cupy array)", "host"), "nccl4py"),
    ],
    "one process for several GPUs": [
        Line("The Manager, each of 200 all-reduces in a row", "manager-gpu4", ("ncclpy.Manager", "one thread",
             "repeated"), (*_C_GROUP, "repeated"), "C, one group per all-reduce"),
        Line("A plan, each of 200 all-reduces in a row", "manager-gpu4", ("ncclpy.Plan", "Plan.launch", "repeated"),
             (*_C_GROUP, "repeated"), "C, one group per all-reduce"),
    ],
    "MPI": [
        Line("An all-reduce, 2 processes", CPUS, ("ncclpy", "all_reduce 8 B", "time"), ("Open MPI", "all_reduce 8 B",
             "time"), "Open MPI"),
        Line("64 MiB, 2 processes", CPUS, ("ncclpy", "all_reduce 64 MiB", "time"), ("Open MPI", "all_reduce 64 MiB",
             "time"), "Open MPI"),
        Line("8 bytes, 8 processes on two cores", "mpi", ("ncclpy processes", "all_reduce 8 B 8 ranks", "time"),
             ("Open MPI", "all_reduce 8 B 8 ranks", "time"), "Open MPI"),
        Line("ResNet-50's gradients, in any order, 2 processes", "coordinator", ("ncclpy.Coordinator",
             "ResNet-50: in any order, over a group", "time"), ("mpi4py, MPICH", "ResNet-50: one by one", "time"),
             "mpi4py over MPICH, one by one in one order"),
    ],
    "Python without a GPU": [
        Line("An all-reduce, 2 processes", CPUS, ("ncclpy", "all_reduce 8 B", "time"), ("torch.distributed",
             "all_reduce 8 B", "time"), "`torch.distributed` (gloo)"),
        Line("64 MiB, 2 processes", CPUS, ("ncclpy", "all_reduce 64 MiB", "time"), ("torch.distributed",
             "all_reduce 64 MiB", "time"), "`torch.distributed` (gloo)"),
    ],
}  # fmt: skip

COSTLY = [
    Line(
        "A *nonblocking* communicator (`Config(blocking=False)`): NCCL hands each call to a thread of its own, "
        "{ours} a call instead of {theirs}. A communicator with a [deadline](guides/deadlines.md) need not be "
        "nonblocking.",
        GPUS,
        (f"{_US}, nonblocking", "all_reduce(prepared buffer)", "host"),
        (_US, "all_reduce(prepared buffer)", "host"),
    ),
    Line(
        "The [Manager](manager.md) *after a pause* of 1 ms: its threads sleep, so {ours} pass from the last add until "
        "all 4 GPUs have their operation; a loop in C takes {theirs}.",
        "manager-gpu4",
        ("ncclpy.Manager", "the last add, after a pause", "until enqueued"),
        (*_C_GROUP, "until enqueued"),
    ),
    Line(
        "A *small broadcast without a GPU*, 8 bytes over 2 processes: {ours}, Open MPI {theirs}. A call can be "
        "interrupted, checks whether all ranks agree, and releases the GIL for that.",
        CPUS,
        ("ncclpy", "broadcast 8 B", "time"),
        ("Open MPI", "broadcast 8 B", "time"),
    ),
]

PICTURES = [
    Picture(
        "front-call",
        "CPU time of a call: all-reduce of 8 bytes, 4 GPUs",
        "One process per GPU. The C loop shows the time of NCCL's own call; the rest of a bar is the library's.",
        GPUS,
        {
            "C loop": ("C loop", "ncclAllReduce", "host"),
            "ncclpy.bindings, ints": ("ncclpy.bindings", "all_reduce(ints)", "host"),
            "ncclpy, prepared Buffer": (_US, "all_reduce(prepared buffer)", "host"),
            "ncclpy, torch tensor": (_US, _ROW, "host"),
            "cupy.cuda.nccl, ints": ("cupy.cuda.nccl", "allReduce(ints)", "host"),
            "ctypes, torch tensor": ("ctypes (pynccl style)", _ROW, "host"),
            "nccl4py, torch tensor": ("nccl4py Communicator", "allreduce(torch tensor)", "host"),
            "torch.distributed": (*_TORCH, "host"),
        },
    ),
    Picture(
        "front-devices",
        "One process, 4 GPUs: 8 bytes, 200 in a row, each",
        "The difference is in the launch: a plan launches on all devices in parallel, without Python.",
        "manager-gpu4",
        {
            "C, a group from one thread": (*_C_GROUP, "repeated"),
            "nccl-tests -g 4": ("nccl-tests", "-g N", "repeated"),
            "nccl-tests, a thread a GPU": ("nccl-tests", "-t N -g 1", "repeated"),
            "ncclpy.Manager": ("ncclpy.Manager", "one thread", "repeated"),
            "ncclpy.Plan": ("ncclpy.Plan", "Plan.launch", "repeated"),
            "ncclpy.Plan, as CUDA graphs": ("ncclpy.Plan", "Graph.launch", "repeated"),
        },
    ),
    Picture(
        "front-cpu",
        "Without a GPU: all-reduce of 64 MiB, 2 processes",
        "The host engine compared with other libraries for CPUs, on two cores.",
        CPUS,
        {
            "ncclpy": ("ncclpy", "all_reduce 64 MiB", "time"),
            "torch.distributed (gloo)": ("torch.distributed", "all_reduce 64 MiB", "time"),
            "MPICH": ("MPICH", "all_reduce 64 MiB", "time"),
            "Open MPI": ("Open MPI", "all_reduce 64 MiB", "time"),
        },
    ),
]


def page(found: dict[str, dict], pages: dict[str, str], pictures: str) -> str:
    """Return the page.

    Parameters
    ----------
    found : dict
        ``{file name without its ending: result}``.
    pages : dict
        ``{path of a page with tables: its title}``.
    pictures : str
        The folder of the pictures, relative to the page.
    """
    parts = [HEAD, *_lines(found), *_costly(found)]
    for picture in (picture for picture in PICTURES if bars(picture, found)):
        parts.append(f"![{picture.title}]({pictures}/{picture.name}.png)\n\n{picture.text}\n")
    judged = [target for result in found.values() for target in targets.judge(result)]
    kept, missed = (sum(target["kept"] is each for target in judged) for each in (True, False))
    parts.append(
        "## All tables\n\n"
        "Times are medians of all rounds; the first and the third quartile follow in brackets. A column `x NAME` has "
        "the ratio\nof the row to the row of NAME. A ratio is the median of the ratios of all rounds, since other "
        "load of the machine in a\nround affects every library in it. Results with targets of the project end with "
        f"these: {kept} are kept, {missed} missed, with\nthe reason where it is known.\n"
    )
    parts.append("".join(f"- [{title}]({path})\n" for path, title in pages.items()))
    names = "\n".join(path.removesuffix(".md") for path in pages)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{names}\n```\n")
    return "\n".join(parts)


def draw(found: dict[str, dict]) -> dict[str, Any]:
    """Return ``{file name: figure}`` of the pictures."""
    return {
        f"{picture.name}.png": plot.few(picture.title, *bars(picture, found))
        for picture in PICTURES
        if bars(picture, found)
    }


def bars(picture: Picture, found: dict[str, dict]) -> tuple[dict[str, list[float]], str] | None:
    """Return ``{label: samples}`` of a picture's bars and their unit; None if there is nothing to compare."""
    rows = _rows(found.get(picture.result))
    shown = {label: rows[row] for label, row in picture.bars.items() if row in rows}
    if len(shown) < 2:
        return None
    return {label: row["samples"] for label, row in shown.items()}, next(iter(shown.values()))["unit"]


def _lines(found: dict[str, dict]) -> list[str]:
    parts = []
    for used, lines in LINES.items():
        figures = _figures(lines, found)
        if not figures:
            continue
        body = [[line.text, ours, f"{theirs}, {line.name}", ratio] for line, ours, theirs, ratio in figures]
        parts += [f"## If you use {used}\n", f"{table(['what', 'ncclpy', 'compared with', 'ratio'], body)}\n"]
        kept = [found[name] for name in dict.fromkeys(line.result for line, *_ in figures)]
        parts.append("".join(f"- `{_command(result)}`, here {_where(result)}\n" for result in kept))
    return parts


def _command(result: dict) -> str:
    """Return the command that repeats a result, without its environment variables."""
    command = result["command"]
    return str(command[command.index("python -m") :])


def _where(result: dict) -> str:
    gpus = results.gpus_used(result)
    on = f"{len(gpus)} {gpus[0].partition(',')[0]}" if gpus else f"{result['machine']['cores']} cores"
    return f"on {on}, {result['date']}"


def _costly(found: dict[str, dict]) -> list[str]:
    lines = [
        textwrap.fill(
            f"- {line.text.format(ours=ours, theirs=theirs)} Round by round: {ratio} times as long"
            f"{', though the median of all rounds is shorter' if shorter else ''}.",
            119,
            subsequent_indent="  ",
        )
        + "\n"
        for line, ours, theirs, ratio in _figures(COSTLY, found)
        if float(ratio) > 1
        for shorter in [_is_shorter(line, found)]
    ]
    return ["## Where it costs more\n", "".join(lines)] if lines else []


def _is_shorter(line: Line, found: dict[str, dict]) -> bool:
    """Return whether ncclpy's median is the shorter one, which the ratio of the rounds may contradict."""
    rows = _rows(found[line.result])
    return summary.median(rows[line.ours]["samples"]) < summary.median(rows[line.theirs]["samples"])


def _figures(lines: list[Line], found: dict[str, dict]) -> list[tuple[Line, str, str, str]]:
    """Return each line with ncclpy's figure, the other's, and the ratio, which is taken round by round."""
    figures = []
    for line in lines:
        rows = _rows(found.get(line.result))
        if line.ours in rows and line.theirs in rows:
            ours, theirs = rows[line.ours], rows[line.theirs]
            ratio = summary.median(summary.ratios(ours["samples"], theirs["samples"]))
            figures.append((line, _amount(ours), _amount(theirs), f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}"))
    return figures


def _amount(row: dict) -> str:
    median, unit = summary.median(row["samples"]), row["unit"]
    return f"{number(median / 1000)} ms" if unit == "us" and median >= 1000 else f"{number(median)} {unit}"


def _rows(result: dict | None) -> dict[Row, dict]:
    rows = result["rows"] if result else []
    return {(row["rival"], row["road"], row["measure"]): row for row in rows if row.get("samples")}
