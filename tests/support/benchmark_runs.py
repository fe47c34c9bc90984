"""Run and import the benchmarks from a test; import this module before ``benchmarks``.

The root is on the path for one import only: tests use the installed ncclpy, not the source tree.
"""

import importlib
import os
import subprocess
import sys

from paths import ROOT

sys.path.insert(0, str(ROOT))
try:
    importlib.import_module("benchmarks")
finally:
    sys.path.remove(str(ROOT))


def run(*arguments, status=0, **environment):
    """Run ``python -m benchmarks`` in the root, as in the README; return its output, errors last."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
