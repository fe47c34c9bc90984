"""The birth of a communicator: the memory that NCCL writes it into, and how far it has come.

A communicator with a guard is made in two steps. NCCL first makes the guard, in the background, with `splitShare`; the
guard is then split into a communicator that blocks, as one without a deadline does, so that its calls cost the same.
Both can be polled and aborted at any time, through the guard.

The split is called in a thread of its own. NCCL makes it in the background and should return at once; should it not,
whoever polls is stuck in nothing, and an abort of the guard brings that thread back.

The cells lie on the heap, and are given back when it is known that NCCL will not write into them any more: never
while somebody may be polling, since whoever polls holds the communicator, and the communicator its cradle.
"""

from cpython.ref cimport Py_INCREF
from libc.stdlib cimport calloc, free

from ncclpy.abi.driver cimport CUstreamCaptureMode
from ncclpy.abi.nccl cimport ncclInProgress, ncclSuccess, ncclUnhandledCudaError
from ncclpy.core.capture cimport relax, restore
from ncclpy.core.check cimport keep_words
from ncclpy.core.config cimport fill_config
from ncclpy.core.library cimport driver, nccl

cdef extern from "pthread.h" nogil:
    ctypedef unsigned long pthread_t
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_detach(pthread_t)
    int pthread_setname_np(pthread_t, const char*)

cdef extern from * nogil:
    int __atomic_load_n(int*, int)
    void __atomic_store_n(int*, int, int)
    const int __ATOMIC_ACQUIRE
    const int __ATOMIC_RELEASE


cdef void* _ask(void* argument) noexcept nogil:
    cdef Question* question = <Question*>argument
    cdef ncclResult_t result = ncclUnhandledCudaError
    cdef CUstreamCaptureMode mode = relax()
    if driver.cuCtxSetCurrent(question.context) == 0:
        result = nccl.ncclCommSplit(question.guard, 0, 0, &question.cell, &question.config)  # equal keys: ranks stay
    restore(mode)
    if result != ncclSuccess and result != ncclInProgress:
        # Of which the guard itself, which is well, will not tell whoever asks next.
        question.words = keep_words(result)
        question.failed = result
    __atomic_store_n(&question.under_way, 0, __ATOMIC_RELEASE)
    return NULL


cdef class Cradle:
    """Own the cells of a communicator, and what NCCL reads to make it."""

    def __cinit__(self):
        self.birth = <Birth*>calloc(1, sizeof(Birth))
        self.question = <Question*>calloc(1, sizeof(Question))
        if self.birth == NULL or self.question == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.lent:  # nobody knows when NCCL reads and writes: then the memory stays
            Py_INCREF(self.strings)
            return
        if self.birth != NULL:
            free(self.birth.exclude)
        free(self.birth)
        if self.question != NULL:
            free(self.question.words)
        free(self.question)

    cdef int fill(self, object config, bint guarded, object blocking) except -1:
        """Fill in the configurations. `blocking` is what the communicator is to be; None leaves it to NCCL."""
        self.guarded = guarded
        self.strings = [fill_config(&self.birth.config, config)]
        if guarded:
            self.strings.append(fill_config(&self.question.config, config))
            self.question.config.blocking = 1
            self.birth.config.blocking = 0
            self.birth.config.splitShare = 1  # a guard is none unless the abort flag is shared
        elif blocking is not None:
            self.birth.config.blocking = 1 if blocking else 0
        return 0

    cdef void ask_guard(self, ncclComm_t guard) noexcept nogil:
        cdef pthread_t thread
        cdef CUcontext saved = NULL
        self.stage = FROM_GUARD
        self.question.guard = guard
        self.question.context = self.birth.context
        self.question.under_way = 1
        if pthread_create(&thread, NULL, _ask, self.question) == 0:
            pthread_setname_np(thread, b"ncclpy-call")
            pthread_detach(thread)
        else:  # no more threads; here it may block, but it would never be made else
            driver.cuCtxGetCurrent(&saved)
            _ask(self.question)
            driver.cuCtxSetCurrent(saved)

    cdef bint is_asking(self) noexcept nogil:
        return __atomic_load_n(&self.question.under_way, __ATOMIC_ACQUIRE)
