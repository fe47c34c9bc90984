"""The system's C compiler: builds the benchmarks' own C files at run time, without any CUDA header."""

import importlib.util
import os
import shlex
import subprocess
from pathlib import Path

FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Werror", "-Wl,--no-undefined")


def build(source: Path, folder: Path, *, soname: str | None = None) -> Path:
    """Compile `source` into a shared library in `folder` and return its path.

    Parameters
    ----------
    source : Path
        One C file; ncclpy's ABI headers are on its include path.
    folder : Path
        Where the library goes, named as the source, or as `soname`.
    soname : str, optional
        The library's soname, for a library that stands in for another.

    Raises
    ------
    RuntimeError
        If there is no compiler, or it refuses; its output is in the message.
    """
    library = folder / (soname or f"{source.stem}.so")
    package = importlib.util.find_spec("ncclpy")
    assert package is not None and package.origin is not None, "ncclpy is not installed"
    headers = Path(package.origin).parent / "abi"
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, "-I", str(headers), str(source)]
    if soname:
        command.append(f"-Wl,-soname,{soname}")
    command += ["-o", str(library), "-ldl"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise RuntimeError(f"no C compiler: {command[0]} was not found; install one, or name it in CC") from None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
    return library
