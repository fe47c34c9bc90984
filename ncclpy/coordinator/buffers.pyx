"""Buffers: the arrays that a rank brings to operations, fusion buffers, and the copies into and out of them.

A data plane has two fusion buffers, its slots. Data are copied into a slot once they are produced, and out of it after
the launch; each array has a `Work` of its own. If the copies have streams of their own, the copies of one slot overlap
the launch in the other slot.
"""

import logging

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from ncclpy.abi.driver cimport (
    CUDA_SUCCESS, CU_EVENT_WAIT_DEFAULT, CUcontext, CUdeviceptr, CUmodule, CUresult, CUstream,
)
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.arguments.buffers cimport HOST_MEMORY, View, read_view
from ncclpy.core.arguments.datatypes cimport BYTES
from ncclpy.core.arguments.operation cimport ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Operation
from ncclpy.core.arguments.validation cimport cannot_reduce, elements, type_name, writable
from ncclpy.core.runtime.device cimport enter_device, leave_device
from ncclpy.core.runtime.library cimport check_driver, driver, host_engine, require_driver
from ncclpy.core.runtime.stream cimport Stream, is_captured
from ncclpy.core.runtime.wait cimport FOREVER, deadline_after, wait_for_event
from ncclpy.core.start cimport builtin_op_code
from ncclpy.engine.callbacks cimport user_executor
from ncclpy.engine.launcher cimport find_producer, record_behind
from ncclpy.engine.monitor cimport ensure_running, hand_over, reserve_inbox
from ncclpy.engine.native cimport change, load, now, wake
from ncclpy.engine.recorder cimport COMPLETED, FAILED, LAUNCHED, PENDING, note_operation
from ncclpy.engine.work cimport Watched, Work, give_event, new_work, take_event

from ncclpy.coordinator import copy_kernel as _kernel
from ncclpy.core.runtime import device as _device
from ncclpy.errors import NcclAborted


#: The kinds of operations, by name, for `TensorEntry` in Python modules.
KINDS = {
    "all_gather": ALL_GATHER,
    "all_reduce": ALL_REDUCE,
    "all_to_all": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "reduce_scatter": REDUCE_SCATTER,
}

cdef bint _copies_forced = False


cdef bint must_copy_to_device() noexcept:
    return _copies_forced or not host_engine


def force_copies_to_device(bint wanted=True):
    """Have the host engine copy CPU memory to its devices, as is necessary with GPUs, so that this can be tested."""
    global _copies_forced
    _copies_forced = wanted


def copies_to_device():
    """Return whether CPU memory is copied to devices."""
    require_driver()
    return must_copy_to_device()


def memory_of(array):
    """Return the bytes of an array in CPU memory, as a memoryview that does not keep the array alive."""
    cdef View view
    read_view(array, &view, "array")
    return _bytes_of(&view)


cdef object _bytes_of(const View* view):
    if view.nbytes == 0:
        return memoryview(bytearray())
    if view.device != HOST_MEMORY:
        raise ValueError(f"array: it is on device {view.device}, not in CPU memory")
    return PyMemoryView_FromMemory(<char*>view.pointer, view.nbytes, PyBUF_READ if view.readonly else PyBUF_WRITE)


cdef TensorEntry new_brought(int kind, int device, str name, object array, bint receives, Remembered known, Py_ssize_t place):
    """Return a `TensorEntry` of an array; `known` is what was last brought under these names, or None."""
    cdef TensorEntry made = TensorEntry.__new__(TensorEntry)
    made._fill(kind, device, name, array, receives, None if known is None else (<tuple>known.types[place])[3])
    return made


cdef class TensorEntry:
    """One array's part in a named operation.

    Parameters
    ----------
    kind : int
        The operation, by the numbers of `core.arguments.operation`.
    device : int
        The device that the operation runs on.
    name : str
        The operation's name.
    array : buffer or None
        The array; None for a barrier.
    receives : bool
        Whether the result is written into the array.

    Attributes
    ----------
    work : Work
        The operation's work, pending from the start.
    shape : tuple of int
        The array's shape; (count,) for an array without one, such as a `Buffer`; () for a barrier.
    """

    def __init__(self, int kind, int device, str name not None, array, bint receives=False):
        self._fill(kind, device, name, array, receives, None)

    cdef int _fill(self, int kind, int device, str name, object array, bint receives, tuple known) except -1:
        """Set the entry's fields from an array; `known` is its shape when it was last brought, or None."""
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
                self.shape = known  # an earlier tuple of plain Python numbers
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
            except BaseException as error:  # the recorder must not show the work as pending
                self.work.withdraw(error)
                raise
        return 0

    cdef bint is_staged(self) noexcept:
        return self.view.device == HOST_MEMORY and self.array is not None and must_copy_to_device()

    @property
    def dtype(self):
        """The array's type, as its package names it; "" if there is no array."""
        return "" if self.array is None else type_name(&self.view)

    @property
    def datatype(self):
        """NCCL's number of the type that carries the data."""
        return self.view.datatype

    @property
    def unit(self):
        """Elements of `datatype` for one element of the array."""
        return max(<size_t>1, self.view.unit)

    @property
    def count(self):
        """How many elements the array has."""
        return elements(&self.view)

    @property
    def nbytes(self):
        """The array's size in bytes."""
        return self.view.nbytes

    @property
    def on_device(self):
        """Whether the array is in device memory."""
        return self.view.device != HOST_MEMORY

    @property
    def staged(self):
        """Whether the data have to be copied to the device first."""
        return self.is_staged()

    def op_code(self, op, int size):
        """Check that the operator can reduce this array; note its number in the work's record, and return it."""
        if self.view.flavour >= BYTES:
            raise cannot_reduce(&self.view, f"array of {self.name!r}")
        code = builtin_op_code(op, &self.view, size, "a coordinator")
        self.work.entry.op = code
        return code

    def result_in(self, output, maker=None):
        """Set the work's result: `output`, or what `maker()` returns when the result is asked for."""
        self.work.output, self.work.maker = output, maker

    def time_it(self):
        """Have the work measure its time on the device."""
        self.work.timed = True

    @property
    def moments(self):
        """When the array was brought, launched and done, by the monotonic clock; 0 for what has not happened yet."""
        return self.work.entry.created, self.work.entry.launched, self.work.entry.completed

    def memory(self):
        """Return the array's bytes in CPU memory, as a memoryview that does not keep the array alive."""
        return _bytes_of(&self.view)

    def begin(self):
        """Note that the operation is launched, but not on a stream of the device."""
        self.work.awaits = None
        self.work.entry.launched = now()
        change(&self.work.entry.state, PENDING, LAUNCHED)

    def finish(self):
        """End the work with its result. The caller holds no lock, as this may free the user's arrays."""
        if self.work.timed:  # a device would measure the time, but the operation did not run on one
            self.work.timed = False
            self.work.seconds = now() - self.work.entry.launched
        self.work.settle(None)
        self.work.tidy()

    def fail(self, error):
        """End the work with an error. The caller holds no lock, as this may free the user's arrays."""
        self.work.settle(error)
        self.work.tidy()

    def withdraw(self, error):
        """Forget the work, which could not be begun: only the caller gets the error."""
        self.work.withdraw(error)


cdef class Remembered:
    """An all-reduce as it was last brought under its names; the next one mostly has the same signature.

    Parameters
    ----------
    names : tuple of str
        The arrays' names.
    parts : list of TensorEntry
        The arrays.
    op : object
        The operator, as the caller names it.
    key, fixed : bytes
        The names and the signatures, as bytes for the control plane.
    """

    def __init__(self, tuple names not None, list parts not None, op, bytes key not None, bytes fixed not None):
        cdef TensorEntry part
        self.names, self.op, self.key, self.fixed = names, op, key, fixed
        self.code = (<TensorEntry>parts[0]).work.entry.op
        self.types = [
            (part.view.datatype, part.view.unit, part.view.device, part.shape, part.view.flavour) for part in parts
        ]

    cdef bint is_of(self, list parts, op) except -1:
        """Return whether these arrays and this operator are as last brought; if so, note its number in their works."""
        cdef TensorEntry part
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


cdef extern from "copy_many.h" nogil:
    enum:
        MOST "NCCLPY_COPIES_MAX"
        CHUNK "NCCLPY_COPY_CHUNK"
        THREADS "NCCLPY_COPY_THREADS"

    ctypedef struct Table "ncclpy_copies":
        uint32_t count
        uint64_t from_ "from"[1]
        uint64_t to[1]
        uint64_t nbytes "bytes"[1]
        uint32_t first_block[1]

_log = logging.getLogger("ncclpy.coordinator")
cdef dict _copiers = {}


cdef Copier copier_of(int device):
    """Return a device's copier, with its kernel in the device's memory.

    Loading the kernel may wait for all that runs on the device, so it is loaded before any operation on the device
    waits for other ranks.
    """
    cdef Copier copier = _copiers.get(device)
    if copier is not None:
        return copier
    copier = Copier.__new__(Copier)
    cdef CUmodule module = NULL
    cdef CUfunction function = NULL
    cdef CUresult result
    cdef CUcontext saved
    cdef const char* text = <const char*><bytes>_kernel.PTX
    cdef const char* name = <const char*><bytes>_kernel.NAME
    cdef Stream stream
    cdef Copy nothing
    copier.device, copier.function = device, NULL
    require_driver()
    stream = Stream(device)
    saved = enter_device(device)
    with nogil:
        result = driver.cuModuleLoadData(&module, text)
        if result == CUDA_SUCCESS:
            result = driver.cuModuleGetFunction(&function, module, name)
    leave_device(saved)
    if result == CUDA_SUCCESS:
        copier.function = function
        memset(&nothing, 0, sizeof(nothing))
        saved = enter_device(device)
        with nogil:  # a driver that loads lazily loads the kernel now
            result = copier.run(&nothing, 1, 0, True, True, stream.raw)
        leave_device(saved)
        stream.synchronize()
    if result != CUDA_SUCCESS:
        copier.function = NULL
        _log.warning(
            "device %d: the copy kernel cannot be loaded (CUresult %d): each copy is a driver call", device, result
        )
    stream.close()
    return _copiers.setdefault(device, copier)


cdef class Copier:
    """Make copies on one device; its context must be current."""

    cdef CUresult run(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, bint addressable, CUstream stream) noexcept nogil:
        """Enqueue copies into a slot (`inwards`) or out of it.

        If `addressable`, the device can address the memory, and one kernel makes many copies. Pageable memory needs a
        driver call for each copy.
        """
        cdef size_t i, begin = 0
        cdef uintptr_t place
        cdef CUresult result = CUDA_SUCCESS
        if self.function != NULL and addressable:
            while begin < count and result == CUDA_SUCCESS:
                i = min(count - begin, <size_t>MOST)
                result = self._launch(copies + begin, i, slot, inwards, stream)
                begin += i
            return result
        for i in range(count):
            place = slot + copies[i].offset
            if copies[i].nbytes == 0:
                continue
            if copies[i].at == 0:
                result = driver.cuMemsetD8Async(<CUdeviceptr>place, 0, copies[i].nbytes, stream)
            elif inwards:
                result = driver.cuMemcpyAsync(<CUdeviceptr>place, <CUdeviceptr>copies[i].at, copies[i].nbytes, stream)
            else:
                result = driver.cuMemcpyAsync(<CUdeviceptr>copies[i].at, <CUdeviceptr>place, copies[i].nbytes, stream)
            if result != CUDA_SUCCESS:
                break
        return result

    cdef CUresult _launch(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, CUstream stream) noexcept nogil:
        cdef Table table
        cdef void* parameter = &table
        cdef size_t i, blocks = 0
        memset(&table, 0, sizeof(table))
        table.count = <uint32_t>count
        for i in range(count):
            table.from_[i] = copies[i].at if inwards else slot + copies[i].offset
            table.to[i] = slot + copies[i].offset if inwards else copies[i].at
            table.nbytes[i] = copies[i].nbytes
            table.first_block[i] = <uint32_t>blocks
            blocks += (copies[i].nbytes + CHUNK - 1) // CHUNK
        return driver.cuLaunchKernel(
            self.function, <unsigned int>max(<size_t>1, blocks), 1, 1, THREADS, 1, 1, 0, stream, &parameter, NULL
        )


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

# Most seconds that a launching thread waits for a launch or a slot before it copies CPU memory; if the wait fails, the
# thread tries again later. The driver's call for such a copy returns only when everything before it on the stream is
# done: behind a launch that has not ended, the call would wait for other ranks.
cdef double COPY_WAIT = 1e-3

#: Least bytes of an allocation.
_MIN_ALLOCATION = 1 << 16


cdef class FusionBuffer:
    """A fusion buffer: device memory for one launch at a time, which grows as needed."""

    def __init__(self, int device):
        self.device, self.outgrown = device, []

    cdef int take(self, size_t nbytes, CUstream stream) except -1:
        """Provide `nbytes` of memory, and let a stream wait until the buffer's last use is over."""
        cdef CUresult result
        cdef CUcontext saved
        cdef size_t wanted
        if nbytes > self.capacity:
            # The old memory is kept: on GPUs, freeing it would wait until nothing uses it, and so for other ranks, in
            # the thread that must notice the end of other ranks. The slot grows by half at least, so all old memory
            # together is at most twice the memory in use.
            wanted = max(_MIN_ALLOCATION, nbytes, self.capacity + self.capacity // 2)
            if self.pointer:
                self.outgrown.append(self.pointer)
                self.pointer = self.capacity = 0
            self.pointer = _device.allocate(wanted, self.device)
            self.capacity = wanted
            saved = enter_device(self.device)
            with nogil:  # the launch also reduces the padding between arrays, which must hold numbers
                result = driver.cuMemsetD8Async(<CUdeviceptr>self.pointer, 0, wanted, stream)
            leave_device(saved)
            check_driver(result, b"cuMemsetD8Async")
        if self.used:
            with nogil:
                result = driver.cuStreamWaitEvent(stream, self.free, CU_EVENT_WAIT_DEFAULT)
            check_driver(result, b"cuStreamWaitEvent")
        return 0

    def close(self):
        """Free the memory once nothing uses it any more."""
        if self.used:
            wait_for_event(self.free, FOREVER)
            self.used = False
        pointers, self.outgrown = [*self.outgrown, self.pointer], []
        self.pointer = self.capacity = 0
        for pointer in pointers:
            if pointer:
                _device.free(pointer)

    def __dealloc__(self):
        if self.free != NULL:
            give_event(self.device, False, self.free)


cdef SharedEvent new_shared_event(int device):
    cdef SharedEvent shared = SharedEvent.__new__(SharedEvent)
    shared.device = device
    shared.event = take_event(device, False)
    return shared


cdef class SharedEvent:
    """An event that several works share; when the last of them drops it, the event is returned to the pool."""

    def __dealloc__(self):
        if self.event != NULL:
            give_event(self.device, False, self.event)


cdef class Ending:

    cdef object cause_of(self, object error):
        """Return the plane's error if `error` is the `NcclAborted` of a launch that this end aborts; else `error`."""
        return self.error if self.error is not None and isinstance(error, NcclAborted) else error


cdef FusedLaunch new_fused_launch(
    FusionBuffer slot, Ending ending, Handle comm, Copier copier, bint addressable, CUstream in_stream,
    CUstream out_stream
):
    cdef FusedLaunch fused = FusedLaunch.__new__(FusedLaunch)
    fused.slot, fused.ending, fused.comm, fused.in_stream = slot, ending, comm, in_stream
    fused.out_stream, fused.copier, fused.addressable = out_stream, copier, addressable
    fused.works, fused.kept = [], []
    return fused


cdef class FusedLaunch(LaunchGroup):
    """A launch in a slot, and the copies into and out of the slot."""

    def __dealloc__(self):
        free(self.copies)
        free(self.producers)

    cdef int add(self, void* at, size_t offset, size_t nbytes) except -1:
        """Add an array to the next copies, in or out."""
        cdef size_t capacity
        cdef Copy* grown
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 8
            grown = <Copy*>realloc(self.copies, capacity * sizeof(Copy))
            if grown == NULL:
                raise MemoryError
            self.copies, self.capacity = grown, capacity
        self.copies[self.count].at = <uintptr_t>at
        self.copies[self.count].offset = offset
        self.copies[self.count].nbytes = nbytes
        self.count += 1
        return 0

    cdef int follow(self, Work work) except -1:
        """Make the copies into the slot wait for the event after which a work's input is ready.

        Of the events of one thread on one stream only the last is waited for, as each wait costs a driver call.
        """
        cdef size_t i
        cdef Producer* one
        cdef Producer* grown
        if work.ready == NULL:
            return 0
        for i in range(self.nproducers):
            one = &self.producers[i]
            if one.stream == work.producer and one.thread == work.entry.thread:
                if one.number < work.entry.id:
                    one.number, one.event = work.entry.id, work.ready
                return 0
        grown = <Producer*>realloc(self.producers, (self.nproducers + 1) * sizeof(Producer))
        if grown == NULL:
            raise MemoryError
        self.producers = grown
        one = &grown[self.nproducers]
        one.stream, one.thread, one.number, one.event = work.producer, work.entry.thread, work.entry.id, work.ready
        self.nproducers += 1
        return 0

    cdef int copy_in(self, CUstream stream) except -1:
        """Enqueue the added copies into the slot, and clear their list for the copies out."""
        cdef CUresult result = CUDA_SUCCESS
        cdef size_t i
        cdef CUcontext saved = enter_device(self.slot.device)
        with nogil:
            for i in range(self.nproducers):
                result = driver.cuStreamWaitEvent(stream, self.producers[i].event, CU_EVENT_WAIT_DEFAULT)
                if result != CUDA_SUCCESS:
                    break
            if result == CUDA_SUCCESS:
                result = self.copier.run(self.copies, self.count, self.slot.pointer, True, self.addressable, stream)
        leave_device(saved)
        self.count = self.nproducers = 0
        return check_driver(result, b"cuMemcpyAsync")

    def is_launched(self):
        """Return whether the launch was made or has failed, so that `copy_out` need not wait for it."""
        return load(&self.inner.phase) != PENDING

    def is_passed(self):
        """Wait a moment at most; return whether `copy_out` would then wait for no other rank."""
        return self.is_launched() and (not self.waits or self.inner._wait_for(COMPLETED, deadline_after(COPY_WAIT)))

    def is_over(self):
        """Return whether all its works have ended."""
        return not self.has_members()

    def copy_out(self):
        """Wait for the launch, copy its results out, and hand the works over to the monitor.

        If the launch has failed, nothing is copied and the works fail; the monitor holds them until the copies in end.
        """
        cdef CUresult result
        cdef size_t i, n
        cdef Work work
        cdef Watched* watched
        cdef SharedEvent shared
        cdef double moment
        cdef CUcontext saved
        cdef bint failed
        cdef CUstream stream = self.out_stream
        self.inner._wait_for(LAUNCHED, FOREVER)
        failed = load(&self.inner.phase) == FAILED
        if failed:  # copies in may still run: the works hold their inputs until these end
            stream = self.in_stream
        works = list(self.works)  # the thread that settles the last one empties self.works
        n = len(works)
        watched = <Watched*>malloc((n + 1) * sizeof(Watched))
        if watched == NULL:
            raise MemoryError
        try:
            shared = new_shared_event(self.slot.device)
            reserve_inbox(n)
            self.unsettled = n
            for work in works:
                if work.done == NULL:
                    work.timed = False  # the launch measures its time
                    work.done_owner, work.done_is_borrowed, work.done = shared, True, shared.event
                work.stream, work.handle = stream, self.comm
                work.awaits = None
                work.entry.launch = self.inner.entry.launch
            if self.slot.free == NULL:
                self.slot.free = take_event(self.slot.device, False)
            for work in works:  # nothing fails from here on
                Py_INCREF(work)
                work.launch = self
            if failed:
                self.fail(self.inner.error)
            moment = now()
            saved = enter_device(self.slot.device)
            with nogil:
                result = CUDA_SUCCESS
                if self.inner.done != NULL and stream != self.inner.stream and not failed:  # NULL: all parts are empty
                    result = driver.cuStreamWaitEvent(stream, self.inner.done, CU_EVENT_WAIT_DEFAULT)
                if result == CUDA_SUCCESS and not failed:
                    result = self.copier.run(
                        self.copies, self.count, self.slot.pointer, False, self.addressable, stream
                    )
                if result == CUDA_SUCCESS:
                    result = driver.cuEventRecord(shared.event, stream)
                for i in range(n):
                    watched[i].event = shared.event
                    watched[i].stream = stream
                    watched[i].limit = FOREVER  # the launch has its own limit
                    watched[i].result = ncclSuccess
                    watched[i].driver = result
                    watched[i].text = NULL
                if result == CUDA_SUCCESS:
                    result = driver.cuEventRecord(self.slot.free, stream)
            leave_device(saved)
            self.slot.used = True
            for i, work in enumerate(works):
                watched[i].work = <PyObject*>work
                watched[i].kind = work.entry.operation
                watched[i].seen = 0
                work.entry.launched = moment
                if watched[i].driver == CUDA_SUCCESS and not failed:
                    work.limit = FOREVER
                    change(&work.entry.state, PENDING, LAUNCHED)
                    change(&work.phase, PENDING, LAUNCHED)
                    if load(&work.sleepers):
                        wake(&work.phase)
            with nogil:
                hand_over(watched, n)
        finally:
            free(watched)

    def abandon(self, error):
        """Fail a launch that was not made; the monitor holds the works until all copies in have ended."""
        self.inner.settle(error)
        self.inner.tidy()
        self.count = 0
        self.copy_out()

    def end(self, error):
        """Fail all works that are not done; the monitor may not have them yet."""
        self.fail(error)

    cdef int settled(self, object work) except -1:
        """Note that one of the works is done; drop all works once the last one is."""
        self.unsettled -= 1
        if self.unsettled == 0:
            works, self.works = self.works, []
            for one in works:
                # Only the list and this loop refer to the work: it would be freed here, and with it the user's arrays,
                # which can run Python code. A thread for callbacks frees the works instead.
                if Py_REFCNT(<PyObject*>one) <= 2:
                    user_executor.submit(works.clear)
                    break
        return 0

    cdef object cause_of(self, object error):
        if self.inner is not None and self.inner.error is not None:  # the launch's own error says more than `error`
            error = self.inner.error
        return self.ending.cause_of(error)

    cdef int fail(self, object error) except -1:
        """Fail all works that are not done; the owner of the communicator ends the operations that run on it."""
        cdef Work work
        error = self.cause_of(error)
        for work in self.members():
            work.settle(error)
            if work.launch is None:
                work.tidy()
        return 0
