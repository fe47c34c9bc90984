"""A road is a call path to NCCL: a statement as a user writes it, which is timed."""

from __future__ import annotations

import dataclasses
import timeit
from collections.abc import Callable

from benchmarks.work.setting import COUNT, FLOAT32, GROUP, SUM, Setting


@dataclasses.dataclass
class Road:
    """A call path to NCCL.

    Attributes
    ----------
    name : str
        The call and its arguments: ``"Communicator.all_reduce(torch tensor)"``.
    operation : str
        ``"all_reduce"``, ``"group of 64"`` or ``"empty group"``; roads with the same operation are compared.
    host : callable
        Issues n operations back to back and returns the seconds that took, without waiting for them.
    latency : callable or None
        Issues n operations, waits for each, and returns the seconds.
    result : int
        Pointer of the receive buffer, or 0 if its content shows nothing (in place, or nothing is sent).
    reduces, groups : float
        How many all-reduces, and ends of groups, the library should receive for one operation; the benchmark checks
        that.
    """

    name: str
    operation: str
    host: Callable[[int], float]
    latency: Callable[[int], float] | None = None
    result: int = 0
    reduces: float = 1
    groups: float = 0


def timed(setting: Setting, statement: str, *, per: int = 1, **names: object) -> Callable[[int], float]:
    """Return a function that runs `statement` for n operations and returns the seconds on the setting's clock.

    Parameters
    ----------
    setting : Setting
        The setting of the road.
    statement : str
        Python source, inserted literally into the timed loop, which runs with the garbage collector off.
    per : int
        Operations in one statement.
    **names : object
        The names in the statement, which are local variables of the loop.
    """
    setup = "; ".join(f"{name} = _names[{name!r}]" for name in names)
    timer = timeit.Timer(statement, setup, timer=setting.clock, globals={"_names": names})

    def run(n: int) -> float:
        return timer.timeit(n // per)

    return run


def python_road(setting: Setting, name: str, call: str, *, result: int = 0, **names: object) -> Road:
    """Return the road of one all-reduce, written as the Python source `call`.

    For the latency, the name ``sync`` waits, by default the setting's; without it the road has no latency.
    """
    sync = names.pop("sync", setting.sync)
    latency = None
    if sync is not None:
        latency = timed(setting, f"{call}; sync()", sync=sync, **names)
    return Road(name, "all_reduce", timed(setting, call, **names), latency, result)


def binding_roads(setting: Setting, bindings: object, comm: object) -> list[Road]:
    """Return the roads of bindings that take ints: one all-reduce, `GROUP` of them in a group, and an empty group.

    Parameters
    ----------
    setting : Setting
        The setting with the pointers and the stream.
    bindings : object
        A module with ``all_reduce(send, recv, count, dtype, op, comm, stream)``, ``group_start`` and ``group_end``.
    comm : object
        The setting's communicator, as the module takes it.
    """
    call = "all_reduce(send, recv, count, dtype, op, comm, stream)"
    names = {
        **{name: getattr(bindings, name) for name in ("all_reduce", "group_start", "group_end")},
        "send": setting.send,
        "recv": setting.recv,
        "count": COUNT,
        "dtype": FLOAT32,
        "op": SUM,
        "comm": comm,
        "stream": setting.stream,
    }
    group = timed(setting, f"group_start()\nfor _ in range({GROUP}):\n    {call}\ngroup_end()", per=GROUP, **names)
    empty = timed(setting, "group_start(); group_end()", **names)
    return [
        python_road(setting, "all_reduce(ints)", call, result=setting.recv, **names),
        Road(
            f"{GROUP} x all_reduce(ints) in a group",
            f"group of {GROUP}",
            group,
            result=setting.recv,
            groups=1 / GROUP,
        ),
        Road("group_start, group_end", "empty group", empty, reduces=0, groups=1),
    ]


def python_group(setting: Setting, name: str, call: str, *, result: int = 0, **names: object) -> Road:
    """Return the road of `GROUP` times `call` in one block ``with group():``; `names` has the group.

    If `names` has `recvs`, as many buffers, each call has a `recv` of its own.
    """
    each = "recv in recvs" if "recvs" in names else f"_ in range({GROUP})"
    source = f"with group():\n    for {each}:\n        {call}"
    host = timed(setting, source, per=GROUP, **names)
    return Road(name, f"group of {GROUP}", host, result=result, groups=1 / GROUP)
