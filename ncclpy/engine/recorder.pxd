from libc.stdint cimport uint64_t

from ncclpy.core.arguments.operation cimport Operation


cdef extern from "ncclpy/engine/oplog.h" nogil:
    ctypedef struct ncclpy_op:
        uint64_t sequence
        uint64_t count
        uint64_t began
        uint64_t done
        uint64_t call
        uint64_t op_and_root

    ctypedef struct ncclpy_status:
        bint has_current
        bint has_finished
        ncclpy_op current
        ncclpy_op finished

    ctypedef struct ncclpy_note:
        pass

    ctypedef struct ncclpy_op_list:
        uint64_t finished_order
        ncclpy_op finished

    ctypedef struct ncclpy_oplog:
        ncclpy_op_list lists[2]

    const uint64_t NCCLPY_BLOCKED_ON_INPUT

    ncclpy_oplog* ncclpy_oplog_new()
    void ncclpy_oplog_use(ncclpy_oplog* oplog)
    void ncclpy_oplog_leave(ncclpy_oplog* oplog)
    ncclpy_note* ncclpy_oplog_begin(ncclpy_oplog* oplog, int pair, const ncclpy_op* what)
    void ncclpy_oplog_set_blocked(ncclpy_oplog* oplog, ncclpy_note* note, int blocked)
    void ncclpy_oplog_end(ncclpy_oplog* oplog, int pair, ncclpy_note* note, int done, double moment)
    bint ncclpy_oplog_read(const ncclpy_oplog* oplog, ncclpy_status* status)
    uint64_t ncclpy_bits_of(double moment)
    double ncclpy_moment_of(uint64_t bits)


cdef inline uint64_t call_of(int kind, int datatype, bint is_barrier) noexcept nogil:
    return <uint64_t>kind | <uint64_t>datatype << 16 | <uint64_t>is_barrier << 32


cdef inline uint64_t op_and_root_of(int op, int root) noexcept nogil:
    return <uint64_t><unsigned int>op << 32 | <unsigned int>root


# The callback by which a store's client publishes a rank's status without Python.
cdef struct Source:  # see bootstrap/native/publisher.hpp
    void* what
    size_t (*tell)(void* what, char* at, size_t space, size_t* lasting) noexcept nogil


# What a rank has begun and finished in one process group, or on one communicator of a Manager with a store.
cdef class OpLog:
    cdef ncclpy_oplog* oplog
    cdef Source publisher_source

    # The sequence number of the last collective that is done, None if there is none.
    cdef object last_finished(self)


cdef enum:
    PENDING = 0
    LAUNCHED = 1
    COMPLETED = 2
    FAILED = 3
    CALLED = 4  # a plain communicator's call has returned; whether the device is done with it is not checked
    CAPTURED = 5  # part of a CUDA graph: each launch of the graph runs it, which the recorder does not see


# What the recorder keeps of one operation. The fields in C may be written without the GIL.
cdef class Entry:
    cdef long long id
    cdef long long launch  # -1 before the launch
    cdef long long sequence
    cdef long long group  # number of the process group, in this process; -1 for none
    cdef int state
    cdef int operation  # kind of an Operation
    cdef bint pair  # whether its sequence number counts operations between two ranks
    cdef bint is_barrier  # whether it is a barrier, which NCCL sees as another operation
    cdef int op  # -1 for none
    cdef int datatype
    cdef int root  # -1 for none
    cdef int tag  # -1 for none
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
    cdef object code  # of the calling Python function, None without one; `at` is the position in it
    cdef int at
    cdef object error  # a str, or a LazyText
    cdef ncclpy_oplog* oplog  # the operation log in which it is noted, or NULL
    cdef ncclpy_note* noted  # its note in `oplog`, until it has ended

    cdef int note(self, ncclpy_oplog* oplog) except -1
    cdef int done(self, bint succeeded, double moment) except -1
    cdef void set_blocked(self, bint blocked) noexcept


cdef Entry new_entry()

# What an entry says of its operation, under the names of `OperationInfo` (peers/rank_state.py).
cdef dict operation_info_of(Entry entry)

# The name of the method that was called, or "barrier".
cdef str called(Entry entry)

# A sentence for an error that says where this rank called an operation; None if that is unknown.
cdef str where_called(Entry entry)

# The first operation of a process group that has not ended; None if none is recorded. `group` is the group's number.
cdef Entry unfinished_of(long long group)

# Copy the parameters of an operation, and the size of its buffer, into its entry.
cdef void note_operation(Entry entry, const Operation* operation, size_t nbytes) noexcept
