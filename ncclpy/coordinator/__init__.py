"""Named collectives: what all ranks have brought under one name runs, in whatever order they bring it."""

from __future__ import annotations

from ncclpy.coordinator.coordinator import Coordinator
from ncclpy.coordinator.process_set import ProcessSet

__all__ = ["Coordinator", "ProcessSet"]
