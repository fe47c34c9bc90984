"""Programs of ranks of a coordinator over MPI: python mpi_programs.py NAME, in processes that mpirun starts.

Each prints a line at its end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import sys
import threading
import time

import mpi4py
import numpy as np

import ncclpy

DEADLINE = 30
kept = []


def serialized():
    """Below MPI_THREAD_MULTIPLE the coordinator needs mpi_alone: one coordinator, and no other caller of MPI."""
    mpi4py.rc.thread_level = "serialized"
    world = world_of_mpi()
    refused(ncclpy.NcclError, "needs MPI_THREAD_MULTIPLE, and this process has MPI_THREAD_SERIALIZED", world)
    with ncclpy.Coordinator(world, mpi_alone=True, timeout=DEADLINE) as coordinator:
        assert coordinator.all_reduce("x", np.ones(2)).result(DEADLINE)[0] == world.size
        refused(ncclpy.NcclError, "one coordinator at a time", world, mpi_alone=True)
        coordinator.barrier("before the end").wait(DEADLINE)
    with ncclpy.Coordinator(world, mpi_alone=True, timeout=DEADLINE) as coordinator:
        coordinator.barrier("again").wait(DEADLINE)


def funneled():
    mpi4py.rc.thread_level = "funneled"
    said = "needs MPI_THREAD_SERIALIZED, and this process has MPI_THREAD_FUNNELED.*thread_level = 'multiple'"
    refused(ncclpy.NcclError, said, world_of_mpi(), mpi_alone=True)


def machines():
    """Check that the choice of the engine follows the machines of the ranks."""
    world = world_of_mpi()
    for engine, hosts, wanted in (
        ("auto", 1, "host"), ("auto", 2, "mpi"), ("mpi", 1, "mpi"), ("mpi", 2, "mpi"), ("host", 1, "host"),
    ):  # fmt: skip
        os.environ["NCCL_HOSTID"] = str(world.rank % hosts)
        with ncclpy.Coordinator(world, engine=engine, timeout=DEADLINE) as coordinator:
            assert coordinator._options.engine == wanted, (engine, hosts, coordinator._options)
            work = coordinator.all_reduce("x", np.full(3, world.rank + 1))
            assert work.result(DEADLINE).tolist() == [world.size * (world.size + 1) // 2] * 3
            part = coordinator.process_set(range(1, world.size), DEADLINE)
            if part is not None:
                assert part.all_reduce("x", np.ones(1)).result(DEADLINE) == [world.size - 1]
    os.environ["NCCL_HOSTID"] = str(world.rank)
    refused(ncclpy.NcclUnsupported, f"works on one machine, and .* are on {world.size}", world, engine="host")
    os.environ["NCCL_HOSTID"] = ""
    with ncclpy.Coordinator(world, device=0, timeout=DEADLINE) as coordinator:  # ranks cannot share the device
        assert coordinator._options.engine == "mpi"


def disagree():
    """Ranks with different options get the same error."""
    world = world_of_mpi()
    said = refused(
        ValueError, "different engines: 'mpi' with host loaded on rank 0, 'auto' .* on", world,
        engine="auto" if world.rank else "mpi",
    )  # fmt: skip
    assert len(set(world.allgather(said))) == 1
    refused(ValueError, "different options: fusion_bytes", world, engine="mpi", fusion_bytes=100 + world.rank)
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
        error = coordinator.all_reduce("x", np.ones(2 + world.rank)).exception(DEADLINE)
        assert "on rank 0" in str(error) and f"on rank {world.size - 1}" in str(error)
        assert len(set(world.allgather(str(error)))) == 1
        assert coordinator.all_reduce("x", np.ones(2)).result(DEADLINE)[0] == world.size


def device_memory():
    """The MPI engine accepts CPU memory only."""
    world = world_of_mpi()
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
        pointer = ncclpy.core.runtime.device.allocate(64, 0)
        array = ncclpy.Buffer(pointer, 4, "float32", device=coordinator._session.device)
        try:
            coordinator.all_reduce("x", array)
        except ValueError as error:
            assert "'x' is in device memory" in str(error), error
        else:
            raise AssertionError("it was taken")
        assert coordinator.all_reduce("x", np.ones(1)).result(DEADLINE) == [world.size]  # the name is still free
        ncclpy.core.runtime.device.free(pointer)


def both():
    """Device memory uses one engine and CPU memory uses MPI, as with NCCL; here the host engine stands for NCCL."""
    import ctypes

    from ncclpy.coordinator import coordinator as module
    from ncclpy.core.runtime import device
    from ncclpy.interop.mpi.thread import MpiThread

    module.engine_name = lambda: "nccl"
    launch, by_mpi = MpiThread.launch, []
    MpiThread.launch = lambda self, one: (by_mpi.append(one.what), launch(self, one))
    world = world_of_mpi()
    size, rank = world.size, world.rank
    with ncclpy.Coordinator(world, timeout=DEADLINE) as coordinator:
        assert coordinator._options.engine == "both"
        place = coordinator._session.device
        pointers = [device.allocate(64, place) for _ in range(2)]
        there = [ncclpy.Buffer(pointer, 4, "float32", device=place) for pointer in pointers]
        lying = [(ctypes.c_float * 4).from_address(pointer) for pointer in pointers]
        part = coordinator.process_set([0, 1], DEADLINE)
        for turn, each in enumerate([coordinator] + [part] * (part is not None)):
            for floats in lying:
                floats[:] = [rank + 1.0] * 4
            here = [np.full(4, rank + 1.0, np.float32) for _ in range(2)]
            arrays = [(f"host {i}", array) for i, array in enumerate(here)]
            arrays += [(f"device {i}", buffer) for i, buffer in enumerate(there)]
            for work in [each.all_reduce(name, array) for name, array in arrays[rank:] + arrays[:rank]]:
                work.wait(DEADLINE)
            total = sum(range(1, (2 if turn else size) + 1))
            for found in (*here, *lying):
                assert list(found) == [total] * 4, (turn, list(found))
        if rank == 0:
            coordinator.all_reduce("of others", np.ones(3, np.float32), "max").wait(DEADLINE)
            coordinator.all_reduce("device of others", there[0], "max").wait(DEADLINE)
            assert lying[0][0] == sum([1, 2])
        elif rank == 1:
            for name, array in (("of others", np.zeros(3, np.float32)), ("device of others", there[0])):
                coordinator.all_reduce(name, array, "max").wait(DEADLINE)
        coordinator.join(DEADLINE)
    assert by_mpi and not any("device" in what for what in by_mpi), by_mpi
    for pointer in pointers:
        device.free(pointer)


def types():
    """Check types and operators that MPI lacks."""
    import ml_dtypes

    world = world_of_mpi()
    size, rank = world.size, world.rank
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
        for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
            drawn = [np.random.default_rng(each).normal(size=2000) for each in range(size)]
            every = [each.astype(np.float32).astype(dtype) for each in drawn]
            total = np.sum([each.astype(np.float32) for each in every], axis=0, dtype=np.float32).astype(dtype)
            array = every[rank].copy()
            coordinator.all_reduce("sum", array).wait(DEADLINE)
            np.testing.assert_array_equal(array.view(np.uint8), total.view(np.uint8), str(dtype))
            array = every[rank].copy()
            coordinator.all_reduce("max", array, "max").wait(DEADLINE)
            np.testing.assert_array_equal(array.astype(float), np.max([each.astype(float) for each in every], axis=0))
            part = coordinator.reduce_scatter("part", every[rank].copy()).result(DEADLINE)
            np.testing.assert_array_equal(part.astype(float), np.array_split(total, size)[rank].astype(float))
        for dtype in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64):
            first = -20 if np.issubdtype(dtype, np.signedinteger) else 0
            every = [np.arange(first, 20).astype(dtype) + dtype(each * each) for each in range(size)]
            array = every[rank].copy()
            coordinator.all_reduce("average", array, "average").wait(DEADLINE)
            total = np.sum(every, axis=0, dtype=np.int64)
            np.testing.assert_array_equal(array, (np.sign(total) * (abs(total) // size)).astype(dtype))
        for dtype in (np.bool_, np.complex64, np.complex128):
            array = np.array([rank == 0, True, False], dtype)
            coordinator.all_reduce("sum", array).wait(DEADLINE)
            np.testing.assert_array_equal(array, np.array([1, size, 0]).astype(dtype))


def large():
    """Check counts above the limit of MPI, which is set to 7 here, and to more later."""
    from ncclpy.interop.mpi import plane as mpi_plane

    mpi_plane._MAX_COUNT = 7
    world = world_of_mpi()
    size, rank = world.size, world.rank
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
        for count in (5, 7, 8, 23):
            every = [np.arange(count * 4.0).reshape(count, 4) * (each + 1) for each in range(size)]
            array = every[rank].copy()
            coordinator.all_reduce("sum", array).wait(DEADLINE)
            np.testing.assert_array_equal(array, sum(every))
            array = every[rank].copy()
            part = coordinator.reduce_scatter("part", array).result(DEADLINE)
            np.testing.assert_array_equal(part, np.array_split(sum(every), size)[rank])
            np.testing.assert_array_equal(array, every[rank])
            coordinator.broadcast("root", array, 1).wait(DEADLINE)
            np.testing.assert_array_equal(array, every[1])
        mpi_plane._MAX_COUNT = 900
        row = np.full((1, 100), float(rank))
        assert coordinator.all_gather("rows", row).result(DEADLINE)[:, 0].tolist() == list(range(size))
        rows = np.repeat(np.arange(float(size)), 100).reshape(size, 100)
        assert (coordinator.all_to_all("rows", rows).result(DEADLINE) == rank).all()
        mpi_plane._MAX_COUNT = 40
        error = coordinator.all_gather("ragged", np.ones(rank + 20, np.uint8)).exception(DEADLINE)
        assert "have no common unit" in str(error), error
        coordinator.close()


def idle():
    """An idle coordinator uses hardly any processor time: after 25 s, in which the use decreases."""
    world = world_of_mpi()
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
        coordinator.barrier("begin").wait(DEADLINE)
        time.sleep(20)
        before, began = used(), time.monotonic()
        time.sleep(4)
        share = (used() - before) / (time.monotonic() - began)
        coordinator.barrier("end").wait(DEADLINE)
    print(f"<idle {100 * share:.3f}%>", flush=True)
    assert share < 0.02, share


def again():
    """Make and shut down coordinators, which leave nothing behind."""
    world = world_of_mpi()
    for _ in range(30):
        with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
            part = coordinator.process_set([0, 1], DEADLINE)
            if part is not None:
                part.all_reduce("x", np.ones(1)).wait(DEADLINE)
    first, second = (ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) for _ in range(2))
    works = [each.all_reduce("x", np.ones(1)) for each in ((first, second) if world.rank else (second, first))]
    assert [work.result(DEADLINE)[0] for work in works] == [world.size] * 2
    first.close()
    second.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ncclpy-mpi")]
    assert not left, left
    counted = []
    for _ in range(3):
        ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE).close()
        gc.collect()
        counted.append(len(os.listdir("/proc/self/fd")))
    assert counted[-1] <= counted[0], counted


def traced():
    """Check a timeline, and the statistics."""
    import json

    world = world_of_mpi()
    path = f"trace-{os.getppid()}-{{rank}}.json"
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE, timeline=path) as coordinator:
        coordinator.all_reduce("loss", np.ones(4)).wait(DEADLINE)
        coordinator.grouped_all_reduce(["a", "b"], [np.ones(4), np.ones(3)])[1].wait(DEADLINE)
        coordinator.barrier("end").wait(DEADLINE)
        stats = coordinator.stats()
    assert stats["operations"]["all_reduce"] == 3 and stats["fused"] == 2 and stats["launches"] == 3, stats
    with open(path.format(rank=world.rank)) as file:
        events = json.load(file)
    phases = [event["name"] for event in events if event.get("args") == {"operation": "loss"}]
    assert phases[0] == "negotiate" and phases[-1] == "run", phases
    os.unlink(path.format(rank=world.rank))


def raises():
    """An exception in a with block ends the coordinator on all ranks, with the reason."""
    world = world_of_mpi()
    try:
        with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
            coordinator.barrier("begin").wait(DEADLINE)
            if world.rank == 1:
                raise KeyError("no such thing")
            coordinator.all_reduce("x", np.ones(1)).wait(DEADLINE)
    except KeyError:
        assert world.rank == 1
    except ncclpy.NcclAborted as error:
        assert world.rank != 1 and "ended by rank 1: KeyError: 'no such thing'" in str(error), error


def interrupted():
    """Press Ctrl-C in one rank while it waits for the others."""
    world = world_of_mpi()
    try:
        with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
            coordinator.barrier("begin").wait(DEADLINE)
            if world.rank == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                coordinator.all_reduce("x", np.ones(1)).wait(DEADLINE)
            coordinator.all_reduce("y", np.ones(1)).wait(DEADLINE)
    except KeyboardInterrupt:
        assert world.rank == 1
    except ncclpy.NcclAborted as error:
        assert world.rank != 1 and "ended by rank 1: KeyboardInterrupt" in str(error), error


def leaves():
    """A rank that exits without a shutdown is lost to the others; its MPI is finalised with theirs."""
    world = world_of_mpi()
    coordinator = ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE)
    kept.append(coordinator)  # otherwise it would be dropped here, which is another case
    coordinator.barrier("begin").wait(DEADLINE)
    if world.rank == 1:
        return
    with contextlib.suppress(ncclpy.NcclError):  # it has heard of that
        coordinator.all_reduce("x", np.ones(1)).exception(DEADLINE)
    error = coordinator.error
    assert isinstance(error, ncclpy.NcclRemoteError) and error.ranks == (1,), error
    with contextlib.suppress(ncclpy.NcclError):
        coordinator.close()


def dropped():
    """A dropped coordinator ends on all ranks, without a collective call."""
    import warnings

    world = world_of_mpi()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        coordinator = ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE)
        coordinator.barrier("begin").wait(DEADLINE)
        if world.rank == 1:
            del coordinator
            gc.collect()
        else:
            try:
                error = coordinator.all_reduce("x", np.ones(1)).exception(DEADLINE)
            except ncclpy.NcclAborted as refused:  # it has heard of that
                error = refused
            assert "was dropped without close()" in str(error), error
            with contextlib.suppress(ncclpy.NcclError):
                coordinator.close()
    with ncclpy.Coordinator(world, engine="mpi", timeout=DEADLINE) as coordinator:
        coordinator.barrier("all is well").wait(DEADLINE)


def late():
    """An operation that MPI does not complete fails at its deadline and ends the coordinator; its arrays are held."""
    from ncclpy.interop.mpi.thread import MpiThread

    world = world_of_mpi()
    coordinator = ncclpy.Coordinator(world, engine="mpi", timeout=1.0)
    coordinator.barrier("begin").wait(DEADLINE)
    launch, held = MpiThread.launch, []
    if world.rank == 1:
        MpiThread.launch = lambda self, launch: held.append((self, launch))
    array = np.ones(100_000)
    began = time.monotonic()
    error = coordinator.all_reduce("x", array).exception(DEADLINE)
    assert "MPI has not done it within 1 s" in str(error) and time.monotonic() - began < 20, error
    assert world.rank == 1 or sys.getrefcount(array) > 2
    for thread, each in held:  # so that MPI can be finalised
        launch(thread, each)
    with contextlib.suppress(ncclpy.NcclError):
        coordinator.close()


def missing():
    """Ranks that do not come are named in the error."""
    world = world_of_mpi()
    if world.rank == 0:
        refused(ncclpy.NcclTimeout, "not all 3 ranks of the communicator called it within 500 ms", world, timeout=0.5)
        world.barrier()
        from ncclpy.interop.mpi.meeting import left

        [(comm, request)] = left
    else:
        world.barrier()
        comm, request = world.Idup()
    request.Wait()  # so that MPI can be finalised
    comm.Free()


def world_of_mpi():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def refused(kind, said, *arguments, **options):
    """Return the error text of a refused coordinator."""
    try:
        ncclpy.Coordinator(*arguments, **{"timeout": DEADLINE} | options)
    except kind as error:
        assert re.search(said, str(error)), error
        return str(error)
    raise AssertionError("it was taken")


def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    ncclpy.use("host")
    globals()[sys.argv[1]]()
    sys.stdout.write(f"<{sys.argv[1]} done>\n")
    sys.stdout.flush()
