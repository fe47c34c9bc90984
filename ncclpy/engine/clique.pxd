from ncclpy.core.operation cimport Operation
from ncclpy.engine.launcher cimport Launch
from ncclpy.engine.protocols cimport CliqueOwner, LaunchOwner, Together

cdef enum:
    MAKING = 0
    MADE = 1
    GONE = 2


cdef class Clique(LaunchOwner):
    cdef readonly object key
    cdef readonly tuple devices
    cdef tuple ranks  # of `devices`
    cdef int nranks
    cdef readonly str name  # for the recorder: the same in all processes
    cdef int state
    cdef list comms  # in the order of `devices`
    cdef list begun  # communicators that are being made, for whoever ends that
    cdef list streams
    cdef tuple kept  # both, for launches to hold; None once they are gone
    cdef set launches  # on their way
    cdef long long sequence
    cdef unsigned long long* familiar  # signatures of what has run here, by their hashes; 0 is a free place
    cdef size_t capacity
    cdef size_t nreplaced
    cdef CliqueOwner owner
    cdef str site

    cdef list ready(self, list comms, list streams)
    cdef int fail(self, object error) except -1
    cdef Launch begin(self)
    cdef int start(self, Launch launch, const Operation* operation) except -1
    cdef bint knows(self, unsigned long long signature) noexcept
    cdef int learn(self, unsigned long long signature) noexcept
    cdef bint _grow(self) noexcept
    cdef unsigned long long* _place_with(self, unsigned long long signature, unsigned long long wanted) noexcept
    cdef unsigned long long* _places_of(self, unsigned long long signature) noexcept
    cdef int forget(self, Launch launch) except -1
    cdef int fence(self) except -1
    cdef int note_readers(self, set readers) except -1
    cdef int tell_readers(self, set readers, object error) except -1
    cdef int believe(self, int seen) except -1


# What NCCL's choice of a way depends on: two operations of one signature take the same connections.
cdef unsigned long long signature_of(const Operation* o) noexcept
