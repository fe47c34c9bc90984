from ncclpy.core.buffers cimport View
from ncclpy.core.lower cimport Lowered
from ncclpy.core.operation cimport Operation
from ncclpy.core.parts cimport Spread
from ncclpy.engine.work cimport Work


cdef class Operations:
    cdef readonly int rank
    cdef readonly int size
    cdef readonly int device

    # Begin an operation, or the group of them that stands for it if `lowered` is not None. Of `view` are the producer's
    # stream, the type and the size; `held` and `output` are the work's: what it keeps alive and what it results in. The
    # tag is -1 but for sends and receives.
    cdef Work begin(
        self, const Operation* operation, Lowered lowered, const View* view, held, output, producer, timeout, int tag
    )
    cdef Work _plain(self, const Operation* operation, const View* view, held, output, producer, timeout)
    cdef Work _spread(self, Spread spread, output, producer, timeout)
    cdef int _op_of(self, object op, const View* view) except -1
