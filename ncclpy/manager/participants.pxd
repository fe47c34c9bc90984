from ncclpy.core.arguments.buffers cimport View
from ncclpy.engine.work cimport Work
from ncclpy.manager.gathering cimport Participant


cdef class Participants:
    # Add a participant. `view` has the producer's stream; the work keeps `held` alive, and its result is `output`.
    cdef Work add(self, key, Participant one, const View* view, held, output, producer, on_done)
