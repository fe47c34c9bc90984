"""Which operations of one frame are one launch: from what all ranks know alike, so that all launch the same."""

from ncclpy.coordinator.brought cimport Brought
from ncclpy.coordinator.call cimport Call

from ncclpy.coordinator.signature import Kind, pack, unpack_all
from ncclpy.core.types import DataType, ReduceOp

cdef object _ALL_REDUCE = Kind.ALL_REDUCE
cdef dict _looked_at = {}
cdef Py_ssize_t _MOST = 4096


cdef class Packed:
    """What all ranks have brought alike, with what its launch asks of that each time.

    Parameters
    ----------
    packed : bytes
        What `signature.pack_all` has packed.

    Attributes
    ----------
    signatures : tuple of Signature
        Of the arrays.
    fusable : bool
        Whether all of them are all-reduces, which may be launched with others.
    kinds : list of bytes
        For each array, what those have in common that may be copied together.
    nbytes, elements : list of int
        For each array, its size, and how many elements of NCCL's those are.
    has_meaning : bool
        Whether NCCL can do all of it for any number of ranks.
    """

    def __init__(self, bytes packed not None):
        self.signatures = unpack_all(packed)
        self.fusable = all(each.kind is _ALL_REDUCE for each in self.signatures)
        self.elements = [each.elements for each in self.signatures]
        self.nbytes = [
            count * DataType(each.datatype).itemsize
            for count, each in zip(self.elements, self.signatures, strict=True)
        ]
        self.kinds = [pack(each._replace(shape=(), dtype="", unit=1)) for each in self.signatures]
        self.has_meaning = not any(
            each.op == ReduceOp.AVG or each.prescale is not None or each.postscale is not None
            for each in self.signatures
        )


cdef Packed packed_as(bytes fixed):
    """Return what all have brought as launches see it; mostly it is the same again."""
    cdef Packed found = _looked_at.get(fixed)
    if found is None:
        found = Packed(fixed)
        if len(_looked_at) >= _MOST:
            _looked_at.clear()
        _looked_at[fixed] = found
    return found


cdef class Ready:
    """An operation that all ranks have brought.

    Parameters
    ----------
    call : Call or None
        What this rank has brought; None if it has joined.
    fixed : bytes
        What all have brought alike.
    owns : tuple of bytes
        What each rank's own is, in the order of the set.
    absent : tuple of int
        The ranks of the set that have joined.

    Attributes
    ----------
    packed : Packed
        What all have brought alike.
    """

    def __init__(self, Call call, bytes fixed not None, tuple owns=(), tuple absent=()):
        self.call, self.packed, self.owns, self.absent = call, packed_as(fixed), owns, absent


cdef class Step:
    """What is launched at once.

    Attributes
    ----------
    operations : list of Ready
        For each array the operation that it belongs to.
    places : list of int
        For each array which one of that it is.
    signature : Signature
        The first one's.
    fused : bool
        Whether they are all-reduces that are copied.
    absent : int
        How many ranks have joined and bring nothing of their own.
    """

    cdef int _add(self, Ready ready, Py_ssize_t place, long long nbytes) except -1:
        self.operations.append(ready)
        self.places.append(place)
        self.nbytes += nbytes
        return 0

    cdef list brought(self):
        """Return this rank's arrays; None for each of an operation that it does not take part in."""
        cdef Ready ready
        cdef Py_ssize_t i
        found = []
        for i in range(len(self.operations)):
            ready = self.operations[i]
            found.append(None if ready.call is None else ready.call.parts[<Py_ssize_t>self.places[i]])
        return found

    cdef list members(self):
        """Return the same, each with how many elements of NCCL's it has."""
        cdef Ready ready
        cdef Py_ssize_t i, place
        found = []
        for i in range(len(self.operations)):
            ready, place = self.operations[i], self.places[i]
            found.append((None if ready.call is None else ready.call.parts[place], ready.packed.elements[place]))
        return found

    def __len__(self):
        return len(self.operations)


cdef Step _step(Ready ready, Py_ssize_t place, long long nbytes):
    cdef Step made = Step.__new__(Step)
    made.operations, made.places = [], []
    made.signature, made.absent = ready.packed.signatures[place], len(ready.absent)
    made._add(ready, place, nbytes)
    return made


cpdef list plan(list operations, long long fusion_bytes, long long large, bint staged):
    """Return the launches of a frame's operations, in their order.

    An all-reduce joins the first launch before it that has its type, operator, scales and memory, and room: not only
    the one just before it.

    Parameters
    ----------
    operations : list of Ready
        What all ranks have brought.
    fusion_bytes : int
        The most that is copied together; 0 to copy nothing that need not be.
    large : int
        An array of so many bytes is not copied: the copies would take longer than a launch of its own.
    staged : bool
        Whether arrays of CPU memory have to be copied to the device in any case.

    Returns
    -------
    list of Step
    """
    cdef list steps = []
    cdef dict open_ones = {}
    cdef Ready ready
    cdef Step step
    cdef Py_ssize_t place
    cdef long long nbytes
    large = min(large, fusion_bytes)
    for ready in operations:
        if not ready.packed.fusable:  # the operation launches all that belongs to it
            steps.append(_step(ready, 0, 0))
            continue
        for place in range(len(ready.packed.nbytes)):
            nbytes = ready.packed.nbytes[place]
            if nbytes >= large:
                steps.append(_step(ready, place, nbytes))
                continue
            alike = ready.packed.kinds[place] if not ready.absent else (ready.packed.kinds[place], len(ready.absent))
            step = open_ones.get(alike)
            if step is not None and step.nbytes + nbytes <= fusion_bytes:
                step._add(ready, place, nbytes)
                continue
            step = open_ones[alike] = _step(ready, place, nbytes)
            steps.append(step)
    for step in steps:
        if step.signature.kind is _ALL_REDUCE:
            step.fused = len(step.operations) > 1 or (staged and not step.signature.on_device)
    return steps
