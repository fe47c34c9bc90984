from ncclpy.abi.dlpack cimport DLPackExchangeAPI
from ncclpy.abi.tensor_reader cimport ncclpy_tensor_reader


cdef class Reader:
    cdef ncclpy_tensor_reader read  # or NULL


cdef Reader reader_of(object kind)
cdef const DLPackExchangeAPI* exchange_api_of(object kind) except? NULL
