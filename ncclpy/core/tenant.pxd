from ncclpy.abi.driver cimport CUcontext, CUevent, CUstream
from ncclpy.abi.nccl cimport ncclComm_t

cdef extern from "ncclpy/core/tenant.h" nogil:
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


# Who is told of communicators that are ready, and asked why one was aborted by its tenant.
cdef class Landlord:
    cdef int is_ready(self, object handle) except -1
    cdef int was_ended(self, object handle) except -1

# The communicators of this process that are ready, for who becomes the landlord later.
cdef list everyone()
cdef int set_landlord(Landlord new) except -1
cdef int tell_ready(object handle) except -1
cdef int tell_ended(object handle) except -1
