"""Torch tensors read by ncclpy's own extension; the other roads do not use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.overhead.road import Road
from benchmarks.work.setting import Setting


def reading(setting: Setting) -> Callable[[Road], Road] | None:
    """Return a function that makes a road read its tensors natively; None, and a note, if that is not possible."""
    import torch

    from ncclpy.core.arguments.datatypes import read_by
    from ncclpy.interop.torch import extension as torch_extension

    try:
        torch_extension.read_tensors_natively()
    except RuntimeError as error:  # no compiler, for example
        setting.notes.append(f"Torch tensors could not be read natively: {str(error).splitlines()[0]}")
        return None
    kinds = [torch.Tensor]
    reader = torch_extension._extension().tensor_reader()
    read_by(kinds, None)

    def natively(run):
        if run is None:
            return None

        def reading(n):
            read_by(kinds, reader)
            try:
                return run(n)
            finally:
                read_by(kinds, None)

        return reading

    return lambda road: dataclasses.replace(road, host=natively(road.host), latency=natively(road.latency))
