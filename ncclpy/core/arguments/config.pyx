"""NCCL's tuning options: `Config` for a communicator, `CollConfig` for one collective call.

The classes are plain frozen dataclasses; ``None`` in a field means "NCCL's default". `fill_config` and
`fill_coll_config` turn an object of these classes into the newest C struct, initialised as by NCCL's own initialisers.
The loaded NCCL would silently ignore a field that it does not know, so both functions raise NcclUnsupported if such a
field is set.
"""

import dataclasses
import operator

from cpython.bytes cimport PyBytes_AS_STRING
from libc.limits cimport INT_MAX, INT_MIN
from libc.stdint cimport uintptr_t

from ncclpy.abi.nccl cimport (
    NCCL_API_MAGIC,
    NCCL_CONFIG_UNDEF_INT,
    NCCLPY_ABI_VERSION,
    cudaEvent_t,
    ncclCollConfig_t,
    ncclConfig_t,
    ncclConfigExt_t,
)
from ncclpy.core.runtime.library cimport version_code

from ncclpy.errors import NcclUnsupported
from ncclpy.core.runtime.library import decode_version, library


def _field(check, since):
    """Declare an optional field: how its value is checked, and the first NCCL release that knows it."""
    return dataclasses.field(default=None, metadata={"check": check, "since": since})


def _flag(name, value):
    if isinstance(value, bool):
        return int(value)
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be True or False, not {type(value).__name__}")
    if operator.index(value) not in (0, 1):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return operator.index(value)


def _integer(name, value):
    number = _index(name, value)
    if not INT_MIN <= number <= INT_MAX:
        raise ValueError(f"{name}={value!r} does not fit a C int")
    return number


def _unsigned64(name, value):
    number = _index(name, value)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}={value!r} does not fit an unsigned 64-bit integer")
    return number


def _pointer(name, value):
    # The pointer is the `handle` of an `ncclpy.Event`, or the int value of another library's handle object.
    handle = getattr(value, "handle", value)
    try:
        return _unsigned64(name, int(handle) if not isinstance(handle, (float, str, bytes, bool)) else handle)
    except TypeError:
        raise TypeError(f"{name} must be a pointer as an int, not {type(value).__name__}") from None


def _index(name, value):
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def _text(name, value):
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"{name} must not contain a NUL character: {value!r}")
    return value


class _Checked:
    """Check every field that is set when the object is made; the repr shows these fields."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                field.metadata["check"](f"{type(self).__name__}.{field.name}", value)

    def __repr__(self):
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(f'{name}={v!r}' for name, v in values if v is not None)})"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Config(_Checked):
    """Configure a communicator; ``None`` leaves a field to NCCL's default.

    Parameters
    ----------
    blocking : bool, optional
        ``False`` makes calls that would wait return at once; the communicator is then polled. Default ``True``.
    cga_cluster_size : int, optional
        Thread blocks per cluster, 0 to 8 (GPUs since Hopper). NCCL 2.17.
    min_ctas, max_ctas : int, optional
        Least and most thread blocks (channels) a kernel may use, at least 1. NCCL 2.17; NCCL up to 2.30 refuses
        `min_ctas` without `max_ctas`.
    net_name : str, optional
        Network module to use, as in ``NCCL_NET``. NCCL 2.17.
    split_share : bool, optional
        Share resources with the children made by split. NCCL 2.18.
    traffic_class : int, optional
        Traffic class of the network. NCCL 2.26.
    comm_name : str, optional
        Name that NCCL's log and profiler show. NCCL 2.27.
    collnet_enable : bool, optional
        Use reductions in the network. NCCL 2.27.
    cta_policy : int, optional
        ``NCCL_CTA_POLICY_*`` flags: 0 default, 1 efficiency, 2 zero. NCCL 2.27.
    shrink_share : bool, optional
        Share resources with the child made by shrink. NCCL 2.27.
    nvls_ctas : int, optional
        Thread blocks that NVLink SHARP uses. NCCL 2.27.
    n_channels_per_net_peer : int, optional
        Channels to each peer over the network. NCCL 2.28.
    nvlink_centric_sched : bool, optional
        Schedule for NVLink first. NCCL 2.28.
    graph_usage_mode : int, optional
        0: no CUDA graphs, 1: one at a time, 2: mixed with plain launches. NCCL 2.29.
    num_rma_ctx : int, optional
        Contexts for one-sided calls. NCCL 2.29.
    max_p2p_peers : int, optional
        Maximum number of peers in concurrent sends and receives. NCCL 2.30.3.
    graph_stream_ordering : bool, optional
        Order captured graphs with plain launches. NCCL 2.30.7.
    launch_order_implicit : int, optional
        Implicit order of launches, as in ``NCCL_LAUNCH_ORDER_IMPLICIT``. NCCL 2.31.
    num_rma_sig : int, optional
        Signals for one-sided calls. NCCL 2.31.
    rma_eager_init : int, optional
        Prepare one-sided calls when the communicator is made. NCCL 2.31.
    host_cft_mode : int, optional
        1 enable, 2 disable, 3 fall back. NCCL 2.31.
    nvls_host_mode : int, optional
        Flags that switch host NVLink SHARP components off, 0 enables all. NCCL 2.32.

    Raises
    ------
    TypeError, ValueError
        If a value has the wrong type or does not fit its C type.

    Notes
    -----
    A field that the loaded NCCL does not know raises `NcclUnsupported` where the configuration is used.
    The C struct is ``ncclConfig_t``.
    """

    blocking: bool | None = _field(_flag, 21400)
    cga_cluster_size: int | None = _field(_integer, 21701)
    min_ctas: int | None = _field(_integer, 21701)
    max_ctas: int | None = _field(_integer, 21701)
    net_name: str | None = _field(_text, 21701)
    split_share: bool | None = _field(_flag, 21801)
    traffic_class: int | None = _field(_integer, 22602)
    comm_name: str | None = _field(_text, 22703)
    collnet_enable: bool | None = _field(_flag, 22703)
    cta_policy: int | None = _field(_integer, 22703)
    shrink_share: bool | None = _field(_flag, 22703)
    nvls_ctas: int | None = _field(_integer, 22703)
    n_channels_per_net_peer: int | None = _field(_integer, 22803)
    nvlink_centric_sched: bool | None = _field(_flag, 22803)
    graph_usage_mode: int | None = _field(_integer, 22902)
    num_rma_ctx: int | None = _field(_integer, 22902)
    max_p2p_peers: int | None = _field(_integer, 23003)
    graph_stream_ordering: bool | None = _field(_flag, 23007)
    launch_order_implicit: int | None = _field(_integer, 23102)
    num_rma_sig: int | None = _field(_integer, 23102)
    rma_eager_init: int | None = _field(_integer, 23102)
    host_cft_mode: int | None = _field(_integer, 23102)
    nvls_host_mode: int | None = _field(_integer, 23203)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CollConfig(_Checked):
    """Configure one collective call (NCCL 2.31); every rank must pass the same. ``None`` is NCCL's default.

    Parameters
    ----------
    ext : int, optional
        Address of a caller-owned list of ``ncclConfigExt_t``; NVIDIA's NCCL ignores it.
    min_ctas, max_ctas : int, optional
        Least and most thread blocks (channels) that this call may use.
    nvls_ctas : int, optional
        Most thread blocks that NVLink SHARP uses.
    cga_cluster_size : int, optional
        Thread blocks per cluster; the same for every collective of a group.
    alg_selection : str, optional
        The algorithms that this call may use; empty for NCCL's choice.
    force_alg_selection : bool, optional
        Whether a selection that cannot be met is an error. Default ``True``.
    cta_policy : int, optional
        ``NCCL_CTA_POLICY_*`` flags; the communicator's by default.
    user_profiler_tag : int, optional
        64-bit number handed to profiler plugins; keep its highest bit clear.
    launch_completion_event : int or Event, optional
        CUDA event (without timing) recorded when the kernel has been launched. NCCL 2.32.

    Raises
    ------
    TypeError, ValueError
        If a value has the wrong type or does not fit its C type.

    Notes
    -----
    A field that the loaded NCCL does not know raises `NcclUnsupported` where the configuration is used.
    The C struct is ``ncclCollConfig_t``.
    """

    ext: int | None = _field(_pointer, 23102)
    min_ctas: int | None = _field(_integer, 23102)
    max_ctas: int | None = _field(_integer, 23102)
    nvls_ctas: int | None = _field(_integer, 23102)
    cga_cluster_size: int | None = _field(_integer, 23102)
    alg_selection: str | None = _field(_text, 23102)
    force_alg_selection: bool | None = _field(_flag, 23102)
    cta_policy: int | None = _field(_integer, 23102)
    user_profiler_tag: int | None = _field(_unsigned64, 23102)
    launch_completion_event: object | None = _field(_pointer, 23203)


# (name, first release) of the fields of each class, read once: a struct may be filled on every call.
_CONFIG_SINCE = tuple((field.name, field.metadata["since"]) for field in dataclasses.fields(Config))
_COLL_CONFIG_SINCE = tuple((field.name, field.metadata["since"]) for field in dataclasses.fields(CollConfig))


cdef unsigned int struct_version() except? 0:
    return <unsigned int>min(version_code(), NCCLPY_ABI_VERSION)


cdef int _refuse_unknown(object config, tuple since_of_field) except -1:
    """Raise if a field is set that the loaded NCCL would ignore."""
    cdef int loaded = version_code()
    for name, since in since_of_field:
        if since > loaded and getattr(config, name) is not None:
            used = library()
            raise NcclUnsupported(
                f"{type(config).__name__}.{name} needs NCCL {'.'.join(map(str, decode_version(since)))} or newer; "
                f"{used.path} is NCCL {'.'.join(map(str, used.version))}",
                version=used.version,
            )
    return 0


cdef inline int _or_default(object value) except? -1:
    return NCCL_CONFIG_UNDEF_INT if value is None else int(value)


cdef inline const char* _chars(object encoded) noexcept:
    """Return the characters of `encoded`, which must outlive their use; NULL for None."""
    return NULL if encoded is None else PyBytes_AS_STRING(encoded)


cdef inline object _encoded(object text):
    return None if text is None else text.encode()


cdef object fill_config(ncclConfig_t* out, object config):
    """Fill the newest `ncclConfig_t`; return what must stay alive while NCCL reads it. None means all defaults."""
    if config is None:
        config = _DEFAULT
    elif not isinstance(config, Config):
        raise TypeError(f"config must be an ncclpy.Config or None, not {type(config).__name__}")
    _refuse_unknown(config, _CONFIG_SINCE)
    net_name, comm_name = _encoded(config.net_name), _encoded(config.comm_name)
    # An older NCCL clips `size` and reads the prefix of the struct that it knows.
    out.size = sizeof(ncclConfig_t)
    out.magic = NCCL_API_MAGIC
    out.version = struct_version()
    out.blocking = _or_default(config.blocking)
    if config.blocking is None and version_code() < 21700:
        out.blocking = 1  # these releases have no "undefined" and refuse its value
    out.cgaClusterSize = _or_default(config.cga_cluster_size)
    out.minCTAs = _or_default(config.min_ctas)
    out.maxCTAs = _or_default(config.max_ctas)
    out.netName = _chars(net_name)
    out.splitShare = _or_default(config.split_share)
    out.trafficClass = _or_default(config.traffic_class)
    out.commName = _chars(comm_name)
    out.collnetEnable = _or_default(config.collnet_enable)
    out.CTAPolicy = _or_default(config.cta_policy)
    out.shrinkShare = _or_default(config.shrink_share)
    out.nvlsCTAs = _or_default(config.nvls_ctas)
    out.nChannelsPerNetPeer = _or_default(config.n_channels_per_net_peer)
    out.nvlinkCentricSched = _or_default(config.nvlink_centric_sched)
    out.graphUsageMode = _or_default(config.graph_usage_mode)
    out.numRmaCtx = _or_default(config.num_rma_ctx)
    out.maxP2pPeers = _or_default(config.max_p2p_peers)
    out.graphStreamOrdering = _or_default(config.graph_stream_ordering)
    out.launchOrderImplicit = _or_default(config.launch_order_implicit)
    out.numRmaSig = _or_default(config.num_rma_sig)
    out.rmaEagerInit = _or_default(config.rma_eager_init)
    out.hostCftMode = _or_default(config.host_cft_mode)
    out.nvlsHostMode = _or_default(config.nvls_host_mode)
    return net_name, comm_name


cdef object fill_coll_config(ncclCollConfig_t* out, object config):
    """Fill the newest `ncclCollConfig_t`; return what must stay alive while NCCL reads it. None means all defaults."""
    cdef uintptr_t ext, event
    if config is None:
        config = _COLL_DEFAULT
    elif not isinstance(config, CollConfig):
        raise TypeError(f"config must be an ncclpy.CollConfig or None, not {type(config).__name__}")
    _refuse_unknown(config, _COLL_CONFIG_SINCE)
    selection = _encoded(config.alg_selection)
    ext = 0 if config.ext is None else _pointer("CollConfig.ext", config.ext)
    event = 0
    if config.launch_completion_event is not None:
        event = _pointer("CollConfig.launch_completion_event", config.launch_completion_event)
    out.size = sizeof(ncclCollConfig_t)
    if version_code() < 23203:
        # The layout of 2.31 ends before the event; it is not documented that 2.31 clips a larger size.
        out.size = <char*>&out.launchCompletionEvent - <char*>out
    out.magic = NCCL_API_MAGIC
    out.version = struct_version()
    out.ext = <ncclConfigExt_t*>ext
    out.minCTAs = _or_default(config.min_ctas)
    out.maxCTAs = _or_default(config.max_ctas)
    out.nvlsCTAs = _or_default(config.nvls_ctas)
    out.cgaClusterSize = _or_default(config.cga_cluster_size)
    out.algSelection = _chars(selection)
    out.forceAlgSelection = 1 if config.force_alg_selection is None else int(config.force_alg_selection)
    out.CTAPolicy = _or_default(config.cta_policy)
    out.userProfilerTag = 0 if config.user_profiler_tag is None else config.user_profiler_tag
    out.launchCompletionEvent = <cudaEvent_t>event
    return selection


_DEFAULT = Config()
_COLL_DEFAULT = CollConfig()
