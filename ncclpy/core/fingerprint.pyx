"""What a call and its array are, as far as others have to bring the same: the Manager, process groups and coordinators compare it.

The count is one of the array's own elements and the type has the name that its owner knows it by, not the one of what
carries it: int16 and uint16 are the same bytes to NCCL. In one process types are told apart by their flavours, between
processes by their names. A coordinator knows an array by its name and its shape, of which the count comes.
"""

from ncclpy.core.buffers cimport read_view
from ncclpy.core.datatypes cimport name_of
from ncclpy.core.operation cimport has_root, reduces


cdef void take_fingerprint(Fingerprint* made, const Operation* operation, const View* view) noexcept nogil:
    made.kind = operation.kind
    made.op = operation.op if reduces(operation.kind) else -1
    made.root = operation.root if has_root(operation.kind) else -1
    made.datatype, made.flavour = view.datatype, view.flavour
    made.count = operation.count if view.unit <= 1 else operation.count // view.unit


cdef Difference difference(const Fingerprint* one, const Fingerprint* other) noexcept nogil:
    cdef Difference found
    if one.kind != other.kind:
        return KIND
    found = difference_of_data(one, other)
    if found != NOTHING:
        return found
    if one.op != other.op:
        return OPERATOR
    return NOTHING if one.root == other.root else ROOT


cdef Difference difference_of_data(const Fingerprint* one, const Fingerprint* other) noexcept nogil:
    if one.datatype != other.datatype or one.flavour != other.flavour:
        return TYPE
    return NOTHING if one.count == other.count else COUNT


cdef str type_of(const Fingerprint* call):
    return name_of(call.datatype, call.flavour)


def type_of_array(array):
    """Return the name of an array's type, of ASCII, which is what processes compare."""
    cdef View view
    read_view(array, &view, "array")
    return name_of(view.datatype, view.flavour)
