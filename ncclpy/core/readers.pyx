"""Which C functions read the objects of a type: DLPack's exchange API, and what was built for a framework's tensors.

The latter come from above, since nothing here knows of frameworks, and may come when objects of the type were read already.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from ncclpy.abi.dlpack cimport DLPACK_MAJOR_KNOWN, DLPackExchangeAPIHeader
from ncclpy.abi.tensor_reader cimport NCCLPY_TENSOR_READER_NAME

cdef dict _readers = {}


cdef class Reader:
    """The place of the function that was built for a type; who reads objects of the type keeps it."""


cdef Reader reader_of(object kind):
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = Reader()
    return reader


def read_by(kinds, capsule):
    """Have objects of some types read by a C function first, and as before if it does not know what they are.

    Parameters
    ----------
    kinds : iterable of type
        Types are compared for identity: what is derived from them is read as before.
    capsule : capsule or None
        Holds an ``ncclpy_tensor_reader`` (abi/tensor_reader.h), which stays for good. None takes away what there is.
    """
    cdef ncclpy_tensor_reader read = NULL
    if capsule is not None:
        read = <ncclpy_tensor_reader>PyCapsule_GetPointer(capsule, NCCLPY_TENSOR_READER_NAME)
    for kind in kinds:
        reader_of(kind).read = read


cdef const DLPackExchangeAPI* exchange_api_of(object kind) except? NULL:
    """Return a version of the type's exchange API whose layout is known and that gives a DLTensor without copying."""
    cdef const DLPackExchangeAPIHeader* header
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        return NULL
    header = <const DLPackExchangeAPIHeader*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    while header != NULL and header.version.major > DLPACK_MAJOR_KNOWN:
        header = header.prev_api
    if header == NULL or (<const DLPackExchangeAPI*>header).dltensor_from_py_object_no_sync == NULL:
        return NULL
    return <const DLPackExchangeAPI*>header
