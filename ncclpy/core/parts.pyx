"""Parts, one a rank, that differ in size or lie apart: slices of one buffer by counts, or a list of buffers.

What `shape` is to NCCL's own collectives this room is to these: from buffers to a checked description, with the same
rules. In errors an element of a list is named by its place: ``recv[2]``.
"""

from operator import index

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from ncclpy.core.buffers cimport HOST_MEMORY, NO_FRAMEWORK
from ncclpy.core.datatypes cimport ITEMSIZE
from ncclpy.core.operation cimport ALL_GATHER, ALL_TO_ALL, GATHER, REDUCE_SCATTER, SCATTER
from ncclpy.core.overlap cimport Extents, check_overlap, method_of, span
from ncclpy.core.shape cimport element_size, elements, fits, read_on_device, same_type, writable


cdef class Parts:
    """Pointer and count of each rank's part; what they point to is held elsewhere."""

    def __cinit__(self, int nranks):
        self.nranks = nranks
        self.pointers = <void**>calloc(nranks, sizeof(void*))
        self.counts = <size_t*>calloc(nranks, sizeof(size_t))
        if self.pointers == NULL or self.counts == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.pointers)
        free(self.counts)


cdef Parts parts_in_line(const void* start, size_t count, int datatype, int nranks):
    """Return parts of `count` elements that follow each other."""
    cdef Parts parts = Parts(nranks)
    cdef size_t size = count * ITEMSIZE[datatype]
    cdef int rank
    for rank in range(nranks):
        parts.pointers[rank] = <char*>start + <size_t>rank * size
        parts.counts[rank] = count
    return parts


cdef Parts _parts_by(const View* view, list counts):
    """Return parts of one buffer, which is known to hold them all."""
    cdef Parts parts = Parts(len(counts))
    cdef size_t offset = 0, count
    cdef int rank
    for rank in range(parts.nranks):
        count = counts[rank]
        parts.pointers[rank] = <char*>view.pointer + offset
        parts.counts[rank] = count * view.unit
        offset += count * element_size(view)
    return parts


cdef list _as_counts(object counts, int nranks, str argument):
    """Return one count a rank, in elements of the array."""
    try:
        numbers = [index(count) for count in counts]
    except TypeError as error:
        raise TypeError(f"{argument}: expected {nranks} ints, one a rank: {error}") from None
    if len(numbers) != nranks or min(numbers) < 0:
        raise ValueError(f"{argument}: expected {nranks} counts >= 0, one a rank, got {numbers}")
    return numbers


cdef int _holds(const View* view, object count, str argument, str what) except -1:
    if elements(view) != count:  # as Python ints, which do not wrap: no part lies outside the buffer then
        raise ValueError(f"{argument}: {what} = {count} elements are needed, got {elements(view)}")
    return 0


cdef int _check_lists(Spread spread, const View* send, const View* recv) except -1:
    """Refuse memory that receives and is also sent, or that receives twice; `send` and `recv` are single buffers.

    A single buffer may be this rank's own part of the list, which is then in place.
    """
    cdef Extents extents = Extents()
    cdef size_t n = spread.nranks, size = <size_t>ITEMSIZE[spread.operation.datatype]
    cdef int rank, own = spread.rank
    for rank in range(spread.nranks):
        if spread.sends is not None and not (rank == own and recv != NULL and spread.sends.pointers[own] == recv.pointer):
            extents.add(spread.sends.pointers[rank], spread.sends.counts[rank] * size, rank, False)
        if spread.recvs is not None:
            extents.add(spread.recvs.pointers[rank], spread.recvs.counts[rank] * size, n + rank, True)
    if send != NULL and not (spread.recvs is not None and spread.recvs.pointers[own] == send.pointer):
        extents.add(send.pointer, send.nbytes, 2 * n, False)
    if recv != NULL:
        extents.add(recv.pointer, recv.nbytes, 2 * n + 1, True)
    if not extents.clash():
        return 0
    if send != NULL:
        rule = f"works in place only where send is recv[{own}], this rank's part"
    elif recv != NULL:
        rule = f"works in place only where recv is send[{own}], this rank's part"
    else:
        rule = "cannot work in place"
    one, other = _called(extents.second.place, n), _called(extents.first.place, n)
    if one[:4] == other[:4]:
        rule = "needs memory of its own for each part that receives"
    raise ValueError(
        f"{one}: it overlaps {other} ({one} is {span(&extents.second)}, {other} {span(&extents.first)}), and "
        f"{method_of(spread.operation.kind)} {rule}; pass another buffer"
    )


cdef str _called(size_t place, size_t nranks):
    """Return the name of an argument, or of an element of it, by its place among what `_check_lists` compares."""
    if place >= 2 * nranks:
        return "send" if place == 2 * nranks else "recv"
    return f"recv[{place - nranks}]" if place >= nranks else f"send[{place}]"


cdef bint _has_stream(const View* view) noexcept:
    """Return whether something other than the legacy default stream stands for stream=None."""
    return view.framework != NO_FRAMEWORK or view.device == HOST_MEMORY


cdef int _read(Spread spread, object buffer, View* view, str argument, bint receives) except -1:
    """Read a buffer, and let it say whose stream stands for stream=None, if none before it could."""
    read_on_device(buffer, view, argument, spread.device)
    if receives:
        writable(view, argument)
    if not spread.seen or (_has_stream(view) and not _has_stream(&spread.view)):
        spread.seen, spread.view = True, view[0]
    return 0


cdef int _describe(Spread spread, int kind, const View* view, const View* send, const View* recv) except -1:
    """Fill in the operation: its type and this rank's own buffers, of which the last one's count is its own."""
    spread.operation.kind = kind
    spread.operation.datatype = view.datatype
    if send != NULL:
        spread.operation.send, spread.operation.count = send.pointer, send.count
    if recv != NULL:
        spread.operation.recv, spread.operation.count = recv.pointer, recv.count
    return 0


cdef Parts _list(Spread spread, tuple buffers, str argument, bint receives, View* like, str other, View* own):
    """Read a list of buffers, each of the type of `like`; `own` is the one of this rank.

    Without `other`, the name of `like`, it is the first one of the list.
    """
    cdef Parts parts
    cdef View view
    cdef int rank
    if len(buffers) != spread.nranks:
        raise ValueError(f"{argument}: expected a list of {spread.nranks} buffers, one a rank, got {len(buffers)}")
    parts = Parts(spread.nranks)
    for rank in range(spread.nranks):
        name = f"{argument}[{rank}]"
        _read(spread, buffers[rank], &view, name, receives)
        if other is None:
            like[0] = view
            other = name
        else:
            same_type(&view, like, name, other)
        if rank == spread.rank:
            own[0] = view
        parts.pointers[rank] = view.pointer
        parts.counts[rank] = view.count
    return parts


cdef int _counted(Spread spread, View* s, View* r, object send, object recv) except -1:
    """Read the two buffers of a collective with counts."""
    spread.send, spread.recv = send, recv
    _read(spread, send, s, "send", False)
    _read(spread, recv, r, "recv", True)
    return same_type(r, s, "recv", "send")


cdef class Spread:
    """A collective of one rank over parts; one of its methods fills it in."""

    # Lists of buffers.

    cdef int all_gather(self, send, list recv) except -1:
        cdef View s, own
        self.send, self.recv = send, tuple(recv)
        _read(self, send, &s, "send", False)
        self.recvs = _list(self, self.recv, "recv", True, &s, "send", &own)
        fits(&own, 1, &s, f"recv[{self.rank}]", "send", "all_gather")
        _describe(self, ALL_GATHER, &s, &s, NULL)
        return _check_lists(self, &s, NULL)

    cdef int reduce_scatter(self, list send, recv) except -1:
        cdef View r, own
        self.send, self.recv = tuple(send), recv
        _read(self, recv, &r, "recv", True)
        self.sends = _list(self, self.send, "send", False, &r, "recv", &own)
        fits(&own, 1, &r, f"send[{self.rank}]", "recv", "reduce_scatter")
        _describe(self, REDUCE_SCATTER, &r, NULL, &r)
        return _check_lists(self, NULL, &r)

    cdef int all_to_all(self, send, recv) except -1:
        cdef View first, s, r
        if not isinstance(send, list) or not isinstance(recv, list):
            kinds = f"{type(send).__name__} and {type(recv).__name__}"
            raise TypeError(f"send, recv: all_to_all takes two buffers or two lists of buffers, got {kinds}")
        self.send, self.recv = tuple(send), tuple(recv)
        self.sends = _list(self, self.send, "send", False, &first, None, &s)
        self.recvs = _list(self, self.recv, "recv", True, &first, "send[0]", &r)
        fits(&r, 1, &s, f"recv[{self.rank}]", f"send[{self.rank}]", "all_to_all")
        _describe(self, ALL_TO_ALL, &first, NULL, NULL)
        return _check_lists(self, NULL, NULL)

    cdef int gather(self, send, list recv, int root) except -1:
        cdef View s, own
        self.send, self.recv = send, tuple(recv)
        self.operation.root = root
        _read(self, send, &s, "send", False)
        self.recvs = _list(self, self.recv, "recv", True, &s, "send", &own)
        fits(&own, 1, &s, f"recv[{root}]", "send", "gather")
        _describe(self, GATHER, &s, &s, NULL)
        return _check_lists(self, &s, NULL)

    cdef int scatter(self, list send, recv, int root) except -1:
        cdef View r, own
        self.send, self.recv = tuple(send), recv
        self.operation.root = root
        if recv is None:
            raise ValueError("recv: every rank of a scatter needs a buffer")
        _read(self, recv, &r, "recv", True)
        self.sends = _list(self, self.send, "send", False, &r, "recv", &own)
        fits(&own, 1, &r, f"send[{root}]", "recv", "scatter")
        _describe(self, SCATTER, &r, NULL, &r)
        return _check_lists(self, NULL, &r)

    # Counts.

    cdef int all_gather_v(self, send, recv, counts) except -1:
        cdef View s, r
        cdef Py_ssize_t offset
        numbers = _as_counts(counts, self.nranks, "counts")
        _counted(self, &s, &r, send, recv)
        _holds(&s, numbers[self.rank], "send", f"counts[{self.rank}]")
        _holds(&r, sum(numbers), "recv", "sum(counts)")
        self.recvs = _parts_by(&r, numbers)
        offset = <uintptr_t>self.recvs.pointers[self.rank] - <uintptr_t>r.pointer
        check_overlap(ALL_GATHER, s.pointer, s.nbytes, r.pointer, r.nbytes, offset)
        return _describe(self, ALL_GATHER, &s, &s, NULL)

    cdef int reduce_scatter_v(self, send, recv, counts) except -1:
        cdef View s, r
        cdef Py_ssize_t offset
        numbers = _as_counts(counts, self.nranks, "counts")
        _counted(self, &s, &r, send, recv)
        _holds(&s, sum(numbers), "send", "sum(counts)")
        _holds(&r, numbers[self.rank], "recv", f"counts[{self.rank}]")
        self.sends = _parts_by(&s, numbers)
        offset = <uintptr_t>self.sends.pointers[self.rank] - <uintptr_t>s.pointer
        check_overlap(REDUCE_SCATTER, s.pointer, s.nbytes, r.pointer, r.nbytes, offset)
        return _describe(self, REDUCE_SCATTER, &s, NULL, &r)

    cdef int all_to_all_v(self, send, recv, send_counts, recv_counts) except -1:
        cdef View s, r
        outgoing = _as_counts(send_counts, self.nranks, "send_counts")
        incoming = _as_counts(recv_counts, self.nranks, "recv_counts")
        _counted(self, &s, &r, send, recv)
        _holds(&s, sum(outgoing), "send", "sum(send_counts)")
        _holds(&r, sum(incoming), "recv", "sum(recv_counts)")
        check_overlap(ALL_TO_ALL, s.pointer, s.nbytes, r.pointer, r.nbytes, 0)
        self.sends, self.recvs = _parts_by(&s, outgoing), _parts_by(&r, incoming)
        return _describe(self, ALL_TO_ALL, &s, NULL, NULL)


cdef Spread new_spread(int device, int nranks, int rank):
    cdef Spread spread = Spread.__new__(Spread)
    spread.device, spread.nranks, spread.rank = device, nranks, rank
    return spread
