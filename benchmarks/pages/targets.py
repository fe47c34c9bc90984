"""The targets of the project's speed, and whether a result meets them."""

from __future__ import annotations

from benchmarks.overhead.road import GROUP
from benchmarks.pages import summary, torch_targets
from benchmarks.pages.target import Target
from benchmarks.process_group import losses

_C = ("C loop", "ncclAllReduce", "host")
_BINDINGS = ("ncclpy.bindings", "all_reduce(ints)", "host")
_FLOOR = (
    "NCCL's own call and the device take more than half of that time: see the C loop's row, or that of the bare "
    "bindings. In symmetric windows the device takes less"
)
_EXCHANGE = (
    "each operation reads two tensors of torch by DLPack, and calls Tensor.is_neg for each, which costs as much "
    "again; a prepared buffer needs neither, nor do tensors that are read natively, as with torch.distributed's "
    "backend or after ncclpy.interop.torch.read_tensors_natively()"
)
_ONE_COPY = (
    "MPICH has the kernel copy straight from process to process, once, and so does ncclpy: both are near the "
    "bandwidth of memory, and neither can be so much faster"
)
_MONITOR = (
    "two events and a stream that waits, which add 0.1 times the call's time even in C; an entry of the recorder; and "
    "a monitor that polls the device and takes the GIL, once a millisecond"
)
_COLD = (
    "25 us until the monitor sees the end (however it polls, the device's event is complete 13 to 17 us after the "
    "producer), 7 us until a thread is awake, and the rest is for code and data that no cache holds after 20 ms; "
    "polling every 10 us instead of every 20 gains nothing measurable, and costs a tenth of a core"
)
_ALONE = "with a single rank NCCL copies separately for each operation, as in the C loop's group"
_LOOKED_UP = (
    "NCCL looks a call's buffers up among those registered: that ncclpy.bindings takes longer too shows that the time "
    "is NCCL's"
)
_PROCESS = (
    "at 8 bytes, and at 1 MiB on 4 GPUs, the time is that of the host, which is up to twice as long in one process as "
    "in the next, also for nccl-tests; at sizes where the time is that of the GPUs, there is no difference"
)
_BARE = ("ncclpy.bindings", "all_reduce(ints)", "latency")
_TORCH = ("torch.distributed", "all_reduce(torch tensor), in place", "latency")
_COMMUNICATOR = "ncclpy.Communicator"


def _beside(text: str, rival: str, limit: float, over: str, road: str, why: str = "") -> Target:
    """A target of the host engine: the time of `rival` relative to that of `over`, for the same collective."""
    rows = (rival, road, "time"), (over, road, "time")
    return Target(f"{road}: {text}", "mpi", "", rows[0], "ratio", limit, "x", rows[1], why=why)


def _host_engine() -> list[Target]:
    large = [f"{name} 64 MiB" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")]
    small = [name.replace("64 MiB", "8 B") for name in large]
    ours, threads = "ncclpy processes", "ncclpy threads"
    found = []
    for nranks, factor in ((2, 2), (4, 3), (8, 3)):
        for road in large:
            text = f"at least {factor} times MPICH's bandwidth"
            why = _ONE_COPY if "reduce" not in road else ""
            found.append(_beside(text, ours, 1 / factor, "MPICH", f"{road} {nranks} ranks", why))
            found.append(_beside("threads beat processes", threads, 1.0, ours, f"{road} {nranks} ranks"))
        road = f"all_reduce 64 MiB {nranks} ranks"
        found.append(_beside("70% of what memory bandwidth allows", ours, 1 / 0.7, "roofline", road))
        found.append(_beside("threads, 70% of what memory bandwidth allows", threads, 1 / 0.7, "roofline", road))
    for nranks, limit, text in (
        (2, 1.0, "no slower than MPICH"),
        (4, 0.5, "half of MPICH's time"),
        (8, 0.5, "half of MPICH's time"),
    ):
        for road in small:
            found.append(_beside(text, ours, limit, "MPICH", f"{road} {nranks} ranks"))
    return found


def _by_size() -> list[Target]:
    """Targets on GPUs, relative to nccl-tests and torch.distributed."""
    found = []
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")
    for road in (f"{name} {size}" for name in collectives for size in ("256 MiB", "1 GiB")):
        text = f"{road}: bus bandwidth at least 0.99 times nccl-tests'"
        rows = ("nccl-tests", road, "time"), ("ncclpy", road, "time")
        found.append(Target(text, "collectives", "gpu", rows[0], "ratio", 0.99, "x", rows[1], at_least=True))
    over = ("torch.distributed", "all_reduce 8 B", "latency")
    for rival, where, why in (("ncclpy", "", _FLOOR), ("ncclpy, windows", " in symmetric windows", "")):
        text = f"all_reduce 8 B{where}: less than half of torch.distributed's latency"
        row = (rival, "all_reduce 8 B", "latency")
        found.append(Target(text, "collectives", "gpu", row, "ratio", 0.5, "x", over, why=why))
    for rival, flag in (("ncclpy, registered", "-R 1"), ("ncclpy, windows", "-R 2")):
        text = f"all_reduce 8 B: {rival.split(', ')[1]} at most 1.05 times the time of nccl-tests {flag}"
        rows = (rival, "all_reduce 8 B", "time"), (f"nccl-tests {flag}", "all_reduce 8 B", "time")
        found.append(Target(text, "collectives", "gpu", rows[0], "ratio", 1.05, "x", rows[1], why=_PROCESS))
    return found


def _beside_nccl_tests() -> list[Target]:
    """Targets of memory registered with NCCL, relative to nccl-tests with the same registration."""
    large = [f"{2**power} MiB" for power in range(10)] + ["1 GiB"]
    small = [f"{2**power} B" for power in range(3, 10)] + [f"{2**power} KiB" for power in range(10)]
    found = []
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        for rival, flag in (("ncclpy", ""), ("ncclpy, registered", " -R 1"), ("ncclpy, windows", " -R 2")):
            for words, roads in (
                ("from 1 MiB to 1 GiB", [f"{collective} {size}" for size in large]),
                ("below 1 MiB, replayed as graphs", [f"{collective} {size}, replayed" for size in small]),
            ):
                text = f"{collective} {words}: {rival} at most 1.05 times the time of nccl-tests{flag}"
                rows = (rival, roads[0], "time"), (f"nccl-tests{flag}", roads[0], "time")
                more = {"over": rows[1], "roads": tuple(roads), "why": _PROCESS}
                found.append(Target(text, "collectives", "gpu", rows[0], "ratio", 1.05, "x", **more))
    return found


def _memory() -> list[Target]:
    """Targets of registered memory, relative to plain memory and NCCL's own calls."""

    def promise(text: str, row: tuple[str, str, str], limit: float, unit: str, **more: object) -> Target:
        more = {"how": "value", **more}
        return Target(text, "memory", "gpu", row, limit=limit, unit=unit, **more)

    found = []
    for kind, over, why in (
        ("plain memory", "plain memory, no registry", ""),
        ("memory.alloc", "plain memory", _LOOKED_UP),
        ("windows", "plain memory", _LOOKED_UP),
    ):
        text = f"host time of Communicator.all_reduce: {kind} at most 1.05 times {over}"
        rows = (_COMMUNICATOR, kind, "host"), (_COMMUNICATOR, over, "host")
        found.append(promise(text, rows[0], 1.05, "x", how="ratio", over=rows[1], why=why))
    for kind in ("memory.alloc", "memory of others"):
        for count in ("1 communicator", "2 communicators"):
            road = f"{kind}, {count}"
            for measure, what in (("comes, with that call", "adding"), ("goes", "removing")):
                text = f"{what} a segment ({road}) takes at most 20 us longer than by NCCL's own calls"
                over = ("NCCL's own calls", road, measure)
                found.append(promise(text, ("ncclpy.memory", road, measure), 20.0, "us", how="difference", over=over))
    row = ("ncclpy.memory.Pool", 'memory.pool("torch")', "reaches ncclpy")
    return [*found, promise("no allocation from a warm pool of torch's reaches ncclpy", row, 0.0, "of 1,000")]


def _coordinator() -> list[Target]:
    """Targets of named operations."""
    ours, found = "ncclpy.Coordinator", []

    def promise(text: str, engine: str, road: str, how: str, limit: float, unit: str, **more: object) -> None:
        found.append(Target(text, "coordinator", engine, (ours, road, "time"), how, limit, unit, **more))

    for engine in ("host", "gpu"):
        for way in ("store", "group"):
            for rank in (0, 1):
                road = f"over a {way}, rank {rank} last"
                text = f"from the last bring to the launch, {road}: at most 100 us"
                promise(text, engine, road, "value", 100.0, "us", why=_WAKES)
    for model, count in (("ResNet-50", 161), ("GPT-2", 148)):
        for way in ("store", "group"):
            flat = (ours, f"{model}: one flat all-reduce, beside a {way}", "time")
            road = f"{model}: in any order, over a {way}"
            text = f"{road}: at most 0.65 times mpi4py's one by one"
            for rival in ("MPICH", "Open MPI"):
                over = (f"mpi4py, {rival}", f"{model}: one by one", "time")
                promise(f"{text}, {rival}", "host", road, "ratio", 0.65, "x", over=over, why=_MEMORY_BOUND)
            limit = 5.0 * count + 200.0
            text = f"{road}: at most {limit:,.0f} us more than one flat all-reduce"
            promise(text, "gpu", road, "difference", limit, "us", over=flat, why=_INTERPRETED)
            over = ("torch.distributed", f"{model}: one by one, beside a {way}", "time")
            promise(f"{road}: no longer than torch.distributed one by one", "gpu", road, "ratio", 1.0, "x", over=over)
            road = f"{model}: grouped, over a {way}"
            text = f"{road}: at most 0.5 times torch.distributed one by one"
            promise(text, "gpu", road, "ratio", 0.5, "x", over=over)
            text = f"{road}: at most 1.25 times one flat all-reduce"
            promise(text, "gpu", road, "ratio", 1.25, "x", over=flat, why=_INTERPRETED)
    return found


_WAKES = "most of it is the time in which two threads wake one after the other, the root's and the other rank's"
_MEMORY_BOUND = (
    "one flat all-reduce alone takes nearly that share of mpi4py's time, as memory bandwidth limits both on two "
    "cores; and each of the 46 large gradients starts and ends separately"
)
_INTERPRETED = (
    "to bring an array, launch it and end its work takes some 19 us on that machine, one array after the other under "
    "the GIL, and 7 us if many are brought at once"
)


def _recovery() -> list[Target]:
    """Targets of a group that has lost ranks."""

    def promise(text: str, engine: str, rival: str, nranks: int, operation: str, seconds: float) -> Target:
        row = (rival, f"{nranks} ranks", operation)
        return Target(text, "recovery", engine, row, "value", seconds * 1e3, "ms")

    rival = losses.PROCESSES
    return [
        promise("8 processes reduce again within 2 s of a kill", "host", rival, 8, losses.KILL, 2.0),
        *(
            promise(
                f"2 GPUs: the other one reduces within 10 s of a SIG{how.upper()}",
                "gpu",
                f"{rival}, {how}",
                2,
                row,
                10.0,
            )
            for how, (_, _, row) in losses.LOSSES.items()
        ),
        *(
            promise(
                f"2 GPUs: a new process reduces within 10 s of its start, after a SIG{how.upper()}",
                "gpu",
                f"{rival}, {how}",
                2,
                losses.JOIN,
                10.0,
            )
            for how in losses.LOSSES
        ),
    ]


def _manager(engine: str) -> list[Target]:
    """Targets of the Manager on one engine, 8 devices in one process."""
    us, plan = "ncclpy.Manager", "ncclpy.Plan"

    def promise(text: str, row: tuple[str, str], limit: float, unit: str = "us", **more: object) -> Target:
        more = {"how": "value", **more}
        return Target(text, "manager", engine, (us, *row), limit=limit, unit=unit, **more)

    buffers = ("prepared buffer", "numpy array") if engine == "noop" else ("prepared buffer",)
    found = [
        *(
            promise(
                f"adding a participant takes at most 3 us ({kind})", (f"all_reduce({kind})", "not the last one"), 3.0
            )
            for kind in buffers
        ),
        promise(
            "an add while 100,000 keys are pending takes at most 1.2 times as long as one while 10 are",
            ("100,000 keys pending", "add"),
            1.2,
            "x",
            how="ratio",
            over=(us, "10 keys pending", "add"),
        ),
        promise(
            "the recorder costs at most 0.3 us an add",
            ("recorder of 2,000", "add"),
            0.3,
            how="difference",
            over=(us, "recorder off", "add"),
        ),
        promise("nothing pending takes at most 0.5% of a core", ("nothing pending", "CPU"), 0.5, "% of a core"),
    ]
    if engine != "host":
        # On the host engine threads have to be woken for a launch: its C loop alone takes longer than this.
        limit = 20.0 if engine == "gpu" else 10.0
        text = f"from the last add until all devices have their operation, at most {limit:g} us"
        found.append(promise(text, ("the last add", "until enqueued"), limit))
    if engine != "noop":
        found += [
            promise(
                f"a callback at most 50 us after completion, {ms} ms after the launch",
                (f"input ready after {ms} ms", "latency"),
                50.0,
                why=_COLD if engine == "gpu" and ms == 20 else "",
            )
            for ms in (1, 20)
        ]
    if engine == "gpu":
        found += [
            promise(f"8 bytes on all devices, participants from {where}, at most 45 us", (road, "repeated"), 45.0)
            for road, where in (("one thread", "one thread"), ("a thread each", "one thread per device"))
        ]
        found += [
            Target(f"8 bytes on all devices, {road}", "manager", "gpu", (plan, road, "repeated"), "value", limit, "us")
            for road, limit in (("Plan.launch", 18.0), ("Graph.launch", 14.0))
        ]
        found += [
            Target(
                f"{rival} reaches nccl-tests' bus bandwidth at 1 GiB within 1%",
                "manager",
                "gpu",
                (rival, "1024 MiB", "bus bandwidth"),
                "ratio",
                0.99,
                "x",
                ("nccl-tests", "1024 MiB", "bus bandwidth"),
                at_least=True,
            )
            for rival in (us, plan)
        ]
    return found


def _process_group() -> list[Target]:
    """Targets of works, relative to torch.distributed's, and of the way to the device through them."""
    us, torch, call = "ncclpy.ProcessGroup", "torch.distributed", "all_reduce(torch tensor), in place"
    waits = ", and the stream waits"
    beside = [
        Target(
            f"host time of ProcessGroup.all_reduce(tensor){words} is at most {limit:g} times torch.distributed's",
            "overhead",
            "gpu",
            (us, f"{call}{more}", "host"),
            "ratio",
            limit,
            "x",
            (torch, f"{call}, async_op{more}", "host"),
        )
        for words, more, limit in (("", "", 0.5), (waits, waits, 0.6))
    ]
    road = "all_reduce(prepared buffer)"
    through = Target(
        "one operation through the engine costs at most 1.3 times the Communicator's call",
        "overhead",
        "gpu",
        (us, road, "host"),
        "ratio",
        1.3,
        "x",
        (_COMMUNICATOR, road, "host"),
        why=_MONITOR,
    )
    on_cpus = [
        Target(
            f"all_reduce {size} of a process group takes at most {limit:g} times gloo's time",
            "collectives",
            "host",
            (us, f"all_reduce {size}", "time"),
            "ratio",
            limit,
            "x",
            (torch, f"all_reduce {size}", "time"),
        )
        for size, limit in (("8 B", 0.04), ("64 MiB", 0.5))
    ]
    large = Target(
        "all_reduce 1 GiB of a process group: at least 0.99 times the Communicator's bus bandwidth",
        "collectives",
        "gpu",
        ("ncclpy", "all_reduce 1 GiB", "time"),
        "ratio",
        0.99,
        "x",
        (us, "all_reduce 1 GiB", "time"),
        at_least=True,
    )
    peaks = [
        Target(
            f"the peak of {kind} memory in a training-like loop is at most torch.distributed's",
            "process_group",
            "gpu",
            (us, "2 ranks", f"peak {kind}"),
            "ratio",
            1.0,
            "x",
            (torch, "2 ranks", f"peak {kind}"),
        )
        for kind in ("allocated", "reserved")
    ]
    compared = Target(
        'comparing every call through shared memory (check="always") costs at most 15 us more',
        "process_group",
        "host",
        (us, 'check="always"', "median"),
        "difference",
        15.0,
        "us",
        (us, 'check="off"', "median"),
    )
    return [*beside, through, *on_cpus, large, *peaks, compared]


_STORE = "ncclpy.TCPStore"
TARGETS = [
    Target(
        "a round trip to a store takes at most 60 us",
        "bootstrap",
        "",
        (_STORE, "get", "latency"),
        "value",
        60.0,
        "us",
    ),
    Target(
        "1,000 clients of a store complete a barrier in at most 1 s",
        "bootstrap",
        "",
        (_STORE, "1000 clients", "meeting"),
        "value",
        1000.0,
        "ms",
    ),
    Target(
        "16 pipelined clients of a store set and get at least 50,000 keys a second",
        "bootstrap",
        "",
        (_STORE, "set and get", "rate"),
        "value",
        50.0,
        "1000/s",
        at_least=True,
    ),
    Target(
        "bindings.all_reduce is no slower than nccl4py's binding",
        "overhead",
        "noop",
        _BINDINGS,
        "ratio",
        1.0,
        "x",
        ("nccl4py bindings", "all_reduce(ints)", "host"),
    ),
    Target(
        "bindings.all_reduce adds at most 0.3 us to the C loop",
        "overhead",
        "noop",
        _BINDINGS,
        "difference",
        0.3,
        "us",
        _C,
    ),
    *(
        Target(
            f"Communicator.all_reduce({kind}) takes at most 0.6 us",
            "overhead",
            "noop",
            (_COMMUNICATOR, f"all_reduce({kind})", "host"),
            "value",
            0.6,
            "us",
        )
        for kind in ("torch tensor", "numpy array", "prepared buffer")
    ),
    Target(
        "an empty group() takes at most 0.4 us",
        "overhead",
        "noop",
        (_COMMUNICATOR, "with group(): pass", "host"),
        "value",
        0.4,
        "us",
    ),
    *(
        Target(
            f"{what} of Communicator.all_reduce({kind}) is at most {limit:g} times {words}",
            "overhead",
            "gpu",
            (_COMMUNICATOR, f"all_reduce({kind})", what.split()[0]),
            "ratio",
            limit,
            "x",
            over,
            why=why,
        )
        for what, kind, limit, words, over, why in (
            ("host time", "prepared buffer", 1.05, "the C loop's", _C, ""),
            ("host time", "torch tensor", 1.1, "the C loop's", _C, _EXCHANGE),
            ("latency", "prepared buffer", 1.05, "the bare Cython call's", _BARE, ""),
            ("latency", "torch tensor", 1.05, "the bare Cython call's", _BARE, _EXCHANGE),
            ("latency", "torch tensor", 0.5, "torch.distributed's", _TORCH, _FLOOR),
        )
    ),
    *(
        Target(
            f"{GROUP} operations ({kind}) in one group() cost at most 1.6 times the C group, per operation",
            "overhead",
            "gpu",
            (_COMMUNICATOR, f"all_reduce({kind}) in group()", "host"),
            "ratio",
            1.6,
            "x",
            ("C loop", f"{GROUP} x ncclAllReduce in a group", "host"),
            why=why,
        )
        for kind, why in (("prepared buffer", ""), ("torch tensor", _EXCHANGE), ("torch tensor, read natively", ""))
    ),
    *(
        Target(
            f"{launch} of {GROUP} operations costs at most {limit:g} us an operation",
            "overhead",
            "gpu",
            ("ncclpy.Plan", f"{launch} of {GROUP} x all_reduce", "host"),
            "value",
            limit,
            "us",
            why=_ALONE if launch == "Plan.launch" else "",
        )
        for launch, limit in (("Plan.launch", 0.8), ("Graph.launch", 0.1))
    ),
    *(
        Target(
            f"a process group of 64 ranks, as {rival}, starts within 3 s",
            "process_group",
            "host",
            (rival, "64 ranks", "to stand"),
            "value",
            3000.0,
            "ms",
        )
        for rival in ("threads, LocalStore", "processes, TCPStore")
    ),
    Target(
        "import ncclpy takes less than 60 ms on top of import numpy",
        "import",
        "",
        ("ncclpy", "import ncclpy", "time"),
        "value",
        60.0,
        "ms",
    ),
    Target(
        "ncclpy perf reaches nccl-tests' bus bandwidth at 1 GiB within 2%",
        "nccl-tests",
        "",
        ("ncclpy perf", "all_reduce 1G", "out of place"),
        "ratio",
        0.98,
        "x",
        ("nccl-tests", "all_reduce 1G", "out of place"),
        at_least=True,
    ),
    *_process_group(),
    *_host_engine(),
    *_by_size(),
    *_beside_nccl_tests(),
    *_memory(),
    *_recovery(),
    *_coordinator(),
    *torch_targets.promised(),
    *(target for engine in ("noop", "host", "gpu") for target in _manager(engine)),
]


def judge(result: dict) -> list[dict]:
    """Return, for every target that is about `result`, the value reached.

    A target is about a result that has the target's row, or the reason why the row is missing. Each item is a dict
    of text, limit, at_least, unit, why, reached, spread and kept; the last three are None without samples.
    """
    rows = {(row["rival"], row["road"], row["measure"]): row["samples"] for row in result["rows"] if "samples" in row}
    missing = {row["rival"] for row in result["rows"] if "missing" in row}
    judged = []
    for target in TARGETS:
        if target.experiment != result["experiment"] or target.engine != result["settings"].get("engine", ""):
            continue
        if target.roads and result["settings"].get("gpus") == 1:
            continue  # a single rank does not communicate: a call lasts as long as its launch
        here = [each for each in target.each() if each.row in rows]
        if not here and target.row[0] not in missing:
            continue
        verdict = {key: getattr(target, key) for key in ("text", "limit", "at_least", "unit", "why")}
        tried = [(_reached(each, rows), each.row[1]) for each in here or [target]]
        found = [(reached, road) for reached, road in tried if reached["reached"] is not None]
        worst = min if target.at_least else max
        reached, road = worst(found, key=lambda each: each[0]["reached"]) if found else tried[0]
        if target.roads and found:
            verdict["text"] += f" ({road} alone)" if len(found) == 1 else f" (of {len(found)}, furthest off: {road})"
        judged.append({**verdict, **reached})
    return judged


def _reached(target: Target, rows: dict) -> dict:
    samples, over = rows.get(target.row), rows.get(target.over)
    if samples is None or (target.over is not None and over is None):
        return {"reached": None, "spread": None, "kept": None}
    if target.how == "ratio":
        samples = summary.ratios(samples, over)
    elif target.how == "difference":
        samples = summary.differences(samples, over)
    reached = summary.median(samples)
    kept = reached >= target.limit if target.at_least else reached <= target.limit
    return {"reached": reached, "spread": summary.quartiles(samples), "kept": kept}
