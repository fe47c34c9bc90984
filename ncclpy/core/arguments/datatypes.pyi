from collections.abc import Iterable
from typing import Any

def read_by(kinds: Iterable[type], capsule: Any) -> None: ...
