"""Keys of unusual classes: whatever they do, every work ends and other works are unaffected."""

from __future__ import annotations

import threading

import pytest
from manager_clients import DEADLINE, Data, check_usable, finish, one_error, some_devices

import ncclpy


class Changeable:
    """A key with a hash and a comparison set by the test."""

    def __init__(self):
        self.hashed = 7
        self.equal = lambda other: self is other
        self.shown = lambda: "changeable"

    def __hash__(self):
        return self.hashed() if callable(self.hashed) else self.hashed

    def __eq__(self, other):
        return self.equal(other)

    def __repr__(self):
        return self.shown()


def fail(*_):
    raise RuntimeError("of the key")


def leave(*_):
    raise SystemExit("of the key")


def test_equal_keys_of_different_types_are_one(manager):
    n = some_devices(2)
    data = Data(n)
    finish([manager.all_reduce((1, 1.0)[r % 2], data.input(r), device=r, num_local=n) for r in range(n)])


@pytest.mark.parametrize("later", [8, fail, leave], ids=["another one", "raises", "ends the program"])
def test_hash_that_changes_is_not_needed_again(make_manager, later):
    """Neither the end of gathering nor its timeout, of this and other keys, needs the hash again."""
    n = some_devices(2)
    manager = make_manager(timeout=0.3)
    data = Data(n)
    key, complete = Changeable(), Changeable()
    late = [manager.all_reduce(name, data.input(0), device=0, num_local=n) for name in (key, "other")]
    works = [manager.all_reduce(complete, data.input(r), device=r, num_local=n, timeout=DEADLINE) for r in range(n)]
    key.hashed = complete.hashed = later
    finish(works)
    for work in late:
        assert isinstance(work.exception(DEADLINE), ncclpy.NcclTimeout)
    assert manager.pending() == []


def test_comparison_that_raises_leaves_the_key_usable(manager):
    n = some_devices(2)
    data = Data(n)
    first, second = Changeable(), Changeable()
    works = [manager.all_reduce(first, data.input(r), device=r, num_local=n) for r in range(n - 1)]
    second.equal = first.equal = fail
    with pytest.raises(RuntimeError, match="of the key"):
        manager.all_reduce(second, data.input(0), device=0, num_local=n)
    with pytest.raises(RuntimeError, match="of the key"):
        manager.signal_multi_node_ready(second)
    assert len(manager.pending()) == 1
    works.append(manager.all_reduce(first, data.input(n - 1), device=n - 1, num_local=n))
    finish(works)


@pytest.mark.parametrize("shown", [fail, leave])
def test_key_with_a_failing_repr_is_shown_by_its_type(make_manager, shown):
    n = some_devices(2)
    manager = make_manager(timeout=0.3, warn_after=0.1)
    data, key = Data(n), Changeable()
    key.shown = shown
    late = manager.all_reduce(key, data.input(0), device=0, num_local=n)
    assert "Changeable object" in str(late.exception(DEADLINE))
    works = [manager.all_reduce(key, data.input(r), op=("sum", "max")[r % 2], device=r, num_local=n) for r in range(n)]
    assert "reduction operator" in str(one_error(works))
    ncclpy.recorder.dump()
    check_usable(manager, key, range(n))


def test_key_with_a_slow_repr_blocks_no_other_thread(manager):
    n = some_devices(2)
    data, key = Data(n), Changeable()
    go_on, asked = threading.Event(), threading.Event()

    def shown():
        asked.set()
        go_on.wait(DEADLINE)
        return "slow"

    key.shown = shown
    work = manager.all_reduce(key, data.input(0), device=0, num_local=n)
    dump = threading.Thread(target=ncclpy.recorder.dump, daemon=True)
    dump.start()
    assert asked.wait(DEADLINE)
    check_usable(manager, "other", range(n))
    go_on.set()
    dump.join(DEADLINE)
    rest = [manager.all_reduce(key, data.input(r), device=r, num_local=n) for r in range(1, n)]
    finish([work, *rest])


def test_key_that_aborts_in_its_repr(manager):
    """The key is shown when a message is read, and never while participants are added."""
    n = some_devices(2)
    data, key = Data(n), Changeable()
    key.shown = lambda: (manager.abort("by the key"), "key")[1]
    works = [manager.all_reduce(key, data.input(r), op=("sum", "max")[r % 2], device=r, num_local=n) for r in range(n)]
    error = one_error(works)
    check_usable(manager, "before", range(n))
    assert "do not agree on the reduction operator" in str(error) and str(error).startswith("key key: ")
    with pytest.raises(ncclpy.NcclAborted, match="by the key"):
        check_usable(manager, "aborted", range(n))
    manager.reset()
    assert manager.pending() == []
    check_usable(manager, "after", range(n))


def test_long_keys_are_cut_in_messages(manager):
    n = some_devices(2)
    data, other = Data(n), Data(n, 5)
    texts = []
    for end in "ab":
        key = "x" * 1_000_000 + end
        works = [manager.all_reduce(key, (data, other)[r % 2].input(r), device=r, num_local=n) for r in range(n)]
        texts.append(str(one_error(works)))
        assert "element count" in texts[-1] and len(texts[-1]) < 1000
    assert texts[0] != texts[1]


def test_integer_too_large_to_show_is_a_key(manager):
    n = some_devices(2)
    check_usable(manager, 10**5000, range(n))
    assert "<int object" in ncclpy.recorder.dump()
