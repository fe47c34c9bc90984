"""Copies between many arrays and the slot that carries them, by one kernel."""

import logging

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from ncclpy.abi.driver cimport CUDA_SUCCESS, CUcontext, CUdeviceptr, CUmodule, CUresult, CUstream
from ncclpy.core.device cimport enter_device, leave_device
from ncclpy.core.library cimport driver, require_driver
from ncclpy.core.stream cimport Stream

from ncclpy.coordinator import copy_kernel as _kernel

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
        uint32_t first[1]

_log = logging.getLogger("ncclpy.coordinator")


cdef dict _copiers = {}


cdef Copier copier_of(int device):
    """Return a device's copier, with its kernel in the device's memory.

    To load that may wait for all that runs on the device, so it is done before anything waits for other ranks there.
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
        with nogil:  # drivers that load lazily do it now
            result = copier.run(&nothing, 1, 0, True, True, stream.raw)
        leave_device(saved)
        stream.synchronize()
    if result != CUDA_SUCCESS:
        copier.function = NULL
        _log.warning("device %d: a kernel of copies cannot be had (CUresult %d): each is a call of the driver", device, result)
    stream.close()
    return _copiers.setdefault(device, copier)


cdef class Copier:
    """Makes copies on one device, whose context has to be current."""

    cdef CUresult run(self, const Copy* copies, size_t count, uintptr_t slot, bint inwards, bint together, CUstream stream) noexcept nogil:
        """Enqueue copies into the slot or out of it.

        Those of memory that the device reaches go `together`; pageable memory is for the driver.
        """
        cdef size_t i, begin = 0
        cdef uintptr_t place
        cdef CUresult result = CUDA_SUCCESS
        if self.function != NULL and together:
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
            table.first[i] = <uint32_t>blocks
            blocks += (copies[i].nbytes + CHUNK - 1) // CHUNK
        return driver.cuLaunchKernel(
            self.function, <unsigned int>max(<size_t>1, blocks), 1, 1, THREADS, 1, 1, 0, stream, &parameter, NULL
        )
