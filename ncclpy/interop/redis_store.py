"""A redis server as a `Store`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ncclpy.bootstrap.local import summed
from ncclpy.bootstrap.store import Store, StoreError, StoreLost
from ncclpy.bootstrap.store_arguments import as_key

T = TypeVar("T")

#: The most seconds that a wait sleeps before it looks again, for keys set by other clients, and for signals.
_SLICE = 0.1
_CHANNEL = b"ncclpy/"

# Scripts, each of which changes one key in one step. A script that sets its key also wakes the clients that wait for
# the key.
_SET = "redis.call('SET', KEYS[1], ARGV[1]) redis.call('PUBLISH', ARGV[2], '') return 1"
_ADD = (
    "redis.call('INCRBY', KEYS[1], ARGV[1]) redis.call('PUBLISH', ARGV[2], '') "
    "return redis.call('GET', KEYS[1])"  # as text: numbers of Lua have 53 bits
)
_APPEND = "redis.call('APPEND', KEYS[1], ARGV[1]) redis.call('PUBLISH', ARGV[2], '') return 1"
# A first letter distinguishes an absent value from an empty one.
_COMPARE_SET = """
local found = redis.call('GET', KEYS[1])
local now = found and 'v' .. found or 'a'
if now ~= ARGV[1] then return {0, now} end
if ARGV[2] == 'a' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], string.sub(ARGV[2], 2))
  redis.call('PUBLISH', ARGV[3], '')
end
return {1, ARGV[2]}
"""


def adapt(obj: object) -> Store | None:
    """Return a store on a redis server; None if `obj` is not a client of redis-py."""
    from redis import Redis

    return RedisStore(obj) if isinstance(obj, Redis) else None


class RedisStore(Store):
    """Keep keys in a redis server, through connections of its own that are made like the client's.

    Keys and values are stored unchanged as strings of Redis, so that other programs can read them. A wait for a key
    ends at once when a `RedisStore` sets the key. As other clients announce nothing, a wait also reads its keys ten
    times a second.

    Parameters
    ----------
    client
        A ``redis.Redis``. Address, TLS, user and password are taken from it; whether it decodes answers does not
        matter.
    """

    def __init__(self, client: Any) -> None:
        from redis import Redis

        super().__init__()
        client_pool = client.connection_pool
        options = dict(client_pool.connection_kwargs, decode_responses=False)
        # If the client has no timeout, a call would never end while the server does not answer.
        options["socket_timeout"] = options.get("socket_timeout") or self.timeout
        options["socket_connect_timeout"] = options.get("socket_connect_timeout") or self.timeout
        host = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._shown = f"{host}/{options.get('db') or 0}"
        self._pool = type(client_pool)(connection_class=client_pool.connection_class, **options)
        self._redis: Any = Redis(connection_pool=self._pool)  # Any: what its methods return depends on its options
        self._scripts = {text: self._redis.register_script(text) for text in (_SET, _ADD, _APPEND, _COMPARE_SET)}

    def __repr__(self) -> str:
        return f"as_store(redis {self._shown})"

    def _ask(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call redis-py; its errors become errors of the store."""
        import redis

        if self._closed:
            raise StoreError(f"{self} was closed while it was in use")
        try:
            return call(*args, **options)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise StoreLost(f"{self}: {error}") from error
        except redis.RedisError as error:
            raise StoreError(f"{self}: {error}") from error
        except (ValueError, OSError, AttributeError) as error:
            if not self._closed:
                raise
            # redis-py raises these if a thread closes the store while another one reads.
            raise StoreError(f"{self} was closed while it was in use") from error

    def _change(self, script: str, key: str, *args: bytes) -> Any:
        name = _name(key)
        return self._ask(self._scripts[script], keys=[name], args=[*args, _CHANNEL + name])

    def _set(self, key: str, value: bytes, deadline: float) -> None:
        self._change(_SET, key, value)

    def _get(self, key: str, deadline: float) -> bytes | None:
        while True:
            value: bytes | None = self._ask(self._redis.get, _name(key))
            if value is not None or self._wait([key], deadline):
                return value

    def _add(self, key: str, number: int, deadline: float) -> int:
        try:
            return int(self._change(_ADD, key, b"%d" % number))
        except StoreError:
            summed(self, key, self._ask(self._redis.get, _name(key)), number)  # may raise a clearer error
            raise

    def _compare_set(
        self, key: str, expected: bytes | None, desired: bytes | None, deadline: float
    ) -> tuple[bool, bytes | None]:
        swapped, now = self._change(_COMPARE_SET, key, _marked(expected), _marked(desired))
        return bool(swapped), None if now == b"a" else now[1:]

    def _append(self, key: str, value: bytes, deadline: float) -> None:
        self._change(_APPEND, key, value)

    def _wait(self, keys: list[str], deadline: float) -> list[str]:
        missing = self._missing(keys)
        if not missing or time.monotonic() >= deadline:
            return missing
        # A connection of its own, so that a wait holds up no other call.
        with self._ask(self._redis.pubsub, ignore_subscribe_messages=True) as subscription:
            self._ask(subscription.subscribe, *(_CHANNEL + _name(key) for key in missing))
            while missing := self._missing(missing):
                rest = deadline - time.monotonic()
                if rest <= 0:
                    break
                self._ask(subscription.get_message, timeout=min(rest, _SLICE))
        return missing

    def _missing(self, keys: list[str]) -> list[str]:
        pipe = self._redis.pipeline(transaction=False)
        unique = list(dict.fromkeys(keys))
        for key in unique:
            pipe.exists(_name(key))
        return [key for key, there in zip(unique, self._ask(pipe.execute), strict=True) if not there]

    def _check(self, keys: list[str], deadline: float) -> bool:
        unique = {_name(key) for key in keys}
        return not unique or self._ask(self._redis.exists, *unique) == len(unique)

    def _delete(self, key: str, deadline: float) -> bool:
        return bool(self._ask(self._redis.delete, _name(key)))

    def _keys(self, prefix: str, deadline: float) -> list[str]:
        pattern = b"".join(b"\\" + bytes([each]) if each in b"*?[]\\^-" else bytes([each]) for each in _name(prefix))
        found = self._ask(lambda: set(self._redis.scan_iter(match=pattern + b"*", count=1000)))
        return [name.decode("utf-8", "surrogatepass") for name in found]

    def _close(self) -> None:
        """Close the connections; waiting threads see it at their next read, or by an error."""
        self._pool.disconnect()


def _name(key: str) -> bytes:
    return as_key(key).encode("utf-8", "surrogatepass")


def _marked(value: bytes | None) -> bytes:
    return b"a" if value is None else b"v" + value
