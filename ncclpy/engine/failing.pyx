"""How a work fails: what is wrong with it as an exception, and its end with all that were launched with it.

The monitor and its quiet stretches see that something is wrong; an exception takes Python, so an errand makes it.
"""

from libc.stdlib cimport free

from ncclpy.abi.nccl cimport ncclResult_t, ncclSuccess
from ncclpy.core.check cimport driver_error, nccl_error
from ncclpy.core.handle cimport PAST_DEADLINE, WAS_ABORTED, Handle
from ncclpy.core.missing cimport who_is_missing
from ncclpy.core.operation cimport NOT_THERE, function_of
from ncclpy.core.overdue cimport tell_overdue
from ncclpy.core.state cimport ABORTED
from ncclpy.engine.callbacks cimport errands
from ncclpy.engine.message cimport ended_by, words_of
from ncclpy.engine.protocols cimport Together
from ncclpy.engine.recorder cimport where_called
from ncclpy.engine.work cimport HAS_FAILED, NOT_FAILING, TO_FAIL, Watched, Work

from ncclpy.core.errors import NcclAborted, NcclTimeout, NcclUnsupported, seconds

_ADVICE = (
    "A rank is missing or stuck: see which of the others did not make the same call, with ncclpy.recorder.dump() and "
    "`ncclpy trace`"
)
_ABORTED, _GOES_ON = "its communicator is aborted", "its communicator goes on"

cdef extern from "string.h" nogil:
    char* strdup(const char*)


cdef int have_failed(Work work, const Watched* watched, ncclResult_t result) except -1:
    """Have a work fail for its launch; with NULL for its communicator's result or, if that is fine, its deadline."""
    cdef _Failing errand
    if work.failing != NOT_FAILING or work.is_settled():
        return 0
    work.failing = TO_FAIL
    errand = _Failing.__new__(_Failing)
    errand.work = work
    errand.result = result
    if watched != NULL:
        errand.watched = watched[0]
        errand.of_launch = True
        if watched.text != NULL:
            errand.watched.text = strdup(watched.text)
    errands.give(errand)
    return 0


cdef class _Failing:
    """The errand that makes a work's error, which takes Python, and fails it with all that were launched with it."""

    cdef Work work
    cdef Watched watched
    cdef bint of_launch  # whether `watched` says what is wrong
    cdef ncclResult_t result

    def __dealloc__(self):
        free(self.watched.text)

    def __call__(self):
        cdef Work work = self.work
        cdef Together launch
        try:
            if not work.is_settled():
                error = _launch_error(work, &self.watched) if self.of_launch else _trouble(work, self.result)
                error._where_called = where_called(work.entry)  # for what ends by it
                launch = work.launch
                if launch is None:
                    work.settle(error)
                else:
                    launch.fail(error)
                tell_overdue([] if work.handle is None else [work.handle], error, False)
        finally:
            work.failing = HAS_FAILED
            if work.over:
                work.let_go()


cdef object _trouble(Work work, ncclResult_t result):
    """Return what is wrong with a work whose communicator has this result, or else is late, as an exception."""
    cdef Handle handle = work.handle
    cdef Together launch = work.launch
    cdef const char* words = NULL
    if handle is not None and handle.state == ABORTED:
        return NcclAborted(work.say(f"did not complete: {handle!r} was aborted"))
    if result != ncclSuccess:
        if handle is not None:
            words = handle.last_words()
        return nccl_error(result, b"ncclCommGetAsyncError", words)
    missing = "" if handle is None else who_is_missing(handle.speaker())
    missing += ". " if missing else ""
    then = _GOES_ON if launch is not None and launch.is_spared() else _ABORTED
    limit = f" of {seconds(work.given)}" if work.given > 0 else ""
    return NcclTimeout(work.say(
        f"was not done within its timeout{limit}; {then}. {missing}{_ADVICE}"
    ))


def without_advice(text):
    """Return an error's text without what it says of other ranks, for who knows better what they do."""
    if text.endswith(_ADVICE):
        for then in (_ABORTED, _GOES_ON):
            head, found, _ = text.partition(f"{then}. ")
            if found:
                return head + then
    return text.rstrip(". ")


def add_answer(error, said, states):
    """Have an error say what the ranks do, in place of its advice to find out, and have it as data.

    Parameters
    ----------
    error : Exception
        Whose key, if it names one, is not asked for its text.
    said : str
        The sentence.
    states : tuple of RankState, or None
        The data.
    """
    error.args = (ended_by(words_of(error), without_advice, f". {said}"),)
    error.ranks = states


cdef object _launch_error(Work work, const Watched* watched):
    """Return what became of the launch, or of the device, as an exception."""
    cdef const char* function = function_of(watched.kind)
    cdef Together launch = work.launch
    if <int>watched.result == WAS_ABORTED and work.handle is not None and work.handle.state != ABORTED and (
        launch is not None and launch.is_spared()
    ):
        return NcclAborted(work.say(
            f"was not launched: a call before it on {work.handle!r} has failed, which the other ranks may have made; "
            "this one would meet theirs"
        ))
    if <int>watched.result == WAS_ABORTED:
        return NcclAborted(work.say(f"was not launched: {work.handle!r} was aborted"))
    if <int>watched.result == NOT_THERE:
        return NcclUnsupported(work.say(f"was not launched: the loaded NCCL has no {function.decode()}"))
    if <int>watched.result == PAST_DEADLINE:
        return NcclTimeout(work.say(f"was not launched in time: {work.handle!r} stayed in progress"))
    if watched.result != ncclSuccess:
        return nccl_error(watched.result, function, watched.text)
    return driver_error(watched.driver, function)
