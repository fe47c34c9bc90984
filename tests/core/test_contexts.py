"""Each GPU's context takes some 500 MiB: a process has one on the devices that it uses, and on no other."""

from __future__ import annotations

import pytest

import testing

WAYS = {
    "main": "call()",
    "a thread": "in_a_thread(call)",
    "a group": "in_a_thread(grouped)",
    "a split": "in_a_thread(lambda: in_a_thread(lambda: comm.split(0, 0)).close())",
    "a manager": "in_a_thread(managed)",
    "close": "in_a_thread(comm.close)",
    "abort": "in_a_thread(comm.abort)",
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", "timeout=20", "config=ncclpy.Config(blocking=False)"])
@pytest.mark.parametrize("way", WAYS)
def test_first_device_gets_no_context(way, options):
    """All calls are made in threads without a current device, with a communicator of another device."""
    testing.need_devices(2)
    testing.run_python(
        f"""
        import ctypes, threading
        import ncclpy
        from ncclpy.core.runtime import device

        cuda = ctypes.CDLL("libcuda.so.1")

        def has_context(number):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            assert cuda.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active)) == 0
            return bool(active.value)

        def in_a_thread(call):
            results = []
            thread = threading.Thread(target=lambda: results.append(call()))
            thread.start()
            thread.join(60)
            return results[0]

        def call():
            comm.all_reduce(*buffers, stream=stream)

        def grouped():
            with ncclpy.group():
                for buffer in buffers:
                    comm.all_reduce(buffer, stream=stream)

        def managed():
            with ncclpy.Manager() as manager:
                manager.all_reduce("key", buffers[0], device=1, num_local=1, stream=stream).wait(20)

        make = lambda: ncclpy.Communicator.init(1, 0, ncclpy.get_unique_id(), device=1, {options})
        comm = in_a_thread(make).wait_ready(20)
        memory, stream = device.allocate(64, 1), ncclpy.Stream(1)
        buffers = [ncclpy.Buffer(memory + 32 * i, 8, "float32", device=1) for i in range(2)]
        assert [has_context(each) for each in range(2)] == [False, True], "before"
        {WAYS[way]}
        stream.synchronize(20)
        assert [has_context(each) for each in range(2)] == [False, True]
        comm.close()
        assert [has_context(each) for each in range(2)] == [False, True], "after close"
        """,
        warm=True,
    )
