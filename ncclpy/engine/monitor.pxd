from cpython.ref cimport PyObject

from ncclpy.abi.driver cimport CUevent, CUresult, CUstream
from ncclpy.abi.nccl cimport ncclResult_t
from ncclpy.engine.work cimport Work


# A work on its way to its end. Whoever hands it over gives a reference to the work away.
cdef struct Watched:
    PyObject* work
    CUevent event
    CUstream stream
    double limit
    ncclResult_t result  # of the launch, where it has failed
    CUresult driver  # likewise, of a call of the driver
    int kind  # of the operation, to name the function that failed
    char* text  # NCCL's last words on a failure; from malloc, given away


cdef int ensure_running(int device=*) except -1
# Keep the deadline of a work that its lane has not handed over yet.
cdef int await_launch(Work work) except -1
cdef int make_room(size_t count) except -1
cdef void hand_over(const Watched* some, size_t count) noexcept nogil
