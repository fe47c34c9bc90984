from ncclpy.abi.driver cimport CUstream
from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.core.birth cimport Cradle
from ncclpy.core.handle cimport Handle
from ncclpy.core.operation cimport Birth


cdef class Lifecycle(Handle):
    cdef Cradle cradle  # what it was made in; None of a handle that somebody else made
    cdef object config  # that was asked for, and that children inherit
    cdef bint abortable  # it was asked for by name
    cdef Lifecycle parent
    cdef void* asked  # the parent as a pointer, for polling without the GIL
    cdef object children  # WeakSet
    cdef list making  # children that NCCL still makes: they must not go
    cdef object resources  # WeakSet of operators, registrations and graphs, closed with the communicator
    cdef dict registered  # buffers that NCCL has registered, by a number; they stay until it lets go of them
    cdef long long registrations  # how many there were
    cdef object stream  # for memory that has no stream
    cdef size_t scratch  # device memory of the barrier, 0 until used

    cdef int conceive(self, object config, object timeout, object abortable, Lifecycle parent) except -1
    cdef CUstream own_stream(self) except NULL
    cdef long long keep(self, object buffer) except -1
    cdef int unkeep(self, long long number) except -1
    cdef ncclResult_t poll_birth(self) noexcept nogil
    cdef void _take_cell(self) noexcept nogil
    cdef bint _take_cell_late(self, bint called) noexcept nogil
    cdef ncclResult_t _ask_maker(self) noexcept nogil
    cdef int _grown(self) except -1
    cdef int be_watched(self, double limit) except -1
