"""Torch finds the backend by itself, at almost no cost, and programs never fail because of it."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from paths import ROOT

import testing
from ncclpy.interop.torch import registration as torch_registration

ENTRY = ROOT / "_ncclpy_torch.py"


def entry():
    spec = importlib.util.spec_from_file_location("entry_of_ncclpy", ENTRY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_entry_registers_and_imports_nothing_of_ncclpy():
    said = testing.run_python(
        f"""
        import importlib.util, sys, time
        import torch, torch.distributed as dist
        dist.Backend._plugins.pop("NCCLPY", None)
        before = set(sys.modules)
        began = time.perf_counter()
        spec = importlib.util.spec_from_file_location("entry_of_ncclpy", {str(ENTRY)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.register()
        took = time.perf_counter() - began
        assert "NCCLPY" in dist.Backend._plugins and dist.Backend("ncclpy") == "ncclpy"
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
        assert dist.Backend.default_device_backend_map["cuda"] == "nccl"
        print(set(sys.modules) - before, took * 1e3, "ms")
        assert not [name for name in set(sys.modules) - before if name.startswith(("ncclpy", "numpy"))]
        assert took < 0.1
        """,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert said.stdout.startswith("set()"), said.stdout


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ("", 600),  # torch passes its default to backends that it does not know
        ("timeout=datetime.timedelta(seconds=7)", 7),
        ("pg_options={'timeout': 1800}", 1800),
        ("pg_options={'timeout': 9}, timeout=datetime.timedelta(seconds=7)", 9),
    ],
)
def test_deadline_of_a_group_is_nccls_by_default(arguments, seconds):
    testing.run_python(
        f"""
        import datetime
        import torch, torch.distributed as dist
        from ncclpy.interop.torch import backend_of
        dist.init_process_group("ncclpy", store=dist.HashStore(), rank=0, world_size=1, {arguments})
        dist.all_reduce(torch.ones(2))
        found = backend_of().timeout_ms(), backend_of().group.timeout
        assert found == ({seconds} * 1000, {seconds}), found
        dist.destroy_process_group()
        """
    )


@pytest.mark.parametrize(("engine", "types"), [("host", ["cpu"]), ("cuda", ["cpu", "cuda"])])
def test_group_has_the_devices_of_the_engine_loaded_when_it_is_made(monkeypatch, engine, types):
    asked = []

    class Loaded:
        def __init__(self):
            asked.append(1)
            self.engine = engine

    class Registry:
        def __init__(self):
            self.backend_capability = {}

        def register_backend(self, name, create, extended_api, devices):
            self.backend_capability[name] = devices

    monkeypatch.setattr(torch_registration.library, "library", Loaded)
    registry = Registry()
    entry().add_to(registry)
    assert not asked, "to ask when torch is imported would initialise CUDA, after which nothing can fork"
    assert list(dict.fromkeys(registry.backend_capability["ncclpy"])) == types


def test_entry_never_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)  # importing it raises
    assert entry().register() is None


def test_group_of_one_registered_by_the_entry_alone():
    testing.run_python(
        f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("entry_of_ncclpy", {str(ENTRY)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.register()
        assert "ncclpy" not in sys.modules
        import torch, torch.distributed as dist
        dist.init_process_group("ncclpy", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert "ncclpy" in sys.modules and tensor.tolist() == [1, 1]
        dist.destroy_process_group()
        """,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "NCCLPY_LIBRARY": None},
    )
