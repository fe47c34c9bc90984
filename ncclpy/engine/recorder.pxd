from ncclpy.core.operation cimport Operation


cdef enum:
    PENDING = 0
    LAUNCHED = 1
    COMPLETED = 2
    FAILED = 3
    CALLED = 4  # a plain call has come back; the device may not be done with it, which nobody asks
    CAPTURED = 5  # part of a CUDA graph: it runs whenever that is launched, of which nobody here knows


# What the recorder keeps of one operation. The fields in C may be written without the GIL.
cdef class Entry:
    cdef long long id
    cdef long long launch  # -1 before the launch
    cdef long long sequence
    cdef int state
    cdef int operation  # kind of an Operation
    cdef int op  # -1 for none
    cdef int datatype
    cdef int root  # -1 for none
    cdef int tag  # likewise
    cdef int rank
    cdef int nranks
    cdef int device
    cdef unsigned long thread
    cdef size_t count
    cdef size_t nbytes
    cdef double created
    cdef double launched
    cdef double completed
    cdef object key
    cdef str communicator
    cdef object error  # a str, or a Message


cdef Entry new_entry()
# Note what an operation calls, and the size of its buffer.
cdef void note_operation(Entry entry, const Operation* operation, size_t nbytes) noexcept
