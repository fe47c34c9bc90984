"""Torch's own tests of c10d backends (DistributedTest), run with one backend, with results in a file.

``python tests/interop_torch/c10d_suite.py ncclpy --ranks 4 --out ncclpy.json [PATTERN ...]``. At its import torch's
module decides by the variable BACKEND which tests a backend skips. It is imported as if for gloo, with tests that
should pass on CPUs, and told afterwards which backend to make: so no test passes by being skipped. With ``--gpu`` it
takes the backend for nccl until the end, and groups are made over the other backend. ``--shard 2/8`` is one of eight
parts, which can run at the same time.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

#: The environment variable that passes the arguments of `load` to spawned processes.
_SPAWNED = "NCCLPY_C10D_SUITE"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def load(backend: str, ranks: int, gpu: bool = False):
    """Return the class of tests, for `ranks` ranks of a backend."""
    os.environ.update(BACKEND="nccl" if gpu else "gloo", WORLD_SIZE=str(ranks))
    if _SPAWNED not in os.environ:
        os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="c10d-")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
    for name in ("barrier", "test_dir"):
        Path(os.environ["TEMP_DIR"], name).mkdir(exist_ok=True)

    import torch
    from torch.testing._internal.distributed import distributed_test

    import ncclpy.interop.torch  # noqa: F401

    if gpu:
        _make_instead_of_nccl(torch.distributed, backend)
        _profiled(distributed_test, backend)
    else:
        _add(distributed_test, backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # Forked, as importing torch in each rank would take most of the time; no library is loaded here. But
            # torch's module initialises CUDA where there is a GPU, after which no forked process could use it.
            self._start_processes(torch.multiprocessing.get_context("spawn" if gpu else "fork").Process)

        def run_test(self, test_name, parent_pipe):
            if not gpu and test_name.startswith("test_accumulate_gradients"):
                distributed_test.BACKEND = "gloo"  # these tests choose by it whether the model is on a GPU
            super().run_test(test_name, parent_pipe)

    Suite.__qualname__ = "Suite"  # the name by which a spawned process finds the class
    return Suite


def _add(module, backend: str) -> None:
    """Treat a backend in torch's tests like gloo."""
    module.BACKEND = backend
    for features in module.DistTestCases.backend_feature.values():
        if "gloo" in features:
            features.add(backend)
    _profiled(module, backend)


def _profiled(module, backend: str) -> None:
    """Make torch's tests check the profiler's events of a backend."""
    for lists in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
        getattr(module, f"{lists}_SUPPORTED_BACKENDS").append(backend)


def _make_instead_of_nccl(dist, backend: str) -> None:
    """Make the functions that create groups use a backend where nccl is asked for."""

    def instead(function):
        @functools.wraps(function)
        def made(*args, **kwargs):
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = backend
            return function(*(backend if each == "nccl" else each for each in args), **kwargs)

        return made

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, instead(getattr(dist, name)))


class Written(unittest.TextTestResult):
    """Write results by name, with the text of failures, to a file after each test: a run that is ended keeps them."""

    def __init__(self, path, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._path = path
        self.found: dict[str, dict[str, object]] = {}
        self._began = 0.0

    def startTest(self, test):  # noqa: N802
        self._began = time.monotonic()
        self._note(test, FAILED, "it has not come to its end")
        super().startTest(test)

    def _note(self, test, outcome, text=""):
        took = round(time.monotonic() - self._began, 2)
        self.found[test._testMethodName] = {"outcome": outcome, "seconds": took, "text": text}
        self.write()

    def write(self):
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1, sort_keys=True))
        new.replace(self._path)  # a process that is killed here leaves the old file or the new one

    def addSuccess(self, test):  # noqa: N802
        self._note(test, PASSED)
        super().addSuccess(test)

    def addExpectedFailure(self, test, error):  # noqa: N802
        self._note(test, PASSED)
        super().addExpectedFailure(test, error)

    def addSkip(self, test, reason):  # noqa: N802
        self._note(test, SKIPPED, reason)
        super().addSkip(test, reason)

    def addFailure(self, test, error):  # noqa: N802
        self._note(test, FAILED, str(error[1])[-4000:])
        super().addFailure(test, error)

    def addError(self, test, error):  # noqa: N802
        self._note(test, FAILED, str(error[1])[-4000:])
        super().addError(test, error)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--failed-of", type=Path, nargs="*", help="what these have written: only what failed there")
    parser.add_argument("patterns", nargs="*", default=["*"])
    asked = parser.parse_args(argv)
    suite = globals()["Suite"] = load(asked.backend, asked.ranks, asked.gpu)
    os.environ[_SPAWNED] = json.dumps([asked.backend, asked.ranks, asked.gpu])
    names = unittest.TestLoader().getTestCaseNames(suite)
    chosen = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in asked.patterns)]
    if asked.failed_of is not None:
        found = {name: each for path in asked.failed_of for name, each in json.loads(path.read_text()).items()}
        chosen = [name for name in chosen if name in found and found[name]["outcome"] == FAILED]
    part, parts = map(int, asked.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    results = functools.partial(Written, asked.out)
    result = unittest.TextTestRunner(verbosity=2, resultclass=results, stream=sys.stderr).run(
        unittest.TestSuite(suite(name) for name in chosen)
    )
    result.write()
    return 0


if __name__ == "__mp_main__":
    Suite = load(*json.loads(os.environ[_SPAWNED]))
if __name__ == "__main__":
    sys.exit(main())
