from ncclpy.abi.dlpack cimport DLPackExchangeAPI
from ncclpy.abi.tensor_reader cimport ncclpy_tensor_reader


cdef extern from *:
    """
    /* Whether a product of sizes overflows; the product is stored if it does not. */
    static inline int ncclpy_times(size_t a, size_t b, size_t* out) { return __builtin_mul_overflow(a, b, out); }
    """
    bint times_overflows "ncclpy_times"(size_t a, size_t b, size_t* out) noexcept nogil

# Flavours: how NCCL's types carry data types that NCCL lacks. Each value from BYTES on stands for one data type, which
# NCCL cannot reduce.
cdef enum:
    REAL = 0
    BOOLEAN = 1  # as uint8
    COMPLEX = 2  # as pairs of reals
    BYTES = 3  # as uint8, `itemsize` of them per element

# Largest number of ASCII characters in the name of a type; a longer name is cut and ends in a digest of all of it.
cdef enum:
    MAX_NAME = 155

# The data type of an array's elements.
cdef struct ElementType:
    int datatype  # ncclDataType_t
    size_t unit  # how many of `datatype` make one element
    unsigned long long flavour

# The size in bytes of an element, by ncclDataType_t.
cdef int* ITEMSIZE

# The types by numpy's type numbers. `datatype` is -1 if the number does not determine the type: then `of_dtype` needs
# the dtype.
cdef ElementType* OF_NUMPY

# Fill in the type of a numpy dtype, of a DLPack type, of a torch.dtype, and of what a caller may pass: a `DataType`,
# its number, a name, a dtype of numpy or torch, or a scalar class of numpy or Python. Raise TypeError for other
# objects and for types without a fixed size. `argument` names the argument in errors.
cdef int of_dtype(object dtype, ElementType* out, str argument) except -1
cdef int of_dlpack(int code, int bits, int lanes, ElementType* out, str argument) except -1
cdef int of_torch(object dtype, size_t itemsize, ElementType* out, str argument) except -1
cdef int of_anything(object dtype, ElementType* out, str argument) except -1

# The name that ranks compare: in all processes the same for equal types.
cdef str name_of(int datatype, unsigned long long flavour)

# The bytes of a number as one element of a `DataType`. For a float type the number is rounded to nearest; for an
# integer type a number that the type cannot represent raises ValueError.
cdef bytes encoded(object value, object datatype, str argument)


# Fill in a type that NCCL has, or a bool or complex type made of NCCL's.
cdef inline int as_real(ElementType* out, int datatype, unsigned long long flavour=REAL) noexcept:
    out.datatype, out.flavour = datatype, flavour
    out.unit = 2 if flavour == COMPLEX else 1
    return 0


# The type for a numpy type number; NULL if the number does not determine it.
cdef inline const ElementType* of_numpy(int number) noexcept:
    return &OF_NUMPY[number] if 0 <= number < 64 and OF_NUMPY[number].datatype >= 0 else NULL


# The native function that reads objects of one type, see abi/tensor_reader.h; `read_by` sets it.
cdef class Reader:
    cdef ncclpy_tensor_reader read  # or NULL


# The Reader of a type, always the same object for the type.
cdef Reader reader_of(object kind)

# The exchange API of a type, in a version with a known layout; NULL if the type has none.
cdef const DLPackExchangeAPI* exchange_api_of(object kind) except? NULL

# Memory for other libraries: CPU memory as a numpy array, or any memory as a DLPack capsule. `name` is the name of the
# data type; the result, unless it is an empty array, keeps a reference to `owner`, which keeps the memory alive.
cdef object numpy_view(void* pointer, size_t nbytes, str name, bint readonly, object owner)


cdef object dlpack_capsule(
    void* pointer, size_t count, str name, int device, bint readonly, bint versioned, object owner
)


# The name of a data type in the CUDA array interface.
cdef str typestr(str name)
