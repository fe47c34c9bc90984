from ncclpy.abi.driver cimport CUevent
from ncclpy.core.handles.handle cimport Handle


# Take an event of a device from the pool, with its context current or not; give it back when nothing waits for it.
cdef CUevent take_event(int device, bint timing) except NULL
cdef int give_event(int device, bint timing, CUevent event) except -1


# How often this process was found to have stood still while operations ran.
cdef int stops

# Whether the end of an operation may be that of a torn one, so that it is no success.
cdef bint is_doubted(Handle handle) noexcept nogil

# Note that the monitor runs. It does so before each of these moments, FOREVER where no communicator needs that.
cdef void note_turn(double moment) noexcept nogil
cdef double next_turn() noexcept nogil

# Have those told that the process has stood still, if it has since they were told last. With the GIL.
cdef int tell_of_stops() except -1

# Believe no end on a communicator any more: other ranks may abort it.
cdef int fence(Handle handle) except -1

# Believe them unless the process stands still after it was found to have stopped so often.
cdef int believe(Handle handle, int seen) except -1
