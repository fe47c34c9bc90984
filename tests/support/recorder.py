"""Call ncclpy.bindings in a child process that uses recorder.cpp as its NCCL, and return what reached C.

The child runs this file as a program: it reads one JSON request per line, and writes one JSON reply per line.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from paths import ROOT, SUPPORT
from shared_builds import built_once


def compile_recorder(folder: Path) -> Path:
    """Compile recorder.cpp into an object file in `folder`."""
    output = folder / "recorder.o"
    include = ROOT / "ncclpy" / "abi"
    source = SUPPORT / "recorder.cpp"
    _compiler(
        "-std=c++17",
        "-O0",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Werror",
        f"-I{include}",
        "-c",
        source,
        "-o",
        output,
    )
    return output


def link_recorder(recorder: Path, folder: Path, lacking: list[str] | None = None) -> Path:
    """Link a recorder in `folder` that does not export the symbols in `lacking`."""
    library = folder / "librecorder.so"
    script = folder / "exports.map"
    hidden = "".join(f"{name};" for name in lacking or [])
    script.write_text("{ global: *; local: " + (hidden or "none;") + " };\n")
    _compiler("-shared", recorder, "-o", library, f"-Wl,--version-script={script}", "-ldl")
    return library


def shared_recorder(factory) -> tuple[Path, Path]:
    """Return the object file and the library that the tests of this run share."""
    folder = built_once(factory, "recorder", lambda folder: link_recorder(compile_recorder(folder), folder))
    return folder / "recorder.o", folder / "librecorder.so"


def _compiler(*args: str | Path) -> None:
    command = [*shlex.split(os.environ.get("CXX", "c++")), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


class Recorded:
    """A child process that uses a recorder."""

    def __init__(self, library: Path, version: int | None = None) -> None:
        environment = dict(os.environ, NCCLPY_LIBRARY=str(library))
        environment.pop("RECORDER_VERSION", None)
        if version is not None:
            environment["RECORDER_VERSION"] = str(version)
        self._child = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",
        )

    def __call__(self, function: str, *args: Any, **how: Any) -> dict[str, Any]:
        """Call ``bindings.<function>(*args)``; return the arguments seen in C, and the result or the exception.

        `how` sets ``result`` (what the C function returns) or ``defer`` (handles are written 1 later, 2 never).
        """
        assert self._child.stdin is not None and self._child.stdout is not None and self._child.stderr is not None
        self._child.stdin.write(json.dumps({"function": function, "args": args, **how}) + "\n")
        self._child.stdin.flush()
        # A hanging child is killed, which gives an empty line.
        timer = threading.Timer(30, self._child.kill)
        timer.start()
        line = self._child.stdout.readline()
        timer.cancel()
        assert line, f"the child died:\n{self._child.stderr.read()}"
        return json.loads(line)

    def close(self) -> str:
        """End the child; return its standard error."""
        _, errors = self._child.communicate(timeout=30)
        return errors


def _decode(value: Any) -> Any:
    from ncclpy.core.arguments.config import CollConfig, Config
    from ncclpy.types import UniqueId

    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "id":
            return UniqueId(bytes([content]) * 128)
        return {"config": Config, "coll_config": CollConfig}[kind](**content)
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def _encode(value: Any) -> Any:
    from ncclpy.core.bindings.communicators import PendingHandle
    from ncclpy.types import Result, UniqueId

    if isinstance(value, UniqueId):
        return {"id": bytes(value)[127]}
    if isinstance(value, PendingHandle):
        return {"pending": value.value, "result": value.result.name}
    if isinstance(value, Result):
        return {"result": value.name}
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return value


def _serve() -> None:
    from ncclpy import bindings

    library = ctypes.CDLL(os.environ["NCCLPY_LIBRARY"])
    library.recorder_last.restype = ctypes.c_char_p
    library.recorder_write.argtypes = [ctypes.c_size_t]
    result = ctypes.c_int.in_dll(library, "recorder_result")
    place = ctypes.c_void_p.in_dll(library, "recorder_place")
    defer = ctypes.c_int.in_dll(library, "recorder_defer")
    for line in sys.stdin:
        request = json.loads(line)
        result.value = request.get("result", 0)
        defer.value = request.get("defer", 0)
        try:
            returned = getattr(bindings, request["function"])(*_decode(request["args"]))
        except Exception as error:
            known = ("result", "function", "detail", "version")
            fields = {name: getattr(error, name, None) for name in known}
            reply = {"raised": type(error).__name__, "message": str(error), **fields}
        else:
            reply = {"returned": _encode(returned)}
            if defer.value == 1:
                library.recorder_write(0xABCDEF)
                reply["later"] = _encode(returned)
            del returned
        reply["place"] = place.value
        reply["seen"] = json.loads(library.recorder_last() or b"null")
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
