"""Collectives of JAX's arrays as functions, which return new arrays.

JAX's arrays are immutable, so a `Communicator` refuses to receive into one. The functions here receive into new
memory, and make it an array of JAX (through DLPack) once the data have arrived. They need arrays that have values, so
they work outside of `jax.jit` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ncclpy.core.calls.group import Group, in_group
from ncclpy.core.communicator import Communicator
from ncclpy.core.runtime.library import library
from ncclpy.core.runtime.stream import Stream
from ncclpy.errors import NcclError, NcclTimeout
from ncclpy.memory.registry import alloc
from ncclpy.types import SUM, OpLike, Result

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "recv",
    "reduce",
    "reduce_scatter",
    "send",
    "send_recv",
]

#: The alignment in bytes that XLA needs of CPU memory to take it over without a copy.
_ALIGNMENT = 64
#: Seconds between two checks for an asynchronous error during a wait.
_CHECK_INTERVAL = 0.25


def all_reduce(comm: Communicator, array: Any, op: OpLike = SUM, *, timeout: float | None = None) -> Any:
    """Reduce the arrays of all ranks, and return the result on all.

    Parameters
    ----------
    comm
        The communicator.
    array
        This rank's array, on the communicator's device alone.
    op
        The operator.
    timeout
        Seconds; by default the communicator's own timeout.

    Returns
    -------
    jax.Array
        A new array of the same shape.
    """
    array = _as_jax_array(array)
    return _received(
        comm, array.shape, array.dtype, lambda recv, options: comm.all_reduce(array, recv, op, **options), timeout
    )


def reduce(comm: Communicator, array: Any, op: OpLike = SUM, root: int = 0, *, timeout: float | None = None) -> Any:
    """Reduce the arrays of all ranks, and return the result on one.

    Parameters
    ----------
    comm, array, op
        As for `all_reduce`.
    root
        The rank that receives the result.
    timeout
        As for `all_reduce`.

    Returns
    -------
    jax.Array or None
        The result on the root, None on the other ranks.
    """
    array = _as_jax_array(array)
    made = _received(
        comm, array.shape, array.dtype, lambda recv, options: comm.reduce(array, recv, op, root, **options), timeout
    )
    return made if comm.rank == root else None  # elsewhere nothing was written


def broadcast(comm: Communicator, array: Any, root: int = 0, *, timeout: float | None = None) -> Any:
    """Return one rank's array on all ranks.

    Parameters
    ----------
    comm
        The communicator.
    array
        The root's array; on the other ranks one of the same shape and type with any values.
    root
        The rank that sends its array.
    timeout
        As for `all_reduce`.
    """
    array = _as_jax_array(array)
    return _received(
        comm, array.shape, array.dtype, lambda recv, options: comm.broadcast(array, recv, root, **options), timeout
    )


def all_gather(comm: Communicator, array: Any, *, timeout: float | None = None) -> Any:
    """Return the arrays of all ranks, by rank along a new first axis.

    Parameters
    ----------
    comm, array, timeout
        As for `all_reduce`; all arrays have one shape.
    """
    array = _as_jax_array(array)
    shape = (comm.nranks, *array.shape)
    return _received(comm, shape, array.dtype, lambda recv, options: comm.all_gather(array, recv, **options), timeout)


def reduce_scatter(comm: Communicator, array: Any, op: OpLike = SUM, *, timeout: float | None = None) -> Any:
    """Reduce the arrays of all ranks, and return this rank's part of the result, along the first axis.

    Parameters
    ----------
    comm, array, op, timeout
        As for `all_reduce`; the length of the first axis is a multiple of the number of ranks.
    """
    array = _as_jax_array(array)
    shape = (_part(comm, array), *array.shape[1:])
    return _received(
        comm, shape, array.dtype, lambda recv, options: comm.reduce_scatter(array, recv, op, **options), timeout
    )


def all_to_all(comm: Communicator, array: Any, *, timeout: float | None = None) -> Any:
    """Send each rank its part of the first axis, and return the parts that all have sent, by rank.

    Parameters
    ----------
    comm, array, timeout
        As for `all_reduce`; the length of the first axis is a multiple of the number of ranks.
    """
    array = _as_jax_array(array)
    _part(comm, array)
    return _received(
        comm, array.shape, array.dtype, lambda recv, options: comm.all_to_all(array, recv, **options), timeout
    )


def send(comm: Communicator, array: Any, peer: int, *, timeout: float | None = None) -> None:
    """Send an array to a rank, which calls `recv`; return once the array is sent.

    Parameters
    ----------
    comm, array, timeout
        As for `all_reduce`.
    peer
        The rank.
    """
    array = _as_jax_array(array)
    _call_and_wait(comm, lambda options: comm.send(array, peer, **options), timeout)


def recv(comm: Communicator, shape: Sequence[int], dtype: Any, peer: int, *, timeout: float | None = None) -> Any:
    """Return the array that a rank sends.

    Parameters
    ----------
    comm, timeout
        As for `all_reduce`.
    shape, dtype
        Its shape and data type, which are not sent.
    peer
        The rank.
    """
    return _received(
        comm, tuple(shape), np.dtype(dtype), lambda recv, options: comm.recv(recv, peer, **options), timeout
    )


def send_recv(comm: Communicator, array: Any, to: int, source: int, *, timeout: float | None = None) -> Any:
    """Send an array to one rank, and return the array that another sends, of the same shape and type.

    Parameters
    ----------
    comm, array, timeout
        As for `all_reduce`.
    to
        The rank that receives this rank's array.
    source
        The rank that sends the array that is returned.
    """
    array = _as_jax_array(array)

    def both(recv: Any, options: dict[str, Any]) -> None:
        with Group():
            comm.send(array, to, **options)
            comm.recv(recv, source, **options)

    return _received(comm, array.shape, array.dtype, both, timeout)


def _jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise ModuleNotFoundError(
            f"ncclpy.interop.jax returns arrays of JAX, which cannot be imported: {error}. Install it (pip install "
            "jax), or use ncclpy.Communicator, which needs no framework",
            name="jax",
        ) from error
    return jax


def _as_jax_array(array: Any) -> Any:
    """Return the argument as an array of JAX; raise if it has no values (a tracer) or is not on one device."""
    jax = _jax()
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"array: {array!r:.80} has no values yet: call ncclpy outside of jax.jit, jax.grad and the like"
        )
    array = jax.numpy.asarray(array)
    if len(array.devices()) != 1:
        raise ValueError(
            f"array: it is spread over {len(array.devices())} devices, and a communicator has one; pass the parts, "
            "array.addressable_shards[i].data"
        )
    return array


def _part(comm: Communicator, array: Any) -> int:
    """Return the length of each rank's part of the first axis."""
    if not array.shape or array.shape[0] % comm.nranks:
        raise ValueError(f"array: the first axis of shape {array.shape} cannot be divided among {comm.nranks} ranks")
    return int(array.shape[0]) // comm.nranks


def _received(
    comm: Communicator,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    call: Callable[[Any, dict[str, Any]], object],
    timeout: float | None,
) -> Any:
    """Make a call that receives into new memory, and return that memory as an array of JAX."""
    jax = _jax()
    if library().engine == "host":
        memory = np.empty(int(np.prod(shape)) * dtype.itemsize + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        made = memory[start : start + memory.size - _ALIGNMENT].view(dtype).reshape(shape)
        _call_and_wait(comm, functools.partial(call, made), timeout)
        # Numpy cannot export the types that it gets from ml_dtypes through DLPack.
        return jax.dlpack.from_dlpack(made) if dtype.isbuiltin == 1 else jax.numpy.asarray(made)
    return _received_on_device(jax, comm, shape, dtype, call, timeout)


def _received_on_device(
    jax: Any,
    comm: Communicator,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    call: Callable[[Any, dict[str, Any]], object],
    timeout: float | None,
) -> Any:
    """Make the call of `_received` in memory of the communicator's device."""
    count = int(np.prod(shape))
    memory = alloc(max(1, count * dtype.itemsize), comm.device)
    buffer = memory.buffer(dtype, count)
    _call_and_wait(comm, functools.partial(call, buffer), timeout)
    return jax.dlpack.from_dlpack(buffer).reshape(shape)


def _call_and_wait(comm: Communicator, call: Callable[[dict[str, Any]], object], timeout: float | None) -> None:
    """Make a call, and wait until it is done."""
    if in_group():
        raise RuntimeError(
            "ncclpy.interop.jax returns received data, which a group receives only at its end; call it outside "
            "the group, or call the communicator's methods with memory of your own"
        )
    options = {} if timeout is None else {"timeout": timeout}
    if library().engine == "host":
        call(options)  # returns once CPU memory has the data, or raises
        return
    with Stream(comm.device) as stream:
        call({"stream": stream, **options})
        try:
            _complete(comm, stream)
        except BaseException:
            comm.abort()  # else the operation would write into freed memory
            raise


def _complete(comm: Communicator, stream: Stream) -> None:
    """Wait for a stream; raise the communicator's asynchronous error, after which the stream may never become idle."""
    while True:
        try:
            stream.synchronize(_CHECK_INTERVAL)
            break
        except NcclTimeout:
            if comm.closed:  # aborted, as by the operation's own timeout
                raise
            _raise_failure(comm)
    _raise_failure(comm)  # a stream continues behind an aborted operation, as if the operation had succeeded


def _raise_failure(comm: Communicator) -> None:
    found = comm.async_error()
    if found not in (Result.SUCCESS, Result.IN_PROGRESS):
        raise NcclError(f"{comm!r} has failed while an array of JAX was on its way", result=int(found))
