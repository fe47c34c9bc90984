"""The no-op library: the ABIs of NCCL and of the driver, doing nothing, so that only the call path takes time."""

from pathlib import Path

from benchmarks.work import compiler

SOURCE = Path(__file__).with_name("noop.c")


def build(folder: Path) -> Path:
    """Compile the library into `folder`; its soname is libnccl's, so that packages linked to NCCL use it."""
    return compiler.build(SOURCE, folder, soname="libnccl.so.2")
