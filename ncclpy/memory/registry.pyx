"""The registry of segments: the hooks of allocators that fill it, and allocations from NCCL's allocator.

A thread that frees a segment holds its allocator's lock, and perhaps the GIL, which it must not release: taking the
GIL again under that lock could deadlock. So a thread that waits in `take_out` deregisters the segment and aborts
communicators by itself, without Python; only afterwards it informs the reaper thread, which takes the GIL. It has no
references of Python either: pins of the communicators' weak handles (`core/handles/precall_hook.h`) keep the objects
that it uses.

A framework's allocator asks for segments under a lock of its own, perhaps without the GIL, and gives them back in the
same way. So no Python runs in `ncclpy_segment_alloc` and `ncclpy_segment_free`, and they wait for no communicator: a
new segment is registered by each communicator's next call, and the reaper deregisters and frees one that is given
back.
"""

import importlib
import itertools
import math
import operator

import numpy as np

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t
from libcpp.vector cimport vector

from ncclpy.abi.driver cimport (
    CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_STATUS_NONE, CUcontext, CUevent, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus,
)
from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t, ncclInvalidUsage, ncclResult_t, ncclSuccess
from ncclpy.core.arguments.buffers cimport Buffer
from ncclpy.core.handles.handle cimport Handle, PreCallHook, lock_within, pin_handle, set_hook_aborting, unpin_handle
from ncclpy.core.handles.state cimport ABORTED, Range, deregister_all
from ncclpy.core.runtime.device cimport (
    as_device, context_of, lend_device, relax, restore, switch_back, switch_device, take_device_back,
)
from ncclpy.core.runtime.library cimport abort_preempts, check, driver, host_engine, nccl, require, version_code
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after, name_this_thread, now, pause
from ncclpy.memory.comm_segments cimport (
    HookKeeper, add_foreign, check_added, free_some, open_registry, remove_foreign, remove_owned, report_endings, segments,
    taking_part, visit_all, wake_reaper,
)
from ncclpy.memory.segments cimport (
    ADDED, GONE, HAS_ENDED, IS_ENDING, LEFT_BEHIND, NOT_ENDED, OVERLAPS, REFUSALS, UNKNOWN, Counters, CommSegments,
    Segment, free_member,
)

from ncclpy.errors import NcclTimeout, not_copied
from ncclpy.types import Result, as_integer


# The highest address, and the largest size.
cdef object _MAX_ADDRESS = 2**64 - 1


class SegmentRegistry:
    """Memory that is registered on every communicator of its device, present and future.

    There is one registry for each process, `SegmentRegistry.default`; `memory.alloc` and pools put their segments
    there, and `add` adds memory that others allocate. A communicator registers new segments in its next call
    (`ncclCommRegister`), so `add` waits for no communicator; a close deregisters them, and an abort drops them.
    """

    def __init__(self):
        raise TypeError("there is one registry in a process: use SegmentRegistry.default()")

    @staticmethod
    def default():
        """Return this process's registry; from the first call on communicators take part in it.

        Raises
        ------
        NcclUnsupported
            If NCCL has no registration (before 2.19).
        """
        open_registry()
        return _default

    def add(self, pointer, nbytes, device=None):
        """Have a segment registered by each communicator of its device, in the communicator's next call.

        Parameters
        ----------
        pointer, nbytes : int
            Where the segment begins, and its size in bytes. Segments are disjoint.
        device : int, optional
            The ordinal of its device; the current one by default.

        Raises
        ------
        ValueError
            If it overlaps a segment that is in the registry, begins at NULL, or reaches beyond the end of memory.
        """
        cdef uintptr_t base = _address(pointer)
        cdef size_t size = as_integer(nbytes, "nbytes", 1, _MAX_ADDRESS)
        if base + size < base:
            raise ValueError(f"nbytes: {size} bytes at {base:#x} reach beyond the end of memory")
        add_foreign(base, size, as_device(device))

    def remove(self, pointer, *, timeout=10.0):
        """Take a segment away. When this returns no communicator has it registered, and none of them uses it.

        It waits for the calls that each communicator has made until now, and for nothing else on the device. For a
        communicator with a graph that may use the segment, it waits until that communicator ends.

        Parameters
        ----------
        pointer : int
            Where the segment begins.
        timeout : float, optional
            Seconds to wait for communicators. After that the segment still leaves in the background.

        Raises
        ------
        ValueError
            If no segment that was added begins there.
        NcclTimeout
            If a communicator may still use it; then its memory must not be freed yet. The error names communicators
            that have still to deregister a segment; abort them, or call `drain` later.
        """
        cdef uintptr_t base = _address(pointer)
        cdef uint64_t number = 0
        cdef int state
        cdef double started = now(), deadline = deadline_after(as_timeout(timeout))
        with nogil:
            state = segments.remove(base, False, &number)
        if state == UNKNOWN:
            raise ValueError(
                f"pointer: no segment that was added begins at {base:#x} (memory of alloc is freed with its arrays)"
            )
        try:
            while True:
                visit_all(0.0)
                if segments.state(base, number) == GONE:
                    return
                if now() >= deadline:
                    holders = ", ".join(map(repr, taking_part(True)))
                    raise NcclTimeout(
                        f"the segment at {base:#x} was not out of use after {timeout:g} s: {holders or 'a communicator'} "
                        "may still use it, so it must not be freed yet"
                    )
                PyErr_CheckSignals()
                with nogil:
                    pause(now() - started)
        except BaseException:
            wake_reaper()  # the reaper continues
            raise

    def drain(self, timeout=10.0):
        """Wait until all segments that were taken away, and all unreferenced memory of `alloc`, are gone.

        Returns
        -------
        bool
            False if a segment is still leaving after `timeout` seconds.
        """
        cdef double started = now(), deadline = deadline_after(as_timeout(timeout))
        while True:
            visit_all(0.0)
            if not segments.has_leaving():
                return True
            if now() >= deadline:
                return False
            PyErr_CheckSignals()
            with nogil:
                pause(now() - started)

    def segments(self, device=None):
        """Return (pointer, nbytes, device) of all segments, sorted by address; of one device if it is given."""
        return _described(NULL, None if device is None else as_device(device))

    def communicators(self, device=None):
        """Return the communicators that take part, of one device if it is given, in an order that ranks share."""
        number = None if device is None else as_device(device)
        return [comm for comm in taking_part(False) if number is None or comm.device == number]

    def registered(self, comm):
        """Return (pointer, nbytes, device) of the segments that a communicator has registered at present."""
        cdef Handle handle = comm
        cdef HookKeeper hook_keeper = handle.hook_keeper
        return [] if hook_keeper is None or hook_keeper.has_left else _described(hook_keeper.member, None)

    def counters(self):
        """Return counts: of the present state, and of what has happened since the process began.

        Returns
        -------
        dict
            At present: ``segments`` and ``bytes`` in use, ``leaving`` and ``leaving_bytes`` that were taken away and
            may still be used, ``registrations``. Since the process began: how often a segment was ``registered``,
            ``deregistered``, and ``not_freed`` as NCCL refused that; ``refused``, a dict of NCCL's results, with how
            often NCCL has refused a registration by each.
        """
        cdef Counters counters = segments.counters()
        cdef int i
        return {
            "segments": counters.segments, "bytes": counters.bytes,
            "leaving": counters.leaving, "leaving_bytes": counters.leaving_bytes,
            "registrations": counters.registrations,
            "registered": counters.added, "deregistered": counters.dropped, "not_freed": counters.lost,
            "refused": {_result(i): counters.refused[i] for i in range(REFUSALS) if counters.refused[i]},
        }  # fmt: skip

    def __reduce__(self):
        raise not_copied(self, "each process has its own: SegmentRegistry.default()")

    def __repr__(self):
        return "<ncclpy.memory.SegmentRegistry of {segments} segments, {bytes} bytes>".format(**self.counters())


_default = SegmentRegistry.__new__(SegmentRegistry)


cdef object _result(int number):
    try:
        return Result(number).name.lower() if number else "other"  # [0]: results beyond the table, see `Counters`
    except ValueError:
        return str(number)


cdef list _described(const CommSegments* member, object device):
    cdef vector[Segment] seen = segments.live(member)
    cdef size_t i
    return [
        (seen[i].base, seen[i].bytes, seen[i].device)
        for i in range(seen.size())
        if device is None or seen[i].device == device
    ]


cdef uintptr_t _address(object pointer) except? 0:
    cdef uintptr_t base = as_integer(pointer, "pointer", 0, _MAX_ADDRESS)
    if base == 0:
        raise ValueError("pointer: expected the address of memory, got NULL")
    return base


cdef extern from *:
    """
    #include <new>
    #include <thread>

    #include "ncclpy/memory/segments.hpp"
    #include "nccl_abi.h"

    struct ncclpy_taken {
      void* ranges;
      size_t count;
      bool guard_aborted;
    };

    /* Communicators that one thread aborts together, because of one segment. */
    struct ncclpy_endings {
      std::vector<ncclpy::CommSegments*> members;
      std::vector<ncclComm_t> raws;  // of each member: first its guard, later its handle
      bool grouped;
      std::vector<ncclpy_taken> taken;  // what each member has registered
    };

    static bool ncclpy_begin(void (*function)(ncclpy_endings*), ncclpy::CommSegments** members, size_t count, bool grouped) {
      try {
        auto* endings = new ncclpy_endings{{members, members + count}, std::vector<ncclComm_t>(count), grouped,
                                           std::vector<ncclpy_taken>(count)};
        try {
          std::thread(function, endings).detach();
          return true;
        } catch (...) {
          delete endings;
        }
      } catch (...) {
      }
      return false;
    }
    static bool ncclpy_claims(ncclpy::CommSegments* member) {
      int before = ncclpy::CommSegments::not_ended;
      return member->ending.compare_exchange_strong(before, ncclpy::CommSegments::is_ending);
    }
    static void ncclpy_forget(ncclpy_endings* endings) { delete endings; }
    """
    cdef cppclass Taken "ncclpy_taken":
        void* ranges
        size_t count
        bint guard_aborted
    cdef cppclass Endings "ncclpy_endings":
        vector[CommSegments*] members
        vector[ncclComm_t] raws
        bint grouped
        vector[Taken] taken
    bint start_abort "ncclpy_begin"(void (*function)(Endings*) noexcept nogil, CommSegments** members, size_t count, bint grouped) nogil
    bint claim "ncclpy_claims"(CommSegments* member) nogil
    void free_endings "ncclpy_forget"(Endings* endings) nogil

# Seconds that an abort begun here may take. Part of that time it waits for a call that holds a communicator's lock:
# _PATIENCE seconds, or _PREEMPT_PATIENCE on the host engine, where the abort itself makes the call return.
cdef double _ABORT_LIMIT = 10.0
cdef double _PATIENCE = 5.0
cdef double _PREEMPT_PATIENCE = 0.02

# Whether NCCL can abort several communicators in one group.
cdef bint _in_groups = False


cdef int take_in(uintptr_t base, size_t nbytes, int device) noexcept nogil:
    """Have a segment registered by each communicator of its device, in the communicator's next call."""
    cdef uintptr_t other = 0
    cdef size_t other_bytes = 0
    cdef int added
    if segments == NULL:
        return REFUSED
    added = segments.add(base, nbytes, device, False, &other, &other_bytes, 0)
    if added == ADDED:
        return TAKEN_IN
    return KNOWN if added == OVERLAPS and segments.has(base, nbytes, device) else REFUSED


cdef int take_out(uintptr_t base, int device, double timeout) noexcept nogil:
    """Return when no communicator uses a segment; abort those that still do after `timeout` seconds.

    STILL_USED means that a communicator could not be aborted: a thread is stuck inside NCCL, NCCL's own abort does not
    return, or no thread could be started for the abort.
    """
    cdef double started = now(), deadline = started + timeout
    cdef uint64_t number
    cdef int result = OUT_OF_USE
    cdef bint begun = False
    cdef CUstreamCaptureMode mode
    if segments == NULL or nccl.ncclCommDeregister == NULL:  # a forked child has no communicators
        return OUT_OF_USE
    number = segments.give_back(base)
    if number == 0:
        return OUT_OF_USE
    mode = relax()
    while True:
        _deregister_at_holders(number)
        if segments.state(base, number) == GONE:
            break
        if now() >= deadline:
            if result != OUT_OF_USE:
                result = STILL_USED
                break
            result = ENDED
            deadline = now() + _ABORT_LIMIT
        if result == ENDED and not begun:
            begun = _begin_aborts(number, base)  # retried if threads could not be started
        pause(now() - started)
    restore(mode)
    return result


cdef void _deregister_at_holders(uint64_t number) noexcept nogil:
    """Deregister a segment at each holder with finished operations, unless a thread holds the communicator's lock."""
    cdef vector[CommSegments*] holders
    cdef CommSegments* member
    cdef size_t i
    cdef bint lent
    if not segments.holders(number, &holders):
        return
    for i in range(holders.size()):
        member = holders[i]
        if pin_handle(member.weak):
            _deregister_at(member)
            unpin_handle(member.weak)
        elif member.ending.load() == NOT_ENDED:
            lent = lend_device(member.device)
            segments.deregister_dropped(member[0], number)
            if lent:
                take_device_back()
        free_member(member)


cdef void _deregister_at(CommSegments* member) noexcept nogil:
    cdef void* handle = member.weak.target
    cdef bint lent
    if not lock_within(&(<Handle>handle).mutex, 0):
        return
    if (<Handle>handle).raw != NULL and (<Handle>handle).state != ABORTED and member.ending.load() == NOT_ENDED:
        lent = lend_device(member.device)
        segments.deregister_leaving(member[0], <void*>(<Handle>handle).raw)
        if lent:
            take_device_back()
    mutex_unlock(&(<Handle>handle).mutex)


cdef bint _begin_aborts(uint64_t number, uintptr_t base) noexcept nogil:
    """Begin to abort the communicators that hold a segment, in threads that may never end.

    One thread aborts all of them where NCCL can do so in a group, else each has a thread. Return False if memory is
    out or a thread could not be started; the communicators concerned stay unclaimed, for another try.
    """
    cdef vector[CommSegments*] holders
    cdef size_t i, each, nclaimed = 0, given_up = 0
    if not segments.holders(number, &holders):
        return False
    for i in range(holders.size()):
        if claim(holders[i]):
            holders[i].ended_for.store(base)
            holders[nclaimed] = holders[i]  # in place, as memory may be out; the reference is kept
            nclaimed += 1
        else:
            free_member(holders[i])
    each = nclaimed if _in_groups else 1
    i = 0
    while i < nclaimed:
        if not start_abort(_abort, &holders[i], each, each > 1):
            _unclaim(&holders[i], each)
            given_up += each
        i += each
    return given_up == 0


cdef void _unclaim(CommSegments** members, size_t count) noexcept nogil:
    cdef size_t i
    for i in range(count):
        members[i].ending.store(NOT_ENDED)
        free_member(members[i])


cdef void _abort(Endings* endings) noexcept nogil:
    """Abort communicators as `core/handles/abort` does: first the guards, to free stuck threads, then the handles."""
    cdef vector[ncclComm_t]* raws = &endings.raws
    cdef CommSegments* member
    cdef size_t i
    cdef double until = now() + (_PREEMPT_PATIENCE if abort_preempts else _PATIENCE)
    cdef bint lent
    name_this_thread(b"ncclpy-abort")
    relax()
    for i in range(endings.members.size()):
        # From here on they count as aborting: no other thread aborts them.
        set_hook_aborting(<PreCallHook*>endings.members[i])
    report_endings()
    lent = lend_device(endings.members[0].device)
    for i in range(endings.members.size()):
        raws[0][i] = _take_guard(endings.members[i])
    _abort_raws(raws[0], endings.grouped)
    for i in range(endings.members.size()):
        raws[0][i] = _detach(endings.members[i], until, &endings.taken[i])
    for i in range(endings.members.size()):  # before the group begins, as in `core/handles/abort`
        deregister_all(raws[0][i], <Range*>endings.taken[i].ranges, endings.taken[i].count, endings.taken[i].guard_aborted)
    _abort_raws(raws[0], endings.grouped)
    for i in range(endings.members.size()):
        member = endings.members[i]
        if raws[0][i] != NULL:
            segments.leave(member)
            member.ending.store(HAS_ENDED)
        free_member(member)
    if lent:
        take_device_back()
    free_endings(endings)
    report_endings()


cdef ncclComm_t _take_guard(CommSegments* member) noexcept nogil:
    cdef ncclComm_t guard = NULL
    if pin_handle(member.weak):
        guard = (<Handle>member.weak.target).guard_handle(True)
        if guard != NULL:
            (<Handle>member.weak.target).guard_aborted = True
        unpin_handle(member.weak)
    return guard


cdef ncclComm_t _detach(CommSegments* member, double until, Taken* taken) noexcept nogil:
    """Detach and return the communicator's handle, to be aborted.

    Return NULL if another thread has detached or freed it, or if a call is stuck that no abort can make return.

    In `taken` return what NCCL must deregister before the abort: nothing if a call still holds the lock, if the abort
    does not free the communicator, or on the host engine (see `core/handles/abort`).
    """
    cdef ncclComm_t raw = NULL
    cdef double started = now()
    cdef bint locked = False
    cdef void* handle
    while pin_handle(member.weak):  # pinned anew each time: the thread that frees the handle waits for the pins
        handle = member.weak.target
        locked = lock_within(&(<Handle>handle).mutex, 0)
        if locked or now() >= until:
            if locked or abort_preempts or (<Handle>handle).nonblocking:
                raw = (<Handle>handle).detach_handle()
                member.ending.store(IS_ENDING if raw != NULL else NOT_ENDED)
                if raw != NULL and locked and not abort_preempts and (<Handle>handle).freed_by_own_abort:
                    taken.ranges = (<Handle>handle).registrations.take_all(&taken.count)
                    taken.guard_aborted = (<Handle>handle).guard_aborted
            else:
                member.ending.store(LEFT_BEHIND)
            if locked:
                mutex_unlock(&(<Handle>handle).mutex)
            unpin_handle(member.weak)
            return raw
        unpin_handle(member.weak)
        pause(now() - started)
    member.ending.store(NOT_ENDED)
    return NULL


cdef void _abort_raws(const vector[ncclComm_t]& raws, bint grouped) noexcept nogil:
    cdef size_t i
    if nccl.ncclCommAbort == NULL:
        return
    if grouped:
        nccl.ncclGroupStart()
    for i in range(raws.size()):
        if raws[i] != NULL:
            nccl.ncclCommAbort(raws[i])
    if grouped:
        nccl.ncclGroupEnd()


def hook_functions():
    """Return the addresses of the functions for allocators' hooks, and open the registry.

    Returns
    -------
    tuple of int
        ``int take_in(uintptr_t base, size_t nbytes, int device)``, which returns 0, 1 if exactly this segment, or
        memory of ncclpy's own that contains it, is there already, or 2 if it overlaps another or memory is out; and
        ``int take_out(uintptr_t base, int device, double timeout)``, which waits until no communicator uses the segment
        (`ncclCommDeregister`) and returns 0, 1 if communicators were aborted for that, or -1 if one could not be
        aborted: then the memory must not be freed.

    Raises
    ------
    NcclUnsupported
        If NCCL has no registration (before 2.19).
    """
    global _in_groups
    open_registry()
    _in_groups = version_code() >= 22200
    return <uintptr_t>&take_in, <uintptr_t>&take_out


cdef tuple _FRAMEWORKS = ("torch", "cupy", "numpy")


cdef class _Block:
    """Memory that is freed after its last reference, once each communicator that may use it has deregistered it."""

    cdef uintptr_t pointer

    def __dealloc__(self):
        if self.pointer != 0:
            with nogil:
                remove_owned(self.pointer)


cdef class Allocation(Buffer):
    """Allocation()
--

Memory of NCCL's allocator (`ncclMemAlloc`), registered on every communicator of its device.

    `memory.alloc` makes it. Arrays over it keep it alive: it is freed when neither this object nor an array or buffer
    refers to it any more, and when the communicators' calls until then are done. So it can be dropped at any time; but
    other kernels that use it must be done, as with any memory.

    It is a `Buffer` of bytes, which communicators accept as it is; `numpy.asarray` (host engine),
    ``torch.from_dlpack``, ``cupy.from_dlpack`` and ``__cuda_array_interface__`` read it without a copy, and `buffer`
    gives it another data type.
    """

    cdef bint address_read  # its address was read, by a reader that keeps this object
    cdef bint closing  # `close` was called; after `address_read` the memory stays as long as this object
    cdef object __weakref__

    def __init__(self):
        raise TypeError("Allocation(...) makes none: use memory.alloc(nbytes) or memory.empty(shape, dtype)")

    @property
    def pointer(self):
        """The address of the first byte."""
        return self._open_block().pointer

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.closing

    def buffer(self, dtype="uint8", count=None, offset=0):
        """Return a part of it as a `Buffer`, which keeps the memory alive.

        Parameters
        ----------
        dtype : DataType, str or numpy.dtype
            The data type.
        count : int, optional
            The number of elements; as many as there is space for by default.
        offset : int
            Where it begins, in bytes.
        """
        cdef _Block block = self._open_block()
        itemsize = Buffer(block.pointer, 1, dtype).nbytes
        offset = operator.index(offset)
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"offset: {offset} is outside of {self!r}")
        available = (self.nbytes - offset) // itemsize
        count = available if count is None else operator.index(count)
        if not 0 <= count <= available:
            raise ValueError(
                f"count: {count} elements of {itemsize} bytes at offset {offset} do not fit into {self!r}"
            )
        return Buffer(block.pointer + offset, count, dtype, device=self.device, owner=block)

    cdef int fill(self, _Block block, size_t nbytes, int device) except -1:
        Buffer.__init__(self, block.pointer, nbytes, "uint8", device=device, owner=block)
        return 0

    cdef _Block _open_block(self):
        if self.closing:
            raise ValueError("this allocation is closed; arrays made from it before stay valid")
        return <_Block>self.owner

    def close(self):
        """Drop this object's reference; a second call does nothing. The memory is freed with the last array over it.

        A plan, or an open group that has not launched yet, refers to this object alone: close it after them. If
        `__cuda_array_interface__` was read, the memory also stays as long as this object.
        """
        self.closing = True
        self.view.pointer = NULL
        if not self.address_read:
            self.owner = None

    def __array__(self, dtype=None, copy=None):
        return self.buffer().__array__(dtype, copy)

    @property
    def __cuda_array_interface__(self):
        """What CuPy, numba and others read for GPU memory; CPU memory has none."""
        described = self.buffer().__cuda_array_interface__
        self.address_read = True  # the reader keeps the object that it has read
        return described

    def __dlpack__(self, **options):
        """Return a DLPack capsule of the bytes."""
        return self.buffer().__dlpack__(**options)

    def __dlpack_device__(self):
        """Return the type and the ordinal of the device for DLPack."""
        return self.buffer().__dlpack_device__()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        raise not_copied(self, "send the contents, or make one in each process with memory.alloc()")

    def __repr__(self):
        where = "closed" if self.closing else f"at {<uintptr_t>self.view.pointer:#x}"
        return f"<ncclpy.memory.Allocation of {self.nbytes} bytes on device {self.device}, {where}>"


def alloc(nbytes, device=None):
    """Allocate memory that each communicator of the device registers (`ncclMemAlloc`).

    Parameters
    ----------
    nbytes : int
        Size in bytes, at least 1. On GPUs NCCL takes whole pages of 2 MiB.
    device : int, optional
        The ordinal; the current device by default.

    Returns
    -------
    Allocation

    Raises
    ------
    NcclError
        If memory is out.
    NcclUnsupported
        Before NCCL 2.19.
    """
    cdef Allocation made = Allocation.__new__(Allocation)
    cdef _Block block = _Block()
    number = as_integer(nbytes, "nbytes", 1, (1 << 62) - 1)
    ordinal = as_device(device)
    block.pointer = new_segment(number, ordinal)
    made.fill(block, number, ordinal)
    return made


def empty(shape, dtype="float32", *, device=None, framework=None):
    """Return an array over new memory of `alloc`; the memory is freed with the last array over it.

    Parameters
    ----------
    shape : int or sequence of int
        Its shape.
    dtype : DataType, str or numpy.dtype
        Its data type.
    device : int, optional
        The ordinal; the current device by default.
    framework : {"torch", "cupy", "numpy"}, optional
        The framework of the array: by default numpy on the host engine, torch on GPUs.

    Returns
    -------
    array
        Not initialised.
    """
    lengths = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(map(operator.index, shape))
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape: {lengths} has a negative length")
    if framework is None:
        framework = "numpy" if host_engine else "torch"
    if framework not in _FRAMEWORKS:
        raise ValueError(f"framework: {framework!r} is none of {', '.join(map(repr, _FRAMEWORKS))}")
    count = math.prod(lengths)
    itemsize = Buffer(1, 1, dtype).nbytes
    buffer = alloc(max(1, count * itemsize), device).buffer(dtype, count)
    array = np.asarray(buffer) if framework == "numpy" else importlib.import_module(framework).from_dlpack(buffer)
    return array.reshape(lengths)


cdef extern from *:
    """
    /* The functions that frameworks look up by name in this library, and the pool that a thread has entered. */
    static void *(*ncclpy_take)(size_t nbytes, int device);
    static void (*ncclpy_give)(void *pointer, int device, void *stream);
    static thread_local uint64_t ncclpy_pool = 0;

    extern "C" __attribute__((visibility("default"))) void *ncclpy_segment_alloc(size_t nbytes, int device, void *) {
      return ncclpy_take(nbytes, device);
    }
    extern "C" __attribute__((visibility("default"))) void ncclpy_segment_free(
        void *pointer, size_t, int device, void *stream) {
      ncclpy_give(pointer, device, stream);
    }
    """
    void* (*ncclpy_take)(size_t, int) noexcept nogil
    void (*ncclpy_give)(void*, int, void*) noexcept nogil
    uint64_t this_pool "ncclpy_pool"
    void* ncclpy_segment_alloc(size_t, int, void*) nogil
    void ncclpy_segment_free(void*, size_t, int, void*) nogil

#: The names of the two functions in this library: ``void *alloc(size_t nbytes, int device, void *stream)``, which
#: returns NULL if memory is out, and ``void free(void *pointer, size_t nbytes, int device, void *stream)``.
ALLOC, FREE = "ncclpy_segment_alloc", "ncclpy_segment_free"
_numbers = itertools.count(1)


cdef int _allocate(
    size_t nbytes, int device, uintptr_t* pointer, int* added, uintptr_t* other, size_t* other_bytes
) noexcept nogil:
    """Allocate memory and add it to the registry. Return NCCL's result, and in `added` that of Segments.add()."""
    cdef void* made = NULL
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    cdef ncclResult_t result
    added[0] = ADDED
    if nccl.ncclMemAlloc == NULL or segments == NULL or not switch_device(device, &saved):
        return ncclInvalidUsage
    mode = relax()
    result = nccl.ncclMemAlloc(&made, nbytes)
    if result != ncclSuccess and segments.has_leaving():  # there may be memory that the reaper has not freed yet
        free_some()
        result = nccl.ncclMemAlloc(&made, nbytes)
    if result == ncclSuccess:
        added[0] = segments.add(<uintptr_t>made, nbytes, device, True, other, other_bytes, this_pool)
        if added[0] != ADDED:
            nccl.ncclMemFree(made)
    restore(mode)
    switch_back(saved)
    pointer[0] = <uintptr_t>made
    return result


cdef uintptr_t new_segment(size_t nbytes, int device) except 0:
    cdef uintptr_t pointer = 0, other = 0
    cdef size_t other_bytes = 0
    cdef int added = ADDED
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    open_registry()
    context_of(device)
    with nogil:
        check(<ncclResult_t>_allocate(nbytes, device, &pointer, &added, &other, &other_bytes), b"ncclMemAlloc", NULL)
    check_added(added, pointer, nbytes, other, other_bytes)
    return pointer


cdef void* _take(size_t nbytes, int device) noexcept nogil:
    cdef uintptr_t pointer = 0, other = 0
    cdef size_t other_bytes = 0
    cdef int added = ADDED
    if _allocate(nbytes if nbytes else 1, device, &pointer, &added, &other, &other_bytes) != ncclSuccess or added != ADDED:
        return NULL
    return <void*>pointer


cdef void _give(void* pointer, int device, void* stream) noexcept nogil:
    """Give a segment to the reaper, to be freed behind the work queued on its allocator's stream, unless the stream is
    being captured. Programs rely on a free that waits for the device, as cudaFree does; ncclMemFree need not wait."""
    cdef CUcontext saved = NULL
    cdef CUevent event = NULL
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUstreamCaptureMode mode
    if pointer == NULL or nccl.ncclMemFree == NULL or segments == NULL:  # NULL functions: in a forked child
        return
    if switch_device(device, &saved):
        mode = relax()
        if (
            driver.cuStreamIsCapturing(<CUstream>stream, &status) == 0
            and status == CU_STREAM_CAPTURE_STATUS_NONE
            and driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == 0
        ):
            if driver.cuEventRecord(event, <CUstream>stream) != 0 or not segments.hold_until(<uintptr_t>pointer, event):
                driver.cuEventDestroy_v2(event)
        restore(mode)
        switch_back(saved)
    segments.remove(<uintptr_t>pointer, True)
    wake_reaper()


ncclpy_take = _take
ncclpy_give = _give


def open_allocator():
    """Prepare what `ALLOC` needs, and return the path of the library that has it."""
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    open_registry()
    context_of(as_device(None))
    return __file__


def addresses():
    """Return the addresses of the functions `ALLOC` and `FREE`."""
    open_allocator()
    return <uintptr_t>&ncclpy_segment_alloc, <uintptr_t>&ncclpy_segment_free


def take(nbytes, device):
    """Return the address of a new segment; `ncclpy_segment_alloc` for allocators written in Python."""
    return new_segment(max(1, nbytes), as_device(device))


def give(uintptr_t pointer, int device, uintptr_t stream=0):
    """Give back what `take` returned, to be freed behind the stream's work; `ncclpy_segment_free` for Python."""
    with nogil:
        _give(<void*>pointer, device, <void*>stream)


def adopt(uintptr_t pointer, size_t nbytes, device):
    """Add memory that others allocate to the registry."""
    add_foreign(pointer, nbytes, as_device(device))


def disown(uintptr_t pointer, callback):
    """Take adopted memory away; call `callback`, perhaps in another thread, when no communicator uses it any more."""
    remove_foreign(pointer, callback)


def new_pool():
    """Return the number of a new pool."""
    return next(_numbers)


def enter_pool(uint64_t pool):
    """Let this thread's allocations belong to a pool from now on, 0 for none; return the pool that it was in."""
    global this_pool
    before = this_pool
    this_pool = pool
    return before


def segments_of(uint64_t pool):
    """Return (number, pointer, nbytes, device) of the live segments of a pool, in order of allocation."""
    cdef vector[Segment] seen
    cdef size_t i
    if segments == NULL:
        return []
    seen = segments.of_pool(pool)
    return [(seen[i].number, seen[i].base, seen[i].bytes, seen[i].device) for i in range(seen.size())]


def check_endable(Handle comm not None, what):
    """Raise if a wait for other ranks on this communicator could not be ended at a deadline."""
    comm.check_endable(what)


cdef class Hold:
    """Keep a segment although its allocator frees it, for a window over it."""

    cdef uintptr_t base
    cdef uint64_t number

    def __init__(self, number, pointer):
        if segments == NULL or not segments.hold(pointer, number):
            raise LookupError(f"the segment at {pointer:#x} is no longer there")
        self.base, self.number = pointer, number

    def __dealloc__(self):
        if self.number != 0 and segments != NULL:
            with nogil:
                segments.let_go(self.base, self.number)
                wake_reaper()
