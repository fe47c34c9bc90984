from ncclpy.core.buffers cimport View
from ncclpy.core.operation cimport Operation


# What a call has in common with those that it meets, of other ranks or of other participants.
cdef struct Fingerprint:
    int kind
    int op  # -1 where nothing is reduced
    int root  # or the peer; -1 where there is none
    int datatype
    unsigned long long flavour
    size_t count  # in the array's own elements


# What two calls differ in.
cdef enum Difference:
    NOTHING
    KIND
    TYPE
    COUNT
    OPERATOR
    ROOT


cdef void take_fingerprint(Fingerprint* made, const Operation* operation, const View* view) noexcept nogil
# The first thing that differs.
cdef Difference difference(const Fingerprint* one, const Fingerprint* other) noexcept nogil
# The same of their arrays alone: of a send and the receive that it meets.
cdef Difference difference_of_data(const Fingerprint* one, const Fingerprint* other) noexcept nogil
# The name of the array's type, which is what processes compare.
cdef str type_of(const Fingerprint* call)
