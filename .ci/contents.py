"""Look into a wheel, or into what is installed here: is all there that belongs there, and nothing else?

python .ci/contents.py [WHEEL] compares with the source tree: Python's files, stubs, declarations and headers as they
stand there, one extension module for each .pyx, the host engine, the licence. Shared libraries may hold no path of the
machine that built them.
"""

import importlib.metadata
import os
import re
import struct
import sys
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (".py", ".pyi", ".pxd", ".h", ".typed")
#: What is built where it is used, against what is installed there.
SOURCES = {
    "ncclpy/interop/torch/backend.cpp", "ncclpy/interop/torch/heartbeat.hpp", "ncclpy/interop/torch/python.hpp",
    "ncclpy/interop/torch/reader.hpp", "ncclpy/interop/torch/shim.cpp",
}  # fmt: skip
#: What lies beside the package.
BESIDE = {"_ncclpy_torch.py"}
HOST_ENGINE = "ncclpy/host/libncclpy_host.so"
CYTHON_SHARED = "ncclpy/_cython_shared.so"
#: Below ncclpy-VERSION.dist-info: what belongs there, and what an installer or auditwheel may add.
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
ADDED = {"INSTALLER", "REQUESTED", "direct_url.json"}
#: An absolute path of a source or an object file: of the machine that built it, whichever that was.
SOURCE_PATH = re.compile(rb"(?<![\w.*+-])/[\w.+-]+(?:/[\w.+-]+)+\.(?:c|cc|cpp|h|hpp|o|a|py|pyx|pxd)\b")
RPATH, RUNPATH = 15, 29  # tags of a dynamic section, see elf(5)


def expected():
    """Return the names of all files that belong below ncclpy/, extension modules as plain .so."""
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ncclpy").rglob("*") if path.suffix in SHIPPED}
    modules = {path.relative_to(ROOT).with_suffix(".so").as_posix() for path in (ROOT / "ncclpy").rglob("*.pyx")}
    return names | modules | SOURCES | BESIDE | {HOST_ENGINE, CYTHON_SHARED}


def dynamic_tags(library):
    """Return the tags of a 64-bit little-endian ELF file's dynamic section."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    tags = set()
    for header in range(offset, offset + size * count, size):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", library, header)
        if kind == 2:  # PT_DYNAMIC
            tags = {tag for tag, _ in struct.iter_unpack("<qQ", library[start : start + length])}
    return tags


def complaints(files):
    """Yield what is wrong with files, ``{name: function that returns the bytes}``."""
    found = set()
    for name, read in files.items():
        top, _, below = name.partition("/")
        if re.fullmatch(r"ncclpy-[\w.+]+\.dist-info", top):
            if below not in ADDED and not below.startswith("sboms/"):
                found.add(below)
            continue
        if "__pycache__" in PurePosixPath(name).parts:
            continue  # an installer's
        found.add(re.sub(r"\.cpython-[\w-]+\.so$", ".so", name))
        if name.endswith(".so"):
            library = read()
            if dynamic_tags(library) & {RPATH, RUNPATH}:
                yield f"{name} has an RPATH"
            paths = sorted(set(SOURCE_PATH.findall(library)))
            if paths:
                yield f"{name} holds paths of the machine that built it: {b', '.join(paths[:5]).decode()}"
    wanted = expected() | METADATA
    yield from (f"{name} is missing" for name in sorted(wanted - found))
    yield from (f"{name} does not belong there" for name in sorted(found - wanted))


def in_wheel(path):
    """Return the files of a wheel."""
    archive = zipfile.ZipFile(path)
    return {name: lambda name=name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def installed():
    """Return the files of the ncclpy that is installed here, but for scripts, which lie outside."""
    files = importlib.metadata.files("ncclpy") or ()
    return {file.as_posix(): file.read_binary for file in files if ".." not in file.parts}


def main():
    """Look, and say what is wrong."""
    what = sys.argv[1] if len(sys.argv) > 1 else "what is installed"
    files = in_wheel(what) if len(sys.argv) > 1 else installed()
    if any(name.endswith("_editable_loader.py") for name in files):
        print("an editable install has nothing to look into: run pip install . or name a wheel")
        return 2
    wrong = list(complaints(files))
    for complaint in wrong:
        print(f"{os.path.basename(what)}: {complaint}")
    print(f"{os.path.basename(what)}: {len(files)} files, {len(wrong)} of them wrong or missing")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
