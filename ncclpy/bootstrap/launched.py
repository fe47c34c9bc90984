"""The store through which the processes of one launcher find each other."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import threading
import time
from pathlib import Path

from ncclpy.bootstrap.place import Place, environment, machine
from ncclpy.bootstrap.prefix import PrefixStore
from ncclpy.bootstrap.rank_rendezvous import RankRendezvous, listed
from ncclpy.bootstrap.store import Store
from ncclpy.bootstrap.store_arguments import TIMEOUT, StoreError, as_seconds
from ncclpy.bootstrap.tcp import TCPStore
from ncclpy.errors import NcclTimeout
from ncclpy.errors import seconds as as_text
from ncclpy.ownership import open_own, why_foreign
from ncclpy.types import Need

__all__ = ["earlier_process_state", "rendezvous", "rendezvous_of_job"]

#: Connects to the store that torchrun serves; called with the address, the port and a timeout in seconds.
_connect_to_torchrun: Need[[str | None, int | None, float], Store] = Need("connect_to_torchrun")
_LOOPBACK = "127.0.0.1"
#: By launcher, the possible names of the process from which all ranks of a machine descend.
_PARENTS = {
    "openmpi": {"prterun", "prted", "mpirun", "mpiexec", "orterun", "orted"},
    "mpich": {"hydra_pmi_proxy"},
    "slurm": {"slurmstepd"},
}

_lock = threading.Lock()
_store: Store | None = None
_job_rendezvous: RankRendezvous | None = None
#: Local rank and local size of this process, if its launcher does not set them.
_here: tuple[int, int] | None = None
_process = 0
#: Whether this is the first process of its rank in this attempt, see `_attempt_view`.
_is_first = False


def rendezvous(timeout: float | None = None) -> tuple[Place, Store]:
    """Return this process's place in its job, and the store in which all processes of the job meet.

    The first call, which all ranks must make, opens the one store of the process, which stays open until the process
    ends. The returned store is a view of that store: closing the view does not close the store. The server is the
    launcher, if that is ``ncclpy run``; torchrun's agent, if TORCHELASTIC_USE_AGENT_STORE says so (its store is used
    through torch, with new keys after each restart); else rank 0, at the address that `environment` returns. Without
    an address (and in a Slurm step on one machine without MASTER_ADDR) rank 0 writes its port and token to a file,
    which is named after the launcher's process and deleted when all ranks have read it.

    If the environment lacks LOCAL_RANK or LOCAL_WORLD_SIZE, all ranks wait for each other here and exchange their
    machines' names, from which each rank counts its local rank and local size.

    Parameters
    ----------
    timeout
        Seconds within which the store must be reached, and default seconds of its operations; None: 300.

    Raises
    ------
    RuntimeError, ValueError
        As `environment` does, or if there is no address at which the ranks of several machines could meet.
    NcclTimeout
        If the store cannot be reached in time, or other ranks that this one waits for do not arrive.
    StoreError
        If the store refuses this process, or the folder of the file with the token is not this user's alone.
    """
    global _store, _process, _job_rendezvous, _here, _is_first
    seconds = as_seconds(timeout, TIMEOUT)
    deadline = time.monotonic() + seconds
    place = environment()
    if not _lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
        raise NcclTimeout(
            f"another thread of this process (rank {place.rank} of {place.size}) is trying to reach the store of "
            f"{place.launcher}, and did not succeed within {as_text(seconds)}"
        )
    try:
        if _store is None or _process != os.getpid():  # a forked process opens a store of its own
            store = _connect(place, seconds, deadline)
            try:
                # From here on the other ranks can detect the end of this process, even before it has made a group.
                ranks = PrefixStore("ncclpy/ranks", _attempt_view(store))
                _is_first = not ranks.check([RankRendezvous.joined_key(place.rank)])
                rendezvous = RankRendezvous(ranks, "this job", place.rank, place.size)
                here = None if _is_located(place) else _locate(place, rendezvous, deadline)
            except BaseException:
                store.close()
                raise
            _store, _process, _job_rendezvous, _here = store, os.getpid(), rendezvous, here
        if _here is not None and not _is_located(place):
            local_rank = _here[0] if place.local_rank is None else place.local_rank
            place = place._replace(local_rank=local_rank, local_size=_here[1])
        # Each caller gets a view of its own, which it may close.
        view = _attempt_view(_store)
        view.timeout, view.one_attempt = seconds, _is_first
        return place, view
    finally:
        _lock.release()


def _is_located(place: Place) -> bool:
    return place.local_rank is not None and place.local_size is not None


def _locate(place: Place, rendezvous: RankRendezvous, deadline: float) -> tuple[int, int]:
    """Return local rank and local size, counted from the names of machines that all ranks exchange."""
    what = "to count the ranks of each machine, as LOCAL_RANK or LOCAL_WORLD_SIZE is not set"
    told = json.dumps(machine()).encode()
    left = max(0.0, deadline - time.monotonic())
    machines = json.loads(rendezvous.meet("machines", range(place.size), what, told, listed, left, lambda: True))
    here = [rank for rank, name in enumerate(machines) if name == machines[place.rank]]
    return here.index(place.rank), len(here)


def rendezvous_of_job() -> RankRendezvous:
    """Return the `RankRendezvous` of all ranks of this job; `rendezvous` must have been called."""
    assert _job_rendezvous is not None
    return _job_rendezvous


def earlier_process_state(rank: int) -> str:
    """Return the state of a rank's process that has not made a group yet, as far as the launcher's store has it.

    The state is ``"ended"``, or ``"not_joined"`` if the process has not reached the store, or "" if neither is known.
    A caller should wait also for an ended rank, since another program of the rank may follow the ended process.
    """
    rendezvous = _job_rendezvous
    if rendezvous is None:
        return ""
    return "ended" if rendezvous.is_gone(rank) else "" if rendezvous.has_joined(rank) else "not_joined"


def _attempt_view(store: Store) -> PrefixStore:
    """Return the part of a store that belongs to this attempt; each restart by torchrun begins a new attempt."""
    return PrefixStore(f"ncclpy/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _forked() -> None:
    """Make a new lock in a forked child: a thread that exists only in the parent may hold the inherited one."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _connect(place: Place, seconds: float, deadline: float) -> Store:
    timeout = max(0.0, deadline - time.monotonic())
    if place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _connect_to_torchrun(place.address, place.port, timeout)
    # On one machine Slurm's reserved ports are not needed, and the resolver may not know Slurm's node names.
    alone = place.launcher == "slurm" and place.local_size == place.size and not os.environ.get("MASTER_ADDR")
    if place.address is not None and place.port is not None and not alone:
        serve = place.rank == 0 and place.launcher != "ncclpy"
        return TCPStore(place.address, place.port, serve=serve, timeout=timeout)
    return _on_one_machine(place, seconds, deadline)


def _on_one_machine(place: Place, seconds: float, deadline: float) -> Store:
    """Return a store that rank 0 serves; the other ranks read its address and token from a file."""
    if place.local_size != place.size:
        here = f", {place.local_size} of them on this machine," if _is_located(place) else ""
        raise ValueError(
            f"{place.launcher} has started {place.size} ranks{here} and has set no address at which they can meet. "
            "Set MASTER_ADDR and MASTER_PORT for all of them, to a host name of rank 0's machine and a free port "
            "there, and NCCLPY_STORE_TOKEN to a secret"
        )
    path = _folder() / f"{place.launcher}-{_launcher_process(place.launcher)}"
    timeout = max(0.0, deadline - time.monotonic())
    if place.rank == 0:
        token = secrets.token_hex(32)
        store = TCPStore(_LOOPBACK, 0, serve=True, token=token, timeout=timeout)
        unfinished = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        with open(open_own(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(json.dumps([store.port, token]))
        unfinished.rename(path)  # readers see the whole file or none
    else:
        while (told := _read(path)) is None:
            if time.monotonic() > deadline:
                late = NcclTimeout(f"rank 0 of {place.size} has not written {path} within {as_text(seconds)}")
                late.missing = [0]
                raise late
            time.sleep(0.02)
        port, token = json.loads(told)
        store = TCPStore(_LOOPBACK, port, token=token, timeout=timeout)
    try:
        try:
            _meet(store, place, deadline)
        finally:
            if place.rank == 0:
                with contextlib.suppress(OSError):
                    path.unlink()
        # No rank continues while the file exists: the rank's next program would read it as the file of its own run.
        _meet(store, place, deadline)
    except BaseException:
        store.close()
        raise
    return store


def _meet(store: Store, place: Place, deadline: float) -> None:
    store.barrier("ncclpy/rendezvous", place.rank, place.size, max(0.0, deadline - time.monotonic()))


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _folder() -> Path:
    """Return a folder that no other user can write to or read."""
    folder = Path(tempfile.gettempdir()) / f"ncclpy-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    why = why_foreign(folder, secret=True)
    if why:
        raise StoreError(
            f"{folder} {why}: a token in it would not be secret; remove the folder, or set TMPDIR to a folder of your "
            "own, the same for all ranks"
        )
    return folder


def _launcher_process(launcher: str) -> str:
    """Return a name for the ancestor process that has started all ranks of this machine."""
    pid = os.getpid()
    try:
        while pid > 1:
            # `tail` begins with field 3, after the name, which may contain any bytes: the state, then the parent;
            # field 22 is the start time.
            head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")
            fields = tail.split()
            if head.partition("(")[2] in _PARENTS.get(launcher, ()):
                # One prted may start more than one job.
                job = os.environ.get("PMIX_NAMESPACE", "") if launcher == "openmpi" else ""
                return f"{pid}-{fields[19]}" + "".join(each if each.isalnum() else "-" for each in job)
            pid = int(fields[1])
    except OSError:
        pass
    raise ValueError(
        f"{launcher} has started this rank and has set no address at which the ranks can meet, and the process of "
        f"{launcher} is not found among the parents of this one. Set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free "
        "port, for all ranks"
    )
