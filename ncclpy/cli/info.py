"""``ncclpy info``: the loaded library, the devices and possible problems; `choose_engine`, which `perf` uses too."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from typing import Any

from ncclpy.core.runtime import library as loading
from ncclpy.core.runtime import search
from ncclpy.core.runtime.library import Library, abi_version
from ncclpy.errors import LibraryNotFound, NcclError

PACKAGES = (
    "ncclpy",
    "numpy",
    "ml_dtypes",
    "torch",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "cuda-core",
    "cuda-pathfinder",
    "cuda-python",
    "nvidia-nccl-cu11",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nccl4py",
    "mpi4py",
)

# With less shared memory than this, a few processes on one machine may run out of it.
_SMALL_SHM = 1 << 30


def choose_engine() -> tuple[Library, str]:
    """Load a library and return it with the reason for this choice.

    Without a GPU and without a choice by the user, the host engine is used; the reason then says what was not found.
    No other failure leads to the host engine: with a GPU, a missing NCCL is an error.

    Raises
    ------
    LibraryNotFound
        If the library that was chosen, or NCCL on a machine with GPUs, cannot be loaded.
    """
    try:
        library = loading.library()
    except LibraryNotFound as error:
        if not error.detail:
            raise
        loading.use("host")
        return loading.library(), f"no GPU found: {error.detail}"
    if os.environ.get("NCCLPY_LIBRARY"):
        return library, "chosen by NCCLPY_LIBRARY"
    return library, library.found


def first_line(command: str, library: Library, reason: str) -> str:
    """Return the first line of a command's output: the library that runs, its version and the reason."""
    version = ".".join(map(str, library.version))
    if library.engine == "host":
        return f"# ncclpy {command}: host engine {version} on CPU memory ({reason})"
    return f"# ncclpy {command}: NCCL {version} from {library.path} ({reason})"


def collect() -> dict[str, Any]:
    """Return all facts as plain values.

    If no library can be loaded, ``"library"`` has only an ``"error"``; if the devices cannot be queried, there is a
    ``"device_error"``. Other facts that cannot be determined are None.
    """
    facts: dict[str, Any] = {
        "system": {"platform": platform.platform(), "python": platform.python_version(), "executable": sys.executable},
        "packages": packages(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "NCCLPY_")) or name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
        },
        "shm": _shared_memory(),
    }
    try:
        loaded, reason = choose_engine()
    except NcclError as error:
        facts["first_line"] = "# ncclpy info: no NCCL library could be loaded"
        facts["library"] = {"error": str(error)}
        facts["devices"] = []
    else:
        facts["first_line"] = first_line("info", loaded, reason)
        facts["library"] = _library(loaded, reason)
        facts |= _devices()
    facts["mapped"] = search.mapped_nccl()
    facts["hints"] = hints(facts)
    return facts


def packages() -> dict[str, str]:
    """Return the versions of the installed packages in `PACKAGES`, without importing them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _library(loaded: Library, reason: str) -> dict[str, Any]:
    missing: dict[str, list[str]] = {}
    for symbol, since in sorted(loaded.missing().items(), key=lambda item: (item[1], item[0])):
        missing.setdefault(_dotted(since), []).append(symbol)
    return {
        "engine": loaded.engine,
        "version": _dotted(loaded.version),
        "path": loaded.path,
        # `choose_engine` has called use("host"), which `found` describes as if the user's program had called it.
        "found": loaded.found.replace("chosen by ncclpy.use()", "this command's stand-in for a GPU"),
        "reason": reason,
        "written_against": _dotted(abi_version()),
        "missing": missing,
    }


def _devices() -> dict[str, Any]:
    from ncclpy.core.runtime import device

    try:
        count = device.device_count()
        devices = [
            {
                "ordinal": ordinal,
                "name": device.name(ordinal),
                "memory": device.total_memory(ordinal),
                "pci_bus_id": device.pci_bus_id(ordinal),
                "uuid": str(device.uuid(ordinal)),
                "compute_capability": _dotted(device.compute_capability(ordinal)),
            }
            for ordinal in range(count)
        ]
        peers = [[a == b or device.can_access_peer(a, b) for b in range(count)] for a in range(count)]
        driver = _dotted(device.driver_version())
    except NcclError as error:
        return {"devices": [], "device_error": str(error)}
    return {"devices": devices, "peer_access": peers, "driver": driver, "topology": _topology()}


def _topology() -> str | None:
    """Return what ``nvidia-smi topo -m`` prints, or its error; ``None`` without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} topo -m: {error}"
    return (done.stdout if done.returncode == 0 else f"{program} topo -m: {done.stderr}").rstrip()


def _shared_memory() -> dict[str, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def hints(facts: dict[str, Any]) -> list[str]:
    """Return hints for the user about these facts, the most urgent first."""
    found = []
    library = facts["library"]
    if "error" in library:
        found.append("to run on CPU memory: NCCLPY_LIBRARY=host, or ncclpy.use('host') before the first use")
    if len(facts["mapped"]) > 1:
        found.append(
            "several libnccl are mapped into this process; a communicator made with one cannot be used with another: "
            + ", ".join(facts["mapped"])
        )
    if library.get("engine") == "host" and library["reason"].startswith("no GPU found"):
        found.append(
            "no GPU: this command uses the host engine instead; a program must choose it, with NCCLPY_LIBRARY=host "
            "or ncclpy.use('host') before the first use"
        )
    if facts["environment"].get("CUDA_VISIBLE_DEVICES", None) in ("", "-1", "NoDevFiles"):
        found.append("CUDA_VISIBLE_DEVICES hides every GPU from this process")
    if "device_error" in facts:
        found.append("the devices cannot be used, see above")
    missing = library.get("missing", {})
    if missing:
        count = sum(map(len, missing.values()))
        lacking = "the host engine lacks" if library["engine"] == "host" else f"NCCL {library['version']} lacks"
        found.append(
            f"{lacking} {count} functions that NCCL {list(missing)[-1]} has; calling one raises NcclUnsupported"
        )
    if library.get("engine") == "cuda":
        found += _wheel_hints(library, facts["packages"])
        count = len(facts["devices"])
        apart = [
            f"{a}-{b}"
            for a in range(count)
            for b in range(a + 1, count)
            if not (facts["peer_access"][a][b] and facts["peer_access"][b][a])
        ]
        if apart:
            found.append(f"no peer access between devices {', '.join(apart)}: NCCL copies through host memory there")
    if "ml_dtypes" not in facts["packages"]:
        found.append("ml_dtypes is not installed: numpy arrays cannot be bfloat16 or fp8 (pip install ml_dtypes)")
    shm = facts["shm"]
    if shm is not None and shm["free"] < _SMALL_SHM:
        found.append(
            f"/dev/shm has {_size(shm['free'])} free: processes on one machine talk through it and may run out "
            "(in a container: --shm-size=1g, or --ipc=host)"
        )
    return found


def _wheel_hints(library: dict[str, Any], installed: dict[str, str]) -> list[str]:
    wheels = [name for name in installed if name.startswith("nvidia-nccl-")]
    found = []
    if len(wheels) > 1:
        found.append(f"{' and '.join(wheels)} overwrite each other's files; keep the one that fits CUDA")
    for name in wheels:
        if ".".join(installed[name].split(".")[:3]) != library["version"]:
            found.append(f"{name} {installed[name]} is installed, but NCCL {library['version']} is loaded")
    return found


def text(facts: dict[str, Any]) -> str:
    """Return the facts as lines of text."""
    lines = [facts["first_line"], ""]
    library = facts["library"]
    if "error" in library:
        lines += ["library", *("  " + line for line in library["error"].splitlines())]
    else:
        lines += _table(
            "library",
            {
                "engine": "host, on CPU memory" if library["engine"] == "host" else "cuda",
                "version": f"{library['version']} (ncclpy is written against {library['written_against']})",
                "path": library["path"],
                "found": library["found"],
                "lacks": "" if library["missing"] else f"no function of NCCL {library['written_against']}",
            },
        )
        for since, names in library["missing"].items():
            lines += _wrapped(f"since {since}: {', '.join(names)}", "    ", "      ")
    lines += ["", *_device_lines(facts)]
    lines += ["", *_table("packages", facts["packages"])]
    lines += ["", *_table("environment", facts["environment"] or {"NCCL_*, NCCLPY_*": "none set"})]
    shm = facts["shm"]
    lines += [
        "",
        *_table(
            "system",
            {
                "platform": facts["system"]["platform"],
                "python": f"{facts['system']['python']} ({facts['system']['executable']})",
                "/dev/shm": "none" if shm is None else f"{_size(shm['free'])} free of {_size(shm['total'])}",
                "libnccl mapped": ", ".join(facts["mapped"]) or "none",
            },
        ),
    ]
    if facts["hints"]:
        lines += ["", "hints"]
        for hint in facts["hints"]:
            lines += _wrapped(hint, "  - ", "    ")
    return "\n".join(lines)


def _device_lines(facts: dict[str, Any]) -> list[str]:
    if "device_error" in facts:
        return ["devices", *("  " + line for line in facts["device_error"].splitlines())]
    if not facts["devices"]:
        return ["devices", "  none"]
    count = len(facts["devices"])
    if facts["library"]["engine"] == "host":
        numbers = "device 0" if count == 1 else f"devices 0 to {count - 1}"
        return [
            "devices",
            f"  {numbers}, virtual, in the {_size(facts['devices'][0]['memory'])} of this machine's memory",
            "  (NCCLPY_HOST_DEVICES says how many)",
        ]
    lines = [f"devices (driver for CUDA {facts['driver']})"]
    for entry in facts["devices"]:
        lines.append(
            f"  {entry['ordinal']:3d}  {entry['name']}  {_size(entry['memory'])}  {entry['pci_bus_id']}  "
            f"compute capability {entry['compute_capability']}"
        )
    lines += _link_lines(facts["peer_access"])
    if facts["topology"]:
        lines += ["", "nvidia-smi topo -m", *("  " + line for line in facts["topology"].splitlines())]
    return lines


def _link_lines(peers: list[list[bool]]) -> list[str]:
    """Return one line if all pairs of devices are alike, else a table of which device reaches which."""
    count = len(peers)
    links = {peers[a][b] for a in range(count) for b in range(count) if a != b}
    if not links:
        return []
    if len(links) == 1:
        reach = "each device reaches every other's" if True in links else "no device reaches any other's"
        return ["", "links", f"  {reach} memory directly"]
    lines = ["", "links (x: the device of the row reaches the memory of the column's directly)"]
    lines.append("      " + "".join(f"{ordinal:4d}" for ordinal in range(count)))
    for ordinal, row in enumerate(peers):
        marks = "".join("   ." if other == ordinal else "   x" if can else "   -" for other, can in enumerate(row))
        lines.append(f"  {ordinal:4d}{marks}")
    return lines


def _wrapped(line: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(line, 110, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def _table(title: str, entries: dict[str, str]) -> list[str]:
    width = max((len(name) for name in entries), default=0)
    return [title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in entries.items())]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _size(nbytes: int) -> str:
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 4)
    value = nbytes / 1024**power
    return f"{value:.{0 if value >= 100 or power == 0 else 1}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
