"""Fixtures of the coordinator's tests."""

from __future__ import annotations

import gc

import pytest
from fake_control import Hubs

from ncclpy.coordinator import session


@pytest.fixture(autouse=True)
def hubs(monkeypatch):
    """Have a control plane of this process stand in for the native one."""
    import os

    if os.environ.get("NATIVE"):
        return None
    made = Hubs()
    monkeypatch.setattr(session, "open_control", made)
    return made


@pytest.fixture
def no_collection():
    """Keep memory of earlier tests from being freed in the middle of one, which waits for its whole device."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
