"""Torch's own tests of c10d backends (DistributedTest), run with one backend and written down.

``python tests/interop_torch/c10d_suite.py ncclpy --ranks 4 --out ncclpy.json [PATTERN ...]``. Torch's module decides
by the variable BACKEND, when it is imported, which tests a backend is skipped in. It is imported as if for gloo, whose
tests are to pass on CPUs, and told afterwards which backend to make: so none passes by being skipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def load(backend: str, ranks: int):
    """Return the class of tests, for so many ranks of a backend."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks), TEMP_DIR=tempfile.mkdtemp(prefix="c10d-"))
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
    for name in ("barrier", "test_dir"):
        Path(os.environ["TEMP_DIR"], name).mkdir(exist_ok=True)

    import torch
    from torch.testing._internal.distributed import distributed_test

    import ncclpy.interop.torch  # noqa: F401

    distributed_test.BACKEND = backend
    for features in distributed_test.DistTestCases.backend_feature.values():
        if "gloo" in features:
            features.add(backend)
    for lists in ("PROFILING", "CUDA_PROFILING", "SEND_RECV_PROFILING"):
        getattr(distributed_test, f"{lists}_SUPPORTED_BACKENDS").append(backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # Forked, as an import of torch in each rank would take most of the time; no library is loaded here.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, test_name, parent_pipe):
            if test_name.startswith("test_accumulate_gradients"):
                distributed_test.BACKEND = "gloo"  # these choose by it whether the model is on a GPU
            super().run_test(test_name, parent_pipe)

    return Suite


class Written(unittest.TextTestResult):
    """Results by name, and the text of what failed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.found: dict[str, dict[str, object]] = {}
        self._began = 0.0

    def startTest(self, test):  # noqa: N802
        self._began = time.monotonic()
        super().startTest(test)

    def _note(self, test, outcome, text=""):
        took = round(time.monotonic() - self._began, 2)
        self.found[test._testMethodName] = {"outcome": outcome, "seconds": took, "text": text}

    def addSuccess(self, test):  # noqa: N802
        self._note(test, PASSED)
        super().addSuccess(test)

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
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("patterns", nargs="*", default=["*"])
    asked = parser.parse_args(argv)
    suite = load(asked.backend, asked.ranks)
    names = unittest.TestLoader().getTestCaseNames(suite)
    chosen = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in asked.patterns)]
    result = unittest.TextTestRunner(verbosity=2, resultclass=Written, stream=sys.stderr).run(
        unittest.TestSuite(suite(name) for name in chosen)
    )
    asked.out.write_text(json.dumps(result.found, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
