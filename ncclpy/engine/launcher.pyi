from threading import Thread
from typing import Protocol

from typing_extensions import disjoint_base

from ncclpy.core.communicator import Communicator
from ncclpy.engine.work import Work

class _Owner(Protocol):
    def launch_done(self, launch: Launch) -> None: ...
    def launch_failed(self, launch: Launch, error: Exception) -> None: ...

@disjoint_base
class Launch:
    id: int
    def __new__(cls, owner: _Owner) -> Launch: ...
    def settled(self, work: Work) -> None: ...
    def fail(self, error: Exception) -> None: ...

def abort_aside(handles: list[Communicator], reason: str) -> Thread: ...
