"""The ways to make a communicator: of a new clique, or out of one that exists."""

import hashlib
import sys
from importlib import import_module as _import_module

from libc.stdint cimport uintptr_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from ncclpy.abi.nccl cimport ncclComm_t, ncclResult_t, ncclUniqueId
from ncclpy.core cimport overdue as _overdue
from ncclpy.core.abort cimport READY, leave
from ncclpy.core.check cimport check
from ncclpy.core.device cimport as_device, context_of
from ncclpy.core.handle cimport WAS_ABORTED
from ncclpy.core.library cimport nccl, require
from ncclpy.core.lifecycle cimport Lifecycle
from ncclpy.core.operation cimport GROW, INIT_RANK, SHRINK, SPLIT, Operation
from ncclpy.core.submit cimport give_birth

from ncclpy.core import device as _device
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


#: How many communicators `from_env` was asked for: all ranks count alike, and so name the keys of one.
cdef int _from_env = 0


cdef object _exchange(object place, object store, object timeout):
    """Return the id that rank 0 makes."""
    global _from_env
    _from_env += 1
    name = f"ncclpy/communicator-{_from_env}"
    if place.rank == 0:
        store.set(name, bytes(get_unique_id()))
    # Before NCCL, which could not say as well who is absent.
    store.barrier(name, place.rank, place.size, timeout)
    return store.get(name, timeout)


cdef object _device_of(object place):
    """Return the device of the process that this is on its machine."""
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


cdef class Creation(Lifecycle):
    """Make communicators; `Communicator` is the class to use."""

    @classmethod
    def init(cls, nranks, rank, unique_id, *, device=None, config=None, timeout=None, abortable=None):
        """Make this rank's communicator of a new clique (`ncclCommInitRankConfig`).

        It returns when all ranks have joined, unless ``config.blocking`` is False. Inside ``ncclpy.group()`` it
        returns at once, and the communicator is ready when the group ends; that is how one thread makes several.

        Parameters
        ----------
        nranks : int
            The number of ranks.
        rank : int
            This rank, from 0 to ``nranks - 1``.
        unique_id : UniqueId or bytes
            What `get_unique_id` gave to one of the ranks.
        device : int, optional
            The device's ordinal; the current device by default. Each rank has its own.
        config : Config, optional
            NCCL's configuration.
        timeout : float, optional
            Seconds that any wait of this communicator may take, initialisation first. Past it the communicator is
            aborted and `NcclTimeout` raised. By default NCCL waits for as long as it takes. All ranks pass a timeout,
            though not the same, or none: to keep it the communicator gets a guard, as ``abortable`` says.
        abortable : bool, optional
            Whether every call and operation can be ended at any time, by `abort` or Ctrl-C; a timeout implies it. The
            communicator is then split from a second one, its guard: calls cost what they cost without, initialising
            about twice as much, and a GPU some 130 MiB of memory. All ranks pass the same. False by default; children
            do as their parent. (NCCL before 2.18 has no guards: there NCCL runs nonblocking underneath, which costs a
            thread hop a call.)

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
        cdef Creation self = cls.__new__(cls)
        cdef Operation operation
        nranks, rank = _as_place(nranks, rank)
        self.device = as_device(device)
        self.conceive(config, timeout, abortable, None)
        _as_unique_id(unique_id, &self.cradle.birth.id)
        self.group_name = _name_of(unique_id)
        self.rank = self.cradle.birth.rank = rank
        self.nranks = self.cradle.birth.nranks = nranks
        if _overdue.listener is not None:
            _overdue.listener.named(self)
        self.cradle.birth.context = context_of(self.device)
        memset(&operation, 0, sizeof(operation))
        operation.kind = INIT_RANK
        operation.birth = self.cradle.birth
        give_birth(None, self, &operation)
        return self

    @classmethod
    def from_env(cls, *, device=None, config=None, timeout=None, abortable=None):
        """Make this process's communicator with all that the same launcher has started.

        Rank and number of ranks come from the launcher's variables (``ncclpy run``, torchrun, mpirun or srun; see
        `ncclpy.bootstrap.environment`), and the id through the store at which these processes meet
        (`ncclpy.bootstrap.rendezvous`). All of them call it, any number of times, each time for a new clique.

        Parameters
        ----------
        device : int, optional
            The device's ordinal. By default this process's number on its machine, or the only device that it sees.
        config : Config, optional
            As in `init`.
        timeout : float, optional
            Seconds for the processes to meet, 300 by default; and as in `init`.
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
            If what the launcher says is not enough, or contradicts itself; or there are too few devices.
        NcclTimeout
            If not all processes have come in time; the message says which.
        """
        # A floor above: found by its name, when the first process asks.
        place, store = _import_module("ncclpy.bootstrap").rendezvous(timeout)
        if device is None:
            device = _device_of(place)
        unique_id = _exchange(place, store, timeout)
        return cls.init(
            place.size, place.rank, unique_id, device=device, config=config, timeout=timeout, abortable=abortable
        )

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
        if isinstance(devices, int):
            raise TypeError(f"devices: pass the ordinals, not their number: range({devices}), say")
        devices = list(range(_device.device_count()) if devices is None else devices)
        if not devices:
            raise ValueError("devices: at least one is needed")
        unique_id = get_unique_id()
        made = []
        options = {"config": config, "timeout": timeout, "abortable": abortable}
        try:
            with Group():
                for rank, device in enumerate(devices):
                    made.append(cls.init(len(devices), rank, unique_id, device=device, **options))
        except BaseException as error:
            leave(made, "init_all did not make them all", error)  # nobody else has them
            raise
        return made

    @classmethod
    def from_handle(cls, pointer):
        """Wrap an `ncclComm_t` that somebody else owns; `close` lets go of it and destroys nothing.

        Parameters
        ----------
        pointer : int
            The handle; it must outlive the returned object.
        """
        cdef Creation self = cls.__new__(cls)
        cdef uintptr_t address = as_integer(pointer, "pointer", 0, _MAX_ADDRESS)
        if address == 0:
            raise ValueError("pointer: NULL is no communicator")
        frame = sys._getframe(0)
        self.site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.raw = <ncclComm_t>address
        self.owned = False
        self._ask_who()
        self.state = READY
        return self

    def split(self, color, key=0, *, config=None, timeout=None, abortable=None):
        """Divide the ranks into new communicators by colour (`ncclCommSplit`, NCCL 2.18); all ranks call it.

        Parameters
        ----------
        color : int or None
            Ranks of one colour come together. None, or NCCL's own -1: this rank joins none.
        key : int
            Orders the ranks of the new communicator; ties keep the old order.
        config : Config, optional
            For the new communicator; it inherits this one's by default.
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
        cdef Operation operation
        cdef int number = -1 if color is None else as_integer(color, "color")
        cdef int order = as_integer(key, "key")
        if number < -1:
            raise ValueError(f"color: expected an int >= 0, or None to join no communicator, got {color}")
        self.check_alive()
        child.conceive(config, timeout, abortable, self)
        child.cradle.birth.color = number
        child.group_name = self.name_next(f".{number}")
        child.cradle.birth.key = order
        memset(&operation, 0, sizeof(operation))
        operation.kind = SPLIT
        operation.birth = child.cradle.birth
        if number < 0:
            child.nranks = 0  # see born()
        give_birth(self, child, &operation)
        return child if number >= 0 else None

    def shrink(self, exclude, *, bint abort=False, config=None, timeout=None, abortable=None):
        """Make a communicator without some ranks (`ncclCommShrink`, NCCL 2.27); the ranks that stay call it.

        Parameters
        ----------
        exclude : iterable of int
            The ranks that leave.
        abort : bool
            First end what still runs on this communicator (`NCCL_SHRINK_ABORT`), say because a rank has failed.
        config, timeout, abortable
            As for `split`.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        cdef Operation operation
        cdef size_t i
        if isinstance(exclude, int):
            raise TypeError(f"exclude: pass the ranks that leave in a list: [{exclude}]")
        ranks = sorted({as_integer(rank, "exclude") for rank in exclude})
        self.check_alive()
        if not ranks:
            raise ValueError("exclude: at least one rank must leave")
        if ranks[0] < 0 or ranks[-1] >= self.nranks:
            raise ValueError(f"exclude: {ranks} names ranks outside 0..{self.nranks - 1}")
        if self.rank in ranks:
            raise ValueError(f"exclude: rank {self.rank} leaves and must not call shrink")
        child.conceive(config, timeout, abortable, self)
        child.cradle.birth.exclude = <int*>malloc(len(ranks) * sizeof(int))
        if child.cradle.birth.exclude == NULL:
            raise MemoryError
        for i, rank in enumerate(ranks):
            child.cradle.birth.exclude[i] = rank
        child.cradle.birth.nexclude = len(ranks)
        child.group_name = self.name_next("-")
        child.cradle.birth.flags = 1 if abort else 0
        memset(&operation, 0, sizeof(operation))
        operation.kind = SHRINK
        operation.birth = child.cradle.birth
        give_birth(self, child, &operation)
        return child

    def grow(self, nranks, unique_id=None, *, config=None, timeout=None, abortable=None):
        """Make a larger communicator of these ranks and new ones (`ncclCommGrow`, NCCL 2.29); all old ranks call it.

        Parameters
        ----------
        nranks : int
            The number of ranks of the new communicator.
        unique_id : UniqueId, optional
            What `grow_id` gave, on the rank that called it; None on the other old ranks. New ranks call
            `Communicator.join` with it.
        config, timeout, abortable
            As for `split`.

        Returns
        -------
        Communicator
        """
        cdef Lifecycle child = type(self).__new__(type(self))
        self.check_alive()
        nranks = as_integer(nranks, "nranks")
        if nranks <= self.nranks:
            raise ValueError(f"nranks: {nranks} is not more than the {self.nranks} ranks there are")
        child.conceive(config, timeout, abortable, self)
        child.group_name = self.name_next("+")
        return _grow(self, child, nranks, -1, unique_id)

    @classmethod
    def join(cls, nranks, rank, unique_id, *, device=None, config=None, timeout=None, abortable=None):
        """Join a communicator that others `grow` (`ncclCommGrow`, NCCL 2.29); each new rank calls it.

        Parameters
        ----------
        nranks, rank, unique_id, device, config, timeout, abortable
            As for `init`; the new ranks are numbered after the old ones.

        Returns
        -------
        Communicator
        """
        cdef Creation self = cls.__new__(cls)
        nranks, rank = _as_place(nranks, rank)
        self.device = as_device(device)
        self.conceive(config, timeout, abortable, None)
        self.cradle.birth.context = context_of(self.device)
        if unique_id is not None:
            self.group_name = _name_of(unique_id)
        return _grow(None, self, nranks, rank, unique_id)

    def grow_id(self):
        """Return the `UniqueId` by which new ranks join, on one rank of this communicator (`ncclCommGetUniqueId`)."""
        cdef ncclUniqueId raw
        cdef ncclResult_t result = <ncclResult_t>WAS_ABORTED
        self.check_alive()
        require(<void*>nccl.ncclCommGetUniqueId, b"ncclCommGetUniqueId")
        with nogil:
            if self.lock_alive():
                result = nccl.ncclCommGetUniqueId(self.raw, &raw)
                self.unlock()
        self.check_call(result, b"ncclCommGetUniqueId")
        return UniqueId(raw.internal[:128])


cdef object _grow(Lifecycle parent, Lifecycle child, int nranks, int rank, object unique_id):
    cdef Operation operation
    child.cradle.birth.nranks = nranks
    child.cradle.birth.rank = rank
    child.cradle.birth.has_id = unique_id is not None
    if unique_id is not None:
        _as_unique_id(unique_id, &child.cradle.birth.id)
    elif parent is None:
        raise TypeError("unique_id: a rank that joins needs it")
    memset(&operation, 0, sizeof(operation))
    operation.kind = GROW
    operation.birth = child.cradle.birth
    give_birth(parent, child, &operation)
    return child
