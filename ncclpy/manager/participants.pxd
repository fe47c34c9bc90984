from ncclpy.core.buffers cimport View
from ncclpy.engine.work cimport Work


cdef int as_rank(rank, str argument) except -2


cdef class Participants:
    cdef Work add(
        self, key, int kind, const View* view, const void* send, void* recv, size_t count, int op, int device,
        int num_local, int num_global, communicator_key, global_rank, int root, bint is_root, producer, on_done,
        timeout, held, output,
    )
