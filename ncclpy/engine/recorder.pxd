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
    cdef long long group  # number of the process group, in this process; -1 for none
    cdef int state
    cdef int operation  # kind of an Operation
    cdef bint pair  # its sequence number is one of those between two ranks
    cdef bint is_barrier  # which is another operation for NCCL
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
# The first operation of a process group that is begun and not done, and the last that is done; None where there is none.
cdef tuple standing_of(long long group)
# Likewise of one rank of a communicator of a Manager, which has a name.
cdef tuple standing_of_rank(str communicator, int rank)
# The number of the last collective of a process group that is done, None if the ring has none.
cdef object last_finished(long long group)
# What an entry says of its operation, by the names of process_group's `Began`; None of None.
cdef dict began_of(Entry entry)
# Both, as ranks tell each other what they do.
cdef dict told_of(Entry current, Entry finished)
# The name of the method that was called.
cdef str called(Entry entry)
# Note what an operation calls, and the size of its buffer.
cdef void note_operation(Entry entry, const Operation* operation, size_t nbytes) noexcept
