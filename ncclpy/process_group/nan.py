"""Look-ups by the package of an array's type, and the check of sent arrays for NaNs (`check_nan=True`).

No framework is imported: a program that passes an array has imported the array's framework.
"""

from __future__ import annotations

import logging
from numbers import Integral

from ncclpy.core.runtime.stream import Event


def wait_for_stream(stream, device):
    """Wait, on the CPU, for `stream`: the framework's next operation is on its current stream, not on `stream`."""
    with Event(device) as event:
        event.record(stream)
        event.synchronize()


def by_package(kind, table):
    """Return what a table has for the package of a type, or of one of its bases; None if nothing."""
    for base in kind.__mro__:
        found = table.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return None


_log = logging.getLogger("ncclpy.process_group")


class NanCheck:
    """The check for NaNs in what one rank sends.

    Parameters
    ----------
    rank, group, device
        The rank, the group's name, and the device, for errors and waits.
    """

    def __init__(self, rank: int, group: str, device: int):
        self.rank, self.group, self.device = rank, group, device
        self._unknown: set[type] = set()  # types that a warning has named

    def refuse(self, sent, operation: str, producer=None) -> None:
        """Raise if an array of an operation has a NaN. An array of no known framework is not checked.

        A warning says so once for each such type.

        Parameters
        ----------
        sent : buffer or tuple of buffer
            What the rank sends.
        operation : str
            Its name, for the error.
        producer : optional
            The stream that produces what is sent, if the caller has named one: the CPU waits for the work on it.

        Raises
        ------
        ValueError
            With the number of NaNs, and where the first one is.
        """
        if producer is not None:
            wait_for_stream(producer, self.device)
        if type(sent) is not tuple or (sent and isinstance(sent[0], Integral)):  # one buffer, as such or as a pointer
            self._refuse_one(sent, "the input", operation)
            return
        for i, array in enumerate(sent):
            self._refuse_one(array, f"send[{i}]", operation)

    def _refuse_one(self, array, what, operation):
        mask_of = by_package(type(array), _MASKS)
        if mask_of is None:
            self._warn(type(array), operation)
            return
        mask = mask_of(array)
        count = 0 if mask is None else int(mask.sum())
        if count:
            raise ValueError(
                f"check_nan: {what} of {operation} on rank {self.rank} of process group {self.group!r} has {count} NaN"
                f"{'s' * (count > 1)}, the first at index {_index(int(mask.argmax()), array.shape)}. The operation "
                "has not begun here; the other ranks wait for it until their deadline"
            )

    def _warn(self, kind, operation):
        if kind not in self._unknown:
            self._unknown.add(kind)
            _log.warning(
                "check_nan: process group %r cannot look into a %s.%s, which %s sends; such memory is not checked",
                self.group, kind.__module__, kind.__qualname__, operation,
            )  # fmt: skip


def _mask_by_comparison(array):
    """Return a flat mask of the elements that differ from themselves, as only NaNs do; None if the type has no NaN."""
    return None if array.dtype.kind in "biu" else (array != array).reshape(-1)


def _mask_by_torch(tensor):
    if not tensor.is_floating_point() and not tensor.is_complex():
        return None
    if tensor.element_size() == 1:  # float8 has no comparison
        tensor = tensor.float()
    return tensor.isnan().flatten().byte()


#: The function that finds the NaNs of an array, by the package of the array's type or of one of its bases.
_MASKS = {
    "numpy": _mask_by_comparison,
    "cupy": _mask_by_comparison,
    "jax": _mask_by_comparison,
    "jaxlib": _mask_by_comparison,
    "torch": _mask_by_torch,
}


def _index(flat, shape):
    """Return the index of an array's element with this flat number, as an int if there is one dimension."""
    places: list[int] = []
    for extent in reversed(shape):
        flat, place = divmod(flat, extent)
        places.insert(0, place)
    return places[0] if len(places) == 1 else tuple(places)
