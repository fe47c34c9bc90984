"""The registry of segments: the hooks of allocators that fill it, and allocations of NCCL's own.

A thread that frees a segment holds its allocator's lock, and perhaps the GIL, which it cannot release: to take it again under
that lock could block for ever. So a thread that waits here does itself what a segment's end takes, and runs no Python; the
reaper thread, which needs the GIL, is told afterwards. It has no references either: the communicators' weak handles keep what it comes to see
(`core/handles/precall_hook.h`).

A framework's allocator asks for segments under a lock of its own, perhaps without the GIL, and gives them back in the same
way. So no Python runs in `ncclpy_segment_alloc` and `ncclpy_segment_free`, and they wait for no communicator: what comes is
registered by each communicator's next call, what goes is seen to by the reaper.
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
from ncclpy.core.handles.handle cimport Handle, PreCallHook, ends, pin_handle, unpin_handle, lock_within
from ncclpy.core.handles.state cimport ABORTED, Range, deregister_all
from ncclpy.core.runtime.device cimport (
    as_device, context_of, lend_device, relax, restore, switch_back, switch_device, take_device_back,
)
from ncclpy.core.runtime.library cimport abort_preempts, check, driver, host_engine, nccl, require, version_code
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after, name_this_thread, now, pause
from ncclpy.memory.residency cimport (
    HookKeeper, check_added, dismiss, enlist, free_some, has_been_ended, open_registry, part, segments, taking_part,
    visit_all, wake_reaper,
)
from ncclpy.memory.segments cimport (
    ADDED, GONE, HAS_ENDED, IS_ENDING, LEFT_BEHIND, NOT_ENDED, OVERLAPS, REFUSALS, UNKNOWN, Counters, Resident,
    Segment, free_resident,
)

from ncclpy.errors import NcclTimeout, not_copied
from ncclpy.types import Result, as_integer


# The highest address, and the largest size.
cdef object _MOST = 2**64 - 1


class SegmentRegistry:
    """Memory that is registered on every communicator of its device, those of today and those made later.

    There is one a process, `SegmentRegistry.default`; `memory.alloc` and pools put their segments there, and `add` those
    of somebody else's. A communicator registers what has come with its next call (`ncclCommRegister`), so nothing here
    waits for one; its close deregisters, and an abort drops what was known of it.
    """

    def __init__(self):
        raise TypeError("there is one registry in a process: use SegmentRegistry.default()")

    @staticmethod
    def default():
        """Return this process's registry; the first call has communicators take part from then on.

        Raises
        ------
        NcclUnsupported
            If NCCL has no registration (before 2.19).
        """
        open_registry()
        return _default

    def add(self, pointer, nbytes, device=None):
        """Have a segment registered, by each communicator of its device with that one's next call.

        Parameters
        ----------
        pointer, nbytes : int
            Where the segment begins, and its size in bytes. Segments are disjoint.
        device : int, optional
            The ordinal of its device; the current one by default.

        Raises
        ------
        ValueError
            If it overlaps a segment that is in the registry.
        """
        cdef uintptr_t base = _address(pointer)
        cdef size_t size = as_integer(nbytes, "nbytes", 1, _MOST)
        if base + size < base:
            raise ValueError(f"nbytes: {size} bytes at {base:#x} reach beyond the end of memory")
        enlist(base, size, as_device(device))

    def remove(self, pointer, *, timeout=10.0):
        """Take a segment away. When this returns no communicator has it registered, and none of them uses it.

        It waits for what each communicator was asked for until now, and for nothing else on the device.

        Parameters
        ----------
        pointer : int
            Where the segment begins.
        timeout : float, optional
            Seconds to wait for communicators. The segment is on its way out all the same when they have passed.

        Raises
        ------
        ValueError
            If no segment begins there that was added.
        NcclTimeout
            If a communicator may still use it; then its memory must not be freed yet. Its communicators are named; abort
            them, or call `drain` later.
        """
        cdef uintptr_t base = _address(pointer)
        cdef uint64_t number = 0
        cdef int state
        cdef double started = now(), deadline = deadline_after(as_timeout(timeout))
        with nogil:
            state = segments.remove(base, False, &number)
        if state == UNKNOWN:
            raise ValueError(f"pointer: no segment that was added begins at {base:#x} (alloc's goes with its arrays)")
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
            wake_reaper()  # the reaper goes on
            raise

    def drain(self, timeout=10.0):
        """Wait until all that was taken away, or is memory of `alloc` that nobody has any more, is gone.

        Returns
        -------
        bool
            False if something is still on its way out after `timeout` seconds.
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
        """Return (pointer, nbytes, device) of all segments, of one device if that is given, by their addresses."""
        return _seen(NULL, None if device is None else as_device(device))

    def communicators(self, device=None):
        """Return the communicators that take part, of one device if that is given, in an order that ranks share."""
        number = None if device is None else as_device(device)
        return [comm for comm in taking_part(False) if number is None or comm.device == number]

    def registered(self, comm):
        """Return (pointer, nbytes, device) of the segments that a communicator has registered at this moment."""
        cdef Handle handle = comm
        cdef HookKeeper hook_keeper = handle.hook_keeper
        return [] if hook_keeper is None or hook_keeper.left else _seen(hook_keeper.resident, None)

    def counters(self):
        """Return what there is, and what there was.

        Returns
        -------
        dict
            ``segments`` and ``bytes`` that are in use, ``leaving`` and ``leaving_bytes`` that were taken away and may
            still be used, ``registrations`` at this moment; since the beginning, how often something was
            ``registered`` and ``deregistered``, ``not_freed`` because NCCL refused to, and ``refused``, a dict of how often
            NCCL has refused to register one, by its result.
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
        return Result(number).name.lower()
    except ValueError:
        return str(number)


cdef list _seen(const Resident* resident, object device):
    cdef vector[Segment] seen = segments.live(resident)
    cdef size_t i
    return [
        (seen[i].base, seen[i].bytes, seen[i].device)
        for i in range(seen.size())
        if device is None or seen[i].device == device
    ]


cdef uintptr_t _address(object pointer) except? 0:
    cdef uintptr_t base = as_integer(pointer, "pointer", 0, _MOST)
    if base == 0:
        raise ValueError("pointer: NULL is no memory")
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

    /* Those that one thread aborts together, for the sake of one segment. */
    struct ncclpy_endings {
      std::vector<ncclpy::Resident*> residents;
      std::vector<ncclComm_t> raws;  // of each its guard first, and then its handle
      bool grouped;
      std::vector<ncclpy_taken> taken;  // of each what it has registered
    };

    static bool ncclpy_begin(void (*function)(ncclpy_endings*), ncclpy::Resident** residents, size_t count, bool grouped) {
      try {
        auto* endings = new ncclpy_endings{{residents, residents + count}, std::vector<ncclComm_t>(count), grouped,
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
    static bool ncclpy_claims(ncclpy::Resident* resident) {
      int before = ncclpy::Resident::not_ended;
      return resident->ending.compare_exchange_strong(before, ncclpy::Resident::is_ending);
    }
    static void ncclpy_forget(ncclpy_endings* endings) { delete endings; }
    """
    cdef cppclass Taken "ncclpy_taken":
        void* ranges
        size_t count
        bint guard_aborted
    cdef cppclass Endings "ncclpy_endings":
        vector[Resident*] residents
        vector[ncclComm_t] raws
        bint grouped
        vector[Taken] taken
    bint begin "ncclpy_begin"(void (*function)(Endings*) noexcept nogil, Resident** some, size_t count, bint grouped) nogil
    bint claims "ncclpy_claims"(Resident* resident) nogil
    void forget "ncclpy_forget"(Endings* endings) nogil

# How long an abort may take that nobody else has begun, and within it, how long it waits for a call that holds a
# communicator's lock: one that may be stuck, and one that its guard's abort or NCCL itself will bring back.
cdef double _ABORT = 10.0
cdef double _PATIENCE = 5.0
cdef double _PREEMPT_PATIENCE = 0.02

# Whether NCCL aborts several communicators in one group.
cdef bint _in_groups = False


cdef int take_in(uintptr_t base, size_t nbytes, int device) noexcept nogil:
    """Have a segment registered by each communicator of its device with that one's next call."""
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
    """Return when no communicator uses a segment; those that do after `timeout` seconds are aborted.

    STILL_USED says that one could not be: a thread is inside NCCL with it, or NCCL's own abort does not return.
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
        _visit(number)
        if segments.state(base, number) == GONE:
            break
        if now() >= deadline:
            if result != OUT_OF_USE:
                result = STILL_USED
                break
            result = ENDED
            deadline = now() + _ABORT
        if result == ENDED and not begun:
            begun = _end(number, base)  # again, where there were no more threads
        pause(now() - started)
    restore(mode)
    return result


cdef void _visit(uint64_t number) noexcept nogil:
    """Go to the communicators that hold a segment, and have it let out where nobody is inside."""
    cdef vector[Resident*] holders
    cdef Resident* resident
    cdef size_t i
    cdef bint lent
    if not segments.holders(number, &holders):
        return
    for i in range(holders.size()):
        resident = holders[i]
        if pin_handle(resident.weak):
            _let_out(resident)
            unpin_handle(resident.weak)
        elif resident.ending.load() == NOT_ENDED:
            lent = lend_device(resident.device)
            segments.let_out_dropped(resident[0], number)
            if lent:
                take_device_back()
        free_resident(resident)


cdef void _let_out(Resident* resident) noexcept nogil:
    cdef void* handle = resident.weak.target
    cdef bint lent
    if not lock_within(&(<Handle>handle).mutex, 0):
        return
    if (<Handle>handle).raw != NULL and (<Handle>handle).state != ABORTED and resident.ending.load() == NOT_ENDED:
        lent = lend_device(resident.device)
        segments.let_out(resident[0], <void*>(<Handle>handle).raw)
        if lent:
            take_device_back()
    mutex_unlock(&(<Handle>handle).mutex)


cdef bint _end(uint64_t number, uintptr_t base) noexcept nogil:
    """Begin to abort the communicators that hold a segment, together, in a thread that may be left behind.

    False if that could not be begun for all of them; those stay as they are, and can be asked for again.
    """
    cdef vector[Resident*] holders
    cdef size_t i, each, ours = 0, given_up = 0
    if not segments.holders(number, &holders):
        return False
    for i in range(holders.size()):
        if claims(holders[i]):
            holders[i].ended_for.store(base)
            holders[ours] = holders[i]  # in place: there may be no memory for another list. This keeps what was kept
            ours += 1
        else:
            free_resident(holders[i])
    each = ours if _in_groups else 1
    i = 0
    while i < ours:
        if not begin(_abort, &holders[i], each, each > 1):
            _give_up(&holders[i], each)
            given_up += each
        i += each
    return given_up == 0


cdef void _give_up(Resident** some, size_t count) noexcept nogil:
    cdef size_t i
    for i in range(count):
        some[i].ending.store(NOT_ENDED)
        free_resident(some[i])


cdef void _abort(Endings* endings) noexcept nogil:
    """Abort communicators as `core/handles/abort` does: their guards first, which gets threads out, and then themselves."""
    cdef vector[ncclComm_t]* raws = &endings.raws
    cdef Resident* resident
    cdef size_t i
    cdef double until = now() + (_PREEMPT_PATIENCE if abort_preempts else _PATIENCE)
    cdef bint lent
    name_this_thread(b"ncclpy-abort")
    relax()
    for i in range(endings.residents.size()):
        ends(<PreCallHook*>endings.residents[i])  # from here on they count as aborting: no other thread would abort them
    has_been_ended()
    lent = lend_device(endings.residents[0].device)
    for i in range(endings.residents.size()):
        raws[0][i] = _guard_of(endings.residents[i])
    _abort_raws(raws[0], endings.grouped)
    for i in range(endings.residents.size()):
        raws[0][i] = _raw_of(endings.residents[i], until, &endings.taken[i])
    for i in range(endings.residents.size()):  # before the group begins, as in `core/handles/abort`
        deregister_all(raws[0][i], <Range*>endings.taken[i].ranges, endings.taken[i].count, endings.taken[i].guard_aborted)
    _abort_raws(raws[0], endings.grouped)
    for i in range(endings.residents.size()):
        resident = endings.residents[i]
        if raws[0][i] != NULL:
            segments.leave(resident)
            resident.ending.store(HAS_ENDED)
        free_resident(resident)
    if lent:
        take_device_back()
    forget(endings)
    has_been_ended()


cdef ncclComm_t _guard_of(Resident* resident) noexcept nogil:
    cdef ncclComm_t guard = NULL
    if pin_handle(resident.weak):
        guard = (<Handle>resident.weak.target).guard_handle(True)
        if guard != NULL:
            (<Handle>resident.weak.target).guard_aborted = True
        unpin_handle(resident.weak)
    return guard


cdef ncclComm_t _raw_of(Resident* resident, double until, Taken* taken) noexcept nogil:
    """Take the handle away; NULL if somebody else has, who ends it then, or a thread is inside that cannot be got out.

    What NCCL is to deregister before it is aborted goes to `taken`; nothing where the abort does not free it, or is
    the host engine's (see `core/handles/abort`).
    """
    cdef ncclComm_t raw = NULL
    cdef double started = now()
    cdef bint locked = False
    cdef void* handle
    while pin_handle(resident.weak):  # pinned anew each time: the thread that frees the handle waits for the pins
        handle = resident.weak.target
        locked = lock_within(&(<Handle>handle).mutex, 0)
        if locked or now() >= until:
            if locked or abort_preempts or (<Handle>handle).nonblocking:
                raw = (<Handle>handle).detach_handle()
                resident.ending.store(IS_ENDING if raw != NULL else NOT_ENDED)
                if raw != NULL and locked and not abort_preempts and (<Handle>handle).frees_alone:
                    taken.ranges = (<Handle>handle).ranges.take_all(&taken.count)
                    taken.guard_aborted = (<Handle>handle).guard_aborted
            else:
                resident.ending.store(LEFT_BEHIND)
            if locked:
                mutex_unlock(&(<Handle>handle).mutex)
            unpin_handle(resident.weak)
            return raw
        unpin_handle(resident.weak)
        pause(now() - started)
    resident.ending.store(NOT_ENDED)
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


def functions():
    """Return the addresses of what hooks call, and open the registry.

    Returns
    -------
    tuple of int
        ``int take_in(uintptr_t base, size_t nbytes, int device)``, which returns 0, 1 if just this segment is there, or 2 if
        it overlaps another or memory has run out; and ``int take_out(uintptr_t base, int device, double timeout)``, which
        waits (`ncclCommDeregister`) and returns 0, 1 if communicators were aborted for that, or -1 if one could not be:
        then the memory must not be freed.

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
    """Memory that is freed with its last reference: first it is taken out of each communicator that may use it."""

    cdef uintptr_t pointer

    def __dealloc__(self):
        if self.pointer != 0:
            with nogil:
                dismiss(self.pointer)


cdef class Allocation(Buffer):
    """Allocation()
--

Memory of NCCL's allocator (`ncclMemAlloc`), registered on every communicator of its device.

    `memory.alloc` makes it. Arrays over it keep it alive: it is freed when neither this object nor an array or buffer has
    it any more, and when what communicators were asked for until then is over. So it can be let go of at any time; what
    other kernels do with it has to be over, as with any memory.

    It is a `Buffer` of bytes, which communicators take as it is; `numpy.asarray` (host engine), ``torch.from_dlpack``,
    ``cupy.from_dlpack`` and ``__cuda_array_interface__`` read it without a copy, and `buffer` gives it another data type.
    """

    cdef bint lent  # its address was read from this object
    cdef bint closing  # closed, or to be closed when what has read its address has let it go
    cdef object __weakref__

    def __init__(self):
        raise TypeError("Allocation(...) makes none: use memory.alloc(nbytes) or memory.empty(shape, dtype)")

    @property
    def pointer(self):
        """The address of the first byte."""
        return self._share().pointer

    @property
    def closed(self):
        """Whether it was given back by `close`."""
        return self.closing

    def buffer(self, dtype="uint8", count=None, offset=0):
        """Return a part of it as a `Buffer`, which keeps the memory alive.

        Parameters
        ----------
        dtype : DataType, str or numpy.dtype
            The data type.
        count : int, optional
            The number of elements; as many as there is room for by default.
        offset : int
            Where it begins, in bytes.
        """
        cdef _Block block = self._share()
        itemsize = Buffer(block.pointer, 1, dtype).nbytes
        offset = operator.index(offset)
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"offset: {offset} is outside of {self!r}")
        room = (self.nbytes - offset) // itemsize
        count = room if count is None else operator.index(count)
        if not 0 <= count <= room:
            raise ValueError(
                f"count: {count} elements of {itemsize} bytes at offset {offset} do not fit into {self!r}"
            )
        return Buffer(block.pointer + offset, count, dtype, device=self.device, owner=block)

    cdef int hold(self, _Block block, size_t nbytes, int device) except -1:
        Buffer.__init__(self, block.pointer, nbytes, "uint8", device=device, owner=block)
        return 0

    cdef _Block _share(self):
        if self.closing:
            raise ValueError("this allocation is closed; arrays made from it before are as good as ever")
        return <_Block>self.owner

    def close(self):
        """Give this object's share back; twice does nothing. The memory goes with the last array that has it.

        A plan or an open group that has it recorded, and not launched yet, has this object alone: close it behind them.
        """
        self.closing = True
        self.view.pointer = NULL
        if not self.lent:
            self.owner = None

    def __array__(self, dtype=None, copy=None):
        return self.buffer().__array__(dtype, copy)

    @property
    def __cuda_array_interface__(self):
        """What CuPy, numba and others read of memory of a GPU; CPU memory has none."""
        described = self.buffer().__cuda_array_interface__
        self.lent = True  # the reader keeps the object that it was read from
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
    """Allocate memory that NCCL can register, of which each communicator of the device is told (`ncclMemAlloc`).

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
        If there is not so much memory.
    NcclUnsupported
        Before NCCL 2.19.
    """
    cdef Allocation made = Allocation.__new__(Allocation)
    cdef _Block block = _Block()
    number = as_integer(nbytes, "nbytes", 1, (1 << 62) - 1)
    ordinal = as_device(device)
    block.pointer = new_segment(number, ordinal)
    made.hold(block, number, ordinal)
    return made


def empty(shape, dtype="float32", *, device=None, framework=None):
    """Return an array over memory that NCCL can register; the memory goes with the last array that has it.

    Parameters
    ----------
    shape : int or sequence of int
        Its shape.
    dtype : DataType, str or numpy.dtype
        Its data type.
    device : int, optional
        The ordinal; the current device by default.
    framework : {"torch", "cupy", "numpy"}, optional
        Whose array it is: numpy's by default on the host engine, torch's on GPUs.

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
    /* What frameworks find by name in this library, and the pool that a thread is in. */
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

#: The names under which this library has the two functions: ``void *alloc(size_t nbytes, int device, void *stream)``, which
#: returns NULL if there is not so much memory, and ``void free(void *pointer, size_t nbytes, int device, void *stream)``.
ALLOC, FREE = "ncclpy_segment_alloc", "ncclpy_segment_free"
_numbers = itertools.count(1)


cdef int _bring(
    size_t nbytes, int device, uintptr_t* pointer, int* added, uintptr_t* other, size_t* other_bytes
) noexcept nogil:
    """Allocate, and enter it into the registry. Returns a result of NCCL's, and in `added` whether it is there."""
    cdef void* made = NULL
    cdef CUcontext saved = NULL
    cdef CUstreamCaptureMode mode
    cdef ncclResult_t result
    added[0] = ADDED
    if nccl.ncclMemAlloc == NULL or segments == NULL or not switch_device(device, &saved):
        return ncclInvalidUsage
    mode = relax()
    result = nccl.ncclMemAlloc(&made, nbytes)
    if result != ncclSuccess and segments.has_leaving():  # the reaper may not have come to it
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
        check(<ncclResult_t>_bring(nbytes, device, &pointer, &added, &other, &other_bytes), b"ncclMemAlloc", NULL)
    check_added(added, pointer, nbytes, other, other_bytes)
    return pointer


cdef void* _take(size_t nbytes, int device) noexcept nogil:
    cdef uintptr_t pointer = 0, other = 0
    cdef size_t other_bytes = 0
    cdef int added = ADDED
    if _bring(nbytes if nbytes else 1, device, &pointer, &added, &other, &other_bytes) != ncclSuccess or added != ADDED:
        return NULL
    return <void*>pointer


cdef void _give(void* pointer, int device, void* stream) noexcept nogil:
    """Hand a segment over to the reaper, behind what its allocator's stream has queued: the program trusts that
    freeing waits for the device, as cudaFree does, and ncclMemFree need not."""
    cdef CUcontext saved = NULL
    cdef CUevent event = NULL
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUstreamCaptureMode mode
    if pointer == NULL or nccl.ncclMemFree == NULL or segments == NULL:  # a forked child has none
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
    """Make ready what `ALLOC` needs, and return the path of the library that has it."""
    require(<void*>nccl.ncclMemAlloc, b"ncclMemAlloc")
    open_registry()
    context_of(as_device(None))
    return __file__


def addresses():
    """Return the addresses of the functions `ALLOC` and `FREE`."""
    open_allocator()
    return <uintptr_t>&ncclpy_segment_alloc, <uintptr_t>&ncclpy_segment_free


def take(nbytes, device):
    """Return the address of a new segment; `ncclpy_segment_alloc` for allocators that are written in Python."""
    return new_segment(max(1, nbytes), as_device(device))


def give(uintptr_t pointer, int device, uintptr_t stream=0):
    """Give back what `take` returned: it is freed behind what the stream has queued; `ncclpy_segment_free`."""
    with nogil:
        _give(<void*>pointer, device, <void*>stream)


def adopt(uintptr_t pointer, size_t nbytes, device):
    """Enter memory of others into the registry."""
    enlist(pointer, nbytes, as_device(device))


def disown(uintptr_t pointer, then):
    """Take it away again; `then` is called when no communicator uses it any more, perhaps in another thread."""
    part(pointer, then)


def new_pool():
    """Return the number of a new pool."""
    return next(_numbers)


def enter_pool(uint64_t pool):
    """Have what this thread allocates from now on belong to a pool, 0 for none; return to which it belonged."""
    global this_pool
    before = this_pool
    this_pool = pool
    return before


def segments_of(uint64_t pool):
    """Return (number, pointer, nbytes, device) of the live segments of a pool, in the order in which they came."""
    cdef vector[Segment] seen
    cdef size_t i
    if segments == NULL:
        return []
    seen = segments.of_pool(pool)
    return [(seen[i].number, seen[i].base, seen[i].bytes, seen[i].device) for i in range(seen.size())]


def check_endable(Handle comm not None, what):
    """Raise if what waits for other ranks could not be ended when time is up."""
    comm.check_endable(what)


cdef class Hold:
    """Have a segment stay, although its allocator frees it: a window is over it."""

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
