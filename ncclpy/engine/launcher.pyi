from collections.abc import Sequence
from threading import Thread
from typing import Protocol

from typing_extensions import disjoint_base

from ncclpy.core.communicator import Communicator

class _Owner(Protocol):
    def launch_done(self, launch: Launch) -> None: ...
    def launch_failed(self, launch: Launch, error: Exception) -> None: ...

@disjoint_base
class Launch:
    @property
    def id(self) -> int: ...
    def __new__(cls, owner: _Owner) -> Launch: ...

def abort_in_background(handles: list[Communicator], reason: str, others: Sequence[Thread] = ()) -> Thread: ...
