from ncclpy.core.operation cimport Operation
from ncclpy.engine.ledger cimport ncclpy_ledger, ncclpy_note


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
    cdef object code  # of the Python function that made the call, and where in it; None where none did
    cdef int at
    cdef object error  # a str, or a Message
    cdef ncclpy_ledger* ledger  # of the process group, where it is noted; NULL elsewhere
    cdef ncclpy_note* noted  # by which that knows it, until it has ended

    cdef int note(self, ncclpy_ledger* ledger) except -1
    cdef int done(self, bint well, double moment) except -1
    cdef void place(self, bint behind) noexcept


cdef Entry new_entry()
# What an entry says of its operation, by the names of peers' `Began`.
cdef dict began_of(Entry entry)
# The name of the method that was called.
cdef str called(Entry entry)
# The sentence of an error that says where this rank called an operation; None if that was not noted.
cdef str where_called(Entry entry)
# The first operation of a process group, by its number, that has not ended; None if none is recorded.
cdef Entry unfinished_of(long long group)
# Note what an operation calls, and the size of its buffer.
cdef void note_operation(Entry entry, const Operation* operation, size_t nbytes) noexcept
