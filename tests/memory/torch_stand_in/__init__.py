"""A torch with nothing but its caching allocator, over CPU memory: as much as hooks use of the real one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import types
from pathlib import Path

from sanitizers import COMPILER
from shared_builds import built_once

HERE = Path(__file__).parent
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP = 3, 4, 5
ROOM = 4096


def build(folder: Path) -> Path:
    """Lay out a package torch in a folder, with headers and libraries; return its root."""
    root = folder / "torch"
    (root / "include").mkdir(parents=True)
    (root / "lib").mkdir()
    (root / "include" / "c10").symlink_to(HERE / "c10")
    for name, sources in (("c10_cuda", [HERE / "allocator.cpp"]), ("c10", [])):
        flags = ["-std=c++17", "-g", "-O1", "-fPIC", "-shared", f"-Wl,-soname,lib{name}.so", f"-I{HERE}"]
        command = [*COMPILER, *flags, "-xc++", *sources, *([] if sources else ["/dev/null"])]
        command += ["-o", root / "lib" / f"lib{name}.so", "-pthread"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    return root


def shared(factory) -> tuple[Path, Path]:
    """Return the root of a package that this run's tests share, and a folder for what is built against it."""
    folder = built_once(factory, "torch_stand_in", build)
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    return folder / "torch", cache


class Fake(types.ModuleType):
    """The package; methods by which a test acts on the allocator are beside the names that users see."""

    def __init__(self, root: Path):
        super().__init__("torch")
        self.__file__ = str(root / "__init__.py")
        self.__version__ = "2.99.0"
        self.version = types.SimpleNamespace(git_version="0")
        self._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
        self.expandable, self.backend, self.on_snapshot = False, "native", None
        self.cuda = types.SimpleNamespace(
            init=lambda: None,
            get_allocator_backend=lambda: self.backend,
            memory_snapshot=self.memory_snapshot,
            memory=types.SimpleNamespace(_snapshot=self._snapshot),
        )

    def stand_in(self, monkeypatch):
        """Make this module what a test imports as torch, also in a process that has a real torch and its folders."""
        monkeypatch.setitem(sys.modules, "torch", self)
        monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)

    def load(self):
        path = Path(self.__file__).parent / "lib"
        ctypes.CDLL(str(path / "libc10.so"), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(path / "libc10_cuda.so"), mode=ctypes.RTLD_GLOBAL)
        self.with_gil = ctypes.PyDLL(str(path / "libc10_cuda.so"))  # its calls keep the GIL
        for library in (self.library, self.with_gil):
            library.fake_allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            library.fake_allocate.restype = ctypes.c_size_t
            library.fake_free.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
            library.fake_tell.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            library.fake_snapshot.restype = library.fake_trackers.restype = ctypes.c_size_t
        return self

    def allocate(self, nbytes=8192, device=0, at=0):
        base = self.library.fake_allocate(at, nbytes, device)
        assert base, "no memory there"
        return base

    def free(self, base, *, gil=False):
        """Free a segment; return a tracker's objection, or None."""
        words = ctypes.create_string_buffer(500)
        result = (self.with_gil if gil else self.library).fake_free(base, words, len(words))
        assert result < 2, "freed twice"
        return words.value.decode() if result else None

    def tell(self, action, base, nbytes, device=0):
        self.library.fake_tell(action, base, nbytes, device)

    def trackers(self):
        return self.library.fake_trackers()

    def segments(self):
        """Return (pointer, nbytes, device) of all segments, by address."""
        bases, sizes, devices = (ctypes.c_size_t * ROOM)(), (ctypes.c_size_t * ROOM)(), (ctypes.c_int * ROOM)()
        count = self.library.fake_snapshot(bases, sizes, devices, ctypes.c_size_t(ROOM))
        return [(bases[i], sizes[i], devices[i]) for i in range(count)]

    def memory_snapshot(self):
        found = [
            {"address": base, "total_size": size, "device": device, "is_expandable": False}
            for base, size, device in self.segments()
        ]
        if self.on_snapshot is not None:
            self.on_snapshot()
        return found

    def _snapshot(self):
        return {"allocator_settings": {"expandable_segments": self.expandable}}
