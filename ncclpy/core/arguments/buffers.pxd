from ncclpy.abi.dlpack cimport DLPackExchangeAPI
from ncclpy.abi.driver cimport CUstream

# Values of `View.device` besides the ordinals of devices.
cdef enum:
    HOST_MEMORY = -1  # CPU memory: only the host engine takes it
    UNKNOWN_DEVICE = -2  # explicit pointers, page-locked memory, empty arrays of __cuda_array_interface__

# Values of `View.framework`: how the stream for stream=None is found. Mostly it is the current stream of the array's
# framework; the value tells in which way the framework is asked for that stream.
cdef enum:
    NO_FRAMEWORK = 0  # no framework is known: the legacy default stream
    EXCHANGE_API = 1
    TORCH = 2
    CUPY = 3
    INTERFACE = 4  # __cuda_array_interface__ names a stream itself


cdef struct View:
    void* pointer
    size_t count  # in elements of `datatype`
    size_t unit  # elements of `datatype` in one of the array: 2 if complex, its size if sent as bytes, else 1
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

    # Keep the name of a type that is sent as bytes, since the table of names may forget it.
    cdef int keep_name(self) except -1
    # The name of the data type.
    cdef str name(self)


# Fill in a view of any object that describes memory; `argument` names the object in errors.
cdef int read_view(object obj, View* view, str argument) except -1

# Store the stream for stream=None: the framework's current stream, the stream that __cuda_array_interface__ names, or
# else the legacy default stream.
cdef int current_stream(const View* view, int device, CUstream* out) except -1
