"""Damaged values in a store: on all ranks, one error names the key and the rank that wrote it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from group_ranks import DEADLINE

import ncclpy
import testing
from ncclpy.bootstrap import LocalStore, PrefixStore, StoreDamaged, StoreError
from ncclpy.process_group.check import shared_memory

pytestmark = pytest.mark.usefixtures("host_engine")


class Damaged(PrefixStore):
    """A store that replaces the values that one rank writes under keys with a given end."""

    def __init__(self, store, end, junk):
        super().__init__("damaged", store)
        self.end, self.junk, self.changed = end, junk, set()

    def change(self, key, value):
        if self.end is None or not key.endswith(self.end) or value is None:
            return value
        self.changed.add(key)
        return self.junk

    def _set(self, key, value, deadline):
        super()._set(key, self.change(key, value), deadline)

    def _set_ephemeral(self, key, value, deadline):
        super()._set_ephemeral(key, self.change(key, value), deadline)

    def _multi_set(self, items, deadline):
        super()._multi_set([(key, self.change(key, value)) for key, value in items], deadline)

    def _compare_set(self, key, expected, desired, deadline):
        return super()._compare_set(key, expected, self.change(key, desired), deadline)


def all_reduce(rank, store):
    with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2, check="always") as group:
        group.all_reduce(np.ones(2)).wait(DEADLINE)


def connect(rank, store):
    with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2) as group:
        group.connect()


def message(rank, store):
    with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2, check="always") as group:
        (group.recv if rank else group.send)(np.ones(2), 1 - rank).wait(DEADLINE)


def split(rank, store):
    with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2) as group:
        group.split(rank)


def recover(rank, store):
    with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2) as group:
        group.recover(DEADLINE / 4)


def reconfigure(rank, store):
    with ncclpy.ProcessGroup(store, rank, 2, device=rank, timeout=DEADLINE / 2) as group:
        store.set(f"handle {rank}", group.reconfigure_handle().encode())
        handles = [store.get(f"handle {each}").decode() for each in range(2)]
        group.reconfigure(handles, uuid="again")


def manager(rank, store):
    key = store.compare_set("key", None, ncclpy.Manager.generate_communicator_key())[1]
    with ncclpy.Manager(timeout=DEADLINE / 2, store=store) as manager:
        numbers = {"num_local": 1, "num_global": 2, "global_rank": rank, "communicator_key": key}
        work = manager.all_reduce("sum", np.ones(2), device=rank, **numbers)
        manager.signal_multi_node_ready("sum")
        work.wait(DEADLINE)


def coordinator(rank, store):
    with ncclpy.Coordinator((store, rank, 2), device=rank, timeout=DEADLINE / 2) as made:
        made.barrier("here").wait(DEADLINE)


# A program, the rank with the damaged value (None: both, as the first one sets it), the end of the key, the damaged
# value, and its writer in the error.
CASES = {
    "memory that is offered to all": (all_reduce, 1, "check/meeting/here/1", b"[]", "rank 1"),
    "whether that was opened": (all_reduce, 1, "check/opened/here/1", b"perhaps", "rank 1"),
    "what came of a meeting": (all_reduce, 0, "check/opened/outcome", b"+[1]", "rank 0"),
    "no outcome at all": (all_reduce, 0, "check/opened/outcome", b"?", "a rank"),
    "a unique id": (connect, 0, "communicator/all/here/0", b"short", "rank 0"),
    "how collectives are compared": (all_reduce, None, "options/check", b"{}", "a rank"),
    "memory that is offered to one": (message, 1, "offers/1", b'{"machine": 7, "fd": []}', "rank 1"),
    "a part": (split, 1, "split/0/here/1", b"7", "rank 1"),
    "who goes on": (recover, 0, "recover/0/decided", b'{"members": [1, 0]}', "a rank"),
    "whom a name stands for": (reconfigure, None, "ncclpy/reconfigure/again/handles", b"{}", "a rank"),
    "what one brings that goes on": (recover, 1, "the reconfiguration/here/1", b'{"finished": []}', "rank 1"),
    "a Manager's meeting": (manager, 0, "communicator/outcome", b"-[]", "a rank"),
    "where a coordinator listens": (coordinator, 1, "meet/here/1", b'{"machine": "here"}', "rank 1"),
}
# The same if two ranks cannot share memory.
STORED = {
    "what is brought to a collective": (all_reduce, 1, "check/0/1", b"+\x08\0\0\0", "rank 1"),
    "what is brought to a message": (message, 1, "check/pair '0:1'/0/1", b"\x01", "rank 1"),
}


def errors_of(program, damages, end, junk):
    """Return the error of each rank, and the keys that were damaged."""
    store = LocalStore()
    stores = [Damaged(store, end if damages in (rank, None) else None, junk) for rank in range(2)]

    def body(rank):
        with pytest.raises(ncclpy.NcclError) as found:
            program(rank.rank, stores[rank.rank])
        return found.value

    return testing.run_threads(2, body, DEADLINE), [key for each in stores for key in each.changed]


def check_errors(case):
    program, rank, end, junk, who = case
    errors, changed = errors_of(program, rank, end, junk)
    assert changed
    for error in errors:
        text = str(error).replace('"', "'")
        assert f"what {who} has put under '" in text
        assert f"{end}' cannot be read" in text
    # An error of a call after the group's end has the group's error as its cause.
    assert any(isinstance(each, StoreDamaged) for error in errors for each in (error, error.__cause__))


@pytest.mark.parametrize("kind", CASES)
def test_damaged_value_is_one_error_on_all_ranks(kind):
    check_errors(CASES[kind])


@pytest.mark.parametrize("kind", STORED)
def test_damaged_note_in_store_is_one_error_on_all_ranks(monkeypatch, kind):
    def refused(*_):
        raise OSError("another machine")

    monkeypatch.setattr(shared_memory, "attach_exchange", refused)
    monkeypatch.setattr(shared_memory, "attach_rings", refused)
    check_errors(STORED[kind])


@pytest.mark.parametrize(
    "end, junk, said",
    [
        (
            "replies/000000000001",
            b'{"handles": 3}',
            "what rank 0 has put under 'ncclpy/joining/default/replies/0+1'",
        ),
        ("replies/000000000001", b'{"handles": [], "uuid": "x"}', "has admitted others, and not this process"),
        ("asks/000000000001", b"\xff", "has not admitted this process: .* what a rank has put under"),
    ],
)
def test_joiner_gets_error_of_damaged_value(end, junk, said):
    store = LocalStore()
    over = threading.Event()

    def body(rank):
        if rank.rank == 1:
            with pytest.raises(ncclpy.NcclError, match=said):
                ncclpy.ProcessGroup.join(
                    Damaged(store, end if "asks" in end else None, junk), "default", timeout=DEADLINE / 2, device=1
                )
            over.set()
            return
        there = Damaged(store, end if "replies" in end else None, junk)
        with ncclpy.ProcessGroup(there, 0, 1, device=0, timeout=0.5) as group:
            while not over.wait(0.01):
                try:
                    group.admit()
                except ncclpy.NcclError:  # no rank has joined yet
                    break
            over.wait(DEADLINE)

    testing.run_threads(2, body, DEADLINE)


def test_unreadable_end_is_an_end():
    store = LocalStore()
    stores = [Damaged(store, None, b""), Damaged(store, "told/ended", b"[]")]
    meet = threading.Barrier(2)

    def body(rank):
        with ncclpy.ProcessGroup(stores[rank.rank], rank.rank, 2, device=rank.rank, timeout=DEADLINE / 2) as group:
            group.all_reduce(np.ones(2)).wait(DEADLINE)
            meet.wait(DEADLINE)
            if rank.rank == 1:
                group.abort("it is enough")
                return
            with pytest.raises(ncclpy.NcclAborted):
                group.all_reduce(np.ones(2)).wait(DEADLINE)

    testing.run_threads(2, body, DEADLINE)


def test_store_damaged_is_a_store_error():
    assert issubclass(StoreDamaged, StoreError)
