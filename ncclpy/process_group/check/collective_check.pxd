from ncclpy.process_group.connection cimport CallSignature


# Compares the collectives of all ranks of a group before NCCL is called.
cdef class CollectiveCheck:
    cdef object group_status
    cdef str name
    cdef int rank
    cdef int size
    cdef double timeout
    cdef bint first  # compare only calls that are new to this rank
    cdef readonly object exchange  # None until the ranks have had their rendezvous
    cdef object turn  # lock: one thread of this rank compares at a time
    cdef dict known  # the notes of calls that all ranks have compared; the keys are the packed calls
    cdef list long  # store keys of this rank's notes that were too long for the exchange: the last two
    cdef object last_disagreement  # the last disagreement, as an NcclError
    cdef bint nccl_was_called  # some rank has called NCCL for the collective in `last_disagreement`
    cdef list met  # the rendezvous of `_meet`, which all ranks have left by the end of the first comparison

    # Compare this rank's calls with the other ranks' calls of this number; raise if they differ or cannot be compared.
    cdef int agree(self, long long number, CallSignature call_signature, double limit, object wanted) except -1
    # Acquire the turn of this thread, before `agree`, and give it back.
    cdef int begin(self, double deadline, object wanted) except -1
    cdef int end(self) except -1
    cdef int close(self) except -1
    cdef object _meet(self, object wanted)
    cdef str _disagreement(self, object exchange, long long number, bint* nccl_was_called)
