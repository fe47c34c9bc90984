"""The ways to make a communicator: of a new clique, or out of one that exists."""

import hashlib
import sys
from importlib import import_module as _import_module

from libc.stdint cimport uintptr_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t, ncclUniqueId
from ncclpy.core cimport observers as _overdue
from ncclpy.core.abort cimport leave, note_kin
from ncclpy.core.state cimport READY, Cradle
from ncclpy.core.check cimport check
from ncclpy.core.device cimport as_device, context_of
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport look_up_overrides, nccl, require, version_code
from ncclpy.core.operation cimport GROW, INIT_RANK, SHRINK, SPLIT, Birth, Operation
from ncclpy.core.watch cimport check_alive
from ncclpy.core.submit cimport give_birth
from ncclpy.core.wait cimport FOREVER, as_timeout

from ncclpy.core import device as _device
from ncclpy.core.config import Config
from ncclpy.core.errors import NcclTimeout
from ncclpy.core.group import Group
from ncclpy.core.library import library as _library
from ncclpy.core.types import MAX_ADDRESS as _MAX_ADDRESS
from ncclpy.core.types import UniqueId, as_integer, as_unique_id


def get_unique_id():
    """Return a new `UniqueId` for one communicator (`ncclGetUniqueId`); one rank makes it for all."""
    cdef ncclUniqueId raw
    cdef ncclResult_t result
    require(<void*>nccl.ncclGetUniqueId, b"ncclGetUniqueId")
    with nogil:
        result = nccl.ncclGetUniqueId(&raw)
    check(result, b"ncclGetUniqueId", NULL)
    return UniqueId(raw.internal[:128])


cdef int _as_unique_id(object unique_id, ncclUniqueId* out) except -1:
    cdef bytes data = bytes(as_unique_id(unique_id))
    memcpy(out.internal, <const char*>data, 128)
    return 0


cdef tuple _as_place(object nranks, object rank):
    """Return the number of ranks and this rank, checked."""
    nranks, rank = as_integer(nranks, "nranks"), as_integer(rank, "rank")
    if nranks < 1 or not 0 <= rank < nranks:
        raise ValueError(f"rank {rank} of {nranks}: expected nranks >= 1 and 0 <= rank < nranks")
    return nranks, rank


cdef str _name_of(object unique_id):
    """Return a name for the communicators that are made with an id: the same in all processes."""
    return hashlib.blake2b(bytes(unique_id), digest_size=4).hexdigest()


cdef object _caller():
    """Return the line of Python's that asked for a communicator; functions in Cython have no frames."""
    frame = sys._getframe(0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


cdef int _conceive(Handle made, object config, object timeout, object abortable, Handle parent) except -1:
    """Prepare what NCCL is told and decide how it is waited for."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: expected an ncclpy.Config, got {type(config).__name__}")
    made.site = _caller()
    made.limit = as_timeout(timeout)
    inherits = config is None and parent is not None
    if parent is not None:
        if timeout is None:
            made.limit = parent.limit
        config = parent.config if config is None else config
        abortable = parent.abortable if abortable is None else abortable
    made.config = config
    made.abortable = bool(abortable)
    blocking = None if config is None else config.blocking
    if blocking is None and inherits:
        blocking = not parent.nonblocking  # of a handle from somewhere else nothing more is known
    # What can be ended at any time needs a guard; NCCL before 2.18 makes none, and is then polled for every call.
    ends = blocking is not False and (made.limit != FOREVER or made.abortable)
    guarded = ends and version_code() >= 21801
    made.nonblocking = blocking is False or (ends and not guarded)
    made.waits = blocking is not False if not inherits or ends else parent.waits
    made.cradle = Cradle()
    made.cradle.fill(config, guarded, None if blocking is None and not ends else not made.nonblocking)
    made.cradle.birth.inherits = inherits and not ends
    if guarded:
        look_up_overrides()  # before anything is made, as far as that shows
    if parent is not None:
        made.parent = parent
        made.asked = <void*>parent
        made.device = parent.device
        made.cradle.birth.context = context_of(parent.device)
    return 0


cdef int _make(Handle parent, Handle made, int kind) except -1:
    """Make the call. `parent` is None for a new clique."""
    cdef Operation operation
    memset(&operation, 0, sizeof(operation))
    note_kin(made)
    operation.kind = kind
    operation.birth = made.cradle.birth
    return give_birth(parent, made, &operation)


cdef int init(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1:
    nranks, rank = _as_place(nranks, rank)
    made.device = as_device(device)
    _conceive(made, config, timeout, abortable, None)
    _as_unique_id(unique_id, &made.cradle.birth.id)
    made.group_name = _name_of(unique_id)
    made.rank = made.cradle.birth.rank = rank
    made.nranks = made.cradle.birth.nranks = nranks
    if _overdue.listener is not None:
        _overdue.listener.named(made)
    made.cradle.birth.context = context_of(made.device)
    return _make(None, made, INIT_RANK)


cdef list init_all(object cls, object devices, dict options):
    if isinstance(devices, int):
        raise TypeError(f"devices: pass the ordinals, not their number: range({devices}), say")
    devices = list(range(_device.device_count()) if devices is None else devices)
    if not devices:
        raise ValueError("devices: at least one is needed")
    unique_id = get_unique_id()
    made = []
    try:
        with Group():
            for rank, device in enumerate(devices):
                made.append(cls.init(len(devices), rank, unique_id, device=device, **options))
    except BaseException as error:
        leave(made, "init_all did not make them all", error)  # nobody else has them
        raise
    return made


def _new_id():
    return bytes(get_unique_id())


def device_of(place):
    """Return the device of a process by its place (`ncclpy.bootstrap.Place`) on its machine."""
    count = _device.device_count()
    if count == 1:
        return 0  # each sees its own, as with CUDA_VISIBLE_DEVICES or srun --gpus-per-task
    if place.local_rank >= count:
        hint = ""
        if _library().engine == "host":
            hint = f"; NCCLPY_HOST_DEVICES={place.local_size} shows more"
        raise ValueError(
            f"rank {place.rank} is number {place.local_rank} of {place.local_size} on this machine, and there are "
            f"{count} devices, one for each{hint}"
        )
    return place.local_rank


cdef object from_env(object cls, object device, dict options):
    cdef Handle made
    # Floors above: found by their names, when the first process asks.
    start = _import_module("ncclpy.peers.starting").Start(options["timeout"])
    comm, place = None, start.place
    try:
        device = device_of(place) if device is None else as_device(device)
        brought = _new_id() if place.rank == 0 else b""
        # Before NCCL, which could not say who is absent.
        try:
            unique_id = start.meet(brought)
        except NcclTimeout as late:
            _import_module("ncclpy.peers.fellows").describe_late(late)
            raise
        comm = cls.__new__(cls)
        made = <Handle?>comm
        start.listen(comm)
        init(
            made, place.size, place.rank, unique_id, device, options["config"], options["timeout"], options["abortable"]
        )
    except BaseException as error:
        start.fail(error)
        raise
    try:
        start.stands(made.state == READY)
        if place.size > 1:
            made.fellows = _import_module("ncclpy.peers.fellows").fellows_of(comm, start)
            made.told = made.fellows is not None
    except BaseException as error:  # nobody else has it
        leave([made], "from_env did not return it", error)
        raise
    return comm


cdef object from_mpi(object cls, object comm, object device, dict options):
    # A floor above, as in from_env.
    meeting = _import_module("ncclpy.interop.mpi_meeting")
    unique_id, device = meeting.exchange(comm, device, options["timeout"], _new_id)
    return cls.init(comm.size, comm.rank, unique_id, device=device, **options)


cdef int take_over(Handle made, object pointer) except -1:
    """Wrap an `ncclComm_t` that somebody else owns."""
    cdef uintptr_t address = as_integer(pointer, "pointer", 0, _MAX_ADDRESS)
    if address == 0:
        raise ValueError("pointer: NULL is no communicator")
    made.site = _caller()
    made.raw = <ncclComm_t>address
    made.owned = False
    made.ask_who()
    made.become(READY)
    return 0


cdef bint split(
    Handle child, Handle parent, object color, object key, object config, object timeout, object abortable
) except -1:
    cdef Birth* birth
    cdef int number = -1 if color is None else _as_color(color)
    cdef int order = as_integer(key, "key")
    check_alive(parent)
    _conceive(child, config, timeout, abortable, parent)
    birth = child.cradle.birth
    birth.color, birth.key = number, order
    child.group_name = parent.name_next(f".{number}")
    if number < 0:
        child.nranks = 0  # see born()
    _make(parent, child, SPLIT)
    return number >= 0


cdef object _as_color(object color):
    """Return a color of NCCL's: from 0 on, or -1 (``NCCL_SPLIT_NOCOLOR``)."""
    if isinstance(color, int) and not -1 <= color < 1 << 31:
        raise ValueError(
            f"color: expected an int from 0 to {(1 << 31) - 1}, or None to join no communicator, got {color}"
        )
    return as_integer(color, "color", -1)


cdef int shrink(
    Handle child, Handle parent, object exclude, bint abort, object config, object timeout, object abortable
) except -1:
    cdef Birth* birth
    cdef size_t i
    if isinstance(exclude, int):
        raise TypeError(f"exclude: pass the ranks that leave in a list: [{exclude}]")
    ranks = sorted({as_integer(rank, "exclude") for rank in exclude})
    check_alive(parent)
    if not ranks:
        raise ValueError("exclude: at least one rank must leave")
    if ranks[0] < 0 or ranks[-1] >= parent.nranks:
        raise ValueError(f"exclude: {ranks} names ranks outside 0..{parent.nranks - 1}")
    if parent.rank in ranks:
        raise ValueError(f"exclude: rank {parent.rank} leaves and must not call shrink")
    _conceive(child, config, timeout, abortable, parent)
    birth = child.cradle.birth
    birth.exclude = <int*>malloc(len(ranks) * sizeof(int))
    if birth.exclude == NULL:
        raise MemoryError
    for i, rank in enumerate(ranks):
        birth.exclude[i] = rank
    birth.nexclude = len(ranks)
    birth.flags = 1 if abort else 0
    child.group_name = parent.name_next("-")
    try:
        return _make(parent, child, SHRINK)
    except NcclTimeout as late:
        late.args = (f"shrink(exclude={ranks}), which all ranks that stay call with the same list: {late}",)
        raise


cdef int grow(
    Handle child, Handle parent, object nranks, object unique_id, object config, object timeout, object abortable
) except -1:
    check_alive(parent)
    nranks = as_integer(nranks, "nranks")
    if nranks <= parent.nranks:
        raise ValueError(f"nranks: {nranks} is not more than the {parent.nranks} ranks there are")
    _conceive(child, config, timeout, abortable, parent)
    child.group_name = parent.name_next("+")
    return _grow(parent, child, nranks, -1, unique_id)


cdef int join(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1:
    nranks, rank = _as_place(nranks, rank)
    made.device = as_device(device)
    _conceive(made, config, timeout, abortable, None)
    made.cradle.birth.context = context_of(made.device)
    if unique_id is not None:
        made.group_name = _name_of(unique_id)
    return _grow(None, made, nranks, rank, unique_id)


cdef int _grow(Handle parent, Handle made, int nranks, int rank, object unique_id) except -1:
    cdef Birth* birth = made.cradle.birth
    birth.nranks, birth.rank = nranks, rank
    birth.has_id = unique_id is not None
    if unique_id is not None:
        _as_unique_id(unique_id, &birth.id)
    elif parent is None:
        raise TypeError("unique_id: a rank that joins needs it")
    return _make(parent, made, GROW)


cdef object grow_id(Handle parent):
    cdef ncclUniqueId raw
    cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
    check_alive(parent)
    require(<void*>nccl.ncclCommGetUniqueId, b"ncclCommGetUniqueId")
    with nogil:
        if parent.lock_alive():
            result = nccl.ncclCommGetUniqueId(parent.raw, &raw)
            parent.unlock()
    parent.check_call(result, b"ncclCommGetUniqueId")
    return UniqueId(raw.internal[:128])
