"""Trainers of others over ncclpy compute the same numbers as over torch's own backend; see torch_clients.py."""

from __future__ import annotations

import importlib.metadata
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


def run(program, *arguments, folder, launcher=(), **environment):
    """Run a program of tests/support; return what it has printed."""
    done = subprocess.run(
        [sys.executable, *map(str, launcher), SUPPORT / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": testing.with_support(), **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def torchrun(*command, folder, restarts=0):
    """Run a program of tests/support in two ranks; return what it has printed."""
    options = ["--nproc-per-node", 2, "--max-restarts", restarts, "--master-port", free_port()]
    return run(*command, folder=folder, launcher=["-m", "torch.distributed.run", *options], HF_HUB_OFFLINE="1")


def line_of(output, head):
    (line,) = (line for line in output.splitlines() if line.startswith(head))
    return line.removeprefix(head)


def numbers(client, backend, folder):
    folder.mkdir()
    return json.loads(line_of(torchrun("torch_clients.py", client, backend, folder, folder=folder), "NUMBERS "))


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


@pytest.mark.launchers
@pytest.mark.timeout(320)
@pytest.mark.parametrize("script", ["test_ops", "test_script", "test_sync"])
def test_accelerates_own_script_passes(extension, tmp_path, script):
    for each in ("accelerate", "transformers"):
        if importlib.util.find_spec(each) is None:
            pytest.skip(f"needs {each}")
    testing.need_processes(2)
    torchrun("accelerate_scripts.py", script, "ncclpy", folder=tmp_path)


@pytest.mark.launchers
@pytest.mark.timeout(320)
def test_training_whose_rank_is_killed_continues_from_its_checkpoint_in_new_processes(extension, tmp_path):
    testing.need_processes(2)
    found = {}
    for killed_in in (5, -1):
        folder = tmp_path / str(killed_in)
        folder.mkdir()
        output = torchrun("restarted_training.py", "ncclpy", folder, killed_in, folder=tmp_path, restarts=1)
        found[killed_in] = line_of(output, "TRAINED ").split()
    assert found[5][:2] == ["1", "5"]  # the second attempt, from the step that the first one did not end
    assert found[-1][:2] == ["0", "0"] and found[5][2] == found[-1][2]


@pytest.mark.launchers
@pytest.mark.timeout(320)
def test_training_of_ray_whose_worker_is_killed_continues_from_its_checkpoint_in_new_workers(extension, tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    if not any(each.name == "ncclpy" for each in importlib.metadata.entry_points(group="torch.backends")):
        pytest.skip("needs ncclpy as pip installs it: Ray's workers import nothing of the program")
    testing.need_processes(2)
    found = {}
    for backend, killed_in in (("ncclpy", 3), ("nccl" if ON_GPUS else "gloo", -1)):
        folder = tmp_path / backend
        folder.mkdir()
        environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        output = run("ray_training.py", backend, folder, killed_in, folder=folder, **environment)
        found[backend] = line_of(output, "TRAINED ").split(maxsplit=1)
    (resumed, losses), (begun, expected) = found.values()
    assert 1 <= int(resumed) <= 3 and int(begun) == 0  # Ray keeps a checkpoint some time after it was reported
    assert losses == expected
