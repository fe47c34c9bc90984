"""One Python function for each host function of ``nccl.h``: the C names in snake case, without the prefix.

Arguments stand in C's order without the out-parameters, which are return values. Pointers, communicators, windows and
streams are ints. Each call runs without the GIL. An error raises `ncclpy.NcclError`; a function that the loaded NCCL
lacks raises `ncclpy.NcclUnsupported`, which names the release that has it. A call without out-parameters returns
``Result.SUCCESS`` or, when a nonblocking communicator is still at work, ``Result.IN_PROGRESS``: then
`comm_get_async_error` is polled until it says otherwise.

Many functions share these arguments:

comm
    The communicator.
sendbuff, recvbuff
    Addresses of what is sent and of where it arrives.
count, sendcount, recvcount
    Numbers of elements, those of one rank where parts go to or come from several.
datatype, op
    A `DataType`; a `ReduceOp` or what `red_op_create_pre_mul_sum` returned.
root, peer, lsa_rank, peer_cft
    A rank: where data start or end; the other side; one of a team.
stream
    The CUDA stream that the work is enqueued on; 0 is the legacy default stream.
config
    A `Config` for communicators, a `CollConfig` for one collective; None takes NCCL's defaults.
handle, window, dev_comm
    What an earlier call gave for a registration or a parameter, for a window, for a device communicator.
flags, ctx, sig_idx
    Bits of which NCCL has defined none yet, so 0; the context and the index of a signal, 0 as well.

Nothing is checked beyond the Python types: a wrong address crashes the process, as in C. `ncclpy.Communicator` is the
comfortable way to the same functions.
"""

from ncclpy.core.bindings.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    bcast,
    broadcast,
    gather,
    group_end,
    group_simulate_end,
    group_start,
    put_signal,
    recv,
    red_op_create_pre_mul_sum,
    red_op_destroy,
    reduce,
    reduce_scatter,
    scatter,
    send,
    signal,
    wait_signal,
)
from ncclpy.core.bindings.communicators import (
    all_gather_config,
    all_reduce_config,
    all_to_all_config,
    broadcast_config,
    comm_abort,
    comm_count,
    comm_cu_device,
    comm_destroy,
    comm_finalize,
    comm_get_async_error,
    comm_get_unique_id,
    comm_grow,
    comm_init_all,
    comm_init_rank,
    comm_init_rank_config,
    comm_init_rank_scalable,
    comm_mem_stats,
    comm_resume,
    comm_revoke,
    comm_shrink,
    comm_split,
    comm_suspend,
    comm_user_rank,
    gather_config,
    get_unique_id,
    reduce_config,
    reduce_scatter_config,
    scatter_config,
)
from ncclpy.core.bindings.device_api import (
    comm_query_properties,
    dev_comm_create,
    dev_comm_destroy,
    get_cft_device_le_info,
    get_lsa_device_pointer,
    get_lsa_multimem_device_pointer,
    get_multimem_device_le_info,
    get_multimem_device_pointer,
    get_peer_device_le_info,
    get_peer_device_pointer,
    team_cft,
    team_cft_multimem,
    team_lsa,
    team_rail,
    team_rank_to_lsa,
    team_rank_to_world,
    team_world,
)
from ncclpy.core.bindings.library import (
    comm_deregister,
    comm_register,
    comm_window_deregister,
    comm_window_register,
    get_error_string,
    get_last_error,
    get_version,
    mem_alloc,
    mem_free,
    param_bind,
    param_dump_all,
    param_get,
    param_get_all_parameter_keys,
    param_get_i8,
    param_get_i16,
    param_get_i32,
    param_get_i64,
    param_get_parameter,
    param_get_str,
    param_get_u8,
    param_get_u16,
    param_get_u32,
    param_get_u64,
    set_encryption,
    win_get_user_ptr,
)
from ncclpy.core.bindings.results import PendingHandle
from ncclpy.core.bindings.structs import CommProperties, Team

__all__ = [
    "CommProperties",
    "PendingHandle",
    "Team",
    "all_gather",
    "all_gather_config",
    "all_reduce",
    "all_reduce_config",
    "all_to_all",
    "all_to_all_config",
    "bcast",
    "broadcast",
    "broadcast_config",
    "comm_abort",
    "comm_count",
    "comm_cu_device",
    "comm_deregister",
    "comm_destroy",
    "comm_finalize",
    "comm_get_async_error",
    "comm_get_unique_id",
    "comm_grow",
    "comm_init_all",
    "comm_init_rank",
    "comm_init_rank_config",
    "comm_init_rank_scalable",
    "comm_mem_stats",
    "comm_query_properties",
    "comm_register",
    "comm_resume",
    "comm_revoke",
    "comm_shrink",
    "comm_split",
    "comm_suspend",
    "comm_user_rank",
    "comm_window_deregister",
    "comm_window_register",
    "dev_comm_create",
    "dev_comm_destroy",
    "gather",
    "gather_config",
    "get_cft_device_le_info",
    "get_error_string",
    "get_last_error",
    "get_lsa_device_pointer",
    "get_lsa_multimem_device_pointer",
    "get_multimem_device_le_info",
    "get_multimem_device_pointer",
    "get_peer_device_le_info",
    "get_peer_device_pointer",
    "get_unique_id",
    "get_version",
    "group_end",
    "group_simulate_end",
    "group_start",
    "mem_alloc",
    "mem_free",
    "param_bind",
    "param_dump_all",
    "param_get",
    "param_get_all_parameter_keys",
    "param_get_i8",
    "param_get_i16",
    "param_get_i32",
    "param_get_i64",
    "param_get_parameter",
    "param_get_str",
    "param_get_u8",
    "param_get_u16",
    "param_get_u32",
    "param_get_u64",
    "put_signal",
    "recv",
    "red_op_create_pre_mul_sum",
    "red_op_destroy",
    "reduce",
    "reduce_config",
    "reduce_scatter",
    "reduce_scatter_config",
    "scatter",
    "scatter_config",
    "send",
    "set_encryption",
    "signal",
    "team_cft",
    "team_cft_multimem",
    "team_lsa",
    "team_rail",
    "team_rank_to_lsa",
    "team_rank_to_world",
    "team_world",
    "wait_signal",
    "win_get_user_ptr",
]
