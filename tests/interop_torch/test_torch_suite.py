"""Torch's own tests of c10d backends over this one: they pass as over gloo, except for EXCEPTIONS.

A few always run. All of them, compared with gloo's results, are a campaign of half an hour:
``pytest -m campaign tests/interop_torch/test_torch_suite.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import testing

pytest.importorskip("expecttest", reason="torch's tests need expecttest")

SUITE = Path(__file__).with_name("c10d_suite.py")

_BY_NAME = "torch.distributed.monitored_barrier refuses every backend whose name is not gloo's"
_ANY = "NCCL has no receive from any source"
#: Tests that fail here and pass over gloo, and why.
EXCEPTIONS = {
    "test_barrier_timeout_full_group": "the test wants gloo's words; ours name the ranks that have not come",
    "test_ddp_logging_data_cpu": "torch's logger calls every backend from outside of torch 'custom'",
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": "the test wants gloo's words; ours name the rank that has ended",
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_send_recv_any_source": _ANY,
    "test_send_recv_any_source_autograd_profiler": _ANY,
    "test_send_recv_any_source_torch_profiler": _ANY,
}
FEW = [
    "test_all_gather_multiple", "test_all_reduce_sum*", "test_all_to_all_single_unequal_split",
    "test_barrier_full_group",
    "test_broadcast", "test_batch_isend_irecv_gloo*", "test_ddp_comm_hook_logging", "test_ddp_uneven_inputs",
    "test_destroy_group",
    "test_DistributedDataParallel_non_default_stream", "test_DistributedDataParallelCPU*", "test_gather",
    "test_isend*",
    "test_new_subgroups*", "test_accumulate_gradients_no_sync", "test_reduce_sum*", "test_scatter_full_group",
    "test_send_recv_any_source", "test_send_recv_with_tag*", "test_sparse_all_reduce_sum",
]  # fmt: skip


def run(backend, ranks, folder, patterns=(), timeout=150):
    out = folder / f"{backend}-{ranks}.json"
    done = subprocess.run(
        [sys.executable, str(SUITE), backend, *patterns, "--ranks", str(ranks), "--out", str(out)],
        capture_output=True, text=True, timeout=timeout, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": testing.with_support()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def failed(found):
    return {name: each["text"] for name, each in found.items() if each["outcome"] == "failed"}


@pytest.mark.timeout(200)
def test_few_tests_of_torch_pass(host_engine, extension, tmp_path):
    """Starting a process for each rank of each test takes most of the time."""
    found = run("ncclpy", 2, tmp_path, FEW)
    assert sum(each["outcome"] == "passed" for each in found.values()) >= 15
    assert failed(found).keys() == EXCEPTIONS.keys() & found.keys(), failed(found)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_tests_of_torch_pass_as_over_gloo(extension, tmp_path, ranks):
    ours, theirs = (run(backend, ranks, tmp_path, timeout=1400) for backend in ("ncclpy", "gloo"))
    differ = {name for name in theirs if ours[name]["outcome"] != theirs[name]["outcome"]}
    assert differ == EXCEPTIONS.keys(), {name: ours[name]["text"] for name in differ - EXCEPTIONS.keys()}
