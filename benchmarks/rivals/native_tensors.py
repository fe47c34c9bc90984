"""Torch tensors as an extension of ours reads them; the roads beside these are without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.overhead.road import Road
from benchmarks.work.setting import Setting


def reading(setting: Setting) -> Callable[[Road], Road] | None:
    """Return what makes of a road one whose tensors are read natively; None, and a note, where none can be."""
    import torch

    from ncclpy.core.arguments.datatypes import read_by
    from ncclpy.interop.torch import extension as torch_extension

    try:
        torch_extension.read_tensors_natively()
    except RuntimeError as error:  # no compiler, say
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
