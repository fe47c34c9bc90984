"""Sources with which a store's client answers questions by itself: their ends and lifetimes."""

import gc
import json

from ncclpy.bootstrap import LocalStore, PrefixStore, TCPStore
from ncclpy.engine.recorder import OpLog


class Source:
    """A source that counts the ends of its instances in `gone`."""

    gone = 0

    def __init__(self):
        self.oplog = OpLog()

    def source(self):
        return self.oplog.source()

    def __del__(self):
        Source.gone += 1


def heard(store, key, asked, seconds=20.0):
    """Ask, and return the answer, or None if none arrives within `seconds`."""
    store.delete(key)
    store.add(asked)
    try:
        return store.get(key, seconds)
    except TimeoutError:
        return None


def test_source_answers_questions_until_closed():
    with TCPStore("127.0.0.1", 0, serve=True) as store, TCPStore("127.0.0.1", store.port) as other:
        telling = PrefixStore("here", store)._publish_status("key", b',"more":1}', "asked", Source())
        for _ in range(2):
            assert json.loads(heard(other, "here/key", "here/asked"))["more"] == 1
        telling.close()
        telling.close()
        assert heard(other, "here/key", "here/asked", 0.5) is None


def test_source_dropped_in_cycle_answers_no_more():
    before = Source.gone
    with TCPStore("127.0.0.1", 0, serve=True) as store, TCPStore("127.0.0.1", store.port) as other:
        cycle = [store._publish_status("key", b"}", "asked", Source())]
        cycle.append(cycle)
        assert heard(other, "key", "asked")
        del cycle
        gc.collect()
        assert Source.gone == before + 1, "its source goes with it"
        assert heard(other, "key", "asked", 0.25) is None


def test_source_ends_with_its_client():
    with TCPStore("127.0.0.1", 0, serve=True) as store:
        other = TCPStore("127.0.0.1", store.port)
        telling = other._publish_status("key", b"}", "asked", Source())
        assert heard(store, "key", "asked")
        other.close()
        assert heard(store, "key", "asked", 0.25) is None
        telling.close()


def test_store_without_thread_has_no_source():
    assert LocalStore()._publish_status("key", b"}", "asked", Source()) is None
