"""Trainers of others over ncclpy compute the same numbers as over torch's own backend; see torch_clients.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from foreign_stores import free_port
from paths import SUPPORT
from torch_clients import CLIENTS, ON_GPUS

import testing


def numbers(client, backend, folder):
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, *command, SUPPORT / "torch_clients.py", client, backend, folder],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": testing.with_support(), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("NUMBERS "))
    return json.loads(line.removeprefix("NUMBERS "))


@pytest.mark.launchers
@pytest.mark.timeout(320)
@pytest.mark.parametrize("client", CLIENTS)
def test_client_computes_the_same_as_over_torchs_own_backend(extension, tmp_path, client):
    package = client.partition("-")[0].replace("fabric", "lightning")
    for each in (package, *(["transformers"] if package == "accelerate" else [])):
        if importlib.util.find_spec(each) is None:
            pytest.skip(f"needs {each}")
    if client == "accelerate-fsdp2" and not ON_GPUS:
        pytest.skip("Accelerate has FSDP on GPUs only")
    testing.need_processes(2)
    found = numbers(client, "ncclpy", tmp_path / "ncclpy")
    assert len(found) >= 2
    assert found == numbers(client, "nccl" if ON_GPUS else "gloo", tmp_path / "own")
