from ncclpy.engine.native cimport ncclpy_job

# Lanes are named by numbers. The lane of a device, with its thread started.
cdef int lane_of(int device) except -1
# The lanes in a list, each once; return how many.
cdef size_t distinct(const int* numbers, size_t count, int* found) noexcept nogil
# Put jobs on their lanes, in one order for all launches of the process.
cdef void push_jobs(ncclpy_job** jobs, const int* numbers, size_t count) noexcept
# Take the place of lanes, each named once, to make their calls in this thread; False if that is not the quickest way,
# or one of them has something to do.
cdef bint borrow_lanes(const int* numbers, size_t count) noexcept
cdef void give_lanes_back(const int* numbers, size_t count) noexcept nogil
# Have the first of the borrowed lanes do it after all; the job gives the others back.
cdef void pass_on(ncclpy_job* job, const int* numbers) noexcept nogil
