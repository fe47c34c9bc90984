"""One family of errors, which name operation, place and version, and can be pickled."""

from __future__ import annotations

import pickle
import subprocess

import pytest

import ncclpy
import testing
from ncclpy import bindings, errors

KINDS = [
    ncclpy.NcclError,
    ncclpy.NcclTimeout,
    ncclpy.NcclAborted,
    ncclpy.NcclRemoteError,
    ncclpy.NcclUnsupported,
    ncclpy.LibraryNotFound,
]


@pytest.mark.parametrize("kind", KINDS)
def test_family(kind):
    assert issubclass(kind, ncclpy.NcclError) and issubclass(kind, RuntimeError)
    assert issubclass(kind, TimeoutError) == (kind is ncclpy.NcclTimeout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_everything(kind, protocol):
    error = kind("words", result=6, function="ncclAllReduce", detail="socket closed", version=(2, 32, 3))
    error.missing = [1, 3]  # an attribute of the NcclTimeout of a store
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == "words" and again.missing == [1, 3]
    assert (again.result, again.function, again.detail, again.version) == (
        6,
        "ncclAllReduce",
        "socket closed",
        (2, 32, 3),
    )


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "ranks "),
        ([3], "rank 3"),
        ([2, 0, 1, 1, 7], "ranks 0-2, 7"),
        ([0, 2, 4, 6, 7, 8], "ranks 0, 2 and 4 more"),
    ],
)
def test_ranks_as_text(numbers, text):
    assert errors.ranks(errors.spans(numbers), 2) == text


def test_ranks_of_any_size_as_text():
    beyond = [range(1 << 64), range((1 << 64) + 1, (1 << 64) + 2)]
    assert errors.ranks(beyond) == f"ranks 0-{(1 << 64) - 1}, {(1 << 64) + 1}"
    assert errors.listed(beyond, 1, ",") == f"0-{(1 << 64) - 1} and 1 more"
    assert errors.listed(errors.spans([4, 5, 9]), between=",") == "4-5,9"


def invalid_argument():
    """Return the error of a call that NCCL itself refuses."""
    with pytest.raises(ncclpy.NcclError) as caught:
        bindings.comm_init_rank(0, bytes(ncclpy.get_unique_id()), 0)
    return caught.value


def test_fields_of_a_refusal():
    error = invalid_argument()
    assert error.result == ncclpy.Result.INVALID_ARGUMENT
    assert error.function == "ncclCommInitRank"
    assert error.version == ncclpy.library().version
    assert error.detail, "ncclGetLastError is part of the error"


def test_message_names_function_reason_and_version():
    error = invalid_argument()
    message = str(error)
    assert error.function in message
    assert "invalid argument" in message and str(int(error.result)) in message
    assert error.detail in message
    assert ".".join(map(str, error.version)) in message


def test_refusal_can_be_pickled():
    error = invalid_argument()
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.result == error.result and again.detail == error.detail


def test_unknown_codes_are_shown_as_numbers():
    # A newer NCCL may return a code that has no name here.
    assert "97" in bindings.get_error_string(97) or "unknown" in bindings.get_error_string(97).lower()
    with pytest.raises(ValueError, match="97"):
        ncclpy.Result(97)
    error = ncclpy.NcclError("x", result=97)
    assert error.result == 97 and pickle.loads(pickle.dumps(error)).result == 97


FAKE = r"""
/* A NCCL of the future: its all-reduce answers with a code that nobody here knows. */
typedef int ncclResult_t;
ncclResult_t ncclGetVersion(int* version) { *version = 29901; return 0; }
const char* ncclGetErrorString(ncclResult_t result) { return "unknown result code"; }
const char* ncclGetLastError(void* comm) { return "the flux capacitor is empty"; }
ncclResult_t ncclAllReduce(const void* s, void* r, unsigned long n, int t, int o, void* c, void* stream) { return 97; }
ncclResult_t ncclGetUniqueId(void* id) { return RESULT; }
ncclResult_t ncclGroupStart(void) { return 0; }
ncclResult_t ncclGroupEnd(void) { return 0; }
"""


@pytest.fixture(scope="module")
def future_nccl(tmp_path_factory):
    """Compile a libnccl that is newer than this package and lacks most functions."""
    folder = tmp_path_factory.mktemp("nccl")

    def build(result):
        source = folder / "fake.c"
        source.write_text(FAKE.replace("RESULT", str(result)))
        library = folder / f"libnccl-{result}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
        return str(library)

    return build


def test_code_of_newer_nccl_is_kept_as_a_number(future_nccl):
    done = testing.run_python(
        """
        import pickle, ncclpy
        from ncclpy import bindings
        assert ncclpy.library().version == (2, 99, 1), ncclpy.library()
        try:
            bindings.all_reduce(4096, 4096, 1, ncclpy.DataType.INT8, ncclpy.SUM, 4096, 0)
        except ncclpy.NcclError as error:
            assert error.result == 97, error.result
            assert type(error) is ncclpy.NcclError
            print(pickle.loads(pickle.dumps(error)))
        """,
        env={"NCCLPY_LIBRARY": future_nccl(0)},
        warm=True,
    )
    for part in ("ncclAllReduce", "97", "the flux capacitor is empty", "2.99.1"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("result", "kind"), [(1, "NcclError"), (4, "NcclError"), (6, "NcclRemoteError"), (8, "NcclTimeout")]
)
def test_error_class_of_each_result(future_nccl, result, kind):
    done = testing.run_python(
        """
        import ncclpy
        try:
            ncclpy.get_unique_id()
        except ncclpy.NcclError as error:
            print(type(error).__name__, error.result)
        """,
        env={"NCCLPY_LIBRARY": future_nccl(result)},
        warm=True,
    )
    assert done.stdout.split() == [kind, str(result)]


def test_missing_symbol_names_the_version_that_has_it(future_nccl):
    done = testing.run_python(
        """
        import ncclpy
        from ncclpy import bindings
        assert not ncclpy.library().has("ncclCommSplit")
        for call, symbol, version in [
            (lambda: bindings.comm_split(4096, 0, 0), "ncclCommSplit", "2.18"),
            (lambda: bindings.comm_revoke(4096, 0), "ncclCommRevoke", "2.28"),
        ]:
            try:
                call()
            except ncclpy.NcclUnsupported as error:
                assert symbol in str(error) and version in str(error), error
            else:
                raise AssertionError(f"{symbol} was called though it is not there")
        """,
        env={"NCCLPY_LIBRARY": future_nccl(0)},
        warm=True,
    )
    assert done.stderr == ""


def test_other_errors_are_notes_of_the_first():
    from ncclpy.errors import attach

    first = ncclpy.NcclTimeout("rank 1 is late", function="Plan.launch")
    others = [first, ncclpy.NcclTimeout("rank 2 is late"), ValueError("bad"), ncclpy.NcclTimeout("rank 2 is late")]
    assert attach(first, others) is first
    assert first.__notes__ == ["also NcclTimeout: rank 2 is late", "also ValueError: bad"]
    assert pickle.loads(pickle.dumps(first)).__notes__ == first.__notes__
    assert not hasattr(attach(ValueError("alone"), []), "__notes__")
