from ncclpy.core.arguments.buffers cimport View
from ncclpy.engine.work cimport Work
from ncclpy.manager.gathering cimport Participant


cdef class Participants:
    # Add a participant. Of `view` is the producer's stream; `held` and `output` are the work's: what it keeps alive,
    # and what it results in.
    cdef Work add(self, key, Participant one, const View* view, held, output, producer, on_done)
