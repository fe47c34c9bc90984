from ncclpy.abi.driver cimport CUstream
from ncclpy.process_group.connection cimport Connection
from ncclpy.process_group.request cimport Request


# The one of these streams, as numbers, that stands for all if they are being captured; NULL if none of them is.
cdef CUstream captured_of(set streams, int device) except? NULL

# Put a request into the user's graph, on the streams that its steps have. Raises where nothing was called;
# returns what went wrong in NCCL, or None.
cdef object capture(Connection connection, Request request)
