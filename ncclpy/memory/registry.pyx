"""The registry of segments, and the hooks of allocators that fill it.

Who frees a segment holds his allocator's lock, and perhaps the GIL, which he cannot give up: to take it again under that
lock could be for ever. So whoever waits here does himself what a segment's leaving takes, and runs no Python; the reaper,
which needs the GIL, is told afterwards. He has no references either: the communicators' doors keep what he comes to see
(`core/handles/tenant.h`).
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t
from libcpp.vector cimport vector

from ncclpy.abi.driver cimport CUstreamCaptureMode
from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t
from ncclpy.core.runtime.device cimport as_device, lend_device, relax, restore, take_device_back
from ncclpy.core.handles.handle cimport Handle, Tenant, ends, enter_door, leave_door, lock_within
from ncclpy.core.runtime.library cimport abort_preempts, nccl, version_code
from ncclpy.core.handles.state cimport ABORTED, Range, deregister_all
from ncclpy.core.runtime.wait cimport as_timeout, deadline_after, name_this_thread, now, pause
from ncclpy.memory.residency cimport (
    Tenancy, enlist, has_been_ended, open_registry, segments, taking_part, visit_all, wake_reaper,
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
        cdef Tenancy tenancy = handle.tenancy
        return [] if tenancy is None or tenancy.left else _seen(tenancy.resident, None)

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
      bool flagged;
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
        bint flagged
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
        if enter_door(resident.door):
            _let_out(resident)
            leave_door(resident.door)
        elif resident.ending.load() == NOT_ENDED:
            lent = lend_device(resident.device)
            segments.let_out_dropped(resident[0], number)
            if lent:
                take_device_back()
        free_resident(resident)


cdef void _let_out(Resident* resident) noexcept nogil:
    cdef void* handle = resident.door.behind
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
        ends(<Tenant*>endings.residents[i])  # from here on it is so: without this thread nobody would abort them
    has_been_ended()
    lent = lend_device(endings.residents[0].device)
    for i in range(endings.residents.size()):
        raws[0][i] = _guard_of(endings.residents[i])
    _abort_raws(raws[0], endings.grouped)
    for i in range(endings.residents.size()):
        raws[0][i] = _raw_of(endings.residents[i], until, &endings.taken[i])
    for i in range(endings.residents.size()):  # before the group begins, as in `core/handles/abort`
        deregister_all(raws[0][i], <Range*>endings.taken[i].ranges, endings.taken[i].count, endings.taken[i].flagged)
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
    if enter_door(resident.door):
        guard = (<Handle>resident.door.behind).guard_now(True)
        if guard != NULL:
            (<Handle>resident.door.behind).flagged = True
        leave_door(resident.door)
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
    while enter_door(resident.door):  # again each time: who frees the handle waits for those within
        handle = resident.door.behind
        locked = lock_within(&(<Handle>handle).mutex, 0)
        if locked or now() >= until:
            if locked or abort_preempts or (<Handle>handle).nonblocking:
                raw = (<Handle>handle).take_raw()
                resident.ending.store(IS_ENDING if raw != NULL else NOT_ENDED)
                if raw != NULL and locked and not abort_preempts and (<Handle>handle).apart:
                    taken.ranges = (<Handle>handle).ranges.take_all(&taken.count)
                    taken.flagged = (<Handle>handle).flagged
            else:
                resident.ending.store(LEFT_BEHIND)
            if locked:
                mutex_unlock(&(<Handle>handle).mutex)
            leave_door(resident.door)
            return raw
        leave_door(resident.door)
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
