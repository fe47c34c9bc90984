"""The life of a communicator, as users see it: how to make one, to wait until it is ready, and to end it."""

import hashlib
import sys
import warnings

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from ncclpy.abi.nccl cimport ncclCommMemStat_t, ncclComm_t, ncclInProgress, ncclResult_t, ncclSuccess, ncclUniqueId
from ncclpy.core.handles cimport handle as _observers
from ncclpy.core.handles.abort cimport (
    ABORT_DEADLINE, abort_and_report, aborted_together, begin_abort, end_abort, note_local_peer,
)
from ncclpy.core.runtime.device cimport as_device, context_of
from ncclpy.core.ending cimport FINALIZE, RESUME, REVOKE, SUSPEND, abort_now, call_blocking, close_comm
from ncclpy.core.handles.handle cimport WAS_ABORTED, report_failure
from ncclpy.core.runtime.library cimport check, warn_of_overrides, nccl, require, version_code
from ncclpy.core.arguments.operation cimport GROW, INIT_RANK, SHRINK, SPLIT, InitArgs, Operation
from ncclpy.core.handles.state cimport FINALIZED, INITIALISING, READY, SUSPENDED, DEFERRED, InitState, is_over
from ncclpy.core.calls.submit cimport issue_init
from ncclpy.core.runtime.wait cimport FOREVER, as_timeout, deadline_after, now
from ncclpy.core.handles.watch cimport check_alive, finish, poll_once

from ncclpy.core.runtime import device as _device
from ncclpy.core.arguments.config import Config
from ncclpy.errors import NcclTimeout
from ncclpy.core.calls.group import Group
from ncclpy.core.runtime.library import library as _library
from ncclpy.types import MAX_ADDRESS as _MAX_ADDRESS, Need as _Need, Result, UniqueId, as_integer, as_unique_id

#: Takes a timeout; returns the `ncclpy.peers.starting.Start` of one communicator of the launcher's processes.
_start_by_launcher = _Need("start_by_launcher")
#: Agrees with the ranks of an MPI communicator on a unique id and on devices.
_exchange_over_mpi = _Need("exchange_over_mpi")


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
    """Return the Python line that makes a communicator: the innermost frame, as Cython functions have no frames."""
    frame = sys._getframe(0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


cdef int _prepare_init(Handle made, object config, object timeout, object abortable, Handle parent) except -1:
    """Fill in NCCL's arguments; decide whether there is a guard, and whether the call returns before NCCL is done."""
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
        blocking = not parent.nonblocking  # a parent from from_handle() has no Config with this setting
    # A blocking communicator that can be ended at any time needs a guard. With NCCL before 2.18, which can make no
    # guard, the communicator is nonblocking instead, and every call is polled.
    endable = blocking is not False and (made.limit != FOREVER or made.abortable)
    guarded = endable and version_code() >= 21801
    made.nonblocking = blocking is False or (endable and not guarded)
    made.returns_when_made = blocking is not False if not inherits or endable else parent.returns_when_made
    made.init_state = InitState()
    made.init_state.fill(config, guarded, None if blocking is None and not endable else not made.nonblocking)
    made.init_state.init_args.inherits = inherits and not endable
    if guarded:
        # NCCL's configuration file may override more: NCCL reads it in the call, after which `end_init` checks again.
        warn_of_overrides()
    if parent is not None:
        made.parent = parent
        made.parent_pointer = <void*>parent
        made.device = parent.device
        made.init_state.init_args.context = context_of(parent.device)
    return 0


cdef int _make(Handle parent, Handle made, int kind) except -1:
    """Make the call that makes a communicator. `parent` is None for a new clique, and for a rank that joins."""
    cdef Operation operation
    memset(&operation, 0, sizeof(operation))
    note_local_peer(made)
    operation.kind = kind
    operation.init_args = made.init_state.init_args
    return issue_init(parent, made, &operation)


cdef int init_comm(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1:
    nranks, rank = _as_place(nranks, rank)
    made.device = as_device(device)
    _prepare_init(made, config, timeout, abortable, None)
    _as_unique_id(unique_id, &made.init_state.init_args.id)
    made.group_name = _name_of(unique_id)
    made.rank = made.init_state.init_args.rank = rank
    made.nranks = made.init_state.init_args.nranks = nranks
    if _observers.listener is not None:
        _observers.listener.note_rank(nranks, rank)
    made.init_state.init_args.context = context_of(made.device)
    return _make(None, made, INIT_RANK)


cdef list init_all_comms(object cls, object devices, dict options):
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
        # The caller gets no reference to the communicators that were made.
        abort_and_report(made, "init_all did not make them all", error)
        raise
    return made


def _new_id():
    return bytes(get_unique_id())


def device_of(place):
    """Return the ordinal of the device that a process uses, by its place (`ncclpy.bootstrap.Place`)."""
    count = _device.device_count()
    if count == 1:
        return 0  # usually each process sees only its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task)
    if place.local_rank >= count:
        hint = ""
        if _library().engine == "host":
            hint = f"; NCCLPY_HOST_DEVICES={place.local_size} shows more"
        raise ValueError(
            f"rank {place.rank} is number {place.local_rank} of {place.local_size} on this machine, which has only "
            f"{count} devices, and each rank needs one{hint}"
        )
    return place.local_rank


cdef object comm_from_env(object cls, object device, dict options):
    cdef Handle made
    start = _start_by_launcher(options["timeout"])
    comm, place = None, start.place
    try:
        device = device_of(place) if device is None else as_device(device)
        own_id = _new_id() if place.rank == 0 else b""
        # The ranks meet before NCCL is called, because NCCL could not tell which ranks are missing.
        unique_id = start.meet(own_id)
        comm = cls.__new__(cls)
        made = <Handle?>comm
        start.listen(comm)
        init_comm(
            made, place.size, place.rank, unique_id, device, options["config"], options["timeout"], options["abortable"]
        )
    except BaseException as error:
        start.fail(error)
        raise
    try:
        start.end_start(made.state == READY)
        if place.size > 1:
            made.peer_status = start.peer_status_of(comm)
            made.status.is_noting = made.peer_status is not None
    except BaseException as error:  # the caller gets no reference to the communicator
        abort_and_report([made], "from_env failed after it had made the communicator", error)
        raise
    return comm


cdef object comm_from_mpi(object cls, object comm, object device, dict options):
    unique_id, device = _exchange_over_mpi(comm, device, options["timeout"], _new_id)
    return cls.init(comm.size, comm.rank, unique_id, device=device, **options)


cdef int take_over_comm(Handle made, object pointer) except -1:
    """Wrap an `ncclComm_t` that other code owns."""
    cdef uintptr_t address = as_integer(pointer, "pointer", 0, _MAX_ADDRESS)
    if address == 0:
        raise ValueError("pointer: expected an ncclComm_t, got NULL")
    made.site = _caller()
    made.raw = <ncclComm_t>address
    made.owned = False
    made.read_properties()
    made.become(READY)
    return 0


cdef bint split_comm(
    Handle child, Handle parent, object color, object key, object config, object timeout, object abortable
) except -1:
    cdef InitArgs* init_args
    cdef int number = -1 if color is None else _as_color(color)
    cdef int order = as_integer(key, "key")
    check_alive(parent)
    _prepare_init(child, config, timeout, abortable, parent)
    init_args = child.init_state.init_args
    init_args.color, init_args.key = number, order
    child.group_name = parent.name_next(f".{number}")
    if number < 0:
        child.nranks = 0  # see end_init()
    _make(parent, child, SPLIT)
    return number >= 0


cdef object _as_color(object color):
    """Return a color for NCCL: from 0 on, or -1 (``NCCL_SPLIT_NOCOLOR``)."""
    if isinstance(color, int) and not -1 <= color < 1 << 31:
        raise ValueError(
            f"color: expected an int from 0 to {(1 << 31) - 1}, or None to join no communicator, got {color}"
        )
    return as_integer(color, "color", -1)


cdef int shrink_comm(
    Handle child, Handle parent, object exclude, bint abort, object config, object timeout, object abortable
) except -1:
    cdef InitArgs* init_args
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
    _prepare_init(child, config, timeout, abortable, parent)
    init_args = child.init_state.init_args
    init_args.exclude = <int*>malloc(len(ranks) * sizeof(int))
    if init_args.exclude == NULL:
        raise MemoryError
    for i, rank in enumerate(ranks):
        init_args.exclude[i] = rank
    init_args.nexclude = len(ranks)
    init_args.flags = 1 if abort else 0
    child.group_name = parent.name_next("-")
    try:
        return _make(parent, child, SHRINK)
    except NcclTimeout as late:
        late.args = (f"shrink(exclude={ranks}), which all ranks that stay must call with the same list: {late}",)
        raise


cdef int grow_comm(
    Handle child, Handle parent, object nranks, object unique_id, object config, object timeout, object abortable
) except -1:
    check_alive(parent)
    nranks = as_integer(nranks, "nranks")
    if nranks <= parent.nranks:
        raise ValueError(f"nranks: {nranks} is not more than the {parent.nranks} ranks there are")
    _prepare_init(child, config, timeout, abortable, parent)
    child.group_name = parent.name_next("+")
    return _grow(parent, child, nranks, -1, unique_id)


cdef int join_comm(
    Handle made, object nranks, object rank, object unique_id, object device, object config, object timeout,
    object abortable,
) except -1:
    nranks, rank = _as_place(nranks, rank)
    made.device = as_device(device)
    _prepare_init(made, config, timeout, abortable, None)
    made.init_state.init_args.context = context_of(made.device)
    if unique_id is not None:
        made.group_name = _name_of(unique_id)
    return _grow(None, made, nranks, rank, unique_id)


cdef int _grow(Handle parent, Handle made, int nranks, int rank, object unique_id) except -1:
    cdef InitArgs* init_args = made.init_state.init_args
    init_args.nranks, init_args.rank = nranks, rank
    init_args.has_id = unique_id is not None
    if unique_id is not None:
        _as_unique_id(unique_id, &init_args.id)
    elif parent is None:
        raise TypeError("unique_id: a rank that joins needs it")
    return _make(parent, made, GROW)


cdef object grow_id_of(Handle parent):
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


cdef str _text_of(object reason):
    """Return a user's reason as text; if `str` raises, the name of its class."""
    try:
        return str(reason)
    except Exception:
        return type(reason).__name__


cdef class Lifecycle(Handle):
    """Make, watch and end a communicator; `Communicator` adds the operations."""

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "Communicator(...) makes no communicator: use Communicator.init(nranks, rank, unique_id), init_all, "
            "from_env, from_mpi, join or from_handle, or split, shrink or grow an existing one"
        )

    def __del__(self):
        # Only warn: ending a communicator is collective, and the other ranks may be in other calls.
        if self.raw == NULL or not self.owned or self.state not in (READY, INITIALISING, FINALIZED, SUSPENDED):
            return
        if nccl.ncclCommDestroy == NULL or warnings is None:
            return  # in a forked child, or while the interpreter ends
        warnings.warn(
            f"unclosed {self!r}, made at {self.site}; call close(), abort() or use it in a with statement",
            ResourceWarning,
            source=self,
        )

    @classmethod
    def init(cls, nranks, rank, unique_id, *, device=None, config=None, timeout=None, abortable=None):
        """Make this rank's communicator of a new clique (`ncclCommInitRankConfig`).

        The call returns when all ranks have joined; if ``config.blocking`` is False, it returns at once. Inside
        ``ncclpy.group()`` it returns at once too, and the group's end makes the communicator; so one thread can make
        several.

        Parameters
        ----------
        nranks : int
            The number of ranks.
        rank : int
            This rank, from 0 to ``nranks - 1``.
        unique_id : UniqueId or bytes
            The id that one of the ranks got from `get_unique_id`.
        device : int, optional
            The device's ordinal; the current device by default. Each rank has its own device.
        config : Config, optional
            NCCL's configuration.
        timeout : float, optional
            Seconds that any wait of this communicator may take, initialisation included. After that the communicator
            is aborted and `NcclTimeout` raised. By default waits are not limited. Either all ranks pass a timeout,
            which may differ, or none does: a communicator with a timeout has a guard (see ``abortable``).
        abortable : bool, optional
            Whether every call and operation can be ended at any time, by `abort` or Ctrl-C; a timeout implies it. The
            communicator is then split from a second one, its guard. A guard makes no call slower, but initialisation
            takes about twice as long, and on a GPU the guard takes some 130 MiB of memory. All ranks pass the same.
            False by default; children inherit it. (NCCL before 2.18 cannot make guards: there ncclpy makes a
            nonblocking communicator, which costs a thread hop per call.)

        Returns
        -------
        Communicator

        Raises
        ------
        NcclTimeout
            If not all ranks joined in time.
        NcclError
            If NCCL failed.
        """
        cdef Lifecycle self = cls.__new__(cls)
        init_comm(self, nranks, rank, unique_id, device, config, timeout, abortable)
        return self

    @classmethod
    def from_env(cls, *, device=None, config=None, timeout=None, abortable=None):
        """Make this process's communicator with all processes that the same launcher has started.

        Rank and number of ranks come from the launcher's variables (``ncclpy run``, torchrun, mpirun or srun; see
        `ncclpy.bootstrap.environment`), and the id through the rendezvous store of these processes
        (`ncclpy.bootstrap.rendezvous`). All of them call this, any number of times, each time for a new clique.

        If an operation fails later, by a deadline, a dead peer or ranks that make different calls, the ranks exchange
        through that store what each of them does. The error's message says it, and ``error.ranks`` lists it. The
        exchange takes 0.3 s if a rank does not answer, and 3 s if the store does not.

        Parameters
        ----------
        device : int, optional
            The device's ordinal. By default this process's local rank on its machine, or the only device that it sees.
        config : Config, optional
            As in `init`.
        timeout : float, optional
            Seconds for the rendezvous of the processes, 300 by default; afterwards for each wait, as in `init`.
        abortable : bool, optional
            As in `init`.

        Returns
        -------
        Communicator

        Raises
        ------
        RuntimeError
            If no launcher has started this process.
        ValueError
            If the launcher's variables are incomplete or contradictory; or there are too few devices.
        NcclTimeout
            If not all processes have joined in time. The message names the missing ones and, if the store knows, says
            which processes have ended; ``missing`` lists the missing ones. All ranks get the same message.
        NcclRemoteError
            If another rank has failed; the message has the error that the failed rank itself raises. A rank that waits
            inside NCCL raises it only if its communicator can be ended at any time, see ``abortable``.
        """
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        return comm_from_env(cls, device, options)

    @classmethod
    def from_mpi(cls, comm, device=None, *, config=None, timeout=None, abortable=None):
        """Make this rank's communicator with all ranks of an mpi4py communicator, which all call this.

        The ranks have the same numbers as in `comm`. They use a duplicate of `comm` for the rendezvous and free the
        duplicate again; only this thread calls MPI. `comm` is not needed afterwards.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            ``MPI.COMM_WORLD``, or a part of it.
        device : int, optional
            The device's ordinal. By default the current device or, if another rank of the machine has the same one,
            the device with this rank's number among the ranks of its machine.
        config : Config, optional
            As in `init`.
        timeout : float, optional
            Seconds for the rendezvous of the ranks, 300 by default; afterwards for each wait, as in `init`.
        abortable : bool, optional
            As in `init`.

        Returns
        -------
        Communicator

        Raises
        ------
        ModuleNotFoundError
            If mpi4py is not installed.
        TypeError
            If `comm` is no intracommunicator of mpi4py.
        RuntimeError
            If MPI is not initialised, or is finalised already.
        ValueError
            On all ranks, if two ranks would share a device that they have not both asked for.
        NcclRemoteError
            If another rank could not take part; that rank raises its own error.
        NcclTimeout
            If not all ranks have joined in time. MPI does not tell which.
        """
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        return comm_from_mpi(cls, comm, device, options)

    @classmethod
    def init_all(cls, devices=None, *, config=None, timeout=None, abortable=None):
        """Make a clique of communicators for several devices of this process, from one thread.

        Parameters
        ----------
        devices : iterable of int, optional
            The ordinals; rank i gets the i-th. All devices by default.
        config, timeout, abortable
            As for `init`.

        Returns
        -------
        list of Communicator
        """
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        return init_all_comms(cls, devices, options)

    @classmethod
    def from_handle(cls, pointer):
        """Wrap an `ncclComm_t` that other code owns; `close` drops the handle and does not destroy the communicator.

        Parameters
        ----------
        pointer : int
            The handle; it must outlive the returned object.
        """
        cdef Lifecycle self = cls.__new__(cls)
        take_over_comm(self, pointer)
        return self

    def split(self, color, key=0, *, config=None, timeout=None, abortable=None):
        """Divide the ranks into new communicators by colour (`ncclCommSplit`, NCCL 2.18); all ranks call it.

        Parameters
        ----------
        color : int or None
            Ranks of one colour form a communicator. None, or NCCL's own -1: this rank joins none.
        key : int
            Orders the ranks of the new communicator; ties keep the old order.
        config : Config, optional
            Of the new communicator; by default it inherits the configuration of this one.
        timeout : float, optional
            As for `init`; this communicator's by default.
        abortable : bool, optional
            As for `init`; as this communicator by default.

        Returns
        -------
        Communicator or None
            None without a colour. Closing this communicator closes its children first.
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        return child if split_comm(child, self, color, key, config, timeout, abortable) else None

    def shrink(self, exclude, *, bint abort=False, config=None, timeout=None, abortable=None):
        """Make a communicator without some ranks (`ncclCommShrink`, NCCL 2.27); the ranks that stay call it.

        Parameters
        ----------
        exclude : iterable of int
            The ranks that leave.
        abort : bool
            First end what still runs on this communicator (`NCCL_SHRINK_ABORT`), for example if a rank has failed.
        config, timeout, abortable
            As for `split`.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        shrink_comm(child, self, exclude, abort, config, timeout, abortable)
        return child

    def grow(self, nranks, unique_id=None, *, config=None, timeout=None, abortable=None):
        """Make a larger communicator of these ranks and new ones (`ncclCommGrow`, NCCL 2.29); all old ranks call it.

        Parameters
        ----------
        nranks : int
            The number of ranks of the new communicator.
        unique_id : UniqueId, optional
            The id from `grow_id`, on the rank that called `grow_id`; None on the other old ranks. New ranks pass the
            id to `Communicator.join`.
        config, timeout, abortable
            As for `split`.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        grow_comm(child, self, nranks, unique_id, config, timeout, abortable)
        return child

    @classmethod
    def join(cls, nranks, rank, unique_id, *, device=None, config=None, timeout=None, abortable=None):
        """Join a communicator that the old ranks make by `grow` (`ncclCommGrow`, NCCL 2.29); each new rank calls it.

        Parameters
        ----------
        nranks, rank, unique_id, device, config, timeout, abortable
            As for `init`; the new ranks are numbered after the old ones.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle self = cls.__new__(cls)
        join_comm(self, nranks, rank, unique_id, device, config, timeout, abortable)
        return self

    def grow_id(self):
        """Return the `UniqueId` by which new ranks join, on one rank of this communicator (`ncclCommGetUniqueId`)."""
        return grow_id_of(self)

    @property
    def handle(self):
        """The `ncclComm_t` as an int, for `ncclpy.bindings` and other libraries.

        If NCCL is still making the communicator, this may wait for it. After `abort` or `close` this raises.
        """
        if self.raw == NULL:
            check_alive(self)
        return <uintptr_t>self.raw

    @property
    def closed(self):
        """Whether the communicator was closed or aborted."""
        return is_over(self.state)

    @property
    def timeout(self):
        """The seconds that any wait may take, or None."""
        return None if self.limit == FOREVER else self.limit

    def async_error(self):
        """Return NCCL's present `Result` for this communicator (`ncclCommGetAsyncError`).

        Once another of its ranks in this process was aborted, `Result.REMOTE_ERROR` stands for `Result.SUCCESS`: an
        operation that has ended since may have wrong data, which NCCL does not report.
        """
        cdef ncclResult_t result
        if self.state not in (READY, INITIALISING, FINALIZED, SUSPENDED):
            check_alive(self)
        require(<void*>nccl.ncclCommGetAsyncError, b"ncclCommGetAsyncError")
        with nogil:
            result = poll_once(self)
        if <int>result < 0:
            check_alive(self)
        if result == ncclSuccess and self.fenced:
            return Result.REMOTE_ERROR
        try:
            return Result(<int>result)
        except ValueError:  # a code of a newer NCCL
            return <int>result

    def is_ready(self):
        """Return whether operations may be submitted without waiting; raise if the initialisation fails."""
        cdef ncclResult_t result
        if self.state == INITIALISING:
            with nogil:
                result = poll_once(self)
            if result != ncclInProgress:
                finish(self, "initialisation", deadline_after(self.limit))
        return self.state == READY

    def wait_ready(self, timeout=None):
        """Wait until a nonblocking communicator is initialised, and return it.

        Parameters
        ----------
        timeout : float, optional
            Seconds; by default the communicator's own. After that the communicator is aborted and `NcclTimeout`
            raised.
        """
        if self.state == INITIALISING:
            finish(self, "initialisation", deadline_after(self.limit if timeout is None else as_timeout(timeout)))
        check_alive(self)
        return self

    async def ready(self, timeout=None):
        """Wait as `wait_ready` does, without blocking the event loop.

        Parameters
        ----------
        timeout : float, optional
            As for `wait_ready`.
        """
        import asyncio

        pause = 0.0005
        started = now()
        deadline = deadline_after(self.limit if timeout is None else as_timeout(timeout))
        while not self.is_ready() and self.state == INITIALISING:
            if now() >= deadline:
                # An abort may take seconds, for which the event loop must not block.
                error = self.timeout_error("initialisation", now() - started)
                threads = begin_abort(aborted_together(self), "initialisation passed its deadline")
                await asyncio.get_running_loop().run_in_executor(None, _end_abort, threads)
                report_failure(error, False)
                raise error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.01)
        check_alive(self)
        return self

    def finalize(self):
        """Flush what was issued, on all ranks (`ncclCommFinalize`); only `close` or `abort` may follow."""
        call_blocking(self, FINALIZE)
        self.become(FINALIZED)  # no effect if the communicator was aborted meanwhile

    def revoke(self):
        """Stop what is in flight and refuse new work (`ncclCommRevoke`, NCCL 2.28.7); split and shrink still work."""
        before, self.revoked = self.revoked, True  # first: no wait may report a revoked operation as done
        try:
            call_blocking(self, REVOKE)
        except BaseException:
            self.revoked = before
            raise

    def suspend(self):
        """Release the device memory of an idle communicator until `resume` (`ncclCommSuspend`, NCCL 2.29.7).

        All ranks call this. User memory stays as it is: registered buffers, windows with their memory, and signals
        that no rank has waited for yet. Until `resume`, windows, registrations and the communicator can be closed, and
        `abort`, `async_error` and `memory_stats` work. Every other call raises `ValueError` and does not call NCCL,
        which would use the released memory.

        Raises
        ------
        ValueError
            If the communicator has a guard (``timeout=`` or ``abortable=True``): the two share memory, and NCCL
            suspends no communicator that shares memory.
        """
        check_alive(self)
        if self.guard != NULL:
            raise ValueError(
                f"{self!r} shares memory with its guard, which NCCL refuses to suspend; make it without timeout= and "
                "abortable=True, or nonblocking"
            )
        require(<void*>nccl.ncclCommSuspend, b"ncclCommSuspend")
        self.become(SUSPENDED)  # first: no thread may begin an operation meanwhile
        try:
            call_blocking(self, SUSPEND)
        except BaseException:
            self.become(READY)  # no effect if it was aborted
            raise

    def resume(self):
        """Allocate again the memory that `suspend` released (`ncclCommResume`, NCCL 2.29.7); all ranks call this."""
        if self.state != SUSPENDED and self.owned:  # a handle from `from_handle` may have been suspended by its owner
            check_alive(self)
            raise ValueError(f"{self!r} is not suspended")
        call_blocking(self, RESUME)
        self.become(READY)  # no effect if it was aborted meanwhile

    def memory_stats(self):
        """Return the sizes of NCCL's device memory for this communicator (`ncclCommMemStats`, NCCL 2.29.7).

        Returns
        -------
        dict
            ``suspendable``, ``persistent`` and ``total`` in bytes, ``suspended`` as a bool.
        """
        cdef uint64_t value = 0
        cdef ncclCommMemStat_t which
        cdef ncclResult_t result
        if self.state != SUSPENDED:
            check_alive(self)
        require(<void*>nccl.ncclCommMemStats, b"ncclCommMemStats")
        stats = {}
        for number, name in enumerate(("suspendable", "suspended", "persistent", "total")):
            which = <ncclCommMemStat_t><int>number
            result = <ncclResult_t>WAS_ABORTED
            with nogil:
                if self.lock_alive():
                    result = nccl.ncclCommMemStats(self.raw, which, &value)
                    self.unlock()
            self.check_call(result, b"ncclCommMemStats")
            stats[name] = bool(value) if name == "suspended" else value
        return stats

    def abort(self, reason=None, *, timeout=None):
        """End the communicator at once, also while another thread is stuck in one of its calls (`ncclCommAbort`).

        Work in flight ends without a result. An abort is local: other ranks stay in their calls until they abort as
        well. Inside ``ncclpy.group()`` several communicators are aborted together, when the group ends; `reason` and
        `timeout` are then not used.

        Parameters
        ----------
        reason : object, optional
            Why, for the errors of work in flight and of later calls.
        timeout : float, optional
            Seconds to wait for NCCL, 10 by default; past them a `RuntimeWarning` says that the call was left behind in
            its thread.
        """
        abort_now(self, ABORT_DEADLINE if timeout is None else timeout, "abort" if reason is None else _text_of(reason))

    def close(self, timeout=None):
        """Destroy the communicator, its children and resources first (`ncclCommFinalize`, `ncclCommDestroy`).

        This waits for calls of other threads on the communicator and for all issued work; new work is refused
        meanwhile. A communicator that is still initialising is aborted instead, since a close would have to wait for
        ranks that may never join. (Only a child that a nonblocking parent is making is waited for: an abort would end
        the parent too.) A second close does nothing. If a child or a resource cannot be released, the others are
        released nevertheless, and the error is raised at the end.

        NCCL 2.31 and newer end a communicator on all ranks of a machine together. Ranks in one process may
        nevertheless be closed one by one: NCCL ends the first ones when the last one is closed. A close does wait for
        the ranks of other processes.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the work; by default the communicator's own. After that, or if a signal handler raises,
            the communicator is aborted, which ends the work. NCCL may take 3 s more to end the communicator.

        Raises
        ------
        NcclTimeout
            If the work was not done, or NCCL did not end the communicator, in time; the communicator is aborted.
        ValueError
            If a window is used in a group that has not ended yet.
        RuntimeError
            If a signal handler that has interrupted this thread's wait for the communicator calls this; it may call
            `abort` instead.
        """
        close_comm(self, timeout)

    def __enter__(self):
        if self.state not in (DEFERRED, INITIALISING):  # these become ready inside the block
            check_alive(self)
        return self

    def __exit__(self, kind, error, traceback):
        # After an exception abort: a close would wait for other ranks, perhaps without end, and hide the exception.
        if kind is None or not self.owned:
            self.close()
        else:
            self.abort()


def _end_abort(threads):
    end_abort(threads, ABORT_DEADLINE, "initialisation passed its deadline")
