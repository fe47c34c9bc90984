"""The driver half of the host engine keeps CUDA's contract: devices, contexts, memory, processes.

``NCCLPY_TEST_DRIVER=libcuda.so.1`` runs the same tests on a real driver, all but those marked `host_only`.
"""

import ctypes
import os
import subprocess
import sys

import pytest
from driver_calls import (
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    LEGACY,
    NAMES,
    NO_DEVICE,
    NON_BLOCKING,
    NOT_INITIALIZED,
    NOT_READY,
    OUT_OF_MEMORY,
    PATH,
    PER_THREAD,
    REAL_DRIVER,
    Gate,
    in_thread,
    joined,
    refused,
)
from paths import SUPPORT

host_only = pytest.mark.skipif(REAL_DRIVER, reason="about the host engine alone")


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", f"import ctypes, os, sys\nfrom driver_calls import *\nd = Driver(PATH)\n{code}"],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "NCCLPY_TEST_DRIVER": PATH, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )


# The driver and its devices


def test_every_call_of_the_table_is_exported(driver):
    assert len(NAMES) > 35
    assert [name for name in NAMES if not hasattr(driver.library, name)] == []


def test_calls_before_init_are_refused():
    outcome = run_python(
        "n = ctypes.c_int()\n"
        "print(d.library.cuDeviceGetCount(ctypes.byref(n)), d.library.cuCtxGetCurrent(ctypes.byref(n)),"
        " d.library.cuDriverGetVersion(ctypes.byref(n)))"
    )
    assert outcome.stdout.split() == [str(NOT_INITIALIZED), str(NOT_INITIALIZED), "0"], outcome.stderr


@host_only
@pytest.mark.parametrize(("text", "count"), [("1", 1), ("3", 3), ("1024", 1024), ("", 8)], ids=str)
def test_the_environment_sets_the_number_of_devices(text, count):
    outcome = run_python("d.cuInit(0); print(d.get('cuDeviceGetCount', ctypes.c_int))", NCCLPY_HOST_DEVICES=text)
    assert outcome.stdout.strip() == str(count), outcome.stderr


@host_only
@pytest.mark.parametrize("count", ["0", "1025", "-1", "3 ", "eight", "99999999999999999999"])
def test_an_impossible_number_of_devices_is_refused_in_words(count):
    outcome = run_python(
        f"print(d.library.cuInit(0), d.text('cuGetErrorString', {NO_DEVICE}))",
        NCCLPY_HOST_DEVICES=count,
    )
    text = f"{NO_DEVICE} NCCLPY_HOST_DEVICES must be an integer from 1 to 1024, not '{count}'"
    assert outcome.stdout.rstrip("\n") == text, outcome.stderr


def test_errors_have_names_and_texts(driver):
    assert driver.text("cuGetErrorName", 0) == "CUDA_SUCCESS"
    assert driver.text("cuGetErrorName", NOT_READY) == "CUDA_ERROR_NOT_READY"
    assert driver.text("cuGetErrorString", INVALID_HANDLE) == "invalid resource handle"
    refused(INVALID_VALUE, driver.text, "cuGetErrorName", 123456)


def test_devices_identify_themselves(driver):
    count = driver.get("cuDeviceGetCount", ctypes.c_int)
    identities = set()
    for device in range(count):
        name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        uuid = ctypes.create_string_buffer(16)
        driver.cuDeviceGetName(name, 256, device)
        driver.cuDeviceGetPCIBusId(bus, 32, device)
        driver.cuDeviceGetUuid(uuid, device)
        domain, bus_number, slot = (driver.get("cuDeviceGetAttribute", ctypes.c_int, a, device) for a in (50, 33, 34))
        assert bus.value.decode() == f"{domain:04X}:{bus_number:02X}:{slot:02X}.0"
        assert name.value and driver.get("cuDeviceTotalMem_v2", ctypes.c_size_t, device) > 1 << 28
        assert driver.get("cuDeviceCanAccessPeer", ctypes.c_int, device, device) == 0
        identities.add((bus.value, uuid.raw))
    assert len({bus for bus, _ in identities}) == len({uuid for _, uuid in identities}) == count
    refused(INVALID_DEVICE, driver.get, "cuDeviceGet", ctypes.c_int, count)
    refused(INVALID_DEVICE, driver.get, "cuDeviceGet", ctypes.c_int, -1)


def test_a_device_has_one_uuid_in_all_processes(driver):
    uuid = ctypes.create_string_buffer(16)
    driver.cuDeviceGetUuid(uuid, 0)
    outcome = run_python(
        "d.cuInit(0); u = ctypes.create_string_buffer(16); d.cuDeviceGetUuid(u, 0); print(u.raw.hex())"
    )
    assert outcome.stdout.strip() == uuid.raw.hex(), outcome.stderr


# Contexts


def test_a_thread_begins_without_a_context(driver):
    found = []

    def look():
        found.append(driver.get("cuCtxGetCurrent", ctypes.c_void_p))
        for call in (driver.event, driver.stream):
            refused(INVALID_CONTEXT, call)
        refused(INVALID_CONTEXT, driver.get, "cuCtxGetDevice", ctypes.c_int)
        refused(INVALID_CONTEXT, driver.alloc, 8)
        refused(INVALID_CONTEXT, driver.cuCtxSynchronize)
        driver.use(0)
        found.append(driver.get("cuCtxGetDevice", ctypes.c_int))
        driver.cuCtxSetCurrent(None)
        found.append(driver.get("cuCtxGetCurrent", ctypes.c_void_p))

    assert joined(in_thread(look))
    assert found == [None, 0, None]
    assert driver.get("cuCtxGetDevice", ctypes.c_int) == 0


def test_streams_and_events_need_no_current_context(driver):
    stream, event, memory = driver.stream(), driver.event(), driver.alloc(8)
    driver.cuCtxSetCurrent(None)
    driver.cuMemsetD8Async(memory, 0, 8, stream)
    driver.cuEventRecord(event, stream)
    driver.cuStreamSynchronize(stream)
    driver.cuEventSynchronize(event)
    assert driver.ready("cuStreamQuery", stream)
    for default in (None, LEGACY, PER_THREAD):
        refused(INVALID_CONTEXT, driver.cuStreamQuery, default)
    driver.cuMemFree_v2(memory)
    driver.cuStreamDestroy_v2(stream)


def test_streams_keep_the_device_they_were_made_on(driver, two_devices):
    driver.use(1)
    stream = driver.stream()
    driver.use(0)
    assert driver.get("cuCtxGetDevice", ctypes.c_int) == 0
    primary = driver.get("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 1)
    context = ctypes.c_void_p()
    driver.cuStreamGetCtx(stream, ctypes.byref(context))
    assert context.value == primary
    refused(INVALID_HANDLE, driver.cuEventRecord, driver.event(), stream)  # the event belongs to device 0
    driver.cuStreamDestroy_v2(stream)


# Memory


def test_copies_and_memsets_run_in_stream_order(driver):
    stream, gate_stream = driver.stream(NON_BLOCKING), driver.stream(NON_BLOCKING)
    a, b, host = driver.alloc(4096), driver.alloc(4096), driver.pinned(4096)
    event = driver.event()
    with Gate(driver, gate_stream):
        driver.cuEventRecord(event, gate_stream)
        driver.cuStreamWaitEvent(stream, event, 0)
        driver.cuMemsetD8Async(a, 1, 4096, stream)
        driver.cuMemcpyAsync(b, a, 4096, stream)
        driver.cuMemsetD8Async(b + 1024, 2, 1024, stream)
        driver.cuMemcpyAsync(host, b, 4096, stream)
        driver.cuMemsetD8Async(b, 3, 4096, stream)
        ctypes.memset(host, 9, 4096)  # overwritten when the gate opens, not before
    driver.cuStreamSynchronize(stream)
    assert ctypes.string_at(host, 4096) == b"\1" * 1024 + b"\2" * 1024 + b"\1" * 2048
    driver.cuMemFree_v2(a)
    driver.cuMemFree_v2(b)
    driver.cuMemFreeHost(host)


@pytest.mark.parametrize("nbytes", [1, 4096, 64 << 10, (64 << 10) + 1, 1 << 20])
def test_pageable_source_may_be_freed_when_the_copy_returns(driver, nbytes):
    stream, device = driver.stream(), driver.alloc(nbytes)
    data = os.urandom(nbytes)
    source, target = ctypes.create_string_buffer(data, nbytes), ctypes.create_string_buffer(nbytes)
    driver.cuMemcpyAsync(device, ctypes.addressof(source), nbytes, stream)
    ctypes.memset(source, 0, nbytes)
    driver.cuMemcpyAsync(ctypes.addressof(target), device, nbytes, stream)
    assert target.raw == data
    driver.cuMemFree_v2(device)


def test_a_small_pageable_copy_waits_for_nothing(driver):
    stream, device = driver.stream(), driver.alloc(8)
    source, target = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    with Gate(driver, stream) as gate:
        gate.reached()
        driver.cuMemcpyAsync(device, ctypes.addressof(source), 8, stream)
        ctypes.memset(source, 0, 8)
        assert not driver.ready("cuStreamQuery", stream)
    driver.cuMemcpyAsync(ctypes.addressof(target), device, 8, stream)
    assert target.raw == b"abcdefgh"
    driver.cuMemFree_v2(device)


def test_memory_attributes_name_context_and_type(driver):
    last = driver.get("cuDeviceGetCount", ctypes.c_int) - 1
    driver.use(last)
    device, pinned = driver.alloc(1000), driver.pinned(1000)
    context = driver.get("cuCtxGetCurrent", ctypes.c_void_p)
    driver.use(0)
    assert device % 256 == 0
    for pointer, kind in ((device, 2), (device + 999, 2), (pinned, 1), (pinned + 999, 1)):
        assert driver.get("cuPointerGetAttribute", ctypes.c_uint, 2, pointer) == kind
        assert driver.get("cuPointerGetAttribute", ctypes.c_int, 9, pointer) == last
        assert driver.get("cuPointerGetAttribute", ctypes.c_void_p, 1, pointer) == context
    pageable = ctypes.create_string_buffer(8)
    for pointer in (ctypes.addressof(pageable), 0):
        refused(INVALID_VALUE, driver.get, "cuPointerGetAttribute", ctypes.c_uint, 2, pointer)
    driver.cuMemFree_v2(device)
    driver.cuMemFreeHost(pinned)
    refused(INVALID_VALUE, driver.get, "cuPointerGetAttribute", ctypes.c_uint, 2, device)


def test_small_allocations_are_packed(driver):
    """Small allocations are aligned as CUDA's, not to 2 MiB as large ones are."""
    count, nbytes = 256, 600
    pointers = [driver.alloc(nbytes) for _ in range(count)]
    assert [pointer for pointer in pointers if pointer % 512] == []
    assert len({pointer >> 21 for pointer in pointers}) < count // 4
    for pointer in pointers:
        driver.cuMemFree_v2(pointer)


def test_invalid_memory_arguments_are_refused(driver):
    device, pinned = driver.alloc(512), driver.pinned(512)
    for wrong in (device + 8, pinned, 0x1000):
        refused(INVALID_VALUE, driver.cuMemFree_v2, wrong)
    for wrong in (pinned + 8, device):
        refused(INVALID_VALUE, driver.cuMemFreeHost, wrong)
    refused(INVALID_VALUE, driver.cuMemsetD8Async, device, 0, 1 << 40, None)
    refused(INVALID_VALUE, driver.cuMemcpyAsync, device, 0, 8, None)
    refused(INVALID_VALUE, driver.alloc, 0)
    refused(OUT_OF_MEMORY, driver.alloc, 1 << 60)
    pageable = ctypes.create_string_buffer(8)
    refused(INVALID_VALUE, driver.cuMemsetD8Async, ctypes.addressof(pageable), 0, 8, None)
    driver.cuMemcpyAsync(device, device + 256, 0, None)
    driver.cuMemcpyAsync(0, 0, 0, None)
    assert driver.get("cuMemHostAlloc", ctypes.c_void_p, 0, 0) is None
    driver.cuMemFree_v2(device)
    driver.cuMemFreeHost(pinned)
    driver.cuMemFree_v2(0)
    driver.cuMemFreeHost(None)
    refused(INVALID_VALUE, driver.cuMemFree_v2, device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    assert 0 < free.value <= total.value


def test_freeing_waits_for_the_work_of_the_device(driver):
    log, stream, memory = [], driver.stream(NON_BLOCKING), driver.alloc(512)
    gate = Gate(driver, stream)
    driver.later(stream, lambda: log.append("work"))
    gate.reached()

    def open_late():
        while_held_up = [driver.ready("cuStreamQuery", stream) for _ in range(5000)]
        assert not any(while_held_up)
        gate.open()

    opener = in_thread(open_late)
    driver.cuMemFree_v2(memory)
    log.append("freed")
    assert joined(opener)
    assert log == ["work", "freed"]


# Processes


@host_only
def test_a_forked_child_is_refused_and_exits():
    outcome = run_python(
        "d.cuInit(0); d.use(0); s = d.stream(); d.later(s, lambda: None); d.later(2, lambda: None)\n"
        "d.cuCtxSynchronize()\n"
        "if os.fork() == 0:\n"
        "    n = ctypes.c_int(); codes = {d.library.cuStreamSynchronize(s), d.library.cuInit(0),"
        " d.library.cuDeviceGetCount(ctypes.byref(n))}\n"
        "    print(codes, flush=True); sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert outcome.stdout.split("\n")[:2] == [f"{{{NOT_INITIALIZED}}}", "7"], outcome.stderr


@host_only
def test_process_with_queued_work_exits():
    outcome = run_python(
        "import threading\n"
        "d.cuInit(0); d.use(0); s = d.stream(); e = d.event(); gate = Gate(d, s); gate.reached()\n"
        "d.cuEventRecord(e, s); d.cuStreamWaitEvent(2, e, 0)\n"
        "d.use(1); d.cuStreamWaitEvent(None, e, 0)\n"
        "print('end')"
    )
    assert (outcome.returncode, outcome.stdout) == (0, "end\n"), outcome.stderr
