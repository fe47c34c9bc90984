"""Fixtures of the torch backend's tests."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from torch_ranks import Ranks

import testing
from ncclpy.interop.torch import build as torch_build
from ncclpy.interop.torch import extension as torch_extension


@pytest.fixture(scope="session")
def extension():
    """Build the extension once, before several ranks build it at once."""
    torch_build.find_compiler()
    torch_build.built(torch, torch_build.BACKEND)
    return torch_extension.wrapped


@pytest.fixture(scope="session")
def ranks2(extension):
    """Return two ranks of torch.distributed, processes that run programs."""
    testing.need_processes(2)
    two = Ranks(2)
    yield two
    two.close()


@pytest.fixture(scope="session")
def ranks4(extension):
    """Return four ranks of torch.distributed, processes that run programs."""
    testing.need_processes(4)
    four = Ranks(4)
    yield four
    four.close()
