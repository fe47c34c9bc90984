from ncclpy.engine.work cimport Watched, Work


# Start the monitor's thread unless it runs. Its driver calls use the context of the first `device` that is given.
cdef int ensure_running(int device=*) except -1
# Watch the deadline of a work that its lane has not handed over yet.
cdef int await_launch(Work work) except -1
# Give launched works to the monitor. `reserve_inbox` must have reserved space for them before the launch, since a lane
# could not report that memory is out.
cdef int reserve_inbox(size_t count) except -1
cdef void hand_over(const Watched* some, size_t count) noexcept nogil
