"""Fixtures of the coordinator's tests."""

from __future__ import annotations

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
