"""Config and CollConfig: accepted values, and the structures that NCCL gets."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from recorder import Recorded, shared_recorder

from ncclpy.core.arguments.config import CollConfig, Config

UNDEFINED = -(2**31)

# Field by field: the Python name, the C name, the first release, a value, and that value in C.
CONFIG = [
    ("blocking", "blocking", 21400, False, 0),
    ("cga_cluster_size", "cgaClusterSize", 21701, 2, 2),
    ("min_ctas", "minCTAs", 21701, 3, 3),
    ("max_ctas", "maxCTAs", 21701, 4, 4),
    ("net_name", "netName", 21701, "Socket", "Socket"),
    ("split_share", "splitShare", 21801, True, 1),
    ("traffic_class", "trafficClass", 22602, 5, 5),
    ("comm_name", "commName", 22703, "années", "années"),
    ("collnet_enable", "collnetEnable", 22703, True, 1),
    ("cta_policy", "CTAPolicy", 22703, 2, 2),
    ("shrink_share", "shrinkShare", 22703, 1, 1),
    ("nvls_ctas", "nvlsCTAs", 22703, 6, 6),
    ("n_channels_per_net_peer", "nChannelsPerNetPeer", 22803, 7, 7),
    ("nvlink_centric_sched", "nvlinkCentricSched", 22803, True, 1),
    ("graph_usage_mode", "graphUsageMode", 22902, 2, 2),
    ("num_rma_ctx", "numRmaCtx", 22902, 8, 8),
    ("max_p2p_peers", "maxP2pPeers", 23003, 9, 9),
    ("graph_stream_ordering", "graphStreamOrdering", 23007, False, 0),
    ("launch_order_implicit", "launchOrderImplicit", 23102, 10, 10),
    ("num_rma_sig", "numRmaSig", 23102, 11, 11),
    ("rma_eager_init", "rmaEagerInit", 23102, 12, 12),
    ("host_cft_mode", "hostCftMode", 23102, 3, 3),
    ("nvls_host_mode", "nvlsHostMode", 23203, 0, 0),
]
COLL_CONFIG = [
    ("ext", "ext", 23102, 0x7000_0000_0000, 0x7000_0000_0000),
    ("min_ctas", "minCTAs", 23102, 3, 3),
    ("max_ctas", "maxCTAs", 23102, 4, 4),
    ("nvls_ctas", "nvlsCTAs", 23102, 5, 5),
    ("cga_cluster_size", "cgaClusterSize", 23102, 6, 6),
    ("alg_selection", "algSelection", 23102, "ring", "ring"),
    ("force_alg_selection", "forceAlgSelection", 23102, False, 0),
    ("cta_policy", "CTAPolicy", 23102, 1, 1),
    ("user_profiler_tag", "userProfilerTag", 23102, 2**63 - 1, 2**63 - 1),
    ("launch_completion_event", "launchCompletionEvent", 23203, 0x1000, 0x1000),
]
INIT = ["comm_init_rank_config", 2, {"id": 1}, 0]
REDUCE = ["all_reduce_config", 1, 2, 3, 7, 0, 4096, 0]


@pytest.fixture(scope="module")
def recorded_by_version(tmp_path_factory):
    _, library = shared_recorder(tmp_path_factory)
    children: dict[int, Recorded] = {}

    def get(version):
        if version not in children:
            children[version] = Recorded(library, version)
        return children[version]

    yield get
    for child in children.values():
        assert child.close() == ""


def test_tables_are_complete():
    assert [row[0] for row in CONFIG] == [field.name for field in dataclasses.fields(Config)]
    assert [row[0] for row in COLL_CONFIG] == [field.name for field in dataclasses.fields(CollConfig)]


@pytest.mark.parametrize("config", [None, {"config": {}}])
def test_defaults_are_nccls(recorded_by_version, config):
    seen = recorded_by_version(23203)(*INIT, config)["seen"]["args"][4]
    header = {"size": 120, "magic": 0xCAFEBEEF, "version": 23203}
    rest = {c: None if c.endswith("Name") else UNDEFINED for _, c, *_ in CONFIG}
    assert seen == header | rest


def test_coll_config_defaults_are_nccls(recorded_by_version):
    seen = recorded_by_version(23203)(*REDUCE, None)["seen"]["args"][7]
    header = {"size": 72, "magic": 0xCAFEBEEF, "version": 23203}
    rest = {c: UNDEFINED for _, c, *_ in COLL_CONFIG}
    rest |= {"ext": 0, "algSelection": None, "forceAlgSelection": 1, "userProfilerTag": 0, "launchCompletionEvent": 0}
    assert seen == header | rest


@pytest.mark.parametrize(("name", "c_name", "since", "value", "in_c"), CONFIG)
def test_config_field_reaches_its_place(recorded_by_version, name, c_name, since, value, in_c):
    child = recorded_by_version(23203)
    default = child(*INIT, None)["seen"]["args"][4]
    assert child(*INIT, {"config": {name: value}})["seen"]["args"][4] == default | {c_name: in_c}


@pytest.mark.parametrize(("name", "c_name", "since", "value", "in_c"), COLL_CONFIG)
def test_coll_config_field_reaches_its_place(recorded_by_version, name, c_name, since, value, in_c):
    child = recorded_by_version(23203)
    default = child(*REDUCE, None)["seen"]["args"][7]
    assert child(*REDUCE, {"coll_config": {name: value}})["seen"]["args"][7] == default | {c_name: in_c}


RELEASES = sorted({21602} | {row[2] for row in CONFIG + COLL_CONFIG if row[2] > 21600})


QUICK = (21602, 21701, 22703, 23102, 23203)  # other tests of this file start a process for all of them but one anyway


@pytest.mark.parametrize(
    "version", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in RELEASES]
)
@pytest.mark.parametrize(
    ("call", "kind", "rows"), [(INIT, "config", CONFIG), (REDUCE, "coll_config", COLL_CONFIG)], ids=["init", "call"]
)
def test_field_of_newer_release_is_refused(recorded_by_version, version, call, kind, rows):
    child = recorded_by_version(version)
    for name, c_name, since, value, in_c in rows:
        reply = child(*call, {kind: {name: value}})
        if since <= version:
            assert reply["seen"]["args"][-1][c_name] == in_c, reply
        else:
            release = f"{since // 10000}.{since // 100 % 100}.{since % 100}"
            assert reply["raised"] == "NcclUnsupported"
            assert f".{name} needs NCCL {release} or newer" in reply["message"]
            assert f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}" in reply["message"]


@pytest.mark.parametrize(("version", "blocking"), [(21602, 1), (21701, UNDEFINED)])
def test_blocking_is_explicit_before_2_17(recorded_by_version, version, blocking):
    assert recorded_by_version(version)(*INIT, None)["seen"]["args"][4]["blocking"] == blocking
    assert recorded_by_version(version)(*INIT, {"config": {"blocking": False}})["seen"]["args"][4]["blocking"] == 0


@pytest.mark.parametrize(("version", "stated"), [(22907, 22907), (23203, 23203), (23500, 23203)])
def test_config_version_is_that_of_the_library_up_to_newest_known(recorded_by_version, version, stated):
    assert recorded_by_version(version)(*INIT, None)["seen"]["args"][4]["version"] == stated


def test_coll_config_of_2_31_ends_before_the_event(recorded_by_version):
    assert recorded_by_version(23102)(*REDUCE, None)["seen"]["args"][7]["size"] == 64


@pytest.mark.parametrize(
    ("kind", "field", "value", "error", "words"),
    [
        (Config, "blocking", "no", TypeError, "Config.blocking must be True or False, not str"),
        (Config, "blocking", 2, ValueError, "Config.blocking must be True or False, not 2"),
        (Config, "min_ctas", True, TypeError, "Config.min_ctas must be an int, not bool"),
        (Config, "min_ctas", 1.0, TypeError, "Config.min_ctas must be an int, not float"),
        (Config, "max_ctas", 2**31, ValueError, "Config.max_ctas=2147483648 does not fit"),
        (Config, "net_name", b"Socket", TypeError, "Config.net_name must be a str, not bytes"),
        (Config, "comm_name", "a\0b", ValueError, "Config.comm_name must not contain a NUL"),
        (CollConfig, "user_profiler_tag", -1, ValueError, "CollConfig.user_profiler_tag=-1 does not fit"),
        (CollConfig, "launch_completion_event", "event", TypeError, "launch_completion_event must be a pointer"),
        (CollConfig, "ext", 1.5, TypeError, "CollConfig.ext must be a"),
    ],
)
def test_wrong_value_is_refused_at_once(kind, field, value, error, words):
    with pytest.raises(error, match=words):
        kind(**{field: value})


def test_config_takes_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        Config(True)
    with pytest.raises(TypeError, match="blocknig"):
        Config(blocknig=True)


def test_config_is_a_frozen_value():
    config = Config(blocking=False, comm_name="a")
    assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(Config(comm_name="a"), blocking=False)
    assert hash(config) == hash(dataclasses.replace(config))
    assert repr(config) == "Config(blocking=False, comm_name='a')"
    assert repr(CollConfig(min_ctas=2)) == "CollConfig(min_ctas=2)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.blocking = True
    assert Config(max_ctas=np.int64(4)).max_ctas == 4, "what has __index__ is an int"


def test_event_gives_its_handle():
    class Event:
        handle = 0x1234

    assert CollConfig(launch_completion_event=Event()).launch_completion_event.handle == 0x1234
