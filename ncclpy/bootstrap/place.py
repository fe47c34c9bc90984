"""This process's rank and the number of ranks, from the environment that its launcher has set."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ncclpy.bootstrap.address import as_host

__all__ = ["BOOT_ID", "Place", "environment", "machine"]

#: Identifies this machine until it is booted again; empty if the system does not say.
BOOT_ID = ""
with contextlib.suppress(OSError):
    BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Return a name that no other machine has.

    As in NCCL, a container with a host name of its own counts as a machine, and NCCL_HOSTID replaces the host's name.
    """
    return f"{BOOT_ID} {os.environ.get('NCCL_HOSTID') or socket.gethostname()}".strip()


class Place(NamedTuple):
    """Describe one of the processes that were started together.

    Attributes
    ----------
    rank, size : int
        The process's rank, and the number of ranks.
    local_rank, local_size : int or None
        The process's rank among the processes of this machine, and their number. A number that the environment lacks
        is None, but not in the `Place` that `ncclpy.bootstrap.rendezvous` returns, which counts each machine's ranks.
    launcher : str
        What started it: ``"ncclpy"``, ``"torchrun"``, ``"openmpi"``, ``"mpich"`` or ``"slurm"``.
    address : str or None
        The host on which the processes can meet, if the launcher names one.
    port : int or None
        The port there.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str
    address: str | None = None
    port: int | None = None


class _Names(NamedTuple):
    """The variables of one launcher, in the order of `Place`."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def variables(self) -> tuple[str, ...]:
        return self[1:]


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = _Names(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = _Names("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Not SLURM_NTASKS: it is also set in a batch script, which is one process and not a step of that many tasks.
_SLURM = _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
#: Innermost first: under srun there may be an mpirun, and under both a torchrun on each machine.
_LAUNCHERS = (_TORCHRUN, _OPENMPI, _MPICH, _SLURM)


def environment() -> Place:
    """Return this process's place in its job, from the variables of the launcher that started it.

    Launchers are ``ncclpy run``, torchrun (and whatever sets its variables), Open MPI's and MPICH's mpirun (Hydra,
    so Intel MPI's too) and Slurm's srun. If one launcher has started another, the launcher that NCCLPY_LAUNCHER names
    counts, or else the inner one. Torchrun's variables without TORCHELASTIC_RUN_ID do not count beside another
    launcher's, and must not contradict them. Of torchrun's variables RANK and WORLD_SIZE are enough, as Kubeflow and
    scripts for torch's ``env://`` set them. White space around values is ignored.

    Returns
    -------
    Place
        Rank, size, local rank, local size, the launcher, and the address to meet at if there is one: that of the store
        of ``ncclpy run``, MASTER_ADDR and MASTER_PORT, or the first node of a Slurm step with reserved ports.

    Raises
    ------
    RuntimeError
        If no launcher has started this process.
    ValueError
        If variables are missing, have a wrong value, or contradict each other; the message has the variables and their
        values.
    """
    environ = {name: stripped for name, value in os.environ.items() if (stripped := value.strip())}
    names = _launcher(environ, environ.get("NCCLPY_LAUNCHER"))
    rank, size, local_rank, local_size = _numbers(names, environ)
    # NCCLPY_RUN_ID is the path of nested runs; a torchrun inside `ncclpy run` has set another TORCHELASTIC_RUN_ID.
    run = environ.get("NCCLPY_RUN_ID", "").rpartition("/")[2]
    if names is _TORCHRUN and run and run == environ.get("TORCHELASTIC_RUN_ID"):
        host, _, port = environ.get("NCCLPY_STORE", "").rpartition(":")
        if not host:
            raise ValueError(f"NCCLPY_RUN_ID={environ['NCCLPY_RUN_ID']} but no NCCLPY_STORE: ncclpy run sets both")
        here = Place(rank, size, local_rank, local_size, "ncclpy", host.strip("[]"))
        return here._replace(port=_port("NCCLPY_STORE", port, environ))
    return Place(rank, size, local_rank, local_size, names.launcher, *_address(names, environ))


def _launcher(env: Mapping[str, str], choice: str | None) -> _Names:
    """Return the variables of the launcher that counts: `choice` (NCCLPY_LAUNCHER) if set, else the innermost."""
    if choice:
        chosen = [names for names in _LAUNCHERS if names.launcher == choice]
        if not chosen:
            known = ", ".join(names.launcher for names in _LAUNCHERS)
            raise ValueError(f"NCCLPY_LAUNCHER={_visible(choice)} is not one of {known}")
        return chosen[0]
    present = [names for names in _LAUNCHERS if _is_there(names, env)]
    if not present:
        raise RuntimeError(_no_launcher_text(env))
    names, others = present[0], present[1:]
    if names is _TORCHRUN and others and "TORCHELASTIC_RUN_ID" not in env:
        # Without TORCHELASTIC_RUN_ID, RANK was set by hand or is left over in a shell. Then it would be the same in
        # all processes of mpirun, so the other launcher counts; variables that contradict each other are an error.
        return _agreed(others[0], env)
    if names is _MPICH and _SLURM in others and not _set(names.variables[2:], env):
        return _agreed(_SLURM, env, _MPICH)  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, but no local numbers
    if names is _OPENMPI and _MPICH in others:
        return _agreed(names, env, _MPICH)
    return names


def _is_there(names: _Names, env: Mapping[str, str]) -> bool:
    if names is _SLURM:
        # The shell of an allocation may have `names.variables` too, but it is no process of a step.
        return "SLURM_STEP_ID" in env and bool(_set(names.variables, env))
    return bool(_set(names.variables, env))


def _set(names: tuple[str, ...], env: Mapping[str, str]) -> list[str]:
    return [name for name in names if name in env]


def _no_launcher_text(env: Mapping[str, str]) -> str:
    text = (
        "no launcher has started this process: none of RANK, OMPI_COMM_WORLD_RANK, PMI_RANK is set, nor "
        "SLURM_STEP_ID. Start it with `ncclpy run -n N program`, torchrun, mpirun or srun"
    )
    if "SLURM_JOB_ID" in env:
        text += f" (this is the shell of Slurm's job {env['SLURM_JOB_ID']}: srun starts the processes in it)"
    return text


def _agreed(names: _Names, env: Mapping[str, str], other: _Names = _TORCHRUN) -> _Names:
    """Return `names`; raise if a variable of the `other` launcher is set and contradicts them."""
    numbers = dict(zip(names.variables, _numbers(names, env), strict=True))
    theirs = {name: _number(name, env) for name in _set(other.variables, env)}
    apart = [
        (mine, their)
        for mine, their in zip(names.variables, other.variables, strict=True)
        if their in theirs and theirs[their] != numbers[mine]
    ]
    if apart:
        told = "; ".join(f"{_shown([mine], env)} but {_shown([their], env)}" for mine, their in apart)
        raise ValueError(
            f"the variables of {names.launcher} and of {other.launcher} contradict each other: {told}. Unset those "
            "that are left over, or say which count with NCCLPY_LAUNCHER, which may be "
            f"{names.launcher} or {other.launcher}"
        )
    return names


def _numbers(names: _Names, env: Mapping[str, str]) -> tuple[int, int, int | None, int | None]:
    """Return rank, size, local rank and local size; raise if one is missing or they contradict each other.

    A local number is None if torchrun's RANK and WORLD_SIZE were set without LOCAL_RANK or LOCAL_WORLD_SIZE. With one
    rank they are 0 and 1.
    """
    there = _set(names.variables, env)
    needed = names.variables[:2] if names is _TORCHRUN else names.variables
    missing = [name for name in needed if name not in env]
    if missing:
        raise ValueError(
            f"the environment of {names.launcher} is half-set: {_shown(there, env) or 'nothing'} but no "
            f"{', '.join(missing)}"
        )
    rank, size = (_number(name, env) for name in names.variables[:2])
    local_rank = _number(names.local_rank, env) if names.local_rank in env else None
    local_size = None
    if names.local_size in env:
        local_size = _tasks_here(env) if names is _SLURM else _number(names.local_size, env)
    for number, of, low, high in (
        (rank, "rank", 0, size - 1),
        (local_rank, "local rank", 0, (size if local_size is None else local_size) - 1),
        (local_size, "number of ranks on this machine", 1, size),
    ):
        if number is not None and not low <= number <= high:
            raise ValueError(
                f"the environment of {names.launcher} contradicts itself: {_shown(there, env)}: the {of} is "
                f"{number}, and must be from {low} to {high}"
            )
    return (rank, size, 0, 1) if size == 1 else (rank, size, local_rank, local_size)


def _shown(names: list[str], env: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={_visible(env[name])}" for name in names)


def _visible(value: str) -> str:
    """Return a value as it is, or as an ASCII literal if it is empty or has characters that could not be seen."""
    return value if re.fullmatch(r"[!-~]+", value) else ascii(value)


def _number(name: str, env: Mapping[str, str]) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{_shown([name], env)} is not a number") from None


def _tasks_here(env: Mapping[str, str]) -> int:
    """Return how many tasks the step has on this node: Slurm writes "4(x2),3" for 4, 4 and 3."""
    name, node = _SLURM.local_size, _number("SLURM_NODEID", env) if "SLURM_NODEID" in env else 0
    counts: list[int] = []
    for part in env[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{_shown([name], env)} is not a list such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise ValueError(f"SLURM_NODEID={node} is out of range: {name}={env[name]} lists {len(counts)} nodes")
    return counts[node]


def _address(names: _Names, env: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the host and the port at which the processes can meet."""
    there = _set(("MASTER_ADDR", "MASTER_PORT"), env)
    if len(there) == 1:
        missing = "MASTER_PORT" if there == ["MASTER_ADDR"] else "MASTER_ADDR"
        raise ValueError(f"the address to meet at is half-set: {_shown(there, env)} but no {missing}")
    if there:
        return as_host(env["MASTER_ADDR"], "MASTER_ADDR"), _port("MASTER_PORT", env["MASTER_PORT"], env)
    if names is _SLURM and "SLURM_STEP_RESV_PORTS" in env and "SLURM_STEP_NODELIST" in env:
        ports = env["SLURM_STEP_RESV_PORTS"]  # srun --resv-ports: "12000-12003,12007"
        return _first_host(env["SLURM_STEP_NODELIST"]), _port("SLURM_STEP_RESV_PORTS", re.split("[-,]", ports)[0], env)
    return None, None


def _port(name: str, text: str, env: Mapping[str, str]) -> int:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise ValueError(f"{_shown([name], env)} has no port, which is 1 to 65535")
    return int(text)


def _first_host(nodes: str) -> str:
    """Return the first name of Slurm's list of hosts: "gpu[03-07,12],login" begins with gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    name = first[0] if first else nodes
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name)
