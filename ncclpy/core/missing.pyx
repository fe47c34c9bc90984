"""Which ranks have not come to what a communicator waits for: the host engine knows, NCCL does not say."""

from ncclpy.core.library cimport host_who_is_missing


cdef str who_is_missing(ncclComm_t comm):
    """Return "AllReduce: came: 0, 1; missing: 2 (process 4711, last call AllReduce, 1 before this one, closed)", or "".

    It is empty on NCCL, and if nothing is waited for. Of a child that is still being made, its parent is asked. May be
    asked without the communicator's lock, while another thread is stuck in a call; not once the handle is destroyed.
    """
    cdef char text[4096]
    text[0] = 0
    if host_who_is_missing == NULL or comm == NULL:
        return ""
    with nogil:
        host_who_is_missing(comm, text, sizeof(text))
    return text.decode(errors="replace")
