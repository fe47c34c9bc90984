from ncclpy.abi.driver cimport CUevent


# Take an event of a device from the pool, with its context current or not; give it back when nothing waits for it.
cdef CUevent take_event(int device, bint timing) except NULL
cdef int give_event(int device, bint timing, CUevent event) except -1
