"""Calls, and the launches that are planned for the calls that all ranks have brought."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

from ncclpy.coordinator.buffers cimport TensorEntry, Remembered, new_brought
from ncclpy.core.arguments.operation cimport ALL_REDUCE
from ncclpy.core.arguments.validation cimport lie_apart
from ncclpy.engine.callbacks cimport Awaited

from ncclpy.coordinator.keys import as_name, key_of
from ncclpy.coordinator.reductions import pack_reductions
from ncclpy.coordinator.signature import Kind, pack, pack_all, unpack_all
from ncclpy.errors import ranks, spans
from ncclpy.types import DataType, ReduceOp


cdef class Call(Awaited):
    """One operation, or several that are brought together.

    Attributes
    ----------
    names : tuple of str
        The operations' names.
    key : bytes
        The key of the operation in the control plane, the same on all ranks.
    parts : list of TensorEntry
        The arrays.
    fixed : bytes
        What must be the same on all ranks: the arrays' signatures as bytes.
    own : bytes
        This rank's own data, which all ranks receive.
    signatures : tuple of Signature
        The signatures of operations that were begun by `begin` or `begin_all`; () for an `AllReduce`.
    joinable : bool
        Whether the operation is defined without ranks that have joined.
    """

    def __cinit__(self):
        self.own = b""
        self.names = self.signatures = ()
        self.parts = []

    cdef str missing(self):
        return self.pending.missing(self.key)

    @property
    def work(self):
        """Return the work of the only, or the last, array."""
        return (<TensorEntry>self.parts[-1]).work

    def begin(self, TensorEntry part not None, signature):
        """Make this an operation of one array."""
        self.begin_all([part], (signature,))

    def begin_all(self, list parts not None, tuple signatures not None):
        """Make this an operation on each of several arrays."""
        self.names = tuple([part.name for part in parts])
        self.key, self.fixed = key_of(self.names), pack_all(signatures)
        self.parts, self.signatures = parts, signatures

    def fail(self, error):
        """End all works of the call with an error."""
        for part in self.parts:
            part.fail(error)

    def withdraw(self, error):
        """Forget the call, which could not be begun: only the caller gets the error."""
        for part in self.parts:
            part.withdraw(error)

    def launch(self, plane, owns, absent):
        """Launch the operation, once all ranks have brought it; an `AllReduce` is launched by steps of a plan instead.

        `owns` has each rank's own data, and `absent` the number of ranks that have joined. Return the `FusedLaunch` to
        copy out after the launch or None, for several arrays a list of these.
        """
        raise NotImplementedError


cdef class RememberedCalls:
    """What was last brought under each name, or group of names.

    Parameters
    ----------
    most : int
        How many names, or groups of names, are remembered. One more makes this forget all that it has remembered.
    """

    def __init__(self, Py_ssize_t most):
        self.known, self.most = {}, most


cdef class AllReduce(Call):
    """All-reduce of arrays in place, each array by itself; all of them or none.

    Parameters
    ----------
    names : str or tuple of str
        One name, or the names of arrays that are brought together.
    arrays : buffer or tuple of buffer
        As many arrays.
    op : ReduceOp or str
        The operator of all arrays.
    device, size : int
        The device of this rank, and how many ranks there are.
    remembered : RememberedCalls
        What was last brought under each name: an all-reduce with the same signature is checked less.
    prescale, postscale : float, optional
        See `Coordinator.all_reduce`.
    """

    def __init__(
        self, names, arrays, op, int device, int size, RememberedCalls remembered not None, prescale=None,
        postscale=None
    ):
        if isinstance(names, tuple):
            names = tuple([as_name(name) for name in names])
            self._fill(names, arrays, op, device, size, remembered, prescale, postscale)
        else:
            self._fill(as_name(names), arrays, op, device, size, remembered, prescale, postscale)

    cdef int _fill(
        self, names, arrays, op, int device, int size, RememberedCalls remembered, prescale, postscale
    ) except -1:
        """Set the call's fields from what is brought under one or several names, which are plain `str`."""
        cdef Remembered known = None
        cdef bint plain = prescale is None and postscale is None
        cdef Py_ssize_t i
        self.joinable = True
        if plain:
            known = remembered.known.get(names)
        if known is None:
            self.names = names if isinstance(names, tuple) else (names,)
            self.key = key_of(self.names)
        else:
            self.names, self.key = known.names, known.key
        try:
            if not isinstance(names, tuple):
                self.parts.append(new_brought(ALL_REDUCE, device, names, arrays, True, known, 0))
            else:
                for i in range(len(self.names)):
                    self.parts.append(new_brought(ALL_REDUCE, device, self.names[i], arrays[i], True, known, i))
            if known is not None and known.is_of(self.parts, op):
                self.fixed = known.fixed
                return 0
            self.fixed = pack_reductions(self.parts, op, size, prescale, postscale)
        except BaseException as error:
            self.withdraw(error)
            raise
        if plain:
            if len(remembered.known) >= remembered.most:
                remembered.known.clear()
            remembered.known[names] = Remembered(self.names, self.parts, op, self.key, self.fixed)
        return 0


cdef AllReduce new_all_reduce(name, array, op, int device, int size, RememberedCalls remembered, prescale, postscale):
    cdef AllReduce made = AllReduce.__new__(AllReduce)
    if type(name) is not str:
        name = as_name(name)
    made._fill(name, array, op, device, size, remembered, prescale, postscale)
    return made


cdef object _ALL_REDUCE = Kind.ALL_REDUCE
cdef dict _agreed = {}
cdef Py_ssize_t _MAX_AGREED = 4096


cdef class Agreed:
    """The signatures of an operation, which are the same on all ranks, and what each launch needs of them.

    Parameters
    ----------
    packed : bytes
        Signatures as packed by `signature.pack_all`.

    Attributes
    ----------
    signatures : tuple of Signature
        The arrays' signatures.
    fusable : bool
        Whether all of them are all-reduces, which may be launched with others.
    kinds : list of bytes
        For each array, a key that is the same for arrays that may share a fusion buffer.
    nbytes, elements : list of int
        For each array, its size in bytes, and in elements of NCCL's type.
    is_plain : bool
        Whether NCCL has the operators, however many ranks have joined: there is no average, and no scale.
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
        self.is_plain = not any(
            each.op == ReduceOp.AVG or each.prescale is not None or each.postscale is not None
            for each in self.signatures
        )


cdef Agreed agreed_on(bytes fixed):
    """Return the `Agreed` of what all ranks have brought, mostly from a cache."""
    cdef Agreed found = _agreed.get(fixed)
    if found is None:
        found = Agreed(fixed)
        if len(_agreed) >= _MAX_AGREED:
            _agreed.clear()
        _agreed[fixed] = found
    return found


cdef class Ready:
    """An operation that all ranks have brought.

    Parameters
    ----------
    call : Call or None
        What this rank has brought; None if it has joined, or if the session has ended and so has failed the call.
    fixed : bytes
        What all have brought alike.
    owns : tuple of bytes
        Each rank's own data, in the order of the set.
    absent : tuple of int
        The ranks of the set that have joined.

    Attributes
    ----------
    agreed : Agreed
        What all have brought alike.
    """

    def __init__(self, Call call, bytes fixed not None, tuple owns=(), tuple absent=()):
        self.call, self.agreed, self.owns, self.absent = call, agreed_on(fixed), owns, absent


cdef class Step:
    """One launch: of one or more all-reduced arrays, or of one operation of another kind with all its arrays.

    Attributes
    ----------
    operations : list of Ready
        For each all-reduced array the operation that the array belongs to; otherwise the one operation.
    places : list of int
        For each all-reduced array its index in that operation; otherwise [0].
    signature : Signature
        The first array's signature.
    fused : bool
        Whether these are all-reduces that are copied into a fusion buffer.
    absent : int
        How many ranks have joined and contribute the identity.
    """

    cdef int _add(self, Ready ready, Py_ssize_t place, long long nbytes) except -1:
        self.operations.append(ready)
        self.places.append(place)
        self.nbytes += nbytes
        return 0

    cdef list brought(self):
        """Return this rank's array for each of `operations`; None in place of an array that it has not brought."""
        cdef Ready ready
        cdef Py_ssize_t i
        found = []
        for i in range(len(self.operations)):
            ready = self.operations[i]
            found.append(None if ready.call is None else ready.call.parts[<Py_ssize_t>self.places[i]])
        return found

    cdef list members(self):
        """Return what `brought` returns, each array with its number of elements of NCCL's type."""
        cdef Ready ready
        cdef Py_ssize_t i, place
        found = []
        for i in range(len(self.operations)):
            ready, place = self.operations[i], self.places[i]
            found.append((None if ready.call is None else ready.call.parts[place], ready.agreed.elements[place]))
        return found

    def __len__(self):
        return len(self.operations)


cdef Step _step(Ready ready, Py_ssize_t place, long long nbytes):
    cdef Step made = Step.__new__(Step)
    made.operations, made.places = [], []
    made.signature, made.absent = ready.agreed.signatures[place], len(ready.absent)
    made._add(ready, place, nbytes)
    return made


cpdef list plan(list operations, long long fusion_bytes, long long large, bint staged):
    """Return the launches of a frame's operations, in order.

    An array is fused into the last fusion buffer begun before it for the same type, operator, scales, memory and
    number of joined ranks, if the buffer has space, even if other launches lie between them.

    Parameters
    ----------
    operations : list of Ready
        What all ranks have brought.
    fusion_bytes : int
        Most bytes in a fusion buffer; 0 to copy nothing that need not be copied.
    large : int
        An array of at least so many bytes is launched alone: copying it would take longer than another launch. With
        `staged`, an array of CPU memory is copied nevertheless.
    staged : bool
        Whether arrays of CPU memory have to be copied to the device, also if they are launched alone.

    Returns
    -------
    list of Step
    """
    cdef list steps = []
    cdef dict open_steps = {}
    cdef Ready ready
    cdef Step step
    cdef Py_ssize_t place
    cdef long long nbytes
    large = min(large, fusion_bytes)
    for ready in operations:
        if not ready.agreed.fusable:  # the operation itself launches all its arrays
            steps.append(_step(ready, 0, 0))
            continue
        for place in range(len(ready.agreed.nbytes)):
            nbytes = ready.agreed.nbytes[place]
            if nbytes >= large:
                steps.append(_step(ready, place, nbytes))
                continue
            alike = ready.agreed.kinds[place] if not ready.absent else (ready.agreed.kinds[place], len(ready.absent))
            step = open_steps.get(alike)
            if step is not None and step.nbytes + nbytes <= fusion_bytes:
                step._add(ready, place, nbytes)
                continue
            step = open_steps[alike] = _step(ready, place, nbytes)
            steps.append(step)
    for step in steps:
        if step.signature.kind is _ALL_REDUCE:
            step.fused = len(step.operations) > 1 or (staged and not step.signature.on_device)
    return steps


cdef class UsedMemory:
    """The memory of arrays in flight, ordered by address; memory that is written overlaps no other."""

    def __dealloc__(self):
        free(self.rows)

    cdef Py_ssize_t _first(self, uintptr_t start) noexcept:
        """Return the index of the first row that does not begin before an address."""
        cdef Py_ssize_t low = 0, high = self.count, middle
        while low < high:
            middle = (low + high) // 2
            if self.rows[middle].start < start:
                low = middle + 1
            else:
                high = middle
        return low

    cdef bint is_free(self, uintptr_t start, size_t nbytes, bint writes) noexcept:
        """Return whether memory may be read (or written, if `writes`) while the arrays in flight are in use."""
        cdef Py_ssize_t first = self._first(start), at = first
        while at < self.count and self.rows[at].start < start + nbytes:
            if writes or self.rows[at].writes:
                return False
            at += 1
        at = first - 1
        while at >= 0 and start - self.rows[at].start < self.longest:
            if (writes or self.rows[at].writes) and start - self.rows[at].start < self.rows[at].nbytes:
                return False
            at -= 1
        return True

    cdef int add(self, uintptr_t start, size_t nbytes, bint writes) except -1:
        cdef Py_ssize_t at = self._first(start), capacity
        cdef Use* grown
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 16
            grown = <Use*>realloc(self.rows, capacity * sizeof(Use))
            if grown == NULL:
                raise MemoryError
            self.rows, self.capacity = grown, capacity
        memmove(&self.rows[at + 1], &self.rows[at], (self.count - at) * sizeof(Use))
        self.rows[at].start, self.rows[at].nbytes, self.rows[at].writes = start, nbytes, writes
        self.count += 1
        self.longest = max(self.longest, nbytes)
        return 0

    cdef int remove(self, uintptr_t start, size_t nbytes) noexcept:
        """Remove one use of this memory, if there is any."""
        cdef Py_ssize_t at = self._first(start)
        while at < self.count and self.rows[at].start == start:
            if self.rows[at].nbytes == nbytes:
                self.count -= 1
                memmove(&self.rows[at], &self.rows[at + 1], (self.count - at) * sizeof(Use))
                break
            at += 1
        if self.count == 0:
            self.longest = 0
        return 0


cdef class Pending:
    """The operations in flight of one rank in one process set.

    The user's threads enter the calls that they bring, and one thread takes them out for their launch. Each name, and
    each array that is written, is in flight at most once. Arrays are identified by their memory: memory that is only
    read may be in flight under several names, and so may an array without elements.

    There is no lock. Entering, taking and forgetting are steps under the GIL that run no Python code: names and keys
    are plain `str` and `bytes`, and no object is made that the garbage collector tracks.

    Parameters
    ----------
    label : str
        The process set, for messages.
    rank : int
        This rank's number in the set.
    members : tuple of int
        The set's members among all ranks.
    number : int
        The set's number.

    Attributes
    ----------
    have : callable
        ``have(number, key)`` returns the ranks that are known here to have brought an operation.
    """

    def __init__(self, str label not None, int rank, tuple members not None, int number):
        self.label, self.rank, self.members, self.number = label, rank, members, number
        self.calls, self.names, self.uses = {}, set(), UsedMemory()
        self.have = None

    cdef int enter(self, Call call) except -1:
        """Note what this rank is about to bring.

        Raises
        ------
        ValueError
            If one of its names is in flight or is listed twice, or one of its arrays overlaps memory in use and one of
            the two is written.
        """
        cdef TensorEntry part, clash = None
        cdef str name, taken = None
        if len(call.names) > 1 and len(set(call.names)) < len(call.names):
            twice = next(name for name in call.names if call.names.count(name) > 1)
            raise ValueError(f"names: {twice!r} is listed twice. Nothing of this call was sent")
        for name in call.names:
            if name in self.names and (taken is None or name < taken):
                taken = name
        if taken is not None:
            raise ValueError(
                f"name: {taken!r} is in flight on this rank already: a name can be brought again once its "
                "operation was launched: wait for its work first. Nothing of this call was sent"
            )
        clash = self._use(call.parts)
        if clash is None:
            for name in call.names:
                self.names.add(name)
            self.calls[call.key] = call
        else:
            raise ValueError(
                f"array: the array of {clash.name!r} overlaps the array of {self._other(call, clash)!r}, which is in "
                "use on this rank already, and one of them is written: bring memory under one name at a time. Nothing "
                "of this call was sent"
            )
        call.pending = self
        for part in call.parts:
            part.work.entry.communicator = self.label
            part.work.entry.rank, part.work.entry.nranks = self.rank, len(self.members)
            part.work.awaits = call
        return 0

    cdef TensorEntry _use(self, list parts):
        """Note the memory of these arrays; if one is in use, return the first such part and note nothing."""
        cdef TensorEntry part
        cdef Py_ssize_t entered
        for entered in range(len(parts)):
            part = parts[entered]
            if part.view.nbytes and part.view.pointer != NULL:
                if not self.uses.is_free(<uintptr_t>part.view.pointer, part.view.nbytes, part.receives):
                    self._leave(parts, entered)
                    return part
                self.uses.add(<uintptr_t>part.view.pointer, part.view.nbytes, part.receives)
                part.entered = True
        return None

    cdef int _leave(self, list parts, Py_ssize_t number) except -1:
        """Forget the memory of the first `number` of these arrays, where it is noted."""
        cdef TensorEntry part
        cdef Py_ssize_t i
        for i in range(number):
            part = parts[i]
            if part.entered:
                part.entered = False
                self.uses.remove(<uintptr_t>part.view.pointer, part.view.nbytes)
        return 0

    cdef str _other(self, Call call, TensorEntry clash):
        """Return the name under which an array is in use."""
        cdef TensorEntry part
        cdef Call each
        for each in [*self.calls.values(), call]:
            for part in each.parts:
                if (
                    part is not clash and (part.receives or clash.receives)
                    and not lie_apart(part.view.pointer, part.view.nbytes, clash.view.pointer, clash.view.nbytes)
                ):
                    return part.name
        return clash.name  # the other call was launched meanwhile

    def take(self, bytes key not None):
        """Remove and return what this rank has brought under a key; None if there is nothing."""
        return self._take(key)

    cdef Call _take(self, bytes key):
        cdef Call call = self.calls.pop(key, None)
        if call is not None:
            self._release(call)
        return call

    cdef int _release(self, Call call) except -1:
        for name in call.names:
            self.names.discard(name)
        return self._leave(call.parts, len(call.parts))

    def ready(self, bytes key not None, bytes fixed not None, tuple owns not None, tuple absent not None):
        """Remove what this rank has brought under a key; return it as an operation that all ranks have brought."""
        cdef Ready made = Ready.__new__(Ready)
        made.call, made.agreed, made.owns, made.absent = self._take(key), agreed_on(fixed), owns, absent
        return made

    def forget(self, Call call not None):
        """Remove what was noted of a call that could not be brought: all, a part or nothing of the call.

        An error, a signal handler's too, may have ended the bringing before or after `enter` or within it.
        """
        if self.calls.get(call.key) is call:
            del self.calls[call.key]
            self._release(call)
        else:
            self._leave(call.parts, len(call.parts))

    def take_all(self):
        """Remove and return all calls."""
        cdef dict calls = {}
        cdef UsedMemory uses = UsedMemory()
        cdef set names = set()
        calls, self.calls, self.names, self.uses = self.calls, calls, names, uses
        return list(calls.values())

    def missing(self, bytes key not None):
        """Return a text of what an operation waits for: ranks that have not brought it, or its launch."""
        if key not in self.calls:
            return "its launch; all ranks have brought it"
        have = set(self.have(self.number, key))
        absent = [rank for rank in self.members if rank not in have]
        if not absent:
            return "its launch; all ranks have brought it"
        return f"{ranks(spans(absent))} to bring it, as far as this rank knows"

    def __len__(self):
        """Return how many operations wait for other ranks."""
        return len(self.calls)

    def keys(self):
        """Return the keys of the operations that wait."""
        return list(self.calls)

    def sizes(self):
        """Return the numbers of operations, names and arrays, for tests."""
        return len(self.calls), len(self.names), self.uses.count
