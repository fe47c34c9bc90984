"""The registry of segments, as users see it: memory that NCCL is to know, on each communicator of its device."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t
from libcpp.vector cimport vector

from ncclpy.core.device cimport as_device
from ncclpy.core.handle cimport Handle
from ncclpy.core.wait cimport as_timeout, deadline_after, now, pause
from ncclpy.memory.residency cimport Tenancy, enlist, open_registry, segments, taking_part, visit_all, wake_reaper
from ncclpy.memory.segments cimport GONE, REFUSALS, UNKNOWN, Counters, Resident, Segment

from ncclpy.core.errors import NcclTimeout, not_copied
from ncclpy.core.types import Result, as_integer

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
