"""One rank's view of a group of processes: collectives that return works, deadlines, and ends that reach all ranks."""

from __future__ import annotations

from ncclpy.peers.rank_state import OperationInfo, RankState
from ncclpy.process_group.group import ProcessGroup
from ncclpy.process_group.options import Completion
from ncclpy.process_group.recovery import Recovery

#: `ProcessGroup.from_env` by the name that torch has for it.
init_process_group = ProcessGroup.from_env

__all__ = ["Completion", "OperationInfo", "ProcessGroup", "RankState", "Recovery", "init_process_group"]
