from ncclpy.abi.dlpack cimport DLPackExchangeAPI
from ncclpy.abi.driver cimport CUstream

# Values of `View.device` besides the ordinals of devices.
cdef enum:
    HOST_MEMORY = -1  # CPU memory: only the host engine takes it
    UNKNOWN_DEVICE = -2  # explicit pointers, page-locked memory

# The framework that determines the stream for stream=None by its current stream.
cdef enum:
    NO_FRAMEWORK = 0
    EXCHANGE_API = 1
    TORCH = 2
    CUPY = 3
    INTERFACE = 4  # __cuda_array_interface__ names a stream itself


cdef struct View:
    void* pointer
    size_t count  # in elements of `datatype`: a complex array counts double
    size_t unit  # how many of those make one element of the array
    size_t nbytes
    int datatype  # ncclDataType_t
    unsigned long long flavour  # how `datatype` carries a type that NCCL lacks, see datatypes
    int device
    int framework
    bint readonly
    CUstream stream  # INTERFACE only
    const DLPackExchangeAPI* api  # EXCHANGE_API only


cdef class Buffer:
    cdef View view
    cdef str type_name  # of a type that is sent as bytes, else None
    cdef readonly object owner

    cdef int keep_name(self) except -1
    cdef str name(self)


cdef int read_view(object obj, View* view, str argument) except -1
cdef int current_stream(const View* view, int device, CUstream* out) except -1
