"""A lane is a thread without Python and could not report a lack of memory: it allocates none."""

from sanitizers import ROOT, compiled

import testing

PROGRAM = """
    import ctypes
    import numpy as np
    import ncclpy

    memory = ctypes.CDLL(None)
    with ncclpy.Manager(timeout=30) as manager:
        for devices in (2, 8):
            arrays = [np.full(4, device + 1.0) for device in range(devices)]
            works = [
                manager.all_reduce((devices, i), array, device=device, num_local=devices)
                for i in range(20)
                for device, array in enumerate(arrays)
            ]
            for work in works:
                work.wait()
    asked = ctypes.c_long.in_dll(memory, "no_memory_asked").value
    refused = ctypes.c_long.in_dll(memory, "no_memory_refused").value
    assert asked > 0, "no lane was seen"
    assert refused == 0, refused
"""


def test_lane_allocates_no_memory(tmp_path):
    preloaded = tmp_path / "no_memory.so"
    done = compiled(preloaded, "-shared", "-fPIC", ROOT / "tests/host/no_memory.cpp", "-ldl")
    assert done.returncode == 0, done.stderr
    testing.run_python(PROGRAM, env={"NCCLPY_LIBRARY": "host", "LD_PRELOAD": str(preloaded)})
