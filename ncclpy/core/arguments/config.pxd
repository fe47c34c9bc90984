from ncclpy.abi.nccl cimport ncclCollConfig_t, ncclConfig_t

# The `version` of structs passed to NCCL: that of the loaded NCCL, but not above the ABI that ncclpy knows. NCCL
# refuses some structs (ncclCommProperties_t) from a caller newer than itself, and ignores fields newer than `version`.
cdef unsigned int struct_version() except? 0

# Fill in the newest layout of the struct from a Config or a CollConfig; None means NCCL's defaults. Return the encoded
# strings, which must stay alive while NCCL reads the struct.
cdef object fill_config(ncclConfig_t* out, object config)
cdef object fill_coll_config(ncclCollConfig_t* out, object config)
