"""For tests of registered segments: operations on all communicators, and the registrations of each."""

import ncclpy

LONG = 20.0  # seconds that only a hang takes


def reduce_all(comms, buffers, streams=None):
    with ncclpy.group():
        for i, (comm, buffer) in enumerate(zip(comms, buffers, strict=True)):
            comm.all_reduce(buffer, stream=streams[i] if streams else None)


def synchronize(comms):
    for comm in comms:
        ncclpy.synchronize(comm.device, timeout=LONG)


def pointers(registry, comm):
    return {pointer for pointer, _, _ in registry.registered(comm)}
