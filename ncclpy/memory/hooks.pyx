"""What allocators' hooks call when segments come and go: C functions, which need no GIL and wait for no lock of ours.

Who frees a segment holds his allocator's lock, and perhaps the GIL, which he cannot give up: to take it again under that
lock could be for ever. So whoever waits here does himself what a segment's leaving takes, and runs no Python; the reaper,
which needs the GIL, is told afterwards. He has no references either: the communicators' doors keep what he comes to see
(`core/tenant.h`).
"""

from libc.stdint cimport uint64_t
from libcpp.vector cimport vector

from ncclpy.abi.locks cimport mutex_unlock
from ncclpy.abi.nccl cimport ncclComm_t
from ncclpy.abi.driver cimport CUstreamCaptureMode
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.device cimport lend_device, take_device_back
from ncclpy.core.handle cimport Handle, lock_within
from ncclpy.core.library cimport abort_preempts, nccl, version_code
from ncclpy.core.ranges cimport Range, deregister_all
from ncclpy.core.state cimport ABORTED
from ncclpy.core.tenant cimport Tenant, ends, enter_door, leave_door
from ncclpy.core.wait cimport name_this_thread, now, pause
from ncclpy.memory.residency cimport has_been_ended, open_registry, segments
from ncclpy.memory.segments cimport (
    ADDED,
    GONE,
    HAS_ENDED,
    IS_ENDING,
    LEFT_BEHIND,
    NOT_ENDED,
    OVERLAPS,
    Resident,
    free_resident,
)

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
    """Abort communicators as `core/abort` does: their guards first, which gets threads out, and then themselves."""
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
    for i in range(endings.residents.size()):  # before the group begins, as in `core/abort`
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
    the host engine's (see `core/abort`).
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
