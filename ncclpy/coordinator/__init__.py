"""Named collectives: an operation runs once all ranks have brought it, in whatever order they bring operations."""

from __future__ import annotations

from ncclpy.coordinator.coordinator import Coordinator, ProcessSet

__all__ = ["Coordinator", "ProcessSet"]
