"""The interface of ``cupy.cuda.nccl`` over ncclpy: its names, its arguments, and their meaning.

A program changes ``from cupy.cuda import nccl`` into ``from ncclpy.interop import cupy_nccl as nccl``. `use` puts this
module in CuPy's place, for code that cannot be changed, such as ``cupyx.distributed``. CuPy itself is not needed: all
arguments are addresses and numbers, and with the host engine these can be addresses of CPU memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from ncclpy import errors
from ncclpy.core.arguments.config import Config
from ncclpy.core.communicator import Communicator
from ncclpy.core.lifecycle import get_unique_id as _get_unique_id
from ncclpy.core.runtime.library import library
from ncclpy.interop import c_calls
from ncclpy.interop.dropped import close_when_dropped
from ncclpy.types import DataType, ReduceOp, Result, as_integer

__all__ = [
    "NCCL_AVG",
    "NCCL_BFLOAT16",
    "NCCL_CHAR",
    "NCCL_DOUBLE",
    "NCCL_FLOAT",
    "NCCL_FLOAT16",
    "NCCL_FLOAT32",
    "NCCL_FLOAT64",
    "NCCL_HALF",
    "NCCL_INT",
    "NCCL_INT8",
    "NCCL_INT32",
    "NCCL_INT64",
    "NCCL_MAX",
    "NCCL_MIN",
    "NCCL_PROD",
    "NCCL_SUM",
    "NCCL_UINT8",
    "NCCL_UINT32",
    "NCCL_UINT64",
    "InPlace",
    "NcclCommunicator",
    "NcclConfig",
    "NcclError",
    "available",
    "check_status",
    "get_build_version",
    "get_unique_id",
    "get_version",
    "groupEnd",
    "groupStart",
    "use",
]

F = TypeVar("F", bound=Callable[..., Any])

#: As in CuPy's module, where programs check it first.
available = True

NCCL_SUM = int(ReduceOp.SUM)
NCCL_PROD = int(ReduceOp.PROD)
NCCL_MAX = int(ReduceOp.MAX)
NCCL_MIN = int(ReduceOp.MIN)
NCCL_AVG = int(ReduceOp.AVG)

NCCL_INT8 = NCCL_CHAR = int(DataType.INT8)
NCCL_UINT8 = int(DataType.UINT8)
NCCL_INT32 = NCCL_INT = int(DataType.INT32)
NCCL_UINT32 = int(DataType.UINT32)
NCCL_INT64 = int(DataType.INT64)
NCCL_UINT64 = int(DataType.UINT64)
NCCL_FLOAT16 = NCCL_HALF = int(DataType.FLOAT16)
NCCL_FLOAT32 = NCCL_FLOAT = int(DataType.FLOAT32)
NCCL_FLOAT64 = NCCL_DOUBLE = int(DataType.FLOAT64)
NCCL_BFLOAT16 = int(DataType.BFLOAT16)

_UNIQUE_ID_BYTES = 128
#: The deadline of communicators that are made from now on; see `use`.
_timeout: float | None = None


def _name_of(status: int) -> str:
    try:
        return f"NCCL_ERROR_{Result(status).name}"
    except ValueError:
        return f"NCCL_ERROR_{status}"  # of a newer NCCL


class NcclError(errors.NcclError):
    """Report a call that NCCL refused or that failed, as CuPy's error does.

    An error that ncclpy raises keeps its class: it is also an instance of `ncclpy.NcclTimeout`, say. An error that
    `check_status` raises for a number is an instance of `ncclpy.NcclError`, and of no subclass of it.

    Parameters
    ----------
    status
        The `ncclResult_t`.
    message
        What went wrong; by default NCCL's words for the status.

    Attributes
    ----------
    status : int
        The `ncclResult_t`.
    """

    def __init__(self, status: int, message: str | None = None) -> None:
        status = as_integer(status, "status")
        if message is None:
            # Imported only for an error: the bindings are many modules.
            from ncclpy.core.bindings.library import get_error_string

            message = get_error_string(status)
        super().__init__(f"{_name_of(status)}: {message}", result=status)
        self.status = status
        self._message = message

    def __reduce__(self):
        return type(self), (self.status, self._message), self.__dict__


class _Timeout(NcclError, errors.NcclTimeout):
    """A deadline has passed."""


class _Aborted(NcclError, errors.NcclAborted):
    """Work ended with its communicator."""


class _Remote(NcclError, errors.NcclRemoteError):
    """Another rank has failed."""


class _Unsupported(NcclError, errors.NcclUnsupported):
    """The loaded NCCL does not have a function."""


class _NoLibrary(NcclError, errors.LibraryNotFound):
    """No NCCL was found."""


#: For each class of ncclpy's errors: the class here, and the status of errors that have no result of NCCL.
_KINDS: dict[type, tuple[type[NcclError], int]] = {
    errors.NcclTimeout: (_Timeout, Result.TIMEOUT),
    errors.NcclAborted: (_Aborted, Result.INTERNAL_ERROR),
    errors.NcclRemoteError: (_Remote, Result.REMOTE_ERROR),
    errors.NcclUnsupported: (_Unsupported, Result.INVALID_USAGE),
    errors.LibraryNotFound: (_NoLibrary, Result.SYSTEM_ERROR),
}


def _as_cupy_error(error: errors.NcclError) -> NcclError:
    """Return an error of ncclpy as an `NcclError` of this module, with all its attributes."""
    kind, status = next((_KINDS[base] for base in type(error).__mro__ if base in _KINDS), (NcclError, 3))
    made = kind(int(status if error.result is None else error.result), str(error))
    kept = {name: value for name, value in vars(error).items() if name != "result"}
    vars(made).update(kept)
    return made


def _raising(function: F) -> F:
    """Make a function raise `NcclError` for ncclpy's errors."""

    @functools.wraps(function)
    def raising(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NcclError:
            raise
        except errors.NcclError as error:
            raise _as_cupy_error(error) from error

    return cast(F, raising)


def check_status(status: int) -> None:
    """Raise `NcclError` for a result code that is not ncclSuccess."""
    if status != Result.SUCCESS:
        raise NcclError(status)


@_raising
def get_version() -> int:
    """Return the version of the loaded NCCL as a number: 23203 is 2.32.3."""
    major, minor, patch = library().version
    # NCCL changed its version numbers with 2.9.
    return major * 1000 + minor * 100 + patch if (major, minor) <= (2, 8) else major * 10000 + minor * 100 + patch


def get_build_version() -> int:
    """Return the same as `get_version`: ncclpy is not built for one version."""
    return get_version()


@_raising
def get_unique_id() -> bytes:
    """Return the 128 bytes of a new unique id, which one rank makes for all."""
    return bytes(_get_unique_id())


def groupStart() -> None:  # noqa: N802 - CuPy's name
    """Begin a group; it nests, and ends with `groupEnd` in the same thread."""
    c_calls.group_start()


@_raising
def groupEnd() -> None:  # noqa: N802 - CuPy's name
    """End a group: the end of the outermost one launches all calls in it."""
    c_calls.group_end("groupEnd")


class NcclConfig:
    """Configure a communicator.

    Parameters
    ----------
    split_share
        Whether children made by `NcclCommunicator.commSplit` share its resources.
    """

    def __init__(self, split_share: int = 0) -> None:
        self._split_share = as_integer(split_share, "split_share")

    @property
    def split_share(self) -> int:
        """Whether children share resources, as a number."""
        return self._split_share

    def _as_ncclpy_config(self) -> Config:
        return Config(split_share=bool(self._split_share))


def _config(config: NcclConfig | None) -> Config | None:
    if config is None:
        return None
    if not isinstance(config, NcclConfig):
        raise TypeError(f"config: expected an NcclConfig, got {type(config).__name__}")
    return config._as_ncclpy_config()


class NcclCommunicator:
    """One rank's communicator, of the current device, like CuPy's class of that name.

    Parameters
    ----------
    ndev
        The number of ranks.
    commId
        What `get_unique_id` returned on one of them.
    rank
        This rank.
    config
        The configuration.

    Notes
    -----
    A communicator that is dropped without `destroy` or `abort` is destroyed in the background, so that the destructor
    does not wait. Operations that were issued on it then have the timeout of `use` to end, by default 60 s; after that
    the communicator is aborted, and the log ``ncclpy`` has a warning.
    """

    _ours: Communicator | None = None
    # The communicator that `commSplit` has divided to make this one. It is kept as long as this one, since the two may
    # share resources.
    _parent: NcclCommunicator | None = None

    @_raising
    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:  # noqa: N803
        if not isinstance(commId, bytes):
            raise TypeError(f"commId: expected the bytes of get_unique_id(), got {type(commId).__name__}")
        if len(commId) != _UNIQUE_ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {_UNIQUE_ID_BYTES}.")
        self._hold(Communicator.init(ndev, rank, commId, config=_config(config), timeout=_timeout))

    def _hold(self, ncclpy_comm: Communicator) -> None:
        self._ours, self._drop = ncclpy_comm, close_when_dropped(self, ncclpy_comm)

    def _let_go(self) -> None:
        self._ours = self._parent = None
        self._drop.detach()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._ours!r}>"

    def _alive(self) -> Communicator:
        """Return the communicator; if it was destroyed or aborted, raise NCCL's error for a NULL communicator."""
        if self._ours is None:
            raise NcclError(Result.INVALID_ARGUMENT, f"this {type(self).__name__} was destroyed or aborted")
        return self._ours

    @property
    def comm(self) -> int:
        """The `ncclComm_t` as an int; 0 once there is none."""
        return 0 if self._ours is None else self._ours.handle

    @staticmethod
    def initAll(devices: int | list[int]) -> list[NcclCommunicator]:  # noqa: N802
        """Make a communicator for each of several devices of this process.

        Parameters
        ----------
        devices
            The ordinals of the devices, or a number n for the first n devices.
        """
        if isinstance(devices, bool) or not isinstance(devices, (int, list)):
            raise ValueError('"devices" should be an int or a list of int.')
        ordinals = list(range(devices)) if isinstance(devices, int) else devices
        comms = [NcclCommunicator.__new__(NcclCommunicator) for _ in ordinals]
        NcclCommunicator._initAll(comms, len(comms), ordinals)
        return comms

    @staticmethod
    def _initAll(comms: list[NcclCommunicator], ndev: int, devlist: list[int] | None = None) -> None:  # noqa: N802
        """Initialise communicators that the program has made by `__new__`, one for each device.

        A subclass needs this to have several in one process: `initAll` makes objects of this class only.
        """
        ordinals = list(range(ndev)) if devlist is None else devlist
        if not len(comms) == len(ordinals) == ndev:
            raise ValueError(f"{len(comms)} communicators and {len(ordinals)} devices, where ndev is {ndev}")
        for comm, ncclpy_comm in zip(comms, _init_on_devices(ordinals), strict=True):
            comm._hold(ncclpy_comm)

    @_raising
    def destroy(self) -> None:
        """Destroy it, once all that was issued is done; a second call does nothing."""
        if self._ours is not None:
            self._ours.close()
            self._let_go()

    @_raising
    def abort(self) -> None:
        """Abort it at once; a second call does nothing."""
        if self._ours is not None:
            self._ours.abort()
            self._let_go()

    def device_id(self) -> int:
        """Return its device."""
        return self._alive().device

    def rank_id(self) -> int:
        """Return its rank."""
        return self._alive().rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._alive().nranks

    @_raising
    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        """Reduce what all ranks send; all of them receive it."""
        c_calls.all_reduce(self._alive(), sendbuf, recvbuf, count, datatype, op, stream)

    @_raising
    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """Reduce what all ranks send; the root receives it. Elsewhere `recvbuf` may be 0."""
        c_calls.reduce(self._alive(), sendbuf, recvbuf, count, datatype, op, root, stream)

    @_raising
    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Send the root's data to all ranks. Elsewhere `sendbuff` may be 0."""
        c_calls.broadcast(self._alive(), sendbuff, recvbuff, count, datatype, root, stream)

    @_raising
    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Send the root's data to all ranks, in place."""
        c_calls.broadcast(self._alive(), buff, buff, count, datatype, root, stream)

    @_raising
    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        """Reduce what all ranks send; each receives its part, of `recvcount` elements."""
        c_calls.reduce_scatter(self._alive(), sendbuf, recvbuf, recvcount, datatype, op, stream)

    @_raising
    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        """Receive on each rank what all send, `count` elements of each."""
        c_calls.all_gather(self._alive(), sendbuf, recvbuf, count, datatype, stream)

    @_raising
    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Send to one rank."""
        c_calls.send(self._alive(), sendbuf, count, datatype, peer, stream)

    @_raising
    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Receive from one rank."""
        c_calls.recv(self._alive(), recvbuf, count, datatype, peer, stream)

    @_raising
    def check_async_error(self) -> None:
        """Raise NCCL's asynchronous error, if there is one; an operation in progress is not an error."""
        result = self._alive().async_error()
        if result != Result.IN_PROGRESS:
            check_status(result)

    @_raising
    def commSplit(self, color: int, key: int, config: NcclConfig | None = None) -> NcclCommunicator | None:  # noqa: N802
        """Divide the ranks into new communicators by colour.

        Parameters
        ----------
        color
            Ranks of one colour form a communicator; with -1 this rank joins none, and gets None.
        key
            Orders the ranks of the new communicator.
        config
            For the new communicator.
        """
        ncclpy_comm = self._alive().split(color, key, config=_config(config))
        if ncclpy_comm is None:
            return None
        made = NcclCommunicator.__new__(NcclCommunicator)
        made._hold(ncclpy_comm)
        made._parent = self
        return made


@_raising
def _init_on_devices(devices: list[int]) -> list[Communicator]:
    return Communicator.init_all(devices, timeout=_timeout)


class InPlace:
    """What `use` returns: `close`, or the end of a ``with`` block, puts CuPy's module back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []  # an object, the name of an attribute, and its value before
        self._modules: dict[str, ModuleType | None] = {}  # entries of sys.modules before
        self._filled: list[tuple[dict[str, int], dict[str, int]]] = []  # a table of CuPy, and its content before
        self._timeout = _timeout

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def close(self) -> None:
        """Put CuPy's module and its names back; a second call does nothing."""
        global _timeout
        for table, content in self._filled:
            table.clear()
            table.update(content)
        for owner, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for name, module in self._modules.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        if self._before or self._modules:
            _timeout = self._timeout
        self._before, self._modules, self._filled = [], {}, []


_ABSENT = object()
#: Modules of CuPy that import cupy.cuda.nccl or names of it. Those that were imported before `use` have CuPy's own
#: module, so `use` replaces it in them.
_IMPORTERS = ("cupyx.distributed._nccl_comm", "cupyx.distributed._init", "cupyx.distributed.array._data_transfer")
#: NCCL's data types by CuPy's type characters, for modules that found no NCCL and so have an empty table.
_TYPES = {
    "b": NCCL_INT8, "B": NCCL_UINT8, "i": NCCL_INT32, "I": NCCL_UINT32, "l": NCCL_INT64, "L": NCCL_UINT64,
    "q": NCCL_INT64, "Q": NCCL_UINT64, "e": NCCL_FLOAT16, "f": NCCL_FLOAT32, "d": NCCL_FLOAT64,
    "F": NCCL_FLOAT32, "D": NCCL_FLOAT64,  # of twice as many elements
}  # fmt: skip
_OPERATORS = {"sum": NCCL_SUM, "prod": NCCL_PROD, "max": NCCL_MAX, "min": NCCL_MIN}


def use(*, timeout: float | None = None) -> InPlace:
    """Put this module in the place of ``cupy.cuda.nccl``, so that ``cupyx.distributed`` uses ncclpy.

    This applies to the whole process, whether ``cupyx.distributed`` was imported before or is imported later.
    Communicators that were made before stay CuPy's.

    Parameters
    ----------
    timeout
        Seconds that any wait of the communicators that are made from now on may take; see `ncclpy.Communicator.init`.
        All processes pass one, or none does.

    Returns
    -------
    InPlace
        Its `close` puts CuPy's own module back; dropping the object does not.

    Raises
    ------
    ModuleNotFoundError
        If there is no CuPy.
    """
    global _timeout
    try:
        import cupy
    except ImportError as error:
        raise ModuleNotFoundError(
            f"cupy_nccl.use() puts ncclpy in the place of cupy.cuda.nccl, and CuPy cannot be imported: {error}. "
            "Install it (pip install cupy-cuda12x, say); without CuPy import ncclpy.interop.cupy_nccl itself",
            name="cupy",
        ) from error
    this_module = sys.modules[__name__]
    made = InPlace()
    _timeout = timeout
    made._modules["cupy.cuda.nccl"] = sys.modules.get("cupy.cuda.nccl")
    sys.modules["cupy.cuda.nccl"] = this_module
    made._put(cupy.cuda, "nccl", this_module)
    for name in _IMPORTERS:
        module = sys.modules.get(name)
        if module is None:
            continue
        made._put(module, "nccl", this_module)
        if hasattr(module, "_Communicator"):
            made._put(module, "_Communicator", NcclCommunicator)
        for attribute, table in (("_nccl_dtypes", _TYPES), ("_nccl_ops", _OPERATORS)):
            cupy_table = vars(module).get(attribute)
            if isinstance(cupy_table, dict) and not cupy_table:
                made._filled.append((cupy_table, {}))
                cupy_table.update(table)
    return made
