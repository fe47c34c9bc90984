from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.abi.nccl cimport ncclComm_t


# What is told of failures and of this process's ranks: the module that writes dumps, where they were asked for.
cdef class FailureListener:
    # A communicator or a process group of so many ranks is being made, in which this process has that rank.
    cpdef int named(self, int nranks, int rank) except -1
    # An operation has failed or, if `ended`, a process group has ended by the error. With `wait` in the thread that raises
    # the error, under no lock; without, in any thread, which is not held up.
    cpdef int failed(self, object error, bint wait, bint ended=*) except -1
    # An error is about to end the process: wait until what was told is written, for a bounded time.
    cpdef int finish(self) except -1


cdef FailureListener listener  # None without one
cdef int set_listener(FailureListener new) except -1

# Tell of an error of an operation, if it is NcclTimeout or NcclRemoteError.
cdef int tell_failed(object error, bint wait=*) except -1

# Between these, in one thread, nothing is told: whoever calls them tells of the outcome.
cdef void begin_whole() noexcept nogil
cdef void end_whole() noexcept nogil
cdef bint in_whole() noexcept nogil


# The other ranks of a communicator, whom somebody above can ask what they do.
cdef class Fellows:
    # Those of a communicator that was made of some of these ranks; None if they cannot be asked.
    cpdef Fellows of_part(self, object comm)
    # Have an error of an operation say what the ranks do; in the thread that raises it, under no lock of ours. It takes
    # some seconds at most, and raises what a signal handler does, nothing else.
    cpdef int explain(self, object error) except -1
    # Three steps of the thread that aborts the communicator. Tell them why it is; confirm that this rank takes no end of an
    # operation for a success any more; and wait until they have confirmed, those that can. Then the abort may come, or, if
    # that returns False, the process ends, and nothing is to be aborted.
    cpdef int tell(self, str text, str kind) except -1
    cpdef int confirm(self) except -1
    cpdef bint wait_until_heard(self) except -1
    # Whether one of them has ended it, as far as that is known or has to be asked: before a result is handed out.
    cpdef bint has_ended(self) except -1
    # Tell them that this rank gives the communicator up, and go on; a wait for that to have been told.
    cpdef int leave(self) except -1
    cpdef int left(self, double seconds) except -1


cdef extern from "ncclpy/core/handles/tenant.h" nogil:
    # What lives beside a communicator, in memory that its handle keeps.
    ctypedef struct Tenant "ncclpy_tenant":
        int known
        int unknown
        int current
        void** events
        void* context
        void (*enter)(Tenant* tenant, void* comm) noexcept nogil
        void (*caught)(Tenant* tenant) noexcept nogil
        void (*over)(Tenant* tenant) noexcept nogil
    bint wants "ncclpy_tenant_wants"(const Tenant* tenant)
    bint has_ended "ncclpy_tenant_ended"(const Tenant* tenant)
    void ends "ncclpy_tenant_ends"(Tenant* tenant)
    # The way to a communicator for who has neither a reference nor the GIL.
    ctypedef struct Door "ncclpy_door":
        void* behind
    Door* new_door "ncclpy_door_new"(void* behind)
    bint enter_door "ncclpy_door_enter"(Door* door)
    void leave_door "ncclpy_door_leave"(Door* door)
    void shut_door "ncclpy_door_shut"(Door* door)
    void free_door "ncclpy_door_free"(Door* door)


# Before a call, and behind it: under the communicator's lock.
cdef inline void let_in(Tenant* tenant, ncclComm_t comm) noexcept nogil:
    if wants(tenant):
        enter(tenant, comm)


cdef void enter(Tenant* tenant, ncclComm_t comm) noexcept nogil
cdef void follow(Tenant* tenant, CUstream stream, bint issued) noexcept nogil

# Its events, in the current context; False if the driver has none.
cdef bint settle(Tenant* tenant, CUcontext context) noexcept nogil
cdef void move_out(Tenant* tenant) noexcept nogil


# The memory registry: it is told of communicators that are ready, and says why its hook has aborted one.
cdef class Landlord:
    cdef int is_ready(self, object handle) except -1
    cdef int was_ended(self, object handle) except -1


# The communicators of this process that are ready, for who becomes the landlord later.
cdef list everyone()
cdef int set_landlord(Landlord new) except -1
cdef int tell_ready(object handle) except -1
cdef int tell_ended(object handle) except -1
