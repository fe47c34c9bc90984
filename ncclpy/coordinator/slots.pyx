"""Device memory that several small arrays, or arrays of CPU memory, are carried through by one launch.

Their data are copied in behind what produces them, and out behind the launch; each work has its own end. Where copies
have streams of their own those of one slot go on beside the launch in the other one.
"""

from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc, realloc

from ncclpy.abi.driver cimport CU_EVENT_WAIT_DEFAULT, CUDA_SUCCESS, CUcontext, CUdeviceptr, CUevent, CUresult, CUstream
from ncclpy.abi.nccl cimport ncclSuccess
from ncclpy.core.check cimport check_driver
from ncclpy.core.device cimport enter_device, leave_device
from ncclpy.core.library cimport driver
from ncclpy.core.wait cimport FOREVER, wait_for_event
from ncclpy.engine.callbacks cimport users
from ncclpy.engine.events cimport give_event, take_event
from ncclpy.engine.monitor cimport hand_over, make_room
from ncclpy.engine.native cimport change, load, now, wake
from ncclpy.engine.recorder cimport FAILED, LAUNCHED, PENDING
from ncclpy.engine.work cimport Watched, Work

from ncclpy.core import device as _device

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)

#: Memory is taken in pieces of at least this size.
_LEAST = 1 << 16


cdef class Slot:
    """Device memory for one launch at a time, which grows as it is needed."""

    def __init__(self, int device):
        self.device = device

    cdef int take(self, size_t nbytes, CUstream stream) except -1:
        """Have so much memory, and let a stream wait until its last use is over."""
        cdef CUresult result
        cdef CUcontext saved
        cdef size_t wanted
        if nbytes > self.capacity:
            self.close()
            wanted = max(_LEAST, 1 << (nbytes - 1).bit_length()) if nbytes < (1 << 26) else nbytes
            self.pointer = _device.allocate(wanted, self.device)
            self.capacity = wanted
            saved = enter_device(self.device)
            with nogil:  # padding is reduced as well: it is to be numbers
                result = driver.cuMemsetD8Async(<CUdeviceptr>self.pointer, 0, wanted, stream)
            leave_device(saved)
            check_driver(result, b"cuMemsetD8Async")
        if self.used:
            with nogil:
                result = driver.cuStreamWaitEvent(stream, self.free, CU_EVENT_WAIT_DEFAULT)
            check_driver(result, b"cuStreamWaitEvent")
        return 0

    def close(self):
        """Give the memory back once nothing uses it any more."""
        if self.used:
            wait_for_event(self.free, FOREVER)
            self.used = False
        pointer, self.pointer, self.capacity = self.pointer, 0, 0
        if pointer:
            _device.free(pointer)

    def __dealloc__(self):
        if self.free != NULL:
            give_event(self.device, False, self.free)


cdef Carried new_carried(Slot slot, Handle comm, CUstream before, CUstream behind):
    cdef Carried carried = Carried.__new__(Carried)
    carried.slot, carried.comm, carried.before, carried.behind = slot, comm, before, behind
    carried.works, carried.kept = [], []
    return carried


cdef class Carried(Together):
    """A launch in a slot, and what is copied there and back."""

    def __dealloc__(self):
        free(self.carries)

    cdef int add(self, void* at, size_t offset, size_t nbytes, CUevent event) except -1:
        cdef size_t capacity
        cdef Carry* grown
        if self.count == self.capacity:
            capacity = 2 * self.capacity + 8
            grown = <Carry*>realloc(self.carries, capacity * sizeof(Carry))
            if grown == NULL:
                raise MemoryError
            self.carries, self.capacity = grown, capacity
        self.carries[self.count].at = at
        self.carries[self.count].offset = offset
        self.carries[self.count].nbytes = nbytes
        self.carries[self.count].event = event
        self.count += 1
        return 0

    cdef int copy_in(self, CUstream stream) except -1:
        """Copy what was added into the slot; then forget it, as what is copied out is added next."""
        cdef CUresult result = CUDA_SUCCESS
        cdef Carry* one
        cdef size_t i
        cdef CUcontext saved = enter_device(self.slot.device)
        with nogil:
            for i in range(self.count):
                one = &self.carries[i]
                if one.event != NULL:
                    result = driver.cuStreamWaitEvent(stream, one.event, CU_EVENT_WAIT_DEFAULT)
                if result == CUDA_SUCCESS and one.nbytes:
                    if one.at == NULL:
                        result = driver.cuMemsetD8Async(
                            <CUdeviceptr>(self.slot.pointer + one.offset), 0, one.nbytes, stream
                        )
                    else:
                        result = driver.cuMemcpyAsync(
                            <CUdeviceptr>(self.slot.pointer + one.offset), <CUdeviceptr>one.at, one.nbytes, stream
                        )
                if result != CUDA_SUCCESS:
                    break
        leave_device(saved)
        self.count = 0
        return check_driver(result, b"cuMemcpyAsync")

    def is_launched(self):
        """Return whether the launch was made, or has failed: then `copy_out` waits for nobody."""
        return load(&self.inner.phase) != PENDING

    def copy_out(self):
        """Copy the results out behind the launch, and leave the works to the monitor; it waits for the launch.

        What was added by then is a piece a work, in their order.
        """
        cdef CUresult result
        cdef size_t i, n
        cdef Work work
        cdef Carry* one
        cdef Watched* watched
        cdef double moment
        cdef CUcontext saved
        cdef bint failed
        cdef CUstream stream = self.behind
        self.inner._wait_for(LAUNCHED, FOREVER)
        failed = load(&self.inner.phase) == FAILED
        if failed:  # what was to be sent is held until it was copied all the same
            stream = self.before
        works = list(self.works)  # who settles all of them empties the other one
        n = len(works)
        watched = <Watched*>malloc((n + 1) * sizeof(Watched))
        if watched == NULL:
            raise MemoryError
        try:
            make_room(n)
            self.unsettled = n
            for i, work in enumerate(works):
                if work.done == NULL:
                    work.timed = False  # how long it takes is the launch's to know
                    work.done = take_event(work.device, False)
                work.stream, work.handle = stream, self.comm
                work.gathering = None
                work.entry.launch = self.inner.entry.launch
                self.carries[i].event = work.done
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
                if self.inner.done != NULL and stream != self.inner.stream and not failed:  # else of empty parts alone
                    result = driver.cuStreamWaitEvent(stream, self.inner.done, CU_EVENT_WAIT_DEFAULT)
                for i in range(n):
                    one = &self.carries[i]
                    if result == CUDA_SUCCESS and one.nbytes and not failed:
                        result = driver.cuMemcpyAsync(
                            <CUdeviceptr>one.at, <CUdeviceptr>(self.slot.pointer + one.offset), one.nbytes, stream
                        )
                    if result == CUDA_SUCCESS:
                        result = driver.cuEventRecord(one.event, stream)
                    watched[i].event = one.event
                    watched[i].stream = stream
                    watched[i].limit = FOREVER  # the launch has one
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

    def end(self, error):
        """Fail all works that are not done, of which the monitor may know nothing."""
        self.fail(error)

    cdef int settled(self, object work) except -1:
        """Note that one of the works is done."""
        self.unsettled -= 1
        if self.unsettled == 0:
            works, self.works = self.works, []
            for one in works:
                if Py_REFCNT(<PyObject*>one) <= 2:  # the list's and this loop's: it would go here, and with it what is the user's
                    users.give(works.clear)
                    break
        return 0

    cdef list members(self):
        return self.works + [<Work><PyObject*><uintptr_t>address for address in self.loose or ()]

    cdef int loosen(self, object work) except -1:
        if self.loose is None:
            self.loose = set()
        if (<Work>work).launch is self:
            if work in self.works:
                self.works.remove(work)
            self.loose.add(<uintptr_t><PyObject*>work)
        return 0

    cdef int forget(self, object work) except -1:
        self.loose.discard(<uintptr_t><PyObject*>work)
        return 0

    cdef int fail(self, object error) except -1:
        """Fail all works that are not done; what runs on the communicator is for its owner to end."""
        cdef Work work
        if self.inner is not None and self.inner.error is not None:  # which says more than that a communicator is gone
            error = self.inner.error
        for work in self.members():
            work.settle(error)
            if work.launch is None:
                work.tidy()
        return 0
