"""What this rank brings to an operation: the array, the work that its caller has, and an event behind its producer."""

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.arguments.datatypes cimport BYTES
from ncclpy.core.runtime.library cimport host_engine, require_driver
from ncclpy.core.arguments.operation cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Operation,
)
from ncclpy.core.arguments.validation cimport cannot_reduce, elements, type_name, writable
from ncclpy.core.start cimport own_op_code
from ncclpy.core.runtime.stream cimport is_captured
from ncclpy.engine.monitor cimport ensure_running
from ncclpy.engine.native cimport change, now
from ncclpy.engine.recorder cimport LAUNCHED, PENDING, note_operation
from ncclpy.engine.launcher cimport find_producer, record_behind
from ncclpy.engine.work cimport Work, new_work

#: The kinds of operations, by name: for `Brought` in modules of Python.
KINDS = {
    "all_gather": ALL_GATHER,
    "all_reduce": ALL_REDUCE,
    "all_to_all": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "reduce_scatter": REDUCE_SCATTER,
}

cdef bint _as_on_gpus = False


cdef bint copies_apart() noexcept:
    return _as_on_gpus or not host_engine


def work_as_on_gpus(bint wanted=True):
    """Have the host engine copy CPU memory to its devices too, as one has to with GPUs: so that this can be tested."""
    global _as_on_gpus
    _as_on_gpus = wanted


def is_as_on_gpus():
    """Return whether CPU memory is copied to devices."""
    require_driver()
    return copies_apart()


def memory_of(array):
    """Return the bytes of an array in CPU memory, which keep nothing alive."""
    cdef View view
    read_view(array, &view, "array")
    return _bytes_of(&view)


cdef object _bytes_of(const View* view):
    if view.nbytes == 0:
        return memoryview(bytearray())
    if view.device != HOST_MEMORY:
        raise ValueError(f"array: it is on device {view.device}, not in CPU memory")
    return PyMemoryView_FromMemory(<char*>view.pointer, view.nbytes, PyBUF_READ if view.readonly else PyBUF_WRITE)


cdef Brought new_brought(int kind, int device, str name, object array, bint receives, Remembered known, Py_ssize_t place):
    """Return a `Brought` of an array that was known, mostly, when it was brought last."""
    cdef Brought made = Brought.__new__(Brought)
    made._look_at(kind, device, name, array, receives, None if known is None else (<tuple>known.types[place])[3])
    return made


cdef class Brought:
    """One array's part in a named operation.

    Parameters
    ----------
    kind : int
        Which operation, by the numbers of `core.arguments.operation`.
    device : int
        The device that it runs on.
    name : str
        The operation's.
    array : buffer or None
        What is brought; a barrier brings nothing.
    receives : bool
        Whether the result is written into it.

    Attributes
    ----------
    work : Work
        Pending from the start.
    shape : tuple of int
        The array's; of a `Buffer` its count.
    """

    def __init__(self, int kind, int device, str name not None, array, bint receives=False):
        self._look_at(kind, device, name, array, receives, None)

    cdef int _look_at(self, int kind, int device, str name, object array, bint receives, tuple known) except -1:
        """Be what is brought; `known` is the shape that it will have had, if it was brought before."""
        cdef Operation noted
        cdef CUstream stream
        require_driver()
        memset(&self.view, 0, sizeof(self.view))
        if array is None:
            self.view.device = HOST_MEMORY
            self.shape = ()
        else:
            read_view(array, &self.view, "array")
            if self.view.device >= 0 and self.view.device != device:
                raise ValueError(f"array: it is on device {self.view.device}, this coordinator works with device {device}")
            if receives:
                writable(&self.view, "array")
            shape = getattr(array, "shape", None)
            if known is not None and isinstance(shape, tuple) and shape == known:
                self.shape = known  # with numbers of Python's own
            else:
                self.shape = (elements(&self.view),) if shape is None else tuple(map(int, shape))
        ensure_running(device)
        self.array, self.name, self.receives = array, name, receives
        self.work = new_work(kind, device)
        self.work.entry.key = name
        self.work.held = self.work.output = array
        memset(&noted, 0, sizeof(noted))
        noted.kind, noted.datatype, noted.count, noted.root = kind, self.view.datatype, self.view.count, -1
        note_operation(self.work.entry, &noted, self.view.nbytes)
        self.work.entry.tag, self.work.entry.is_barrier = -1, array is None
        if array is not None and find_producer(&self.view, device, None, &stream):
            try:
                if is_captured(stream, device):
                    raise ValueError(
                        f"array: its stream is being captured, and what is brought under a name runs when all ranks have "
                        f"brought it: {name!r} cannot be part of a CUDA graph. Nothing was captured"
                    )
                record_behind(self.work, stream)
            except BaseException as error:  # the recorder is not to show it as pending
                self.work.withdraw(error)
                raise
        return 0

    cdef bint is_staged(self) noexcept:
        return self.view.device == HOST_MEMORY and self.array is not None and copies_apart()

    @property
    def dtype(self):
        """The array's type, as its owner calls it; "" where there is no array."""
        return "" if self.array is None else type_name(&self.view)

    @property
    def datatype(self):
        """NCCL's number for what carries it."""
        return self.view.datatype

    @property
    def unit(self):
        """So many of those are one element."""
        return max(<size_t>1, self.view.unit)

    @property
    def count(self):
        """How many elements it has."""
        return elements(&self.view)

    @property
    def nbytes(self):
        """Its size."""
        return self.view.nbytes

    @property
    def on_device(self):
        """Whether it is in device memory."""
        return self.view.device != HOST_MEMORY

    @property
    def staged(self):
        """Whether its data have to be copied to the device first."""
        return self.is_staged()

    def op_code(self, op, int size):
        """Return the operator's number for this array, checked."""
        if self.view.flavour >= BYTES:
            raise cannot_reduce(&self.view, f"array of {self.name!r}")
        code = own_op_code(op, &self.view, size, "a coordinator")
        self.work.entry.op = code
        return code

    def result_in(self, output, maker=None):
        """Have the work result in an array, or in what `maker()` returns when it is asked for."""
        self.work.output, self.work.maker = output, maker

    def time_it(self):
        """Have the work know how long it takes on the device."""
        self.work.timed = True

    @property
    def moments(self):
        """When it was brought, launched and done, by the monotonic clock; 0 for what has not come."""
        return self.work.entry.created, self.work.entry.launched, self.work.entry.completed

    def memory(self):
        """Return its bytes in CPU memory, which keep nothing alive."""
        return _bytes_of(&self.view)

    def begin(self):
        """Note that it is on its way, by what is no stream of the device's."""
        self.work.gathering = None
        self.work.entry.launched = now()
        change(&self.work.entry.state, PENDING, LAUNCHED)

    def finish(self):
        """Bring the work to its end, with its result; under no lock, as arrays of the user's may go."""
        if self.work.timed:  # by the device, which knows nothing of it
            self.work.timed = False
            self.work.seconds = now() - self.work.entry.launched
        self.work.settle(None)
        self.work.tidy()

    def fail(self, error):
        """Bring the work to its end; under no lock, as arrays of the user's may go."""
        self.work.settle(error)
        self.work.tidy()

    def withdraw(self, error):
        """Forget it, as it could not be begun: only the caller is told."""
        self.work.withdraw(error)


cdef class Remembered:
    """What an all-reduce was when it was brought last under its names: mostly it is the same again.

    Parameters
    ----------
    names : tuple of str
        Of the arrays.
    parts : list of Brought
        The arrays.
    op : object
        The operator, as the caller names it.
    key, fixed : bytes
        What stands for them, and for the signatures, in the control plane.
    """

    def __init__(self, tuple names not None, list parts not None, op, bytes key not None, bytes fixed not None):
        cdef Brought part
        self.names, self.op, self.key, self.fixed = names, op, key, fixed
        self.code = (<Brought>parts[0]).work.entry.op
        self.types = [
            (part.view.datatype, part.view.unit, part.view.device, part.shape, part.view.flavour) for part in parts
        ]

    cdef bint is_of(self, list parts, op) except -1:
        """Return whether arrays, of these names, are brought as the last ones were; then they have their operator."""
        cdef Brought part
        cdef tuple known
        cdef Py_ssize_t i
        if op is not self.op and not (type(op) is str and op == self.op):
            return False
        for i in range(len(parts)):
            part, known = parts[i], self.types[i]
            if (
                part.view.datatype != <int>known[0] or part.view.unit != <size_t>known[1]
                or part.view.device != <int>known[2] or (part.shape is not known[3] and part.shape != <tuple>known[3])
                or part.view.flavour != <unsigned long long>known[4]
            ):
                return False
        for part in parts:
            part.work.entry.op = self.code
        return True
