from ncclpy.abi.dlpack cimport DLPackExchangeAPI
from ncclpy.abi.tensor_reader cimport ncclpy_tensor_reader


cdef class Reader:
    cdef ncclpy_tensor_reader read  # or NULL


cdef Reader reader_of(object kind)
cdef const DLPackExchangeAPI* exchange_api_of(object kind) except? NULL


cdef object numpy_view(void* pointer, size_t nbytes, str name, bint readonly, object owner)


cdef object dlpack_capsule(
    void* pointer, size_t count, str name, int device, bint readonly, bint versioned, object owner
)


cdef str typestr(str name)
