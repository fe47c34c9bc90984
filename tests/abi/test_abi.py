"""The hand-written declarations against real releases of NCCL and CUDA: headers compiled with ours, libraries called.

They run with ``-m abi``; NCCLPY_ABI_WHEELS names the folder that .ci/fetch_abi_wheels filled. No GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from abi_source import ABI, declared, driver_functions, nccl_functions
from paths import SUPPORT, TESTS
from recorder import Recorded, compile_recorder, link_recorder

from ncclpy.core.runtime.search import host_engine_path

pytestmark = [pytest.mark.abi, pytest.mark.timeout(300)]

VERSIONS = ("2.19.3", "2.27.7", "2.32.3")
NEWEST = "2.32.3"
FUNCTIONS = nccl_functions()

# Names that the real header or library has and ncclpy leaves out, as nccl_abi.h explains.
LEFT_OUT = {
    "ncclResetDebugInit",
    "ncclResetDebugInitInternal",
    "ncclGinBarrierCreateRequirement",
    "ncclGinInboxA2ACreateRequirement",
    "ncclGinOutboxCreateRequirement",
    "ncclCftBarrierCreateRequirement",
    "ncclLLA2ACalcSlots",
    "ncclLLA2ACreateRequirement",
    "ncclLsaBarrierCreateRequirement",
}


def _code(version: str) -> int:
    major, minor, patch = map(int, version.split("."))
    return major * 10000 + minor * 100 + patch


@pytest.fixture(scope="session")
def unpacked():
    """Return a function that unpacks the wheel of a distribution, once, and returns the folder of its files."""
    folder = os.environ.get("NCCLPY_ABI_WHEELS")
    if not folder:
        pytest.fail("NCCLPY_ABI_WHEELS must name a folder filled by .ci/fetch_abi_wheels", pytrace=False)
    # Nearly a gigabyte: deleted at the end of the session.
    temporary = tempfile.TemporaryDirectory()
    root = Path(temporary.name)

    def unpack(distribution: str, version: str = "*") -> Path:
        wheels = sorted(Path(folder).glob(f"{distribution}-{version}-*.whl"))
        assert len(wheels) == 1, f"{folder} holds {len(wheels)} wheels of {distribution} {version}, not one"
        target = root / wheels[0].stem
        if not target.exists():
            with zipfile.ZipFile(wheels[0]) as wheel:
                names = [name for name in wheel.namelist() if "/include/" in name or name.endswith("/libnccl.so.2")]
                wheel.extractall(target, names)
        return target / "nvidia"

    yield unpack
    temporary.cleanup()


@pytest.fixture(scope="session")
def cuda_includes(unpacked):
    # The runtime's headers need a few of the compiler's (crt/) and of CCCL's (nv/target).
    return [
        unpacked("nvidia_cuda_runtime_cu12") / "cuda_runtime" / "include",
        unpacked("nvidia_cuda_nvcc_cu12") / "cuda_nvcc" / "include",
        unpacked("nvidia_cuda_cccl_cu12") / "cuda_cccl" / "include",
    ]


def _compile(arguments: list[str | Path], includes: list[Path]) -> str:
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-std=c++17",
        *(part for path in includes for part in ("-isystem", str(path))),
        *map(str, arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def _compare(program: str, header: Path, present: str, functions: set[str], includes: list[Path], folder: Path) -> str:
    """Compile tests/abi/<program>.cpp against a copy of `header` and return what it printed."""
    names = declared(header.name)
    tokens = set(re.findall(r"\w+", present))

    def rows(macro: str, items: list[str]) -> str:
        return f"#define {macro}(X) " + " ".join(f"X({item})" for item in items) + "\n"

    structs = [name for name in names.fields if name in tokens]
    macros = [name for name in names.macros if name in tokens]
    (folder / f"{program}_rows.h").write_text(
        rows("MACROS", macros)
        + rows("ENUMS", [name for name in names.enums if name in tokens])
        + rows("VALUES", [name for name in names.values if name in tokens])
        + rows("STRUCTS", structs)
        + rows("FIELDS", [f"{struct}, {field}" for struct in structs for field in names.fields[struct]])
        + rows("FUNCTIONS", sorted(functions & tokens))
    )
    (folder / f"{program}_undefine.h").write_text("".join(f"#undef {name}\n" for name in names.macros))
    executable = folder / program
    arguments = ["-O0", "-Wall", "-Wno-conversion-null", f"-I{folder}", f"-I{header.parent}", f"-I{TESTS / 'abi'}"]
    _compile([*arguments, TESTS / "abi" / f"{program}.cpp", "-o", executable], includes)
    done = subprocess.run([executable], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def _preprocessed(source: str, includes: list[Path], folder: Path) -> str:
    """Return the text that `source` includes, and its macros."""
    file = folder / "includes.cpp"
    file.write_text(source)
    return _compile(["-E", "-dD", file], includes)


NCCL_SOURCE = "#include <nccl.h>\n#if __has_include(<nccl_device.h>)\n#include <nccl_device.h>\n#endif\n"


@pytest.fixture(scope="session")
def nccl_headers(unpacked, cuda_includes, tmp_path_factory):
    """Return a function from a version to (include paths, their text after preprocessing)."""
    known: dict[str, tuple[list[Path], str]] = {}

    def get(version: str) -> tuple[list[Path], str]:
        if version not in known:
            includes = [unpacked("nvidia_nccl_cu12", version) / "nccl" / "include", *cuda_includes]
            known[version] = includes, _preprocessed(NCCL_SOURCE, includes, tmp_path_factory.mktemp("nccl"))
        return known[version]

    return get


@pytest.mark.parametrize("version", VERSIONS)
def test_nccl_header(nccl_headers, tmp_path, version):
    includes, present = nccl_headers(version)
    code = _code(version)
    names = declared("nccl_abi.h")
    output = _compare("nccl", ABI / "nccl_abi.h", present, {f.name for f in FUNCTIONS}, includes, tmp_path)
    lines = output.splitlines()
    assert f"version {code}" in lines

    # The end of a list moves with every release.
    growing = {"ncclNumResults", "ncclNumTypes", "NCCL_GIN_MAX_TYPES"} if version != NEWEST else set()
    differs = [line for line in lines if line.startswith("differs") and line.split()[1].strip(":") not in growing]
    assert differs == []

    lacks = {tuple(line.split()[1].split(".")) for line in lines if line.startswith("lacks")}
    tokens = set(re.findall(r"\w+", present))
    for struct, fields in names.fields.items():
        for field, since in fields.items():
            if since and struct in tokens:
                assert ((struct, field) in lacks) == (since > code), (struct, field)
    for line in lines:
        if line.startswith("size "):
            _, struct, real, ours = line.split()
            shorter = any(lacking == struct for lacking, _ in lacks)
            # A new field may lie in what was padding.
            assert int(real) <= int(ours) if shorter else int(real) == int(ours), line
    if version == NEWEST:
        assert lacks == set()
        for name in (*names.macros, *names.enums, *names.values, *names.fields):
            assert name in tokens, f"{name} is not in NCCL {version}"


@pytest.mark.parametrize("version", VERSIONS)
def test_nccl_header_declares_our_functions(nccl_headers, version):
    _, present = nccl_headers(version)
    declares = set(re.findall(r"(?:ncclResult_t|ncclTeam_t|int|void|char\s*\*)\s+(nccl[A-Z]\w+)\s*\(", present))
    ours = {function.name: function.since for function in FUNCTIONS}
    assert declares & ours.keys() == {name for name, since in ours.items() if since <= _code(version)}


def test_moved_field_is_noticed(nccl_headers, tmp_path):
    """A check of the comparison: a copy of nccl_abi.h with faults must be refused, and each fault named."""
    includes, present = nccl_headers(NEWEST)
    text = (ABI / "nccl_abi.h").read_text()
    for before, after in [
        ("  int minCTAs;             /* 2.17 */\n", "  int64_t minCTAs; /* 2.17 */\n"),
        ("  ncclRemoteError = 6,", "  ncclRemoteError = 16,"),
        ("#define NCCL_WIN_GIN_ONLY 0x04", "#define NCCL_WIN_GIN_ONLY 0x05"),
        (
            "ncclCommCount, (const ncclComm_t comm, int* count)",
            "ncclCommCount, (const ncclComm_t comm, size_t* count)",
        ),
    ]:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    faulty = tmp_path / "nccl_abi.h"
    faulty.write_text(text)
    # The names are read from the real nccl_abi.h, the declarations from the faulty copy.
    output = _compare("nccl", faulty, present, {function.name for function in FUNCTIONS}, includes, tmp_path)
    for fault in (
        "differs offset of ncclConfig_t.maxCTAs",
        "differs ncclConfig_t.minCTAs: the type",
        "differs ncclRemoteError",
        "differs NCCL_WIN_GIN_ONLY",
        "differs ncclCommCount: the type",
    ):
        assert fault in output


# A call that passes the struct, all defaults.
CALLS_WITH = {
    "ncclConfig_t": ["comm_init_rank_config", 1, {"id": 1}, 0, None],
    "ncclCollConfig_t": ["all_reduce_config", 1, 2, 3, 7, 0, 4096, 0, None],
    "ncclSimInfo_t": ["group_simulate_end"],
    "ncclEncryptionConfig_t": ["set_encryption", 0],
}


@pytest.mark.parametrize("version", VERSIONS)
def test_structs_start_as_nccl_starts_them(nccl_headers, tmp_path, version):
    includes, present = nccl_headers(version)
    output = _compare("nccl", ABI / "nccl_abi.h", present, set(), includes, tmp_path)
    initial: dict[str, dict[str, int | None]] = {}
    for struct, field, value in re.findall(r"^initial (\w+)\.(\w+) (\S+)$", output, re.MULTILINE):
        initial.setdefault(struct, {})[field] = None if value == "null" else int(value)
    assert "ncclConfig_t" in initial
    assert version != NEWEST or initial.keys() == CALLS_WITH.keys()
    child = Recorded(link_recorder(compile_recorder(tmp_path), tmp_path), _code(version))
    for struct, fields in initial.items():
        passed = child(*CALLS_WITH[struct])["seen"]["args"][-1]
        for field, value in fields.items():
            if field == "estimatedTime":
                continue  # the recorder has overwritten it
            if field == "size" and version != NEWEST:
                assert passed[field] >= value, "the newest layout, of which NCCL reads what it knows"
            else:
                assert (passed[field] or None) == (value or None), (struct, field)
    assert child.close() == ""


def test_driver_header(cuda_includes, tmp_path):
    present = _preprocessed("#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n", cuda_includes, tmp_path)
    functions = {function.name for function in driver_functions()}
    tokens = set(re.findall(r"\w+", present))
    names = declared("driver_abi.h")
    for name in (*names.macros, *names.enums, *names.values, *names.fields, *functions):
        assert name in tokens, f"{name} is not in cuda.h"
    output = _compare("driver", ABI / "driver_abi.h", present, functions, cuda_includes, tmp_path)
    assert output == ""


def test_driver_symbols_are_cuda_hs(cuda_includes, tmp_path):
    """Where cuda.h maps a name to a versioned symbol, driver_abi.h has that symbol."""
    text = _preprocessed("#include <cuda.h>\n", cuda_includes, tmp_path)
    mapped = dict(re.findall(r"^#define (cu\w+) (?:__CUDA_API_\w+\()?(cu\w+_v\d+)\)?$", text, re.MULTILINE))
    for function in driver_functions():
        plain = re.sub(r"_v\d+$", "", function.name)
        assert mapped.get(plain, plain) == function.name


def test_host_engine_serves_a_program_with_nvidias_headers(nccl_headers, cuda_includes, tmp_path):
    """NCCL's ABI, not only ncclpy's use of it: C code with the real nccl.h and cuda.h, linked with the host engine."""
    includes, _ = nccl_headers(NEWEST)
    engine = Path(host_engine_path())
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c99", "-D_GNU_SOURCE", "-Wall", "-Werror"]
    command += [f"-I{folder}" for folder in dict.fromkeys([*includes, *cuda_includes])]
    command += [TESTS / "abi/all_reduce.c", "-o", tmp_path / "all_reduce"]
    command += [f"-L{engine.parent}", f"-l:{engine.name}", f"-Wl,-rpath,{engine.parent}", "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run([tmp_path / "all_reduce"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# The remaining tests call the real libraries, each in a process of its own.

CALLS = """
import json, sys
import ncclpy
from ncclpy import bindings
from ncclpy.core.arguments.config import CollConfig, Config

def outcome(function, *args):
    try:
        returned = getattr(bindings, function)(*args)
    except ncclpy.NcclError as error:
        return {"raised": type(error).__name__, "message": str(error), "function": error.function,
                "result": error.result, "detail": error.detail, "version": error.version}
    return {"returned": returned if isinstance(returned, (int, float, str, list)) else repr(returned)}

library = ncclpy.library()
unique_id = bindings.get_unique_id()
facts = {
    "version": library.version, "engine": library.engine, "path": library.path, "missing": library.missing(),
    "id": bytes(unique_id).hex(), "second id": bytes(bindings.get_unique_id()).hex(),
}
calls = {
    "version": ["get_version"],
    **{f"text {code}": ["get_error_string", code] for code in range(10)},
    "group_start": ["group_start"], "group_end": ["group_end"], "group_end alone": ["group_end"],
    "count of none": ["comm_count", 0],
    "init": ["comm_init_rank", 1, unique_id, 0],
    "init_config": ["comm_init_rank_config", 1, unique_id, 0, Config(blocking=False)],
    "init_all": ["comm_init_all", 2],
    "mem_alloc": ["mem_alloc", 1024],
    "scalable": ["comm_init_rank_scalable", 1, 0, [unique_id]],
    "reduce_config": ["all_reduce_config", 0, 0, 1, 7, 0, 0, 0, CollConfig()],
    "keys": ["param_get_all_parameter_keys"],
    "bind": ["param_bind", "NCCL_NO_SUCH_PARAMETER"],
    "encryption": ["set_encryption", 1, "secret" * 8],
    "short key": ["set_encryption", 1, "key"],
    "bad encryption": ["set_encryption", 7],
    "grow": ["comm_grow", 0, 2, None, 1],
}
facts["calls"] = {name: outcome(*call) for name, call in calls.items()}
facts["unsupported"] = {}
from abi_source import snake_case
for symbol in library.missing():
    count = getattr(bindings, snake_case(symbol)).__code__.co_argcount
    facts["unsupported"][symbol] = outcome(snake_case(symbol), *[0] * count)
if library.has("ncclGroupSimulateEnd"):
    bindings.group_start()
    facts["calls"]["simulate"] = outcome("group_simulate_end")
if library.has("ncclParamBind"):
    facts["debug"] = bindings.param_get_parameter("NCCL_DEBUG_FILE")
    facts["debug by handle"] = bindings.param_get_str(bindings.param_bind("NCCL_DEBUG_FILE"))
print(json.dumps(facts))
"""


@pytest.fixture(scope="session")
def facts(unpacked):
    """Return a function from a version to the answers of its library."""
    known: dict[str, dict] = {}

    def get(version: str) -> dict:
        if version not in known:
            path = unpacked("nvidia_nccl_cu12", version) / "nccl" / "lib" / "libnccl.so.2"
            environment = dict(
                os.environ,
                NCCLPY_LIBRARY=str(path),
                NCCL_SOCKET_IFNAME="lo",
                PYTHONPATH=str(SUPPORT),
                NCCL_DEBUG_FILE="abc",
            )
            done = subprocess.run(
                [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=120, env=environment, cwd="/"
            )
            assert done.returncode == 0, done.stdout + done.stderr
            known[version] = json.loads(done.stdout.splitlines()[-1]) | {"file": str(path)}
        return known[version]

    return get


def _triple(code: int) -> list[int]:
    return [code // 10000, code // 100 % 100, code % 100]


@pytest.mark.parametrize("version", VERSIONS)
def test_library_reports_its_version_and_path(facts, version):
    found = facts(version)
    assert found["version"] == _triple(_code(version))
    assert found["engine"] == "cuda"
    assert found["path"] == found["file"]
    assert found["calls"]["version"]["returned"] == _code(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_missing_functions_are_those_that_nm_lacks(facts, version):
    found = facts(version)
    output = subprocess.run(
        ["nm", "-D", "--defined-only", found["file"]], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    exported = {line.split()[-1] for line in output.splitlines()}
    lacking = {function.name: _triple(function.since) for function in FUNCTIONS if function.name not in exported}
    assert found["missing"] == lacking
    assert set(lacking) == {function.name for function in FUNCTIONS if function.since > _code(version)}
    public = {name for name in exported if re.match(r"nccl[A-Z]", name)}
    assert public - LEFT_OUT <= {function.name for function in FUNCTIONS}


@pytest.mark.parametrize("version", VERSIONS)
def test_missing_functions_name_their_release(facts, version):
    found = facts(version)
    since = {function.name: function.since for function in FUNCTIONS}
    assert set(found["unsupported"]) == set(found["missing"])
    for symbol, reply in found["unsupported"].items():
        assert reply["raised"] == "NcclUnsupported"
        release = ".".join(map(str, _triple(since[symbol])))
        assert reply["message"].startswith(f"{symbol} needs NCCL {release} or newer; ")
        assert reply["message"].endswith(f"is NCCL {version}")


@pytest.mark.parametrize("version", VERSIONS)
def test_unique_ids(facts, version):
    found = facts(version)
    assert len(found["id"]) == 256
    assert found["id"] != found["second id"]


@pytest.mark.parametrize("version", VERSIONS)
def test_error_texts(facts, version):
    texts = [facts(version)["calls"][f"text {code}"]["returned"] for code in range(10)]
    assert texts[0] == "no error"
    assert "invalid argument" in texts[4]
    assert "in progress" in texts[7]
    assert ("timeout" in texts[8]) == (_code(version) >= 23003)
    assert "unknown" in texts[9]


@pytest.mark.parametrize("version", VERSIONS)
def test_groups(facts, version):
    calls = facts(version)["calls"]
    assert calls["group_start"]["returned"] == calls["group_end"]["returned"] == 0
    assert (calls["group_end alone"]["raised"], calls["group_end alone"]["result"]) == ("NcclError", 5)
    if _code(version) >= 22203:
        assert calls["simulate"]["returned"] == -1.0, "an empty group has no estimate"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("call", ["init", "init_config", "init_all", "mem_alloc", "scalable"])
def test_without_a_gpu_the_error_is_cudas(facts, version, call):
    reply = facts(version)["calls"][call]
    if call == "scalable" and _code(version) < 22304:
        assert reply["raised"] == "NcclUnsupported"
        return
    assert (reply["raised"], reply["result"]) == ("NcclError", 1)
    assert reply["version"] == _triple(_code(version))
    assert "Cuda failure" in reply["detail"]
    for part in (reply["function"], "unhandled cuda error", "result 1", reply["detail"], f"[NCCL {version}]"):
        assert part in reply["message"]


@pytest.mark.parametrize("version", VERSIONS)
def test_null_communicator_is_an_invalid_argument(facts, version):
    calls = facts(version)["calls"]
    assert (calls["count of none"]["raised"], calls["count of none"]["result"]) == ("NcclError", 4)
    assert "comm argument is NULL" in calls["count of none"]["detail"]
    if _code(version) >= 23102:
        assert (calls["reduce_config"]["raised"], calls["reduce_config"]["result"]) == ("NcclError", 4)
    if _code(version) >= 22902:
        assert calls["grow"]["result"] == 4 and "uniqueId" in calls["grow"]["detail"]


@pytest.mark.parametrize("version", [version for version in VERSIONS if _code(version) >= 23004])
def test_parameters(facts, version):
    found = facts(version)
    assert "NCCL_DEBUG_FILE" in found["calls"]["keys"]["returned"]
    assert found["debug"] == found["debug by handle"]
    assert (found["calls"]["bind"]["raised"], found["calls"]["bind"]["result"]) == ("NcclError", 4)


@pytest.mark.parametrize("version", [version for version in VERSIONS if _code(version) >= 23203])
def test_encryption(facts, version):
    calls = facts(version)["calls"]
    assert calls["encryption"]["returned"] == 0
    assert calls["short key"]["result"] == 4 and "at least 32 bytes" in calls["short key"]["detail"]
    assert calls["bad encryption"]["result"] == 4 and "mode=7" in calls["bad encryption"]["detail"]
