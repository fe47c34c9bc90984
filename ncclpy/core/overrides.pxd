# Warn of variables of NCCL's that override what a guard needs, as far as the process's environment shows them.
cdef int look_up_overrides() except -1

# The same, found out from what a call has returned.
cdef int guarded_was_in_progress() except -1
