"""Offsets between the clocks of a group's ranks: measured through the store, and used by a trace."""

import json
import time

import testing
from ncclpy.bootstrap import LocalStore
from ncclpy.engine.group_registry import KnownGroup
from ncclpy.process_group import clocks


def pair(store, ahead, identities=("one", "two")):
    """Return the clocks of ranks 0 and 1, with rank 0's `ahead` seconds ahead, and the watches to close."""
    made = []
    for rank, identity in enumerate(identities):
        now = time.monotonic if rank else lambda: time.monotonic() + ahead
        known = KnownGroup("g", 1, rank, 2, rank, dict)
        made.append(clocks.Clocks(store, rank, known, now, lambda name=identity: name))
    return made, made[0].listen()


def test_clock_offset_is_within_its_reported_error():
    for ahead in (5.0, -1234.5, 0.0):
        with LocalStore() as store:
            (_, other), watches = pair(store, ahead)
            offset, error = other.compare()
            assert abs(offset - ahead) <= error
            assert store.keys("clock/told/") == [], "what was answered is cleared away"
            for watch in watches:
                watch.close()


def test_shortest_round_trip_gives_clock_offset(monkeypatch):
    """Every answer but the fifth is late, by shifting the clock: only the fifth gives the right offset."""
    slow = iter([3.0, 4.0, 5.0, 2.0, 0.0, 3.0, 6.0, 7.0])
    with LocalStore() as store:
        (_, other), watches = pair(store, 50.0)
        get = store.get

        def late(key, timeout=None):
            value = get(key, timeout)
            delay = next(slow)
            other._now = lambda now=other._now: now() + delay  # as if the answer had been that long on its way
            return value

        monkeypatch.setattr(store, "get", late)
        offset, error = other.compare()
        assert error < 1.0 and abs(offset - (50.0 - (3.0 + 4.0 + 5.0 + 2.0))) <= error
        for watch in watches:
            watch.close()


def test_rank_with_clock_of_rank_0_does_not_compare():
    with LocalStore() as store:
        (_, other), watches = pair(store, 5.0, ("one", "one"))
        other.look()
        assert other._known.clock is None and store.keys("clock/asked/") == []
        (_, apart), more = pair(store, 5.0)
        apart.look()
        testing.wait_for(lambda: apart._known.clock is not None, "the comparison")
        found = apart._known.clock
        assert found["of"] == "one" and abs(found["offset"] - 5.0) <= found["error"]
        for watch in watches + more:
            watch.close()


def on_another_machine(rank, port, folder):
    """Be a rank; rank 1's wall clock is 5 s ahead, and its dump names another machine."""
    from ncclpy.engine import group_registry, recorder

    if rank.rank == 1:
        wall = time.time
        time.time = lambda: wall() + 5.0
        recorder.clock_id = clocks.clock_id = lambda: "another"
        clocks.Clocks.__init__.__defaults__ = (time.monotonic, clocks.clock_id)
    import numpy as np

    import ncclpy
    from ncclpy.bootstrap import TCPStore

    with TCPStore("127.0.0.1", port) as store, ncclpy.ProcessGroup(store, rank.rank, 2, device=rank.device) as group:
        group.all_reduce(np.ones(3)).wait(30)
        if rank.rank == 1:
            testing.wait_for(lambda: group_registry.groups()[0]["clock"] is not None, "the comparison")
        store.barrier("compared", rank.rank, 2, 60)
        return json.dumps(ncclpy.recorder.snapshot()), time.time()


def test_dumps_of_two_machines_are_on_one_time_line(host_engine, tmp_path):
    """Both processes really share a clock, so that at most the reported error may be left of the five seconds."""
    from ncclpy.bootstrap import TCPStore
    from ncclpy.cli.trace import reading

    with TCPStore("127.0.0.1", 0, serve=True) as store:
        found = testing.run_processes(2, on_another_machine, store.port, tmp_path)
    paths = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    for path, (dump, _) in zip(paths, found, strict=True):
        path.write_text(dump)
    dumps, errors = reading.read_all(paths)
    assert not errors and dumps[0].clock_error == 0.0 and dumps[1].clock_error > 0
    assert (dumps[1].wall - dumps[1].monotonic) - (dumps[0].wall - dumps[0].monotonic) > 4, "the clock that is ahead"
    assert abs(dumps[1].shift - dumps[0].shift) <= dumps[1].clock_error
