# One step of a queue.
cdef class LaunchStep:
    # Wait a moment at most; return whether the step can then be executed without a wait for other ranks.
    cdef bint is_ready(self) except -1
    # Execute the step; it must handle its errors.
    cdef int take(self) except -1


# A queue of steps that are executed in order.
cdef class LaunchQueue:
    cdef str name
    cdef object on_error
    cdef object steps  # a deque
    cdef object changed
    cdef object thread
    cdef int taker
    cdef bint ended

    # Add steps; execute them in this thread, up to the first one that would have to wait.
    cdef int add(self, list steps) except -1
    cdef bint _is_ready(self, LaunchStep step) except -1
    cdef int _take(self, LaunchStep step) except -1
    # Put a step first; called from within a step.
    cdef int put_first(self, LaunchStep step) except -1
    cdef int _leave_to_thread(self) except -1
    cdef int _wait_for(self, LaunchStep step) except -1
