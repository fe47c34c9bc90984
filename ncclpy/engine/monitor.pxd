from ncclpy.engine.work cimport Watched, Work


cdef int ensure_running(int device=*) except -1
# Watch the deadline of a work that its lane has not handed over yet.
cdef int await_launch(Work work) except -1
cdef int make_room(size_t count) except -1
cdef void hand_over(const Watched* some, size_t count) noexcept nogil
