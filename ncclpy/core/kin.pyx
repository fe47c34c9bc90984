"""The ranks of one communicator that live in one process, as they end together: see `ending`."""

import os
import time
import weakref

from ncclpy.core.wait cimport now

from ncclpy.core.errors import same_class_as

# What another rank has just completed ends here as well within so many seconds; and between two looks at it.
cdef double _ENDS = 0.01
cdef double _LOOKS = 0.0005

# Both change under the GIL alone, in one step each.
cdef dict _known = {}  # a weak reference to each communicator that was made here, by its address
cdef list _endings = []  # of (handle, call)


cdef int note_kin(Handle handle) except -1:
    key = <size_t><void*>handle

    def gone(reference):
        if _known.get(key) is reference:  # the address may be another's by now
            del _known[key]

    _known[key] = weakref.ref(handle, gone)
    return 0


cdef list kin_of(Handle handle):
    found = []
    if handle.group_name is None:
        return found
    for reference in list(_known.values()):
        other = reference()
        if other is not None and other is not handle and (<Handle>other).group_name == handle.group_name:
            found.append(other)
    return found


cdef int tell_kin(Handle handle) except -1:
    for each in kin_of(handle):
        (<Handle>each).bereft = True
    return 0


cdef object error_of_kin(Handle handle):
    return same_class_as(handle.failed_as or "")(
        f"rank {handle.rank} of the same communicator was aborted, which may end an operation with wrong data: "
        f"{handle.reason}"
    )


cdef int fence_kin(Handle handle) except -1:
    cdef Handle other
    kin = kin_of(handle)
    _let_waits_end(kin)
    for each in kin:
        other = <Handle>each
        if other.abort_of_kin is None:
            other.abort_of_kin = error_of_kin(handle)
        other.fenced = True
    return 0


cdef int _let_waits_end(list handles) except -1:
    """See which waits of communicators have what they wait for; give those an instant that are about to have it."""
    cdef Handle handle
    cdef double until = now() + _ENDS
    cdef bint all_have = False
    while not all_have:
        all_have = True
        for handle in handles:
            all_have = handle.look_at_waits() and all_have
        if now() >= until:
            break
        if not all_have:
            time.sleep(_LOOKS)
    return 0


cdef bint is_freed(Handle handle, list these) except -1:
    """NCCL frees the ranks of one process together, with the last of them, and so the proxies that communicators share.

    To close connections without the abort of a guard, it waits for the proxy's thread, and so for kin.
    """
    cdef Handle other
    cdef bint guarded = handle.flagged or handle.guard != NULL
    if handle.config is not None and handle.config.split_share:
        return False
    if handle.bereft and not guarded:
        return False
    for other in kin_of(handle):
        if (other.raw != NULL or other.guard != NULL) and not (guarded and other in these):
            return False
    return True


cdef int note_ending(Handle handle, Call call) except -1:
    _endings.append((handle, call))
    return 0


cdef int forget_ending(Call call) except -1:
    for i in range(len(_endings)):
        if _endings[i][1] is call:
            del _endings[i]
            break
    return 0


cdef list endings_of(Handle handle):
    return [
        each for each in list(_endings)
        if handle.group_name is not None and (<Handle>each[0]).group_name == handle.group_name
    ]


def _forked():
    _known.clear()
    del _endings[:]


os.register_at_fork(after_in_child=_forked)
