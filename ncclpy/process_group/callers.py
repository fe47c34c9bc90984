"""What calls a group from below, and keeps none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["caller_of", "teller_of"]


def caller_of(reference: weakref.ref[Any], method: str) -> Callable[..., None]:
    """Return what calls a method of a group, as long as there is one."""

    def call(*arguments: Any) -> None:
        group = reference()
        if group is not None:
            getattr(group, method)(*arguments)

    return call


def teller_of(reference: weakref.ref[Any]) -> Callable[[], dict[str, Any]]:
    """Return what tells what a group does, likewise."""

    def tell() -> dict[str, Any]:
        group = reference()
        return {} if group is None else group._standing()

    return tell
