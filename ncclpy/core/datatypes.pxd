cdef extern from *:
    """
    /* Whether a product of sizes does not fit; the product is stored if it does. */
    static inline int ncclpy_times(size_t a, size_t b, size_t* out) { return __builtin_mul_overflow(a, b, out); }
    """
    bint times_overflows "ncclpy_times"(size_t a, size_t b, size_t* out) noexcept nogil

# How NCCL's types carry what NCCL has not. From BYTES on each number is one data type that NCCL cannot reduce.
cdef enum:
    REAL = 0
    BOOLEAN = 1  # as uint8
    COMPLEX = 2  # as pairs of reals
    BYTES = 3  # as uint8, itemsize of them an element

# The size in bytes of an element, by ncclDataType_t.
cdef int* ITEMSIZE

# How many of NCCL's elements carry one element, by flavour.
cdef size_t* UNITS

# numpy's own type numbers to packed types; -1 for what goes by its dtype.
cdef int* OF_NUMPY

# A packed type is an ncclDataType_t and a flavour: datatype | flavour << 8.

cdef int of_dtype(object dtype, str argument) except -1
cdef int of_dlpack(int code, int bits, int lanes, str argument) except -1
cdef int of_torch(object dtype, size_t itemsize, str argument) except -1
cdef int of_anything(object dtype, str argument) except -1
cdef str name_of(int datatype, int flavour)
cdef bytes encoded(object value, object datatype, str argument)


cdef inline int of_numpy(int number) noexcept:
    return OF_NUMPY[number] if 0 <= number < 64 else -1
