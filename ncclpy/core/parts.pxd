from ncclpy.core.buffers cimport View
from ncclpy.core.operation cimport Operation


# Where the ranks' parts lie, in the order of the ranks.
cdef class Parts:
    cdef int nranks
    cdef void** pointers
    cdef size_t* counts  # as NCCL counts: a complex element is two


# Parts of `count` elements that follow each other.
cdef Parts parts_in_line(const void* start, size_t count, int datatype, int nranks)


# A collective whose parts differ in size or lie apart, checked: what core/lower makes a group of.
cdef class Spread:
    cdef int device, nranks, rank
    cdef Operation operation  # this rank's own buffer, where it has one, as in core/shape
    cdef Parts sends  # what goes to each rank; None for all of the operation's own buffer, and where nothing goes
    cdef Parts recvs  # what comes from each rank
    cdef View view  # of the first buffer that says whose current stream stands for stream=None, or the first of all
    cdef bint seen  # there is one
    cdef object send, recv  # what is held: of a list its buffers, as they are now

    cdef int all_gather(self, send, list recv) except -1
    cdef int reduce_scatter(self, list send, recv) except -1
    cdef int all_to_all(self, send, recv) except -1
    cdef int gather(self, send, list recv, int root) except -1  # on the root, as `scatter`
    cdef int scatter(self, list send, recv, int root) except -1
    cdef int all_gather_v(self, send, recv, counts) except -1
    cdef int reduce_scatter_v(self, send, recv, counts) except -1
    cdef int all_to_all_v(self, send, recv, send_counts, recv_counts) except -1


cdef Spread new_spread(int device, int nranks, int rank)
