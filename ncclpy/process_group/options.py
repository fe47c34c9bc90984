"""What a process group may be asked to do."""

from __future__ import annotations

from ncclpy.core.config import Config

__all__ = ["check_name", "check_options"]

_CHECK = ("off", "first", "always")
_ON_ERROR = ("abort", "exit", "exit_now", "report")


def check_name(name: object) -> None:
    """Raise ValueError for what cannot be a group's name."""
    if type(name) is not str or not name:
        raise ValueError(f"name: expected a text of at least one character, got {name!r:.80}")


def check_options(config: object, on_error: object, check: object) -> None:
    """Raise TypeError or ValueError for what a group cannot be made with."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: expected an ncclpy.Config, got {type(config).__name__}")
    if config is not None and config.blocking is not None and not config.blocking:
        raise ValueError("config: a process group does not block anyway; leave blocking unset")
    if on_error not in _ON_ERROR:
        raise ValueError(f"on_error: expected one of {', '.join(map(repr, _ON_ERROR))}, got {on_error!r}")
    if check not in _CHECK:
        raise ValueError(f"check: expected one of {', '.join(map(repr, _CHECK))}, got {check!r}")
