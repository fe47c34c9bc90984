"""What this rank brings to an operation: the array, the work that its caller has, and an event behind its producer."""

from libc.string cimport memset

from ncclpy.abi.driver cimport CUstream
from ncclpy.core.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.library cimport host_engine, require_driver
from ncclpy.core.operation cimport Operation
from ncclpy.core.shape cimport elements, type_name, writable
from ncclpy.core.start cimport own_op_code
from ncclpy.core.stream cimport is_captured
from ncclpy.engine.monitor cimport ensure_running
from ncclpy.engine.protocols cimport Awaited
from ncclpy.engine.recorder cimport note_operation
from ncclpy.engine.streams cimport find_producer, record_behind
from ncclpy.engine.work cimport Work, new_work

from ncclpy.core.errors import ranks, spans

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


cdef class Brought:
    """One array's part in a named operation.

    Parameters
    ----------
    kind : int
        Which operation, by the numbers of `core.operation`.
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

    def __init__(self, int kind, int device, str name, array, bint receives=False):
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
            self.shape = (elements(&self.view),) if shape is None else tuple(map(int, shape))
        ensure_running(device)
        self.array, self.name = array, name
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
        code = own_op_code(op, &self.view, size, "a coordinator")
        self.work.entry.op = code
        return code

    def result_in(self, output, maker=None):
        """Have the work result in an array, or in what `maker()` returns when it is asked for."""
        self.work.output, self.work.maker = output, maker

    def wait_for(self, str where, int rank, members, have):
        """Have the work say who has not come; ``have()`` returns the ranks that this one knows to have brought it."""
        cdef _Gathering gathering = _Gathering.__new__(_Gathering)
        gathering.members, gathering.have = members, have
        self.work.entry.communicator = where
        self.work.entry.rank, self.work.entry.nranks = rank, len(members)
        self.work.gathering = gathering

    def time_it(self):
        """Have the work know how long it takes on the device."""
        self.work.timed = True

    @property
    def moments(self):
        """When it was brought, launched and done, by the monotonic clock; 0 for what has not come."""
        return self.work.entry.created, self.work.entry.launched, self.work.entry.completed

    def fail(self, error):
        """Bring the work to its end; under no lock, as arrays of the user's may go."""
        self.work.settle(error)
        self.work.tidy()

    def withdraw(self, error):
        """Forget it, as it could not be begun: the caller is told, and nobody else."""
        self.work.withdraw(error)


cdef class _Gathering(Awaited):
    """The ranks that a work waits for."""

    cdef object members, have

    cdef str missing(self):
        have = set(self.have())
        absent = [rank for rank in self.members if rank not in have]
        if not absent:
            return "its launch; all ranks have brought it"
        return f"{ranks(spans(absent))} to bring it, as far as this rank knows"
