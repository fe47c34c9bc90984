"""Communication streams: a pool for each device, whose streams all communicators of a manager share.

Sharing keeps the collectives of different communicators in the order of their launches on the device too. One
communicator that has several ranks on a device would get a stream for each.
"""

from ncclpy.core.stream cimport Stream


cdef class StreamPool:
    """The communication streams of a manager, made on first use.

    Parameters
    ----------
    high_priority : bool
        Whether their work goes before that of other streams.
    """

    def __init__(self, bint high_priority=False):
        self.streams = {}
        self.high_priority = high_priority

    def of(self, int device, int index=0):
        """Return stream number `index` of a device."""
        cdef object found = self.streams.get((device, index))
        if found is None:
            # Lower numbers go first; the driver takes its own lowest for what is below it.
            found = self.streams[device, index] = Stream(device, priority=-100 if self.high_priority else 0)
        return found

    def close(self):
        """Let go of the streams; each is destroyed when nothing on its way needs it any more."""
        self.streams = {}
