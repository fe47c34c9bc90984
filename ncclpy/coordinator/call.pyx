"""What is brought under one key: an operation, or all-reduces that are brought together."""

from ncclpy.core.operation cimport ALL_REDUCE
from ncclpy.coordinator.brought cimport Brought, Remembered, new_brought
from ncclpy.engine.protocols cimport Awaited

from ncclpy.coordinator.names import as_name, key_of
from ncclpy.coordinator.reductions import pack_reductions
from ncclpy.coordinator.signature import pack_all


cdef class Call(Awaited):
    """One operation, or several that are brought together.

    Attributes
    ----------
    names : tuple of str
        Of the operations.
    key : bytes
        By which the ranks find each other's.
    parts : list of Brought
        The arrays.
    fixed : bytes
        What has to be the same on all ranks, by array: signatures as bytes.
    own : bytes
        What is this rank's own, for the others to know.
    signatures : tuple of Signature
        Of what `begin` has begun.
    joinable : bool
        Whether it has a meaning without ranks that have joined.
    """

    def __cinit__(self):
        self.own = b""
        self.names = self.signatures = ()
        self.parts = []

    cdef str missing(self):
        return self.place.missing(self.key)

    @property
    def work(self):
        """Return the work of its only, or its last, array."""
        return (<Brought>self.parts[-1]).work

    def begin(self, Brought part not None, signature):
        """Be an operation of one array."""
        self.names, self.key = (part.name,), key_of((part.name,))
        self.parts, self.signatures = [part], (signature,)
        self.fixed = pack_all(self.signatures)

    def fail(self, error):
        """Bring all of its works to their end."""
        for part in self.parts:
            part.fail(error)

    def withdraw(self, error):
        """Forget it, as it could not be begun: the caller is told, and nobody else."""
        for part in self.parts:
            part.withdraw(error)

    def launch(self, plane, owns, absent):
        """Launch it, once all ranks have brought it; all-reduces are launched by their plan."""
        raise NotImplementedError


cdef class Memory:
    """What was brought last under each name, alone or together.

    Parameters
    ----------
    most : int
        So many are remembered, and then all are forgotten.
    """

    def __init__(self, Py_ssize_t most):
        self.known, self.most = {}, most


cdef class AllReduce(Call):
    """Arrays that are reduced in place, each by itself; all of them or none.

    Parameters
    ----------
    names : str or tuple of str
        One, or those of arrays that are brought together.
    arrays : buffer or tuple of buffer
        As many.
    op : ReduceOp or str
        Of all.
    device, size : int
        The device of this rank, and how many ranks there are.
    memory : Memory
        What was brought under which names: mostly it is the same again, and need not be looked at as closely.
    prescale, postscale : float, optional
        See `Coordinator.all_reduce`.
    """

    def __init__(
        self, names, arrays, op, int device, int size, Memory memory not None, prescale=None, postscale=None
    ):
        if isinstance(names, tuple):
            self._take(tuple([as_name(name) for name in names]), arrays, op, device, size, memory, None, None)
        else:
            self._take(as_name(names), arrays, op, device, size, memory, prescale, postscale)

    cdef int _take(self, names, arrays, op, int device, int size, Memory memory, prescale, postscale) except -1:
        """Be what is brought under a name or under several, which are texts of Python's own."""
        cdef Remembered known = None
        cdef bint plain = prescale is None and postscale is None
        cdef Py_ssize_t i
        self.joinable = True
        if plain:
            known = memory.known.get(names)
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
            if len(memory.known) >= memory.most:
                memory.known.clear()
            memory.known[names] = Remembered(self.names, self.parts, op, self.key, self.fixed)
        return 0


cdef AllReduce new_all_reduce(name, array, op, int device, int size, Memory memory, prescale, postscale):
    cdef AllReduce made = AllReduce.__new__(AllReduce)
    if type(name) is not str:
        name = as_name(name)
    made._take(name, array, op, device, size, memory, prescale, postscale)
    return made
