"""What a coordinator has done so far, as numbers."""


cdef tuple _NUMBERS = (
    "brought", "frames", "launches", "fused", "fused_launches", "bytes", "disagreements", "overdue", "stalls",
)


cdef class Counts:
    """Numbers that several threads add to: nothing here gives up the GIL, so nothing is lost.

    Attributes
    ----------
    operations : dict
        How many of each kind were launched.
    """

    def __cinit__(self):
        self.operations = {}
        self.numbers = dict.fromkeys(_NUMBERS, 0)

    cpdef int add(self, str what, long long number=1) except -1:
        """Add to a number, by its name."""
        self.numbers[what] = <long long>self.numbers[what] + number
        return 0

    cdef int launched(self, str kind, long long number, long long nbytes) except -1:
        """Note operations that are launched, of so many bytes together."""
        self.operations[kind] = <long long>self.operations.get(kind, 0) + number
        return self.add("bytes", nbytes)

    def as_dict(self):
        """Return all of them."""
        return {**self.numbers, "operations": self.operations.copy()}
