"""What overrides a guard: NCCL's environment has the last word on how communicators are made.

`NCCL_COMM_BLOCKING` and `NCCL_COMM_SPLIT_SHARE_RESOURCES` come before what a communicator is asked for. They may stand
in NCCL's configuration file as well. NCCL puts those into the environment when it first reads them, behind the back of
`os.environ`; so the environment of C is looked at, again when a guard has been made. Where even that shows nothing, as
with a plugin that answers for the environment, a call shows that was to block and is in progress. The others show in no
result: a guard that was to work in the background may be quick as well, and say success at once.
"""

import warnings

from libc.stdlib cimport getenv, strtoll

cdef str _BLOCKING = "NCCL_COMM_BLOCKING"
cdef str _SHARE = "NCCL_COMM_SPLIT_SHARE_RESOURCES"

cdef dict _LOST = {
    (_BLOCKING, 1): (
        "init, split and all else that makes communicators now waits for missing ranks inside NCCL, where nobody can "
        "end it: a deadline or Ctrl-C leaves it behind. What runs on a communicator that is made can still be ended"
    ),
    (_BLOCKING, 0): (
        "a communicator's calls now go through a thread of NCCL's, which makes each slower by tens of microseconds, "
        "and cannot be captured into graphs. Deadlines still hold"
    ),
    (_SHARE, 0): (
        "an abort now does not reach what is stuck on the device or inside a call, so that deadlines end neither, and "
        "leave them behind"
    ),
}
cdef set _told = set()  # once a process


cdef int _tell(str name, int value, str how) except -1:
    if name in _told:
        return 0
    _told.add(name)
    warnings.warn(
        f"{name}={value} {how} and overrides what a deadline needs (timeout=, abortable=True): {_LOST[name, value]}. "
        "Take it out of the environment and of NCCL's configuration file (NCCL_CONF_FILE, ~/.nccl.conf, "
        "/etc/nccl.conf)",
        RuntimeWarning,
        stacklevel=1,  # functions in Cython have no frames: it is the caller's line
    )
    return 0


cdef int look_up_overrides() except -1:
    cdef const char* text
    for name in (_BLOCKING, _SHARE):
        key = name.encode()
        text = getenv(key)
        if text == NULL or text[0] == 0:
            continue
        value = strtoll(text, NULL, 0)  # as NCCL reads it: a word is 0
        if (name, value) in _LOST:
            _tell(name, value, "is set")
    return 0


cdef int guarded_was_in_progress() except -1:
    return _tell(_BLOCKING, 0, "is in force, as a call shows that was to block and was in progress instead,")
