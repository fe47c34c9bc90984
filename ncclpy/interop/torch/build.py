"""Libraries that are built against the installed torch, and kept for later: small shared libraries of one source each.

One follows torch's allocator (`shim.cpp`): it has no Python in it and is loaded by ctypes. The other connects torch's
C++ with the backend for torch.distributed (`backend.cpp`) and is an extension module. The name of a library has a
digest of what it is built from, so that another torch or another compiler has a library of its own. If several
processes need one at once, as the ranks of a node do, one builds it and the others wait.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ncclpy.ownership import make_folder, open_own, why_exposed

_log = logging.getLogger("ncclpy")

#: The name of the extension module in Python.
EXTENSION = "ncclpy_torch_backend"
SOURCE = Path(__file__).with_name("shim.cpp")


class Part(NamedTuple):
    """A library to build, and the words of errors if it cannot be built.

    Attributes
    ----------
    name
        The first part of its file's name.
    source
        The file in C++; None is `SOURCE`.
    headers
        The headers of ncclpy that it includes, relative to its folder.
    options
        Options for the compiler.
    what, asked, without
        For errors: what it is, what has asked for it, and what can be done without it.
    """

    name: str
    source: Path | None
    headers: tuple[str, ...]
    options: tuple[str, ...]
    what: str
    asked: str
    without: str


ALLOCATOR = Part(
    "torch-shim",
    None,
    (),
    ("-lc10_cuda", "-lc10", "-Wl,-z,lazy", "-pthread"),
    "the shim for torch's allocator",
    "attach('torch', hooks=True)",
    "or attach without hooks, which builds nothing",
)
BACKEND = Part(
    "torch-backend",
    Path(__file__).with_name("backend.cpp"),
    ("heartbeat.hpp", "python.hpp", "reader.hpp", "../../abi/tensor_reader.h"),
    (
        "-fvisibility=hidden", f"-isystem{sysconfig.get_path('include')}", "-ltorch_python", "-ltorch_cpu", "-ltorch",
        "-lc10", "-pthread",
    ),
    "the extension for torch.distributed",
    "init_process_group('ncclpy')",
    "or use ncclpy.ProcessGroup, which builds nothing",
)  # fmt: skip
#: Standards of C++, in order: newer headers of torch need the later one, which older compilers do not know.
STANDARDS = ("c++17", "c++20")
#: How long a compiler may take, in seconds.
PATIENCE = 600.0
#: The number of a compiler's last lines that an error shows.
SHOWN = 25
#: The folder of this process for its libraries, if it can keep them nowhere else.
_made: Path | None = None


def built(torch: Any, part: Part = ALLOCATOR) -> Path:
    """Return the path of a library for a torch, and build the library if it was not built before.

    Parameters
    ----------
    torch : module
        The torch that is loaded.
    part : Part
        The library.

    Raises
    ------
    RuntimeError
        If there is no C++ compiler, or it could not build it; the message says what to do about it.
    """
    compiler = find_compiler(part)
    flags = [*flags_for(torch), *part.options]
    file = part.source or SOURCE
    sources = [path.read_bytes() for path in (file, *map(file.parent.joinpath, part.headers))]
    parts = [torch.__version__, torch.version.git_version, platform.machine(), version_of(compiler), *compiler, *flags]
    digest = hashlib.sha256(b"\0".join([*(str(part).encode() for part in parts), *sources])).hexdigest()[:32]
    folder = cache_folder()
    target = folder / f"{part.name}-{digest}.so"
    if not target.exists():
        with _alone(target.with_suffix(".lock")):
            if not target.exists():  # no other process has built it meanwhile
                compile_part(compiler, flags, target, part)
    return target


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Have other processes that build the same library wait; where files cannot be locked, they build it too."""
    lock = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)  # processes that wait for it, or start now, find the library
        os.close(lock)


def find_compiler(part: Part = ALLOCATOR) -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ that there is."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise RuntimeError(f"{part.asked} builds a small library, but CXX={asked[0]} is not there")
        return asked
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return [name]
    raise RuntimeError(
        f"{part.asked} builds a small library against the installed torch, and there is no C++ "
        "compiler: install one (apt install g++, dnf install gcc-c++, conda install cxx-compiler) or name it in CXX; "
        f"{part.without}"
    )


def version_of(compiler: list[str]) -> str:
    """Return where a compiler is and its version text; a compiler without a text may still build."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{shutil.which(compiler[0])} {done.stdout.partition(chr(10))[0]}"


def flags_for(torch: Any) -> list[str]:
    """Return the compiler's flags for a torch: where its headers and libraries are, and its ABI."""
    root = Path(torch.__file__).parent
    includes = _torch_includes(root)
    cuda = _cuda_include()
    if cuda is not None:
        includes.append(cuda)
    abi = int(bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)))
    # From these macros pybind11 concludes whether two modules share classes. Older releases of torch tell the values
    # that they were built with.
    known = {part: getattr(torch._C, f"_PYBIND11_{part}", None) for part in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f'-DPYBIND11_{part}="{value}"' for part, value in known.items() if value),
        *(f"-isystem{include}" for include in includes),
        f"-L{root / 'lib'}",
    ]


def _torch_includes(root: Path) -> list[str]:
    """Return the folders of torch's headers.

    ``torch.utils.cpp_extension`` is not asked for them: its import warns if it finds no GPU.
    """
    include = root / "include"
    return [str(include), str(include / "torch" / "csrc" / "api" / "include")]


def _cuda_include() -> str | None:
    """Return the folder of CUDA's headers: of a toolkit, or of the packages that torch is installed with.

    Return None if there is none, or if it is /usr/include, where compilers look without being told.
    """
    places = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    for folder in sorted(folder for folder in folders if folder):
        places += sorted(Path(folder, "nvidia").glob("*/include"), reverse=True)
    places += [Path("/usr/local/cuda/include"), Path("/usr/include")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        places.append(Path(nvcc).resolve().parent.parent / "include")
    found = [place for place in places if (place / "cuda_runtime_api.h").is_file()]
    # With CUDA 13 the headers that the runtime's headers include are a package of their own, in the same folder.
    whole = [place for place in found if (place / "crt" / "host_defines.h").is_file()]
    first = next(iter(whole or found), None)
    return None if first in (None, Path("/usr/include")) else str(first)


def cache_folder() -> Path:
    """Return the folder of built libraries, which belongs to this user alone.

    It is in the user's cache or, if that cannot be used, among the temporary files. If neither can be used, it is a
    new folder for this process.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    refused = []
    for folder in (
        Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "ncclpy"),
        Path(tempfile.gettempdir(), f"ncclpy-{os.geteuid()}"),
    ):
        why = _why_not(folder)
        if not why:
            return folder
        refused.append(why)
    global _made
    if _made is not None and _made.parent == Path(tempfile.gettempdir()) and not _why_not(_made):
        return _made
    _made = made = Path(tempfile.mkdtemp(prefix="ncclpy-"))
    atexit.register(_remove, made, os.getpid())
    _log.warning(
        "what is built against torch is kept in %s, for this process alone, and each process builds it again: %s. Set "
        "XDG_CACHE_HOME to a folder of user %d that no other user can write to, nor to those above it",
        made, "; ".join(refused), os.geteuid(),
    )  # fmt: skip
    return made


def _remove(folder: Path, pid: int) -> None:
    """Remove a folder at the end of the process that has made it; what was loaded from there stays loaded."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _why_not(folder: Path) -> str:
    """Return why no library is loaded from a folder, as a sentence; "" if there is no reason."""
    if not folder.is_absolute():
        return "no home folder is known"
    try:
        make_folder(str(folder))
        writable = os.access(folder, os.W_OK | os.X_OK)
        return why_exposed(folder) or ("" if writable else f"{folder} cannot be written to")
    except OSError as error:
        return f"{folder}: {error.strerror}"


def compile_part(compiler: list[str], flags: list[str], target: Path, part: Part = ALLOCATOR) -> None:
    """Build a library and put it in its place in one step, as other processes may do so at the same time.

    Raises
    ------
    RuntimeError
        If the compiler cannot be run or takes longer than `PATIENCE`; if it fails, with its last lines.
    """
    compiler_output = ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        output = Path(folder, "shim.so")
        for standard in STANDARDS:
            command = [
                *compiler, f"-std={standard}", "-O1", "-fPIC", "-shared", "-Wfatal-errors", str(part.source or SOURCE),
                "-o", str(output), *flags,
            ]  # fmt: skip
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            except (OSError, subprocess.SubprocessError) as error:
                raise RuntimeError(f"{part.what} could not be built: {error}") from error
            if done.returncode == 0:
                os.replace(output, target)
                return
            compiler_output = compiler_output or done.stderr or done.stdout
    lines = compiler_output.strip().splitlines()
    last = "\n".join(lines[-SHOWN:])  # the compiler has stopped at the first error
    hint = ""
    if "cuda_runtime_api.h" in compiler_output or "crt/" in compiler_output:
        hint = (
            " CUDA's headers are missing: set CUDA_HOME to a toolkit, or pip install nvidia-cuda-runtime and "
            "nvidia-cuda-crt of torch's CUDA version."
        )
    raise RuntimeError(f"{part.what} could not be built by {shlex.join(compiler)}.{hint} Its last lines:\n{last}")
