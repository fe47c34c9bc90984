"""Which libnccl is loaded, from where, and how it is opened. A library of a few lines stands in for NCCL."""

from __future__ import annotations

import subprocess

import pytest

import testing

STAND_IN = """
int ncclGetVersion(int* version) { *version = VERSION; return 0; }
"""


@pytest.fixture(scope="module")
def libnccl(tmp_path_factory):
    """Return the path of a libnccl.so.2 of version 2.28.9 that has one function."""
    return _build(tmp_path_factory.mktemp("nccl"), 22809)


def _build(folder, version):
    source = folder / "nccl.c"
    source.write_text(STAND_IN)
    path = folder / "libnccl.so.2"
    command = ["cc", "-shared", "-fPIC", f"-DVERSION={version}", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([*command, str(source), "-o", str(path)], check=True, timeout=60)
    return path


def run(code, **environment):
    """Run a snippet with no choice of library but that in `environment`; return what it printed."""
    warm = "LD_LIBRARY_PATH" not in environment  # the loader reads it when a process starts
    return testing.run_python(code, env={"NCCLPY_LIBRARY": None, **environment}, warm=warm).stdout.strip()


def test_libnccl_of_the_process_is_shared(libnccl):
    code = f"""
        import ctypes
        ctypes.CDLL({str(libnccl)!r})  # as torch has loaded its own
        import ncclpy
        ncclpy.use("cuda")
        library = ncclpy.library()
        print(library.path, library.version, "already loaded" in library.found, sep="|")
        """
    assert run(code) == f"{libnccl}|(2, 28, 9)|True"


def test_system_is_searched(libnccl):
    code = """
        import sys
        sys.modules["cuda"] = sys.modules["nvidia"] = None  # neither cuda.pathfinder nor the wheel
        import ncclpy
        library = ncclpy.library()
        print(library.path, library.engine, sep="|")
        """
    assert run(code, NCCLPY_LIBRARY="cuda", LD_LIBRARY_PATH=str(libnccl.parent)) == f"{libnccl}|cuda"


def test_wheel_is_found(libnccl, tmp_path):
    lib = tmp_path / "nvidia" / "nccl" / "lib"
    lib.mkdir(parents=True)
    (lib / "libnccl.so.2").symlink_to(libnccl)
    code = f"""
        import sys
        from ncclpy.core.runtime import search
        # This machine may have a wheel of its own, and a .pth file that has made `nvidia` a module already.
        sys.modules["cuda"] = None
        for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
            del sys.modules[name]
        sys.path[:] = [{str(tmp_path)!r}]
        print([place for place in search.candidates() if "pip wheel" in place[1]])
        """
    assert run(code) == f"[('{lib}/libnccl.so.2', 'pip wheel')]"


def test_symbols_of_libnccl_stay_local(libnccl):
    code = """
        import ctypes, ncclpy
        ncclpy.library()
        print(hasattr(ctypes.CDLL(None), "ncclGetVersion"))
        """
    assert run(code, NCCLPY_LIBRARY=str(libnccl)) == "False"


def test_too_old_nccl_and_other_libraries_are_skipped_and_named(tmp_path):
    old = _build(tmp_path, 21200)
    code = """
        import ncclpy
        try:
            ncclpy.library()
        except ncclpy.LibraryNotFound as error:
            print(error)
        """
    said = run(code, NCCLPY_LIBRARY=str(old))
    assert str(old) in said and "older than the oldest supported" in said and "NCCLPY_LIBRARY=host" in said
    said = run(code, NCCLPY_LIBRARY="libm.so.6")
    assert "libm.so.6" in said and "ncclGetVersion" in said


def test_same_choice_again_does_nothing(tmp_path):
    code = f"""
        import os, pathlib, shutil, ncclpy
        from ncclpy.core.runtime import search
        os.chdir({str(tmp_path)!r})
        shutil.copy(search.host_engine_path(), "libsome.so")
        ncclpy.use(os.path.join(os.curdir, "libsome.so"))
        ncclpy.library()
        ncclpy.use("host")
        ncclpy.use(pathlib.Path("libsome.so"))
        os.remove("libsome.so")
        ncclpy.use("./libsome.so")  # the choice as it was, whatever has become of the file
        for other in ("cuda", "libother.so", "/", "a\\0b"):
            try:
                ncclpy.use(other)
            except RuntimeError as error:
                print("already uses" in str(error))
        """
    assert run(code).split() == ["True"] * 4


@pytest.mark.parametrize("choice", ["foo", "HOSTS", "/nowhere/libnccl.so.2"])
@pytest.mark.parametrize("by", ["NCCLPY_LIBRARY", "ncclpy.use()"])
def test_invalid_choice_says_what_is_expected(choice, by):
    code = f"""
        import ncclpy
        if {by!r} == "ncclpy.use()":
            ncclpy.use({choice!r})
        try:
            ncclpy.library()
        except ncclpy.LibraryNotFound as error:
            print(error)
        """
    first, *rest = run(code, **({by: choice} if by == "NCCLPY_LIBRARY" else {})).splitlines()
    assert first == (
        f'{by} chose {choice!r}, which is neither "host" nor "cuda" nor the path of an NCCL library. Searched:'
    )
    assert rest[0] == f"  {choice} ({by}): cannot open shared object file: No such file or directory"
    assert "NCCLPY_LIBRARY=host" in rest[1] and "/path/to/libnccl.so.2" in rest[2]


def test_host_engine_that_does_not_start_is_not_taken_for_a_driver():
    code = """
        import ncclpy
        try:
            ncclpy.device_count()
        except ncclpy.LibraryNotFound as error:
            print(error)
        """
    said = run(code, NCCLPY_LIBRARY="host", NCCLPY_HOST_DEVICES="many")
    assert said.startswith("the host engine refuses to start") and "NCCLPY_HOST_DEVICES" in said and "'many'" in said


@pytest.mark.parametrize("choice", ["Host", pytest.param("HOST", marks=pytest.mark.slow)])
def test_host_engine_is_chosen_in_upper_and_lower_case(choice):
    code = f"""
    import ncclpy, os
    if os.environ.get("NCCLPY_LIBRARY") is None: ncclpy.use({choice!r})
    print(ncclpy.library().engine, ncclpy.device_count())
    """
    assert run(code, NCCLPY_LIBRARY=choice, NCCLPY_HOST_DEVICES="") == "host 8", "an empty variable is not set"
    assert run(code) == "host 8"


def test_missing_function_names_the_release(libnccl):
    code = """
        import ncclpy
        try:
            ncclpy.get_unique_id()
        except ncclpy.NcclUnsupported as error:
            print(error)
        """
    said = run(code, NCCLPY_LIBRARY=str(libnccl))
    assert "ncclGetUniqueId" in said and "2.28.9" in said and str(libnccl) in said


# A driver that reports each step and waits until another thread of the process has answered.
SLOW_DRIVER = """
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>
static int told(const char* name) {
  struct pollfd wait = {atoi(getenv("ANSWERS")), POLLIN, 0};
  char byte;
  if (write(atoi(getenv("BEGUN")), name, 1) != 1) return 0;
  return poll(&wait, 1, 10000) == 1 && read(wait.fd, &byte, 1) == 1;
}
static int opened;
__attribute__((constructor)) static void load(void) { opened = told("load"); }
int cuInit(unsigned int flags) { return opened && told("init") ? 0 : 999; }
int cuDeviceGetCount(int* count) { *count = told("count") ? 1 : 0; return 0; }
"""


def test_driver_is_loaded_without_the_gil(tmp_path, libnccl):
    (tmp_path / "cuda.c").write_text(SLOW_DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "cuda.c"), "-o", str(library)], check=True, timeout=60)
    code = f"""
        import ctypes, os, threading
        ctypes.CDLL({str(libnccl)!r})
        import ncclpy
        begun, answers = os.pipe(), os.pipe()
        os.environ |= {{"BEGUN": str(begun[1]), "ANSWERS": str(answers[0])}}
        said = []
        def other():
            while True:
                said.append(os.read(begun[0], 1).decode())
                os.write(answers[1], b"x")
        threading.Thread(target=other, daemon=True).start()
        # Two threads that load at once get one library.
        found = []
        threads = [threading.Thread(target=lambda: found.append(ncclpy.library())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(found[0].engine, found[0] is found[1], "".join(said))
        """
    assert run(code, LD_LIBRARY_PATH=str(tmp_path)) == "cuda True lic"


def test_child_forked_while_the_parent_loads_can_load(tmp_path):
    source = tmp_path / "slow.c"
    source.write_text(
        "#include <unistd.h>\n#include <stdlib.h>\n"
        '__attribute__((constructor)) static void load(void) { char b; write(atoi(getenv("BEGUN")), "x", 1);'
        ' read(atoi(getenv("GO")), &b, 1); }\n'
    )
    library = tmp_path / "slow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True, timeout=60)
    code = """
        import os, signal, sys, threading
        import ncclpy
        begun, go = os.pipe(), os.pipe()
        os.environ |= {"BEGUN": str(begun[1]), "GO": str(go[0])}
        def load():
            try:
                ncclpy.library()
            except ncclpy.LibraryNotFound:
                pass
        thread = threading.Thread(target=load)
        thread.start()
        os.read(begun[0], 1)  # the other thread is inside dlopen
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            ncclpy.use("host")
            os._exit(0 if ncclpy.library().engine == "host" else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.write(go[1], b"x")
        thread.join()
        """
    assert run(code, NCCLPY_LIBRARY=str(library)) == "0"


@pytest.mark.parametrize(("plan", "lines"), [("call=AllReduce nth=5 do=corrupt", 1), ("", 0), (" ; ", 0)])
def test_faults_of_the_environment_are_one_warning_per_process(plan, lines):
    code = """
        import ncclpy
        for _ in range(2):
            ncclpy.Communicator.init_all([0])[0].close()
        with ncclpy.faults("call=Send do=delay:1us"):  # of the program itself, which knows of it
            pass
        """
    done = testing.run_python(code, env={"NCCLPY_LIBRARY": "host", "NCCLPY_FAULTS": plan, "PYTHONWARNINGS": "ignore"})
    told = [line for line in done.stderr.splitlines() if "NCCLPY_FAULTS" in line]
    assert len(told) == lines, done.stderr
    assert all(repr(plan) in line and "Unset the variable" in line for line in told)
